"""Stand-in for SGLang's compiled kernels, which have no CPU wheel.

SGLang imports the kernels' names when it starts, but on a CPU without AMX it uses torch's own operators. So any name
and submodule can be imported from here, and calling a kernel raises NotImplementedError.
"""

import importlib.abc
import importlib.machinery
import sys

__version__ = "0.0.0"


class Missing:
    """Stand-in for one kernel; calling it raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):  # else inspect and copy would take this object for many things
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} is a CUDA kernel, and this is the stand-in for hosts without CUDA")


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that provides every `sgl_kernel.x.y` as a module whose names are all `Missing` kernels."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module) -> None:
        module.__getattr__ = Missing(module.__name__).__getattr__


__getattr__ = Missing(__name__).__getattr__
sys.meta_path.append(Submodules())
