"""An import hook that rewrites megatron.core's code objects, and applies fixes to its modules after their import.

For tests on the CPU, it also rewrites the code objects of Transformer Engine. Source files, .pyc files and line numbers
stay unchanged.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, ModuleType

Rewrite = Callable[[CodeType], CodeType]
Fixes = Mapping[str, Callable[[ModuleType], None]]
Surroundings = Callable[[str], AbstractContextManager]
"""Function that returns the context manager in which the module of a given name is executed."""


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, finder: _Finder) -> None:
        super().__init__(name, path)
        self.finder = finder

    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        rewrite = self.finder.rewrite
        return code if code is None or rewrite is None else rewrite(code)

    def exec_module(self, module: ModuleType) -> None:
        with self.finder.surroundings(module.__name__):
            super().exec_module(module)
        if fix := self.finder.after_import.get(module.__name__):
            fix(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, rewrite: Rewrite | None, surroundings: Surroundings, after_import: Fixes) -> None:
        self.rewrite, self.surroundings, self.after_import = rewrite, surroundings, after_import

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(("megatron.core", "transformer_engine.")):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        # Replaces subclasses too, such as beartype's loader. Extension modules have no code to rewrite.
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self)
        return spec


def install(
    *, after_import: Fixes, rewrite: Rewrite | None = None, surroundings: Surroundings = lambda name: nullcontext()
) -> bool:
    """Install the hook. Returns False if it is already installed.

    Raises RuntimeError if megatron.core has already been imported.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return False
    # A partly rewritten megatron.core would be worse than an error.
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise RuntimeError(
            "megatron.core is imported already: megatron_rl.platform.prepare() must run first; import "
            "megatron_rl.engine before anything that imports megatron.core."
        )
    # First in the list: otherwise the default finder would be used.
    sys.meta_path.insert(0, _Finder(rewrite, surroundings, after_import))
    return True
