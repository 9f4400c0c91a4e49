"""Imports Transformer Engine's own Python with fake kernels (te_extension) in place of its compiled libraries.

The package `transformer-engine` on PyPI has only Python sources, 1.2 MB, and needs no CUDA. `make` installs it into the
folder `share/te` of the Python environment, where Megatron-Core does not find it, because Megatron-Core fails if the
libraries are missing. If Transformer Engine is installed with its libraries, its sources are used instead, and the
libraries are not loaded.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_rl.tools.rehearsal.te_extension import FUNCTIONS, NAME, Extension

PACKAGE = "transformer_engine"
FOLDER = Path(sys.prefix) / "share" / "te"
IMPORTED = ("pydantic", "triton")
"""Packages that Transformer Engine's sources import, and that megatron_rl does not require."""


def sources() -> Path:
    """Return the folder that contains the package `transformer_engine`.

    Raises ValueError if there is none, or if a package that it imports is missing.
    """
    if missing := [name for name in IMPORTED if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"{' and '.join(missing)}: not installed, and imported by Transformer Engine's Python sources, which a "
            f"rehearsal runs; `{sys.executable} -m pip install {' '.join(missing)}` installs it."
        )
    spec = importlib.util.find_spec(PACKAGE)
    installed = [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
    for place in (*installed, FOLDER):
        if (place / PACKAGE / "pytorch" / "__init__.py").exists():
            return place
    raise ValueError(
        f"{FOLDER} has no {PACKAGE}, and none is installed: a rehearsal runs Transformer Engine's Python sources. "
        f"`{sys.executable} -m pip install --no-deps --target {FOLDER} 'transformer-engine>=2.17,<2.21'` brings them, "
        f"without CUDA and without a compiler."
    )


def version() -> str:
    """Return the version of Transformer Engine's sources."""
    return next(iter(metadata.distributions(name=PACKAGE, path=[str(sources())]))).version


def install() -> None:
    """Import Transformer Engine, in a process that is used only for rehearsals and tests.

    Raises RuntimeError if megatron.core is already imported, because that looks for Transformer Engine only once.
    """
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise RuntimeError("megatron.core is imported already, without Transformer Engine; call install() before it.")
    load()


def load() -> None:
    """Import Transformer Engine without its libraries, and replace its functions that need them or a GPU."""
    # The package's own __init__ would look for the libraries, and import the modules for JAX.
    package: Any = ModuleType(PACKAGE)
    package.__version__, package.__path__ = version(), [str(sources() / PACKAGE)]
    package.__spec__ = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
    extension = Extension(NAME, FUNCTIONS)
    # The exports to ONNX import the package onnxscript.
    exports = f"{PACKAGE}.pytorch.onnx_extensions"
    sys.modules |= {PACKAGE: package, NAME: extension, exports: Extension(exports, {})}
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # the common module then loads no library
    common: Any = importlib.import_module(f"{PACKAGE}.common")
    common.load_framework_extension = lambda framework: None
    importlib.import_module(f"{PACKAGE}.pytorch")
    products: Any = importlib.import_module(f"{PACKAGE}.pytorch.cpp_extensions.gemm")
    products.get_cublas_workspace_size_bytes = lambda: 0  # a plan counts these as reserved memory, as it does torch's
    # This module starts with `from transformer_engine_torch import *`.
    sys.modules[f"{PACKAGE}.pytorch.cpp_extensions"].__getattr__ = extension.__getattr__  # type: ignore[method-assign]
    attention: Any = importlib.import_module(f"{PACKAGE}.pytorch.attention.dot_product_attention.utils")
    choose = attention.get_attention_backend
    # Transformer Engine chooses a kernel by the tensors' class, and does not know FakeTensor.
    attention.get_attention_backend = lambda params: choose(replace(params, qkv_type=torch.Tensor))
