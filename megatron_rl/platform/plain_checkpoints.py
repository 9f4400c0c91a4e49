"""Safe reading of checkpoints: their pickles may contain only numbers, tensors and tensor locations.

A checkpoint may come from an untrusted source, and a pickle can run arbitrary code. In torch's checkpoint format
(torch.distributed.checkpoint, torch 2.13), the file `.metadata` is a pickle that torch loads without a check. Objects
that are not tensors are loaded with weights_only=False.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
from torch.distributed.checkpoint import CheckpointException, default_planner, filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

CHECKPOINT_MODULES = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner"))
FUNCTIONS = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}
KEY_PARTS = (str, int, type(None), torch.Size)
FAULTS = (
    *(AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError, OverflowError, RecursionError),
    *(RuntimeError, TypeError, ValueError),
)
"""Errors that reading a broken pickle may raise."""
_REBUILD_ARRAY = np.empty(0).__reduce__()[0]
DATA = [
    *(np.ndarray, np.dtype, np.dtypes.UInt32DType, _REBUILD_ARRAY),  # NumPy's random state
    (_REBUILD_ARRAY, "numpy.core.multiarray._reconstruct"),  # the name in pickles written by NumPy 1
    io.BytesIO,  # Transformer Engine's extra state
]


# The Python unpickler, because the C one cannot restrict what a pickle changes. It adds half a minute for a million
# tensor pieces.
class _MetadataUnpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Unpickler that creates only records of data, and that modifies no existing class, enum or function."""

    dispatch = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def load(self) -> Metadata:
        try:
            found = super().load()
        except pickle.UnpicklingError:
            raise
        except FAULTS as error:
            raise pickle.UnpicklingError(f"no pickle of records ({type(error).__name__}: {error})") from error
        if type(found) is not Metadata:
            raise pickle.UnpicklingError(f"holds a {type(found).__name__} and no Metadata")
        for place in (found.storage_data or {}).values():
            name = place.relative_path if type(place) is filesystem._StorageInfo else place
            if not (isinstance(name, str) and PurePath(name).name == name != ".."):
                raise pickle.UnpicklingError(f"keeps a tensor in {name!r:.200}, outside of its folder")
        return found

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in FUNCTIONS:
            return super().find_class(module, name)
        if "." not in name and module in (*CHECKPOINT_MODULES, "torch"):  # a dot would reach attributes of the class
            found = super().find_class(module, name)
            is_record = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
            if isinstance(found, torch.dtype) or (is_record and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {module}.{name}")  # same wording as torch's error

    def load_build(self) -> None:
        state, record = self.stack[-1], self.stack[-2]
        kind = type(record)
        is_own = dataclasses.is_dataclass(kind) and (
            hasattr(kind, "__setstate__")
            or (isinstance(state, dict) and all(isinstance(name, str) and name[:1] != "_" for name in state))
        )
        if not is_own:
            name = record.__name__ if isinstance(record, type) else f"a {kind.__name__}"
            raise pickle.UnpicklingError(f"sets attributes of {name}, which is no record")
        super().load_build()

    def _check_keys(self, keys: Iterable[Any]) -> None:
        for key in keys:  # hashing a deeply nested key would overflow the C stack
            parts = (key.fqn, key.offset, key.index) if type(key) is MetadataIndex else (key,)
            if not all(type(part) in KEY_PARTS for part in parts):
                raise pickle.UnpicklingError(f"has a key of type {type(key).__name__}")

    def load_setitem(self) -> None:
        self._check_keys([self.stack[-2]])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_setitems()

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    _extensions = (pickle.EXT1, pickle.EXT2, pickle.EXT4)
    for _code in (pickle.DICT, pickle.ADDITEMS, pickle.FROZENSET, pickle.INST, pickle.OBJ, *_extensions):
        del dispatch[_code[0]]  # opcodes that our checkpoints never contain


def check_objects(file: str | Path | IO[bytes]) -> None:
    """Raise UnpicklingError if a torch.save file contains a type that our checkpoints never contain."""
    with torch.serialization.safe_globals(DATA):
        torch.load(file, map_location="cpu", weights_only=True)


@contextmanager
def refusing_code(path: str | Path) -> Iterator[None]:
    """Convert unpickling errors inside this context into a RuntimeError that names the checkpoint and the fault."""
    try:
        yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))  # torch passes the original exception on as text
        if named is None:
            fault = str(error).rstrip().rpartition("\n")[2].rpartition("metadata read failed: ")[2]
            raise RuntimeError(
                f"checkpoint {str(path)!r}: cannot be read ({fault}); take a checkpoint that this package has "
                f"written, or safetensors."
            ) from error
        raise RuntimeError(
            f"checkpoint {str(path)!r}: names {named[1]}, which is no data but could run code, and is not read; take a "
            f"checkpoint that this package has written, or safetensors."
        ) from error


def read_as_data(_: ModuleType) -> None:
    """Make torch's checkpoint reader reject pickles that could run code."""
    load_bytes = default_planner.DefaultLoadPlanner.load_bytes

    def load_checked_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        check_objects(value)
        value.seek(0)
        load_bytes(self, read_item, value)

    def load(file: IO[bytes]) -> Any:
        return _MetadataUnpickler(file).load()

    default_planner.DefaultLoadPlanner.load_bytes = load_checked_bytes
    filesystem.pickle = SimpleNamespace(load=load, dump=pickle.dump)
