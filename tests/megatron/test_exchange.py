"""Each token of a step is sent once, to the replica that trains it, and what is said of all tokens is right there."""

import functools
import sys
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl import parallel
from megatron_rl.batch import exchange
from megatron_rl.types import TrajectoryBatch
from tests.kit.models import LAYOUTS, make_batch, make_groups
from tests.kit.ranks import run_ranks

PARTS = (make_groups(), make_batch(lengths=(7, 0, 1)))
for part in PARTS:  # more than one number for a token
    part.tokens["routes"] = torch.randint(0, 8, (len(part["input_ids"]), 3, 2), dtype=torch.int16)


def whole_step():
    """What two rollout ranks have, as one batch."""
    first, second = (part.select(range(len(part))) for part in PARTS)
    second.sequences["group"] = second["group"] + first["group"].max() + 1
    return TrajectoryBatch.cat([first, second])


def shared_out(layout, **options):
    groups = parallel.start(LAYOUTS[layout][1], seed=1)
    own = PARTS[groups.data.rank] if groups.is_rollout_rank else None
    return groups, exchange.share_out(own, groups, seed=3, **options)


def shared(layout, share_prompts):
    groups, batch = shared_out(layout, updates=2, share_prompts=share_prompts)
    shown = batch.shown([14, 2, 9])
    return groups.data.rank, batch.own(), batch.sequences, batch.lengths, batch.shares(), shown


def assert_same(found, expected):
    assert found.tokens.keys() == expected.tokens.keys() and found.sequences.keys() == expected.sequences.keys()
    assert torch.equal(found.cu_seqlens, expected.cu_seqlens)
    for key in (*expected.tokens, *expected.sequences, "versions"):
        assert found[key].dtype == expected[key].dtype and torch.equal(found[key], expected[key]), key


EIGHT = pytest.param("tp2_pp2_dp2", marks=pytest.mark.thorough)
"""Two replicas of four ranks, with stages; otherwise they have two."""


@pytest.fixture(scope="module")
def shared_by():
    """A function: layout, whether prompts are shared -> what each rank has."""
    return functools.cache(lambda layout, share_prompts: run_ranks(LAYOUTS[layout][0], shared, layout, share_prompts))


@pytest.mark.parametrize("layout", ["tp2_dp2", EIGHT])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_every_trajectory_is_on_the_replica_that_trains_it_and_on_no_other(layout, share_prompts, shared_by):
    expected = whole_step()
    expected.sequences["number"] = torch.arange(len(expected))
    places = {tuple(row.tolist()): n for n, row in enumerate(torch.stack([expected["rewards"], expected.lengths], 1))}
    of_replicas = {0: [], 1: []}
    for replica, own, sequences, lengths, shares, _ in shared_by(layout, share_prompts):
        assert torch.equal(lengths, expected.lengths)
        assert all(torch.equal(sequences[key], expected[key]) for key in ("rewards", "group"))
        numbers = [places[tuple(row.tolist())] for row in torch.stack([own["rewards"], own.lengths], 1)]
        assert numbers == sorted(numbers)
        alone = expected.select(numbers)
        del alone.sequences["number"]
        assert_same(own, alone)
        assert sorted(torch.cat([share["rewards"] for share in shares]).tolist()) == sorted(own["rewards"].tolist())
        of_replicas[replica].append((numbers, [len(share) for share in shares]))
    assert all(alike == of_rank[0] for of_rank in of_replicas.values() for alike in of_rank)
    (first, sizes), (second, others) = (of_rank[0] for of_rank in of_replicas.values())
    assert sorted(first + second) == list(range(len(expected)))
    assert sorted(a + b for a, b in zip(sizes, others, strict=True)) == [7, 8]


def test_the_main_rank_is_shown_trajectories_whoever_trains_them(shared_by):
    _, _, _, _, _, shown = shared_by("tp2_dp2", False)[0]
    assert_same(shown, whole_step().select([14, 2, 9]))


def asked(layout, other_layout):
    groups, batch = shared_out(layout, updates=2)
    other = parallel.start(LAYOUTS[other_layout][1], seed=1, control=groups.control)
    there = batch.in_layout(other)
    assert there is batch.in_layout(other) and batch.in_layout(groups) is batch
    ids = batch.taken_from(there, there["input_ids"] + 1)
    assert torch.equal(ids, batch["input_ids"] + 1)
    assert torch.equal(there.plan.update, batch.plan.update)
    returns = there.taken_from(batch, batch["logprobs"])
    assert torch.equal(returns, there["logprobs"])
    greedy = there.select([0, 3, 14])
    found = [
        batch.sums_of_tokens(batch["input_ids"]),
        there.sums_of_tokens(there["input_ids"]),
        there.by_sequence(lambda share: share.lengths),
        batch.total(batch["loss_mask"].sum()),
        there.total(there["loss_mask"].sum()),
        torch.cat([greedy.lengths, greedy.sums_of_tokens(greedy["input_ids"])]),
    ]
    return found, there.own()


# From two replicas to as many as there are ranks, and to one of all ranks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("tp2_dp2", "1"),
        ("tp2_dp2", "cp2_tp2"),
        *(pytest.param("tp2_pp2_dp2", other, marks=pytest.mark.thorough) for other in ("1", "cp2_tp2_pp2")),
    ],
)
def test_another_layout_has_the_same_step_and_takes_columns_to_and_fro(layout, other):
    whole = whole_step()
    del whole.tokens["routes"]  # other models route by themselves
    sums = whole.sums_of_tokens(whole["input_ids"])
    chosen = torch.cat([whole.lengths[[0, 3, 14]], sums[[0, 3, 14]]])
    wanted = [sums, sums, whole.lengths.float(), *[whole["loss_mask"].sum()] * 2, chosen]
    for found, own in run_ranks(LAYOUTS[layout][0], asked, layout, other):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        if other != "1":
            assert_same(own, whole)


def other_columns(layout):
    groups = parallel.start(LAYOUTS[layout][1], seed=1)
    own = make_batch()
    if groups.data.rank == 1:
        own.sequences["sample"] = torch.zeros(len(own))
    with pytest.raises(RuntimeError, match="rank 0 has group, rewards, advantages, input_ids, logprobs, loss_mask. "):
        exchange.share_out(own, groups, updates=1, seed=0)


def test_rollout_ranks_with_other_columns_are_refused_on_all_ranks():
    run_ranks(2, other_columns, "dp2")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    found = __import__("bench_exchange")
    # Ranks are forks, as those of other tests: each would import torch for seconds. No thread of OpenMP is here.
    monkeypatch.setattr(found, "multiprocessing", SimpleNamespace(get_context=lambda _: get_context("fork")))
    yield found
    del sys.modules["bench_exchange"]


SIZES = {"sequences": 24, "mean": 4096, "longest": 16_384, "samples": 8, "prompt": 512, "updates": 2}
LARGE = {"replicas": 512, "planned": 16_384, "planned_mean": 16_384}


@pytest.mark.slow
def test_no_rank_receives_a_tenth_more_than_what_it_trains(bench):
    args = SimpleNamespace(**SIZES, **LARGE, repeats=1)
    for replicas, tensor, of_everything in ((4, 1, 2.0), (2, 2, 0.9)):  # by what the kernel counts at their sockets
        found = bench.measure(replicas, tensor, args)
        assert 0.3 < found["planned"][2] <= 1.1 and found["everything"][2] > of_everything
    _, _, _, ratio = bench.large_world(args)
    assert 1.0 < ratio <= 1.1


@pytest.mark.thorough  # compares times
def test_a_plan_for_eight_times_the_trajectories_and_replicas_takes_little_more_than_eight_times_as_long(bench):
    small = LARGE | {"replicas": 64, "planned": 2048}
    eighth, whole = (bench.large_world(SimpleNamespace(**SIZES, **it, repeats=5))[0] for it in (small, LARGE))
    assert whole < 24 * eighth, "as the square it were 64 times"
