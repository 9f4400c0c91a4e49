// The operators as C++ functions. cpu/ and cuda/ define the same set, and register it with the macro below.
#pragma once

#include "tensors.h"

Tensor logprob_partials(
    Tensor logits, Tensor labels, double temperature, OptionalTensor temperatures, int64_t vocab_start, int64_t columns,
    bool with_entropy);
Tensor logprob_fold(Tensor partials, Tensor labels, double temperature, OptionalTensor temperatures);
std::tuple<Tensor, Tensor, Tensor, Tensor> logprob_finish(
    Tensor logits, Tensor partials, Tensor labels, double temperature, OptionalTensor temperatures, int64_t vocab_start,
    int64_t columns, int64_t vocab_size, bool inplace_backward);
void logprob_grad_into(
    Tensor out, Tensor logits, Tensor labels, Tensor peak, Tensor log_sum, Tensor entropy, OptionalTensor grad_logprobs,
    OptionalTensor grad_entropy, double temperature, OptionalTensor temperatures, int64_t vocab_start, int64_t columns);

inline Tensor logprob_grad(
    Tensor logits, Tensor labels, Tensor peak, Tensor log_sum, Tensor entropy, OptionalTensor grad_logprobs,
    OptionalTensor grad_entropy, double temperature, OptionalTensor temperatures, int64_t vocab_start, int64_t columns) {
  Tensor out = new_tensor(logits, {logits.size(0), logits.size(1)}, logits.scalar_type());
  logprob_grad_into(
      out, logits, labels, peak, log_sum, entropy, grad_logprobs, grad_entropy, temperature, temperatures, vocab_start,
      columns);
  return out;
}

inline void logprob_grad_(
    Tensor logits, Tensor labels, Tensor peak, Tensor log_sum, Tensor entropy, OptionalTensor grad_logprobs,
    OptionalTensor grad_entropy, double temperature, OptionalTensor temperatures, int64_t vocab_start, int64_t columns) {
  logprob_grad_into(
      logits, logits, labels, peak, log_sum, entropy, grad_logprobs, grad_entropy, temperature, temperatures,
      vocab_start, columns);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ppo_loss(
    Tensor logprobs, OptionalTensor proximal, OptionalTensor behavior, Tensor advantages, Tensor mask,
    OptionalTensor ref, OptionalTensor entropy, OptionalTensor row_weights, OptionalTensor cu_seqlens,
    std::vector<double> options);
std::tuple<Tensor, Tensor> packed_gae(
    Tensor rewards, Tensor values, Tensor mask, Tensor cu_seqlens, OptionalTensor bootstrap, double discount,
    double trace_decay);
std::tuple<Tensor, Tensor, Tensor> packed_labels(Tensor input_ids, Tensor cu_seqlens, OptionalTensor loss_mask);
Tensor word_sums(std::vector<Tensor> tensors);

inline void implement_operators(torch::stable::detail::StableLibrary& library) {
  library.impl("logprob_partials", TORCH_BOX(&logprob_partials));
  library.impl("logprob_fold", TORCH_BOX(&logprob_fold));
  library.impl("logprob_finish", TORCH_BOX(&logprob_finish));
  library.impl("logprob_grad", TORCH_BOX(&logprob_grad));
  library.impl("logprob_grad_into", TORCH_BOX(&logprob_grad_into));
  library.impl("logprob_grad_", TORCH_BOX(&logprob_grad_));
  library.impl("packed_labels", TORCH_BOX(&packed_labels));
  library.impl("ppo_loss", TORCH_BOX(&ppo_loss));
  library.impl("packed_gae", TORCH_BOX(&packed_gae));
  library.impl("word_sums", TORCH_BOX(&word_sums));
}
