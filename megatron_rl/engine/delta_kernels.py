"""Gated delta nets by the kernels of flash-linear-attention, in 16-bit numbers on CUDA (`model.delta_kernel=fla`).

They take packed sequences, each with a state to begin from; a segment of a microbatch is one. The convolution of all is
one call, as the inputs that each begins with are there. The delta rule is one call for each depth of forks: what goes
on from a segment begins with its final state, which is in float32. The package is imported when a layer first computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.ops import TakenRows
from megatron_rl.types import prefix_sums

CHUNK_ROWS = 64
"""Rows that a program of the kernels takes at a time, as the package has it."""


class Sequences(NamedTuple):
    """S sequences of one call, one after the other. Told on the host, so that the kernels need not ask the device."""

    bounds: Tensor
    """`[S + 1]` int64 prefix sums of their rows."""
    chunks: Tensor
    """`[chunks, 2]` int64: a chunk's sequence, and its number in it."""

    @classmethod
    def of(cls, rows: Tensor) -> Sequences:
        counts = (rows + CHUNK_ROWS - 1) // CHUNK_ROWS
        sequence = torch.repeat_interleave(torch.arange(len(rows)), counts)
        number = torch.arange(len(sequence)) - prefix_sums(counts)[sequence]
        return cls(prefix_sums(rows), torch.stack([sequence, number], dim=1))


class Depth(NamedTuple):
    """Segments that as many others come before."""

    sequences: Sequences
    rows: int
    """The rows of all of them."""
    parents: TakenRows | None
    """The segments whose final states they begin with, counted over those one depth above; None: with zero."""


class Inputs(NamedTuple):
    """The K rows before each of S segments, with which a convolution over K rows begins."""

    taken: TakenRows
    """`[S * K]`"""
    are_there: Tensor
    """`[S * K, 1]` bool: False before a sequence's first row."""


class Calls(NamedTuple):
    """The calls for R packed rows.

    For example:

        calls = Calls.of(torch.tensor([[0, 2, -1, 0], [2, 2, 0, 2], [4, 1, 0, 2]]), 4)  # a prompt and two replies
        len(calls.depths)  # 2: the prompt, then both replies from its final state
    """

    segments: Sequences
    inputs: Inputs | None
    """None where no segment goes on from another."""
    depths: list[Depth]
    by_depth: Tensor | None
    """`[R]`: the rows in the order of `depths`; None where it is their own."""
    in_order: Tensor | None
    """`[R]`: where each row is in that order."""

    @classmethod
    def of(cls, segments: Tensor, kernel: int) -> Calls:
        """Plan on the host for `[S, 4]` segments as MicroBatch has them; kernel: rows that the convolution sees."""
        first, rows, parent, _ = segments.unbind(1)
        whole = Sequences.of(rows)
        if bool((parent < 0).all()):
            return cls(whole, None, [Depth(whole, int(rows.sum()), None)], None, None)
        depth = torch.zeros_like(parent)
        for number, above in enumerate(parent.tolist()):  # a segment stands before those that go on from it
            if above >= 0:
                depth[number] = depth[above] + 1
        depths, order, place = [], [], torch.empty_like(parent)
        for level in range(int(depth.max()) + 1):
            members = (depth == level).nonzero()[:, 0]
            place[members] = torch.arange(len(members))
            parents = TakenRows.of(place[parent[members]]) if level else None
            depths.append(Depth(Sequences.of(rows[members]), int(rows[members].sum()), parents))
            order += [torch.arange(start, start + n) for start, n in segments[members, :2].tolist()]
        by_depth = torch.cat(order)
        return cls(whole, _inputs(segments, kernel), depths, by_depth, by_depth.argsort())


def _inputs(segments: Tensor, kernel: int) -> Inputs:
    first, rows, parent, _ = segments.unbind(1)
    before = torch.arange(-1, int(rows.sum()) - 1)
    before[first] = torch.where(parent >= 0, (first + rows)[parent] - 1, -1)
    row, found = before[first], []
    for _ in range(kernel):
        found.append(row)
        row = torch.where(row >= 0, before[row], -1)
    taken = torch.stack(found[::-1], dim=1).flatten()
    return Inputs(TakenRows.of(taken.clamp(min=0)), taken[:, None] >= 0)


def kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the package's convolution and its delta rule in chunks."""
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return causal_conv1d, chunk_gated_delta_rule


def convolution(x: Tensor, weight: Tensor, calls: Calls) -> Tensor:
    """SiLU of each channel's sum over the last K rows of its sequence. x: `[R, channels]`, weight: `[channels, K]`."""
    state = None
    if calls.inputs is not None:
        taken = calls.inputs.taken.of_values(x) * calls.inputs.are_there
        state = taken.unflatten(0, (-1, weight.shape[1])).transpose(1, 2).contiguous()  # [S, channels, K]
    bounds, chunks = calls.segments
    options = dict(initial_state=state, activation="silu", cu_seqlens=bounds, chunk_indices=chunks)
    out, _ = kernels()[0](x[None], weight, **options)
    return out[0]


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, calls: Calls
) -> Tensor:
    """Return `[R, V heads, D_v]` in queries' dtype, of arguments as engine/delta_rule.py's function has them."""
    rule, inputs = kernels()[1], [query, key, value, log_decay, beta]
    if calls.by_depth is not None:
        inputs = [x.index_select(0, calls.by_depth) for x in inputs]
    parts = zip(*(x.split([depth.rows for depth in calls.depths]) for x in inputs), strict=True)
    outputs, finals = [], None
    for depth, part in zip(calls.depths, parts, strict=True):
        bounds, chunks = depth.sequences
        out, finals = rule(
            *(x[None] for x in part),
            initial_state=None if depth.parents is None else depth.parents.of_values(finals),
            output_final_state=depth is not calls.depths[-1],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds,
            chunk_indices=chunks,
        )
        outputs.append(out[0])
    return outputs[0] if calls.in_order is None else torch.cat(outputs).index_select(0, calls.in_order)
