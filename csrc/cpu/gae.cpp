// Packed GAE on the CPU: sequences in parallel, tokens of one from its end.
#include "../math/gae.h"

#include "../operators.h"

std::tuple<Tensor, Tensor> packed_gae(
    Tensor rewards, Tensor values, Tensor mask, Tensor cu_seqlens, OptionalTensor bootstrap, double discount,
    double trace_decay) {
  const int64_t tokens = rewards.numel(), sequences = cu_seqlens.numel() - 1;
  const int64_t* bounds = checked_bounds(cu_seqlens, tokens);
  const bool* trained = elements<bool>(mask, "mask", tokens);
  Tensor advantages = new_tensor(values, {tokens}, values.scalar_type());
  Tensor returns = new_tensor(values, {tokens}, values.scalar_type());
  with_stored_type<float, double>(values, "values", [&]<class X>(X) {
    const X* reward = elements<X>(rewards, "rewards", tokens);
    const X* value = elements<X>(values, "values", tokens);
    const X* after = elements_or_null<X>(bootstrap, "bootstrap", sequences);
    X* advantage = static_cast<X*>(advantages.data_ptr());
    X* target = static_cast<X*>(returns.data_ptr());
    // A thread for every 65,536 tokens, a seventh of a millisecond's work: waiting for a busy core would take longer.
    const int64_t grain = 65536 * sequences / (tokens + 1) + 1;
    torch::stable::parallel_for(0, sequences, grain, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; s++) {
        double later = after ? double(after[s]) : 0.0;
        for (int64_t t = bounds[s + 1] - 1; t >= bounds[s]; t--) {
          advantage[t] = target[t] = X(0);
          if (!trained[t]) continue;
          const double found = gae_advantage(reward[t], value[t], discount, later);
          advantage[t] = X(found), target[t] = X(found + double(value[t]));
          later = gae_apply(gae_token(reward[t], value[t], discount, trace_decay), later);
        }
      }
    });
  });
  return {advantages, returns};
}
