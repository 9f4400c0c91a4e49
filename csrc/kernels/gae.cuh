// Launcher of gae.cu: raw device pointers, no torch.
#pragma once

#include <cuda_runtime.h>

#include "../math/gae.h"

struct GaeTokens {
  int64_t count, sequences;
  const float *rewards, *values;  // [N]
  const bool* mask;               // [N]
  const int64_t* bounds;          // [B + 1], rising from 0 to N
  const float* bootstrap;         // [B] or null
  double discount, trace_decay;
};

constexpr int GAE_TILE = 1024;  // tokens

constexpr int64_t gae_tiles(int64_t tokens) { return (tokens + GAE_TILE - 1) / GAE_TILE; }

// of_tiles: scratch of gae_tiles(tokens.count) maps.
void launch_gae(const GaeTokens& tokens, GaeMap* of_tiles, float* advantages, float* returns, cudaStream_t stream);
