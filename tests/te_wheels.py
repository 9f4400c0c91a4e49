"""Real Transformer Engine on a machine without a GPU: its wheels, and a stand-in for the extension that pip compiles.

The stand-in is a library that Python loads as it would the extension. It has the enums, functions and classes that the
extension's sources declare. Whatever is called raises NotImplementedError, except for the version of cuDNN.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "te_wheels"
NAMES = "te_extension_names"
WHEELS = ("transformer-engine", "transformer-engine-cu13")
NEEDED = ("onnx", "onnxscript", "nvdlfw-inspect")
"""Packages that Transformer Engine's Python imports and nothing else here does."""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
LIBRARY = f"""
#include <Python.h>
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "transformer_engine_torch", 0, -1, 0}};
PyMODINIT_FUNC PyInit_transformer_engine_torch(void) {{
  PyObject *module = PyModule_Create(&definition), *names = PyImport_ImportModule("{NAMES}");
  if (!module || !names || PyDict_Update(PyModule_GetDict(module), PyModule_GetDict(names))) return NULL;
  return module;
}}
"""
HEAD = """
import ctypes
import enum


def get_cudnn_version():
    return ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()


def not_compiled(name):
    def raise_(*arguments, **options):
        raise NotImplementedError(f"{name} of Transformer Engine's extension, which is not compiled here")

    return raise_
"""


class NotHereError(RuntimeError):
    """A package cannot be downloaded."""


def unpacked(version: str) -> Path:
    """Return a folder with Transformer Engine's wheels of a version and their Python dependencies, downloaded once.

    Raises NotHereError with pip's reason.
    """
    folder = FOLDER / version
    if not (folder / ".complete").exists():
        for name in WHEELS:
            with zipfile.ZipFile(downloaded(name, version)) as wheel:
                wheel.extractall(folder)
        _pip("install", "--no-deps", "--target", str(FOLDER / "needed"), *NEEDED, "onnx-ir", "ml-dtypes")
        write_extension(folder, sources(version))
        (folder / ".complete").touch()
    return folder


def downloaded(name: str, version: str) -> Path:
    """Return a wheel, or an archive of sources for a package that has no wheel."""
    stem = name.replace("-", "_")
    if not (found := sorted(FOLDER.glob(f"{stem}-{version}[-.]*"))):
        _pip("download", "--no-deps", "--no-build-isolation", "-d", str(FOLDER), f"{name}=={version}")
        found = sorted(FOLDER.glob(f"{stem}-{version}[-.]*"))
    return found[0]


def sources(version: str) -> Path:
    """Return the folder of the extension's sources."""
    folder = FOLDER / f"transformer_engine_torch-{version}"
    if not folder.is_dir():
        with tarfile.open(downloaded("transformer-engine-torch", version)) as archive:
            archive.extractall(FOLDER, filter="data")
    return folder


def _pip(*words: str) -> None:
    done = subprocess.run([*PIP, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise NotHereError(f"pip {words[0]} {words[-1]}: {(done.stdout.strip() or 'no reason').splitlines()[-1]}")


def write_extension(folder: Path, declared: Path) -> None:
    """Write the stand-in to where Transformer Engine looks for its extension."""
    files = sorted(declared.rglob("*.cpp")) + sorted(declared.rglob("pybind_helper.h"))
    (folder / f"{NAMES}.py").write_text(names_of("\n".join(path.read_text(encoding="utf-8") for path in files)))
    (folder / "extension.c").write_text(LIBRARY)
    library = folder / "transformer_engine" / "wheel_lib" / "transformer_engine_torch.so"
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(["gcc", "-shared", "-fPIC", include, str(folder / "extension.c"), "-o", str(library)], check=True)


def names_of(text: str) -> str:
    """Return a Python module with the names that pybind11's declarations in C++ sources give to a module."""
    text, lines = text.replace("\\\n", "\n"), [HEAD]
    for name, values in re.findall(r'enum_<[^>]*>\(\s*\w+,\s*"(\w+)"[^;]*?\)((?:\s*\.value\("[^;]*?\))+)', text):
        members = re.findall(r'\.value\(\s*"(\w+)"', values)
        lines.append(f"{name} = enum.IntEnum({name!r}, {members!r}, start=0)")
    for name in dict.fromkeys(re.findall(r'class_<[^;]*?>\(\s*\w+,\s*"(\w+)"', text)):
        lines.append(f"{name} = type({name!r}, (), {{'__init__': not_compiled({name!r})}})")
    for name in sorted(set(re.findall(r'\bm\.def\(\s*"(\w+)"', text)) - {"get_cudnn_version"}):
        lines.append(f"{name} = not_compiled({name!r})")
    return "\n".join(lines) + "\n"
