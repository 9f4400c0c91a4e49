"""Build the operators: `python csrc/build.py`. Libraries that are up to date are not built again.

Builds megatron_rl/_C_cpu.so with a C++20 compiler. Builds megatron_rl/_C_cuda.so if nvcc is found and the installed
torch has CUDA. Both use torch's stable ABI, so one build works with every Python and every torch from 2.10 on. Needs no
GPU, and does not import torch. A .json file next to each library records what it was built from. Object files stay in
build/csrc, named by a hash of everything that they depend on.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
PACKAGE = SOURCES.parent / "megatron_rl"
OBJECTS = SOURCES.parent / "build" / "csrc"
RESOURCES = SOURCES / "resources.json"

ARCHITECTURES = ("80", "90a", "100")
"""Compute capabilities that kernels are compiled for. PTX of the last one is included, for later devices."""

CPU_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-Wall"]
CUDA_FLAGS = ["-std=c++20", "-O3", "-lineinfo", "-Xcompiler=-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr"]
INSTRUCTION_SETS = {"x86_64": {"baseline": "x86-64", "avx2": "haswell", "avx512": "skylake-avx512"}}
"""Instruction sets by machine: name -> value of -march. rows.cpp is compiled for each; one is chosen at load time.

On other machines, rows.cpp is compiled without -march.
"""


class BuildError(RuntimeError):
    """The operators cannot be built. The message names what is missing and how to get it."""


@dataclass(frozen=True)
class Unit:
    """One object file: its source file and the command that compiles it."""

    source: Path
    compiler: tuple[str, ...]

    @property
    def object(self) -> Path:
        digest = hashlib.sha256("\n".join([*self.compiler, self.source.read_text(), headers_hash()]).encode())
        return OBJECTS / f"{self.source.stem}-{digest.hexdigest()[:16]}.o"

    def build(self) -> None:
        if not self.object.exists():
            run([*self.compiler, "-c", str(self.source)], self.object)


def sources(*suffixes: str) -> list[Path]:
    """Return the operators' source files with these suffixes, without csrc/emulation, which only tests use."""
    paths = sorted(path for path in SOURCES.rglob("*") if path.suffix in suffixes)
    return [path for path in paths if path.parent.name != "emulation"]


def headers_hash() -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources(".h", ".cuh"))).hexdigest()


def sources_hash() -> str:
    """Return a hash of all sources. The loader compares it with the hash that a library was built from."""
    paths = sources(".h", ".cuh", ".cpp", ".cu", ".py")
    parts = [part for path in paths for part in (str(path.relative_to(SOURCES)).encode(), path.read_bytes())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def run(command: list[str], output: Path) -> str:
    """Run a compiler that writes `output`, and return what it printed. On failure there is no output file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"building {output.name} failed:\n{' '.join(command)}\n{done.stdout}{done.stderr}")
    partial.replace(output)
    return done.stdout + done.stderr


def cxx() -> str:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildError(
            f"no C++ compiler: {os.environ.get('CXX', 'g++')} is not on PATH. The operators are compiled on this "
            f"machine; install GCC 11 or newer (apt-get install g++, dnf install gcc-c++, conda install gxx) or name "
            f"one in CXX, then run: python csrc/build.py"
        )
    return compiler


def nvcc() -> str | None:
    """Return the path of nvcc: in CUDA_HOME, on PATH, or from pip's nvidia-cuda-nvcc. None if there is none."""
    home = os.environ.get("CUDA_HOME")
    from_pip = ":".join(str(path) for path in Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin"))
    return (
        shutil.which("nvcc", path=f"{home}/bin" if home else None)
        or shutil.which("nvcc")
        or shutil.which("nvcc", path=from_pip)
    )


def cuda_home() -> Path:
    """Return the CUDA toolkit's folder as reported by nvcc, because the nvcc on PATH may be a wrapper elsewhere."""
    said = subprocess.run([str(nvcc()), "--dryrun", "-c", "none.cu"], capture_output=True, text=True).stderr
    return next(Path(line.partition("TOP=")[2]).resolve() for line in said.splitlines() if "TOP=" in line)


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed for this Python; install it, then run: python csrc/build.py")
    return Path(spec.origin).parent


def torch_versions() -> tuple[str, str | None]:
    """Return the versions of torch and of its CUDA (or None), without importing torch, which takes seconds."""
    names: dict[str, str | None] = {}
    for line in (torch_folder() / "version.py").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.partition(":")[0].strip() in ("__version__", "cuda"):
            names[name.partition(":")[0].strip()] = None if "None" in value else value.strip(" '\"")
    return str(names["__version__"]), names["cuda"]


def torch_flags() -> list[str]:
    include = torch_folder() / "include"
    return [
        f"-isystem{include}",
        f"-isystem{include}/torch/csrc/api/include",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
    ]


def cpu_units() -> list[Unit]:
    compiler = (cxx(), *CPU_FLAGS)
    plain = [p for p in sorted((SOURCES / "cpu").glob("*.cpp")) if p.stem != "rows"]
    units = [Unit(path, (*compiler, *torch_flags())) for path in plain]
    for name, march in INSTRUCTION_SETS.get(platform.machine(), {"baseline": None}).items():
        flags = [f"-DROWS=rows_{name}", *([f"-march={march}"] if march else [])]
        units.append(Unit(SOURCES / "cpu" / "rows.cpp", (*compiler, "-Wno-psabi", *flags)))
    return units


def kernel_units(architectures: tuple[str, ...]) -> list[Unit]:
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    newest = architectures[-1]
    targets.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    return [Unit(p, (str(nvcc()), *CUDA_FLAGS, *targets)) for p in sorted((SOURCES / "kernels").glob("*.cu"))]


def binding_units(*flags: str) -> list[Unit]:
    compiler = (cxx(), *CPU_FLAGS, *torch_flags(), *flags)
    return [Unit(path, compiler) for path in sorted((SOURCES / "cuda").glob("*.cpp"))]


def link(units: list[Unit], library: Path, *flags: str) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(Unit.build, units))
    folder = torch_folder() / "lib"
    objects = [str(unit.object) for unit in units]
    # Link the compiler's own libstdc++ first. Torch's libraries export some constructors of another version, and a
    # string stream that mixes both versions crashes when a number is written to it.
    libraries = ["-Wl,--no-as-needed", "-lstdc++", "-ltorch_cpu", "-lc10"]
    run([cxx(), "-shared", *objects, f"-L{folder}", *libraries, *flags], library)


def cuda_link_flags() -> list[str]:
    """Return the linker flags of _C_cuda.so.

    The library depends on libtorch_cuda.so by name, even if the installed torch has none. An empty stand-in with this
    name satisfies the linker.
    """
    stand_in = OBJECTS / "stand_in" / "libtorch_cuda.so"
    run([cxx(), "-shared", "-xc++", "/dev/null", "-Wl,-soname,libtorch_cuda.so"], stand_in)
    cudart = [f"-L{cuda_home() / name}" for name in ("lib64", "lib")]
    return [f"-L{stand_in.parent}", "-ltorch_cuda", *cudart, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


def write_if_stale(library: Path, built_for: dict[str, object], make: Callable[[], None]) -> bool:
    """Build the library and return True, unless its .json file shows that it is up to date.

    built_for: what the build depends on in addition to the sources.
    """
    record = library.with_suffix(".json")
    wanted = {"sources": sources_hash(), **built_for}
    if library.exists() and record.exists() and json.loads(record.read_text()) == wanted:
        return False
    record.unlink(missing_ok=True)
    make()
    record.write_text(json.dumps(wanted, indent=1) + "\n")
    return True


def build_cpu() -> bool:
    sets = list(INSTRUCTION_SETS.get(platform.machine(), {"baseline": None}))
    built_for = {"compiler": cxx(), "torch headers": torch_versions()[0], "instruction sets": sets}
    return write_if_stale(PACKAGE / "_C_cpu.so", built_for, lambda: link(cpu_units(), PACKAGE / "_C_cpu.so"))


def build_rehearsal() -> bool:
    """Build the stand-in for a CUDA device, for this torch version only: it does not use the stable ABI."""
    library, folder = PACKAGE / "_C_rehearsal.so", torch_folder()
    command = [cxx(), "-std=c++20", "-O1", "-shared", "-fPIC", f"-isystem{folder / 'include'}"]
    command += [str(SOURCES / "rehearsal" / "shim.cpp"), f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}"]
    built_for: dict[str, object] = {"compiler": cxx(), "torch": torch_versions()[0], "torch's folder": str(folder)}
    # With these dependencies, a torch with CUDA registers its own device before the shim registers another.
    libraries = ["-lc10", "-ltorch_cpu", *(["-ltorch_cuda"] if torch_versions()[1] else [])]
    return write_if_stale(
        library, built_for, lambda: run([*command, "-Wl,--no-as-needed", *libraries], library) and None
    )


def build_cuda(architectures: tuple[str, ...]) -> bool:
    if nvcc() is None:
        raise BuildError("nvcc is not found on PATH or in CUDA_HOME: install the CUDA toolkit, or build with --cuda no")
    built_for = {"compiler": nvcc(), "torch headers": torch_versions()[0], "architectures": list(architectures)}
    library = PACKAGE / "_C_cuda.so"

    def compile_and_link() -> None:
        units = kernel_units(architectures) + binding_units("-DUSE_CUDA", f"-isystem{cuda_home()}/include")
        link(units, library, *cuda_link_flags())

    return write_if_stale(library, built_for, compile_and_link)


def architectures_built() -> tuple[str, ...]:
    """Return the architectures of the existing _C_cuda.so, or ARCHITECTURES. Builds that name none use these."""
    record = PACKAGE / "_C_cuda.json"
    return tuple(json.loads(record.read_text())["architectures"]) if record.exists() else ARCHITECTURES


def build(cuda: str = "auto", architectures: tuple[str, ...] | None = None) -> list[str]:
    """Build the libraries that are not up to date, and return their names. cuda: auto, yes or no."""
    built = ["_C_cpu.so"] if build_cpu() else []
    built += ["_C_rehearsal.so"] if build_rehearsal() else []
    if cuda == "yes" or (cuda == "auto" and nvcc() and torch_versions()[1]):
        built += ["_C_cuda.so"] if build_cuda(architectures or architectures_built()) else []
    return built


def resources(architectures: tuple[str, ...] = ARCHITECTURES) -> dict[str, dict[str, int]]:
    """Return `{architecture: {kernel: registers per thread}}` from ptxas. Raises BuildError if a kernel spills."""
    jobs = [(name, unit) for name, units in cubin_units(architectures).items() for unit in units]
    found: dict[str, dict[str, int]] = {name: {} for name, _ in jobs}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (name, _), said in zip(jobs, pool.map(lambda job: ptxas_report(job[1]), jobs), strict=True):
            found[name] |= registers_in(said)
    return found


def cubin_units(architectures: tuple[str, ...]) -> dict[str, list[Unit]]:
    """Return the units that compile each kernel source to machine code (cubin), by architecture."""
    units: dict[str, list[Unit]] = {}
    for architecture in architectures:
        flags = (*CUDA_FLAGS, f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-Xptxas=-v", "-cubin")
        sources = sorted((SOURCES / "kernels").glob("*.cu"))
        units[f"sm_{architecture}"] = [Unit(source, (str(nvcc()), *flags)) for source in sources]
    return units


def ptxas_report(unit: Unit) -> str:
    """Return what ptxas prints for a source. The text is kept in a file, like an object file."""
    kept = unit.object.with_suffix(".txt")
    if not kept.exists():
        kept.write_text(run([*unit.compiler, str(unit.source)], unit.object.with_suffix(".cubin")))
    return kept.read_text()


def registers_in(report: str) -> dict[str, int]:
    readable = subprocess.run(["c++filt"], input=report, capture_output=True, text=True, check=True).stdout
    found, kernel = {}, ""
    for line in readable.splitlines():
        if "Compiling entry function" in line:
            kernel = line.split("'")[1].partition("::")[2].partition("(")[0]
        elif "spill stores" in line and "0 bytes spill stores, 0 bytes spill loads" not in line:
            raise BuildError(f"{kernel} spills: {line.strip()}")
        elif "Used" in line and "registers" in line:
            found[kernel] = int(line.partition("Used ")[2].split()[0])
    return found


def nvcc_version() -> str:
    said = subprocess.run([str(nvcc()), "--version"], capture_output=True, text=True, check=True).stdout
    return said.partition(", V")[2].split()[0]


def nvdisasm() -> str | None:
    """Return the path of nvdisasm: on PATH, next to nvcc, or from pip's nvidia-cuda-nvdisasm. None if not found."""
    package = importlib.util.find_spec("nvidia")
    packaged = [
        str(place)
        for root in (package.submodule_search_locations or [] if package else [])
        for place in Path(root).glob("*/bin")
    ]
    places = [os.environ.get("PATH", ""), *([str(cuda_home() / "bin")] if nvcc() else []), *packaged]
    return shutil.which("nvdisasm", path=os.pathsep.join(places))


def report(architectures: tuple[str, ...] = ARCHITECTURES) -> dict:
    """Return the content of resources.json: registers, instructions and predicted speeds of every kernel."""
    if nvcc() is None or nvdisasm() is None:
        missing = "nvcc" if nvcc() is None else "nvdisasm"
        raise BuildError(
            f"{missing} is not found: the report reads machine code. pip install nvidia-cuda-nvdisasm has nvdisasm"
        )
    registers, units = resources(architectures), cubin_units(architectures)
    cubins = {name: [unit.object.with_suffix(".cubin") for unit in of_one] for name, of_one in units.items()}
    return sass_report()["report"](nvcc_version(), str(nvdisasm()), cubins, registers)


def sass_report() -> dict:
    return runpy.run_path(str(SOURCES / "sass_report.py"))


def write_report() -> None:
    found, readme = report(), SOURCES / "README.md"
    RESOURCES.write_text(json.dumps(found, indent=1) + "\n")
    before, mark, _ = readme.read_text().partition("<!-- build.py --report writes what follows -->\n")
    readme.write_text(before + mark + "\n" + sass_report()["tables"](found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cuda", choices=("auto", "yes", "no"), default="auto", help="auto: where nvcc is, for a torch with CUDA"
    )
    parser.add_argument("--architectures", help="compute capabilities, e.g. 90a; else those of the build before")
    parser.add_argument(
        "--report", action="store_true", help="write resources.json and its tables in README.md and stop"
    )
    arguments = parser.parse_args()
    try:
        if arguments.report:
            return write_report()
        built = build(arguments.cuda, tuple(arguments.architectures.split(",")) if arguments.architectures else None)
    except BuildError as error:
        sys.exit(f"csrc/build.py: {error}")
    if built:
        print(f"==> built {', '.join(built)} in {PACKAGE}")


if __name__ == "__main__":
    main()
