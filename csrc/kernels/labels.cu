// A thread owns one token and finds its sequence by bisection of the bounds.
#include "device.cuh"
#include "labels.cuh"

namespace {

constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS)
    labels_kernel(PackedTokens packed, int64_t* labels, int64_t* positions, int64_t* sequence_ids) {
  const int64_t t = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (t >= packed.tokens) return;
  int64_t low = 0, high = packed.sequences;  // the last sequence that begins at or before t: bounds[low] <= t < bounds[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (packed.bounds[middle] <= t) low = middle;
    else high = middle;
  }
  const bool has_label = t + 1 < packed.bounds[low + 1] && (!packed.trained || packed.trained[t + 1]);
  labels[t] = has_label ? packed.ids[t + 1] : -100;
  positions[t] = t - packed.bounds[low];
  sequence_ids[t] = low;
}

}  // namespace

void launch_labels(
    const PackedTokens& packed, int64_t* labels, int64_t* positions, int64_t* sequence_ids, cudaStream_t stream) {
  launch(labels_kernel, (packed.tokens + THREADS - 1) / THREADS, THREADS, stream, packed, labels, positions, sequence_ids);
}
