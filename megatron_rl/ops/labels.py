"""The token that each packed row predicts, and its position."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.ops.library import ops


def packed_labels(
    input_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (labels, positions, sequence_ids), all `[T]` int64, of input_ids `[T]` in the sequences of cu_seqlens.

    Row t is the prediction made after token t: its label is the next token of its sequence, -100 at the sequence's end
    and where loss_mask (`[T]` bool, of that next token) is False. positions count from 0 in each sequence. cu_seqlens:
    `[B + 1]`, rising from 0 to T; checked on the CPU only.
    """
    if input_ids.ndim != 1 or input_ids.dtype != torch.int64:
        raise ValueError(f"input_ids is {input_ids.dtype} {tuple(input_ids.shape)}: it must be [T] int64.")
    if loss_mask is not None and (loss_mask.shape != input_ids.shape or loss_mask.dtype != torch.bool):
        raise ValueError(
            f"loss_mask is {loss_mask.dtype} {tuple(loss_mask.shape)}: it must be bool {tuple(input_ids.shape)}."
        )
    mask = None if loss_mask is None else loss_mask.contiguous()
    return ops.packed_labels(input_ids.contiguous(), cu_seqlens.to(torch.int64).contiguous(), mask)
