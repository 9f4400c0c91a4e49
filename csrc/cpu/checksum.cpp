// The sums that a checksum of weights is made from, in one pass at the speed of memory.
#include <cstring>
#include <mutex>

#include "../math/checksum.h"
#include "../operators.h"

namespace {

constexpr int64_t ROWS_OF_A_THREAD = 128;  // 1 MB at least, some 40 microseconds' work
constexpr int64_t WORDS_OF_A_LINE = 8;     // of the cache
constexpr int64_t ROWS_AT_ONCE = 4;
constexpr int64_t LANES = 2;  // every x86-64 and arm64 adds two words at once; wider ones are no faster than the memory

typedef uint64_t Words __attribute__((vector_size(8 * LANES)));

// A tensor of two-byte numbers may begin anywhere.
inline Words words_at(const void* bytes) {
  Words words;
  memcpy(&words, bytes, sizeof(words));
  return words;
}

// Add the words of N rows to the sums of their columns, and write the sum of each row. The columns' sums are read and
// written once for all N rows: row by row, that would take longer than adding. The rows that follow are fetched
// meanwhile, without which the processor waits for memory half of the time.
template <int N>
void add_rows(const char* bytes, uint64_t* column_sums, uint64_t* row_sums) {
  Words sums[N] = {};
  for (int64_t line = 0; line < CHECKSUM_COLUMNS; line += WORDS_OF_A_LINE) {
    for (int row = 0; row < N; row++) __builtin_prefetch(bytes + (N + row) * CHECKSUM_ROW_BYTES + 8 * line);
    for (int64_t column = line; column < line + WORDS_OF_A_LINE; column += LANES) {
      Words of_rows = {};
      for (int row = 0; row < N; row++) {
        const Words words = words_at(bytes + row * CHECKSUM_ROW_BYTES + 8 * column);
        sums[row] += words, of_rows += words;
      }
      of_rows += words_at(column_sums + column);
      memcpy(column_sums + column, &of_rows, sizeof(of_rows));
    }
  }
  for (int row = 0; row < N; row++) row_sums[row] = sums[row][0] + sums[row][1];
}

void sums_of(const char* bytes, int64_t nbytes, uint64_t* row_sums) {
  const int64_t rows = nbytes / CHECKSUM_ROW_BYTES, columns = rows ? CHECKSUM_COLUMNS : 0;
  uint64_t* column_sums = row_sums + rows;
  memset(column_sums, 0, 8 * (count_of_word_sums(nbytes) - rows));
  memcpy(column_sums + columns, bytes + rows * CHECKSUM_ROW_BYTES, nbytes - rows * CHECKSUM_ROW_BYTES);
  std::mutex adding;  // whole numbers: the order of the threads does not matter
  torch::stable::parallel_for(0, rows, ROWS_OF_A_THREAD, [&](int64_t begin, int64_t end) {
    uint64_t own[CHECKSUM_COLUMNS] = {};
    int64_t row = begin;
    for (; row + ROWS_AT_ONCE <= end; row += ROWS_AT_ONCE) {
      add_rows<ROWS_AT_ONCE>(bytes + row * CHECKSUM_ROW_BYTES, own, row_sums + row);
    }
    for (; row < end; row++) add_rows<1>(bytes + row * CHECKSUM_ROW_BYTES, own, row_sums + row);
    std::lock_guard<std::mutex> lock(adding);
    for (int64_t column = 0; column < CHECKSUM_COLUMNS; column++) column_sums[column] += own[column];
  });
}

}  // namespace

Tensor word_sums(std::vector<Tensor> tensors) {
  if (tensors.empty()) refuse("tensors is empty: there is no device to compute on");
  int64_t count = 0;
  for (const Tensor& tensor : tensors) count += count_of_word_sums(nbytes_of(tensor));
  Tensor sums = new_tensor(tensors[0], {count}, ScalarType::Long);
  uint64_t* own = static_cast<uint64_t*>(sums.data_ptr());
  for (const Tensor& tensor : tensors) {
    const int64_t nbytes = nbytes_of(tensor);
    if (nbytes > 0) sums_of(static_cast<const char*>(tensor.data_ptr()), nbytes, own);
    own += count_of_word_sums(nbytes);
  }
  return sums;
}
