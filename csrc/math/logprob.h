// What is known of a row's softmax from part of its columns, and how parts are put together. z = x / temperature.
#pragma once

#include "numbers.h"

// A row is cut into tiles of this many bytes. The cut depends on the row alone, never on the number of rows, so that a
// row gives the same bits alone and in a batch.
constexpr int64_t TILE_BYTES = 32768;

constexpr int64_t tiles_of(int64_t columns, int64_t element_size) {
  int64_t tile = TILE_BYTES / element_size;
  return columns > tile ? (columns + tile - 1) / tile : 1;
}

template <class T>
struct alignas(16) Partial {
  T peak;    // largest x; NaN is not counted here, it shows in `sum`
  T sum;     // of exp(z - z_peak)
  T moment;  // of (z - z_peak) exp(z - z_peak): centred, or large logits would cancel the entropy's digits
  T chosen;  // x of the label, -inf where the label is elsewhere
};

template <class T>
HD Partial<T> nothing() {
  return {NEGATIVE_INFINITY<T>, T(0), T(0), NEGATIVE_INFINITY<T>};
}

// a's sums as they are relative to `peak`, which is at least a's.
template <class T>
HD void add_relative_to(T peak, const Partial<T>& a, T inverse_temperature, T& sum, T& moment) {
  if (a.peak == NEGATIVE_INFINITY<T>) {  // no finite column: zeros, or NaN that must not be lost
    sum += a.sum;
    return;
  }
  T shift = (a.peak - peak) * inverse_temperature, factor = exp(shift);
  sum += factor * a.sum;
  if (factor > T(0)) moment += factor * (a.moment + shift * a.sum);  // 0 * -inf would be NaN
}

template <class T>
HD Partial<T> merge(const Partial<T>& a, const Partial<T>& b, T inverse_temperature) {
  Partial<T> both = {a.peak > b.peak ? a.peak : b.peak, T(0), T(0), a.chosen > b.chosen ? a.chosen : b.chosen};
  add_relative_to(both.peak, a, inverse_temperature, both.sum, both.moment);
  add_relative_to(both.peak, b, inverse_temperature, both.sum, both.moment);
  return both;
}

template <class T>
struct RowLogprob {
  T logprob, entropy, peak, log_sum;
};

// `chosen - peak` and not `chosen - logsumexp`: the rounding of a large log-sum-exp would enter the difference.
template <class T>
HD RowLogprob<T> finish(const Partial<T>& row, T inverse_temperature) {
  T log_sum = log(row.sum);
  T logprob = (row.chosen - row.peak) * inverse_temperature - log_sum;
  return {logprob, log_sum - row.moment / row.sum, row.peak, log_sum};
}

// d loss / dx = p (constant + slope log p), plus `chosen` at the label: d log p_y / dz = 1[y] - p, dH / dz = -p (log p + H).
template <class T>
struct RowGradient {
  T peak, log_sum, inverse_temperature, constant, slope, chosen;
};

template <class T>
HD RowGradient<T> row_gradient(T peak, T log_sum, T entropy, T inverse_temperature, T grad_logprob, T grad_entropy) {
  T of_logprob = grad_logprob * inverse_temperature, of_entropy = grad_entropy * inverse_temperature;
  return {peak, log_sum, inverse_temperature, -of_logprob - of_entropy * entropy, -of_entropy, of_logprob};
}
