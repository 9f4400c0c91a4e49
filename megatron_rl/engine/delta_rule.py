"""The gated delta rule (arXiv 2412.06464) over packed rows: each row decays and corrects a state matrix per head.

This plain torch implementation computes one chunk of rows at a time. Replies or dialogues that share a prefix start
from a copy of the prefix's final state and of its last inputs to the convolution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 64
"""Rows per chunk. A chunk is computed with matrix products, and its final state is passed to the next chunk."""


class Level(NamedTuple):
    """The segments at one fork depth, longest first. A segment's initial state is its parent's final state, or zero."""

    parents: Tensor | None
    """`[S]`: the index of each segment's parent in the concatenated segments of all earlier levels; None at the first
    level."""
    active: list[int]  # for each chunk index i, the number of segments with more than i chunks


def rows_before(segments: Tensor) -> Tensor:
    """Return for each row the row that precedes it in its sequence, `[R]`; -1 for a sequence's first row.

    segments: `[S, 4]`, as in MicroBatch.
    """
    first, rows, parent, _ = segments.unbind(1)
    before = torch.arange(-1, int(rows.sum()) - 1)
    before[first] = torch.where(parent >= 0, (first + rows)[parent] - 1, -1)
    return before


def fork_depths(segments: Tensor) -> Tensor:
    """Return the number of ancestors of each segment, `[S]`."""
    depths: list[int] = []
    for parent in segments[:, 2].tolist():  # a segment precedes its descendants
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return torch.tensor(depths)


class Chunks(NamedTuple):
    """A layout of R packed rows in N chunks of C places each.

    Chunks are ordered by level. Within a level they are ordered by their index in the segment, and then by segment.
    """

    rows: Tensor  # `[N * C]`: the row at each place, or R if the place is empty
    places: Tensor  # `[R]`: the place of each row
    before: Tensor  # `[R + 1]`: the row that precedes each row in its sequence, or R if there is none
    levels: list[Level]
    size: int

    @classmethod
    def of(cls, segments: Tensor, size: int = CHUNK_ROWS) -> Chunks:
        """Plan the layout on the host. segments: `[S, 4]`, as in MicroBatch.

        size: the number C of places per chunk. It is reduced if all segments are shorter.
        """
        starts, lengths, parents, _ = segments.T.tolist()
        count = sum(lengths)
        size = min(size, 1 << (max(lengths) - 1).bit_length())
        before = F.pad(rows_before(segments), (0, 1), value=-1)
        before[before < 0] = count
        depths = fork_depths(segments)
        levels, order, place = [], [], {}
        for level in range(int(depths.max()) + 1):
            members = (depths == level).nonzero()[:, 0].tolist()
            members.sort(key=lambda s: -lengths[s])
            active = []
            for chunk in range(-(-lengths[members[0]] // size)):
                with_one = [s for s in members if lengths[s] > chunk * size]
                active.append(len(with_one))
                for s in with_one:
                    own = torch.arange(starts[s] + chunk * size, starts[s] + min(lengths[s], (chunk + 1) * size))
                    order.append(F.pad(own, (0, size - len(own)), value=count))
            found = [parents[s] for s in members]
            levels.append(Level(torch.tensor([place[p] for p in found]) if level else None, active))
            for s in members:
                place[s] = len(place)
        at = torch.cat(order)
        places = torch.empty(count + 1, dtype=torch.int64)
        places[at] = torch.arange(len(at))
        return cls(at, places[:count], before, levels, size)


def causal_convolution(x: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    """Return for each row a weighted sum over the last K rows of its sequence, its own row included.

    weight: `[channels, K]`.
    """
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])]).float()
    row = torch.arange(len(x), device=x.device)
    total = padded[:-1] * weight[:, -1].float()
    for back in range(2, weight.shape[1] + 1):
        row = chunks.before[row]
        total = total + padded.index_select(0, row) * weight[:, -back].float()
    return total.to(x.dtype)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunks: Chunks
) -> Tensor:
    """Return `[R, V heads, D_v]` float32: for each row S q, where S is the state matrix after that row.

    Each row first decays the state, D = exp(log_decay) S, and then corrects it: S = D + beta (v - D k) k^T. Before
    that, queries and keys are normalized to unit length, and queries are scaled by D_k**-0.5.
    query, key: `[R, K heads, D_k]`. Each of their heads is shared by (V heads / K heads) value heads.
    value: `[R, V heads, D_v]`.
    log_decay, beta: `[R, V heads]`; log_decay is at most 0.
    """
    heads, width = key.shape[1], key.shape[2]

    def chunked(x: Tensor) -> Tensor:
        """Arrange rows in chunks: `[R, K heads, ...]` -> `[N, K heads, C, ...]` float32, zero at empty places."""
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])]).float()
        return x.index_select(0, chunks.rows).unflatten(0, (-1, chunks.size)).transpose(1, 2)

    q = chunked(_unit(query) * width**-0.5)[:, :, None]  # [N, K heads, 1, C, D_k]
    k = chunked(_unit(key))[:, :, None]
    v = chunked(value.unflatten(1, (heads, -1))).transpose(2, 3)  # [N, K heads, V per K, C, D_v]
    decay, beta = (chunked(x.unflatten(1, (heads, -1))).transpose(2, 3) for x in (log_decay, beta))
    decay, beta = decay.cumsum(-1), beta[..., None]
    # Decay from each row to each later row. Mask before exp, so that the upper triangle cannot overflow.
    ahead = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(ahead, -torch.inf).exp()
    since_start = decay.exp()[..., None]
    # Each row's correction depends on the rows before it: solve a triangular system instead of looping over rows.
    system = (beta * (k @ k.mT) * between).tril(-1)
    right = torch.cat([beta * v, beta * since_start * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    added, seen = solved.split([v.shape[-1], width], dim=-1)  # without a state, and the correction of the state
    scores, asked = (q @ k.mT) * between, q * since_start
    until_end = (decay[..., -1:] - decay).exp()[..., None]
    kept, whole = (k * until_end).mT, since_start[..., -1:, :]  # [..., D_k, C], [..., 1, 1]
    outputs, finals, chunk = [], value.new_zeros(0, dtype=torch.float32), 0
    for parents, active in chunks.levels:
        shape = (active[0], *v.shape[1:3], width, v.shape[-1])
        state = v.new_zeros(shape) if parents is None else finals.index_select(0, parents)
        ended = []
        for index, count in enumerate(active):
            at, state = slice(chunk, chunk + count), state[:count]
            corrected = added[at] - seen[at] @ state
            outputs.append(asked[at] @ state + scores[at] @ corrected)
            state = state * whole[at] + kept[at] @ corrected
            ended.append(state[active[index + 1] if index + 1 < len(active) else 0 :])
            chunk += count
        ended = torch.cat(ended[::-1])  # the longest ended last, but come first
        finals = ended if parents is None else torch.cat([finals, ended])
    out = torch.cat(outputs).permute(0, 3, 1, 2, 4).flatten(0, 1)  # [N * C, K heads, V per K, D_v]
    return out.index_select(0, chunks.places).flatten(1, 2)


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
