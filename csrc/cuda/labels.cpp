// Tensors in, launches out: the CUDA side of packed labels. Bounds are not read here; packing has checked them.
#include "../kernels/labels.cuh"

#include "../operators.h"
#include "stream.h"

std::tuple<Tensor, Tensor, Tensor> packed_labels(Tensor input_ids, Tensor cu_seqlens, OptionalTensor loss_mask) {
  OnDeviceOf device({"input_ids", input_ids}, {{"cu_seqlens", cu_seqlens}, {"loss_mask", loss_mask}});
  const int64_t tokens = input_ids.numel();
  PackedTokens packed = {
      tokens,
      cu_seqlens.numel() - 1,
      elements<int64_t>(input_ids, "input_ids", tokens),
      elements<int64_t>(cu_seqlens, "cu_seqlens", cu_seqlens.numel()),
      elements_or_null<bool>(loss_mask, "loss_mask", tokens),
  };
  auto column = [&] { return new_tensor(input_ids, {tokens}, ScalarType::Long); };
  Tensor labels = column(), positions = column(), sequence_ids = column();
  auto data = [](const Tensor& tensor) { return static_cast<int64_t*>(tensor.data_ptr()); };
  launch_labels(packed, data(labels), data(positions), data(sequence_ids), device.stream);
  return {labels, positions, sequence_ids};
}
