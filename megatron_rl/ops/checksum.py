"""Sums from which checksums of tensors are computed. One kernel launch sums many tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.ops import reference
from megatron_rl.ops.library import ops

CHECKSUM_COLUMNS = reference.CHECKSUM_COLUMNS


@torch.no_grad()
def word_sums(tensors: Sequence[Tensor]) -> Tensor:
    """View each tensor's bytes as a matrix, and sum each of its rows and columns, mod 2^64.

    Returns the sums of all tensors, concatenated: `[n]` int64 on the tensors' device. The matrix has CHECKSUM_COLUMNS
    columns of 8-byte words. The bytes that do not fill a last row are not summed: they follow the tensor's sums,
    zero-padded to whole words. A change of any one or two words changes the result, and so do moved, swapped, repeated
    and missing blocks. Does not synchronize with the device.
    """
    return ops.word_sums([tensor.detach().contiguous() for tensor in tensors])


def count_of_word_sums(nbytes: int) -> int:
    rows, rest = divmod(nbytes, 8 * CHECKSUM_COLUMNS)
    return rows + (CHECKSUM_COLUMNS if rows else 0) + -(-rest // 8)


HASH_TILE_BYTES = 4 * reference.TILE_WORDS


@torch.no_grad()
def tile_hashes(tensors: Sequence[Sequence[Tensor]], slices: Sequence[tuple[int, int]] = ()) -> Tensor:
    """Hash tensors like SGLang's `gpu_tensor_hash` before its final step: `[len(tensors)]` int64 on their device.

    tensors: the parts of each tensor, which are hashed as if they were concatenated along the first dimension.
    slices: if each of `tensors` is only a slice of a larger tensor: the slice's first byte in that tensor, and the
      tensor's size in bytes. A slice consists of whole tiles of 8192 four-byte words, or extends to the tensor's end.
      The hashes of all slices add up to the tensor's hash, mod 2^64.

    The hash is the same in SGLang 0.5.17 to 0.5.23. On a CPU it is computed in plain torch, because SGLang does not use
    it there.
    """
    parts = [[part.detach().contiguous() for part in tensor] for tensor in tensors]
    places = slices or [(0, sum(part.nbytes for part in tensor)) for tensor in parts]
    if parts[0][0].device.type == "cpu":
        pairs = zip(parts, places, strict=True)
        return torch.stack([reference.tile_hash(tensor, begin, whole) for tensor, (begin, whole) in pairs])
    begins, wholes = zip(*places, strict=True)
    flat, counts = [part for tensor in parts for part in tensor], [len(tensor) for tensor in parts]
    return ops.tile_hashes(flat, counts, list(begins), list(wholes))
