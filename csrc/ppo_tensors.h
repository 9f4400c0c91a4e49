// The tensors of ppo_loss, checked and as pointers; for both devices.
#pragma once

#include "math/ppo.h"
#include "tensors.h"

struct PpoResults {
  Tensor loss, sums, grad_logprobs, grad_entropy;

  explicit PpoResults(const Tensor& logprobs)
      : loss(new_tensor(logprobs, {}, logprobs.scalar_type())),
        sums(new_tensor(logprobs, {PPO_SUMS}, ScalarType::Double)),
        grad_logprobs(new_tensor(logprobs, {logprobs.numel()}, logprobs.scalar_type())),
        grad_entropy(new_tensor(logprobs, {logprobs.numel()}, logprobs.scalar_type())) {}

  std::tuple<Tensor, Tensor, Tensor, Tensor> all() const { return {loss, sums, grad_logprobs, grad_entropy}; }
};

template <class X>
PpoTokens<X> ppo_tokens(
    const Tensor& logprobs, const OptionalTensor& proximal, const OptionalTensor& behavior, const Tensor& advantages,
    const Tensor& mask, const OptionalTensor& ref, const OptionalTensor& entropy, const OptionalTensor& row_weights,
    const OptionalTensor& cu_seqlens, const std::vector<double>& options, const PpoResults& results) {
  const int64_t count = logprobs.numel();
  if (options.size() != PPO_OPTIONS) refuse("options has ", options.size(), " numbers: ", PPO_OPTIONS, " are needed");
  PpoTokens<X> tokens = {
      count,
      elements<X>(logprobs, "logprobs", count),
      elements<X>(proximal ? *proximal : logprobs, "proximal_logprobs", count),
      elements_or_null<X>(behavior, "behavior_logprobs", count),
      elements<X>(advantages, "advantages", count),
      elements<X>(ref ? *ref : logprobs, "ref_logprobs", count),
      elements_or_null<X>(entropy, "entropy", count),
      elements_or_null<X>(row_weights, "row_weights", count),
      elements<bool>(mask, "mask", count),
      cu_seqlens ? elements<int64_t>(*cu_seqlens, "cu_seqlens", cu_seqlens->numel()) : nullptr,
      {},
      static_cast<X*>(results.grad_logprobs.data_ptr()),
      static_cast<X*>(results.grad_entropy.data_ptr()),
  };
  memcpy(&tokens.options, options.data(), sizeof(PpoOptions));
  return tokens;
}
