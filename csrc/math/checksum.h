// How a checksum of weights lays out its sums, the same on the host and on a device.
#pragma once

#include "numbers.h"

// word_sums sees a tensor's bytes as rows of 1024 words of 8 bytes; ops/reference.py counts them too.
constexpr int64_t CHECKSUM_COLUMNS = 1024, CHECKSUM_ROW_BYTES = 8 * CHECKSUM_COLUMNS;
constexpr int64_t HASH_TILE_WORDS = 8192, HASH_TILE_BYTES = 4 * HASH_TILE_WORDS;  // of tile_hashes

// How many sums there are: of the rows, of the columns, and the words of the rest.
HD int64_t count_of_word_sums(int64_t nbytes) {
  const int64_t rows = nbytes / CHECKSUM_ROW_BYTES, rest = nbytes - rows * CHECKSUM_ROW_BYTES;
  return rows + (rows ? CHECKSUM_COLUMNS : 0) + (rest + 7) / 8;
}
