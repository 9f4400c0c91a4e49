// Labels, positions and sequence numbers of packed rows on the CPU.
#include "../operators.h"

std::tuple<Tensor, Tensor, Tensor> packed_labels(Tensor input_ids, Tensor cu_seqlens, OptionalTensor loss_mask) {
  const int64_t tokens = input_ids.numel(), sequences = cu_seqlens.numel() - 1;
  const int64_t* ids = elements<int64_t>(input_ids, "input_ids", tokens);
  const int64_t* bounds = checked_bounds(cu_seqlens, tokens);
  const bool* trained = elements_or_null<bool>(loss_mask, "loss_mask", tokens);
  auto column = [&] { return new_tensor(input_ids, {tokens}, ScalarType::Long); };
  Tensor labels = column(), positions = column(), sequence_ids = column();
  auto data = [](const Tensor& tensor) { return static_cast<int64_t*>(tensor.data_ptr()); };
  for (int64_t s = 0; s < sequences; s++) {
    for (int64_t t = bounds[s]; t < bounds[s + 1]; t++) {
      const bool has_label = t + 1 < bounds[s + 1] && (!trained || trained[t + 1]);
      data(labels)[t] = has_label ? ids[t + 1] : -100;
      data(positions)[t] = t - bounds[s];
      data(sequence_ids)[t] = s;
    }
  }
  return {labels, positions, sequence_ids};
}
