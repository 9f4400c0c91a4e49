"""Explanation of a skipped update: the trained tokens with NaN or infinite numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import TrajectoryBatch

SHOWN = 3
"""Maximum number of tokens that each rank names."""


def explain(
    loss: float, grad_norm: float, batch: TrajectoryBatch, results: Tensor, name: str, groups: ParallelGroups
) -> str:
    """Say which trained tokens have NaN or infinite numbers, and on which rank.

    If all tokens' numbers are finite, name the token with the largest one. Collective: every rank calls it.
    loss, grad_norm: this rank's numbers. On at least one rank, one of them is NaN or infinite.
    batch: this rank's share of the data.
    results: `[N]`, the model's result for each token.
    name: what the text calls `results`.
    """
    # Tensor, pipeline and context peers hold the same share, so one of them names its tokens.
    own = tokens_without_number(batch, results, name) if groups.is_rollout_rank else []
    largest = largest_number(batch, results, name) if groups.is_rollout_rank and not own else (-1.0, "")
    found: list[Any] = [None] * groups.world_size
    dist.all_gather_object(found, (loss, grad_norm, own, largest), group=groups.control)
    bad = [rank for rank, (*update, _, _) in enumerate(found) if not all(map(math.isfinite, update))]  # at least one
    where = "" if len(bad) == groups.world_size else f" on rank {', '.join(map(str, bad))} alone"
    loss, grad_norm = found[bad[0]][:2]
    said = f"loss = {loss:g}, gradient norm = {grad_norm:g}{where}"
    named = [f"rank {rank}, {token}" for rank, (_, _, tokens, _) in enumerate(found) for token in tokens]
    if named:
        return f"{said}; not finite: {'; '.join(named)}"
    value, token, rank = max((*largest, rank) for rank, (_, _, _, largest) in enumerate(found))
    if value < 0:
        return f"{said}, though no token is trained"
    return (
        f"{said}, though the model's results and all that the loss is given are finite: the loss makes it so, or the "
        f"way back through the model; the largest number is that of rank {rank}, {token}"
    )


def tokens_without_number(batch: TrajectoryBatch, results: Tensor, name: str) -> list[str]:
    """Describe the first trained tokens that have a NaN or infinite number, with all numbers of each such token."""
    columns = columns_of(batch, results, name)
    bad = torch.stack([~column.isfinite() for column in columns.values()]).any(0) & batch["loss_mask"]
    places = bad.nonzero()[:, 0].tolist()
    named = [describe(place, batch, columns) for place in places[:SHOWN]]
    return named + ([f"{len(places) - SHOWN} more tokens"] if len(places) > SHOWN else [])


def largest_number(batch: TrajectoryBatch, results: Tensor, name: str) -> tuple[float, str]:
    """Return the largest absolute number in all columns of trained tokens, and a description of the token that has it.

    (-1, "") if no token is trained.
    """
    columns = columns_of(batch, results, name)
    sizes = torch.stack([column.double().abs() for column in columns.values()]).amax(0)
    sizes = sizes.masked_fill(~batch["loss_mask"], -1.0)
    if not batch["loss_mask"].any():
        return -1.0, ""
    place = int(sizes.argmax())
    return float(sizes[place]), describe(place, batch, columns)


def columns_of(batch: TrajectoryBatch, results: Tensor, name: str) -> dict[str, Tensor]:
    """Return `[N]` float columns by name: the model's results, and the batch's columns per token and per sequence."""
    columns = {name: results.cpu()} | {key: column.cpu() for key, column in batch.tokens.items()}
    columns |= {key: batch.spread(column.cpu()) for key, column in batch.sequences.items()}
    return {key: column for key, column in columns.items() if column.is_floating_point()}


def describe(place: int, batch: TrajectoryBatch, columns: dict[str, Tensor]) -> str:
    sequence = int(batch.sequence_ids[place])
    group = f" of group {int(batch['group'][sequence])}" if "group" in batch else ""
    if "prompt_index" in batch:  # the row number in data.train
        group = f" of prompt {int(batch['prompt_index'][sequence])}"
    numbers = ", ".join(f"{key} = {float(column[place]):.4g}" for key, column in columns.items())
    return f"sequence {sequence}{group}, token {place - int(batch.cu_seqlens[sequence])}: {numbers}"
