// Launcher of ppo.cu: raw device pointers, no torch.
#pragma once

#include <cuda_runtime.h>

#include "../math/ppo.h"

// partials: [pieces, PPO_SUMS] floats of scratch, where pieces are sequences if tokens.bounds is given.
void launch_ppo(
    const PpoTokens<float>& tokens, int64_t pieces, float* partials, float* loss, double* sums, cudaStream_t stream);
