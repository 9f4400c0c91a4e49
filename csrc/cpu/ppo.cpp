// The policy loss on the CPU, in double. Pieces (or sequences) in parallel; their sums are added in order.
#include "../math/ppo.h"

#include "../operators.h"
#include "../ppo_tensors.h"

namespace {

using Sums = double[PPO_SUMS];

// One piece of tokens, or one sequence.
template <class X>
void piece_of(const PpoTokens<X>& tokens, int64_t begin, int64_t end, Sums& sums) {
  double log_ratio = 0, behavior = 0, count = 0, known = 0;
  const bool by_sequence = tokens.bounds != nullptr;
  for (int64_t i = begin; i < end && by_sequence; i++) {
    if (!tokens.mask[i]) continue;
    auto token = tokens.template token<double>(i);
    log_ratio += token.log_ratio, count += 1;
    add_behavior(token.behavior_log_ratio, behavior, known);
  }
  log_ratio /= count > 0 ? count : 1, behavior /= known > 0 ? known : 1;
  for (int64_t i = begin; i < end; i++) {
    const bool trained = tokens.mask[i];
    tokens.grad_entropy[i] = trained ? X(tokens.entropy_slope(tokens.template row_weight<double>(i))) : X(0);
    tokens.grad_logprobs[i] =
        trained ? X(ppo_token<X>(tokens.options, tokens.template token<double>(i), log_ratio, behavior, sums)) : X(0);
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> ppo_loss(
    Tensor logprobs, OptionalTensor proximal, OptionalTensor behavior, Tensor advantages, Tensor mask,
    OptionalTensor ref, OptionalTensor entropy, OptionalTensor row_weights, OptionalTensor cu_seqlens,
    std::vector<double> options) {
  PpoResults results(logprobs);
  with_stored_type<float, double>(logprobs, "logprobs", [&]<class X>(X) {
    PpoTokens<X> tokens = ppo_tokens<X>(
        logprobs, proximal, behavior, advantages, mask, ref, entropy, row_weights, cu_seqlens, options, results);
    if (cu_seqlens) checked_bounds(*cu_seqlens, tokens.count);
    const int64_t pieces = cu_seqlens ? cu_seqlens->numel() - 1 : ppo_pieces(tokens.count);
    std::vector<double> sums(pieces * PPO_SUMS, 0.0);
    torch::stable::parallel_for(0, pieces, 4096 * pieces / (tokens.count + 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; p++) {
        int64_t start = tokens.bounds ? tokens.bounds[p] : p * PPO_PIECE;
        int64_t stop = tokens.bounds ? tokens.bounds[p + 1] : std::min(start + PPO_PIECE, tokens.count);
        piece_of(tokens, start, stop, *reinterpret_cast<Sums*>(&sums[p * PPO_SUMS]));
      }
    });
    double* total = static_cast<double*>(results.sums.data_ptr());
    for (int i = 0; i < PPO_SUMS; i++) total[i] = 0;
    for (int64_t i = 0; i < pieces * PPO_SUMS; i++) total[i % PPO_SUMS] += sums[i];
    *static_cast<X*>(results.loss.data_ptr()) = X(total[SUM_LOSS]);
  });
  return results.all();
}
