"""Checkpoints are read as data: what is pickled in one may name numbers, tensors and their places, and nothing else.

Megatron's checkpoints are torch's (torch.distributed.checkpoint, read in torch 2.13): `.metadata` is a pickle, and each
object beside the tensors is loaded with weights_only=False. A checkpoint may be somebody else's, and a pickle can run
any code of theirs.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
from torch.distributed.checkpoint import CheckpointException, default_planner, filesystem

CHECKPOINT_MODULES = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner"))
FUNCTIONS = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}
_REBUILD_ARRAY = np.empty(0).__reduce__()[0]
DATA = [
    *(np.ndarray, np.dtype, np.dtypes.UInt32DType, _REBUILD_ARRAY),  # numpy's random state
    (_REBUILD_ARRAY, "numpy.core.multiarray._reconstruct"),  # as numpy 1 has written it
    io.BytesIO,  # Transformer Engine's extra state
]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in FUNCTIONS:
            return super().find_class(module, name)
        if "." not in name and module in (*CHECKPOINT_MODULES, "torch"):  # a dot would lead on from there
            found = super().find_class(module, name)
            is_record = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
            if isinstance(found, torch.dtype) or (is_record and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {module}.{name}")  # torch's words


def check_objects(file: str | Path | IO[bytes]) -> None:
    """Raise UnpicklingError unless what torch.save has put there is what is in our checkpoints beside tensors."""
    with torch.serialization.safe_globals(DATA):
        torch.load(file, map_location="cpu", weights_only=True)


@contextmanager
def refusing_code(path: str | Path) -> Iterator[None]:
    """Say what a checkpoint that was refused while it was read here names, and whose it may be: RuntimeError."""
    try:
        yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))  # an exception that torch has passed on is text by now
        if named is None:
            raise
        raise RuntimeError(
            f"checkpoint {str(path)!r}: names {named[1]}, which is no data but could run code, and is not read; take a "
            f"checkpoint that this package has written, or safetensors."
        ) from error


def read_as_data(_: ModuleType) -> None:
    """Let torch's reader of checkpoints refuse whatever is not data."""
    load_bytes = default_planner.DefaultLoadPlanner.load_bytes

    def load_checked_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        check_objects(value)
        value.seek(0)
        load_bytes(self, read_item, value)

    def load(file: IO[bytes]) -> Any:
        return _MetadataUnpickler(file).load()

    default_planner.DefaultLoadPlanner.load_bytes = load_checked_bytes
    filesystem.pickle = SimpleNamespace(load=load, dump=pickle.dump)
