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

// Where some parts, which lie one above the other, are in their tensor: from a tile's first byte to a tile's end or its own.
struct TensorSlice {
  int64_t parts, begin, whole_nbytes;
};

// The sum of the hashes of each slice's tiles, of parts of one slice behind those of another.
void launch_tile_hashes(
    const std::vector<TensorBytes>& parts, const std::vector<TensorSlice>& slices, uint64_t* sums, cudaStream_t stream);
