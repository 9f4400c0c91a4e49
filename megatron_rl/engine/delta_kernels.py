"""Gated delta nets with the kernels of flash-linear-attention, in 16-bit dtypes on CUDA (`model.delta_kernel=fla`).

The kernels take packed sequences, each with an initial state. Every segment of a microbatch is one sequence. One call
computes the convolution of all segments, because the rows before each segment are known. The delta rule needs one call
per fork depth, because a segment starts from its parent's final state (float32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.engine.delta_rule import fork_depths, rows_before
from megatron_rl.ops import TakenRows
from megatron_rl.types import prefix_sums

CHUNK_ROWS = 64  # rows per chunk, which is what a kernel processes at a time. The package fixes this number


class Sequences(NamedTuple):
    """S consecutive sequences, on which kernels are called once.

    They are described on the host, so that the kernels need not wait for the device.
    """

    bounds: Tensor  # `[S + 1]` int64 prefix sums of the sequences' row counts
    chunks: Tensor  # `[chunks, 2]` int64: each chunk's sequence, and the chunk's index within that sequence

    @classmethod
    def of(cls, rows: Tensor) -> Sequences:
        counts = (rows + CHUNK_ROWS - 1) // CHUNK_ROWS
        sequence = torch.repeat_interleave(torch.arange(len(rows)), counts)
        number = torch.arange(len(sequence)) - prefix_sums(counts)[sequence]
        return cls(prefix_sums(rows), torch.stack([sequence, number], dim=1))


class Depth(NamedTuple):
    """The segments at one fork depth. A segment's initial state is its parent's final state, or zero."""

    sequences: Sequences
    rows: int  # total row count of these segments
    parents: TakenRows | None
    """Each segment's parent, as an index into the segments one depth above. None at depth 0."""


class Inputs(NamedTuple):
    """The K rows before each of S segments. They are the initial inputs of a convolution over K rows."""

    taken: TakenRows  # `[S * K]` row indices
    are_there: Tensor
    """`[S * K, 1]` bool: False for a row that does not exist, because fewer than K rows precede the segment."""


class Calls(NamedTuple):
    """The plan of all kernel calls for R packed rows."""

    segments: Sequences
    inputs: Inputs | None  # None if no segment has a parent, because the initial inputs are then zero
    depths: list[Depth]
    by_depth: Tensor | None
    """`[R]`: the row indices in the order of `depths`; None if the rows are already in that order."""
    in_order: Tensor | None  # `[R]`: the index of each row in `by_depth`

    @classmethod
    def of(cls, segments: Tensor, kernel: int) -> Calls:
        """Plan the calls on the host.

        segments: `[S, 4]`, as in MicroBatch. kernel: the number of rows that the convolution covers.
        """
        _, rows, parent, _ = segments.unbind(1)
        whole = Sequences.of(rows)
        if bool((parent < 0).all()):
            return cls(whole, None, [Depth(whole, int(rows.sum()), None)], None, None)
        depth = fork_depths(segments)
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
    before = rows_before(segments)
    row, found = before[segments[:, 0]], []
    for _ in range(kernel):
        found.append(row)
        row = torch.where(row >= 0, before[row], -1)
    taken = torch.stack(found[::-1], dim=1).flatten()
    return Inputs(TakenRows.of(taken.clamp(min=0)), taken[:, None] >= 0)


def kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions of flash-linear-attention: the convolution and the chunked delta rule.

    The first call imports the package.
    """
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return causal_conv1d, chunk_gated_delta_rule


def convolution(x: Tensor, weight: Tensor, calls: Calls) -> Tensor:
    """Return for each row SiLU of a weighted sum over the last K rows of its sequence, its own row included.

    weight: `[channels, K]`.
    """
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
    """Compute `delta_rule.gated_delta_rule` with the kernels of flash-linear-attention, in the queries' dtype."""
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
