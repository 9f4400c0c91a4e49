"""Rows and functions that a Python program passes to a run.

They are stored in run.folder/given, in files named by a hash of their content, for the run's other processes and a
resumed run. A function of a module is referred to by its import path. Any other function, such as one from a notebook,
is pickled by value into a generated module.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from megatron_rl.config.import_path import MAIN, OURS, is_in, path_of

GIVEN = "given"

MODULE = '''"""A function that a Python program gave the run of this folder, by value."""

import cloudpickle

{name} = cloudpickle.loads(bytes.fromhex({content!r}))
_own = getattr({name}, "func", {name})
if hasattr(_own, "__code__") or isinstance(_own, type):
    _own.__module__ = __name__
'''


def find_given(run_folder: str | Path) -> None:
    """Add the folder of the run's pickled functions to sys.path, for this process and those it starts.

    Only the program that passed the functions calls this. Other commands do not trust the code in a run's folder.
    """
    folder = Path(run_folder).absolute() / GIVEN
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


class Given:
    """The rows and functions that a program passes to one run.

    given = Given(Path("runs/mine"))
    sections = given.without_functions({"rollout": {"reward": lambda completions, **_: len(completions)}})
    sections["data"] = {"train": given.rows([{"prompt": "2+2=", "answer": "4"}], key="rows")}
    given.write()  # once the config is known to be right
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / GIVEN
        self.modules: list[str] = []
        """Modules that the config must name in run.import_from."""
        self._files: dict[Path, bytes] = {}

    def rows(self, rows: Iterable[Any], *, key: str) -> str:
        """Return the path of the file in which `write` will store these rows.

        key: the rows' config key, for errors. Raises ValueError if there are no rows, or if JSON cannot represent one.
        """
        lines = [line_of(row, f"{key}, row {number}") for number, row in enumerate(rows, start=1)]
        if not lines:
            raise ValueError(f"{key}: holds no rows; give at least one.")
        return str(self._add("rows", "\n".join(lines).encode() + b"\n", ".jsonl"))

    def without_functions(self, value: Any, key: str = "") -> Any:
        """Return `value`, sections of a config or a part of them, with every callable replaced by its import path.

        key: dotted key of `value`. Raises ValueError for a callable that cannot be pickled.
        """
        if isinstance(value, Mapping):
            return {name: self.without_functions(part, f"{key}.{name}".lstrip(".")) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.without_functions(part, f"{key}[{number}]") for number, part in enumerate(value)]
        # A dataclass is an entry of algo/registry.py, or a whole section, whose key has no dot.
        if callable(value) or (dataclasses.is_dataclass(value) and "." in key):
            return self._path_of(value, key) or self._by_value(value, key)
        return value

    def write(self) -> None:
        """Write the files, and make the functions importable in this process and those that it starts."""
        for path, content in self._files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}")  # all ranks may write it
            unfinished.write_bytes(content)
            os.replace(unfinished, path)
        find_given(self.folder.parent)

    def _add(self, kind: str, content: bytes, ending: str) -> Path:
        path = self.folder / f"{kind}_{hashlib.sha256(content).hexdigest()[:12]}{ending}"
        self._files[path] = content
        return path

    def _path_of(self, value: Any, key: str) -> str:
        """Return the import path of a function or class of a module; '' if the value has none.

        The module is added to `modules` if the run must import it.
        """
        origin = value.func if isinstance(value, functools.partial) else value
        home = str(getattr(origin, "__module__", MAIN))
        if home == MAIN or not (inspect.isroutine(origin) or inspect.isclass(origin)):
            return ""
        try:
            path = str(path_of(origin, key=key))
        except ValueError:  # nested, or a lambda
            return ""
        self._trust(home)
        return path if origin is value else ""

    def _trust(self, module: str) -> None:
        if not is_in(OURS, module) and module not in self.modules:
            self.modules.append(module)

    def _by_value(self, value: Any, key: str) -> str:
        """Pickle a callable by value into a generated module of its own. Return the import path of that copy."""
        try:
            pickled = cloudpickle.dumps(value)
        except Exception as error:  # user objects may raise anything
            raise ValueError(
                f"{key}: {type(error).__name__}: {error}; it runs in other processes, and something that it uses "
                f"cannot be sent to them; create that inside the function."
            ) from error
        name = name_of(value)
        path = self._add("function", MODULE.format(name=name, content=pickled.hex()).encode(), ".py")
        self._trust(path.stem)
        return f"{path.stem}:{name}"


def name_of(value: Any) -> str:
    """Return the name of a callable, or of its class if it has none; 'function' if that is no public identifier."""
    origin = value.func if isinstance(value, functools.partial) else value
    own = getattr(origin, "__name__", type(origin).__name__)
    return own if own.isidentifier() and not own.startswith("_") else "function"


def line_of(row: Any, where: str) -> str:
    """Return a row as a line of JSON. where: the row's place, for errors.

    Raises ValueError if JSON cannot represent the row.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: is a {type(row).__name__}; must be a mapping with a prompt or messages.")
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=plain)
    except (TypeError, ValueError):
        for name, value in row.items():
            try:
                json.dumps(value, allow_nan=False, default=plain)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{where}: {name!r} = {value!r:.80}: {error}; write it as text or a number, or leave it out."
                ) from error
        raise


def plain(value: Any) -> Any:
    """Convert numpy numbers and arrays to Python's. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")
