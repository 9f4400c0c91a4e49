// Loops over the columns of one tile of a row, compiled once for each instruction set and chosen when the library loads.
#pragma once

#include "../math/logprob.h"

enum Stored { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, STORED_TYPES };

struct RowLoops {
  const char* instruction_set;
  // Statistics of `count` adjacent columns, without and with entropy (else `moment` is NaN); `chosen` is left at -inf.
  Partial<double> (*partial[2][STORED_TYPES])(const void* x, int64_t count, double inverse_temperature);
  // By what is read and what is written: out = p (constant + slope log p) for `count` adjacent columns; out may be x
  // where both are the same.
  void (*gradient[STORED_TYPES][STORED_TYPES])(const void* x, void* out, int64_t count, const RowGradient<double>& row);
  // As in fixed_order.h.
  void (*products)(
      const float* x, int64_t x_stride, const float* w, int64_t w_stride, float* out, int64_t out_stride, int64_t rows,
      int64_t columns, int64_t depth);
  void (*weighted_values)(
      float* scores, int64_t count, float scale, const float* values, int64_t stride, int64_t width, float* sums,
      float* out);
  void (*silu)(const float* x, float* out, int64_t count);
};

extern const RowLoops rows_baseline;
#ifdef __x86_64__
extern const RowLoops rows_avx2;
extern const RowLoops rows_avx512;
#endif

const RowLoops& rows();
