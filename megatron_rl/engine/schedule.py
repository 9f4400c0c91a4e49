"""Runs microbatches through Megatron's pipeline schedule and collects what the last stage computes.

A loss contributes a sum and an integer weight per microbatch; upstream divides the gradient once by the global weight
(`calculate_per_token_loss`). Nothing here divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.engine.packed_rows import PackedRows, own_rows
from megatron_rl.parallel import Axis
from megatron_rl.types import MicroBatch

LastStage = Callable[[Tensor, MicroBatch, PackedRows], tuple[Tensor, Tensor, Any]]
"""(hidden `[R, H]` of this context rank, microbatch, its rows) -> (loss sum, integer weight, anything to keep)."""


def run(
    chunks: list,
    microbatches: list[MicroBatch],
    last_stage: LastStage,
    *,
    forward_only: bool,
    context: Axis,
    row_multiple: int,
    device: torch.device,
) -> list[Any]:
    """Run all microbatches through this rank's model chunks.

    Returns what `last_stage` kept, in the microbatches' order, on the last pipeline stage and [] on the others. Each
    context rank computes its share of a microbatch's rows, of which there are a multiple of `row_multiple`.
    """

    def forward_step(iterator, model):
        microbatch = next(iterator)
        ids, packed = own_rows(microbatch, context, multiple_of=row_multiple, device=device)
        hidden = model(
            input_ids=ids[None], position_ids=packed.positions[None], attention_mask=None, packed_seq_params=packed
        )  # [R, 1, H]: rows come first upstream, then its batch, which is of one
        return hidden, lambda hidden: last_stage(hidden[:, 0], microbatch, packed)  # called on the last stage only

    most_rows = max(len(microbatch.computed) for microbatch in microbatches)
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in chunks],  # each chunk of an interleaved pipeline takes all in turn
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=most_rows + -most_rows % row_multiple,  # stages tell each other the rows: variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
    )
