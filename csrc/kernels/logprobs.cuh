// Launchers of logprobs.cu: raw device pointers, no torch. Statistics are `[tiles, T]` of Partial<float>.
#pragma once

#include <cuda_runtime.h>

#include "../math/logprob.h"

struct LogitRows {
  int64_t rows, stride;  // stride in elements
  int width, columns;    // columns [columns, width) are padding
  int64_t vocab_start;
  const int64_t* labels;
  float temperature;
  const float* temperatures;  // [T] or null
};

struct LogitGradient {
  const float *peak, *log_sum, *entropy;       // [T]
  const float *grad_logprobs, *grad_entropy;  // [T] or null
  int64_t out_stride;
};

template <class X>
void launch_partials(
    const X* logits, const LogitRows& rows, bool with_entropy, Partial<float>* out, cudaStream_t stream);
template <class X, class Y>  // Y is X, or a 16-bit type where X is float
void launch_gradient(const X* logits, Y* out, const LogitRows& rows, const LogitGradient& gradient, cudaStream_t stream);
void launch_fold(const Partial<float>* parts, int64_t count, const LogitRows& rows, Partial<float>* out, cudaStream_t stream);
void launch_finish(
    const Partial<float>* parts, int64_t count, const LogitRows& rows, int64_t vocab_size, float* logprobs, float* entropy,
    float* peak, float* log_sum, cudaStream_t stream);
