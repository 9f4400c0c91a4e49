"""The journal and the ledger: what a kill leaves is read back, and no prompt is lost or trained twice."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import threading
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.api import RolloutWorkflow
from megatron_rl.config import RolloutConfig
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.rollout.events import Episode
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.rollout.journal import (
    NO_RECORDS,
    Records,
    Restored,
    RolloutJournal,
    drop_files_before,
    next_run_attempt,
    read_file,
)
from megatron_rl.rollout.ledger import PromptLedger, Share
from megatron_rl.servers.event_loop import EventLoopThread
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics
from megatron_rl.types import LLMRequest, LLMResponse, Runs, SampledTokens, Trajectory, TrajectoryBatch
from tests.kit.examples import max_examples
from tests.kit.journals import consumed_by_step
from tests.kit.waiting import LIMIT_S, wait_until


class Engine:
    version = 0

    def get_version(self):
        return self.version


def episode(index, **data):
    data = {"prompt_number": index, "prompt_index": index, "epoch": 0, "sample_key": f"prompt 0/{index}"} | data
    return Episode(number=index, data=data, workflow=None)


def group(index, versions=(0,)):
    trajectories = [
        Trajectory(
            input_ids=torch.tensor([index, 5, 6]),
            loss_mask=torch.tensor([False, True, True]),
            logprobs=torch.tensor([0.0, -0.1, -1e-30]),
            versions=torch.tensor([-1, version, version]),
            reward=index + 0.1,
            tokens={
                "expert": torch.tensor([1, 2, index], dtype=torch.int32),
                "routes": torch.arange(12, dtype=torch.int16).view(3, 2, 2) + index,
            },
            sequence={"greedy_reward": 0.25},
        )
        for version in versions
    ]
    return TrajectoryBatch.from_trajectories([trajectories])


def start(folder, *, run_attempt=1, first_step=0, version=0, fingerprint="f", rank=0):
    stamp = {"first_step": first_step, "version": version, "fingerprint": fingerprint}
    return SettledJournal(folder, run_attempt=run_attempt, rank=rank, **stamp)


class SettledJournal(RolloutJournal):
    """Has written each record before the call returns."""

    def accepted(self, episode, group):
        super().accepted(episode, group)
        self.settle()

    def replied(self, data, request, reply):
        super().replied(data, request, reply)
        self.settle()


def restore(folder, *, run_attempt=2, version=0, max_staleness=4, fingerprint="f"):
    now = {"run_attempt": run_attempt, "version": version, "fingerprint": fingerprint}
    return Restored(folder, max_staleness=max_staleness, **now)


def assert_same(found, expected):
    for part in ("tokens", "sequences"):
        ours, theirs = getattr(found, part), getattr(expected, part)
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key
    assert torch.equal(found.cu_seqlens, expected.cu_seqlens)


def test_a_group_is_read_back_bit_by_bit(tmp_path):
    journal = start(tmp_path)
    journal.accepted(episode(3), group(3, versions=(0, 1)))
    journal.accepted(Episode(number=0, data={"sample_key": "held out"}, workflow=None), group(4))
    found = restore(tmp_path, version=1)
    assert found.take("held out", version=1) is None, "what has no place in the data set is not kept"
    assert_same(found.take("prompt 0/3", version=1), group(3, versions=(0, 1)))
    assert found.take("prompt 0/3", version=1) is None, "once"


@pytest.fixture
def three_groups(tmp_path):
    journal = start(tmp_path / "journal")
    for index in range(3):
        journal.accepted(episode(index), group(index))
    journal.consumed([episode(0), episode(2)], version=0)
    journal.close()
    return journal.path


def test_a_file_cut_anywhere_gives_the_whole_records_before_the_cut_and_says_so(three_groups):
    data, (whole, fault) = three_groups.read_bytes(), read_file(three_groups)
    assert fault == "" and [r.event["event"] for r in whole] == ["opened", *["accepted"] * 3, "consumed"]
    ends = [record.start + record.size for record in whole]
    near_ends = {end + n for end in ends for n in range(-3, 27)}  # every byte of the next record's head
    for length in sorted({n for n in near_ends if n < len(data)} | set(range(0, len(data), 13))):
        three_groups.write_bytes(data[:length])
        records, fault = read_file(three_groups)
        assert len(records) == sum(end <= length for end in ends)
        assert (fault == "") == (length in [0, *ends])
        assert fault == "" or f"{three_groups.name} ends in the middle of a record" in fault
        assert three_groups.stat().st_size == length, "reading changes nothing"


def test_a_flipped_bit_anywhere_is_found_and_what_is_before_it_is_read(three_groups):
    data, (whole, _) = three_groups.read_bytes(), read_file(three_groups)
    ends = [record.start + record.size for record in whole]
    heads = {end + n for end in ends for n in range(-3, 27)}
    for at in sorted({n for n in heads if n < len(data)} | set(range(0, len(data), 13))):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        three_groups.write_bytes(damaged)
        records, fault = read_file(three_groups)
        assert len(records) == sum(end <= at for end in ends)
        assert three_groups.name in fault and ("damaged from byte" in fault or "middle of a record" in fault)


# -- replies of unfinished episodes ------------------------------------------------------------------------------------


class Replies(Engine):
    """Answers request after request, slower to the samples of odd numbers, and remembers what it was asked."""

    def __init__(self, version=0):
        self.version, self.asked = version, []

    async def agenerate(self, req):
        self.asked.append((*req.input_ids, req.metadata["sample_key"]))
        await asyncio.sleep(0.02 * (req.metadata["sample_key"] % 2))
        return LLMResponse(
            input_tokens=req.input_ids,
            output_tokens=[sum(req.input_ids), req.metadata["sample_key"]],
            output_logprobs=[-0.1 / 3, -1e-30],
            output_versions=[self.version, self.version + 1],
            stop_reason="stop",
            text="ä",
        )


class Turns(RolloutWorkflow):
    """`samples` conversations of `turns` turns beside each other; a tool's answer comes between two turns."""

    def __init__(self, samples=2, turns=3, tool=7, hangs_at=None):
        self.samples, self.turns, self.tool, self.hangs_at, self.said = samples, turns, tool, hangs_at, []

    async def arun_episode(self, engine, data):
        conversations = await asyncio.gather(*(self.talk(engine, data, n) for n in range(self.samples)))
        assert engine.get_version() >= 0
        return [self.trajectory(replies, reward=n) for n, replies in enumerate(conversations)]

    async def talk(self, engine, data, sample):
        ids, replies = [data["prompt_index"]], []
        for turn in range(self.turns):
            if (sample, turn) == self.hangs_at:
                await asyncio.sleep(1000)
            replies.append(await engine.agenerate(LLMRequest(rid="", input_ids=ids, metadata={"sample_key": sample})))
            self.said.append((sample, turn))
            ids = [*ids, *replies[-1].output_tokens, self.tool]
        return replies

    def trajectory(self, replies, reward):
        return Trajectory.from_reply(replies[-1], reward)


def run_episode(engine, workflow, events=(), index=5, dies_when=None, records=NO_RECORDS):
    """Return the episode's batch; None where its process dies before, when `dies_when()` is true."""
    thread = EventLoopThread("test")
    executor = RolloutExecutor(engine, RolloutConfig(max_staleness=2), RolloutMetrics(), events, records=records)
    batch = thread.submit(executor.rollout_batch([episode(index).data], workflow))
    try:
        if dies_when is not None:
            wait_until(dies_when)
            return None
        return batch.result()
    finally:
        thread.stop()  # nothing else is written: for the journal this is a kill


@pytest.fixture
def unfinished(tmp_path):
    """The journal of a process that was killed when sample 0 had its three replies and sample 1 one."""
    journal = start(tmp_path)
    workflow = Turns(hangs_at=(1, 1))
    run_episode(
        Replies(), workflow, [journal], dies_when=lambda: len(workflow.said) == 4, records=Records(None, journal)
    )
    assert sorted(workflow.said) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    journal.close()
    return journal.path


def test_an_unfinished_episode_gets_the_replies_back_that_it_had_and_only_the_others_anew(unfinished):
    expected = run_episode(Replies(), Turns())
    found, engine = restore(unfinished.parent, version=1), Replies()
    journal = start(unfinished.parent, run_attempt=2, version=1)
    assert_same(run_episode(engine, Turns(), [journal], records=Records(found, journal)), expected)
    assert [asked[-1] for asked in engine.asked] == [1, 1] and found.replies == 4
    again = restore(unfinished.parent, run_attempt=3, version=1)
    del expected.sequences["prompt_index"]  # which the trainer is told with the batch
    assert_same(again.take("prompt 0/5", 0), expected)
    assert again.take_reply("prompt 0/5", "any", 0) is None and again.replies == 0
    assert run_episode(Replies(), Turns(), index=6, records=Records(again, journal)) is not None, "of another prompt"
    assert again.replies == 0


def test_a_reply_is_read_back_bit_by_bit_and_once(tmp_path):
    reply, journal = (
        asyncio.run(Replies().agenerate(LLMRequest(rid="", input_ids=[1, 2], metadata={"sample_key": 1}))),
        start(tmp_path),
    )
    journal.replied(episode(3).data, "first", reply)
    journal.replied(episode(3).data, "second", dataclasses.replace(reply, stop_reason="abort"))
    journal.replied({"sample_key": "held out"}, "first", reply)
    routed = dataclasses.replace(reply, routes=torch.arange(12, dtype=torch.int16).view(3, 2, 2))
    wide = {"support": torch.tensor([[5, 7]], dtype=torch.int32), "adjustment": torch.rand(1, 2, 3)}
    journal.replied(episode(5).data, "first", dataclasses.replace(reply, **wide))
    journal.replied(episode(4).data, "first", routed)
    found = restore(tmp_path, version=1)
    assert found.take_reply("prompt 0/3", "first", 1) == reply
    assert torch.equal(found.take_reply("prompt 0/4", "first", 1).routes, routed.routes)
    of_supports = found.take_reply("prompt 0/5", "first", 1)
    assert all(torch.equal(getattr(of_supports, name), column) for name, column in wide.items())
    assert all(
        found.take_reply(*key, 1) is None
        for key in [("prompt 0/3", "first"), ("prompt 0/3", "second"), ("held out", "first")]
    )


def test_a_turn_whose_prompt_came_out_differently_gets_a_new_reply(unfinished):
    found, engine = restore(unfinished.parent), Replies()
    batch = run_episode(engine, Turns(tool=8), records=Records(found, start(unfinished.parent, run_attempt=2)))
    assert_same(batch, run_episode(Replies(), Turns(tool=8)))
    assert found.replies == 2, "the first turn of both samples"


@pytest.mark.parametrize(("version", "taken"), [(0, True), (2, True), (3, False)])
def test_replies_that_are_too_old_are_generated_anew(version, taken, unfinished):
    # They are of versions 0 and 1, and 1 came after the checkpoint: it counts as 0 here.
    found, engine = restore(unfinished.parent, max_staleness=2), Replies(version)
    batch = run_episode(engine, Turns(), records=Records(found, start(unfinished.parent, run_attempt=2)))
    assert found.replies == (4 if taken else 0) and len(engine.asked) == 6 - found.replies
    of_first, of_second = batch["versions"][batch["loss_mask"]].tolist()[:2], batch["versions"][-2:].tolist()
    assert of_second == [version, version + 1] and of_first == ([0, 0] if taken else of_second)


def test_a_reply_cut_short_or_changed_is_named_and_generated_anew(unfinished):
    data, records = unfinished.read_bytes(), read_file(unfinished)[0]
    last = records[-1]
    assert [record.event["event"] for record in records] == ["opened", *["replied"] * 4]
    changed = data[: last.start + 9] + bytes([data[last.start + 9] ^ 1]) + data[last.start + 10 :]
    for damaged, fault in ((data[:-5], "ends in the middle of a record"), (changed, "is damaged from byte")):
        unfinished.write_bytes(damaged)
        found, engine = restore(unfinished.parent), Replies()
        assert len(found.faults) == 1 and f"{unfinished.name} {fault}" in found.faults[0]
        assert run_episode(engine, Turns(), records=Records(found)) is not None and len(engine.asked) == 6
        found = restore(unfinished.parent)
        run_episode(Replies(), Turns(), records=Records(found, start(unfinished.parent, run_attempt=9)))
        assert found.replies == 3
        max(unfinished.parent.iterdir()).unlink()


def test_damage_is_named_and_left_as_it_is_and_the_rest_is_used(three_groups):
    data = bytearray(three_groups.read_bytes())
    data[read_file(three_groups)[0][2].start + 9] ^= 1
    three_groups.write_bytes(data)
    found = restore(three_groups.parent)
    (fault,) = found.faults
    assert "damaged from byte" in fault and "are not read" in fault
    assert found.take("prompt 0/0", 0) is not None and found.take("prompt 0/1", 0) is None
    assert three_groups.read_bytes() == bytes(data)


def test_only_groups_young_enough_are_restored(tmp_path):
    journal = start(tmp_path)
    for index, versions in enumerate([(2, 3), (3, 5), (5, 5), (7, 9)]):
        journal.accepted(episode(index), group(index, versions))
    # Resumed at version 4: what was sampled later comes from versions that this run never had.
    found = [restore(tmp_path, version=4, max_staleness=2).take(f"prompt 0/{n}", version=4) for n in range(4)]
    assert [batch is not None for batch in found] == [True, True, True, False]
    assert found[1]["versions"].tolist() == [-1, 3, 3, -1, 4, 4], "5 is as old as the checkpoint"
    later = [restore(tmp_path, version=4, max_staleness=2).take(f"prompt 0/{n}", version=5) for n in range(3)]
    assert [batch is not None for batch in later] == [False, True, True]
    exact = [restore(tmp_path, version=5, max_staleness=0).take(f"prompt 0/{n}", version=5) for n in range(4)]
    assert [batch is not None for batch in exact] == [False, False, True, False], "a synchronous run's own step only"
    other = restore(tmp_path, version=4, max_staleness=9, fingerprint="another reward")
    assert [other.take(f"prompt 0/{n}", version=4) for n in range(4)] == [None] * 4


def test_a_journal_of_another_run_is_named_and_not_used(three_groups):
    (fault,) = restore(three_groups.parent, fingerprint="another seed").faults
    assert fault == f"{three_groups.name} is of a run with other settings, its 3 groups are not used"


def test_a_restored_group_from_before_the_version_of_now_is_trained_and_not_sampled_again(tmp_path):
    start(tmp_path).accepted(episode(0), group(0, versions=(3, 4)))
    found, workflow, engine, thread = (
        restore(tmp_path, version=4),
        Sampling(random.Random(0)),
        Engine(),
        EventLoopThread(""),
    )
    engine.version = 5
    executor = RolloutExecutor(engine, RolloutConfig(max_staleness=4), RolloutMetrics(), records=Records(found))
    batch = thread.run(executor.rollout_batch([episode(0).data], workflow))
    thread.stop()
    assert workflow.sampled == [] and batch["versions"].tolist() == [-1, 3, 3, -1, 4, 4]


def test_versions_that_several_lives_had_are_told_apart(tmp_path):
    start(tmp_path, run_attempt=1).accepted(episode(0), group(0, versions=(6,)))
    start(tmp_path, run_attempt=2, first_step=4, version=4).accepted(episode(1), group(1, versions=(6,)))
    found = restore(tmp_path, run_attempt=3, version=6, max_staleness=1)
    assert found.take("prompt 0/1", 6)["versions"].tolist() == [-1, 6, 6], "attempt 3 goes on from it"
    assert found.take("prompt 0/0", 6) is None, "attempt 1's version 6 is another: theirs had only 4 in common"


def test_of_a_prompt_sampled_twice_the_later_group_counts(tmp_path):
    journal = start(tmp_path)
    for reward in (1, 2):
        journal.accepted(episode(0), group(reward))
        journal.requeued(episode(0), "too old")
    assert restore(tmp_path).take("prompt 0/0", 0)["input_ids"].tolist()[0] == 2


def test_old_files_go_and_the_others_stay(tmp_path):
    journal = start(tmp_path)
    for step in range(3):
        journal.accepted(episode(step), group(step))
        journal.consumed([episode(step)], version=step)
        journal.begin_file()
    drop_files_before(tmp_path, step=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        f"000001-0000000{n}-00000{n + 1}-0000.journal" for n in (2, 3)
    ]
    assert next_run_attempt(tmp_path) == 2 and next_run_attempt(tmp_path / "none") == 1


def test_columns_of_one_entry_are_written_whatever_their_stride(tmp_path):
    journal, one = start(tmp_path), group(0)
    one.sequences["rank"] = torch.tensor([[7, 8]])[:, 0]  # of stride 2
    journal.accepted(episode(0), one)
    assert restore(tmp_path).take("prompt 0/0", 0)["rank"].tolist() == [7]
    sampled = SampledTokens(torch.tensor([5], dtype=torch.int32), torch.tensor([-0.5]), Runs.of_pairs([(3, 1)]))
    journal.replied(episode(1).data, "first", LLMResponse(input_tokens=[1], sampled=sampled, stop_reason="stop"))
    assert restore(tmp_path, version=3).take_reply("prompt 0/1", "first", 3).output_versions == [3]


def test_a_journal_of_an_earlier_form_is_named_and_not_read(tmp_path):
    start(tmp_path).accepted(episode(0), group(0))
    (path,) = tmp_path.glob("*.journal")
    path.write_bytes(path.read_bytes().replace(b"mrj2", b"mrlj"))
    assert read_file(path) == ([], f"{path.name} is in the form of an earlier version of this program and is not read")
    assert restore(tmp_path, version=0).faults == [read_file(path)[1]]


def test_a_record_takes_nine_bytes_a_token(tmp_path):
    journal = start(tmp_path)
    sampled = SampledTokens.of([7] * 10_000, [-0.5] * 10_000, [3] * 5_000 + [4] * 5_000)
    reply = LLMResponse(input_tokens=[1], sampled=sampled, stop_reason="stop")
    (path,) = tmp_path.glob("*.journal")
    begin = path.stat().st_size
    journal.accepted(episode(0), TrajectoryBatch.from_trajectories([[Trajectory.from_reply(reply, 1.0)]]))
    assert 90_000 < path.stat().st_size - begin < 91_000
    (record,) = (record for record in read_file(path)[0] if record.event["event"] == "accepted")
    assert record.group()["versions"].tolist() == [-1, *reply.output_versions]
    assert record.group()["logprobs"].tolist() == [0.0, *reply.output_logprobs]


def test_a_journal_that_cannot_be_written_stops_the_run_by_name(tmp_path, monkeypatch):
    journal = start(tmp_path)
    monkeypatch.setattr("os.writev", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RuntimeError, match="rollout journal .*0000.journal: .*No space left.*resume"):
        journal.accepted(episode(0), group(0))


def test_the_records_name_what_each_step_of_the_surviving_run_trained(tmp_path):
    first = start(tmp_path)
    for step in range(4):
        first.consumed([episode(step), episode(10 + step)], version=step)
    second = start(tmp_path, run_attempt=2, first_step=2, version=2)
    second.consumed([episode(13), episode(3)], version=2)
    assert list(consumed_by_step(tmp_path)) == [(0, [0, 10]), (1, [1, 11]), (2, [13, 3])]


# -- the ledger --------------------------------------------------------------------------------------------------------


def ledgers(count, size, per_step=4):
    prompts = PromptIterator([{"prompt": "p"}] * count, seed=3)
    return [PromptLedger(prompts, Share.of_rank(rank, size, per_step=per_step)) for rank in range(size)]


@settings(deadline=None, max_examples=max_examples(25, 60))
@given(st.data())
def test_any_ranks_and_prompts_per_step_hand_out_every_prompt_once_over_any_resumptions(data):
    count, done, handed = 7, [], set()
    ranks = ledgers(count, data.draw(st.integers(1, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        under_way = []
        for _ in range(data.draw(st.integers(0, 20))):
            rank = data.draw(st.sampled_from(ranks))
            if under_way and data.draw(st.booleans()):
                owner, prompt = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
                owner.consumed([episode(prompt["prompt_number"])], version=0)
                done.append(prompt["prompt_number"])
            else:
                prompt = next(rank)
                handed.add(prompt["prompt_number"])
                under_way.append((rank, prompt))
        states = [rank.state_dict() for rank in ranks]
        ranks = ledgers(count, data.draw(st.integers(1, 3)), per_step=data.draw(st.integers(3, 7)))
        for rank in ranks:
            rank.load_state_dicts(states)
    assert len(set(done)) == len(done), "none is handed out again after it was trained"
    again = set()
    while not handed <= again | set(done):
        for rank in ranks:
            for _ in range(len(handed) + 3):
                number = next(rank)["prompt_number"]
                assert number not in again and number not in done
                again.add(number)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_hand_out_each_step_in_order_as_one_would(ranks):
    parts = ledgers(7, ranks, per_step=4)
    for step in range(5):
        numbers = [next(ledger)["prompt_number"] for ledger in parts for _ in range(len(ledger.share))]
        assert numbers == list(range(4 * step, 4 * step + 4))


def test_a_run_goes_on_behind_what_an_earlier_version_has_saved():
    in_order = [{"open": [], "next": 8, "size": 1}]
    every_second = [{"open": [4, 6], "next": 10, "size": 2}, {"open": [1], "next": 7, "size": 2}]
    for states, expected in ((in_order, list(range(8, 16))), (every_second, [1, 4, 6, 7, *range(9, 16)])):
        for size in (1, 2):
            numbers = []
            for ledger in ledgers(5, size):
                ledger.load_state_dicts(states)
                while not numbers or numbers[-1] < 16:
                    numbers.append(next(ledger)["prompt_number"])
                numbers.pop()
            assert sorted(numbers) == expected


# -- kills, simulated --------------------------------------------------------------------------------------------------


class Sampling(RolloutWorkflow):
    """Takes random time and counts how often each prompt was really sampled."""

    def __init__(self, chance):
        self.chance, self.sampled = chance, []

    async def arun_episode(self, engine, data):
        version = engine.get_version()
        await asyncio.sleep(self.chance.random() * 0.004)
        self.sampled.append(data["sample_key"])
        return group(data["prompt_index"], versions=(version,))


PER_STEP = 6


def live(folder, run_attempt, saved, workflow, steps, ranks, chance):
    """Run from the saved state to the end or a random kill; return the newest state and how many were restored."""
    prompts = PromptIterator([{"prompt": "p"}] * 11, seed=1)
    ledgers = [PromptLedger(prompts, Share.of_rank(rank, ranks, per_step=PER_STEP)) for rank in range(ranks)]
    engine, thread = Engine(), EventLoopThread("test")
    for ledger in ledgers if saved["ledgers"] else []:
        ledger.load_state_dicts(saved["ledgers"])
    engine.version = saved["step"]
    here = {"run_attempt": run_attempt, "version": saved["step"]}
    journals = [start(folder, rank=n, first_step=saved["step"], **here) for n in range(ranks)]
    found = [restore(folder, max_staleness=2, **here) for _ in range(ranks)]
    config = RolloutConfig(max_staleness=2, max_concurrent_episodes=6)
    executors = [
        RolloutExecutor(engine, config, RolloutMetrics(), [ledger, journal], records=Records(of_rank))
        for ledger, journal, of_rank in zip(ledgers, journals, found, strict=True)
    ]
    dies_at = saved["step"] + chance.random() * 6
    for step in range(saved["step"], steps):
        batches = [
            thread.submit(executor.prepare_batch(ledger, workflow, PER_STEP // ranks))
            for executor, ledger in zip(executors, ledgers, strict=True)
        ]
        if step + 1 > dies_at:
            with contextlib.suppress(TimeoutError):  # a kill while some ranks have their batch and others have not
                batches[0].result(timeout=(dies_at - step) * 0.004)
            break
        for batch in batches:
            versions = batch.result()["versions"]
            assert engine.version - 2 <= int(versions[versions >= 0].min()) <= int(versions.max()) <= engine.version
        engine.version = step + 1
        if (step + 1) % 3 == 0 or step + 1 == steps:
            for journal in journals:
                journal.begin_file()
            saved = {"step": step + 1, "ledgers": [ledger.state_dict() for ledger in ledgers]}
    thread.stop()
    for journal in journals:
        journal.close()
    return saved, sum(of_rank.groups for of_rank in found)


# Runs of one rollout rank, of as many as there are, and of another number in every attempt.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1,), pytest.param((2,), marks=pytest.mark.thorough), (3, 1, 2)])
def test_over_many_kills_no_prompt_is_lost_or_trained_twice_and_finished_groups_are_used(ranks, tmp_path):
    kills = restored = 0
    for seed in range(4):
        folder, chance = tmp_path / str(seed), random.Random(seed)
        workflow, steps = Sampling(chance), 14
        saved = {"step": 0, "ledgers": []}
        for attempt in itertools.count(1):
            count = ranks[attempt % len(ranks)]
            saved, from_journals = live(folder, attempt, saved, workflow, steps, count, chance)
            restored += from_journals
            if saved["step"] == steps:
                break
            kills += 1
            torn = max(folder.glob("*.journal"))
            torn.write_bytes(torn.read_bytes()[: -chance.randrange(3)] or b"")
        trained = [(step, prompt) for step, prompts in consumed_by_step(folder) for prompt in prompts]
        assert Counter(step for step, _ in trained) == dict.fromkeys(range(steps), PER_STEP), "every step once"
        done = {prompt for _, prompt in trained}
        assert len(done) == len(trained), "none twice"
        furthest = max(state["next"] for state in saved["ledgers"])
        left_open = {number for state in saved["ledgers"] for number in state["open"]}
        to_come = {
            number
            for state in saved["ledgers"]
            for number in range(state["next"], furthest)
            if number in Share.of_state(state)
        }
        assert done | left_open == set(range(furthest)) - to_come and not done & left_open, "none lost"
    assert kills > 4 and restored > kills


def test_a_slow_disk_at_a_checkpoint_does_not_hold_the_event_loop(tmp_path, monkeypatch):
    journal = start(tmp_path)
    journal.accepted(episode(1), group(1))
    syncs, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(file):
        syncs.set()
        assert go_on.wait(LIMIT_S)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    checkpoint = threading.Thread(target=journal.begin_file)
    checkpoint.start()
    assert syncs.wait(LIMIT_S)
    journal.accepted(episode(2), group(2))  # returns, although the disk has not
    assert checkpoint.is_alive(), "which has not returned before the records are on the disk"
    go_on.set()
    checkpoint.join()
    journal.close()
    first, second = sorted(tmp_path.glob("*.journal"))
    assert [[r.event["event"] for r in read_file(path)[0]] for path in (first, second)] == [["opened", "accepted"]] * 2


def test_a_slow_disk_does_not_hold_the_event_loop_until_the_group_is_trained(tmp_path, monkeypatch):
    journal = RolloutJournal(tmp_path, run_attempt=1, rank=0, first_step=0, version=0, fingerprint="f")
    go_on, writev = threading.Event(), os.writev

    def slow(*args):
        assert go_on.wait(LIMIT_S)
        return writev(*args)

    monkeypatch.setattr(os, "writev", slow)
    for number in range(3):
        journal.accepted(episode(number), group(number))  # returns, although nothing is written
    assert len(read_file(journal.path)[0]) == 1
    threading.Timer(0.2, go_on.set).start()
    journal.consumed([episode(1)], version=0)
    assert go_on.is_set(), "what became of a group waits for the group"
    names = [record.event["event"] for record in read_file(journal.path)[0]]
    assert names == ["opened", *["accepted"] * 3, "consumed"]


def test_a_group_that_could_not_be_written_is_never_trained(tmp_path, monkeypatch):
    journal = RolloutJournal(tmp_path, run_attempt=1, rank=0, first_step=0, version=0, fingerprint="f")
    monkeypatch.setattr("os.writev", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    journal.accepted(episode(0), group(0))
    with pytest.raises(RuntimeError, match="No space left"):
        journal.consumed([episode(0)], version=0)
    with pytest.raises(RuntimeError, match="No space left"):
        journal.accepted(episode(2), group(2))
    journal.close()


def test_a_disk_that_does_not_keep_the_records_ends_the_run(tmp_path, monkeypatch):
    journal = start(tmp_path)

    def fail(file):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RuntimeError, match="rollout journal .*Input/output error"):
        journal.begin_file()
    with pytest.raises(RuntimeError, match="Input/output error"):
        journal.accepted(episode(2), group(2))
    journal.close()
