"""Sums from which checksums of tensors are computed, for many tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.ops import reference
from megatron_rl.ops.library import ops

CHECKSUM_COLUMNS = reference.CHECKSUM_COLUMNS


@torch.no_grad()
def word_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Sum each row and each column of a matrix of each tensor's bytes, mod 2^64.

    Returns the sums of all tensors, concatenated: `[n]` int64 on their device. The matrix has CHECKSUM_COLUMNS columns
    of 8-byte words. Bytes that do not fill a row are appended unsummed, zero-padded to whole words. Any two changed
    words change the sum of a row or column, and so do moved, swapped, repeated or missing blocks. Memory is read once.
    On a GPU there is one launch per 128 tensors, and no synchronization.
    """
    return ops.word_sums([tensor.detach().contiguous() for tensor in tensors])


def count_of_word_sums(nbytes: int) -> int:
    """Return the number of sums for a tensor with `nbytes` bytes."""
    rows, rest = divmod(nbytes, 8 * CHECKSUM_COLUMNS)
    return rows + (CHECKSUM_COLUMNS if rows else 0) + -(-rest // 8)


HASH_TILE_BYTES = 4 * reference.TILE_WORDS


@torch.no_grad()
def tile_hashes(tensors: Sequence[Sequence[Tensor]], slices: Sequence[tuple[int, int]] = ()) -> Tensor:
    """Hash tensors like SGLang's `gpu_tensor_hash` before its final step: `[len(tensors)]` int64 on their device.

    The hash is the sum mod 2^64 of the hashes of all tiles of 8192 four-byte words.

    Each tensor is given as parts, to be concatenated along the first dimension. With `slices`, the parts form only one
    slice of a tensor. `slices` has each slice's (first byte, size of the whole tensor in bytes). The hashes of all
    slices add up to the tensor's hash. A slice consists of whole tiles or extends to the tensor's end.

    The hash is the same in SGLang 0.5.17 to 0.5.23. On a GPU there is one launch per 96 parts. CPU tensors use the
    reference implementation, because SGLang does not use this hash on a CPU.
    """
    parts = [[part.detach().contiguous() for part in tensor] for tensor in tensors]
    places = slices or [(0, sum(part.nbytes for part in tensor)) for tensor in parts]
    if parts[0][0].device.type == "cpu":
        pairs = zip(parts, places, strict=True)
        return torch.stack([reference.tile_hash(tensor, begin, whole) for tensor, (begin, whole) in pairs])
    begins, wholes = zip(*places, strict=True)
    flat, counts = [part for tensor in parts for part in tensor], [len(tensor) for tensor in parts]
    return ops.tile_hashes(flat, counts, list(begins), list(wholes))
