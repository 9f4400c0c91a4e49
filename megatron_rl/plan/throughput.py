"""How long a step takes on a split of the GPUs between servers and trainers: products and bytes by `devices`' shares.

A step synchronously is rollout plus update; asynchronously (max_staleness > 0) the longer of the two, and servers are
kept full. Publication comes on top of both. Replies have lengths spread evenly between 0 and the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import TrainConfig
from megatron_rl.plan import devices
from megatron_rl.plan.batch import BatchPlan, PromptTokens
from megatron_rl.plan.devices import Device
from megatron_rl.plan.memory import Model, ServerMemory

MOMENTS = 16
"""At which a decoding batch is looked at while its replies end one by one."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """GPUs of a run and what it does with them in a step, in seconds."""

    servers: int
    server_gpus: int
    trainer_gpus: int
    rollout_s: float
    update_s: float
    publish_s: float
    is_async: bool
    reply_tokens: float
    """Mean tokens of all replies of a step."""

    @property
    def step_s(self) -> float:
        both = max(self.rollout_s, self.update_s) if self.is_async else self.rollout_s + self.update_s
        return both + self.publish_s

    @property
    def tokens_per_s(self) -> float:
        return self.reply_tokens / self.step_s

    @property
    def server_idle(self) -> float:
        return 1 - self.rollout_s / self.step_s

    @property
    def trainer_idle(self) -> float:
        return 1 - self.update_s / self.step_s


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
    """How many forward passes over the step's tokens a model costs; a backward pass counts as two."""
    if model.name in ("reference model", "reward model"):
        return 1.0
    training = 4.0 if config.megatron.get("recompute_granularity") == "full" else 3.0
    if model.name == "critic":
        return training + 1
    recomputed = 1 - 1 / config.batch.updates_per_step  # the first update's pass is the proximal policy's
    return training + (recomputed if config.correction.proximal == "recompute" else 0)


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

    def drain_seconds(self, replies: float, prompt: float, longest: int) -> float:
        """Of a batch that starts together and ends one by one, evenly, until the longest reply is done."""
        parts = [(number + 0.5) / MOMENTS for number in range(MOMENTS)]
        moments = (self.seconds(replies * (1 - part), prompt + part * longest) for part in parts)
        return longest / MOMENTS * sum(moments)


def rollout_seconds(
    model: Model, config: TrainConfig, batch: BatchPlan, tokens: PromptTokens, servers: int, memory: ServerMemory,
    device: Device,
) -> float:  # fmt: skip
    """Seconds that `servers` servers need for a step's replies."""
    decoder = Decoder(model, memory.gpus, device, memory.kv_per_token)
    longest = config.generation.max_new_tokens
    mean = devices.MEAN_REPLY * longest
    own = batch.requests / servers
    prefill = forward_flops(model, batch.prompts / servers * tokens.mean, 0, tokens.mean / 2)
    rate = memory.gpus * device.flops(model.engine.model.dtype) * devices.PREFILL_EFFICIENCY
    prefill_s = prefill / rate
    together = max(1.0, min(max(1, memory.replies), batch.replies_running / servers))
    full = mean / together * decoder.seconds(together, tokens.mean + mean / 2)  # a reply, of a batch that stays full
    if config.rollout.max_staleness > 0:
        return prefill_s + own * full
    last = min(own, together)
    return prefill_s + (own - last) * full + decoder.drain_seconds(last, tokens.mean, longest)


def publish_seconds(model: Model) -> float:
    return model.itemsize * model.parameters / devices.PUBLICATION_BANDWIDTH


def time_split(
    models: list[Model], config: TrainConfig, batch: BatchPlan, tokens: PromptTokens, memory: ServerMemory,
    device: Device, *, servers: int, trainer_gpus: int, takes_turns: bool = False,
) -> Split:  # fmt: skip
    """Time a step of `servers` servers beside `trainer_gpus` trainer ranks; takes_turns: they are on the same GPUs."""
    policy = models[0]
    return Split(
        servers=servers,
        server_gpus=memory.gpus,
        trainer_gpus=trainer_gpus,
        rollout_s=rollout_seconds(policy, config, batch, tokens, servers, memory, device),
        update_s=update_seconds(models, config, batch, tokens, trainer_gpus, device),
        publish_s=publish_seconds(policy),
        is_async=config.rollout.max_staleness > 0 and not takes_turns,
        reply_tokens=batch.requests * devices.MEAN_REPLY * config.generation.max_new_tokens,
    )
