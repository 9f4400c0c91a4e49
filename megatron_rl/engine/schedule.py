"""Runs microbatches through Megatron's pipeline schedule and collects what the last stage computes.

A loss contributes a sum and an integer weight per microbatch; upstream divides the gradient once by the global weight
(`calculate_per_token_loss`). Nothing here divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.types import MicroBatch

LastStage = Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor, Any]]
"""(hidden `[T, H]`, microbatch) -> (loss sum, integer weight, anything to keep)."""


def run(
    chunks: list,
    microbatches: list[MicroBatch],
    last_stage: LastStage,
    *,
    forward_only: bool,
    pad_to: int,
    device: torch.device,
) -> list[Any]:
    """Run all microbatches through this rank's model chunks.

    Returns what `last_stage` kept, in the microbatches' order, on the last pipeline stage and [] on the others. Row
    counts are rounded up to a multiple of `pad_to` (sequence parallelism cuts rows evenly over the tensor axis);
    padding is a sequence of its own and is cut off before `last_stage`.
    """

    def forward_step(iterator, model):
        microbatch = next(iterator)
        rows = microbatch.rows.to(device)
        padding = -microbatch.tokens % pad_to
        input_ids = torch.nn.functional.pad(rows["input_ids"], (0, padding))
        cu_seqlens, longest = rows["cu_seqlens"], max(microbatch.max_seqlen, padding)
        if padding:
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + padding])
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        positions = torch.nn.functional.pad(microbatch.positions.to(device), (0, padding))
        hidden = model(
            input_ids=input_ids[None], position_ids=positions[None], attention_mask=None, packed_seq_params=packed
        )

        def loss(hidden: Tensor):
            return last_stage(hidden[: microbatch.tokens, 0], microbatch)

        return hidden, loss

    rows_per_microbatch = max(microbatch.tokens for microbatch in microbatches)
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in chunks],
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=rows_per_microbatch + -rows_per_microbatch % pad_to,
        micro_batch_size=1,
        forward_only=forward_only,
    )
