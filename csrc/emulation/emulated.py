"""Builds the emulated device, one library: nvcc's host code of the kernels, their PTX as C++, csrc/cuda, a machine.

`python -m csrc.emulation.emulated` builds it and prints where it is. What was compiled stays in build/csrc/emulated,
under the hash of all it depends on. Needs nvcc: the machine's, or that of requirements/nvcc.txt.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from csrc import build as operators
from csrc.emulation.translate import translate

HERE = Path(__file__).resolve().parent
OBJECTS = operators.OBJECTS / "emulated"
TARGET = "-gencode=arch=compute_90,code=compute_90"
# No contraction and wrapping integers: a statement computes what its instruction does. Registers may be read unset in
# code that is never reached.
PTX_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-ffp-contract=off", "-fwrapv", "-fno-math-errno", "-w"]
MACHINE_FLAGS = ["-std=c++20", "-O2", "-fPIC", "-Wall", "-ffp-contract=off"]
PARTS = 4  # of a long translation, which are compiled at the same time


def missing() -> str:
    """Why there can be no emulated device on this machine; empty where there can."""
    if operators.nvcc() is None:
        return "needs nvcc: install the CUDA toolkit, or pip install -r requirements/nvcc.txt"
    return "" if shutil.which(os.environ.get("CXX", "g++")) else "needs a C++ compiler"


def build() -> Path:
    """The library; current already, or made."""
    sources = sorted((operators.SOURCES / "kernels").glob("*.cu"))
    bindings = operators.binding_units("-DUSE_CUDA", f"-isystem{operators.cuda_home()}/include")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = [pool.submit(compile_kernel, source) for source in sources]
        rest = [pool.submit(operators.Unit.build, unit) for unit in bindings]
        rest += [pool.submit(compiled, HERE / name, flags) for name, flags in machine_flags().items()]
        folders = [waited.result() for waited in kernels]
        texts = [text for folder in folders for text in translated(folder)]
        objects = list(pool.map(lambda path: compiled(path, [*PTX_FLAGS, f"-I{HERE}"]), texts))
        objects += [waited.result() for waited in rest if waited.result()]
    return linked([*objects, *(folder / "kernel.o" for folder in folders), *(unit.object for unit in bindings)])


def machine_flags() -> dict[str, list[str]]:
    """The device's own sources and how each is compiled."""
    torch = operators.torch_folder() / "include"
    return {
        "torch_device.cpp": [*MACHINE_FLAGS, f"-isystem{torch}", f"-isystem{torch}/torch/csrc/api/include"],
        "runtime.cpp": [*MACHINE_FLAGS, f"-isystem{operators.cuda_home()}/include"],
        "machine.cpp": MACHINE_FLAGS,
        "memory.cpp": MACHINE_FLAGS,
    }


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def compile_kernel(source: Path) -> Path:
    """The folder with a kernel's PTX and the host code that nvcc made with it: they name kernels alike."""
    command = [str(operators.nvcc()), *operators.CUDA_FLAGS, TARGET, "-c", str(source)]
    folder = OBJECTS / f"{source.stem}-{digest(*command, source.read_text(), operators.headers_hash())}"
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        partial.mkdir(parents=True)
        operators.run([*command, "--keep", "--keep-dir", str(partial)], partial / "kernel.o")
        (partial / f"{source.stem}.ptx").rename(partial / "kernel.ptx")
        for path in partial.iterdir():
            if path.name not in ("kernel.o", "kernel.ptx"):
                path.unlink()
        partial.rename(folder)
    return folder


def translated(folder: Path) -> list[Path]:
    """The C++ files of a kernel's PTX, beside it."""
    text = (folder / "kernel.ptx").read_text()
    programs = "".join((HERE / name).read_text() for name in ("ptx.py", "translate.py"))
    target = folder / digest(programs)
    if not target.exists():
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.mkdir()
        for i, part in enumerate(translate(text, PARTS)):
            (partial / f"{folder.name.partition('-')[0]}_{i}.cpp").write_text(part)
        partial.rename(target)
    return sorted(target.glob("*.cpp"))


def compiled(source: Path, flags: list[str]) -> Path:
    headers = "".join(path.read_text() for path in sorted(HERE.glob("*.h")))
    made = OBJECTS / f"{source.stem}-{digest(*flags, source.read_text(), headers)}.o"
    if not made.exists():
        operators.run([operators.cxx(), *flags, "-c", str(source)], made)
    return made


def linked(objects: list[Path]) -> Path:
    names = [str(path) for path in objects]
    library, torch = OBJECTS / f"device-{digest(*names)}.so", operators.torch_folder() / "lib"
    if not library.exists():
        flags = [f"-L{torch}", f"-Wl,-rpath,{torch}", "-lc10", "-ltorch_cpu", "-Wl,-z,defs"]
        operators.run([operators.cxx(), "-shared", *names, *flags], library)
    return library


def program(ptx: str) -> Path:
    """A library with the machine and the kernels of one PTX text, without torch and without their host code."""
    (text,) = translate(ptx)
    OBJECTS.mkdir(parents=True, exist_ok=True)
    source = OBJECTS / f"program-{digest(text)}.cpp"
    source.write_text(text)
    parts = [
        (source, [*PTX_FLAGS, f"-I{HERE}"]),
        *((HERE / name, MACHINE_FLAGS) for name in ("machine.cpp", "memory.cpp")),
    ]
    return linked([compiled(path, flags) for path, flags in parts])


if __name__ == "__main__":
    print(build())
