"""`python -m megatron_rl.ops`: print which compiled operators are installed and what they were built for."""

import torch

from megatron_rl.ops.library import PACKAGE, built_from, cuda_library, ops


def main() -> None:
    cuda = "not built: python csrc/build.py builds it where nvcc is and torch has CUDA (--cuda yes: always)"
    if cuda_library():
        cuda = "loaded"
    elif (PACKAGE / "_C_cuda.so").exists():
        cuda = f"built, not loaded: torch {torch.__version__} has no CUDA"
    for name, state in (("_C_cpu", f"loaded, runs {ops.instruction_set()} here"), ("_C_cuda", cuda)):
        print(f"{name:8} {state}")
        for key, value in built_from(PACKAGE / f"{name}.so").items():
            print(f"         {key}: {' '.join(value) if isinstance(value, list) else value}")


if __name__ == "__main__":
    main()
