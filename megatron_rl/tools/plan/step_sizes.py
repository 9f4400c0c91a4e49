"""Derives the counts of one step from a config: prompts, trajectories, tokens, microbatches, requests in flight."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist

from megatron_rl.config import TrainConfig
from megatron_rl.tools.plan import devices

QUANTILES = 256
"""Number of equally likely lengths that represent a distribution of reply lengths."""


@dataclass(frozen=True)
class Bounds:
    """A count's lower and upper bound."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,} to {self.most:,}"


@dataclass(frozen=True)
class ReplyTokens:
    """Distribution of reply lengths: equally likely lengths in tokens, in ascending order."""

    lengths: tuple[int, ...]

    @classmethod
    @functools.cache
    def with_mean(cls, mean: float, longest: int) -> ReplyTokens:
        """Assume log-normal lengths of this mean that are cut off at `longest`, and some replies that never end.

        The standard deviation of the logarithm is REPLY_SPREAD, and a share ENDLESS of the replies runs to `longest`.
        """
        normal = NormalDist()
        scores = [normal.inv_cdf((n + 0.5) / QUANTILES / (1 - devices.ENDLESS)) for n in range(_ending())]

        def lengths(median: float) -> list[float]:
            drawn = [min(longest, median * math.exp(devices.REPLY_SPREAD * score)) for score in scores]
            return drawn + [longest] * (QUANTILES - len(drawn))

        low, high = 1e-3, 1e3 * longest  # bisection on a logarithmic scale
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if sum(lengths(middle)) < mean * QUANTILES else (low, middle)
        return cls(tuple(max(1, round(length)) for length in lengths(high)))

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def spread(self, count: int) -> list[int]:
        """Return `count` lengths at evenly spaced quantiles, in ascending order."""
        return [self.quantile((n + 0.5) / count) for n in range(count)]

    def quantile(self, share: float) -> int:
        """Return the length that this share of the replies does not exceed."""
        return self.lengths[min(len(self.lengths) - 1, int(share * len(self.lengths)))]


def _ending() -> int:
    return round(QUANTILES * (1 - devices.ENDLESS))


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """Prompt lengths in tokens, and the number of prompts (0: unknown): `PromptTokens.of([9, 12])`."""

    shortest: int
    longest: int
    mean: float
    count: int = 0
    replies: ReplyTokens | None = None
    """Lengths of the prompts' replies. None: unknown, see `replies_of`."""

    @classmethod
    def of(cls, lengths: list[int], replies: ReplyTokens | None = None) -> PromptTokens:
        mean, count = sum(lengths) / len(lengths), len(lengths)
        return cls(shortest=min(lengths), longest=max(lengths), mean=mean, count=count, replies=replies)

    @classmethod
    def within_limits(cls, config: TrainConfig, context: int) -> PromptTokens:
        """Assume any prompt length up to data.max_prompt_tokens and to the context minus the longest reply.

        Raises ValueError if the longest reply leaves no room for a prompt.
        """
        room = context - config.generation.max_new_tokens
        if room < 1:
            raise ValueError(
                f"generation.max_new_tokens = {config.generation.max_new_tokens}: with a prompt more than the model's "
                f"context of {context}; set it to {max(1, context - (config.data.max_prompt_tokens or 1))}."
            )
        longest = min(config.data.max_prompt_tokens or room, room)
        return cls(shortest=1, longest=longest, mean=devices.MEAN_PROMPT * longest)


def replies_of(config: TrainConfig, tokens: PromptTokens) -> ReplyTokens:
    """Return the known reply lengths, or else assumed ones with a mean of MEAN_REPLY x generation.max_new_tokens."""
    longest = config.generation.max_new_tokens
    return tokens.replies or ReplyTokens.with_mean(devices.MEAN_REPLY * longest, longest)


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Counts of one step, summed over all ranks unless stated otherwise."""

    prompts: int
    trajectories: int
    requests: int
    """Number of replies requested from servers: one per new trajectory and, with ReMax, one greedy reply per prompt."""
    prompt_tokens: int
    """Number of prompt tokens in all trajectories. Each prompt counts once per reply."""
    most_reply_tokens: int
    computed_rows: int
    """Number of rows that a model computes if all replies have full length. A shared prompt counts once."""
    longest_sequence: int
    replicas: int
    trajectories_per_replica: Bounds
    """Number of trajectories per replica in one update, if all trajectories cost the same."""
    microbatches: Bounds
    """Number of microbatches of one update on the replica with the most, if all trajectories cost the same."""
    updates: int
    groups_in_flight: int
    """Maximum number of prompts that have requests at servers or wait to be trained on."""
    episodes_running: int
    """Maximum number of prompts that have requests at servers at the same time."""
    replies_running: int
    evaluations: int
    all_requests: int
    """Number of requests in the whole run, without those of evaluations, a warm start's checks, and retries."""
    epochs: float | None
    """Number of passes over the prompts in the whole run. None if the number of prompts is unknown."""


def plan_batch(config: TrainConfig, tokens: PromptTokens, replicas: int) -> BatchPlan:
    """Return the counts for a number of data-parallel replicas. Raises ValueError if a replica would have no prompt."""
    batch, generation, steps = config.batch, config.generation, config.run.steps
    prompts, samples = batch.prompts_per_step, generation.n_samples
    if prompts < replicas:
        raise ValueError(
            f"batch.prompts_per_step = {prompts}: each of the {replicas} data-parallel replicas drives rollouts and "
            f"needs one prompt at least; raise it, or plan with fewer GPUs."
        )
    fresh, requests = prompts * samples, prompts * (samples + (config.algo.advantage == "remax"))
    groups_trained = prompts + config.reuse.groups_per_step  # once the reuse buffer has enough groups
    trajectories = groups_trained * samples
    evaluations = evaluation_count(config) if config.data.evaluation or config.eval.sets else 0
    # As the AdmissionGate counts: the groups of this step and of max_staleness steps ahead.
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
    """Return the maximum number of tokens of a trajectory: a prompt with its reply, or a dialogue of several turns."""
    dialogue = config.rollout.workflow_args.get("max_tokens", 0)
    reply = tokens.longest + config.generation.max_new_tokens
    return max(reply, dialogue) if isinstance(dialogue, int) else reply


def surplus_groups(config: TrainConfig, replicas: int) -> int:
    """Return the number of groups started in excess of a step's need (rollout.oversample).

    Each replica rounds its own share up.
    """
    prompts = config.batch.prompts_per_step
    shares = [(rank + 1) * prompts // replicas - rank * prompts // replicas for rank in range(replicas)]
    return sum(math.ceil(share * config.rollout.oversample) - share for share in shares)


def evaluation_count(config: TrainConfig) -> int:
    """Return the number of evaluations on held-out prompts: before the first step, after the last, and in between."""
    every, steps = config.run.evaluate_every_steps, config.run.steps
    between = (steps - 1) // every if every else 0
    return 2 + between


def microbatches(config: TrainConfig, tokens: PromptTokens, trajectories: Bounds) -> Bounds:
    """Return bounds on the result of `least_microbatches` for a replica's trajectories, whatever their lengths.

    Best-fit packing opens a new bin only if an item fits in no existing one. So every bin but the last holds more than
    the budget minus the longest item, and at least `budget // longest` items. Any two bins together hold more than the
    budget.

    With shared prompts, an item is a part of a group. It has at most `budget` rows and may hold a single reply. A group
    of identical replies needs hardly more rows than one reply, which gives the lower bound.
    """
    batch, samples = config.batch, config.generation.n_samples
    budget, shared = batch.tokens_per_microbatch, batch.share_prompts
    # Megatron's interleaved schedule needs a multiple of the number of stages.
    rounds = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
    shortest = min(max(1, tokens.shortest - 1), budget)  # a log-probability loss does not compute the last row
    alike = -(-trajectories.least // samples) if shared else trajectories.least
    least = max(1, -(-alike * shortest // budget))

    longest = min(longest_sequence(config, tokens), budget)
    count = trajectories.most
    item = min(budget, tokens.longest + samples * config.generation.max_new_tokens) if shared else longest
    rows = count * longest
    # In this order: a bin has an item; two bins exceed the budget; a bin exceeds the budget minus the longest item.
    most = min(count, 1 + 2 * rows // budget, 1 + rows // (budget - item + 1))
    if not shared:
        most = min(most, -(-count // (budget // longest)))
    return Bounds(-(-least // rounds) * rounds, -(-max(1, most) // rounds) * rounds)


def usual_microbatches(config: TrainConfig, tokens: PromptTokens, trajectories: float) -> float:
    """Return the expected number of microbatches per update. trajectories: their number on one replica in the update.

    Lengths at evenly spaced quantiles are packed best-fit decreasing. A shared prompt counts once per group.
    """
    budget, samples = config.batch.tokens_per_microbatch, config.generation.n_samples
    prompt = tokens.mean / (samples if config.batch.share_prompts else 1)
    count = max(1, min(QUANTILES, round(trajectories)))
    free: list[float] = []
    """Number of rows that are still free in each microbatch."""
    for length in reversed(replies_of(config, tokens).spread(count)):
        rows = min(budget, prompt + length)
        best = min((place for place, left in enumerate(free) if left >= rows), key=free.__getitem__, default=None)
        if best is None:
            free.append(budget - rows)
        else:
            free[best] -= rows
    return max(1.0, len(free) * trajectories / count)
