"""`python -m megatron_rl.ops`: print which compiled operators are installed and what they were built for."""

import torch

from megatron_rl.ops.library import PACKAGE, built_from, cuda_library, ops


def main() -> None:
    print(f"_C_cpu   loaded, runs {ops.instruction_set()} here")
    describe("_C_cpu.so")
    if cuda_library():
        print("_C_cuda  loaded")
        describe("_C_cuda.so")
    elif (PACKAGE / "_C_cuda.so").exists():
        print(f"_C_cuda  built, not loaded: torch {torch.__version__} has no CUDA")
        describe("_C_cuda.so")
    else:
        print(
            "_C_cuda  not built: python csrc/build.py builds it where nvcc is and torch has CUDA (--cuda yes: always)"
        )


def describe(library: str) -> None:
    for name, value in built_from(PACKAGE / library).items():
        print(f"         {name}: {' '.join(value) if isinstance(value, list) else value}")


if __name__ == "__main__":
    main()
