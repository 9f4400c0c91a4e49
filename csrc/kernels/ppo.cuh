// Launcher of ppo.cu: raw device pointers, no torch.
#pragma once

#include <cuda_runtime.h>

#include "../math/ppo.h"

// On a device: at least one, so that a block writes the sums of no tokens; by sequence, where `sequences` is not 0, room
// for each to begin and end anywhere.
constexpr int64_t ppo_device_pieces(int64_t tokens, int64_t sequences) {
  if (sequences > 0) return tokens / PPO_PIECE + sequences;
  return tokens > 0 ? ppo_pieces(tokens) : 1;
}

// Floats of scratch: for each piece its sums and what it adds to its sequence's means.
constexpr int64_t ppo_scratch(int64_t tokens, int64_t sequences) {
  return ppo_device_pieces(tokens, sequences) * (PPO_SUMS + 4);
}

// sequences: 0 where nothing is by sequence, and tokens.bounds is not read.
void launch_ppo(
    const PpoTokens<float>& tokens, int64_t sequences, float* scratch, float* loss, double* sums, cudaStream_t stream);
