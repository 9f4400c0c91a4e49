"""Estimates the time of a server's token and of a trainer's update from FLOPs, bytes and `devices`' figures."""

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
"""Losses that select tokens over the whole batch. Copied from the catalogue in megatron_rl.algo; tests compare them."""


def matrix_parameters(model: Model) -> float:
    """Return the number of matrix parameters that one token uses, without embedding and head.

    Of the experts, only those that the token is routed to count.
    """
    arch = model.arch
    outside = arch.hidden * arch.vocab * (1 if arch.tied or arch.head == "value" else 2)
    total = model.parameters - outside
    if (mixture := arch.mixture) is not None:  # an expert is a gate, an up and a down projection
        total -= sum(mixture.layers) * (mixture.experts - mixture.per_token) * 3 * mixture.ffn * arch.hidden
    return float(total)


def forward_flops(model: Model, rows: float, labels: float, keys: float) -> float:
    """Return the FLOPs of a forward pass: `rows` through the layers, `labels` rows through the head.

    keys: mean number of keys that each row attends to, before sliding windows limit it.
    """
    arch = model.arch
    width = arch.head_dim + (arch.latent.plain_dim if arch.latent else 0)
    value = arch.latent.value_dim if arch.latent else arch.head_dim
    seen = sum(min(keys, window or keys) for n, window in enumerate(arch.windows) if not arch.has_delta_net(n))
    # One multiplication and one addition for each query element and key, and for each score and value element.
    attention = 2 * arch.heads * (width + value) * seen
    if (delta := arch.delta_net) is not None:  # each row reads the state twice and writes it once
        attention += sum(delta.layers) * 6 * delta.value_heads * delta.value_dim * delta.key_dim
    head = 2 * arch.hidden * (arch.vocab if arch.head == "policy" else 1)
    return rows * (2 * matrix_parameters(model) + attention) + labels * head


def passes(model: Model, config: TrainConfig) -> float:
    """Return the number of forward passes over the step's tokens. A backward pass counts as two."""
    if model.name in ("reference model", "reward model"):
        return 1.0
    if model.name == "teacher model":  # a trajectory has one teacher; all teachers are assumed to get equally many
        teachers = config.teacher.teachers.values()
        return sum(teacher.path == model.engine.model.path for teacher in teachers) / len(teachers)
    if model.name == "critic":
        return training_passes(model) + 1  # computes the values for the advantages
    return training_passes(model) + first_passes(config)


def training_passes(model: Model) -> float:
    """Return the cost of an update in forward passes: 3, or 4 with full recomputation of activations.

    LoRA saves one: half of a backward pass computes weight gradients, which frozen weights do not need.
    """
    passes = 4.0 if model.megatron.get("recompute_granularity") == "full" else 3.0
    return passes - 1 if model.engine.lora.rank > 0 else passes


def first_passes(config: TrainConfig) -> float:
    """Return the number of the policy's forward passes over the step's tokens before its updates."""
    algo = config.algo
    passes = 1.0 if algo.high_entropy_share < 1 else 0.0
    passes += config.lora.rank > 0 and algo.kl_coefficient > 0  # the reference model: the policy with adapters off
    teachers = config.teacher.teachers.values()
    passes += sum(teacher.path == POLICY for teacher in teachers) / max(len(teachers), 1)
    if algo.penalizes_reward or algo.loss in SELECTING:
        return passes + 1  # this pass also yields the proximal policy's log-probs
    recomputed = 1 - 1 / config.batch.updates_per_step  # the first update's own pass yields the proximal log-probs
    return passes + (recomputed if config.correction.proximal == "recompute" else 0)


def rows_of_step(config: TrainConfig, batch: BatchPlan, tokens: PromptTokens) -> tuple[float, float]:
    """Return the rows that a model computes in a step with replies of mean length, and the rows that the loss uses."""
    copies = 1 if config.batch.share_prompts else config.generation.n_samples
    labels = batch.trajectories * devices.MEAN_REPLY * config.generation.max_new_tokens
    return batch.prompts * copies * tokens.mean + labels, labels


def update_seconds(
    models: list[Model], config: TrainConfig, batch: BatchPlan, tokens: PromptTokens, gpus: int, device: Device
) -> float:
    """Return the seconds of all trainer computation in a step. All models are assumed to process the same rows."""
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
        # All stages wait for the one with the most layers.
        fullest = max(sum(map(len, chunks)) for chunks in layers_of_stages(model.arch, parallel, model.megatron))
        total += flops / rate * (1 + bubble) * (fullest * parallel.pipeline / model.arch.layers)
    return total


@dataclass(frozen=True)
class Decoder:
    """A roofline model of a server's decoding time.

    For example:

        decoder = Decoder(model, gpus=2, device=DEVICES["h100"], kv_per_token=65536)
        decoder.seconds(replies=64, sequence_tokens=500)  # a roofline: the slower of memory and products
    """

    model: Model
    gpus: int
    device: Device
    kv_per_token: float
    """KV cache bytes of one token on one GPU."""

    def seconds(self, replies: float, sequence_tokens: float) -> float:
        """Return the seconds to decode one token of each of `replies` replies that have `sequence_tokens` tokens
        each."""
        # Each decoding step reads all weights once, and the keys and values of each reply.
        weights = self.model.itemsize * self._weights_read(replies) / self.gpus
        read = weights + replies * sequence_tokens * self.kv_per_token
        flops = forward_flops(self.model, replies, replies, sequence_tokens) / self.gpus
        peak = self.device.flops(self.model.engine.model.dtype)
        memory_s = read / (self.device.bandwidth * devices.DECODE_BANDWIDTH)
        return max(memory_s, flops / (peak * devices.DECODE_EFFICIENCY)) + devices.DECODE_OVERHEAD_S

    def _weights_read(self, replies: float) -> float:
        """Return the number of parameters read to decode a batch's next tokens. A small batch does not use all
        experts."""
        arch, total = self.model.arch, float(self.model.parameters)
        if not arch.tied:
            total -= arch.hidden * arch.vocab  # only single rows of the embedding are read
        if (mixture := arch.mixture) is None:
            return total
        experts = sum(mixture.layers) * mixture.experts * 3 * mixture.ffn * arch.hidden
        # Probability that no reply uses a given expert, if each reply chooses uniformly among the experts.
        untouched: float = (1 - mixture.per_token / mixture.experts) ** replies
        return total - experts * untouched
