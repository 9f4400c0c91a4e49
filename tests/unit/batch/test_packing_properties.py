"""What packing promises for every batch: over 1,000 random ones, with empty and one-token sequences among them."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batch import exchange, packing
from megatron_rl.batch.step_batch import StepBatch
from megatron_rl.types import TrajectoryBatch
from tests.kit.examples import max_examples

BUDGETS = st.integers(1, 120)  # from one that most sequences exceed to one that holds several
SEEDS = st.integers(0, 2**16)
random_batches = settings(max_examples=max_examples(50, 350), deadline=None, derandomize=True, database=None)


@st.composite
def batches(draw):
    """0 to 40 sequences of 0 to 60 tokens, short ones often. All token ids differ: none can stand for another."""
    length = st.one_of(st.integers(0, 2), st.integers(1, 60), st.integers(10, 30))
    size = draw(st.integers(0, 40))  # drawn apart, for hypothesis prefers lists of about five
    lengths = torch.tensor(draw(st.lists(length, min_size=size, max_size=size)), dtype=torch.int64)
    count = int(lengths.sum())
    tokens = {
        "input_ids": torch.arange(count) + 1000,
        "loss_mask": torch.rand(count, generator=torch.Generator().manual_seed(draw(SEEDS))) < 0.7,
        "logprobs": torch.arange(count) + 0.5,
        "versions": torch.arange(count),
    }
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    number = torch.arange(len(lengths))
    return TrajectoryBatch(tokens, {"number": number, "group": number // 3}, cu_seqlens)


def packed(batch, budget, spare=0):
    count = packing.least_microbatches(batch.lengths.tolist(), budget) + spare
    return packing.pack(batch, tokens_per_microbatch=budget, count=count)


def idle(microbatch):
    return microbatch.tokens == 1 and int(microbatch.rows["input_ids"]) < 1000


def sequences(microbatch):
    """(number, rows) of each sequence in a microbatch; an idle one has none."""
    if idle(microbatch):
        return []
    edges = microbatch.rows["cu_seqlens"].tolist()
    numbers = microbatch.rows["number"].tolist()
    return [(n, slice(a, b)) for n, a, b in zip(numbers, edges[:-1], edges[1:], strict=True)]


@pytest.mark.slow
@random_batches
@given(batches(), BUDGETS, st.integers(0, 3))
def test_every_token_is_packed_once_in_order_within_the_budget(batch, budget, spare):
    seen, predicted = [], torch.zeros(len(batch["input_ids"]), dtype=torch.bool)
    microbatches = packed(batch, budget, spare)
    starts = batch.cu_seqlens.tolist()
    for microbatch in microbatches:
        rows, own = microbatch.rows, sequences(microbatch)
        assert microbatch.tokens <= budget or len(own) == 1
        if not own:
            assert rows["labels"].tolist() == [-100] and microbatch.source.tolist() == [-1]
        for number, at in own:
            seen.append(number)
            tokens = batch["input_ids"][starts[number] : starts[number + 1]]
            trained = batch["loss_mask"][starts[number] : starts[number + 1]]
            assert torch.equal(rows["input_ids"][at], tokens)
            assert torch.equal(rows["labels"][at][:-1], tokens[1:].where(trained[1:], torch.tensor(-100)))
            assert int(rows["labels"][at][-1]) == -100
            assert microbatch.positions[at].tolist() == list(range(len(tokens)))
            predicted[starts[number] + 1 : starts[number + 1]] = True
    assert sorted(seen) == [i for i, length in enumerate(batch.lengths.tolist()) if length]

    back = packing.scatter_rows(microbatches, [m.rows["logprobs"] for m in microbatches], len(predicted))
    assert torch.equal(back, batch["logprobs"].masked_fill(~predicted, 0.0))


@random_batches
@given(batches(), BUDGETS, st.integers(1, 4), st.integers(0, 20))
def test_any_count_from_the_least_upwards_is_kept_exactly(batch, budget, multiple, more):
    lengths = batch.lengths.tolist()
    least = packing.least_microbatches(lengths, budget, multiple_of=multiple)
    assert least % multiple == 0 and least >= 1
    assert least * budget >= sum(min(length, budget) for length in lengths)
    # The least count itself is always tried: only there do even costs leave no room for the last sequences.
    for count in (packing.least_microbatches(lengths, budget), least + more):
        parts = packing.plan(lengths, budget, count)
        assert len(parts) == count
        assert sorted(i for part in parts for i in part) == [i for i, length in enumerate(lengths) if length]
        assert all(sum(lengths[i] for i in part) <= budget or len(part) == 1 for part in parts)


def shares_of(batch, updates, ranks, **options):
    """By data-parallel rank, its share of each update."""
    found = []
    for rank in range(ranks):
        groups = SimpleNamespace(data=SimpleNamespace(size=ranks, rank=rank))
        plan = exchange.plan_step(batch.sequences, batch.lengths, groups, updates=updates, **options)
        own = batch.select((plan.owner == rank).nonzero()[:, 0].tolist())
        found.append(StepBatch.of_tokens(own, batch.sequences, plan).shares())
    return found


@pytest.mark.slow
@random_batches
@given(batches(), st.integers(1, 4), st.integers(1, 5), SEEDS)
def test_shares_partition_every_update_and_updates_the_batch(batch, ranks, updates, seed):
    shares = shares_of(batch, updates, ranks, seed=seed)
    assert [len(per_update) for per_update in shares] == [updates] * ranks
    whole = []
    for update in range(updates):
        numbers = sorted(n for rank in range(ranks) for n in shares[rank][update]["number"].tolist())
        assert abs(len(numbers) - len(batch) / updates) < 1
        whole += numbers
        for share in (shares[rank][update] for rank in range(ranks)):
            tokens = [batch["input_ids"][batch.cu_seqlens[n] : batch.cu_seqlens[n + 1]] for n in share["number"]]
            assert torch.equal(share["input_ids"], torch.cat([torch.zeros(0, dtype=torch.int64), *tokens]))
    assert sorted(whole) == list(range(len(batch)))


@st.composite
def families(draw):
    """Groups of dialogues that fork from each other, over a small alphabet so that they agree by chance too."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 7)), max_size=8))
    generator, other = (torch.Generator().manual_seed(draw(SEEDS)) for _ in range(2))
    drawn = lambda high: int(torch.randint(0, high, (1,), generator=generator))  # noqa: E731
    parts, group = [torch.zeros(0, dtype=torch.int64)], []
    for number, (prompt_length, replies) in enumerate(sizes):
        known = [torch.randint(0, 3, (prompt_length,), generator=generator)]
        for _ in range(replies):
            before = known[drawn(len(known))]
            before = before[: len(before) - drawn(1 + max(0, len(before) - prompt_length))]
            known.append(torch.cat([before, torch.randint(0, 3, (drawn(6),), generator=generator)]))
            parts.append(known[-1])
            group.append(number)
    order = torch.randperm(len(group), generator=generator)  # members need not be neighbours
    lengths = torch.tensor([len(part) for part in parts[1:]], dtype=torch.int64)
    ids, cu_seqlens = torch.cat(parts), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = {"input_ids": ids, "loss_mask": torch.ones(len(ids), dtype=torch.bool)}
    if draw(st.booleans()):  # servers took most tokens alike through the experts, and some through others
        tokens["routes"] = (torch.rand(len(ids), 2, 2, generator=other) < 0.05).short()
    sequences = {"group": torch.tensor(group, dtype=torch.int64), "number": torch.arange(len(group))}
    return TrajectoryBatch(tokens, sequences, cu_seqlens).select(order.tolist())


def history(microbatch, row):
    """The tokens that a computed row sees, by the segments' definition."""
    ids = microbatch.rows["input_ids"][microbatch.computed].tolist()
    segments = microbatch.segments.tolist()
    for start, rows, parent, before in segments:
        if start <= row < start + rows:
            seen = ids[start : row + 1]
            while parent >= 0:
                first, count, parent, _ = segments[parent]
                seen = ids[first : first + count] + seen
            assert len(seen) == before + row + 1 - start
            return seen
    raise AssertionError(f"row {row} is in no segment")


@pytest.mark.slow
@random_batches
@given(families(), BUDGETS, st.booleans())
def test_every_row_of_a_shared_prompt_sees_its_own_sequence_and_routes_and_nothing_else(batch, budget, final_rows):
    options = {"share_prompts": True, "final_rows": final_rows}
    routes = batch.tokens.get("routes")
    place_of = {number: place for place, number in enumerate(batch["number"].tolist())}
    parts = packing.units(batch, budget, **options)
    assert sorted(i for unit in parts for i in unit.members) == list(range(len(batch)))
    count = packing.least_microbatches([unit.rows for unit in parts], budget)
    microbatches = packing.pack(batch, tokens_per_microbatch=budget, count=count, **options)
    seen = []
    for microbatch in microbatches:
        edges = microbatch.rows["cu_seqlens"].tolist()
        assert len(microbatch.computed) <= budget or len(edges) == 2
        assert int(microbatch.segments[:, 1].sum()) == len(microbatch.computed) <= microbatch.tokens
        for start, stop in zip(edges, edges[1:], strict=False):
            ids = microbatch.rows["input_ids"][start:stop].tolist()
            needed = range(len(ids) if final_rows else max(1, len(ids) - 1))
            for offset in needed:
                row = int(microbatch.read[start + offset])
                assert history(microbatch, row) == ids[: offset + 1]
                if routes is not None and len(batch["input_ids"]):
                    number = int(microbatch.rows["number"][edges.index(start)])
                    assert torch.equal(microbatch.routes[row], routes[batch.cu_seqlens[place_of[number]] + offset])
                assert int(microbatch.positions[microbatch.computed[row]]) == offset
        if microbatch.tokens > 1:  # one token may be an idle microbatch's
            seen += microbatch.rows["number"].tolist()
    longer = [n for n, length in zip(batch["number"].tolist(), batch.lengths.tolist(), strict=True) if length > 1]
    assert set(longer) <= set(seen) and len(seen) == len(set(seen))


def read_by(batch):
    """Each token with its route, where it has one."""
    ids, slots = batch["input_ids"].tolist(), batch.tokens.get("routes")
    return ids if slots is None else list(zip(ids, map(str, slots.tolist()), strict=True))


def beginnings_in(batch, indices):
    """Every beginning of every sequence of each group, once for each way through the experts."""
    ids = read_by(batch)
    edges, group = batch.cu_seqlens.tolist(), batch["group"].tolist()
    return {(group[i], tuple(ids[edges[i] : stop])) for i in indices for stop in range(edges[i] + 1, edges[i + 1] + 1)}


@pytest.mark.slow
@random_batches
@given(families(), BUDGETS)
def test_each_distinct_row_is_computed_once_and_a_family_is_cut_where_that_costs_least(batch, budget):
    everything = range(len(batch))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH_SHARING", 0.0)
        patch.setattr(packing, "WORTH_A_BRANCH", 0.0)
        distinct = len(beginnings_in(batch, everything))
        whole = packing.to_microbatch(batch, list(everything), share_prompts=True)
        assert len(whole.computed) == max(1, distinct), "one idle row where there is none"
        parts = packing.units(batch, budget, share_prompts=True)
        for unit in parts:
            assert unit.rows == len(beginnings_in(batch, unit.members))
            assert unit.rows <= budget or len(unit.members) == 1
        tokens = [read_by(batch)[start:stop] for start, stop in pairwise(batch.cu_seqlens.tolist())]
        for number in set(batch["group"].tolist()):
            members = [i for i in everything if int(batch["group"][i]) == number and tokens[i]]
            found = [unit for unit in parts if set(unit.members) <= set(members) and unit.rows]
            ordered = sorted(members, key=tokens.__getitem__)
            assert sum(unit.rows for unit in found) == least_rows(batch, ordered, budget)


def least_rows(batch, ordered, budget):
    """The fewest rows of all ways to cut a row of sequences, each part within the budget or one sequence."""
    best = [0]
    for stop in range(1, len(ordered) + 1):
        ways = []
        for start in range(stop):
            rows = len(beginnings_in(batch, ordered[start:stop]))
            if rows <= budget or stop - start == 1:
                ways.append(best[start] + rows)
        best.append(min(ways))
    return best[-1]


@random_batches
@given(families(), SEEDS)
def test_some_of_a_batch_begin_as_they_do_in_the_whole(batch, seed):
    chosen = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))[: len(batch) // 2]
    found = packing.selected_beginnings(packing.beginnings(batch), batch["group"], chosen)
    expected = packing.beginnings(batch, chosen)
    assert found[:, 1].sum() == expected[:, 1].sum()  # which of two alike comes first does not matter
    places = zip(batch["group"][chosen].tolist(), found[:, 0].tolist(), strict=True)
    assert sorted(places) == sorted(zip(batch["group"][chosen].tolist(), expected[:, 0].tolist(), strict=True))


@random_batches
@given(families(), st.integers(1, 4), st.integers(1, 3), SEEDS)
def test_shares_of_groups_partition_the_batch(batch, ranks, updates, seed):
    shares = shares_of(batch, updates, ranks, seed=seed, begin=packing.beginnings(batch))
    numbers = [number for of_rank in shares for share in of_rank for number in share["number"].tolist()]
    assert sorted(numbers) == list(range(len(batch)))
