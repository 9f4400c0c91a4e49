"""Resumable checkpoints: sharded model, optimizer, schedule and random state through Megatron's dist_checkpointing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_rl.weights.hf_files import replace_folder

if TYPE_CHECKING:
    from megatron_rl.engine.megatron_engine import MegatronEngine


def save(path: str | Path, engine: MegatronEngine) -> None:
    """Write the folder `path`, under a temporary name first: an earlier checkpoint stays until this one is whole."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.partial")
    if engine.groups.is_main:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier(group=engine.groups.control)
    dist_checkpointing.save(_state(engine, is_loading=False), str(aside))
    dist.barrier(group=engine.groups.control)
    if engine.groups.is_main:
        replace_folder(aside, path)
    dist.barrier(group=engine.groups.control)


def load(path: str | Path, engine: MegatronEngine) -> None:
    """Restore what `save` wrote, in this or another layout."""
    path = Path(path)
    if not (path / "metadata.json").is_file():
        raise ValueError(
            f"checkpoint {str(path)!r}: no metadata.json there; give a folder written by save(with_optimizer=True)."
        )
    for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        # The distributed optimizer describes only state that exists, and Adam makes its state at the first step.
        if engine.config.optimizer.distributed:
            part._init_optimizer_states_with_dummy_values()
    state = dist_checkpointing.load(_state(engine, is_loading=True), str(path))
    for number, chunk in enumerate(engine.chunks):
        chunk.load_state_dict(state[f"model{number}"])
    engine.optimizer.load_state_dict(state["optimizer"])
    engine.scheduler.load_state_dict(state["scheduler"])
    engine.version = state["version"]
    torch.set_rng_state(state["rng"])


def _state(engine: MegatronEngine, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": engine.groups.data_context.group,
    }
    # Tensors are named by their global layer, so that the number of chunks may differ between saving and loading.
    models = {f"model{n}": chunk.sharded_state_dict(metadata=metadata) for n, chunk in enumerate(engine.chunks)}
    return models | {
        "optimizer": engine.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata),
        "scheduler": engine.scheduler.state_dict(),
        "version": engine.version,
        "rng": torch.get_rng_state(),
    }
