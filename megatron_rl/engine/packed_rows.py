"""The rows of a microbatch that this context rank computes, and the rows that each of them attends to.

A microbatch is a list of segments of rows. A segment attends to itself causally, and to all of its ancestors: a prompt
that several replies share, or the common part of forked dialogues. Context parallelism splits the rows, not the
sequences, into 2 x size chunks. Rank r gets chunks r and 2 x size - 1 - r (zigzag), so that each rank has early rows,
which attend to few keys, and late ones. The end of a chunk cuts a segment into pieces. A piece's queries are its own
rows. They are also its last keys, as variable-length kernels require. For example, two segments, written as in
MicroBatch, on two ranks:

    rows          0  1 | 2  3 | 4  5 | 6  7      segments [0 5 -1 0], [5 3 -1 0]
    chunk, rank   0  0 | 1  1 | 2  1 | 3  0
    pieces of 0   queries 0 1 with keys 0 1, and 6 7 with 5 6 7
    pieces of 1   queries 2 3 with keys 0 to 3, 4 with 0 to 4, and 5 with 5
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_rl.engine.forks import Forks
from megatron_rl.engine.one_copy import one_copy
from megatron_rl.engine.rope import Rope, Rotation
from megatron_rl.ops import TakenRows
from megatron_rl.parallel import Axis
from megatron_rl.routes import with_no_routes
from megatron_rl.types import MicroBatch, prefix_sums


class Alike(NamedTuple):
    """Some pieces with n queries and m keys each. One call of dense attention computes all of them."""

    n: int
    m: int
    pieces: int


@dataclass(kw_only=True)
class PackedRows(PackedSeqParams):
    """Positions and attention plan of R rows, which are cut into P pieces.

    Megatron reads fields of its own base class, which describe the rows as one sequence.
    """

    positions: Tensor  # `[R]` int64 rotary positions
    reads: Tensor
    """`[T]` int64: the row of this rank that predicts each loss row, or -1 if that row is on another context rank."""
    trained: Tensor
    """Indices (int64) of the loss rows that have a label and are predicted on this rank. They are determined on the
    host."""
    predicting: TakenRows  # this rank's rows that predict the `trained` rows
    in_order: bool  # True if row t predicts loss row t for every t
    keys: TakenRows | None
    """Index of each key of the pieces in the rows gathered over the context axis. None if these rows are the keys."""
    routes: Tensor | None = None
    """`[R, mixture layers of this rank, slots]`: the experts that the servers chose, encoded as in
    megatron_rl/routes.py."""
    context: Axis
    longest_query: int
    longest_key: int
    query_cu: Tensor | None = None
    """`[P + 1]` int32 prefix sums of the pieces' numbers of queries. With dense attention, this and `key_cu` are None.
    """
    key_cu: Tensor | None = None
    alike: list[Alike] = field(default_factory=list)
    """Groups of equally shaped pieces, for dense attention. The keys are listed in the order of the pieces here."""
    queries: TakenRows | None = None
    """Indices of this rank's rows in the order of `alike`, or None if the rows already are in that order."""
    unsorted: TakenRows | None = None
    """Index of each row in the concatenated results of the groups in `alike`. None if `queries` is None."""
    segments: Tensor  # `[S, 4]` segments of the microbatch and its padding, as in MicroBatch, on the host
    forks: Forks | None = None
    """Plan for attention that does not copy the shared keys of forked dialogues. It covers the keys of all context
    ranks."""
    _planned: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, plan: Callable[[], Any]) -> Any:
        """Return the result of `plan()`, which is called only when a layer first asks with this key."""
        if key not in self._planned:
            self._planned[key] = plan()
        return self._planned[key]

    def rotation(self, rope: Rope) -> Rotation:
        """Return the rotation of the rows, computed once for all layers that share `rope`."""
        return self.once(rope, lambda: rope.rotation(self.positions))


def row_multiple(*, context: int, sequence_split: int) -> int:
    """Return the number that the row count must be a multiple of, so that all ranks have equal parts.

    context: the size of the context axis. sequence_split: the number of tensor ranks that split the rows, or 1.
    """
    return math.lcm(2 * context if context > 1 else 1, context * sequence_split)


def has_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if attention has variable-length kernels for this device and dtype: 16-bit dtypes on CUDA."""
    return device.type == "cuda" and dtype != torch.float32


def own_rows(
    microbatch: MicroBatch,
    context: Axis,
    *,
    multiple_of: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    parts: int = 1,
    mixtures: list[int] | None = None,
    copies_shared_keys: bool = True,
) -> tuple[Tensor, PackedRows]:
    """Return the token ids `[R]` that this context rank computes, and the PackedRows that its layers need.

    multiple_of: the rows are padded to a multiple of this number. The padding is a segment of its own.
    dtype: dtype of queries and keys.
    parts: number of tensor ranks that each gather a part of the rows over the context axis, and then exchange the
      parts.
    mixtures: indices of this rank's mixture layers in the microbatch's routes; None disables routing replay.
    copies_shared_keys: False if a kernel reads the shared keys of forked dialogues in place.
    """
    count = len(microbatch.computed)
    padding = -count % multiple_of
    total = count + padding
    segments = microbatch.segments
    if padding:
        segments = torch.cat([segments, torch.tensor([[count, padding, -1, 0]])])
    ranges = _zigzag(total, context)
    own = torch.cat([torch.arange(start, stop) for start, stop in ranges])  # [R]
    segment, rows, own_keys = _pieces(segments, ranges)
    keys = segments[segment, 3] + own_keys  # per piece: the ancestors' rows, then its own
    is_forked = bool(segments[:, 3].any())
    is_plain = context.size == 1 and not is_forked
    gathered = None if context.size == 1 else _gathered(total, context, parts)
    positions = torch.nn.functional.pad(microbatch.positions[microbatch.computed], (0, padding))
    attention: dict[str, Any]
    if is_forked and not copies_shared_keys and has_varlen_kernel(device, dtype):
        in_order = torch.arange(total) if gathered is None else gathered.argsort()
        attention = {"forks": Forks.of(segments, positions, own, in_order)}
    elif has_varlen_kernel(device, dtype):
        attention = {name: prefix_sums(n).int() for name, n in (("query_cu", rows), ("key_cu", keys))}
    else:
        attention, order = _dense(rows, keys)
        segment, own_keys = segment[order], own_keys[order]
    taken = None
    # Plain rows are their own keys. If they are in order, this saves a copy of keys and values.
    if "forks" not in attention and (not is_plain or attention.get("queries")):
        row_of_key = _runs(*_key_runs(segments, segment, own_keys))
        taken = TakenRows.of(row_of_key if gathered is None else gathered[row_of_key])
    place = torch.full((total,), -1)
    place[own] = torch.arange(len(own))
    reads = place[microbatch.read]  # converts the microbatch's computed rows to this rank's
    trained = ((microbatch.rows["labels"] >= 0) & (reads >= 0)).nonzero()[:, 0]
    whole = torch.tensor([0, len(own)], dtype=torch.int32)
    host: dict[str, Any] = {
        "positions": positions[own],
        "cu_seqlens_q": whole,
        "cu_seqlens_kv": whole,
        "reads": reads,
        "trained": trained,
        "predicting": TakenRows.of(reads[trained]),
        "keys": taken,
    } | attention
    if mixtures is not None and microbatch.routes is not None:
        host["routes"] = with_no_routes(microbatch.routes[:, mixtures], total)[own]
    ids = torch.nn.functional.pad(microbatch.rows["input_ids"][microbatch.computed], (0, padding))[own]
    ids, on_device = one_copy((ids, host), device)
    return ids, PackedRows(
        qkv_format="thd",
        max_seqlen_q=len(own),
        max_seqlen_kv=len(own),
        in_order=is_plain and count == microbatch.tokens,
        context=context,
        segments=segments,
        longest_query=int(rows.max()),
        longest_key=int(keys.max()),
        **on_device,
    )


def _zigzag(total: int, context: Axis) -> list[tuple[int, int]]:
    """Return the ranges (start, stop) of the rows that belong to this context rank. total: the number of all rows."""
    if context.size == 1:
        return [(0, total)]
    chunk = total // (2 * context.size)
    return [(c * chunk, (c + 1) * chunk) for c in (context.rank, 2 * context.size - 1 - context.rank)]


def _gathered(total: int, context: Axis, parts: int) -> Tensor:
    # After gathering, rank r's two chunks, r and 2 x size - 1 - r, are at positions 2 r and 2 r + 1.
    chunk = total // (2 * context.size)
    places = []
    for number in range(2 * context.size):
        is_second = number >= context.size
        rank = 2 * context.size - 1 - number if is_second else number
        places.append((2 * rank + is_second) * chunk + torch.arange(chunk))
    # Each rank's rows form `parts` equal parts. After gathering, the first parts of all ranks come first.
    return torch.arange(total).view(parts, context.size, -1).transpose(0, 1).flatten()[torch.cat(places)]


def _pieces(segments: Tensor, ranges: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the segments into pieces at the ends of this rank's ranges.

    Returns three tensors with an entry per piece, in the order of this rank's rows: the piece's segment, its number of
    rows, and its number of keys in that segment.
    """
    parts = []
    for start, stop in ranges:
        first, end = segments[:, 0], segments[:, 0] + segments[:, 1]
        rows = end.clamp(max=stop) - first.clamp(min=start)
        kept = (rows > 0).nonzero()[:, 0]  # the others are outside the range
        keys = end.clamp(max=stop) - first
        parts.append(torch.stack([kept, rows[kept], keys[kept]]))
    segment, rows, keys = torch.cat(parts, dim=1)
    return segment, rows, keys


def _key_runs(segments: Tensor, pieces: Tensor, own_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys of the pieces as runs of consecutive rows: the first row of each run, and the run's length.

    The runs of a piece begin with its oldest ancestor. own_keys: the number of each piece's keys in its own segment.
    """
    first, length, parent, _ = segments.T.tolist()
    starts: list[int] = []
    lengths: list[int] = []
    for segment, own in zip(pieces.tolist(), own_keys.tolist(), strict=True):
        path = [segment]
        while (above := parent[path[-1]]) >= 0:
            path.append(above)
        starts += [first[s] for s in reversed(path)]
        lengths += [*(length[s] for s in reversed(path[1:])), own]
    return torch.tensor(starts), torch.tensor(lengths)


def _dense(rows: Tensor, keys: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Group the pieces of equal shape. Returns the PackedRows fields that describe the groups, and the pieces' order.

    rows, keys: each piece's number of rows and of keys.
    """
    shapes, member, counts = torch.unique(torch.stack([rows, keys], 1), dim=0, return_inverse=True, return_counts=True)
    alike = [Alike(n, m, count) for (n, m), count in zip(shapes.tolist(), counts.tolist(), strict=True)]
    order = member.argsort(stable=True)
    if bool((order.diff() == 1).all()):
        return {"alike": alike}, order
    queries = _runs(prefix_sums(rows)[:-1][order], rows[order])
    return {"alike": alike, "queries": TakenRows.of(queries), "unsorted": TakenRows.of(queries.argsort())}, order


def _runs(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the rows of all runs, one run after the other. A run has `lengths` consecutive rows from `starts`."""
    offsets = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return offsets + torch.arange(len(offsets))
