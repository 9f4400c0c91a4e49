// Products, softmax and SiLU whose results do not depend on how many rows are computed together: each element is summed
// over its depth in steps of one vector, then over the vector's lanes. A library's products choose another order for
// another number of rows. Included by rows.cpp, once for each instruction set.
#pragma once

#include "lanes.h"

namespace {

constexpr int F = WIDTH<float>;

// The first `count` of F numbers, and zeros.
INLINE FloatLanes first_lanes(const float* from, int64_t count) {
  FloatLanes lanes = {};
  memcpy(&lanes, from, count * sizeof(float));
  return lanes;
}

INLINE float sum_of_lanes(FloatLanes lanes) {
  float parts[F];
  store_lanes(parts, lanes);
  for (int half = F / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  }
  return parts[0];
}

template <int R, int C>
INLINE void product_block(
    const float* x, int64_t x_stride, const float* w, int64_t w_stride, float* out, int64_t out_stride, int64_t depth) {
  FloatLanes sums[R][C] = {};
  int64_t k = 0;
  for (; k + F <= depth; k += F) {
    FloatLanes columns[C];
    for (int c = 0; c < C; c++) columns[c] = load_lanes<FloatLanes>(w + c * w_stride + k);
    for (int r = 0; r < R; r++) {
      const FloatLanes row = load_lanes<FloatLanes>(x + r * x_stride + k);
      for (int c = 0; c < C; c++) sums[r][c] += row * columns[c];
    }
  }
  if (k < depth) {
    for (int r = 0; r < R; r++) {
      const FloatLanes row = first_lanes(x + r * x_stride + k, depth - k);
      for (int c = 0; c < C; c++) sums[r][c] += row * first_lanes(w + c * w_stride + k, depth - k);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < C; c++) out[r * out_stride + c] = sum_of_lanes(sums[r][c]);
  }
}

// out[r, c] = sum over k of x[r, k] w[c, k]
void products(
    const float* x, int64_t x_stride, const float* w, int64_t w_stride, float* out, int64_t out_stride, int64_t rows,
    int64_t columns, int64_t depth) {
  constexpr int BLOCK_ROWS = F >= 16 ? 4 : 2, BLOCK_COLUMNS = 4;  // as many sums as there are registers
  int64_t c = 0;
  for (; c + BLOCK_COLUMNS <= columns; c += BLOCK_COLUMNS) {
    int64_t r = 0;
    for (; r + BLOCK_ROWS <= rows; r += BLOCK_ROWS) {
      product_block<BLOCK_ROWS, BLOCK_COLUMNS>(
          x + r * x_stride, x_stride, w + c * w_stride, w_stride, out + r * out_stride + c, out_stride, depth);
    }
    for (; r < rows; r++) {
      product_block<1, BLOCK_COLUMNS>(
          x + r * x_stride, x_stride, w + c * w_stride, w_stride, out + r * out_stride + c, out_stride, depth);
    }
  }
  for (; c < columns; c++) {
    for (int64_t r = 0; r < rows; r++) {
      product_block<1, 1>(
          x + r * x_stride, x_stride, w + c * w_stride, w_stride, out + r * out_stride + c, out_stride, depth);
    }
  }
}

// One query's weighted mean of `count` values; `scores` has the products of query and keys, and is overwritten. Its
// memory extends to a whole number of vectors. `sums` has room for the values' width in whole vectors.
void weighted_values(
    float* scores, int64_t count, float scale, const float* values, int64_t stride, int64_t width, float* sums,
    float* out) {
  float peak = NEGATIVE_INFINITY<float>;
  for (int64_t i = 0; i < count; i++) peak = scores[i] > peak ? scores[i] : peak;  // scale > 0
  const int64_t padded = (count + F - 1) / F * F;
  for (int64_t i = count; i < padded; i++) scores[i] = NEGATIVE_INFINITY<float>;
  FloatLanes totals = {};
  for (int64_t i = 0; i < padded; i += F) {
    const FloatLanes weight = exp_of_negative((load_lanes<FloatLanes>(scores + i) - peak) * scale);
    store_lanes(scores + i, weight);
    totals += weight;
  }
  const float total = sum_of_lanes(totals);
  memset(sums, 0, (width + F - 1) / F * F * sizeof(float));
  for (int64_t i = 0; i < count; i++) {
    const float* value = values + i * stride;
    int64_t d = 0;
    for (; d + F <= width; d += F) {
      store_lanes(sums + d, load_lanes<FloatLanes>(sums + d) + load_lanes<FloatLanes>(value + d) * scores[i]);
    }
    if (d < width) store_lanes(sums + d, load_lanes<FloatLanes>(sums + d) + first_lanes(value + d, width - d) * scores[i]);
  }
  for (int64_t d = 0; d < width; d++) out[d] = sums[d] / total;
}

INLINE FloatLanes silu_of(FloatLanes x) {
  const FloatLanes e = exp_of_negative(x > 0.0f ? -x : x);
  return (x > 0.0f ? x : x * e) / (1.0f + e);
}

// out = x / (1 + exp(-x))
void silu(const float* x, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + F <= count; i += F) store_lanes(out + i, silu_of(load_lanes<FloatLanes>(x + i)));
  if (i < count) {
    const FloatLanes result = silu_of(first_lanes(x + i, count - i));
    memcpy(out + i, &result, (count - i) * sizeof(float));
  }
}

}  // namespace
