// Launcher of gae.cu: raw device pointers, no torch.
#pragma once

#include <cuda_runtime.h>

#include "../math/gae.h"

struct GaeTokens {
  const float *rewards, *values;  // [N]
  const bool* mask;               // [N]
  const int64_t* bounds;          // [B + 1], rising from 0 to N
  const float* bootstrap;         // [B] or null
  double discount, trace_decay;
};

void launch_gae(const GaeTokens& tokens, int64_t sequences, float* advantages, float* returns, cudaStream_t stream);
