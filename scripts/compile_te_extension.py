"""Compile the sources of Transformer Engine's PyTorch extension one by one, as pip would. No GPU is needed.

    python scripts/compile_te_extension.py [FOLDER] [--minutes 40] [--files NAME...]

It uses the version in requirements/gpu.txt, and prints one line per file: seconds of processor time, and `ok` or the
first error. FOLDER (default build/te_extension) keeps sources and object files, so a later call compiles only missing
ones. Nothing is linked. The exit status is 1 if a file does not compile, and 2 if the time limit was reached before all
files were tried.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "transformer-engine-torch"
STOPPING_NINJA = """#!/bin/sh
[ "$1" = --version ] && exec {ninja} --version
exit 1
"""
"""Replacement for ninja while setup.py runs. It lets setup.py write build.ninja, and then stops the build."""


def build_environment() -> dict[str, str]:
    """Return this process's environment with the CPATH of docs/gpu.md and with CUDA_HOME.

    Without CUDA_HOME, setup.py would use the folder of nvcc, which may only be a wrapper.
    """
    toolkit = os.environ.get("CUDA_HOME") or str(runpy.run_path(str(ROOT / "csrc" / "build.py"))["cuda_home"]())
    paths = [*include_paths(), os.environ.get("CPATH", "")]
    return os.environ | {"CPATH": ":".join(filter(None, paths)), "CUDA_HOME": toolkit}


def include_paths() -> list[str]:
    """Return the header folders that docs/gpu.md adds to CPATH, because the CUDA toolkit may lack them."""
    site = Path(sysconfig.get_path("purelib"))
    return [str(site / "nvidia" / name / "include") for name in ("cu13", "cudnn", "nccl")]


def wanted_version() -> str:
    text = (ROOT / "requirements" / "gpu.txt").read_text(encoding="utf-8")
    return re.findall(rf"^{PACKAGE}==([\d.]+)$", text, re.MULTILINE)[0]


def sources(folder: Path, environment: dict[str, str]) -> Path:
    """Return the folder of the unpacked sources. Download them if they are missing."""
    version = wanted_version()
    found = sorted(folder.glob(f"transformer_engine_torch-{version}/setup.py"))
    if not found:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", PACKAGE]
        subprocess.run([*pip, "-d", str(folder), f"{PACKAGE}=={version}"], check=True, env=environment)
        (archive,) = folder.glob(f"transformer_engine_torch-{version}.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        found = sorted(folder.glob(f"transformer_engine_torch-{version}/setup.py"))
    return found[0].parent


def commands(source: Path, environment: dict[str, str]) -> list[dict[str, str]]:
    """Return the compiler commands of setup.py's build, as entries (directory, command, file, output) of ninja."""
    ninja = shutil.which("ninja")
    if ninja is None:
        sys.exit("ninja is not on PATH: install it (pip install ninja), as Transformer Engine's build needs it too.")
    tools, objects = source.parent / "tools", source.parent / "objects"
    tools.mkdir(exist_ok=True)
    (tools / "ninja").write_text(STOPPING_NINJA.format(ninja=ninja))
    (tools / "ninja").chmod(0o755)
    stopped = environment | {"PATH": f"{tools}:{environment['PATH']}"}
    begun = [sys.executable, "setup.py", "build_ext", "--build-temp", str(objects), "--build-lib", str(objects)]
    done = subprocess.run(begun, cwd=source, env=stopped, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    written = sorted(objects.rglob("build.ninja"))
    if not written:
        sys.exit(f"setup.py has written no build.ninja:\n{done.stdout[-3000:]}")
    said = subprocess.run(
        [ninja, "-C", str(written[0].parent), "-t", "compdb"], capture_output=True, text=True, check=True
    )
    return json.loads(said.stdout[said.stdout.index("[") :])


def compile_file(entry: dict[str, str], environment: dict[str, str]) -> tuple[bool, float, str]:
    """Return whether a file compiles, the processor time it took in seconds, and the first error or ''."""
    before = processor_seconds()
    done = subprocess.run(
        entry["command"], shell=True, cwd=entry["directory"], env=environment, capture_output=True, text=True
    )
    errors = [line for line in done.stderr.splitlines() if re.search(r"\berror\b", line)] or done.stderr.splitlines()
    return done.returncode == 0, processor_seconds() - before, errors[0] if done.returncode and errors else ""


def processor_seconds() -> float:
    """Return the processor time, in seconds, of all finished commands. Other load on the machine hardly affects it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "te_extension")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no file after these; 0 sets no limit")
    parser.add_argument("--files", nargs="*", help="parts of the names of files; left out, all")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    environment = build_environment()
    source = sources(arguments.folder.resolve(), environment)
    entries = commands(source, environment)
    if arguments.files:
        entries = [it for it in entries if any(name in it["file"] for name in arguments.files)]
    begun, failed = time.monotonic(), 0
    print(f"{PACKAGE} {wanted_version()}: {len(entries)} files", flush=True)
    for count, entry in enumerate(entries):
        if arguments.minutes and time.monotonic() - begun > arguments.minutes * 60:
            print(f"{count} of {len(entries)} files in {arguments.minutes:g} minutes, {failed} of them do not compile")
            return 2
        if (Path(entry["directory"]) / entry["output"]).exists():
            print(f"          {Path(entry['file']).relative_to(source)}: compiled before")
            continue
        is_ok, seconds, error = compile_file(entry, environment)
        failed += not is_ok
        name = Path(entry["file"]).relative_to(source)
        print(f"{seconds:6.1f} s  {name}: {'ok' if is_ok else error}", flush=True)
    print(f"{len(entries) - failed} of {len(entries)} files compile, {processor_seconds():.0f} s of processor time")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
