"""The arithmetic of a plan, against what packing and the admission gate do and against counts by hand."""

import random
from pathlib import Path

import pytest
import torch

from megatron_rl.batch import packing
from megatron_rl.config import (
    BatchConfig,
    DataConfig,
    GenerationConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from megatron_rl.plan.batch import Bounds, PromptTokens, evaluation_count, plan_batch
from megatron_rl.rollout.staleness import AdmissionGate
from megatron_rl.types import TrajectoryBatch

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "configs" / "models" / "count_tiny")


def experiment(**sections):
    required = {"model": ModelConfig(path=MODEL), "data": DataConfig(train="x:y")}
    return TrainConfig(**required | {"generation": GenerationConfig(n_samples=4, max_new_tokens=20)} | sections)


def test_batch_algebra_by_hand():
    config = experiment(
        batch=BatchConfig(prompts_per_step=10, updates_per_step=2, tokens_per_microbatch=100, share_prompts=False),
        rollout=RolloutConfig(max_concurrent_episodes=3),
        run=RunConfig(steps=20, evaluate_every_steps=5),
    )
    plan = plan_batch(config, PromptTokens.of([4, 6, 8], held_out=7), replicas=2)
    assert (plan.prompts, plan.trajectories, plan.requests) == (10, 40, 40)
    assert (plan.prompt_tokens, plan.most_reply_tokens, plan.longest_sequence) == (240, 800, 28)
    assert plan.computed_rows == 40 * (6 + 20)
    assert plan.trajectories_per_replica == Bounds(10, 10)
    # At best ten prompts of 4 tokens, whose replies are empty; at worst three sequences of 28 tokens fit together.
    assert plan.microbatches == Bounds(1, 4)
    assert (plan.groups_in_flight, plan.episodes_running, plan.replies_running) == (10, 6, 24)
    # Before the first step, after steps 5, 10 and 15, and after the last.
    assert (plan.evaluations, plan.all_requests) == (5, 20 * 40 + 5 * 7)
    assert plan.epochs == pytest.approx(200 / 3)


@pytest.mark.parametrize("steps,every", [(1, 0), (12, 0), (12, 1), (12, 5), (12, 12), (12, 30)])
def test_evaluations_are_those_of_the_loop(steps, every):
    config = experiment(run=RunConfig(steps=steps, evaluate_every_steps=every))
    due = [step for step in range(steps + 1) if step in (0, steps) or (every and step % every == 0)]
    assert evaluation_count(config) == len(due)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("concurrent", [2, 1000])
def test_groups_in_flight_are_what_the_gates_admit(staleness, concurrent):
    config = experiment(
        batch=BatchConfig(prompts_per_step=8),
        rollout=RolloutConfig(max_concurrent_episodes=concurrent, max_staleness=staleness),
    )
    plan = plan_batch(config, PromptTokens.of([5]), replicas=2)
    gates = [AdmissionGate(concurrent, staleness, groups_per_step=4) for _ in range(2)]
    assert plan.groups_in_flight == sum(gate.room(0) for gate in gates)
    assert plan.episodes_running == sum(gate.capacity(0) for gate in gates)


def random_share(rng, prompts, replies, longest_prompt, longest_reply):
    """A replica's trajectories: whole groups, some of whose replies are equal or empty."""
    ids, lengths, groups = [], [], []
    for number in range(prompts):
        prompt = [rng.randrange(3) for _ in range(rng.randint(2, longest_prompt))]
        for _ in range(replies):
            reply = [rng.randrange(2) for _ in range(rng.randint(0, longest_reply))]
            ids += prompt + reply
            lengths.append(len(prompt) + len(reply))
            groups.append(number)
    tokens = {"input_ids": torch.tensor(ids), "loss_mask": torch.ones(len(ids), dtype=torch.bool)}
    return TrajectoryBatch(tokens, {"group": torch.tensor(groups)}, torch.tensor([0, *lengths]).cumsum(0))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("budget", [5, 30, 64, 400])
def test_packing_stays_within_the_planned_microbatches(shared, budget):
    rng = random.Random(budget)
    for _ in range(20):
        prompts, replies, prompt, reply = (rng.randint(1, most) for most in (6, 5, 12, 30))
        config = experiment(
            batch=BatchConfig(prompts_per_step=prompts, tokens_per_microbatch=budget, share_prompts=shared),
            generation=GenerationConfig(n_samples=replies + 1, max_new_tokens=reply),
        )
        plan = plan_batch(config, PromptTokens.of([2, prompt + 2]), replicas=1)
        share = random_share(rng, prompts, replies + 1, prompt + 2, reply)
        for final_rows in (False, True):
            parts = packing.units(share, budget, share_prompts=shared, final_rows=final_rows)
            count = packing.least_microbatches([unit.rows for unit in parts], budget)
            assert plan.microbatches.least <= count <= plan.microbatches.most


def test_interleaved_pipelines_take_whole_rounds_of_microbatches():
    config = experiment(
        batch=BatchConfig(prompts_per_step=3, tokens_per_microbatch=30, share_prompts=False),
        parallel=ParallelConfig(pipeline=4, virtual_pipeline=2),
    )
    # 12 sequences of up to 28 tokens, one to a microbatch.
    assert plan_batch(config, PromptTokens.of([8]), replicas=1).microbatches == Bounds(4, 12)


def test_more_replicas_than_prompts_are_refused():
    with pytest.raises(ValueError, match=r"batch.prompts_per_step = 2: each of the 4 .* raise it"):
        plan_batch(experiment(batch=BatchConfig(prompts_per_step=2)), PromptTokens.of([5]), replicas=4)
