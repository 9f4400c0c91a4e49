"""Packs trajectories into microbatches and shifts labels, the only place that does.

In a trajectory entry t belongs to token t; in a microbatch row t is the prediction made after reading token t, and
every per-token tensor of row t describes `labels[t]`. `to_microbatch` shifts there, `MicroBatch.source` leads back.
"""

from __future__ import annotations

import heapq
import math

import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_rl.types import MicroBatch, TrajectoryBatch


def to_microbatch(batch: TrajectoryBatch, indices: list[int]) -> MicroBatch:
    """Pack the trajectories `indices` into rows; no indices make one untrained token, so that a rank can keep step."""
    if not indices:
        return _idle_microbatch(batch)
    starts = batch.cu_seqlens[:-1].tolist()
    lengths = batch.lengths.tolist()
    tokens = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in indices])
    picked = torch.tensor([lengths[i] for i in indices])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), picked.cumsum(0)])
    source = tokens + 1
    source[cu_seqlens[1:] - 1] = -1  # the last row of a sequence predicts nothing
    rows = {key: _described_token(value, source) for key, value in batch.tokens.items() if key != "input_ids"}
    rows["input_ids"] = batch.tokens["input_ids"][tokens]
    labels = _described_token(batch.tokens["input_ids"], source)
    rows["labels"] = labels.masked_fill(~rows["loss_mask"].bool(), -100)
    rows["cu_seqlens"] = cu_seqlens.to(torch.int32)
    rows |= {key: value[torch.tensor(indices)] for key, value in batch.sequences.items()}
    positions = torch.arange(len(tokens)) - torch.repeat_interleave(cu_seqlens[:-1], picked)
    return MicroBatch(rows=TensorDict(rows), positions=positions, source=source, max_seqlen=int(picked.max()))


def _described_token(values: Tensor, source: Tensor) -> Tensor:
    return values[source.clamp_min(0)].masked_fill(source < 0, 0)


def _idle_microbatch(batch: TrajectoryBatch) -> MicroBatch:
    rows = {key: torch.zeros(1, dtype=value.dtype) for key, value in batch.tokens.items()}
    rows["labels"] = torch.full((1,), -100)
    rows["cu_seqlens"] = torch.tensor([0, 1], dtype=torch.int32)
    rows |= {key: torch.zeros(1, dtype=value.dtype) for key, value in batch.sequences.items()}
    return MicroBatch(
        rows=TensorDict(rows),
        positions=torch.zeros(1, dtype=torch.int64),
        source=torch.full((1,), -1),
        max_seqlen=1,
    )


def scatter_rows(microbatches: list[MicroBatch], rows: list[Tensor], token_count: int) -> Tensor:
    """Undo packing and the shift.

    Per-row results `[T]` of each microbatch -> `[token_count]`, 0 where nothing was predicted.
    """
    result = torch.zeros(token_count, dtype=rows[0].dtype, device=rows[0].device)
    for microbatch, values in zip(microbatches, rows, strict=True):
        predicted = microbatch.source >= 0
        result[microbatch.source[predicted]] = values[predicted]
    return result


def estimated_cost(lengths: Tensor) -> Tensor:
    """Relative cost of a forward pass per sequence: linear layers grow with the length, attention with its square."""
    attention_share_at = 4096.0  # tokens at which attention costs about as much as the linear layers of a small model
    return lengths * (1.0 + lengths / attention_share_at)


def least_microbatches(lengths: list[int], tokens_per_microbatch: int) -> int:
    """The number of bins that first-fit-decreasing needs; a sequence above the budget gets a bin of its own."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        for i, free in enumerate(room):
            if length <= free:
                room[i] -= length
                break
        else:
            room.append(tokens_per_microbatch - length)
    return len(room)


def split_evenly(costs: list[float], parts: int) -> list[list[int]]:
    """Split indices into `parts` lists of near-equal cost, largest first to the lightest.

    Each list is in rising order.
    """
    heap = [(0.0, part) for part in range(parts)]
    lists: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cost, part = heapq.heappop(heap)
        lists[part].append(index)
        heapq.heappush(heap, (cost + costs[index], part))
    return [sorted(part) for part in lists]


def pack(batch: TrajectoryBatch, *, tokens_per_microbatch: int, count: int) -> list[MicroBatch]:
    """Pack a rank's trajectories into exactly `count` microbatches within the token budget.

    `count` is at least `least_microbatches` of every rank (they agree on the largest). Balanced parts that break the
    budget fall back to first-fit-decreasing; spare microbatches hold one untrained token.
    """
    lengths = batch.lengths.tolist()
    parts = split_evenly(estimated_cost(batch.lengths.double()).tolist(), count)
    if any(sum(lengths[i] for i in part) > tokens_per_microbatch and len(part) > 1 for part in parts):
        parts = _first_fit(lengths, tokens_per_microbatch)
        parts += [[] for _ in range(count - len(parts))]
    return [to_microbatch(batch, part) for part in parts]


def _first_fit(lengths: list[int], tokens_per_microbatch: int) -> list[list[int]]:
    parts: list[list[int]] = []
    room: list[float] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = next((i for i, free in enumerate(room) if lengths[index] <= free), None)
        if fitting is None:
            parts.append([])
            room.append(tokens_per_microbatch if lengths[index] <= tokens_per_microbatch else -math.inf)
            fitting = len(parts) - 1
        parts[fitting].append(index)
        room[fitting] -= lengths[index]
    return [sorted(part) for part in parts]
