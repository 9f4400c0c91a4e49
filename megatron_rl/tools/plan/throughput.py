"""The time of a token on a server and of an update on the trainers, from products and bytes by `devices`' shares."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import TrainConfig
from megatron_rl.config.teacher_section import POLICY
from megatron_rl.tools.plan import devices
from megatron_rl.tools.plan.devices import Device
from megatron_rl.tools.plan.memory import Model
from megatron_rl.tools.plan.step_sizes import BatchPlan, PromptTokens
from megatron_rl.weights.layout import layers_of_stages

SELECTING = ("m2po", "clip_cov", "kl_cov")
"""Losses that choose the tokens of the whole batch: in the catalogue of megatron_rl.algo, with which tests compare."""


def matrix_parameters(model: Model) -> float:
    """Parameters that one token is multiplied with, without embedding and head: of experts those that it is sent to."""
    arch = model.arch
    outside = arch.hidden * arch.vocab * (1 if arch.tied or arch.head == "value" else 2)
    total = model.parameters - outside
    if (mixture := arch.mixture) is not None:  # an expert is a gate, an up and a down projection
        total -= sum(mixture.layers) * (mixture.experts - mixture.per_token) * 3 * mixture.ffn * arch.hidden
    return float(total)


def forward_flops(model: Model, rows: float, labels: float, keys: float) -> float:
    """Products and sums of a forward pass: `rows` through the layers, of `keys` keys each on average, `labels` through
    the head. A window bounds the keys of its layers."""
    arch = model.arch
    width = arch.head_dim + (arch.latent.plain_dim if arch.latent else 0)
    value = arch.latent.value_dim if arch.latent else arch.head_dim
    seen = sum(min(keys, window or keys) for n, window in enumerate(arch.windows) if not arch.has_delta_net(n))
    # A product and a sum for each element of a query with each key, and of each score with each value.
    attention = 2 * arch.heads * (width + value) * seen
    if (delta := arch.delta_net) is not None:  # a state is read twice for each row, and written
        attention += sum(delta.layers) * 6 * delta.value_heads * delta.value_dim * delta.key_dim
    head = 2 * arch.hidden * (arch.vocab if arch.head == "policy" else 1)
    return rows * (2 * matrix_parameters(model) + attention) + labels * head


def passes(model: Model, config: TrainConfig) -> float:
    """Count the forward passes over the step's tokens that a model costs; a backward pass counts as two."""
    if model.name in ("reference model", "reward model"):
        return 1.0
    if model.name == "teacher model":  # each trajectory has one teacher: they are taken to have as many
        teachers = config.teacher.teachers.values()
        return sum(teacher.path == model.engine.model.path for teacher in teachers) / len(teachers)
    if model.name == "critic":
        return training_passes(model) + 1  # the values that advantages are made of
    return training_passes(model) + first_passes(config)


def training_passes(model: Model) -> float:
    """Count the passes of an update: recomputation forms every activation once more beside forward and backward.

    Of a backward pass a half is for the weights' gradients, which frozen weights have not.
    """
    passes = 4.0 if model.megatron.get("recompute_granularity") == "full" else 3.0
    return passes - 1 if model.engine.lora.rank > 0 else passes


def first_passes(config: TrainConfig) -> float:
    """Count the policy's forward passes over the step's tokens before its updates."""
    algo = config.algo
    passes = 1.0 if algo.high_entropy_share < 1 else 0.0
    passes += config.lora.rank > 0 and algo.kl_coefficient > 0  # the reference's, with adapters off
    teachers = config.teacher.teachers.values()
    passes += sum(teacher.path == POLICY for teacher in teachers) / max(len(teachers), 1)
    if algo.penalizes_reward or algo.loss in SELECTING:
        return passes + 1  # the proximal policy's log-probs are known then
    recomputed = 1 - 1 / config.batch.updates_per_step  # the first update's pass is the proximal policy's
    return passes + (recomputed if config.correction.proximal == "recompute" else 0)


def rows_of_step(config: TrainConfig, batch: BatchPlan, tokens: PromptTokens) -> tuple[float, float]:
    """Return the rows of a step that a model computes with replies of mean length, and those that a loss looks at."""
    copies = 1 if config.batch.share_prompts else config.generation.n_samples
    labels = batch.trajectories * devices.MEAN_REPLY * config.generation.max_new_tokens
    return batch.prompts * copies * tokens.mean + labels, labels


def update_seconds(
    models: list[Model], config: TrainConfig, batch: BatchPlan, tokens: PromptTokens, gpus: int, device: Device
) -> float:
    """Seconds of everything that the trainer computes in a step. A reward model and a critic see the same rows."""
    reply = devices.MEAN_REPLY * config.generation.max_new_tokens
    rows, labels = rows_of_step(config, batch, tokens)
    total = 0.0
    for model in models:
        parallel = model.engine.parallel
        flops = passes(model, config) * forward_flops(model, rows, labels, (tokens.mean + reply) / 2)
        rate = gpus * device.flops(model.engine.model.dtype) * devices.TRAINING_EFFICIENCY
        microbatches = max(1.0, rows / (batch.updates * batch.replicas * config.batch.tokens_per_microbatch))
        # Idle over ideal time of interleaved 1F1B: (stages - 1) / (chunks x microbatches), arXiv 2104.04473, 2.2.2.
        bubble = (parallel.pipeline - 1) / (parallel.virtual_pipeline * microbatches)
        # All stages wait for the one with most layers.
        fullest = max(sum(map(len, chunks)) for chunks in layers_of_stages(model.arch, parallel, model.megatron))
        total += flops / rate * (1 + bubble) * (fullest * parallel.pipeline / model.arch.layers)
    return total


@dataclass(frozen=True)
class Decoder:
    """One server: seconds for one token of each reply of its batch.

    decoder = Decoder(model, gpus=2, device=DEVICES["h100"], kv_per_token=65536)
    decoder.seconds(replies=64, sequence_tokens=500)  # a roofline: the slower of memory and products
    """

    model: Model
    gpus: int
    device: Device
    kv_per_token: float
    """On one GPU."""

    def seconds(self, replies: float, sequence_tokens: float) -> float:
        """replies: in the batch; sequence_tokens: that each of them has so far."""
        # For each token all weights are read once for the batch, and the keys and values of each reply.
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
        if (mixture := arch.mixture) is None:
            return total
        experts = sum(mixture.layers) * mixture.experts * 3 * mixture.ffn * arch.hidden
        # The chance that no reply chose a given expert, were each reply's choice even over all of them.
        untouched: float = (1 - mixture.per_token / mixture.experts) ** replies
        return total - experts * untouched
