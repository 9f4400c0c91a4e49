// Operators of rollout.exact: trainer and embedded server compute the same bits from the same numbers. Threads share out
// elements, never the sum of one. float32 alone; gradients are those of torch's own operators.
#include <algorithm>

#include "../operators.h"
#include "rows.h"

namespace {

constexpr int64_t TILE = 64;                   // rows and columns of a product that a thread computes at once
constexpr int64_t LEAST_WORK = 1 << 16;        // multiplications of a thread
constexpr int64_t QUERIES_AT_ONCE = 8;         // whose products with the keys are computed together
constexpr int64_t LONGEST_VECTOR = 16;

const float* floats(const Tensor& tensor, const char* name, int64_t dims) {
  if (tensor.scalar_type() != ScalarType::Float) refuse(name, " must be float32 for exact products");
  if (tensor.dim() != dims) refuse(name, " has shape ", shape_of(tensor), ": ", dims, " dimensions are needed");
  if (tensor.size(dims - 1) > 1 && tensor.stride(dims - 1) != 1) {
    refuse(name, " has a stride in its last dimension: pass ", name, ".contiguous()");
  }
  return static_cast<const float*>(tensor.data_ptr());
}

int64_t grain(int64_t work_of_each) { return std::max<int64_t>(1, LEAST_WORK / std::max<int64_t>(work_of_each, 1)); }

}  // namespace

Tensor fixed_order_linear(Tensor x, Tensor weight) {
  const float *from = floats(x, "x", 2), *w = floats(weight, "weight", 2);
  const int64_t rows_count = x.size(0), columns = weight.size(0), depth = x.size(1);
  if (weight.size(1) != depth) refuse("weight has shape ", shape_of(weight), ": x has ", depth, " columns");
  Tensor out = new_tensor(x, {rows_count, columns}, ScalarType::Float);
  float* to = static_cast<float*>(out.data_ptr());
  const int64_t x_stride = x.stride(0), w_stride = weight.stride(0);
  const int64_t row_tiles = (rows_count + TILE - 1) / TILE, column_tiles = (columns + TILE - 1) / TILE;
  const int64_t work = std::min(rows_count, TILE) * std::min(columns, TILE) * depth;
  torch::stable::parallel_for(0, row_tiles * column_tiles, grain(work), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i % row_tiles * TILE, column = i / row_tiles * TILE;
      rows().products(
          from + row * x_stride, x_stride, w + column * w_stride, w_stride, to + row * columns + column, columns,
          std::min(TILE, rows_count - row), std::min(TILE, columns - column), depth);
    }
  });
  return out;
}

// query [n, heads, D], key [m, kv_heads, D], value [m, kv_heads, E] of several sequences -> [n, heads, E]. The queries of
// a sequence are the last of its keys, and attend to those up to their own.
Tensor fixed_order_attention(
    Tensor query, Tensor key, Tensor value, Tensor query_bounds, Tensor key_bounds, double scale) {
  const float *q = floats(query, "query", 3), *k = floats(key, "key", 3), *v = floats(value, "value", 3);
  const int64_t heads = query.size(1), width = query.size(2), value_width = value.size(2);
  if (key.size(1) < 1 || heads % key.size(1) || value.size(1) != key.size(1) || key.size(2) != width) {
    refuse("key and value have shapes ", shape_of(key), " and ", shape_of(value), ": query has ", shape_of(query));
  }
  const int64_t sequences = query_bounds.numel() - 1, heads_of_key = heads / key.size(1);
  const int64_t *first_query = checked_bounds(query_bounds, query.size(0)), *first_key = checked_bounds(key_bounds, key.size(0));
  if (key_bounds.numel() != sequences + 1 || key.size(0) != value.size(0)) refuse("bounds of queries and keys differ");
  struct Block {
    int64_t sequence, first, count;
  };
  std::vector<Block> blocks;
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences; s++) {
    const int64_t queries = first_query[s + 1] - first_query[s], keys = first_key[s + 1] - first_key[s];
    if (keys < queries) refuse("sequence ", s, " has ", queries, " queries and ", keys, " keys: a query has its own key");
    longest = std::max(longest, keys);
    for (int64_t i = 0; i < queries; i += QUERIES_AT_ONCE) blocks.push_back({s, i, std::min(QUERIES_AT_ONCE, queries - i)});
  }
  Tensor out = new_tensor(query, {query.size(0), heads, value_width}, ScalarType::Float);
  float* to = static_cast<float*>(out.data_ptr());
  const int64_t padded = (longest + LONGEST_VECTOR) / LONGEST_VECTOR * LONGEST_VECTOR, tasks = blocks.size() * heads;
  const int64_t work = QUERIES_AT_ONCE * longest * (width + value_width);
  torch::stable::parallel_for(0, tasks, grain(work), [&](int64_t begin, int64_t end) {
    std::vector<float> scores(QUERIES_AT_ONCE * padded), sums(value_width + LONGEST_VECTOR);
    for (int64_t i = begin; i < end; i++) {
      const Block& block = blocks[i / heads];
      const int64_t head = i % heads, key_head = head / heads_of_key, s = block.sequence;
      const int64_t row = first_query[s] + block.first, queries = first_query[s + 1] - first_query[s];
      const int64_t before = first_key[s + 1] - first_key[s] - queries + block.first + 1;  // keys of the first query
      const float* keys = k + first_key[s] * key.stride(0) + key_head * key.stride(1);
      const float* values = v + first_key[s] * value.stride(0) + key_head * value.stride(1);
      rows().products(
          q + row * query.stride(0) + head * query.stride(1), query.stride(0), keys, key.stride(0), scores.data(), padded,
          block.count, before + block.count - 1, width);
      for (int64_t n = 0; n < block.count; n++) {
        rows().weighted_values(
            scores.data() + n * padded, before + n, float(scale), values, value.stride(0), value_width, sums.data(),
            to + ((row + n) * heads + head) * value_width);
      }
    }
  });
  return out;
}

Tensor fixed_order_silu(Tensor x) {
  const float* from = floats(x, "x", 2);
  const int64_t rows_count = x.size(0), columns = x.size(1), stride = x.stride(0);
  Tensor out = new_tensor(x, {rows_count, columns}, ScalarType::Float);
  float* to = static_cast<float*>(out.data_ptr());
  torch::stable::parallel_for(0, rows_count, grain(16 * columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) rows().silu(from + row * stride, to + row * columns, columns);
  });
  return out;
}
