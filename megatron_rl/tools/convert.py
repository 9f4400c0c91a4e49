"""Converts a Hugging Face folder to a checkpoint or back, in one process, even if the model does not fit in memory.

The model's tensors are memory-mapped from an unnamed scratch file in the target's parent folder, so the kernel can page
them out at any time. Only the tensors being converted and one safetensors shard need memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron_rl.engine  # noqa: F401  makes megatron.core ready for this machine, so it comes first

# isort: split

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
from torch import Tensor

from megatron_rl import parallel
from megatron_rl.config import EngineConfig, ModelConfig, ParallelConfig
from megatron_rl.engine.checkpoint import (
    CARRIED,
    HF_FILES,
    CheckpointWriter,
    carried_by,
    draft_of,
    has_mtp_layer,
    is_checkpoint,
    model_state,
    mtp_layer_of,
    open_checkpoint,
)
from megatron_rl.engine.model import build_chunks, transformer_config
from megatron_rl.parallel import ParallelGroups
from megatron_rl.platform.plain_checkpoints import refusing_code
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.draft_files import write_draft
from megatron_rl.weights.hf_files import SHARD_BYTES, HFFolder, write_hf_folder
from megatron_rl.weights.mapping import hf_shapes, tensors_without_rule, without_rule_text
from megatron_rl.weights.mtp_layers import copies_in, with_layer
from megatron_rl.weights.reshard import HFExport, rules_of

logger = logging.getLogger(__name__)


def convert_folder(
    source: Path, target: Path, *, say: Callable[[str], None] = logger.info, shard_bytes: int = SHARD_BYTES
) -> str:
    """Convert the HF folder `source` to a checkpoint, or the checkpoint `source` to an HF folder.

    Returns a line that says what was written. Dtypes are kept, except that a router's bias becomes float32. The target
    appears complete or not at all. ValueError if the source is neither of the two, or if the target exists.
    RuntimeError for a damaged checkpoint or too little disk space.
    """
    if not source.is_dir():
        raise ValueError(f"source = {str(source)!r}: no such folder; give a Hugging Face folder or a checkpoint.")
    if target.exists():
        raise ValueError(f"target = {str(target)!r}: exists already; remove it or name another folder.")
    is_to_hf = is_checkpoint(source)
    if not is_to_hf and not (source / "config.json").is_file():
        raise ValueError(
            f"source = {str(source)!r}: neither a Hugging Face folder (no config.json) nor a checkpoint (no "
            f"manifest.json); give one of the two, or a .gguf file."
        )
    if is_to_hf and not (source / HF_FILES).is_dir():
        raise ValueError(
            f"source = {str(source)!r}: is a run's checkpoint, which may hold several models; give {source / 'policy'}."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with _layout_of_one() as groups, torch.no_grad():
        if is_to_hf:
            with refusing_code(source):
                _to_hf(source, target, groups, say, shard_bytes)
            return f"{target}: Hugging Face folder"
        _to_checkpoint(source, target, groups, say)
        return f"{target}: checkpoint"


def _to_checkpoint(source: Path, target: Path, groups: ParallelGroups, say: Callable[[str], None]) -> None:
    arch = read_architecture(source)
    shapes = hf_shapes(arch)
    weights = HFFolder(source, shapes)
    if text := without_rule_text(source):
        say(text)
    size = sum(math.prod(shape) * weights.dtype(name).itemsize for name, shape in shapes.items())
    _announce(target, arch, size, sum(map(weights.nbytes, tensors_without_rule(source))), say)
    chunks, scratch = _empty_model(source, arch, groups), _Scratch(target.parent)
    for chunk in chunks:
        for parameter, rule in rules_of(chunk, arch):
            whole = rule.load(weights, tuple(parameter.shape), 0, 1, arch)
            # A router's bias is no parameter. Megatron always keeps it in float32.
            dtype = whole.dtype if isinstance(parameter, torch.nn.Parameter) else torch.float32
            parameter.data = scratch.empty(whole.shape, dtype).copy_(whole)
    writer = CheckpointWriter(groups)
    state = scratch.state_of(chunks, groups)
    writer.start(target, state, model_folder=source, head=arch.head, is_carrying=True, training=[], in_background=False)
    writer.finish(wait=True)


def _to_hf(source: Path, target: Path, groups: ParallelGroups, say: Callable[[str], None], shard_bytes: int) -> None:
    arch = read_architecture(source / HF_FILES)
    if open_checkpoint(source, groups).get("lora"):
        raise ValueError(
            f"source = {str(source)!r}: holds adapters alone; the run's folder `final` has them in PEFT's format, and "
            f"merged into the model."
        )
    saved = dist_checkpointing.load_tensors_metadata(str(source))
    chunks, scratch = _empty_model(source / HF_FILES, arch, groups), _Scratch(target.parent)
    parts = [part for part in nested_values(model_state(chunks, groups)) if _has_tensor(part)]
    size = sum(part.data.numel() * saved[part.key].dtype.itemsize for part in parts)
    _announce(target, arch, size, sum(file.stat().st_size for file in (source / CARRIED).glob("*")), say)
    for part in parts:
        part.data.data = scratch.empty(part.data.shape, saved[part.key].dtype)
    dist_checkpointing.load(scratch.state_of(chunks, groups), str(source))  # into the scratch file
    tensors, draft = HFExport(chunks, arch, groups).stream(), draft_of(source, groups)
    if has_mtp_layer(source):
        tensors = with_layer(tensors, mtp_layer_of(source, arch, groups), copies_in(source / CARRIED, arch))
    write_hf_folder(
        target,
        tensors,
        model_folder=source / HF_FILES,
        dtype=None,
        carried=carried_by(source),
        shard_bytes=shard_bytes,
    )
    if draft:
        write_draft(target, draft, arch)


def _announce(target: Path, arch: Architecture, size: int, carried: int, say: Callable[[str], None]) -> None:
    """Report the model's size. RuntimeError if the disk cannot hold the result plus a scratch file of the same size.

    carried: total bytes of the tensors that are copied without the scratch file.
    """
    free, needed = shutil.disk_usage(target.parent).free, 2 * size + carried
    if free < needed:
        raise RuntimeError(
            f"target = {str(target)!r}: {needed / 1e6:,.1f} MB are needed there, for the result and a scratch file "
            f"of the same size, and {free / 1e6:,.1f} MB are free; make space or name a folder on another disk."
        )
    parameters = sum(math.prod(shape) for shape in hf_shapes(arch).values())
    say(f"converting {arch.family} with {parameters:,} parameters, {size / 1e6:,.1f} MB")


class _Scratch:
    """Allocator of tensors in one unnamed file on the disk of `folder`.

    The file is mapped as shared memory, so forked checkpoint writers see the tensors too.
    """

    def __init__(self, folder: Path) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)
        self.size = 0
        self.starts: dict[int, int] = {}
        """Maps each tensor's memory address to its offset in the file."""

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        start, size = self.size, math.prod(shape) * dtype.itemsize
        self.size += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.posix_fallocate(self.file.fileno(), start, self.size - start)  # a full disk fails here, not as a SIGBUS
        tensor = self._map(start, shape, dtype)
        self.starts[tensor.data_ptr()] = start
        return tensor

    def state_of(self, chunks: list[Any], groups: ParallelGroups) -> dict[str, Any]:
        """Return the chunks' sharded state, with each tensor in its own mapping of this file.

        This saves memory: `FileSystemWriterAsync` of megatron.core copies every tensor that is a view of a larger
        storage, such as the halves of the gated MLP. It does not copy a tensor that fills its mapping.
        """
        state = model_state(chunks, groups)
        apply_factories(state)
        for part in nested_values(state):
            if _has_tensor(part):
                storage = part.data.untyped_storage()
                start = self.starts[storage.data_ptr()] + part.data.storage_offset() * part.data.itemsize
                part.data = self._map(start, part.data.shape, part.data.dtype)
        return state

    def _map(self, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.memmap(self.file, np.uint8, "r+", start, (size,))).view(dtype).view(shape)


def _has_tensor(part: Any) -> bool:
    return isinstance(part, ShardedTensor | ShardedTensorFactory)


def _empty_model(folder: Path, arch: Architecture, groups: ParallelGroups) -> list[Any]:
    """Build the model without loading weights. Memory pages are allocated only for parameters that are written."""
    config = EngineConfig(model=ModelConfig(path=str(folder)))
    return build_chunks(arch, transformer_config(arch, config, {}), groups, config)


@contextlib.contextmanager
def _layout_of_one() -> Iterator[ParallelGroups]:
    groups = parallel.start(ParallelConfig(), seed=0)
    try:
        yield groups
    finally:
        parallel.stop()
