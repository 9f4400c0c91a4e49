"""What packing promises for every batch: over 1,000 random ones, with empty and one-token sequences among them."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batch import exchange, packing
from megatron_rl.batch.step_batch import StepBatch
from megatron_rl.types import TrajectoryBatch

BUDGETS = st.integers(1, 120)  # from one that most sequences exceed to one that holds several
SEEDS = st.integers(0, 2**16)
random_batches = settings(max_examples=350, deadline=None, derandomize=True, database=None)


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
    """Groups of replies that begin alike, over a small alphabet so that replies agree by chance too."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=8))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    parts, group = [torch.zeros(0, dtype=torch.int64)], []
    for number, (prompt_length, replies) in enumerate(sizes):
        prompt = torch.randint(0, 3, (prompt_length,), generator=generator)
        for _ in range(replies):
            own = int(torch.randint(0, 6, (1,), generator=generator))
            parts.append(torch.cat([prompt, torch.randint(0, 3, (own,), generator=generator)]))
            group.append(number)
    order = torch.randperm(len(group), generator=generator)  # members need not be neighbours
    lengths = torch.tensor([len(part) for part in parts[1:]], dtype=torch.int64)
    ids, cu_seqlens = torch.cat(parts), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = {"input_ids": ids, "loss_mask": torch.ones(len(ids), dtype=torch.bool)}
    sequences = {"group": torch.tensor(group, dtype=torch.int64), "number": torch.arange(len(group))}
    return TrajectoryBatch(tokens, sequences, cu_seqlens).select(order.tolist())


def history(microbatch, row):
    """The tokens that a computed row sees, by the segments' definition."""
    ids = microbatch.rows["input_ids"][microbatch.computed]
    for start, rows, prefix, prefix_rows in microbatch.segments.tolist():
        if start <= row < start + rows:
            return ids[prefix : prefix + prefix_rows].tolist() + ids[start : row + 1].tolist()
    raise AssertionError(f"row {row} is in no segment")


@random_batches
@given(families(), BUDGETS, st.booleans())
def test_every_row_of_a_shared_prompt_sees_its_own_sequence_and_nothing_else(batch, budget, final_rows):
    options = {"share_prompts": True, "final_rows": final_rows}
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
                assert int(microbatch.positions[microbatch.computed[row]]) == offset
        if microbatch.tokens > 1:  # one token may be an idle microbatch's
            seen += microbatch.rows["number"].tolist()
    longer = [n for n, length in zip(batch["number"].tolist(), batch.lengths.tolist(), strict=True) if length > 1]
    assert set(longer) <= set(seen) and len(seen) == len(set(seen))


@random_batches
@given(families(), st.integers(1, 4), st.integers(1, 3), SEEDS)
def test_shares_of_groups_partition_the_batch(batch, ranks, updates, seed):
    common = packing.common_beginnings(batch)
    shares = shares_of(batch, updates, ranks, seed=seed, share_prompts=True, common=common)
    numbers = [number for of_rank in shares for share in of_rank for number in share["number"].tolist()]
    assert sorted(numbers) == list(range(len(batch)))
