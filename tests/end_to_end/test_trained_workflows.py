"""Every workflow trains: what its run computes of a step's trajectories is what transformers computes of their tokens.

Two steps each, with Megatron and an embedded server. The model is random; what it says in 16 tokens calls a tool now
and then.
"""

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config import load_config
from megatron_rl.run.rl_run import RLRun
from megatron_rl.train import train
from tests.kit.forks import check_end, start_ranks
from tests.kit.runs import COUNT, ROOT, rollout_servers, served_by, steps_of
from tests.kit.talkative_model import make_talkative_model

pytestmark = pytest.mark.slow

PROMPTS, SAMPLES, REPLY = 3, 4, 16
SMALL = (
    *(f"batch.prompts_per_step={PROMPTS}", f"generation.n_samples={SAMPLES}", f"generation.max_new_tokens={REPLY}"),
    *("batch.updates_per_step=1", "algo.loss=reinforce", "run.steps=2", "run.save_at_end=false"),
    *("model.init=hf", "warm_start.updates=0", "data.evaluation=", "data.evaluation_args={}", "data.train_args={}"),
    *("data.train=talkative_tasks:questions", "rollout.reward=talkative_tasks:vowels", "rollout.reward_workers=1"),
    "run.import_from=[talkative_tasks]",
)
WORKFLOWS = {
    "MultiTurn": {
        "environment": "megatron_rl.workflows.environments:SelfCorrection",
        "environment_args": {"feedback": "wrong", "decay": 0.5},
        "max_tokens": 200,
        "max_turns": 3,
    },
    "ToolUse": {"tools": {"megatron_rl.workflows.tools:Calculator": {}}, "max_tokens": 300, "max_turns": 3},
    "BestOfN": {"candidates": 6, "keep": "extremes"},
    "Judged": {"judge_tokens": 64},
    "Debate": {"agents": {"ann": "be brief", "bob": "be right"}, "max_tokens": 300},
    "Agent": {"agent": "talkative_tasks:goes_back", "max_tokens": 300},
}


ESTIMATORS = {"MultiTurn": "gigpo", "ToolUse": "turn_norm", "Debate": "agent_norm"}
"""Of workflows whose turns or agents are compared. Others take the default."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_talkative_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with rollout_servers(tmp_path_factory.mktemp("servers"), model=model) as servers:
        yield served_by(servers)


def train_and_keep(overrides):
    """Train as a run does, and keep the first step's batch with its advantages."""
    os.chdir(ROOT)
    compute = RLRun.compute_advantages

    def compute_and_keep(self, batch):
        compute(self, batch)
        if self.engine.get_version() == 0:
            torch.save(batch.own(), self.folder / "batch.pt")

    RLRun.compute_advantages = compute_and_keep  # in this forked process alone
    train(load_config(COUNT, list(overrides)))


@pytest.fixture
def trained(model, server, tmp_path):
    """Trains a workflow; returns the first step's batch and the steps' metrics."""

    def run(name):
        settings = (*server, *SMALL, f"model.path={model}", f"run.folder={tmp_path / 'run'}")
        room = "agents" if name == "Agent" else "workflows"
        workflow = (f"rollout.workflow=megatron_rl.{room}:{name}Workflow",)
        workflow += (f"rollout.workflow_args={json.dumps(WORKFLOWS[name])}",)
        workflow += (f"algo.advantage={ESTIMATORS[name]}",) if name in ESTIMATORS else ()
        output = tmp_path / "output.txt"
        check_end(start_ranks(1, train_and_keep, (*settings, *workflow), output), output)
        return torch.load(tmp_path / "run" / "batch.pt", weights_only=False), steps_of(tmp_path / "run")

    return run


def check_step(model, batch, step):
    """The step's loss and gradient are those of its generated tokens in transformers, and so are their log-probs."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.get_input_embeddings().padding_idx = None  # else sampled pad tokens get no gradient
    bounds, total = batch.cu_seqlens.tolist(), 0.0
    for a, b in zip(bounds, bounds[1:], strict=False):
        ids, mask, advantages, served = (
            batch[key][a:b] for key in ("input_ids", "loss_mask", "advantages", "logprobs")
        )
        logprobs = policy(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(logprobs[mask[1:]], served[mask], rtol=1e-4, atol=1e-4)
        total = total - (logprobs * advantages[1:] * mask[1:]).sum()
    loss = total / batch["loss_mask"].sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in policy.parameters()]).norm()
    assert norm > 0.01 and batch["advantages"][batch["loss_mask"]].abs().max() > 0.5, "there is something to learn"
    assert step["policy/first_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert step["policy/first_grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def sequences(batch):
    return by_trajectory(batch, "input_ids", "loss_mask")


def by_trajectory(batch, *names):
    bounds = batch.cu_seqlens.tolist()
    return [tuple(batch[name][a:b] for name in names) for a, b in zip(bounds, bounds[1:], strict=False)]


def runs_of(mask):
    """How many replies a trajectory trains."""
    return int((mask[1:] & ~mask[:-1]).sum())


REPEATED = ("Debate", "BestOfN")
"""Their dialogues are those of Agent and Judged."""


@pytest.mark.parametrize(
    "name", [pytest.param(it, marks=pytest.mark.thorough if it in REPEATED else ()) for it in WORKFLOWS]
)
def test_a_workflow_trains_exactly_the_tokens_that_it_had_generated(name, model, trained):
    batch, steps = trained(name)
    check_step(model, batch, steps[0])
    for step in steps:
        assert step["policy/skipped_updates"] == 0
        assert step["mismatch/mean"] < 1e-5, "the servers computed the same, also with the weights of the first update"
        trajectories = PROMPTS * SAMPLES * (2 if name in ("Debate", "Agent") else 1)
        assert step["batch/trajectories"] == trajectories
    trained_tokens = int(batch["loss_mask"].sum())
    generated = steps[0]["rollout/generated_tokens"]
    if name in ("BestOfN", "Judged"):
        assert generated > trained_tokens, "what was left out, and what the judge said"
    else:
        assert generated == trained_tokens, "each generated token is trained once"
    if name != "Agent":  # whose second way has the first reply as context
        assert torch.equal(batch["loss_mask"], batch["versions"] >= 0)
    CHECKS[name](batch, AutoTokenizer.from_pretrained(model))


def check_feedback(batch, tokenizer):
    for turns, (ids, mask) in zip(batch["turns"], sequences(batch), strict=True):
        assert turns == runs_of(mask) == 3
        assert tokenizer.decode(ids[~mask]).count("<|user|>wrong<|end|><|assistant|>") == 2
    turns = batch["turn_rewards"].nonzero()[:, 0]
    assert len(turns) > len(batch) and batch["loss_mask"][turns].all(), "of tries that came nearer, or went away"
    torch.testing.assert_close(batch.sums_of_tokens(batch["turn_rewards"]), batch["rewards"])
    advantages = {tuple(own[mask].unique().tolist()) for own, mask in by_trajectory(batch, "advantages", "loss_mask")}
    assert max(map(len, advantages)) == 3, "three tries of one dialogue are told apart"


def check_tools(batch, tokenizer):
    called = 0
    for turns, (ids, mask) in zip(batch["turns"], sequences(batch), strict=True):
        context, said = tokenizer.decode(ids[~mask]), tokenizer.decode(ids[mask])
        assert turns == runs_of(mask) and (turns == 1) == ("<tool_call>" not in said)
        assert context.startswith("<|system|>calculator<|end|><|user|>What is ")
        assert ("/7 = 0." in context) == (turns > 1), "what the tool said is there, and is not trained"
        called += turns > 1
    assert called > 0, "by chance half of the replies call the tool"


def check_best(batch, tokenizer):
    for group in range(PROMPTS):
        rewards = batch["rewards"][batch["group"] == batch["group"].unique()[group]]
        assert len(rewards) == SAMPLES and rewards.tolist() == sorted(rewards.tolist(), reverse=True)


def check_grades(batch, tokenizer):
    grades = batch["judge_grade"]
    assert grades.unique().numel() > 2 and set((10 * grades).round().int().tolist()) <= set(range(11))
    for grade, reward, (ids, mask) in zip(grades, batch["rewards"], sequences(batch), strict=True):
        own = float(reward - grade)
        said = tokenizer.decode(ids[mask], skip_special_tokens=True)
        assert own == pytest.approx(sum(letter in "aeiouAEIOU" for letter in said) / max(len(said), 1), abs=1e-6)


def check_debate(batch, tokenizer):
    for agent, (ids, mask) in zip(batch["agent"].int().tolist(), sequences(batch), strict=True):
        me, other = (("be brief", "bob"), ("be right", "ann"))[agent]
        context = tokenizer.decode(ids[~mask])
        assert context.startswith(f"<|system|>{me}<|end|>") and f"<|user|>{other}: " in context
        assert runs_of(mask) == 2
    assert batch["agent"].sum() == PROMPTS * SAMPLES


def check_ways(batch, tokenizer):
    contexts = [tokenizer.decode(ids[~mask]) for ids, mask in sequences(batch)]
    replies = [runs_of(mask) for _, mask in sequences(batch)]
    assert sorted(replies) == [1] * (PROMPTS * SAMPLES) + [2] * (PROMPTS * SAMPLES)
    assert sum("<|user|>and?" in context for context in contexts) == PROMPTS * SAMPLES
    assert sum("<|user|>or?" in context for context in contexts) == PROMPTS * SAMPLES


CHECKS = {
    "MultiTurn": check_feedback,
    "ToolUse": check_tools,
    "BestOfN": check_best,
    "Judged": check_grades,
    "Debate": check_debate,
    "Agent": check_ways,
}
