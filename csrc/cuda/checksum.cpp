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

Tensor tile_hashes(std::vector<Tensor> parts, std::vector<int64_t> counts) {
  if (parts.empty()) refuse("parts is empty: there is no device to compute on");
  const std::vector<TensorBytes> given = bytes_of(parts);
  OnDeviceOf device({"parts", parts[0]}, {});
  int64_t all = 0;
  for (int64_t count : counts) {
    if (count < 1 || count > 96) refuse("counts has ", count, ": a tensor has 1 to 96 parts");
    all += count;
  }
  if (all != int64_t(parts.size())) refuse("counts add up to ", all, " for ", parts.size(), " parts");
  Tensor sums = new_tensor(parts[0], {int64_t(counts.size())}, ScalarType::Long);
  launch_tile_hashes(given, counts, static_cast<uint64_t*>(sums.data_ptr()), device.stream);
  return sums;
}
