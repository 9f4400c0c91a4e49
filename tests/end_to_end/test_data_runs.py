"""Answers become a policy; preferences one, or a reward model that teaches a policy what nobody else rewards."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from megatron_rl.data.tasks import count_ones
from megatron_rl.run.rl_run import RLRun
from megatron_rl.train import main
from tests.kit.ranks import run_ranks
from tests.kit.runs import COUNT, COUNT_MODEL, ROOT, evaluations_of, mean, steps_of, train_until
from tests.kit.waiting import LATE_S

pytestmark = pytest.mark.slow
BY_TOKEN = ("rollout.workflow=tests.end_to_end.token_rewards:RewardsByToken", "run.import_from=[tests]")


def run(command, config, *settings):
    """Run a command of this package in a process of its own, which is forked and need not import anything."""
    model = (f"model.path={COUNT_MODEL}",) if not any("model.path" in s for s in settings) else ()
    run_ranks(1, command, [str(ROOT / config), *model, *settings], timeout_s=LATE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def supervised(folder):
    """A short run on answers."""
    run(main, "configs/count_sft.yaml", "optimizer.lr=4e-3", "run.steps=25", f"run.folder={folder}/sft")
    return folder / "sft"


@pytest.fixture(scope="module")
def warm(supervised):
    """A policy that answers in the right form, and is right now and then."""
    return supervised / "final"


@pytest.fixture(scope="module")
def reward_model(folder):
    settings = ("run.steps=50", f"run.folder={folder}/judge")
    run(main, "configs/count_reward_model.yaml", *settings)
    return folder / "judge"


def test_policy_learns_to_answer(supervised):
    first, *_, last = evaluations_of(supervised)
    assert (first["step"], last["step"]) == (0, 25) and first["loss"] > 3 and last["loss"] < 0.8
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert steps_of(supervised)[-1]["supervised/loss"] < 0.8
    policy = AutoModelForCausalLM.from_pretrained(supervised / "final")
    tokenizer = AutoTokenizer.from_pretrained(supervised / "final")
    rows = count_ones("held_out")
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt")["input_ids"]
    replies = tokenizer.batch_decode(policy.generate(prompts, max_new_tokens=2, do_sample=False)[:, prompts.shape[1] :])
    right = [reply == row["answer"] + tokenizer.eos_token for reply, row in zip(replies, rows, strict=True)]
    assert mean(right) >= 0.4, "and one of nine by chance"


def test_reward_model_learns_which_reply_is_right(reward_model):
    first, last = evaluations_of(reward_model)[0], evaluations_of(reward_model)[-1]
    assert first["accuracy"] <= 0.6 and last["accuracy"] >= 0.9
    assert last["loss"] < 0.3 < first["loss"] and last["pairs"] == 64
    assert json.loads((reward_model / "final" / "config.json").read_text())["num_labels"] == 1


def is_oftener_right(steps):
    right = [step["rollout/reward/exact_match"] for step in steps]
    return len(right) >= 10 and mean(right[-5:]) >= mean(right[:5]) + 0.1


@pytest.mark.thorough
def test_policy_learns_from_the_reward_model_alone(reward_model, warm, folder, server):
    model = (f"model.path={warm}", "model.init=hf", "warm_start.updates=0", f"reward_model.path={reward_model}/final")
    watched = "rollout.recipe=[{reward: 'megatron_rl.rewards:exact_match', weight: 0}]"
    settings = (*server, "optimizer.lr=1e-3", "batch.prompts_per_step=16", "run.steps=40", "data.evaluation=")
    settings += ("data.evaluation_args={}", "run.save_at_end=false", f"run.folder={folder}/taught")
    train_until(is_oftener_right, COUNT, *model, watched, *BY_TOKEN, *settings)
    steps = steps_of(folder / "taught")
    for step in steps:  # the scores stand on the last of the tokens, whose own rewards are 0
        assert step["reward/mean"] == pytest.approx(step["reward/model"], abs=1e-5)
    assert is_oftener_right(steps), [step["rollout/reward/exact_match"] for step in steps]


def train_and_keep(arguments):
    """Train, and keep the step's batch with its advantages."""
    compute = RLRun.compute_advantages

    def compute_and_keep(self, batch):
        compute(self, batch)
        torch.save(batch.own(), self.folder / "batch.pt")

    RLRun.compute_advantages = compute_and_keep  # in this forked process alone
    main(list(arguments))


def test_remax_compares_with_what_the_reward_model_makes_of_the_greedy_reply(reward_model, warm, folder, server):
    judge, run_folder = reward_model / "final", folder / "remax"
    settings = (
        f"model.path={warm}",
        "model.init=hf",
        "warm_start.updates=0",
        f"run.folder={run_folder}",
        "run.steps=1",
    )
    settings += ("rollout.workflow_args.keep_greedy=true", f"reward_model.path={judge}", "reward_model.coefficient=0.5")
    settings += (*server, "batch.prompts_per_step=16", "generation.n_samples=2", "data.evaluation=")
    run_ranks(
        1,
        train_and_keep,
        [str(ROOT / "configs/count_remax.yaml"), *settings, "data.evaluation_args={}"],
        timeout_s=LATE_S,
    )
    batch = torch.load(run_folder / "batch.pt", weights_only=False)
    assert steps_of(run_folder)[0]["batch/trajectories"] == len(batch) == 32

    policy = AutoModelForCausalLM.from_pretrained(warm)
    scorer = AutoModelForSequenceClassification.from_pretrained(judge)
    tokenizer = AutoTokenizer.from_pretrained(warm)

    @torch.no_grad()
    def reward_of(prompt, ids):
        text = tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
        right = text == str(tokenizer.decode(prompt).count("1"))
        return right + 0.5 * scorer(ids[None]).logits.item()

    wanted, bounds = [], batch.cu_seqlens.tolist()
    for a, b in zip(bounds, bounds[1:], strict=False):
        ids, mask = batch["input_ids"][a:b], batch["loss_mask"][a:b]
        greedy = policy.generate(ids[~mask][None], max_new_tokens=3, do_sample=False)[0]
        wanted.append(mask * (reward_of(ids[~mask], ids) - reward_of(ids[~mask], greedy)))
    torch.testing.assert_close(batch["advantages"], torch.cat(wanted), rtol=1e-4, atol=1e-4)
    assert batch["advantages"].abs().max() > 0.1, "some replies differ from the greedy one"


def test_dpo_makes_the_preferred_replies_likelier(warm, folder):
    settings = (f"model.path={warm}", "optimizer.lr=2e-3", "run.steps=16", f"run.folder={folder}/dpo")
    run(main, "configs/count_dpo.yaml", *settings)
    steps, evaluations = steps_of(folder / "dpo"), evaluations_of(folder / "dpo")
    assert steps[0]["preference/margin"] == pytest.approx(0.0, abs=1e-5), "it starts at its reference"
    assert evaluations[-1]["accuracy"] >= 0.8 and evaluations[-1]["margin"] > 0.5
    assert evaluations[-1]["chosen_reward"] > evaluations[-1]["rejected_reward"]
