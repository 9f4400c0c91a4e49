"""Imitation: a weighted -log p loss on tokens that the policy did not sample, in addition to the policy loss.

The batch column `demonstrated`, float32 `[N]`, has the weight of each imitated token, and 0 for all other tokens. The
loss of an update is

    loss = policy loss + weight * sum of demonstrated_t * -log p_t / number of demonstrated tokens

Both divisors, that of the policy loss and the number of demonstrated tokens, are counted over all microbatches and
ranks of the update. The engine divides the whole sum by the first. To compensate, `scaled` multiplies the column by the
first divisor and divides it by the second.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl import support
from megatron_rl.algo.aggregation import DEMONSTRATED, weight_of
from megatron_rl.config import AlgorithmConfig
from megatron_rl.types import TrajectoryBatch


def with_demonstrations(share: TrajectoryBatch, rows: TrajectoryBatch | None) -> TrajectoryBatch:
    """Return the share with its imitated tokens marked as trained, and with the replies of `rows` appended.

    rows: prompts with replies, whose reply tokens get weight 1. Raises ValueError if a weight in `demonstrated` is
    negative, NaN or infinite, or is above 0 for a token whose loss_mask is True.
    """
    marks = share[DEMONSTRATED].float() if DEMONSTRATED in share else torch.zeros(len(share["input_ids"]))
    wrong = ~(marks.isfinite() & (marks >= 0)) | ((marks > 0) & share["loss_mask"])
    if wrong.any():
        raise ValueError(
            f"tokens[{DEMONSTRATED!r}] = {float(marks[wrong][0])} for {int(wrong.sum())} tokens: must be 0 or more, "
            f"and 0 if loss_mask is True: a token is trained either by imitation or by its advantage; have the "
            f"workflow mark only one of the two."
        )
    own = replace(share, tokens=share.tokens | {DEMONSTRATED: marks})
    whole = own if rows is None else TrajectoryBatch.cat([own, _like(own, rows)])
    mask = whole["loss_mask"] | (whole[DEMONSTRATED] > 0)
    return replace(whole, tokens=whole.tokens | {"loss_mask": mask})


def counts(share: TrajectoryBatch, options: AlgorithmConfig) -> Tensor:
    """Return the policy loss's divisor and the number of demonstrated tokens of this share, `[2]` int64."""
    marks = share[DEMONSTRATED] > 0
    marks[share.cu_seqlens[:-1][share.lengths > 0]] = False  # nothing predicts a sequence's first token
    return torch.stack([weight_of(share, options), marks.sum()])


def scaled(share: TrajectoryBatch, weight: float, total: Tensor) -> TrajectoryBatch:
    """Return the share with each `demonstrated` weight replaced by the factor of -log p in the engine's sum.

    weight: the weight of the imitation loss. total: the sum of `counts` over all ranks. The engine later divides its
    sum by the policy loss's divisor, for which the factor compensates.
    """
    divisor, tokens = total.clamp_min(1).tolist()
    marks = share[DEMONSTRATED] * (weight * divisor / tokens)
    return replace(share, tokens=share.tokens | {DEMONSTRATED: marks})


NEUTRAL = {"teacher_place": -1, "versions": -1, support.COLUMN: support.NO_TOKEN}
"""For tokens that were not sampled or scored, the values that fill these columns. All other columns are filled with 0.
"""


def _like(share: TrajectoryBatch, rows: TrajectoryBatch) -> TrajectoryBatch:
    """Give the batch `rows` the columns of `share`, so that the two can be concatenated. Returns the new batch."""
    known = {"input_ids": rows["input_ids"], "loss_mask": torch.zeros_like(rows["loss_mask"])}
    known[DEMONSTRATED] = rows["loss_mask"].float()
    count = len(rows["input_ids"])
    tokens = {
        name: known[name].to(column.dtype)
        if name in known
        else torch.full((count, *column.shape[1:]), NEUTRAL.get(name, 0), dtype=column.dtype)
        for name, column in share.tokens.items()
    }
    if share.versions is not None:
        tokens["versions"] = torch.full((count,), NEUTRAL["versions"], dtype=torch.int32)
    sequences = {name: torch.zeros(len(rows), dtype=column.dtype) for name, column in share.sequences.items()}
    sequences["group"] = -1 - torch.arange(len(rows))  # negative, so that none belongs to a group of the step
    return TrajectoryBatch(tokens, sequences, rows.cu_seqlens)
