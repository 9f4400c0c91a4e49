// One copy of this file is compiled for each instruction set; -DROWS names the table it defines.
#include "rows.h"

#include "fixed_order.h"

namespace {

constexpr int BLOCK = 1024;  // columns that stay in the first-level cache between the maximum and the sum
constexpr int CHAINS = 4;    // independent sums, so that an addition need not wait for the last one

template <class X>
using Acc = typename Accumulator<X>::type;

template <class X>
INLINE const X* padded(const X* x, int64_t count, X* buffer) {
  static_assert(BLOCK % (CHAINS * WIDTH<float>) == 0);
  if (count == BLOCK) return x;
  X lowest = {};
  if constexpr (sizeof(X) == 2) {
    lowest.bits = sizeof(X) == 2 && __is_same(X, BF16) ? 0xff80 : 0xfc00;
  } else {
    lowest = NEGATIVE_INFINITY<X>;
  }
  memcpy(buffer, x, count * sizeof(X));
  for (int64_t i = count; i < BLOCK; i++) buffer[i] = lowest;
  return buffer;
}

template <class X>
INLINE Acc<X> largest(const X* x) {
  using V = typename LanesOf<Acc<X>>::type;
  V best[CHAINS];
  for (V& b : best) b = V{} + NEGATIVE_INFINITY<Acc<X>>;
  for (int i = 0; i < BLOCK; i += CHAINS * WIDTH<Acc<X>>) {
    for (int c = 0; c < CHAINS; c++) {
      V v = widen(x + i + c * WIDTH<Acc<X>>);
      best[c] = v > best[c] ? v : best[c];
    }
  }
  Acc<X> result = NEGATIVE_INFINITY<Acc<X>>;
  for (const V& b : best) {
    for (int i = 0; i < WIDTH<Acc<X>>; i++) result = b[i] > result ? b[i] : result;
  }
  return result;
}

template <bool WITH_ENTROPY, class X>
INLINE void add_block(const X* x, Acc<X> peak, Acc<X> inverse_temperature, double& sum, double& moment) {
  using V = typename LanesOf<Acc<X>>::type;
  V sums[CHAINS] = {}, moments[CHAINS] = {};
  for (int i = 0; i < BLOCK; i += CHAINS * WIDTH<Acc<X>>) {
    for (int c = 0; c < CHAINS; c++) {
      V d = (widen(x + i + c * WIDTH<Acc<X>>) - peak) * inverse_temperature;
      V e = exp_of_negative(d);
      sums[c] += e;
      if (WITH_ENTROPY) moments[c] += e * (d < Acc<X>(-1000) ? V{} : d);  // e is 0 there, and 0 * -inf would be NaN
    }
  }
  for (int c = 0; c < CHAINS; c++) {
    for (int i = 0; i < WIDTH<Acc<X>>; i++) {
      sum += sums[c][i];
      moment += moments[c][i];
    }
  }
}

template <bool WITH_ENTROPY, class X>
Partial<double> partial(const void* columns, int64_t count, double inverse_temperature) {
  const X* x = static_cast<const X*>(columns);
  X buffer[BLOCK];
  Partial<double> total = nothing<double>();
  for (int64_t start = 0; start < count; start += BLOCK) {
    const X* block = padded(x + start, count - start < BLOCK ? count - start : BLOCK, buffer);
    double peak = largest(block);
    if (peak > total.peak) {
      Partial<double> moved = {peak, 0.0, 0.0, total.chosen};
      add_relative_to(peak, total, inverse_temperature, moved.sum, moved.moment);
      total = moved;
    }
    Acc<X> shift = total.peak == NEGATIVE_INFINITY<double> ? 0 : Acc<X>(total.peak);
    add_block<WITH_ENTROPY>(block, shift, Acc<X>(inverse_temperature), total.sum, total.moment);
  }
  if (!WITH_ENTROPY) total.moment = NAN;
  return total;
}

template <bool WITH_SLOPE, class X, class Y>
INLINE void gradient_loop(const X* x, Y* out, int64_t count, const RowGradient<double>& row) {
  using A = Acc<X>;
  using V = typename LanesOf<A>::type;
  const A peak = A(row.peak), scale = A(row.inverse_temperature), log_sum = A(row.log_sum);
  const A constant = A(row.constant), slope = A(row.slope);
  auto of = [&](V v) __attribute__((always_inline)) {
    V log_p = (v - peak) * scale - log_sum;
    V p = exp_of_negative(log_p);
    if (!WITH_SLOPE) return p * constant;
    return p * (constant + slope * (log_p < A(-1000) ? V{} : log_p));
  };
  int64_t i = 0;
  for (; i + WIDTH<A> <= count; i += WIDTH<A>) narrow(out + i, of(widen(x + i)));
  if (i < count) {
    X buffer[WIDTH<A>] = {};
    Y result[WIDTH<A>];
    memcpy(buffer, x + i, (count - i) * sizeof(X));
    narrow(result, of(widen(buffer)));
    memcpy(out + i, result, (count - i) * sizeof(Y));
  }
}

template <class X, class Y>
void gradient(const void* columns, void* out, int64_t count, const RowGradient<double>& row) {
  if (row.slope == 0) {
    gradient_loop<false>(static_cast<const X*>(columns), static_cast<Y*>(out), count, row);
  } else {
    gradient_loop<true>(static_cast<const X*>(columns), static_cast<Y*>(out), count, row);
  }
}

#if defined(__AVX512F__)
constexpr const char* INSTRUCTION_SET = "AVX-512";
#elif defined(__AVX2__)
constexpr const char* INSTRUCTION_SET = "AVX2";
#else
constexpr const char* INSTRUCTION_SET = "baseline";
#endif

}  // namespace

extern const RowLoops ROWS = {
    INSTRUCTION_SET,
    {{partial<false, float>, partial<false, double>, partial<false, BF16>, partial<false, F16>},
     {partial<true, float>, partial<true, double>, partial<true, BF16>, partial<true, F16>}},
    {{gradient<float, float>, nullptr, gradient<float, BF16>, gradient<float, F16>},
     {nullptr, gradient<double, double>},
     {nullptr, nullptr, gradient<BF16, BF16>},
     {nullptr, nullptr, nullptr, gradient<F16, F16>}},
    products,
    weighted_values,
    silu,
};
