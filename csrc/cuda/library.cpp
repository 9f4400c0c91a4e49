// The CUDA library: implementations for the schemas that _C_cpu defines.
#include "../operators.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_rl, CUDA, library) { implement_operators(library); }
