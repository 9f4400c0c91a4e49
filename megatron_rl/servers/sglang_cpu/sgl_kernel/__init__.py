"""Stands in for SGLang's compiled kernels, of which there is no CPU wheel.

SGLang imports their names at start, but takes torch's own operators on a CPU without AMX: any name and submodule can be
imported, and calling one raises.
"""

import importlib.abc
import importlib.machinery
import sys

__version__ = "0.0.0"


class Missing:
    """A kernel that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):  # else inspect and copy would take this object for many things
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} is a CUDA kernel, and this is the stand-in for hosts without CUDA")


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every `sgl_kernel.x.y`, as an empty module with missing names."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module) -> None:
        module.__getattr__ = Missing(module.__name__).__getattr__


__getattr__ = Missing(__name__).__getattr__
sys.meta_path.append(Submodules())
