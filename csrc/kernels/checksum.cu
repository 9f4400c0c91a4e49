// word_sums: a block owns some rows of a tensor, or the rest behind them, and reads each byte once. A thread owns four columns;
// their sums are added to those of the other blocks in the result, which is zeros before the launch.
// tile_hash: a block owns one tile. Both add whole numbers mod 2^64: the order of the blocks does not show in a result.
#include "checksum.cuh"
#include "device.cuh"

#include <algorithm>

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;
using Long = unsigned long long;  // what atomicAdd takes for uint64_t

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("checksum: ") + cudaGetErrorString(error));
}

// 16 bytes as two words. ALIGNED says that they begin at a multiple of 16.
template <bool ALIGNED>
__device__ __forceinline__ ulonglong2 load_words(const uint8_t* from) {
  if constexpr (ALIGNED) return *reinterpret_cast<const ulonglong2*>(from);
  ulonglong2 words = {};
#pragma unroll
  for (int i = 0; i < 8; i++) words.x |= Long(from[i]) << 8 * i, words.y |= Long(from[i + 8]) << 8 * i;
  return words;
}

// ---- word_sums

constexpr int MOST_TENSORS = 128;  // of a launch: a kernel's arguments have 4 KB
constexpr int MOST_ROWS = 32;      // of a block
constexpr int AT_ONCE = 4;         // rows whose pieces a thread loads before it adds the first
constexpr int PIECES = CHECKSUM_ROW_BYTES / 16 / THREADS;

struct SummedTensors {
  int count, rows_of_block;
  int first_block[MOST_TENSORS];  // rising
  TensorBytes bytes[MOST_TENSORS];
  int64_t place[MOST_TENSORS];  // of its sums
};

// Sums of N rows over a warp: lane 32 / N * i has that of row i. Lanes halve the rows among them before they add.
template <int N>
__device__ __forceinline__ Long sum_of_rows(Long (&rows)[N]) {
#pragma unroll
  for (int mask = WARP / 2, left = N; mask > 0; mask /= 2) {
    if (left > 1) {
      left /= 2;
      const bool is_upper = threadIdx.x & mask;
#pragma unroll
      for (int i = 0; i < left; i++) {
        const Long given = is_upper ? rows[i] : rows[i + left];
        rows[i] = (is_upper ? rows[i + left] : rows[i]) + __shfl_xor_sync(ALL_LANES, given, mask);
      }
    } else {
      rows[0] += __shfl_xor_sync(ALL_LANES, rows[0], mask);
    }
  }
  return rows[0];
}

template <bool ALIGNED, int N>
__device__ __forceinline__ void add_rows(const uint8_t* from, ulonglong2 (&columns)[PIECES], Long (*of_warps)[WARPS]) {
  ulonglong2 words[N][PIECES];
#pragma unroll
  for (int i = 0; i < N; i++) {
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
      words[i][j] = load_words<ALIGNED>(from + i * CHECKSUM_ROW_BYTES + (j * THREADS + threadIdx.x) * 16);
    }
  }
  Long sums[N] = {};
#pragma unroll
  for (int i = 0; i < N; i++) {
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
      columns[j].x += words[i][j].x, columns[j].y += words[i][j].y, sums[i] += words[i][j].x + words[i][j].y;
    }
  }
  const Long sum = sum_of_rows<N>(sums);
  const int lane = threadIdx.x % WARP;
  if (lane % (WARP / N) == 0) of_warps[lane / (WARP / N)][threadIdx.x / WARP] = sum;
}

template <bool ALIGNED>
__device__ __forceinline__ void sum_rows(
    const uint8_t* from, int rows, Long (*of_warps)[WARPS], uint64_t* of_rows, uint64_t* of_columns) {
  ulonglong2 columns[PIECES] = {};
  int row = 0;
  if constexpr (ALIGNED) {
    for (; row + AT_ONCE <= rows; row += AT_ONCE) {
      add_rows<ALIGNED, AT_ONCE>(from + row * CHECKSUM_ROW_BYTES, columns, of_warps + row);
    }
  }
#pragma unroll 1
  for (; row < rows; row++) add_rows<ALIGNED, 1>(from + row * CHECKSUM_ROW_BYTES, columns, of_warps + row);
#pragma unroll
  for (int j = 0; j < PIECES; j++) {
    Long* to = reinterpret_cast<Long*>(of_columns) + 2 * (j * THREADS + threadIdx.x);
    atomicAdd(to, columns[j].x), atomicAdd(to + 1, columns[j].y);
  }
  __syncthreads();
  if (threadIdx.x >= rows) return;
  Long sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += of_warps[threadIdx.x][warp];
  of_rows[threadIdx.x] = sum;
}

// Which of the tensors a block belongs to.
template <class Tensors>
__device__ __forceinline__ int tensor_of_block(const Tensors& tensors) {
  int low = 0, high = tensors.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tensors.first_block[middle] <= int(blockIdx.x)) low = middle;
    else high = middle;
  }
  return low;
}

__global__ void __launch_bounds__(THREADS, 3)
    word_sums_kernel(const __grid_constant__ SummedTensors tensors, uint64_t* sums) {
  __shared__ Long of_warps[MOST_ROWS][WARPS];
  const int number = tensor_of_block(tensors);
  const uint8_t* from = tensors.bytes[number].from;
  const int64_t nbytes = tensors.bytes[number].nbytes, rows = nbytes / CHECKSUM_ROW_BYTES;
  const int64_t first = int64_t(int(blockIdx.x) - tensors.first_block[number]) * tensors.rows_of_block;
  uint64_t* own = sums + tensors.place[number];
  if (first < rows) {
    const int count = min(int64_t(tensors.rows_of_block), rows - first);
    const uint8_t* begin = from + first * CHECKSUM_ROW_BYTES;
    const bool is_aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
    if (is_aligned) sum_rows<true>(begin, count, of_warps, own + first, own + rows);
    else sum_rows<false>(begin, count, of_warps, own + first, own + rows);
    return;
  }
  uint64_t* of_rest = own + rows + (rows ? CHECKSUM_COLUMNS : 0);
  from += rows * CHECKSUM_ROW_BYTES;
  const int rest = nbytes % CHECKSUM_ROW_BYTES;
#pragma unroll 1
  for (int begin = threadIdx.x * 8; begin < rest; begin += THREADS * 8) {
    Long word = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) word |= begin + i < rest ? Long(from[begin + i]) << 8 * i : 0;
    of_rest[begin / 8] = word;
  }
}

// ---- tile_hash

constexpr int MOST_PARTS = 96;  // of a launch
constexpr int HASH_PIECES = HASH_TILE_BYTES / 16 / THREADS;

// SGLang's gpu_tensor_hash: in tiles of 8192 words of 4 bytes each word is mixed with its place, in two ways.
constexpr uint32_t HASH_SEED = 0x243F6A88u;
constexpr uint32_t HASH_SEEDS[2] = {HASH_SEED, (HASH_SEED * 0x9E3779B1u) ^ 0xDEADBEEFu};
constexpr uint32_t HASH_FACTORS[2] = {0x27D4EB2Du, 0x165667B1u};
constexpr int HASH_TURNS[2] = {15, 13};

// The finalizer of MurmurHash3 of word ^ known. The compiler computes what is known to it.
__device__ __forceinline__ uint32_t murmur_mixed(uint32_t word, uint32_t known = 0) {
  word = (word ^ (word >> 16) ^ (known ^ (known >> 16))) * 0x85EBCA6Bu;
  word = (word ^ (word >> 13)) * 0xC2B2AE35u;
  return word ^ (word >> 16);
}

__device__ __forceinline__ uint32_t turned(uint32_t place, int turn) { return place << turn | place >> (32 - turn); }

// Of the word at start + step, which have no bit in common. What depends on the step alone is a constant where the step is.
template <int WAY>
__device__ __forceinline__ uint32_t hashed_word(uint32_t word, uint32_t start, uint32_t step) {
  constexpr int turn = HASH_TURNS[WAY];
  constexpr uint32_t factor = HASH_FACTORS[WAY], seed = HASH_SEEDS[WAY];
  const uint32_t linear = start * factor + (seed + step * factor);
  return murmur_mixed(word ^ linear ^ turned(start, turn), turned(step, turn));
}

struct HashedTensors {
  int count;
  int first_block[MOST_PARTS], first_part[MOST_PARTS + 1];
  int64_t nbytes[MOST_PARTS];       // of whole tensors, of which the parts are a slice of whole tiles
  const uint8_t* from[MOST_PARTS];  // of parts
  int64_t begin[MOST_PARTS];        // of parts, in their tensor
};

// The word of a tensor that begins at this byte of it. It may belong to several parts, and has zeros behind the tensor's end.
__device__ __forceinline__ uint32_t gathered_word(const HashedTensors& tensors, int number, int part, int64_t begin) {
  uint32_t word = 0;
#pragma unroll 1
  for (int i = 0; i < 4 && begin + i < tensors.nbytes[number]; i++) {
    while (part + 1 < tensors.first_part[number + 1] && tensors.begin[part + 1] <= begin + i) part++;
    word |= uint32_t(tensors.from[part][begin + i - tensors.begin[part]]) << 8 * i;
  }
  return word;
}

struct WordHashes {
  uint32_t first, second;

  __device__ __forceinline__ void add(uint32_t word, uint32_t start, uint32_t step = 0) {
    first += hashed_word<0>(word, start, step), second += hashed_word<1>(word, start, step);
  }
};

__global__ void __launch_bounds__(THREADS, 4)
    tile_hash_kernel(const __grid_constant__ HashedTensors tensors, uint64_t* sums) {
  __shared__ WordHashes of_warps[WARPS];
  const int number = tensor_of_block(tensors), last_part = tensors.first_part[number + 1] - 1;
  const int64_t nbytes = tensors.nbytes[number], words = (nbytes + 3) / 4;
  int part = tensors.first_part[number];
  const int64_t begin = tensors.begin[part] + int64_t(int(blockIdx.x) - tensors.first_block[number]) * HASH_TILE_BYTES;
  while (part < last_part && tensors.begin[part + 1] <= begin) part++;
  const uint8_t* from = tensors.from[part] + (begin - tensors.begin[part]);
  const int64_t end = part < last_part ? tensors.begin[part + 1] : nbytes;
  const uint32_t start = uint32_t(begin / 4);  // places count mod 2^32, as SGLang counts them
  WordHashes mine = {};
  if (begin + HASH_TILE_BYTES <= end && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    uint4 pieces[HASH_PIECES];
#pragma unroll
    for (int i = 0; i < HASH_PIECES; i++) pieces[i] = reinterpret_cast<const uint4*>(from)[i * THREADS + threadIdx.x];
#pragma unroll
    for (int i = 0; i < HASH_PIECES; i++) {
      const uint32_t own = start + threadIdx.x * 4, step = i * THREADS * 4;
      mine.add(pieces[i].x, own, step), mine.add(pieces[i].y, own, step + 1);
      mine.add(pieces[i].z, own, step + 2), mine.add(pieces[i].w, own, step + 3);
    }
  } else {
    const int count = min(HASH_TILE_WORDS, words - begin / 4);
    const int whole = reinterpret_cast<uintptr_t>(from) % 4 == 0 ? min(int64_t(count), (end - begin) / 4) : 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < whole; i += THREADS) mine.add(reinterpret_cast<const uint32_t*>(from)[i], start + i);
#pragma unroll 1
    for (int i = whole + threadIdx.x; i < count; i += THREADS) {
      mine.add(gathered_word(tensors, number, part, begin + 4 * i), start + i);
    }
  }
  mine = {__reduce_add_sync(ALL_LANES, mine.first), __reduce_add_sync(ALL_LANES, mine.second)};
  if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = mine;
  __syncthreads();
  if (threadIdx.x > 0) return;
  mine = {};
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) mine.first += of_warps[warp].first, mine.second += of_warps[warp].second;
  const uint32_t length = 4 * words;
  const Long hash = Long(murmur_mixed(mine.first ^ length)) << 32 | murmur_mixed(mine.second ^ length);
  atomicAdd(reinterpret_cast<Long*>(sums + number), hash);
}

}  // namespace

void launch_word_sums(const std::vector<TensorBytes>& tensors, uint64_t* sums, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  int64_t place = 0, rows = 0;
  for (const TensorBytes& tensor : tensors) {
    place += count_of_word_sums(tensor.nbytes), rows += tensor.nbytes / CHECKSUM_ROW_BYTES;
  }
  if (place == 0) return;
  check(cudaMemsetAsync(sums, 0, place * sizeof(uint64_t), stream));
  place = 0;
  SummedTensors given;
  // Six blocks for each multiprocessor, where there are so many rows.
  given.rows_of_block = std::clamp<int64_t>(rows / (6 * multiprocessors) / AT_ONCE * AT_ONCE, AT_ONCE, MOST_ROWS);
  for (size_t begin = 0; begin < tensors.size(); begin += MOST_TENSORS) {
    int64_t blocks = 0;
    given.count = std::min<size_t>(MOST_TENSORS, tensors.size() - begin);
    for (int i = 0; i < given.count; i++) {
      const TensorBytes& tensor = given.bytes[i] = tensors[begin + i];
      const int64_t own = tensor.nbytes / CHECKSUM_ROW_BYTES;
      given.first_block[i] = blocks, given.place[i] = place;
      blocks += (own + given.rows_of_block - 1) / given.rows_of_block + (tensor.nbytes % CHECKSUM_ROW_BYTES > 0);
      place += count_of_word_sums(tensor.nbytes);
    }
    launch(word_sums_kernel, blocks, THREADS, stream, given, sums);
  }
}

void launch_tile_hashes(
    const std::vector<TensorBytes>& parts, const std::vector<TensorSlice>& slices, uint64_t* sums, cudaStream_t stream) {
  if (slices.empty()) return;
  check(cudaMemsetAsync(sums, 0, slices.size() * sizeof(uint64_t), stream));
  HashedTensors given = {};
  int64_t blocks = 0, part = 0;
  int used = 0;
  for (size_t tensor = 0; tensor < slices.size(); tensor++) {
    if (used + slices[tensor].parts > MOST_PARTS) {
      launch(tile_hash_kernel, blocks, THREADS, stream, given, sums + tensor - given.count);
      given.count = 0, used = 0, blocks = 0;
    }
    const int i = given.count++;
    given.first_block[i] = blocks, given.first_part[i] = used, given.nbytes[i] = slices[tensor].whole_nbytes;
    int64_t end = slices[tensor].begin;
    for (int64_t k = 0; k < slices[tensor].parts; k++, used++, part++) {
      given.from[used] = parts[part].from, given.begin[used] = end;
      end += parts[part].nbytes;
    }
    given.first_part[i + 1] = used;
    blocks += (end - slices[tensor].begin + HASH_TILE_BYTES - 1) / HASH_TILE_BYTES;
  }
  launch(tile_hash_kernel, blocks, THREADS, stream, given, sums + slices.size() - given.count);
}
