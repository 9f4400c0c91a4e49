"""Attention over forked dialogues without copying their shared keys: FlexAttention reads the keys in place.

Rows are in depth-first order, so a key is visible to all rows from its own row to the end of its branch. Blocks of
scores without a visible key are skipped, and only partly visible blocks evaluate the mask (arXiv 2412.05496).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128  # number of queries, and of keys, per block of scores: the default of FlexAttention's kernels


class Forks(NamedTuple):
    """The columns that determine to which of K keys each of R queries attends. All are int32."""

    query_row: Tensor  # `[R]`: the query's row in the microbatch
    query_position: Tensor  # `[R]`: the query's position in its dialogue, which windows need
    key_row: Tensor
    key_position: Tensor
    key_end: Tensor  # `[K]`: one past the last row of the key's segment and of all its descendants

    @classmethod
    def of(cls, segments: Tensor, positions: Tensor, queries: Tensor, keys: Tensor) -> Forks:
        """Build the columns. positions: the position of each row of the microbatch in its dialogue.

        queries, keys: the indices of the rows whose queries and keys take part.
        """
        ends = torch.repeat_interleave(branch_ends(segments), segments[:, 1])
        return cls(*(x.int() for x in (queries, positions[queries], keys, positions[keys], ends[keys])))

    def seen(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return FlexAttention's mask function, which is True where a query attends to a key.

        window: the largest number of keys per query; None for no limit.
        """
        query_row, query_position, key_row, key_position, key_end = self

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = query_row[query]
            is_seen = (key_row[key] <= row) & (row < key_end[key])
            if window is not None:
                is_seen = is_seen & (query_position[query] - key_position[key] < window)
            return is_seen

        return mask

    def blocks(self, window: int | None) -> BlockMask:
        """Return the blocks of scores that must be computed. window: as in `seen`.

        This is computed on the rows' device, so that the host need not wait for it.
        """
        first, last = _extremes(self.query_row)  # [query blocks]
        earliest, latest = _extremes(self.key_row)  # [key blocks]
        shortest, longest = _extremes(self.key_end)
        some = (earliest <= last[:, None]) & (longest > first[:, None])
        every = (latest <= first[:, None]) & (shortest > last[:, None])
        if window is not None:
            (nearest, farthest), (oldest, newest) = _extremes(self.query_position), _extremes(self.key_position)
            some &= nearest[:, None] - newest < window
            every &= farthest[:, None] - oldest < window
        return BlockMask.from_kv_blocks(
            *_listed(some & ~every),
            *_listed(every),
            BLOCK_SIZE=BLOCK,
            mask_mod=self.seen(window),
            seq_lengths=(len(self.query_row), len(self.key_row)),
        )


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention. query: `[R, heads, D]`. key: `[K, kv_heads, D]`. value: `[K, kv_heads, E]`.

    Returns the result `[R, heads, E]` and the log of each softmax's sum, `[R, heads]` float32.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, rows, width]
    is_grouped = query.shape[1] != key.shape[1]
    out, aux = compiled()(
        q, k, v, block_mask=blocks, scale=scale, enable_gqa=is_grouped, return_aux=AuxRequest(lse=True)
    )
    return out[0].transpose(0, 1), aux.lse[0].T


@functools.cache
def compiled() -> Callable:
    """Return FlexAttention, compiled by torch once for any number of rows."""
    return torch.compile(flex_attention, dynamic=True)


def branch_ends(segments: Tensor) -> Tensor:
    """Return for each segment the row after the last row of the segment and its descendants, `[S]`.

    segments: `[S, 4]`, as in MicroBatch.
    """
    ends = (segments[:, 0] + segments[:, 1]).tolist()
    for segment, parent in reversed(list(enumerate(segments[:, 2].tolist()))):
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[segment])
    return torch.tensor(ends)


def _extremes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest number in each block of BLOCK numbers."""
    beyond = torch.nn.functional.pad(numbers[None], (0, -len(numbers) % BLOCK), mode="replicate")[0]
    return beyond.view(-1, BLOCK).amin(1), beyond.view(-1, BLOCK).amax(1)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each query block, the number of chosen key blocks, and all key blocks' indices, the chosen first."""
    count = chosen.sum(-1, dtype=torch.int32)
    order = chosen.int().argsort(dim=-1, descending=True, stable=True).int()
    return count[None, None], order[None, None]
