// The CUDA library: implementations for the schemas that _C_cpu defines.
#include "../operators.h"

Tensor tile_hashes(
    std::vector<Tensor> parts, std::vector<int64_t> counts, std::vector<int64_t> begins, std::vector<int64_t> wholes);

STABLE_TORCH_LIBRARY_IMPL(megatron_rl, CUDA, library) {
  implement_operators(library);
  library.impl("tile_hashes", TORCH_BOX(&tile_hashes));
}
