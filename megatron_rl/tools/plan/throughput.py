"""The time of a step on a split of the GPUs between servers and trainers.

Times of a token and of an update follow from products and bytes by `devices`' shares; what comes of them in a run whose
replies have lengths spread evenly between 0 and the longest is simulated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.config import TrainConfig
from megatron_rl.tools.plan import devices
from megatron_rl.tools.plan.devices import Device
from megatron_rl.tools.plan.memory import Model, ServerMemory, TrainerMemory
from megatron_rl.tools.plan.simulation import Workload, simulate
from megatron_rl.tools.plan.step_sizes import BatchPlan, PromptTokens

REPLIES_SIMULATED = 256
"""Of a step: with more, as many servers fewer."""
STEPS_SIMULATED = 6
LONGEST_FILLING = 16
"""Steps that a simulation runs before those it measures, at most: as many as the pipeline takes to fill."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """GPUs of a run and what it does with them in a step, in seconds."""

    servers: int
    server_gpus: int
    trainer_gpus: int
    rollout_s: float
    """A server has something to do, on average."""
    wait_s: float
    """The trainer waits for replies."""
    update_s: float
    publish_s: float
    turns_s: float
    """Servers and trainer leave the devices to each other (rollout.colocated)."""
    reply_tokens: float
    """Mean tokens of all replies of a step."""

    @property
    def step_s(self) -> float:
        return self.wait_s + self.update_s + self.publish_s + self.turns_s

    @property
    def tokens_per_s(self) -> float:
        return self.reply_tokens / self.step_s

    @property
    def server_idle(self) -> float:
        return 1 - self.rollout_s / self.step_s

    @property
    def trainer_idle(self) -> float:
        return self.wait_s / self.step_s


SELECTING = ("m2po",)
"""Losses that choose the tokens of the whole batch: in the catalogue of megatron_rl.algo, with which tests compare."""


def matrix_parameters(model: Model) -> float:
    """Parameters that one token is multiplied with, without embedding and head: of experts those that it is sent to."""
    arch = model.arch
    outside = arch.hidden * arch.vocab * (1 if arch.tied or arch.head == "value" else 2)
    total = model.parameters - outside
    if arch.mixture is not None:
        mixture = arch.mixture
        idle = sum(mixture.layers) * (mixture.experts - mixture.per_token) * 3 * mixture.ffn * arch.hidden
        total -= idle
    return float(total)


def forward_flops(model: Model, rows: float, labels: float, keys: float) -> float:
    """Products and sums of a forward pass: `rows` through the layers, of `keys` keys each on average, `labels` through
    the head. A window bounds the keys of its layers."""
    arch = model.arch
    width = arch.head_dim + (arch.latent.plain_dim if arch.latent else 0)
    value = arch.latent.value_dim if arch.latent else arch.head_dim
    seen = sum(min(keys, window or keys) for window in arch.windows)
    attention = 2 * arch.heads * (width + value) * seen
    head = 2 * arch.hidden * (arch.vocab if arch.head == "policy" else 1)
    return rows * (2 * matrix_parameters(model) + attention) + labels * head


def passes(model: Model, config: TrainConfig) -> float:
    """Count the forward passes over the step's tokens that a model costs; a backward pass counts as two."""
    if model.name in ("reference model", "reward model"):
        return 1.0
    training = 4.0 if config.megatron.get("recompute_granularity") == "full" else 3.0
    if model.name == "critic":
        return training + 1
    return training + first_passes(config)


def first_passes(config: TrainConfig) -> float:
    """Count the policy's forward passes over the step's tokens before its updates."""
    algo = config.algo
    passes = 1.0 if algo.high_entropy_share < 1 else 0.0
    if algo.penalizes_reward or algo.loss in SELECTING:
        return passes + 1  # the proximal policy's log-probs are known then
    recomputed = 1 - 1 / config.batch.updates_per_step  # the first update's pass is the proximal policy's
    return passes + (recomputed if config.correction.proximal == "recompute" else 0)


def update_seconds(
    models: list[Model], config: TrainConfig, batch: BatchPlan, tokens: PromptTokens, gpus: int, device: Device
) -> float:
    """Seconds of everything that the trainer computes in a step. A reward model and a critic see the same rows."""
    copies = 1 if config.batch.share_prompts else config.generation.n_samples
    reply = devices.MEAN_REPLY * config.generation.max_new_tokens
    labels = batch.trajectories * reply
    rows = batch.prompts * copies * tokens.mean + labels
    total = 0.0
    for model in models:
        parallel = model.engine.parallel
        flops = passes(model, config) * forward_flops(model, rows, labels, (tokens.mean + reply) / 2)
        rate = gpus * device.flops(model.engine.model.dtype) * devices.TRAINING_EFFICIENCY
        microbatches = max(1.0, rows / (batch.updates * batch.replicas * config.batch.tokens_per_microbatch))
        bubble = (parallel.pipeline - 1) / (parallel.virtual_pipeline * microbatches)
        total += flops / rate * (1 + bubble)
    return total


@dataclass(frozen=True)
class Decoder:
    """One server: seconds for one token of each reply of its batch."""

    model: Model
    gpus: int
    device: Device
    kv_per_token: float
    """On one GPU."""

    def seconds(self, replies: float, sequence_tokens: float) -> float:
        """replies: in the batch; sequence_tokens: that each of them has so far."""
        weights = self.model.itemsize * self._weights_read(replies) / self.gpus
        read = weights + replies * sequence_tokens * self.kv_per_token
        flops = forward_flops(self.model, replies, replies, sequence_tokens) / self.gpus
        peak = self.device.flops(self.model.engine.model.dtype)
        memory_s = read / (self.device.bandwidth * devices.DECODE_BANDWIDTH)
        return max(memory_s, flops / (peak * devices.DECODE_EFFICIENCY)) + devices.DECODE_OVERHEAD_S

    def _weights_read(self, replies: float) -> float:
        """Parameters of which some reply has need: with few replies not all experts."""
        arch, total = self.model.arch, float(self.model.parameters)
        if not arch.tied:
            total -= arch.hidden * arch.vocab  # of the embedding a row is read
        if arch.mixture is None:
            return total
        mixture = arch.mixture
        experts = sum(mixture.layers) * mixture.experts * 3 * mixture.ffn * arch.hidden
        untouched: float = (1 - mixture.per_token / mixture.experts) ** replies
        return total - experts * untouched


def publish_seconds(model: Model) -> float:
    return model.itemsize * model.parameters / devices.PUBLICATION_BANDWIDTH


def turn_seconds(trainer: TrainerMemory) -> float:
    """Return the seconds to move everything that engines keep to host memory and back."""
    return 2 * sum(memory.kept for memory in trainer.by_model.values()) / devices.HOST_BANDWIDTH


@dataclass(frozen=True, kw_only=True)
class Step:
    """The parts of a run's steps on one split of the GPUs."""

    config: TrainConfig
    batch: BatchPlan
    tokens: PromptTokens
    decoder: Decoder
    servers: int
    trainer_gpus: int
    slots: int
    """Replies that fit a server at a time."""
    read_s: float
    """Of a prompt's token, on a server."""
    update_s: float
    publish_s: float
    turns_s: float
    max_staleness: int

    @property
    def least_s(self) -> float:
        """No step is shorter: what the servers have to do with all slots taken, and what the trainer has."""
        longest = self.config.generation.max_new_tokens
        one = self.decoder.seconds(self.slots, self.tokens.mean) / self.slots
        servers_s = self.batch.requests * devices.MEAN_REPLY * longest * one / self.servers
        both = max(servers_s, self.update_s) if self.max_staleness else servers_s + self.update_s
        return both + self.publish_s + self.turns_s

    def split(self) -> Split:
        """Simulate some steps, of fewer servers and groups where there are many, which are alike."""
        batch, servers, groups = self.batch, self.servers, self.batch.prompts
        if batch.requests > REPLIES_SIMULATED:
            servers = max(1, servers * REPLIES_SIMULATED // batch.requests)
            groups = max(1, round(groups * servers / self.servers))
        share = groups / batch.prompts * self.servers / servers  # of a server's work in a step, after rounding
        work = Workload(
            servers=servers,
            slots=self.slots,
            token_s=self.decoder.seconds,
            read_s=self.read_s,
            prompt_tokens=self.tokens.mean,
            groups=spread_lengths(self.config.generation.max_new_tokens, groups, batch.requests // batch.prompts),
            groups_per_step=groups,
            groups_at_once=max(1, round(batch.episodes_running * groups / batch.prompts)),
            max_staleness=self.max_staleness,
            drops_stale=self.config.rollout.stale == "drop",
            update_s=self.update_s * share,
            publish_s=(self.publish_s + self.turns_s) * share,
        )
        filling = min(self.max_staleness + 2, LONGEST_FILLING) if self.max_staleness else 0
        outcome = simulate(work, steps=STEPS_SIMULATED, first=filling)
        return Split(
            servers=self.servers,
            server_gpus=self.decoder.gpus,
            trainer_gpus=self.trainer_gpus,
            rollout_s=outcome.busy * outcome.step_s / share,
            wait_s=outcome.wait_s / share,
            update_s=self.update_s,
            publish_s=self.publish_s,
            turns_s=self.turns_s,
            reply_tokens=batch.requests * devices.MEAN_REPLY * self.config.generation.max_new_tokens,
        )


def spread_lengths(longest: int, groups: int, samples: int) -> Iterator[list[int]]:
    """Yield groups of reply lengths, endlessly: those of a step are spread evenly between 0 and the longest."""
    count, chance = groups * samples, random.Random(0)
    lengths = [max(1, round((number + 0.5) / count * longest)) for number in range(count)]
    while True:
        chance.shuffle(lengths)
        yield from (lengths[first : first + samples] for first in range(0, count, samples))


def steps_of(
    models: list[Model], config: TrainConfig, batch: BatchPlan, tokens: PromptTokens, trainer: TrainerMemory,
    memory: ServerMemory, device: Device, *, servers: int, trainer_gpus: int, shares_gpus: bool = False,
) -> Step:  # fmt: skip
    """Return what the steps of `servers` servers beside `trainer_gpus` trainer ranks are made of.

    shares_gpus: they are on the same GPUs, where one of them works at a time.
    """
    policy = models[0]
    rate = memory.gpus * device.flops(policy.engine.model.dtype) * devices.PREFILL_EFFICIENCY
    return Step(
        config=config,
        batch=batch,
        tokens=tokens,
        decoder=Decoder(policy, memory.gpus, device, memory.kv_per_token),
        servers=servers,
        trainer_gpus=trainer_gpus,
        slots=max(1, memory.replies),
        read_s=forward_flops(policy, 1, 0, tokens.mean / 2) / rate,
        update_s=update_seconds(models, config, batch, tokens, trainer_gpus, device),
        publish_s=publish_seconds(policy),
        turns_s=turn_seconds(trainer) if config.rollout.colocated else 0.0,
        max_staleness=0 if shares_gpus else config.rollout.max_staleness,
    )
