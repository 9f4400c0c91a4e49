// Launcher of labels.cu: raw device pointers, no torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

struct PackedTokens {
  int64_t tokens, sequences;
  const int64_t *ids, *bounds;  // [T], [B + 1]
  const bool* trained;          // [T] or null
};

void launch_labels(
    const PackedTokens& packed, int64_t* labels, int64_t* positions, int64_t* sequence_ids, cudaStream_t stream);
