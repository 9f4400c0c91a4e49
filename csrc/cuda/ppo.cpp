// Tensors in, launches out: the CUDA side of the policy loss.
#include "../kernels/ppo.cuh"

#include "../operators.h"
#include "../ppo_tensors.h"
#include "stream.h"

std::tuple<Tensor, Tensor, Tensor, Tensor> ppo_loss(
    Tensor logprobs, OptionalTensor proximal, OptionalTensor behavior, Tensor advantages, Tensor mask,
    OptionalTensor ref, OptionalTensor entropy, OptionalTensor row_weights, OptionalTensor cu_seqlens,
    std::vector<double> options) {
  OnDeviceOf device(
      {"logprobs", logprobs},
      {{"proximal_logprobs", proximal}, {"behavior_logprobs", behavior}, {"advantages", advantages}, {"mask", mask},
       {"ref_logprobs", ref}, {"entropy", entropy}, {"row_weights", row_weights}, {"cu_seqlens", cu_seqlens}});
  PpoResults results(logprobs);
  PpoTokens<float> tokens = ppo_tokens<float>(
      logprobs, proximal, behavior, advantages, mask, ref, entropy, row_weights, cu_seqlens, options, results);
  const int64_t sequences = cu_seqlens ? cu_seqlens->numel() - 1 : 0;
  Tensor scratch = new_tensor(logprobs, {ppo_scratch(tokens.count, sequences)}, ScalarType::Float);
  launch_ppo(
      tokens, sequences, static_cast<float*>(scratch.data_ptr()), static_cast<float*>(results.loss.data_ptr()),
      static_cast<double*>(results.sums.data_ptr()), device.stream);
  return results.all();
}
