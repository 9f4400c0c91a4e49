// The sums that a checksum of weights is made from, in one pass at the speed of memory.
#include <cstring>
#include <mutex>

#include "../operators.h"

namespace {

constexpr int64_t COLUMNS = 1024;            // 8-byte words in a row; ops/checksum.py counts them too
constexpr int64_t ROWS_AT_A_TIME = 4;        // that share one load and store of the column sums
constexpr int64_t ROWS_OF_A_THREAD = 128;    // 1 MB at least, some 50 microseconds' work
constexpr int64_t ROW_BYTES = 8 * COLUMNS;

// A tensor of two-byte numbers may begin anywhere.
inline uint64_t word_at(const char* bytes) {
  uint64_t word;
  memcpy(&word, bytes, 8);
  return word;
}

template <int64_t ROWS>
void add_rows(const char* bytes, uint64_t* row_sums, uint64_t* column_sums) {
  uint64_t of_row[ROWS] = {};
  for (int64_t column = 0; column < COLUMNS; column++) {
    uint64_t of_column = column_sums[column];
    for (int64_t row = 0; row < ROWS; row++) {
      const uint64_t word = word_at(bytes + row * ROW_BYTES + 8 * column);
      of_row[row] += word;
      of_column += word;
    }
    column_sums[column] = of_column;
  }
  memcpy(row_sums, of_row, sizeof(of_row));
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
    int64_t row = begin;
    for (; row + ROWS_AT_A_TIME <= end; row += ROWS_AT_A_TIME) {
      add_rows<ROWS_AT_A_TIME>(bytes + row * ROW_BYTES, row_sums + row, own);
    }
    for (; row < end; row++) add_rows<1>(bytes + row * ROW_BYTES, row_sums + row, own);
    std::lock_guard<std::mutex> lock(adding);
    for (int64_t column = 0; column < COLUMNS; column++) column_sums[column] += own[column];
  });
  return sums;
}
