"""Replies and dialogues without room for their end: trained with what they earned, or masked by rollout.cut_off."""

import asyncio
import itertools

import pytest

from megatron_rl.agents import AgentWorkflow
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.rollout.executor import RolloutExecutor
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics, metrics_of
from megatron_rl.workflows import DebateWorkflow, MultiTurnWorkflow, RLVRWorkflow
from tests.kit.replies import RecordingEngine
from tests.unit.agents.test_agent_proxy import client_of, here, openai
from tests.unit.workflows.test_conversations import Chatter

QUESTION = {"messages": [{"role": "user", "content": "12 + 30"}]}


def ends_in_turn(tokenizer, *ends):
    """Make an engine whose replies end in these ways, one after the other."""
    turns = itertools.cycle(ends)

    async def take_turns(request):
        engine.ends = (next(turns),)

    engine = RecordingEngine(tokenizer, before=take_turns)
    return engine


def group_of(workflow, engine, *, call="rollout_batch", **config):
    """Return the batch of one prompt and the metrics."""
    metrics = RolloutMetrics()
    executor = RolloutExecutor(engine, RolloutConfig(episode_attempts=1, max_staleness=5, **config), metrics)

    async def main():
        return await getattr(executor, call)([QUESTION], workflow)

    return asyncio.run(main()), metrics_of([metrics.take()])


def trained(batch):
    """Return of each trajectory whether it has a token that is trained."""
    return [bool(mask.any()) for mask in batch["loss_mask"].split(batch.lengths.tolist())]


@pytest.mark.parametrize("cut_off", ["train", "mask"])
def test_a_reply_that_was_cut_off_is_trained_or_masked_and_its_reward_counts(tokenizer, cut_off):
    workflow = RLVRWorkflow(lambda **_: 0.5, GenerationConfig(n_samples=4, max_new_tokens=8), tokenizer)
    batch, metrics = group_of(workflow, ends_in_turn(tokenizer, "stop", "length"), cut_off=cut_off)
    assert sorted(trained(batch)) == ([False] * 2 + [True] * 2 if cut_off == "mask" else [True] * 4)
    assert batch["rewards"].tolist() == [0.5] * 4
    assert metrics["rollout/cut_off_share"] == 0.5
    assert metrics["rollout/masked_cut_offs"] == (2 if cut_off == "mask" else 0)


def test_held_out_replies_are_not_masked_and_a_group_of_nothing_else_is_left_out(tokenizer):
    workflow = RLVRWorkflow(lambda **_: 0.5, GenerationConfig(n_samples=2, max_new_tokens=8), tokenizer)
    batch, _ = group_of(workflow, ends_in_turn(tokenizer, "length"), call="evaluate", cut_off="mask")
    assert trained(batch) == [True, True]
    with pytest.raises(RuntimeError, match="1 were rejected"):
        group_of(workflow, ends_in_turn(tokenizer, "length"), cut_off="mask")


@pytest.mark.parametrize("room", [40, 400])
def test_a_dialogue_without_room_for_another_reply_is_cut_off(tokenizer, room):
    """Four turns of some tens of tokens have room in 400, and not in 40."""
    gconfig = GenerationConfig(n_samples=3, max_new_tokens=8)
    workflow = MultiTurnWorkflow(lambda **_: 1.0, gconfig, tokenizer, Chatter, max_tokens=room)
    trajectories = asyncio.run(workflow.arun_episode(ends_in_turn(tokenizer, "stop"), QUESTION))
    assert [it.is_cut_off for it in trajectories] == [room == 40] * 3
    assert all((it.sequence["turns"] < 4) == (room == 40) for it in trajectories)


def test_a_debate_without_room_for_its_last_round_is_cut_off(tokenizer):
    agents, gconfig = {"a": "Be brief.", "b": "Be careful."}, GenerationConfig(max_new_tokens=8)
    for room, is_cut_off in ((60, True), (400, False)):
        workflow = DebateWorkflow(lambda **_: 1.0, gconfig, tokenizer, agents, max_tokens=room, rounds=4)
        trajectories = asyncio.run(workflow.arun_episode(ends_in_turn(tokenizer, "stop"), QUESTION))
        assert [it.is_cut_off for it in trajectories] == [is_cut_off] * 2


def test_an_agents_dialogue_that_outgrows_its_context_is_cut_off_and_its_others_are_not(tokenizer):
    def agent(base_url, api_key, data):
        client = client_of(base_url, api_key)
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hello"}])
        messages = list(data["messages"])
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [reply, {"role": "user", "content": "more " * 100}]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="policy", messages=messages)
        return 1.0

    gconfig = GenerationConfig(max_new_tokens=8)
    workflow = AgentWorkflow(lambda **_: 0.0, gconfig, tokenizer, max_tokens=100, **here(agent))
    trajectories = asyncio.run(workflow.arun_episode(ends_in_turn(tokenizer, "stop"), QUESTION))
    assert [it.is_cut_off for it in trajectories] == [False, True]
