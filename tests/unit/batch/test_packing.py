"""Packing shifts once, loses nothing and keeps to the budget."""

import pytest
import torch

from megatron_rl.batch import packing
from megatron_rl.types import TrajectoryBatch


def batch_of(*lengths):
    count = sum(lengths)
    tokens = {
        "input_ids": torch.arange(count) + 100,
        "loss_mask": torch.cat([torch.arange(n) >= 1 for n in lengths]),
        "logprobs": torch.arange(count).float(),
        "versions": torch.arange(count),
    }
    return TrajectoryBatch(
        tokens, {"rewards": torch.tensor([float(n) for n in lengths])}, torch.tensor([0, *lengths]).cumsum(0)
    )


def test_row_describes_the_next_token_of_its_own_sequence():
    batch = batch_of(3, 2)
    batch.tokens["loss_mask"][1] = False
    rows = packing.to_microbatch(batch, [1, 0]).rows  # sequence 1 comes first
    assert rows["input_ids"].tolist() == [103, 104, 100, 101, 102]
    assert rows["labels"].tolist() == [104, -100, -100, 102, -100]
    assert rows["loss_mask"].tolist() == [True, False, False, True, False]
    assert rows["logprobs"].tolist() == [4.0, 0.0, 1.0, 2.0, 0.0]
    assert rows["cu_seqlens"].tolist() == [0, 2, 5] and rows["cu_seqlens"].dtype == torch.int32
    assert rows["rewards"].tolist() == [2.0, 3.0]


def test_rolled_input_ids_are_the_labels_of_trained_rows():
    microbatch = packing.to_microbatch(batch_of(4, 3, 5), [2, 0, 1])
    rows = microbatch.rows
    rolled = torch.roll(rows["input_ids"], -1)
    assert torch.equal(rolled[rows["loss_mask"]], rows["labels"][rows["loss_mask"]])
    assert microbatch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]


def test_scattered_rows_return_to_their_tokens():
    batch = batch_of(3, 2, 4)
    microbatches = [
        packing.to_microbatch(batch, [2]),
        packing.to_microbatch(batch, [1, 0]),
        packing.to_microbatch(batch, []),
    ]
    rows = [m.rows["logprobs"] for m in microbatches]
    back = packing.scatter_rows(microbatches, rows, 9)
    first = torch.tensor([True, False, False, True, False, True, False, False, False])
    assert torch.equal(back, batch["logprobs"].masked_fill(first, 0.0))


# lengths: equal, ragged, one above the budget, a single one
@pytest.mark.parametrize("lengths", [(4, 4, 4, 4), (1, 9, 3, 7, 2, 8, 5), (3, 40, 2, 2), (6,)])
@pytest.mark.parametrize("spare", [0, 2])
def test_every_sequence_is_packed_once_within_the_budget(lengths, spare):
    batch, budget = batch_of(*lengths), 10
    count = packing.least_microbatches(list(lengths), budget) + spare
    microbatches = packing.pack(batch, tokens_per_microbatch=budget, count=count)
    assert len(microbatches) == count
    for microbatch in microbatches:
        assert microbatch.tokens <= budget or len(microbatch.rows["cu_seqlens"]) == 2
    trained = sum(int((m.rows["labels"] >= 0).sum()) for m in microbatches)
    assert trained == int(batch["loss_mask"].sum())
    seen = torch.cat([m.source[m.source >= 0] for m in microbatches]).sort().values
    assert seen.tolist() == [t for t in range(sum(lengths)) if t not in batch.cu_seqlens[:-1].tolist()]


def test_idle_microbatch_trains_nothing():
    rows = packing.to_microbatch(batch_of(3), []).rows
    assert rows["labels"].tolist() == [-100] and rows["cu_seqlens"].tolist() == [0, 1]


def test_parts_are_balanced_by_cost():
    parts = packing.split_evenly([5.0, 4.0, 3.0, 3.0, 3.0], 2)
    assert parts == [[0, 3], [1, 2, 4]] or parts == [[0, 3, 4], [1, 2]] or sorted(map(len, parts)) == [2, 3]
    costs = [sum([5.0, 4.0, 3.0, 3.0, 3.0][i] for i in part) for part in parts]
    assert max(costs) - min(costs) <= 2.0


def test_costs_are_evened_within_the_budget():
    assert packing.plan([10, 40, 10, 10, 10], 100, 2) == [[1], [0, 2, 3, 4]]  # 40 tokens cost more in one sequence
    # Even costs alone would put both 10s beside no 30; the budget does, and no bin stays empty as in first fit.
    assert packing.plan([10, 30, 10, 10], 30, 3) == [[1], [0, 3], [2]]


def test_a_bin_that_had_no_room_takes_a_shorter_sequence_where_it_is_the_cheapest():
    assert packing.plan([7, 6, 6, 4, 3], 10, 3, costs=[1.0, 5.0, 9.0, 1.0, 1.0]) == [[2], [1, 3], [0, 4]]


def test_sequences_that_just_fit_are_packed_though_even_costs_would_not_fit():
    # The cheapest bin first gives {6, 3} and {4, 4}, where the other 3 fits into neither.
    lengths = [6, 4, 4, 3, 3]
    assert packing.least_microbatches(lengths, 10) == 2
    assert [[lengths[i] for i in part] for part in packing.plan(lengths, 10, 2)] == [[6, 4], [4, 3, 3]]


def test_costliest_microbatch_comes_first_and_idle_ones_last():
    microbatches = packing.pack(batch_of(2, 9, 5), tokens_per_microbatch=10, count=4)
    assert [m.tokens for m in microbatches] == [9, 5, 2, 1]
    assert microbatches[3].rows["labels"].tolist() == [-100]


@pytest.mark.parametrize("lengths, multiple_of, least", [((), 1, 1), ((), 4, 4), ((6, 6, 6), 2, 4), ((5, 5), 3, 3)])
def test_count_is_a_multiple_of_what_the_pipeline_needs(lengths, multiple_of, least):
    assert packing.least_microbatches(list(lengths), 10, multiple_of=multiple_of) == least


def test_longer_sequence_is_alone_or_refused():
    assert packing.least_microbatches([3, 40, 2], 10) == 2
    assert packing.plan([3, 40, 2], 10, 2) == [[1], [0, 2]]
    with pytest.raises(ValueError, match="tokens_per_microbatch = 10: a sequence .* has 40 tokens"):
        packing.least_microbatches([3, 40, 2], 10, allow_longer=False)
    assert packing.least_microbatches([3, 10, 2], 10, allow_longer=False) == 2


def test_too_few_microbatches_are_refused():
    with pytest.raises(ValueError, match="count = 1: 2 sequences with 12 tokens"):
        packing.plan([6, 6], 10, 1)


def test_empty_sequence_is_in_no_microbatch():
    batch = batch_of(0, 3, 0)
    (microbatch,) = packing.pack(batch, tokens_per_microbatch=10, count=1)
    assert microbatch.rows["cu_seqlens"].tolist() == [0, 3] and microbatch.rows["rewards"].tolist() == [3.0]
    assert packing.to_microbatch(batch, [0, 2]).rows["labels"].tolist() == [-100]
