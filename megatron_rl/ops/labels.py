"""Labels and positions of packed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.ops.library import ops


def packed_labels(
    input_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (labels, positions, sequence_ids), all `[T]` int64, for input_ids `[T]` packed as in cu_seqlens.

    Row t is the prediction made after token t. Its label is the next token of the sequence. It is -100 at the
    sequence's end and if loss_mask (`[T]` bool) is False for that next token. positions count from 0 in each sequence.
    cu_seqlens: `[B + 1]`, ascending from 0 to T; checked on the CPU only.
    """
    if input_ids.ndim != 1 or input_ids.dtype != torch.int64:
        raise ValueError(f"input_ids is {input_ids.dtype} {tuple(input_ids.shape)}: it must be [T] int64.")
    if loss_mask is not None and (loss_mask.shape != input_ids.shape or loss_mask.dtype != torch.bool):
        raise ValueError(
            f"loss_mask is {loss_mask.dtype} {tuple(loss_mask.shape)}: it must be bool {tuple(input_ids.shape)}."
        )
    mask = None if loss_mask is None else loss_mask.contiguous()
    return ops.packed_labels(input_ids.contiguous(), cu_seqlens.to(torch.int64).contiguous(), mask)
