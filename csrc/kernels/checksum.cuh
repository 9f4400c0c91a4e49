// Launchers of checksum.cu: raw device pointers, no torch.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "../math/checksum.h"

// A contiguous tensor, which may begin at any byte.
struct TensorBytes {
  const uint8_t* from;
  int64_t nbytes;
};

// The sums of each tensor, count_of_word_sums of them, one tensor behind the other.
void launch_word_sums(const std::vector<TensorBytes>& tensors, uint64_t* sums, cudaStream_t stream);

// A sum of tiles' hashes for each tensor. counts: of how many parts each consists, which lie one above the other in it.
void launch_tile_hashes(
    const std::vector<TensorBytes>& parts, const std::vector<int64_t>& counts, uint64_t* sums, cudaStream_t stream);
