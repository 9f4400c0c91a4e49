"""Packs trajectories into microbatches and shifts labels, the only place that does.

In a trajectory entry t belongs to token t; in a microbatch row t is the prediction made after reading token t, and
every per-token tensor of row t describes `labels[t]`. `to_microbatch` shifts there, `MicroBatch.source` leads back.
Two trajectories, a b C D (capital letters are trained) and e F G, as one microbatch:

    row          0  1  2  3 | 4  5  6      cu_seqlens = [0, 4, 7]
    input_ids    a  b  C  D | e  F  G      read in this row
    labels       -  C  D  - | F  G  -      predicted after it; - is -100, not trained: b is a prompt's token
    positions    0  1  2  3 | 0  1  2
    source       1  2  3 -1 | 5  6 -1      the token of the batch that the row describes, here at the same places

Every sequence that has tokens goes whole into one microbatch, and nothing is padded. What a model computes may be
fewer rows: the replies of one group begin with one prompt, whose rows are computed once and read by all of them. Two
replies to the prompt a b, a b C D and a b F (`share_prompts`):

    row          0  1  2  3 | 4  5  6      T = 7
    input_ids    a  b  C  D | a  b  F
    computed     0  1 | 2  3 | 6           M = 5: the rows whose tokens the model reads, in its order
    read         0  1  2  3 | 0  1  4      the computed row of each row: both replies' first tokens are predicted by 1
    segments     [0 2 0 0], [2 2 0 2], [4 1 0 2]      the prompt; C D and F, each behind the two rows from 0 on

Sequences of one number in the column `pair`, which is their `group` too, have one loss together: they stay in one
microbatch, and in their order.
"""

from __future__ import annotations

import heapq
from bisect import bisect, insort
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_rl.ops import packed_labels
from megatron_rl.types import MicroBatch, TrajectoryBatch, prefix_sums


def to_microbatch(
    batch: TrajectoryBatch, indices: list[int], *, share_prompts: bool = False, final_rows: bool = True
) -> MicroBatch:
    """Pack the trajectories `indices` into rows; one untrained token if they have none, so that a rank can keep step.

    Empty trajectories are left out: they predict nothing, and not every attention kernel takes a sequence of no rows.
    share_prompts: compute the common beginning of one `group` once. final_rows: compute a sequence's last row too,
    which predicts what nobody has sampled; a loss of log-probabilities can do without.
    """
    chosen = torch.tensor(indices, dtype=torch.int64)
    chosen = chosen[batch.lengths[chosen] > 0]
    if len(chosen) == 0:
        return _idle_microbatch(batch)
    picked = batch.lengths[chosen]
    cu_seqlens = prefix_sums(picked)
    offsets = torch.repeat_interleave(batch.cu_seqlens[:-1][chosen] - cu_seqlens[:-1], picked)
    tokens = offsets + torch.arange(len(offsets))  # [T]: the token of the batch that each row reads
    source, positions, sequence = packed_labels(tokens, cu_seqlens)  # of places, so that labels are places: the shift
    source.clamp_(min=-1)  # the last row of a sequence predicts nothing
    rows = {key: _described_token(value, source) for key, value in batch.tokens.items() if key != "input_ids"}
    # Kernels and embeddings index with int64; the batch, which is larger, has int32.
    rows["input_ids"] = batch.tokens["input_ids"][tokens].long()
    labels = _described_token(batch.tokens["input_ids"], source).long()
    rows["labels"] = labels.masked_fill(~rows["loss_mask"].bool(), -100)
    rows["cu_seqlens"] = cu_seqlens.to(torch.int32)
    rows |= {key: value[chosen] for key, value in batch.sequences.items()}
    families = _families(batch, chosen.tolist()) if share_prompts else []
    place = {index: number for number, index in enumerate(chosen.tolist())}
    shared = [([place[index] for index in members], prefix) for members, prefix in families]
    needed = _needed_rows(picked, final_rows)
    computed, read, segments = _computed_rows(cu_seqlens, positions, sequence, needed, shared)
    return MicroBatch(
        rows=TensorDict(rows), positions=positions, source=source, computed=computed, read=read, segments=segments
    )


def _needed_rows(lengths: Tensor, final_rows: bool) -> Tensor:
    # A sequence of one token keeps it: every sequence has a computed row to read.
    return lengths if final_rows else torch.minimum(lengths, (lengths - 1).clamp_min(1))


def _computed_rows(
    cu_seqlens: Tensor, positions: Tensor, sequence: Tensor, needed: Tensor, shared: list[tuple[list[int], int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out the rows that a model computes: MicroBatch's `computed`, `read` and `segments`.

    sequence: `[T]`, the one of each row. needed: `[B]` rows of each sequence. shared: families of sequences with the
    length of their common beginning.
    """
    starts, own = cu_seqlens[:-1].tolist(), needed.tolist()
    prefix, prefix_start, own_start = [0] * len(own), [0] * len(own), [0] * len(own)  # the latter two: computed rows
    segments, sources, count = [], [], 0

    def add(source: int, rows: int, first_of_prefix: int, prefix_rows: int) -> int:
        nonlocal count
        if rows:
            segments.append([count, rows, first_of_prefix, prefix_rows])
            sources.append(source)
            count += rows
        return count - rows

    member_of = {number: family for family in shared for number in family[0]}
    for number in range(len(own)):
        members, common = member_of.get(number, ([number], 0))
        if number != members[0]:
            continue  # came with its family's first
        # A reply whose last row is not needed may end within the common beginning.
        common = min(common, *(own[m] for m in members)) if common else 0
        first = add(starts[number], common, 0, 0)
        for m in members:
            prefix[m], prefix_start[m] = common, first
            own_start[m] = add(starts[m] + common, own[m] - common, first if common else 0, common)
    table = torch.tensor(segments)  # [S, 4]
    offsets = torch.repeat_interleave(torch.tensor(sources) - table[:, 0], table[:, 1])
    row = torch.minimum(positions, needed[sequence] - 1)  # an uncomputed last row reads the one before; nobody uses it
    shift_prefix, shift_own = torch.tensor(prefix_start), torch.tensor(own_start) - torch.tensor(prefix)
    read = row + torch.where(row < torch.tensor(prefix)[sequence], shift_prefix[sequence], shift_own[sequence])
    return offsets + torch.arange(count), read, table


WORTH_SHARING = 0.1
"""Share of a family's rows that sharing must save: shared rows cost a copy of their keys and values per sequence."""


def _families(batch: TrajectoryBatch, indices: list[int]) -> list[tuple[list[int], int]]:
    """Return the trajectories of one `group` that begin with the same tokens, with the length of that beginning."""
    starts, ids = batch.cu_seqlens.tolist(), batch.tokens["input_ids"]

    def common_beginning(members: list[int], shortest: int) -> int:
        begins = torch.stack([ids[starts[m] : starts[m] + shortest] for m in members])
        return int((begins == begins[0]).all(0).cumprod(0).sum())  # the ones before the first difference

    return families_of(batch.lengths, batch.sequences.get("group"), indices, common_beginning)


def families_of(
    lengths: Tensor, group: Tensor | None, indices: list[int], common_beginning: Callable[[list[int], int], int]
) -> list[tuple[list[int], int]]:
    """Return which of the trajectories `indices` are computed together, with the length of their common beginning.

    lengths and group: `[B]`. common_beginning(members, shortest): how many tokens members of one group begin with
    alike, of which the shortest has `shortest`.
    """
    if group is None:
        return []
    all_lengths, groups = lengths.tolist(), group.tolist()
    by_group: dict[int, list[int]] = {}
    for index in indices:
        if all_lengths[index]:
            by_group.setdefault(groups[index], []).append(index)
    families = []
    for members in by_group.values():
        if len(members) > 1:
            own = [all_lengths[m] for m in members]
            common = common_beginning(members, min(own))
            if common * (len(members) - 1) >= WORTH_SHARING * sum(own):
                families.append((members, common))
    return families


def common_beginnings(batch: TrajectoryBatch) -> Tensor:
    """`[B]` int32: how many tokens each trajectory's family begins with alike; 0 for one that has none."""
    common = torch.zeros(len(batch), dtype=torch.int32)
    for members, length in _families(batch, list(range(len(batch)))):
        common[members] = length
    return common


@dataclass(frozen=True)
class Unit:
    """Trajectories that are computed together. rows: those a model computes. cost: as `estimated_cost`."""

    members: list[int]
    rows: int
    cost: float


def units(
    batch: TrajectoryBatch, most_rows: int, *, share_prompts: bool = False, final_rows: bool = True
) -> list[Unit]:
    """Divide the trajectories: pairs, else whole families up to `most_rows` rows, the others one by one."""
    needed = _needed_rows(batch.lengths, final_rows).tolist()
    found = _families(batch, list(range(len(batch)))) if share_prompts else []
    return divide(needed, found, batch.sequences.get("pair"), most_rows)


def divide(rows: list[int], families: list[tuple[list[int], int]], pair: Tensor | None, most_rows: int) -> list[Unit]:
    """Divide trajectories, of which the needed rows and families are known, as `units` does.

    families: members with the length of their common beginning. pair: `[B]`, the number of each one's, or None.
    """
    result, together = [], set()
    for members, common in families:
        together.update(members)
        common = min(common, *(rows[m] for m in members))
        own_rows = [rows[m] - common for m in members]
        for part in [members] if pair is not None else _parts_of_family(members, own_rows, common, most_rows):
            result.append(_unit(part, [rows[m] for m in part], common if len(part) > 1 else 0))
    rest = [i for i in range(len(rows)) if i not in together]
    return result + [_unit(part, [rows[i] for i in part], 0) for part in _inseparable(pair, rest)]


def _inseparable(pair: Tensor | None, indices: list[int]) -> list[list[int]]:
    """Return the pairs among the trajectories, or each one alone."""
    if pair is None:
        return [[index] for index in indices]
    number_of = pair.tolist()
    pairs: dict[int, list[int]] = {}
    for index in indices:
        pairs.setdefault(number_of[index], []).append(index)
    return list(pairs.values())


def _parts_of_family(members: list[int], own_rows: list[int], common: int, most_rows: int) -> list[list[int]]:
    """Cut a family in its order; each part computes the `common` rows again."""
    parts: list[list[int]] = []
    room = 0
    for member, own in zip(members, own_rows, strict=True):
        if not parts or own > room:
            parts.append([])
            room = most_rows - common
        parts[-1].append(member)
        room -= own
    return parts


def _unit(members: list[int], rows: list[int], common: int) -> Unit:
    own = sum(rows) - len(members) * common
    # Rows of the prompt attend to the prompt, once; those behind it to the rest of the sequence's square.
    pairs = common**2 + sum(n**2 - common**2 for n in rows)
    return Unit(members, common + own, common + own + pairs / ATTENTION_SHARE_AT)


def _described_token(values: Tensor, source: Tensor) -> Tensor:
    return values[source.clamp_min(0)].masked_fill(source < 0, 0)  # [N] -> [T], 0 where nothing is described


def _idle_microbatch(batch: TrajectoryBatch) -> MicroBatch:
    # The columns of the others, as every rank's loss must find them and return the same statistics.
    rows = {key: torch.zeros(1, dtype=value.dtype) for key, value in batch.tokens.items()}
    rows["input_ids"] = rows["input_ids"].long()
    rows["labels"] = torch.full((1,), -100)
    rows["cu_seqlens"] = torch.tensor([0, 1], dtype=torch.int32)
    rows |= {key: torch.zeros(1, dtype=value.dtype) for key, value in batch.sequences.items()}
    return MicroBatch(
        rows=TensorDict(rows),
        positions=torch.zeros(1, dtype=torch.int64),
        source=torch.full((1,), -1),
        computed=torch.zeros(1, dtype=torch.int64),
        read=torch.zeros(1, dtype=torch.int64),
        segments=torch.tensor([[0, 1, 0, 0]]),
    )


def scatter_rows(microbatches: list[MicroBatch], rows: list[Tensor], token_count: int) -> Tensor:
    """Undo packing and the shift, on the host, where the microbatches are: a mask's places would have to be waited for.

    Per-row results `[T]` of each microbatch -> `[token_count]`, 0 where nothing was predicted.
    """
    result = torch.zeros(token_count, dtype=rows[0].dtype)
    for microbatch, values in zip(microbatches, rows, strict=True):
        predicted = microbatch.source >= 0
        result[microbatch.source[predicted]] = values[predicted]  # a token is described by one row at most
    return result


ATTENTION_SHARE_AT = 4096.0
"""Tokens at which attention costs about as much as the linear layers of a small model."""


def estimated_cost(lengths: Tensor) -> Tensor:
    """Relative cost of a forward pass per sequence: linear layers grow with the length, attention with its square."""
    return lengths * (1.0 + lengths / ATTENTION_SHARE_AT)


def split_evenly(costs: list[float], parts: int) -> list[list[int]]:
    """Split indices into `parts` lists of near-equal cost, the costliest first, each to the cheapest list.

    Each list is in rising order.
    """
    heap = [(0.0, part) for part in range(parts)]
    lists: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):  # ties by index: alike on every rank
        cost, part = heap[0]
        lists[part].append(index)
        heapq.heapreplace(heap, (cost + costs[index], part))
    return [sorted(part) for part in lists]


def least_microbatches(
    lengths: list[int], tokens_per_microbatch: int, *, multiple_of: int = 1, allow_longer: bool = True
) -> int:
    """Return how many microbatches best-fit-decreasing needs, rounded up to `multiple_of`, and never 0.

    An interleaved pipeline schedule takes only multiples of its group size. A sequence above the budget gets a
    microbatch of its own, or ValueError unless `allow_longer`.
    """
    longest = max(lengths, default=0)
    if longest > tokens_per_microbatch and not allow_longer:
        raise ValueError(
            f"batch.tokens_per_microbatch = {tokens_per_microbatch}: a sequence has {longest} tokens, or a pair of "
            f"them, and none may have more than the budget here. Raise it to {longest}, shorten prompts or replies, or "
            f"set batch.allow_longer_sequences to give a longer one a microbatch of its own."
        )
    # Best fit leaves at most one bin no more than half full, so no more bins than these are opened.
    bound = 1 + 2 * sum(min(length, tokens_per_microbatch) for length in lengths) // tokens_per_microbatch
    bins = _Bins(lengths, tokens_per_microbatch, bound)
    bins.place_in_fullest(_longest_first(lengths))
    used = max(1, sum(1 for part in bins.parts if part))
    return -(-used // multiple_of) * multiple_of


def plan(
    lengths: list[int], tokens_per_microbatch: int, count: int, costs: list[float] | None = None
) -> list[list[int]]:
    """Split the indices of sequences into `count` lists, each within the budget or one longer sequence alone.

    Costs (`estimated_cost(lengths)` where absent) are as even as the budget allows. The costliest list comes first, so
    that ranks with like shares do like work at the same time; indices rise in each. Empty sequences are in no list.
    Raises ValueError where `count` is too low, which no count from `least_microbatches` is.
    """
    order = _longest_first(lengths)
    # Even costs spread the free room over all bins; where a later sequence then fits nowhere, more of the short ones
    # are placed by best fit, which gathers it. All by best fit is how `least_microbatches` counts, so that succeeds.
    for share in (1.0, 0.75, 0.5, 0.25, 0.0):
        evenly = round(share * len(order))
        bins = _Bins(lengths, tokens_per_microbatch, count, costs)
        if bins.place_in_cheapest(order[:evenly]) and bins.place_in_fullest(order[evenly:]):
            by_cost = sorted(range(count), key=lambda part: (-bins.costs[part], part))
            return [sorted(bins.parts[part]) for part in by_cost]
    raise ValueError(
        f"count = {count}: {len(lengths)} sequences with {sum(lengths)} tokens do not fit into as many microbatches of "
        f"tokens_per_microbatch = {tokens_per_microbatch}; take at least least_microbatches."
    )


def pack(
    batch: TrajectoryBatch,
    *,
    tokens_per_microbatch: int,
    count: int,
    share_prompts: bool = False,
    final_rows: bool = True,
) -> list[MicroBatch]:
    """Pack a rank's trajectories into exactly `count` microbatches as `plan` divides their units.

    `count` is at least `least_microbatches` of every rank (they agree on the largest). Spare microbatches hold one
    untrained token.
    """
    options = {"share_prompts": share_prompts, "final_rows": final_rows}
    parts = units(batch, tokens_per_microbatch, **options)
    chosen = plan([u.rows for u in parts], tokens_per_microbatch, count, [u.cost for u in parts])
    return [to_microbatch(batch, sorted(i for part in bin for i in parts[part].members), **options) for bin in chosen]


def _longest_first(lengths: list[int]) -> list[int]:
    """Indices of the sequences that have tokens, by falling length."""
    return sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i))


class _Bins:
    """Microbatches being filled. Sequences come longest first; both ways to place one take O(log count) on average."""

    def __init__(self, lengths: list[int], budget: int, count: int, costs: list[float] | None = None) -> None:
        # A longer sequence counts as the whole budget: it needs an empty bin and leaves no room in it.
        self.sizes = [min(length, budget) for length in lengths]
        if costs is None:
            costs = estimated_cost(torch.tensor(lengths, dtype=torch.float64)).tolist()
        self.sequence_costs: list[float] = costs
        self.parts: list[list[int]] = [[] for _ in range(count)]
        self.room = [budget] * count
        self.costs = [0.0] * count

    def place_in_cheapest(self, order: list[int]) -> bool:
        """Give each sequence to the cheapest bin with room; False as soon as none has."""
        cheapest = [(0.0, part) for part in range(len(self.parts))]
        crowded: list[tuple[int, int]] = []  # heap of (-room, bin): no room for the present sequence, but for a shorter
        for index in order:  # sizes fall, so that a bin that was too full may have room again
            size = self.sizes[index]
            while crowded and -crowded[0][0] >= size:
                part = heapq.heappop(crowded)[1]
                heapq.heappush(cheapest, (self.costs[part], part))
            while cheapest and self.room[cheapest[0][1]] < size:
                part = heapq.heappop(cheapest)[1]
                heapq.heappush(crowded, (-self.room[part], part))
            if not cheapest:
                return False
            part = cheapest[0][1]
            self._put(index, part)
            heapq.heapreplace(cheapest, (self.costs[part], part))
        return True

    def place_in_fullest(self, order: list[int]) -> bool:
        """Give each sequence to the bin with the least room that suffices (best fit); False as soon as none has."""
        by_room = sorted((-room, part) for part, room in enumerate(self.room))  # the fullest last
        for index in order:
            # The last entry with -room <= -size; behind any bin's number, so that one of just this room counts.
            position = bisect(by_room, (-self.sizes[index], len(self.parts))) - 1
            if position < 0:
                return False
            part = by_room.pop(position)[1]
            self._put(index, part)
            insort(by_room, (-self.room[part], part))
        return True

    def _put(self, index: int, part: int) -> None:
        self.parts[part].append(index)
        self.room[part] -= self.sizes[index]
        self.costs[part] += self.sequence_costs[index]
