// Tensors in, launches out: the CUDA side of the checksums of weights.
#include "../kernels/checksum.cuh"

#include "../operators.h"
#include "stream.h"

namespace {

std::vector<TensorBytes> bytes_of(const std::vector<Tensor>& tensors) {
  std::vector<TensorBytes> found;
  for (const Tensor& tensor : tensors) {
    check_devices({"tensors[0]", tensors[0]}, {{"another of the tensors", tensor}});
    found.push_back({static_cast<const uint8_t*>(tensor.data_ptr()), nbytes_of(tensor)});
  }
  return found;
}

}  // namespace

Tensor word_sums(std::vector<Tensor> tensors) {
  if (tensors.empty()) refuse("tensors is empty: there is no device to compute on");
  const std::vector<TensorBytes> given = bytes_of(tensors);
  OnDeviceOf device({"tensors", tensors[0]}, {});
  int64_t count = 0;
  for (const TensorBytes& tensor : given) count += count_of_word_sums(tensor.nbytes);
  Tensor sums = new_tensor(tensors[0], {count}, ScalarType::Long);
  launch_word_sums(given, static_cast<uint64_t*>(sums.data_ptr()), device.stream);
  return sums;
}

Tensor tile_hashes(
    std::vector<Tensor> parts, std::vector<int64_t> counts, std::vector<int64_t> begins, std::vector<int64_t> wholes) {
  if (parts.empty()) refuse("parts is empty: there is no device to compute on");
  if (begins.size() != counts.size() || wholes.size() != counts.size()) {
    refuse("counts, begins and wholes have ", counts.size(), ", ", begins.size(), " and ", wholes.size(), " numbers");
  }
  const std::vector<TensorBytes> given = bytes_of(parts);
  OnDeviceOf device({"parts", parts[0]}, {});
  std::vector<TensorSlice> slices;
  size_t part = 0;
  for (size_t i = 0; i < counts.size(); i++) {
    if (counts[i] < 1 || counts[i] > 96) refuse("counts has ", counts[i], ": a tensor has 1 to 96 parts");
    int64_t end = begins[i];
    for (int64_t k = 0; k < counts[i]; k++, part++) end += part < given.size() ? given[part].nbytes : 0;
    if (begins[i] < 0 || begins[i] % HASH_TILE_BYTES || end > wholes[i] ||
        (end % HASH_TILE_BYTES && end < wholes[i])) {
      refuse("bytes ", begins[i], " to ", end, " of ", wholes[i], ": a slice is of whole tiles of ", HASH_TILE_BYTES);
    }
    slices.push_back({counts[i], begins[i], wholes[i]});
  }
  if (part != given.size()) refuse("counts add up to ", part, " for ", given.size(), " parts");
  Tensor sums = new_tensor(parts[0], {int64_t(counts.size())}, ScalarType::Long);
  launch_tile_hashes(given, slices, static_cast<uint64_t*>(sums.data_ptr()), device.stream);
  return sums;
}
