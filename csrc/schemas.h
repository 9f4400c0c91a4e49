// The operators' signatures, one place for every library that implements them. Python documents them in megatron_rl/ops.
#pragma once

#include <torch/csrc/stable/library.h>

inline void define_operators(torch::stable::detail::StableLibrary& library) {
  library.def(
      "logprob_partials(Tensor logits, Tensor labels, float temperature, Tensor? temperatures, int vocab_start, "
      "int columns, bool with_entropy=True) -> Tensor");
  library.def("logprob_fold(Tensor partials, Tensor labels, float temperature, Tensor? temperatures) -> Tensor");
  library.def(
      "logprob_finish(Tensor logits, Tensor partials, Tensor labels, float temperature, Tensor? temperatures, "
      "int vocab_start, int columns, int vocab_size, bool inplace_backward) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "logprob_grad(Tensor logits, Tensor labels, Tensor peak, Tensor log_sum, Tensor entropy, Tensor? grad_logprobs, "
      "Tensor? grad_entropy, float temperature, Tensor? temperatures, int vocab_start, int columns) -> Tensor");
  library.def(
      "logprob_grad_into(Tensor(a!) out, Tensor logits, Tensor labels, Tensor peak, Tensor log_sum, Tensor entropy, "
      "Tensor? grad_logprobs, Tensor? grad_entropy, float temperature, Tensor? temperatures, int vocab_start, "
      "int columns) -> ()");
  library.def(
      "logprob_grad_(Tensor(a!) logits, Tensor labels, Tensor peak, Tensor log_sum, Tensor entropy, "
      "Tensor? grad_logprobs, Tensor? grad_entropy, float temperature, Tensor? temperatures, int vocab_start, "
      "int columns) -> ()");
  library.def(
      "packed_labels(Tensor input_ids, Tensor cu_seqlens, Tensor? loss_mask) -> (Tensor, Tensor, Tensor)");
  library.def(
      "ppo_loss(Tensor logprobs, Tensor? proximal_logprobs, Tensor? behavior_logprobs, Tensor advantages, Tensor mask, "
      "Tensor? ref_logprobs, Tensor? entropy, Tensor? row_weights, Tensor? cu_seqlens, float[] options) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "packed_gae(Tensor rewards, Tensor values, Tensor mask, Tensor cu_seqlens, Tensor? bootstrap, float discount, "
      "float trace_decay) -> (Tensor, Tensor)");
  library.def("word_sums(Tensor[] tensors) -> Tensor");
  library.def("tile_hashes(Tensor[] parts, int[] counts, int[] begins, int[] wholes) -> Tensor");  // on CUDA alone
}
