// The sums that a checksum of weights is made from, in one pass at the speed of memory.
#include <cstring>
#include <mutex>

#include "../operators.h"

namespace {

constexpr int64_t COLUMNS = 1024;          // 8-byte words in a row; ops/reference.py counts them too
constexpr int64_t ROW_BYTES = 8 * COLUMNS;
constexpr int64_t ROWS_OF_A_THREAD = 128;  // 1 MB at least, some 40 microseconds' work
constexpr int64_t WORDS_OF_A_LINE = 8;     // of the cache

// A tensor of two-byte numbers may begin anywhere.
inline uint64_t word_at(const char* bytes) {
  uint64_t word;
  memcpy(&word, bytes, 8);
  return word;
}

// Add a row's words to the sums of their columns; return their sum. The next row is fetched meanwhile, without which
// the processor waits for memory half of the time.
uint64_t add_row(const char* bytes, uint64_t* column_sums) {
  uint64_t sum = 0;
  for (int64_t line = 0; line < COLUMNS; line += WORDS_OF_A_LINE) {
    __builtin_prefetch(bytes + ROW_BYTES + 8 * line);
    for (int64_t column = line; column < line + WORDS_OF_A_LINE; column++) {
      const uint64_t word = word_at(bytes + 8 * column);
      sum += word;
      column_sums[column] += word;
    }
  }
  return sum;
}

}  // namespace

Tensor word_sums(Tensor tensor) {
  if (!tensor.is_contiguous()) refuse("tensor is not contiguous: pass tensor.contiguous()");
  const int64_t nbytes = tensor.numel() * tensor.element_size();
  const int64_t rows = nbytes / ROW_BYTES, rest = nbytes - rows * ROW_BYTES;
  const int64_t columns = rows ? COLUMNS : 0;
  Tensor sums = new_tensor(tensor, {rows + columns + (rest + 7) / 8}, ScalarType::Long);
  if (nbytes == 0) return sums;
  const char* bytes = static_cast<const char*>(tensor.data_ptr());
  uint64_t* row_sums = static_cast<uint64_t*>(sums.data_ptr());
  uint64_t* column_sums = row_sums + rows;
  memset(column_sums, 0, 8 * (columns + (rest + 7) / 8));
  memcpy(column_sums + columns, bytes + rows * ROW_BYTES, rest);
  std::mutex adding;  // whole numbers: the order of the threads does not matter
  torch::stable::parallel_for(0, rows, ROWS_OF_A_THREAD, [&](int64_t begin, int64_t end) {
    uint64_t own[COLUMNS] = {};
    for (int64_t row = begin; row < end; row++) row_sums[row] = add_row(bytes + row * ROW_BYTES, own);
    std::lock_guard<std::mutex> lock(adding);
    for (int64_t column = 0; column < COLUMNS; column++) column_sums[column] += own[column];
  });
  return sums;
}
