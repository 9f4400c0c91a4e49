"""The reuse buffer beside a plain list of what was trained: bounded, resumed exactly, and read back bit by bit."""

import itertools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import ReuseConfig, RolloutConfig
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.rollout.events import Episode
from megatron_rl.rollout.journal import RolloutJournal
from megatron_rl.rollout.ledger import Share
from megatron_rl.rollout.resume_state import ResumePoint, ResumeState
from megatron_rl.rollout.reuse_buffer import ReuseBuffer, is_buffer, is_solved, with_reused
from megatron_rl.types import Trajectory, TrajectoryBatch
from tests.kit.examples import max_examples

PROMPTS = 7


def group(token, rewards, version=0, sample=None):
    trajectories = [
        Trajectory(
            input_ids=torch.tensor([token, 5, number]),
            loss_mask=torch.tensor([False, True, True]),
            logprobs=torch.tensor([0.0, -0.1 * token, -0.25]),
            versions=torch.tensor([-1, version, version]),
            reward=reward,
            sequence={} if sample is None else {"sample": sample[number]},
        )
        for number, reward in enumerate(rewards)
    ]
    return TrajectoryBatch.from_trajectories([trajectories])


def episode(number):
    data = {"prompt_number": number, "prompt_index": number % PROMPTS, "epoch": 0, "sample_key": f"p {number}"}
    return Episode(number=number, data=data, workflow=None)


class Rank:
    """A rank's buffer and journal, and beside them the plain list of what was solved and trained."""

    def __init__(self, folder, attempt=1, states=(), rank=0, ranks=1, **options):
        self.journal = RolloutJournal(folder, run_attempt=attempt, rank=rank, first_step=0, version=0, fingerprint="f")
        self.options = ReuseConfig(groups_per_step=2 * ranks, **options)
        self.buffer = ReuseBuffer(self.options, self.journal, folder, seed=3, rank=rank, ranks=ranks)
        self.buffer.load_state_dicts(list(states))
        self.events = [self.buffer, self.journal]

    def step(self, groups):
        """Train groups by number; return what was reused, as (place, tokens)."""
        drawn = self.buffer.draw()
        for number, one in groups.items():
            for events in self.events:
                events.accepted(episode(number), one)
        for events in self.events:
            events.consumed([episode(number) for number in groups], version=0)
        return drawn

    def state(self):
        state = json.loads(json.dumps(self.buffer.state_dict()))
        assert is_buffer(state)
        return state


steps_of_groups = st.lists(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4), min_size=1, max_size=12
)


@pytest.mark.slow
@settings(deadline=None, max_examples=max_examples(15, 40), derandomize=True, database=None)
@given(steps_of_groups, st.integers(1, 5), st.integers(1, 6), st.data())
def test_the_buffer_has_the_newest_solved_group_of_each_prompt_as_it_was_within_its_bounds(
    tmp_path_factory, steps, most, age, data
):
    rank = Rank(tmp_path_factory.mktemp("journal"), buffer_groups=most, max_age_steps=age)
    known = []  # (step, place, tokens), the oldest first
    number = 0
    for step, rewards in enumerate(steps, start=1):
        groups = {}
        for pair in rewards:
            groups[number] = group(number, [float(reward) for reward in pair], version=step)
            number += 1 + data.draw(st.integers(0, 2))
        expected = [entry for entry in known if step - entry[0] <= age]
        drawn = rank.step(groups)
        assert len(drawn) == min(2, len(expected)) == len({entry.place for entry in drawn})
        for entry in drawn:
            (tokens,) = (ids for _, place, ids in expected if place == entry.place)
            again = rank.buffer.read(entry)
            for name in ("input_ids", "logprobs", "rewards", "loss_mask", "versions"):  # of its own time, not of now
                assert torch.equal(again[name], tokens[name])
            assert again["prompt_index"].tolist() == [entry.place] * 2
        for one, fresh in groups.items():
            if sorted(fresh["rewards"].tolist()) == [0.0, 1.0]:
                expected = [entry for entry in expected if entry[1] != one % PROMPTS] + [(step, one % PROMPTS, fresh)]
        known = expected[-most:]
        assert [(entry.step, entry.place) for entry in rank.buffer.entries] == [entry[:2] for entry in known]
    rank.journal.close()


def one_step(step, rank=0):
    chance = random.Random(f"{step} {rank}")
    numbers = [step * 6 + rank * 3 + place for place in range(3)]
    return {number: group(number, [1.0, float(chance.random() < 0.3)]) for number in numbers}


@pytest.mark.slow
@settings(deadline=None, max_examples=max_examples(8, 20), derandomize=True, database=None)
@given(st.integers(1, 3), st.sets(st.integers(0, 9), min_size=1, max_size=3))
def test_a_killed_run_reuses_what_it_would_have_reused(tmp_path_factory, ranks, kills):
    def start(folder, attempt, states=()):
        return [Rank(folder, attempt, states, rank, ranks, buffer_groups=12, max_age_steps=5) for rank in range(ranks)]

    def drawn_tokens(runs, step):
        found = []
        for number, rank in enumerate(runs):
            drawn = rank.step(one_step(step, number))
            found.append([rank.buffer.read(entry)["input_ids"].tolist() for entry in drawn])
        return found

    whole = start(tmp_path_factory.mktemp("whole"), 1)
    folder = tmp_path_factory.mktemp("killed")
    killed, attempt, reused = start(folder, 1), 1, 0
    for step in range(10):
        states = [rank.state() for rank in killed]
        if step in kills:
            drawn_tokens(killed, step)  # which is lost
            for rank in killed:
                rank.journal.close()
            attempt += 1
            killed = start(folder, attempt, states)
        expected = drawn_tokens(whole, step)
        assert drawn_tokens(killed, step) == expected
        reused += sum(map(len, expected))
    assert reused > 5
    for rank in (*whole, *killed):
        rank.journal.close()


def test_another_number_of_ranks_shares_the_groups_out_and_loses_none(tmp_path):
    ranks = [Rank(tmp_path, rank=rank, ranks=3) for rank in range(3)]
    for step in range(4):
        for number, rank in enumerate(ranks):
            rank.step(one_step(step, number))
    states = [rank.state() for rank in ranks]
    before = sorted((entry["step"], entry["place"], entry["start"]) for state in states for entry in state["entries"])
    again = [Rank(tmp_path, 2, states, rank, 2) for rank in range(2)]
    after = sorted((entry.step, entry.place, entry.start) for rank in again for entry in rank.buffer.entries)
    assert after == before and all(rank.buffer.step == 4 for rank in again)
    assert abs(len(again[0].buffer.entries) - len(again[1].buffer.entries)) <= 1
    for rank in (*ranks, *again):
        rank.journal.close()


def test_a_group_that_was_sampled_again_is_that_of_the_second_time(tmp_path):
    rank = Rank(tmp_path)
    for events in rank.events:
        events.accepted(episode(2), group(8, [0.0, 1.0]))
    for events in rank.events:
        events.requeued(episode(2), "too old")
    rank.step({2: group(9, [0.0, 0.0])})
    assert not rank.buffer.entries, "it was solved, and not trained"
    rank.step({2: group(4, [1.0, 0.0])})
    (entry,) = rank.buffer.draw()
    assert rank.buffer.read(entry)["input_ids"].tolist() == [4, 5, 0, 4, 5, 1]
    rank.journal.close()


@pytest.mark.parametrize(
    ("rewards", "sample", "solved"),
    [
        ([1.0, 0.0], None, True),
        ([0.9, 0.0], None, False),
        ([1.0, 1.0], None, False),
        ([2.0, 1.0], None, True),
        ([1.0, 0.0, 1.0], [0, 0, 1], True),
        ([1.0, 0.0, 0.0], [0, 0, 1], False),  # of a sample's two dialogues one: its reward is 0.5
    ],
)
def test_solved_is_a_sample_with_the_reward_among_others_without(rewards, sample, solved):
    assert is_solved(group(1, rewards, sample=sample), 1.0) == solved


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_group_that_the_journal_does_not_have_any_more_is_named(damage, tmp_path):
    rank = Rank(tmp_path)
    rank.step({1: group(1, [0.0, 1.0])})
    (entry,) = rank.buffer.draw()
    rank.journal.close()
    path, data = tmp_path / entry.file, bytearray((tmp_path / entry.file).read_bytes())
    data[entry.start + entry.size - 1] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[: entry.start + 3])
    with pytest.raises(RuntimeError, match=r"reuse: .*(cannot be read|is damaged at byte).*reuse.groups_per_step=0"):
        rank.buffer.read(entry)


def test_reused_groups_come_behind_the_fresh_ones_and_say_so():
    fresh = group(1, [0.0, 1.0])
    batch = with_reused(fresh, [group(2, [1.0, 0.0], version=3), group(3, [1.0, 0.0])])
    assert batch["group"].tolist() == [0, 0, 1, 1, 2, 2] and batch["is_reused"].tolist() == [0, 0, 1, 1, 1, 1]
    assert batch.fresh()["input_ids"].tolist() == fresh["input_ids"].tolist()
    other = group(4, [0.0, 1.0])
    other.sequences["more"] = torch.zeros(2)
    with pytest.raises(RuntimeError, match="reuse: a group of the buffer has the keys .*more"):
        with_reused(group(1, [0.0, 1.0]), [other])


def test_the_journal_keeps_the_files_that_a_checkpoint_may_ask_for(tmp_path):
    options, reuses = RolloutConfig(max_staleness=1), ReuseConfig(groups_per_step=4, max_age_steps=3)
    prompts = PromptIterator([{"prompt": "p"}] * PROMPTS, seed=3)
    point = ResumePoint(rank=0, ranks=1, run_attempt=1, fingerprint="", resumed=None)
    state = ResumeState(prompts, Share(3, 0, 3), point, options, tmp_path, reuses)
    checkpoints, others, reused = {}, itertools.count(), 0
    for step in range(20):
        if step % 2 == 0:
            checkpoints[step] = json.loads(json.dumps(state.state_dict()))
            checkpoints = dict(sorted(checkpoints.items())[-2:])
            state.rotate_journal(min(checkpoints))
            for saved in checkpoints.values():  # a run that resumed there finds all it may reuse
                resumed = {"step": 0, "version": 0, "prompts": {"number": 0}, "ledgers": [saved]}
                there = ResumePoint(rank=0, ranks=1, run_attempt=2 + step, fingerprint="", resumed=resumed)
                other = ResumeState(prompts, Share(3, 0, 3), there, options, tmp_path / str(next(others)), reuses)
                other.buffer.folder = tmp_path
                reused += len([other.buffer.read(entry) for entry in other.buffer.draw()])
                other.close()
        drawn = state.buffer.draw()
        for number, one in one_step(step).items():
            for events in state.events:
                events.accepted(episode(number), one)
        for events in state.events:
            events.consumed([episode(number) for number in one_step(step)], version=step)
        assert [state.buffer.read(entry) for entry in drawn] or step < 2
    assert reused > 20
    assert len(list(tmp_path.glob("*.journal"))) < 8, "and no others"
    state.close()
