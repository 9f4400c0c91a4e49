"""Counts of one step: prompts, trajectories, tokens, microbatches and what may be in flight."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.config import TrainConfig
from megatron_rl.tools.plan.devices import MEAN_PROMPT


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a count can be."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,} to {self.most:,}"


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """Tokens of the prompts, and how many prompts there are, 0 where that is not known: `PromptTokens.of([9, 12])`."""

    shortest: int
    longest: int
    mean: float
    count: int = 0

    @classmethod
    def of(cls, lengths: list[int]) -> PromptTokens:
        return cls(shortest=min(lengths), longest=max(lengths), mean=sum(lengths) / len(lengths), count=len(lengths))

    @classmethod
    def within_limits(cls, config: TrainConfig, context: int) -> PromptTokens:
        """Prompts of any length up to data.max_prompt_tokens, and to what the longest reply leaves of the context."""
        room = context - config.generation.max_new_tokens
        if room < 1:
            raise ValueError(
                f"generation.max_new_tokens = {config.generation.max_new_tokens}: with a prompt more than the model's "
                f"context of {context}; lower it."
            )
        longest = min(config.data.max_prompt_tokens or room, room)
        return cls(shortest=1, longest=longest, mean=MEAN_PROMPT * longest)


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Counts are of one step over all ranks unless they say otherwise."""

    prompts: int
    trajectories: int
    requests: int
    """Replies that servers are asked for: the trajectories, and each prompt's greedy reply with ReMax."""
    prompt_tokens: int
    """Tokens of the step's prompts as trajectories hold them: once for each reply."""
    most_reply_tokens: int
    computed_rows: int
    """Rows that a model computes if all replies have full length; a shared prompt counts once."""
    longest_sequence: int
    replicas: int
    trajectories_per_replica: Bounds
    """Of one update, where trajectories cost alike."""
    microbatches: Bounds
    """Of one update on the replica with most of them, where trajectories cost alike."""
    updates: int
    groups_in_flight: int
    """Most prompts that are with servers, or wait to be trained, at one time."""
    episodes_running: int
    """Most of these that are with servers."""
    replies_running: int
    evaluations: int
    all_requests: int
    """Of the whole run, without evaluations, a warm start's checks and retries."""
    epochs: float | None
    """None where the number of prompts is not known."""


def plan_batch(config: TrainConfig, tokens: PromptTokens, replicas: int) -> BatchPlan:
    """Return the counts for that many data-parallel replicas. ValueError where a replica would have no prompt."""
    batch, generation, steps = config.batch, config.generation, config.run.steps
    prompts, samples = batch.prompts_per_step, generation.n_samples
    if prompts < replicas:
        raise ValueError(
            f"batch.prompts_per_step = {prompts}: each of the {replicas} data-parallel replicas drives rollouts and "
            f"needs one prompt at least; raise it, or plan with fewer GPUs."
        )
    fresh, requests = prompts * samples, prompts * (samples + (config.algo.advantage == "remax"))
    groups_trained = prompts + config.reuse.groups_per_step  # as soon as the buffer has them
    trajectories = groups_trained * samples
    evaluations = evaluation_count(config) if config.data.evaluation or config.eval.sets else 0
    # As the AdmissionGate counts: those of this step, and of as many steps ahead as their tokens may be versions old.
    groups = (config.rollout.max_staleness + 1) * prompts + surplus_groups(config, replicas)
    running = min(replicas * config.rollout.max_concurrent_episodes, groups)
    copies = 1 if batch.share_prompts else samples
    per_replica = Bounds(
        fresh // (batch.updates_per_step * replicas), -(-trajectories // (batch.updates_per_step * replicas))
    )
    return BatchPlan(
        prompts=prompts,
        trajectories=trajectories,
        requests=requests,
        prompt_tokens=round(trajectories * tokens.mean),
        most_reply_tokens=trajectories * generation.max_new_tokens,
        computed_rows=round(groups_trained * copies * tokens.mean) + trajectories * generation.max_new_tokens,
        longest_sequence=longest_sequence(config, tokens),
        replicas=replicas,
        trajectories_per_replica=per_replica,
        microbatches=microbatches(config, tokens, per_replica),
        updates=batch.updates_per_step,
        groups_in_flight=groups,
        episodes_running=running,
        replies_running=running * (requests // prompts),
        evaluations=evaluations,
        all_requests=steps * requests,
        epochs=steps * prompts / tokens.count if tokens.count else None,
    )


def longest_sequence(config: TrainConfig, tokens: PromptTokens) -> int:
    """Return the most tokens of a trajectory: of a prompt and its reply, or of a dialogue of several turns."""
    dialogue = config.rollout.workflow_args.get("max_tokens", 0)
    reply = tokens.longest + config.generation.max_new_tokens
    return max(reply, dialogue) if isinstance(dialogue, int) else reply


def surplus_groups(config: TrainConfig, replicas: int) -> int:
    """Groups that are started beyond those that a step takes (rollout.oversample), over the heads of all replicas."""
    prompts = config.batch.prompts_per_step
    shares = [(rank + 1) * prompts // replicas - rank * prompts // replicas for rank in range(replicas)]
    return sum(math.ceil(share * config.rollout.oversample) - share for share in shares)


def evaluation_count(config: TrainConfig) -> int:
    """Count the evaluations on held-out prompts: before the first step, after the last, and between."""
    every, steps = config.run.evaluate_every_steps, config.run.steps
    between = (steps - 1) // every if every else 0
    return 2 + between


def microbatches(config: TrainConfig, tokens: PromptTokens, trajectories: Bounds) -> Bounds:
    """Bound what `least_microbatches` returns for a replica's share, whatever its lengths are.

    Best fit opens a bin only where no other has room. So all bins but the last hold more than the budget less the
    longest item, any two of them more than the budget, and all but the last `budget // longest` items or more. With
    shared prompts an item is a part of a group, of at most the budget, and may hold one reply only; a group whose
    replies are all alike needs hardly more rows than one of them.
    """
    batch, samples = config.batch, config.generation.n_samples
    budget, shared = batch.tokens_per_microbatch, batch.share_prompts
    # Upstream's interleaved schedule takes microbatches in rounds of one to each stage.
    rounds = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
    shortest = min(max(1, tokens.shortest - 1), budget)  # a loss of log-probabilities needs no last row
    alike = -(-trajectories.least // samples) if shared else trajectories.least
    least = max(1, -(-alike * shortest // budget))

    longest = min(longest_sequence(config, tokens), budget)
    count = trajectories.most
    item = min(budget, tokens.longest + samples * config.generation.max_new_tokens) if shared else longest
    rows = count * longest
    # In order: an item to a bin; two bins hold more than the budget; a bin holds more than the budget less an item.
    most = min(count, 1 + 2 * rows // budget, 1 + rows // (budget - item + 1))
    if not shared:
        most = min(most, -(-count // (budget // longest)))
    return Bounds(-(-least // rounds) * rounds, -(-max(1, most) // rounds) * rounds)
