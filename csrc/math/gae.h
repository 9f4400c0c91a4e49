// Generalised advantage estimation as a scan. Reading a sequence from its end, the state is (advantage, next value); a
// token maps it affinely, a token that is not trained leaves it as it is, and maps compose.
#pragma once

#include "numbers.h"

struct GaeState {
  double advantage, next_value;
};

// (A, V) -> (by_advantage A + by_value V + constant, keep_value V + value)
struct GaeMap {
  double by_advantage, by_value, constant, keep_value, value;
};

HD GaeMap gae_identity() { return {1, 0, 0, 1, 0}; }

HD GaeMap gae_token(double reward, double value, double discount, double trace_decay) {
  return {discount * trace_decay, discount, reward - value, 0, value};
}

HD GaeState gae_apply(const GaeMap& map, const GaeState& state) {
  return {map.by_advantage * state.advantage + map.by_value * state.next_value + map.constant,
          map.keep_value * state.next_value + map.value};
}

// `first`, then `then`.
HD GaeMap gae_compose(const GaeMap& first, const GaeMap& then) {
  return {then.by_advantage * first.by_advantage,
          then.by_advantage * first.by_value + then.by_value * first.keep_value,
          then.by_advantage * first.constant + then.by_value * first.value + then.constant,
          then.keep_value * first.keep_value,
          then.keep_value * first.value + then.value};
}
