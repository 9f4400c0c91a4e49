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
    words change a sum, and so do moved, swapped, repeated or missing blocks. Does not synchronize with the device.
    """
    return ops.word_sums([tensor.detach().contiguous() for tensor in tensors])


def count_of_word_sums(nbytes: int) -> int:
    rows, rest = divmod(nbytes, 8 * CHECKSUM_COLUMNS)
    return rows + (CHECKSUM_COLUMNS if rows else 0) + -(-rest // 8)


HASH_TILE_BYTES = 4 * reference.TILE_WORDS


@torch.no_grad()
def tile_hashes(tensors: Sequence[Sequence[Tensor]], slices: Sequence[tuple[int, int]] = ()) -> Tensor:
    """Hash tensors like SGLang's `gpu_tensor_hash` before its final step: `[len(tensors)]` int64 on their device.

    Each tensor is given as parts, to be concatenated along the first dimension. slices: (first byte, size of the whole
    tensor in bytes) for each of `tensors`, if they are slices. A slice consists of whole tiles of 8192 four-byte words,
    or extends to the tensor's end. The hashes of all slices add up to the tensor's hash, mod 2^64.

    The hash is the same in SGLang 0.5.17 to 0.5.23. A CPU computes it in plain torch: SGLang does not use it there.
    """
    parts = [[part.detach().contiguous() for part in tensor] for tensor in tensors]
    places = slices or [(0, sum(part.nbytes for part in tensor)) for tensor in parts]
    if parts[0][0].device.type == "cpu":
        pairs = zip(parts, places, strict=True)
        return torch.stack([reference.tile_hash(tensor, begin, whole) for tensor, (begin, whole) in pairs])
    begins, wholes = zip(*places, strict=True)
    flat, counts = [part for tensor in parts for part in tensor], [len(tensor) for tensor in parts]
    return ops.tile_hashes(flat, counts, list(begins), list(wholes))
