"""Packs trajectories into microbatches and shifts the labels. No other module shifts them.

In a trajectory, entry t belongs to token t. In a microbatch, row t is the prediction made after reading token t, and
every per-token tensor of row t describes the predicted token, `labels[t]`. `to_microbatch` shifts, and
`MicroBatch.source` maps back. For example, two trajectories, a b C D (capital letters are trained) and e F G, as one
microbatch:

    row          0  1  2  3 | 4  5  6      cu_seqlens = [0, 4, 7]
    input_ids    a  b  C  D | e  F  G      read in this row
    labels       -  C  D  - | F  G  -      predicted after it; - is -100: the next token is a prompt's, or missing
    positions    0  1  2  3 | 0  1  2
    source       1  2  3 -1 | 5  6 -1      index in the batch of the token predicted in this row; -1 at a sequence's end

Every sequence that has tokens goes whole into one microbatch, and nothing is padded. With `share_prompts`, a model may
compute fewer rows: all replies of one group begin with the same prompt, whose rows are computed once and read by all of
them. For example, the two replies a b C D and a b F to the prompt a b:

    row          0  1  2  3 | 4  5  6      T = 7
    input_ids    a  b  C  D | a  b  F
    computed     0  1 | 2  3 | 6           M = 5: the rows whose tokens the model reads, in its order
    read         0  1  2  3 | 0  1  4      the computed row of each row: both replies' first tokens are predicted by 1
    segments     [0 2 -1 0], [2 2 0 2], [4 1 0 2]     the prompt; C D and F, each a child of segment 0, which has 2 rows

Dialogues that fork repeatedly are trees of segments. A prefix that only some of a group's sequences share is a separate
segment. It is a child of the segment that all of the group's sequences share.

Sequences with the same number in the column `pair` (and the same `group`) have one joint loss. They stay in one
microbatch, in their order.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from bisect import bisect, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_rl import routes, support
from megatron_rl.ops import packed_labels
from megatron_rl.types import MicroBatch, TrajectoryBatch, prefix_sums


def to_microbatch(
    batch: TrajectoryBatch,
    indices: list[int],
    *,
    share_prompts: bool = False,
    final_rows: bool = True,
    families: list[Family] | None = None,
) -> MicroBatch:
    """Pack the trajectories `indices` into one microbatch.

    Empty trajectories are skipped, because not every attention kernel accepts them. If none is left, the microbatch has
    one untrained token, so that the rank still takes part in collectives.

    share_prompts: True to compute a prefix that several trajectories of one `group` have in common only once.
    final_rows: True to compute the last row of each sequence too. A loss on log-probabilities does not need it, because
      the token that it predicts was never sampled.
    families: the families of `indices`, if they are already known.
    """
    chosen = torch.tensor(indices, dtype=torch.int64)
    chosen = chosen[batch.lengths[chosen] > 0]
    if len(chosen) == 0:
        return to_microbatch(_untrained_token(batch), [0])
    picked = batch.lengths[chosen]
    cu_seqlens = prefix_sums(picked)
    offsets = torch.repeat_interleave(batch.cu_seqlens[:-1][chosen] - cu_seqlens[:-1], picked)
    tokens = offsets + torch.arange(len(offsets))  # [T]: the token of the batch that each row reads
    source, positions, sequence = packed_labels(tokens, cu_seqlens)  # of places: labels are places. The shift
    source.clamp_(min=-1)  # the last row of a sequence predicts nothing
    of_rows = ("input_ids", routes.COLUMN)  # these describe the token that a row reads, not the one it predicts
    rows = {key: _described_token(value, source, key) for key, value in batch.tokens.items() if key not in of_rows}
    # Kernels and embeddings index with int64; the batch, which is larger, stores int32.
    rows["input_ids"] = batch.tokens["input_ids"][tokens].long()
    labels = _described_token(batch.tokens["input_ids"], source, "labels").long()
    rows["labels"] = labels.masked_fill(~rows["loss_mask"].bool(), -100)
    rows["cu_seqlens"] = cu_seqlens.to(torch.int32)
    rows |= {key: value[chosen] for key, value in batch.sequences.items()}
    if families is None:
        found = families_of(picked, rows.get("group"), beginnings(batch, chosen)) if share_prompts else []
    else:
        place = {index: number for number, index in enumerate(chosen.tolist())}
        found = [Family([place[m] for m in family.members], family.shared) for family in families]
    needed = _needed_rows(picked, final_rows)
    computed, read, segments = _computed_rows(cu_seqlens, positions, sequence, needed, found)
    slots = batch.tokens.get(routes.COLUMN)
    return MicroBatch(
        rows=TensorDict(rows),
        positions=positions,
        source=source,
        computed=computed,
        read=read,
        segments=segments,
        routes=None if slots is None else slots[tokens[computed]],
    )


def _needed_rows(lengths: Tensor, final_rows: bool) -> Tensor:
    # A sequence of one token keeps it, so that every sequence has a computed row to read.
    return lengths if final_rows else torch.minimum(lengths, (lengths - 1).clamp_min(1))


def _computed_rows(
    cu_seqlens: Tensor, positions: Tensor, sequence: Tensor, needed: Tensor, families: list[Family]
) -> tuple[Tensor, Tensor, Tensor]:
    """Build the fields `computed`, `read` and `segments` of a MicroBatch.

    sequence: `[T]`, the sequence of each row. needed: `[B]`, how many rows of each sequence are needed.
    """
    own = needed.tolist()
    alone = set(range(len(own))).difference(*(family.members for family in families))
    trees = sorted(families + [Family([number], [0]) for number in alone], key=lambda family: min(family.members))
    segments: list[list[int]] = []
    sources: list[int] = []  # for each segment, the sequence that its rows are taken from
    of_sequence: list[list[int]] = [[] for _ in own]  # the segments of each sequence, from its start
    count = 0
    for family in trees:
        for start, end, members in branches(family, own):
            path = of_sequence[members[0]]
            segments.append([count, end - start, path[-1] if path else -1, start])
            sources.append(members[0])
            count += end - start
            for member in members:
                of_sequence[member].append(len(segments) - 1)
    table = torch.tensor(segments)  # [S, 4]
    # A row of the loss reads the row of the same position in its segment.
    paths = torch.tensor([segment for path in of_sequence for segment in path])
    starts = table[paths, 3] + cu_seqlens[:-1].repeat_interleave(torch.tensor(list(map(len, of_sequence))))
    row = torch.minimum(positions, needed[sequence] - 1)  # a skipped last row reads the one before, unused
    segment = paths[torch.searchsorted(starts, cu_seqlens[:-1][sequence] + row, right=True) - 1]
    read = table[segment, 0] + row - table[segment, 3]
    first = (cu_seqlens[:-1][torch.tensor(sources)] + table[:, 3] - table[:, 0]).repeat_interleave(table[:, 1])
    return first + torch.arange(count), read, table


@dataclass(frozen=True)
class Family:
    """Sequences with a common prefix. They are sorted by tokens, so that neighbors share the longest prefixes.

    shared: for each member, how many of its first tokens are not computed again, because the previous member has them
    too; 0 for the first member.
    """

    members: list[int]
    shared: list[int]

    def clamped(self, rows: list[int]) -> Family:
        """Return a copy whose shared prefixes end with the needed rows. rows[i]: needed rows of sequence i."""
        pairs = zip(self.members, self.members[1:], self.shared[1:], strict=False)
        return Family(self.members, [0, *(min(shared, rows[a], rows[b]) for a, b, shared in pairs)])


def branches(family: Family, rows: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Walk the tree of a family's prefixes, parents before children, and yield each branch.

    A branch is (start, end, members): the members have the rows from start to end in common. rows[i]: how many rows of
    sequence i are needed.
    """
    family = family.clamped(rows)
    waiting = [(0, len(family.members), 0)]  # first member, end of members, and the position where their branch starts
    while waiting:
        low, high, start = waiting.pop()
        members, shared = family.members[low:high], family.shared[low + 1 : high]
        end = min(shared) if shared else rows[members[0]]
        if end > start:
            yield start, end, members
        cuts = [low, *(low + 1 + place for place, length in enumerate(shared) if length == end), high]
        if shared:
            waiting += [(a, b, end) for a, b in reversed(list(itertools.pairwise(cuts)))]


WORTH_SHARING = 0.1
"""A family shares prefixes only if that saves at least this fraction of its rows, because it copies keys and values."""
WORTH_A_BRANCH = 0.01
"""A branch is kept only if sharing it saves at least this fraction of the rows in it and in its descendants, because
each branch costs an attention call."""


def beginnings(batch: TrajectoryBatch, indices: Tensor | None = None) -> Tensor:
    """Find the common prefixes of the trajectories in each `group`. Returns `[B, 2]` int64.

    The first column is a trajectory's position when its group is sorted by tokens. The second is the length of the
    prefix that it shares with the trajectory at the previous position. indices: the trajectories to compare; default:
    all.
    """
    chosen = torch.arange(len(batch)) if indices is None else indices
    group = batch.sequences.get("group")
    if group is None:
        return torch.zeros(len(chosen), 2, dtype=torch.int64)
    ids, slots = batch.tokens["input_ids"].int()[:, None], batch.tokens.get(routes.COLUMN)
    if slots is not None:  # tokens routed through different experts count as different
        ids = torch.cat([ids, routes.experts_of(slots).flatten(1)], dim=1)
    read = ids.numpy().astype(">i4")  # big-endian, so that bytes sort like the tokens
    bounds = torch.stack([batch.cu_seqlens[chosen], batch.cu_seqlens[chosen + 1]], dim=1).tolist()
    texts = [read[start:stop] for start, stop in bounds]
    found = torch.zeros(len(chosen), 2, dtype=torch.int64)
    for members in _by_group(group[chosen]):
        if len(members) > 1:
            ordered = sorted(members, key=lambda m: texts[m].tobytes())
            common = [_common_length(texts[a], texts[b]) for a, b in itertools.pairwise(ordered)]
            found[ordered] = torch.tensor([range(len(ordered)), [0, *common]]).T
    return found


def selected_beginnings(begin: Tensor, group: Tensor, indices: Tensor) -> Tensor:
    """Return the `beginnings` of the trajectories `indices`, given those of the whole batch."""
    place_of = torch.full((len(begin),), -1)
    place_of[indices] = torch.arange(len(indices))
    found = torch.zeros(len(indices), 2, dtype=torch.int64)
    new, places, shared = place_of.tolist(), *begin.T.tolist()
    for members in _by_group(group):
        count = least = 0
        for index in sorted(members, key=places.__getitem__):
            # The prefix shared with an earlier trajectory is the minimum over all those between.
            least = min(least, shared[index])
            if new[index] >= 0:
                found[new[index], 0], found[new[index], 1] = count, least
                count, least = count + 1, sys.maxsize
    return found


def _by_group(group: Tensor) -> Iterable[list[int]]:
    result: dict[int, list[int]] = {}
    for index, number in enumerate(group.tolist()):
        result.setdefault(number, []).append(index)
    return result.values()


def _common_length(one: np.ndarray, other: np.ndarray) -> int:
    shortest = min(len(one), len(other))
    differs = (one[:shortest] != other[:shortest]).any(1)
    return int(differs.argmax()) if differs.any() else shortest


def families_of(lengths: Tensor, group: Tensor | None, begin: Tensor) -> list[Family]:
    """Group trajectories into families that are computed together.

    lengths, group: `[B]`, the trajectories' lengths and prompts. begin: the result of `beginnings`.
    """
    if group is None:
        return []
    tokens, places, shared = lengths.tolist(), *begin.T.tolist()
    families = []
    for of_group in _by_group(group):
        members = sorted((m for m in of_group if tokens[m]), key=places.__getitem__)  # empty ones would come first
        family = _worthwhile(Family(members, [0, *(shared[m] for m in members[1:])]), tokens)
        if len(members) > 1 and sum(family.shared) >= max(1, WORTH_SHARING * sum(tokens[m] for m in members)):
            families.append(family)
    return families


def _worthwhile(family: Family, tokens: list[int]) -> Family:
    """Remove the branches that save too little. The children of a removed branch then start where it started."""
    kept = [0] * len(family.members)
    waiting = [(0, len(kept), 0)]  # first member, end of members, and the position where their branch starts
    while waiting:
        low, high, start = waiting.pop()
        if high - low < 2:
            continue
        end = min(family.shared[low + 1 : high])
        behind = sum(tokens[m] - start for m in family.members[low:high])
        depth = end if (end - start) * (high - low - 1) >= WORTH_A_BRANCH * behind else start
        cuts = [place for place in range(low + 1, high) if family.shared[place] == end]
        for place in cuts:
            kept[place] = depth
        waiting += [(a, b, depth) for a, b in itertools.pairwise([low, *cuts, high])]
    return Family(family.members, kept)


@dataclass(frozen=True)
class Unit:
    """Trajectories that are computed together, with the number of their rows and their `estimated_cost`."""

    members: list[int]
    shared: list[int]
    rows: int
    cost: float


def units(
    batch: TrajectoryBatch, most_rows: int, *, share_prompts: bool = False, final_rows: bool = True
) -> list[Unit]:
    """Divide trajectories into units that are computed together.

    A unit is a pair, a single trajectory, or several members of a family that have at most `most_rows` rows together.
    """
    needed = _needed_rows(batch.lengths, final_rows).tolist()
    found = families_of(batch.lengths, batch.sequences.get("group"), beginnings(batch)) if share_prompts else []
    return divide(needed, found, batch.sequences.get("pair"), most_rows)


def divide(rows: list[int], families: list[Family], pair: Tensor | None, most_rows: int) -> list[Unit]:
    """Divide trajectories into units, as `units` does.

    rows: the number of needed rows of each trajectory. pair: pair numbers `[B]`.
    """
    result, together = [], set()
    for family in families:
        together.update(family.members)
        clamped = family.clamped(rows)
        parts = [clamped] if pair is not None else _parts_of_family(clamped, rows, most_rows)
        result += [_unit(part, rows) for part in parts]
    rest = [i for i in range(len(rows)) if i not in together]
    return result + [_unit(Family(part, [0] * len(part)), rows) for part in _inseparable(pair, rest)]


def _inseparable(pair: Tensor | None, indices: list[int]) -> list[list[int]]:
    """Group the trajectories `indices` by pair. If there are no pairs, each trajectory is a group of its own."""
    if pair is None:
        return [[index] for index in indices]
    return [[indices[place] for place in members] for members in _by_group(pair[indices])]


def _parts_of_family(family: Family, rows: list[int], most_rows: int) -> list[Family]:
    """Cut a family into parts of at most `most_rows` rows, so that as few rows as possible are computed twice.

    If members on both sides of a cut share a prefix, each of the two parts computes it.
    """
    count = len(family.members)
    never = (sys.maxsize, 0, 0)
    best = [(0, 0, 0)] + [never] * count  # of the first n members: rows again, parts, last part's start
    for stop in range(1, count + 1):
        size = 0
        for start in range(stop - 1, -1, -1):
            size += rows[family.members[start]] - (family.shared[start + 1] if start + 1 < stop else 0)
            if size > most_rows and stop - start > 1:
                break
            again, pieces, _ = best[start]
            best[stop] = min(best[stop], (again + family.shared[start], pieces + 1, start))
    parts: list[Family] = []
    stop = count
    while stop:
        start = best[stop][2]
        parts.insert(0, Family(family.members[start:stop], [0, *family.shared[start + 1 : stop]]))
        stop = start
    return parts


def _unit(family: Family, rows: list[int]) -> Unit:
    # A row attends to all rows before it; shared rows do so only once.
    needed = [rows[m] for m in family.members]
    pairs = sum(n**2 - shared**2 for n, shared in zip(needed, family.shared, strict=True))
    computed = sum(needed) - sum(family.shared)
    return Unit(family.members, family.shared, computed, computed + pairs / ATTENTION_SHARE_AT)


def _described_token(values: Tensor, source: Tensor, key: str) -> Tensor:
    """Take from a column the entry that describes each row: `[N, ...]` -> `[T, ...]`.

    Rows that describe no token get NO_TOKEN in the column of supports, and 0 in other columns.
    """
    nothing = support.NO_TOKEN if key == support.COLUMN else 0
    missing = (source < 0).view(-1, *[1] * (values.ndim - 1))
    return values[source.clamp_min(0)].masked_fill(missing, nothing)


def _untrained_token(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Return a batch of one untrained token, with the columns of `batch`.

    It stands in for an empty microbatch, because the loss must return the same statistics on every rank.
    """
    fill = {routes.COLUMN: routes.NO_ROUTE}
    tokens = {key: value.new_full((1, *value.shape[1:]), fill.get(key, 0)) for key, value in batch.tokens.items()}
    sequences = {key: torch.zeros(1, dtype=value.dtype) for key, value in batch.sequences.items()}
    return TrajectoryBatch(tokens, sequences, torch.tensor([0, 1]))


def scatter_rows(microbatches: list[MicroBatch], rows: list[Tensor], token_count: int) -> Tensor:
    """Undo the packing and the shift: turn results per row into one result per token, `[token_count]`.

    rows: a tensor `[T]` of results for each microbatch. Tokens that no row predicts get 0. This runs on the host, where
    the microbatches are, because selecting by a mask on a device would wait for the device.
    """
    result = torch.zeros(token_count, dtype=rows[0].dtype)
    for microbatch, values in zip(microbatches, rows, strict=True):
        predicted = microbatch.source >= 0
        result[microbatch.source[predicted]] = values[predicted]  # at most one row describes each token
    return result


ATTENTION_SHARE_AT = 4096.0
"""Sequence length at which attention costs about as much as the linear layers of a small model."""


def estimated_cost(lengths: Tensor) -> Tensor:
    """Return each sequence's relative cost in a forward pass: O(length) of linear layers, O(length^2) of attention."""
    return lengths * (1.0 + lengths / ATTENTION_SHARE_AT)


def split_evenly(costs: list[float], parts: int) -> list[list[int]]:
    """Split indices into `parts` lists of nearly equal cost, each in ascending order.

    The indices are assigned in descending order of cost. Each one goes to the list that is cheapest so far.
    """
    heap = [(0.0, part) for part in range(parts)]
    lists: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):  # ties by index: same on all ranks
        cost, part = heap[0]
        lists[part].append(index)
        heapq.heapreplace(heap, (cost + costs[index], part))
    return [sorted(part) for part in lists]


def least_microbatches(
    lengths: list[int], tokens_per_microbatch: int, *, multiple_of: int = 1, allow_longer: bool = True
) -> int:
    """Return the number of microbatches that best-fit-decreasing needs, at least 1, rounded up to `multiple_of`.

    A sequence longer than the budget gets its own microbatch, or raises ValueError if not `allow_longer`.
    """
    longest = max(lengths, default=0)
    if longest > tokens_per_microbatch and not allow_longer:
        raise ValueError(
            f"batch.tokens_per_microbatch = {tokens_per_microbatch}: a sequence (or a pair of replies) has {longest} "
            f"tokens, more than a microbatch may have. Raise it to {longest}, shorten prompts or replies, or set "
            f"batch.allow_longer_sequences to give a longer sequence a microbatch of its own."
        )
    # Best fit leaves at most one bin half full or less, so it never opens more bins than this.
    bound = 1 + 2 * sum(min(length, tokens_per_microbatch) for length in lengths) // tokens_per_microbatch
    bins = _Bins(lengths, tokens_per_microbatch, bound)
    bins.place_in_fullest(_longest_first(lengths))
    used = max(1, sum(1 for part in bins.parts if part))
    return -(-used // multiple_of) * multiple_of


def plan(
    lengths: list[int], tokens_per_microbatch: int, count: int, costs: list[float] | None = None
) -> list[list[int]]:
    """Split the indices of sequences into `count` lists. Each list fits the budget or is a single longer sequence.

    Costs (default: `estimated_cost(lengths)`) are balanced as well as the budget allows. The costliest list comes
    first, so that ranks with similar shares do similar work at the same time. Empty sequences are in no list. Raises
    ValueError if `count` is below `least_microbatches`.
    """
    order = _longest_first(lengths)
    # Balancing costs spreads the free room over all bins. If a later sequence then fits nowhere, more of the short
    # sequences are placed by best fit, which concentrates free room. All by best fit always succeeds:
    # `least_microbatches` counts so.
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
    """Pack a rank's trajectories into exactly `count` microbatches, the same number on all ranks.

    count: at least the largest `least_microbatches` of any rank. An empty microbatch holds one untrained token.
    """
    options = {"share_prompts": share_prompts, "final_rows": final_rows}
    parts = units(batch, tokens_per_microbatch, **options)
    chosen = plan([u.rows for u in parts], tokens_per_microbatch, count, [u.cost for u in parts])
    result = []
    for bin in chosen:
        # Keep the families as they were counted: for a part of a family alone, less might seem worth sharing.
        families = [Family(parts[part].members, parts[part].shared) for part in bin if any(parts[part].shared)]
        indices = sorted(i for part in bin for i in parts[part].members)
        result.append(to_microbatch(batch, indices, final_rows=final_rows, families=families))
    return result


def _longest_first(lengths: list[int]) -> list[int]:
    return sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i))


class _Bins:
    """Microbatches that are being filled, longest sequences first. Placing a sequence takes O(log count) on average."""

    def __init__(self, lengths: list[int], budget: int, count: int, costs: list[float] | None = None) -> None:
        # A longer sequence counts as the whole budget: it needs an empty bin and fills it.
        self.sizes = [min(length, budget) for length in lengths]
        if costs is None:
            costs = estimated_cost(torch.tensor(lengths, dtype=torch.float64)).tolist()
        self.sequence_costs: list[float] = costs
        self.parts: list[list[int]] = [[] for _ in range(count)]
        self.room = [budget] * count
        self.costs = [0.0] * count

    def place_in_cheapest(self, order: list[int]) -> bool:
        """Put each sequence into the cheapest bin with room for it. Return False once a sequence fits into no bin."""
        cheapest = [(0.0, part) for part in range(len(self.parts))]
        crowded: list[tuple[int, int]] = []  # heap of (-room, bin): too full for this sequence, not for shorter ones
        for index in order:  # sizes decrease, so a bin that was too full may fit again
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
        """Put each sequence into the fullest bin with room for it. Return False once a sequence fits into no bin."""
        by_room = sorted((-room, part) for part, room in enumerate(self.room))  # the fullest last
        for index in order:
            # The last entry with -room <= -size; len(self.parts) is above all bins' numbers.
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
