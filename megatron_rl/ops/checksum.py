"""The sums that checksums of tensors' bytes are made from, of many tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.ops import reference
from megatron_rl.ops.library import ops

CHECKSUM_COLUMNS = reference.CHECKSUM_COLUMNS


@torch.no_grad()
def word_sums(tensors: Sequence[Tensor]) -> Tensor:
    """The sums mod 2^64 of each row and each column of a tensor's bytes as 8-byte words, `[n]` int64 on its device, of
    one tensor behind those of another.

    The bytes are laid out in rows of CHECKSUM_COLUMNS words; what does not fill a row follows as it is, padded with
    zeros. Any two changed words change a row's or a column's sum, and so do moved, swapped, repeated or missing blocks.
    One pass over memory. On a GPU one launch for each 128 tensors, and nothing is waited for.
    """
    return ops.word_sums([tensor.detach().contiguous() for tensor in tensors])


def count_of_word_sums(nbytes: int) -> int:
    """How many sums a tensor of so many bytes has."""
    rows, rest = divmod(nbytes, 8 * CHECKSUM_COLUMNS)
    return rows + (CHECKSUM_COLUMNS if rows else 0) + -(-rest // 8)


HASH_TILE_BYTES = 4 * reference.TILE_WORDS


@torch.no_grad()
def tile_hashes(tensors: Sequence[Sequence[Tensor]], slices: Sequence[tuple[int, int]] = ()) -> Tensor:
    """SGLang's `gpu_tensor_hash` before its last step, `[len(tensors)]` int64 on their device: the sum mod 2^64 of the
    hashes of all tiles of 8192 words of four bytes.

    A tensor consists of parts, which lie one above the other in it. With `slices` they are parts of a slice alone,
    which begins at a byte and is of a tensor of so many bytes: sums of slices add up to the tensor's. A slice consists
    of whole tiles, or else ends where the tensor does.

    The same in SGLang 0.5.17 to 0.5.23. On a GPU one launch for each 96 parts; a CPU, which never needs it, computes
    the reference.
    """
    parts = [[part.detach().contiguous() for part in tensor] for tensor in tensors]
    places = slices or [(0, sum(part.nbytes for part in tensor)) for tensor in parts]
    if parts[0][0].device.type == "cpu":
        pairs = zip(parts, places, strict=True)
        return torch.stack([reference.tile_hash(tensor, begin, whole) for tensor, (begin, whole) in pairs])
    begins, wholes = zip(*places, strict=True)
    flat, counts = [part for tensor in parts for part in tensor], [len(tensor) for tensor in parts]
    return ops.tile_hashes(flat, counts, list(begins), list(wholes))
