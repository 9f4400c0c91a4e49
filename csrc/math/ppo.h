// The policy loss of one token, its slope and its statistics. Everything is in log-probabilities and nats.
#pragma once

#include "numbers.h"

enum PpoMode { PPO_CLIP, PPO_CISPO, PPO_SAPO, PPO_REINFORCE };
enum PpoBehavior { BEHAVIOR_OFF, BEHAVIOR_MASK, BEHAVIOR_CLAMP };

// What megatron_rl/ops/ppo.py packs, in this order, all as doubles.
struct PpoOptions {
  double mode, sequence_ratio, clip_low, clip_high, dual_clip, behavior, behavior_by_sequence, behavior_low,
      behavior_high, kl_estimator, kl_weighted, kl_coefficient, entropy_coefficient, sapo_positive, sapo_negative, scale;
};
constexpr int PPO_OPTIONS = sizeof(PpoOptions) / sizeof(double);

// Sums over trained tokens, in the order of PPO_SUMS in megatron_rl/ops/ppo.py.
enum PpoSum {
  SUM_LOSS, SUM_TOKENS, SUM_CLIPPED, SUM_DUAL_CLIPPED, SUM_DROPPED, SUM_RATIO, SUM_RATIO_DEVIATION, SUM_KL_K1,
  SUM_KL_K2, SUM_KL_K3, SUM_BEHAVIOR_WEIGHT, SUM_BEHAVIOR_MISMATCH, SUM_BEHAVIOR_LOG_RATIO, SUM_REFERENCE_KL,
  SUM_ENTROPY, SUM_LOGPROBS, SUM_CLIPPED_LOGPROBS, SUM_BOUNDED, SUM_NOT_FINITE, SUM_SQUARED_GRADIENT, PPO_SUMS
};

// A log ratio is moved to this distance from 0 before it is exponentiated, and has no slope beyond it: LOG_RATIO_BOUND
// in megatron_rl/ops/reference.py.
constexpr double LOG_RATIO_BOUND = 20;

template <class T>
struct PpoToken {
  T logprob, log_ratio, behavior_log_ratio, advantage, ref_logprob, entropy, row_weight;
};

// e^-d - 1 + d and its slope, d = log p - log q. By series near 0, where the three terms cancel.
template <class T>
HD void k3(T d, T& value, T& slope) {
  if (d < T(0.03) && d > T(-0.03)) {
    value = d * d * (T(1) / 2 - d * (T(1) / 6 - d * (T(1) / 24 - d * (T(1) / 120 - d * (T(1) / 720)))));
    slope = d * (T(1) - d * (T(1) / 2 - d * (T(1) / 6 - d * (T(1) / 24 - d * (T(1) / 120 - d * (T(1) / 720))))));
  } else {
    T e = exp(-d);
    value = e - T(1) + d, slope = T(1) - e;
  }
}

template <class T>
HD bool is_finite(T x) {
  return x - x == T(0);
}

// For statistics: a token without a finite log p(proximal) - log p(behaviour) is counted, and in no mean.
template <class T>
HD T finite_or_zero(T x) {
  return is_finite(x) ? x : T(0);
}

// What a token adds to its sequence's sum of log p(proximal) - log p(behaviour), and to the number of tokens in it.
// Infinite ones count as such. NaN says nothing of the others: it is left out.
template <class T>
HD void add_behavior(T log_ratio, T& sum, T& count) {
  if (log_ratio == log_ratio) sum += log_ratio, count += T(1);
}

// x within LOG_RATIO_BOUND; is_beyond becomes true where it is not, and stays where it is. NaN stays NaN.
template <class T>
HD T bound(T x, bool& is_beyond) {
  const T most = T(LOG_RATIO_BOUND), kept = x > most ? most : x < -most ? -most : x;
  is_beyond |= kept != x && x == x;
  return kept;
}

// Returns d loss / d logprob, to be stored as X. With sequence_ratio the ratio's value is the sequence's and its slope
// the token's own (GSPO-token, arXiv 2507.18071): a token's advantage and weight move that token only.
template <class X, class T>
HD T ppo_token(
    const PpoOptions& o, const PpoToken<T>& t, T sequence_log_ratio, T sequence_behavior, T (&sums)[PPO_SUMS]) {
  bool ratio_is_bounded = false, own_is_bounded = false, other_is_bounded = false;
  const T own_log_ratio = bound(t.log_ratio, own_is_bounded);
  const T log_ratio = o.sequence_ratio ? bound(sequence_log_ratio, ratio_is_bounded) : own_log_ratio;
  if (!o.sequence_ratio) ratio_is_bounded = own_is_bounded;
  const T ratio = exp(log_ratio), low = T(1 - o.clip_low), high = T(1 + o.clip_high);
  const T bounded = ratio < low ? low : ratio > high ? high : ratio;
  T loss = 0, by_ratio = 0, direct = 0;
  bool clipped = false, dual_clipped = false;
  if (o.mode == PPO_CLIP) {
    T plain = -t.advantage * ratio, cut = -t.advantage * bounded;
    clipped = cut > plain;
    loss = clipped ? cut : plain, by_ratio = clipped ? T(0) : plain;
    if (o.dual_clip > 0 && t.advantage < T(0) && loss > -T(o.dual_clip) * t.advantage) {
      dual_clipped = true;
      loss = -T(o.dual_clip) * t.advantage, by_ratio = T(0);
    }
  } else if (o.mode == PPO_CISPO) {
    clipped = bounded != ratio;
    loss = -bounded * t.advantage * t.logprob, direct = -bounded * t.advantage;
  } else if (o.mode == PPO_SAPO) {
    T steepness = T(t.advantage > T(0) ? o.sapo_positive : o.sapo_negative);
    T gate = T(1) / (T(1) + exp(-steepness * (ratio - T(1))));
    loss = -t.advantage * gate * T(4) / steepness;
    by_ratio = -t.advantage * T(4) * gate * (T(1) - gate) * ratio;
  } else {
    loss = -t.advantage * t.logprob, direct = -t.advantage;
  }
  if (ratio_is_bounded) by_ratio = T(0);

  T weight = 1;
  const T behavior = finite_or_zero(t.behavior_log_ratio);
  if (o.behavior != BEHAVIOR_OFF) {
    // +inf and -inf are bounded like other large log ratios. NaN has no side, and its token no weight.
    const bool is_own = !o.behavior_by_sequence || t.behavior_log_ratio != t.behavior_log_ratio;
    weight = exp(bound(is_own ? t.behavior_log_ratio : sequence_behavior, other_is_bounded));
    const bool outside = !(weight >= T(o.behavior_low) && weight <= T(o.behavior_high));
    if (outside) sums[SUM_DROPPED] += T(1);
    if (outside && (o.behavior == BEHAVIOR_MASK || weight != weight)) weight = T(0);
    else if (outside) weight = T(weight < T(o.behavior_low) ? o.behavior_low : o.behavior_high);
    // A dropped token adds nothing, even where its loss is not finite.
    loss = weight == T(0) ? T(0) : loss * weight;
    by_ratio = weight == T(0) ? T(0) : by_ratio * weight;
    direct = weight == T(0) ? T(0) : direct * weight;
  }

  if (o.kl_coefficient > 0) {
    const T d = t.logprob - t.ref_logprob;
    T kl = d, slope = 1;
    if (o.kl_estimator == 2) kl = d * d / T(2), slope = d;
    if (o.kl_estimator == 3) {
      const bool is_beyond = d < T(-LOG_RATIO_BOUND);  // above, e^-d has no need of it
      k3(is_beyond ? T(-LOG_RATIO_BOUND) : d, kl, slope);
      if (is_beyond) other_is_bounded = true, slope = T(0);
    }
    if (o.kl_weighted) {  // ratio * kl: unbiased under the proximal policy's samples
      const T own = exp(own_log_ratio);
      slope = own * (own_is_bounded ? slope : slope + kl), kl = own * kl;
    }
    loss += T(o.kl_coefficient) * kl, direct += T(o.kl_coefficient) * slope;
    sums[SUM_REFERENCE_KL] += kl;
  }
  loss -= T(o.entropy_coefficient) * t.entropy;
  const T scale = T(o.scale) * t.row_weight, gradient = by_ratio * scale + direct * scale;

  T divergence, unused;
  k3(-own_log_ratio, divergence, unused);  // of (proximal || policy), whose tokens these are
  sums[SUM_LOSS] += loss * scale;
  sums[SUM_TOKENS] += T(1);
  sums[SUM_CLIPPED] += T(clipped);
  sums[SUM_DUAL_CLIPPED] += T(dual_clipped);
  sums[SUM_RATIO] += ratio;
  sums[SUM_RATIO_DEVIATION] += ratio > T(1) ? ratio - T(1) : T(1) - ratio;
  sums[SUM_KL_K1] -= own_log_ratio;
  sums[SUM_KL_K2] += own_log_ratio * own_log_ratio / T(2);
  sums[SUM_KL_K3] += divergence;
  sums[SUM_BEHAVIOR_WEIGHT] += weight;
  sums[SUM_BEHAVIOR_MISMATCH] += behavior < T(0) ? -behavior : behavior;
  sums[SUM_BEHAVIOR_LOG_RATIO] += behavior;
  sums[SUM_ENTROPY] += t.entropy;
  sums[SUM_LOGPROBS] += t.logprob;
  if (clipped) sums[SUM_CLIPPED_LOGPROBS] += t.logprob;
  if (ratio_is_bounded || own_is_bounded || other_is_bounded) sums[SUM_BOUNDED] += T(1);
  // What is stored counts: X may overflow where T does not.
  const bool is_stored = is_finite(X(loss * scale)) && is_finite(X(gradient));
  if (behavior != t.behavior_log_ratio || !is_stored) sums[SUM_NOT_FINITE] += T(1);
  sums[SUM_SQUARED_GRADIENT] += gradient * gradient;
  return gradient;
}

// Where a token's numbers are. proximal and ref are logprobs where there are none: ratio 1. behavior null: no mismatch.
// row_weights null: every row counts once.
template <class X>
struct PpoTokens {
  int64_t count;
  const X *logprobs, *proximal, *behavior, *advantages, *ref, *entropy, *row_weights;
  const bool* mask;
  const int64_t* bounds;  // [B + 1] where something is by sequence, else null
  PpoOptions options;
  X *grad_logprobs, *grad_entropy;

  template <class T>
  HD PpoToken<T> token(int64_t i) const {
    const T own = T(logprobs[i]), before = T(proximal[i]);
    return {own, own - before, behavior ? before - T(behavior[i]) : T(0), T(advantages[i]),
            T(ref[i]), entropy ? T(entropy[i]) : T(0), row_weight<T>(i)};
  }

  template <class T>
  HD T row_weight(int64_t i) const { return row_weights ? T(row_weights[i]) : T(1); }

  // d loss / d entropy of a trained token
  template <class T>
  HD T entropy_slope(T row_weight) const { return -T(options.entropy_coefficient) * T(options.scale) * row_weight; }
};

// Without sequences, tokens are cut into pieces of this length for the sums.
constexpr int64_t PPO_PIECE = 256;

constexpr int64_t ppo_pieces(int64_t tokens) { return (tokens + PPO_PIECE - 1) / PPO_PIECE; }
