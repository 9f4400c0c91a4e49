"""The sums that a checksum of a tensor's bytes is made from."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.ops import reference
from megatron_rl.ops.library import ops

CHECKSUM_COLUMNS = reference.CHECKSUM_COLUMNS


@torch.no_grad()
def word_sums(tensor: Tensor) -> Tensor:
    """The sums mod 2^64 of each row and each column of the tensor's bytes as 8-byte words, `[n]` int64 on its device.

    The bytes are laid out in rows of CHECKSUM_COLUMNS words; what does not fill a row follows as it is, padded with
    zeros. Any two changed words change a row's or a column's sum, and so do moved, swapped, repeated or missing blocks.
    One pass over memory on a CPU; on a GPU torch's own sums, for which nothing is waited.
    """
    data = tensor.detach().contiguous()  # the bytes as they are sent, whatever the strides here
    return ops.word_sums(data) if data.device.type == "cpu" else reference.word_sums(data)
