"""Explanation of a skipped update: the trained tokens with NaN or infinite numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.parallel import ParallelGroups
from megatron_rl.types import TrajectoryBatch

SHOWN = 3  # maximum number of tokens that each rank names


def explain(
    loss: float, grad_norm: float, batch: TrajectoryBatch, results: Tensor, name: str, groups: ParallelGroups
) -> str:
    """Say which trained tokens have NaN or infinite numbers or, if none has, which token has the largest. Collective.

    loss, grad_norm: at least one of them is NaN or infinite on some rank. results: `[N]`, the model's log-probs or
    values. name: what the text calls these.
    """
    # Tensor, pipeline and context peers hold the same share, so one of them names its tokens.
    own = tokens_of_rank(batch, results, name) if groups.is_rollout_rank else ([], (-1.0, ""))
    found: list[Any] = [None] * groups.world_size
    dist.all_gather_object(found, (loss, grad_norm, *own), group=groups.control)
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


def tokens_of_rank(batch: TrajectoryBatch, results: Tensor, name: str) -> tuple[list[str], tuple[float, str]]:
    """Describe the first trained tokens that have NaN or infinite numbers.

    The second result is the largest absolute number of any trained token, and a description of that token. It is (-1,
    "") if some number is not finite, or if no token is trained.
    """
    columns = {name: results.cpu()} | {key: column.cpu() for key, column in batch.tokens.items()}
    columns |= {key: batch.spread(column.cpu()) for key, column in batch.sequences.items()}
    columns = {key: column for key, column in columns.items() if column.is_floating_point()}
    trained = batch["loss_mask"]
    sizes = torch.stack([column.double().abs() for column in columns.values()]).amax(0)  # NaN if a number is NaN
    places = (~sizes.isfinite() & trained).nonzero()[:, 0].tolist()
    named = [describe(place, batch, columns) for place in places[:SHOWN]]
    if len(places) > SHOWN:
        named.append(f"{len(places) - SHOWN} more tokens")
    if named or not trained.any():
        return named, (-1.0, "")
    place = int(sizes.masked_fill(~trained, -1.0).argmax())
    return [], (float(sizes[place]), describe(place, batch, columns))


def describe(place: int, batch: TrajectoryBatch, columns: dict[str, Tensor]) -> str:
    sequence = int(batch.sequence_ids[place])
    group = f" of group {int(batch['group'][sequence])}" if "group" in batch else ""
    if "prompt_index" in batch:  # the row number in data.train
        group = f" of prompt {int(batch['prompt_index'][sequence])}"
    numbers = ", ".join(f"{key} = {float(column[place]):.4g}" for key, column in columns.items())
    return f"sequence {sequence}{group}, token {place - int(batch.cu_seqlens[sequence])}: {numbers}"
