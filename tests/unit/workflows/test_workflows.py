import asyncio
import threading

import pytest
import torch

from megatron_rl.api import Sampler
from megatron_rl.config import GenerationConfig
from megatron_rl.types import LLMResponse
from megatron_rl.workflows import ReMaxWorkflow, RLVRWorkflow
from megatron_rl.workflows.rendering import prompt_ids
from tests.kit.waiting import LATE_S


class OneReplyEngine(Sampler):
    """Answers each request with the text given for it; greedy requests with another."""

    def __init__(self, tokenizer, sampled="42<eos>", greedy="41<eos>", stop_reason="stop"):
        self.tokenizer, self.sampled, self.greedy, self.stop_reason = tokenizer, sampled, greedy, stop_reason
        self.requests = []

    def get_version(self):
        return 3

    async def agenerate(self, req):
        self.requests.append(req)
        output = self.tokenizer(self.greedy if req.gconfig.greedy else self.sampled)["input_ids"]
        return LLMResponse(
            input_tokens=req.input_ids,
            output_tokens=output,
            output_logprobs=[-0.5] * len(output),
            output_versions=[3] * len(output),
            stop_reason=self.stop_reason,
        )


def run(workflow, engine, **data):
    return asyncio.run(workflow.arun_episode(engine, data))


def test_rlvr_gives_one_trajectory_per_sample(tokenizer):
    seen = []

    def reward(prompt, completions, prompt_ids, completion_ids, answer):
        seen.append((prompt, completions, prompt_ids, completion_ids))
        return completions == answer

    engine = OneReplyEngine(tokenizer)
    workflow = RLVRWorkflow(reward, GenerationConfig(n_samples=2, max_new_tokens=8), tokenizer)
    trajectories = run(workflow, engine, prompt="12 + 30 =", answer="42", sample_key="k")

    prompt = tokenizer("12 + 30 =")["input_ids"]
    output = tokenizer("42<eos>")["input_ids"]
    # The end-of-sequence token is trained, but the reward's text is without it.
    assert seen == [("12 + 30 =", "42", prompt, output)] * 2
    assert len(trajectories) == 2
    for trajectory in trajectories:
        assert trajectory.reward == 1.0
        assert trajectory.input_ids.tolist() == prompt + output
        assert trajectory.loss_mask.tolist() == [False] * len(prompt) + [True] * len(output)
        assert trajectory.versions.tolist() == [-1] * len(prompt) + [3] * len(output)
        torch.testing.assert_close(trajectory.logprobs, torch.tensor([0.0] * len(prompt) + [-0.5] * len(output)))


def test_samples_of_a_prompt_share_a_rid_and_have_keys_of_their_own(tokenizer):
    engine = OneReplyEngine(tokenizer)
    workflow = RLVRWorkflow(lambda **_: 0.0, GenerationConfig(n_samples=3), tokenizer)
    run(workflow, engine, prompt="a", sample_key="batch 0")
    assert len({request.rid for request in engine.requests}) == 1
    assert [request.metadata["sample_key"] for request in engine.requests] == ["batch 0/0", "batch 0/1", "batch 0/2"]


def test_remax_reports_the_greedy_reward_and_does_not_train_its_reply(tokenizer):
    engine = OneReplyEngine(tokenizer)
    workflow = ReMaxWorkflow(
        lambda completions, **_: float(completions), GenerationConfig(n_samples=2, max_new_tokens=8), tokenizer
    )
    trajectories = run(workflow, engine, prompt="12 + 30 =")
    assert [request.gconfig.greedy for request in engine.requests] == [False, False, True]
    greedy_one = {"greedy_reward": 41.0, "greedy_tokens": len(tokenizer("41<eos>")["input_ids"])}
    assert [(t.reward, t.sequence) for t in trajectories] == [(42.0, greedy_one)] * 2


def test_remax_keeps_its_greedy_reply_untrained_for_a_reward_model(tokenizer):
    options = GenerationConfig(n_samples=2, max_new_tokens=8)
    reward = lambda completions, **_: float(completions)  # noqa: E731
    plain = run(ReMaxWorkflow(reward, options, tokenizer), OneReplyEngine(tokenizer), prompt="12 + 30 =")
    kept = run(
        ReMaxWorkflow(reward, options, tokenizer, keep_greedy=True), OneReplyEngine(tokenizer), prompt="12 + 30 ="
    )
    assert [t.sequence for t in kept[:2]] == [t.sequence | {"is_greedy": 0.0} for t in plain]
    assert [(t.input_ids.tolist(), t.reward) for t in kept[:2]] == [(t.input_ids.tolist(), t.reward) for t in plain]
    greedy = kept[2]
    assert greedy.input_ids.tolist() == tokenizer("12 + 30 =41<eos>")["input_ids"] and greedy.reward == 41.0
    assert greedy.sequence == kept[0].sequence | {"is_greedy": 1.0} and not greedy.loss_mask.any()


def test_reward_that_crashes_is_not_a_reward(tokenizer):
    def broken(**_):
        raise KeyError("verifier bug")

    with pytest.raises(KeyError, match="verifier bug"):
        run(RLVRWorkflow(broken, GenerationConfig(), tokenizer), OneReplyEngine(tokenizer), prompt="a")


def test_reward_must_be_a_finite_number(tokenizer):
    workflow = RLVRWorkflow(lambda **_: float("nan"), GenerationConfig(), tokenizer)
    with pytest.raises(ValueError, match="must be a finite number"):
        run(workflow, OneReplyEngine(tokenizer), prompt="a")


@pytest.mark.parametrize("ends_by", [SystemExit(3), StopIteration("no more")])
def test_reward_that_exits_is_an_error(tokenizer, ends_by):
    def reward(**_):
        raise ends_by

    workflow = RLVRWorkflow(reward, GenerationConfig(), tokenizer, reward_timeout_s=LATE_S)
    with pytest.raises(RuntimeError, match=f"reward: ended by {type(ends_by).__name__}"):
        run(workflow, OneReplyEngine(tokenizer), prompt="a")


def test_reward_that_raises_a_timeout_of_its_own_is_not_called_late(tokenizer):
    def asks_a_service(**_):
        raise TimeoutError("the service took its time")

    workflow = RLVRWorkflow(asks_a_service, GenerationConfig(), tokenizer, reward_timeout_s=LATE_S)
    with pytest.raises(TimeoutError, match="the service took its time"):
        run(workflow, OneReplyEngine(tokenizer), prompt="a")


def test_reward_that_hangs_is_an_error(tokenizer):
    told = threading.Event()

    def never_ends(**_):
        told.wait()

    workflow = RLVRWorkflow(never_ends, GenerationConfig(), tokenizer, reward_timeout_s=0.05)

    async def episode():
        try:
            await workflow.arun_episode(OneReplyEngine(tokenizer), {"prompt": "a"})
        finally:
            told.set()  # or the event loop would wait for the thread at its end

    with pytest.raises(RuntimeError, match="never_ends: no reward within 0.05 s; 1 of its calls"):
        asyncio.run(episode())


def test_aborted_reply_is_not_scored(tokenizer):
    workflow = RLVRWorkflow(lambda **_: 1.0, GenerationConfig(), tokenizer)
    with pytest.raises(RuntimeError, match="aborted"):
        run(workflow, OneReplyEngine(tokenizer, stop_reason="abort"), prompt="a")


def test_prompt_forms(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    assert prompt_ids(None, {"input_ids": torch.tensor([5, 6])}) == [5, 6]
    assert tokenizer.decode(prompt_ids(tokenizer, {"prompt": "a fox"})) == "a fox"
    assert tokenizer.decode(prompt_ids(tokenizer, {"messages": messages})) == "<|user|>hi<|end|><|assistant|>"
    thinking = prompt_ids(tokenizer, {"messages": messages}, enable_thinking=True)
    assert tokenizer.decode(thinking) == "<|user|>hi<|end|><|assistant|><think>"
    with pytest.raises(ValueError, match="must have input_ids, prompt or messages"):
        prompt_ids(tokenizer, {"question": "hi"})
    with pytest.raises(ValueError, match="no tokenizer"):
        prompt_ids(None, {"prompt": "hi"})
