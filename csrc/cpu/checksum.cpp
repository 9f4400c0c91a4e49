// The sums that a checksum of weights is made from, in one pass at the speed of memory.
#include <cstring>
#include <mutex>

#include "../math/checksum.h"
#include "../operators.h"

namespace {

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
  for (int64_t line = 0; line < CHECKSUM_COLUMNS; line += WORDS_OF_A_LINE) {
    __builtin_prefetch(bytes + CHECKSUM_ROW_BYTES + 8 * line);
    for (int64_t column = line; column < line + WORDS_OF_A_LINE; column++) {
      const uint64_t word = word_at(bytes + 8 * column);
      sum += word;
      column_sums[column] += word;
    }
  }
  return sum;
}

void sums_of(const char* bytes, int64_t nbytes, uint64_t* row_sums) {
  const int64_t rows = nbytes / CHECKSUM_ROW_BYTES, columns = rows ? CHECKSUM_COLUMNS : 0;
  uint64_t* column_sums = row_sums + rows;
  memset(column_sums, 0, 8 * (count_of_word_sums(nbytes) - rows));
  memcpy(column_sums + columns, bytes + rows * CHECKSUM_ROW_BYTES, nbytes - rows * CHECKSUM_ROW_BYTES);
  std::mutex adding;  // whole numbers: the order of the threads does not matter
  torch::stable::parallel_for(0, rows, ROWS_OF_A_THREAD, [&](int64_t begin, int64_t end) {
    uint64_t own[CHECKSUM_COLUMNS] = {};
    for (int64_t row = begin; row < end; row++) row_sums[row] = add_row(bytes + row * CHECKSUM_ROW_BYTES, own);
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
