// Generalised advantage estimation as a scan of one number. With S_t = V_t + trace_decay A_t, the definition
// A_t = r_t + discount V_t' - V_t + discount trace_decay A_t' becomes A_t = r_t - V_t + discount S_t'. Reading a sequence
// from its end, a token maps S affinely, one that is not trained leaves it as it is, and the end begins anew; maps compose.
#pragma once

#include "numbers.h"

// S -> factor S + constant. Where the factor is 0, S may be anything: another sequence's NaN, too.
struct GaeMap {
  double factor, constant;
};

HD GaeMap gae_identity() { return {1, 0}; }

// What follows the last token of a sequence; 0 where that is its end.
HD GaeMap gae_end(double bootstrap) { return {0, bootstrap}; }

HD GaeMap gae_token(double reward, double value, double discount, double trace_decay) {
  return {discount * trace_decay, value + trace_decay * (reward - value)};
}

HD double gae_advantage(double reward, double value, double discount, double after) {
  return reward - value + discount * after;
}

HD double gae_apply(const GaeMap& map, double after) {
  return map.factor == 0 ? map.constant : map.factor * after + map.constant;
}

// `first`, then `then`.
HD GaeMap gae_compose(const GaeMap& first, const GaeMap& then) {
  return {then.factor * first.factor, gae_apply(then, first.constant)};
}
