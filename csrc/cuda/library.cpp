// The CUDA library: implementations for the schemas that _C_cpu defines. Emulated, it defines its own for CPU tensors.
#include "../operators.h"

#ifdef EMULATED
#include "../schemas.h"
STABLE_TORCH_LIBRARY(megatron_rl_emulated, library) { define_operators(library); }
STABLE_TORCH_LIBRARY_IMPL(megatron_rl_emulated, CPU, library) { implement_operators(library); }
#else
STABLE_TORCH_LIBRARY_IMPL(megatron_rl, CUDA, library) { implement_operators(library); }
#endif
