"""Estimates the time of a server's token and of a trainer's update from FLOPs, bytes and `devices`' figures."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import TrainConfig
from megatron_rl.config.teacher_section import POLICY
from megatron_rl.tools.plan import devices
from megatron_rl.tools.plan.devices import Device
from megatron_rl.tools.plan.draft_costs import PASSES, draft_flops_of_row
from megatron_rl.tools.plan.memory import Model
from megatron_rl.tools.plan.step_sizes import BatchPlan, PromptTokens, replies_of
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
    if (mixture := arch.mixture) is not None:
        total -= sum(mixture.layers) * (mixture.experts - mixture.per_token) * 3 * mixture.ffn * arch.hidden
    return float(total)


def expert_parameters(model: Model) -> float:
    """Return the number of matrix parameters that one token uses in routed experts."""
    if (mixture := model.arch.mixture) is None:
        return 0.0  # an expert is a gate, an up and a down projection
    return float(sum(mixture.layers) * mixture.per_token * 3 * mixture.ffn * model.arch.hidden)


def attention_flops(model: Model, keys: float) -> float:
    """Return the FLOPs of one row that involve no parameters: those of attention and of a delta net's state.

    keys: mean number of keys that each row attends to, before sliding windows limit it.
    """
    arch = model.arch
    width = arch.head_dim + (arch.latent.plain_dim if arch.latent else 0)
    value = arch.latent.value_dim if arch.latent else arch.head_dim
    seen = sum(layers * min(keys, window or keys) for window, layers in model.windows.items())
    # One multiplication and one addition for each query element and key, and for each score and value element.
    flops = 2 * arch.heads * (width + value) * seen
    if (delta := arch.delta_net) is not None:  # each row reads the state twice and writes it once
        flops += sum(delta.layers) * 6 * delta.value_heads * delta.value_dim * delta.key_dim
    return flops


def head_flops(model: Model) -> float:
    return 2.0 * model.arch.hidden * (model.arch.vocab if model.arch.head == "policy" else 1)


def forward_flops(model: Model, rows: float, labels: float, keys: float) -> float:
    """Return the FLOPs of a forward pass: `rows` through the layers, `labels` rows through the head.

    keys: mean number of keys that each row attends to. With causal attention this is half a sequence; masked products
    do not count.
    """
    return rows * (2 * matrix_parameters(model) + attention_flops(model, keys)) + labels * head_flops(model)


def passes(model: Model, config: TrainConfig) -> float:
    """Return how many forward passes a model makes over a step's tokens. A backward pass counts as two."""
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
    """Return how many forward passes the policy makes over the step's tokens before the updates."""
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
    labels = batch.trajectories * replies_of(config, tokens).mean
    return batch.prompts * copies * tokens.mean + labels, labels


def causal_keys(config: TrainConfig, tokens: PromptTokens) -> float:
    """Return the mean number of keys that a row attends to: half a sequence, weighted by the sequences' lengths."""
    lengths = [tokens.mean + reply for reply in replies_of(config, tokens).lengths]
    return sum(length * length for length in lengths) / sum(lengths) / 2


def product_efficiency(rows: float, width: float) -> float:
    """Return the share of peak FLOPS that a matrix product reaches. width: its number of columns on one rank."""
    return devices.MATRIX_EFFICIENCY / ((1 + devices.HALF_SIZE / rows) * (1 + devices.HALF_SIZE / width))


def forward_seconds(model: Model, rows: float, labels: float, keys: float, device: Device, imbalance: float) -> float:
    """Return the seconds of one microbatch's forward pass on a rank of the stage with most layers, without traffic.

    rows, labels: numbers of rows and label rows of a replica's microbatch, on all its context ranks together. keys:
    mean number of keys that a row attends to. imbalance: number of rows of the busiest expert rank, divided by the mean
    over all expert ranks.
    """
    arch, parallel = model.arch, model.engine.parallel
    own = rows / parallel.context
    routed = expert_parameters(model)
    width = arch.heads * (arch.latent.value_dim if arch.latent else arch.head_dim) / parallel.tensor
    dense = 2 * rows * (matrix_parameters(model) - routed) + labels * head_flops(model)
    seconds = (
        dense / product_efficiency(own, width) + rows * attention_flops(model, keys) / devices.ATTENTION_EFFICIENCY
    )
    if (mixture := arch.mixture) is not None:
        # All expert ranks' rows come together, and each rank has its part of the experts.
        per_expert = own / parallel.tensor * parallel.expert * parallel.expert_tensor * mixture.per_token
        efficiency = product_efficiency(per_expert / mixture.experts, mixture.ffn / parallel.expert_tensor)
        seconds += imbalance * 2 * rows * routed / efficiency
    seconds /= parallel.tensor * parallel.context * device.flops(model.engine.model.dtype)
    seconds += devices.LAYER_S * arch.layers + devices.MIXTURE_S * sum(mixture.layers if mixture else ())
    # All stages wait for the one with the most layers.
    fullest = max(sum(map(len, chunks)) for chunks in layers_of_stages(arch, parallel, model.megatron))
    return seconds * fullest / arch.layers


def draft_seconds(model: Model, rows: float, labels: float, keys: float, device: Device) -> float:
    """Return the seconds to train a draft head on one microbatch, on a rank of the last stage.

    rows: number of rows of a replica's microbatch, where a shared prompt counts once for each of its replies. labels,
    keys: as in `forward_seconds`.
    """
    arch, engine = model.arch, model.engine
    if engine.draft.kind == "none":
        return 0.0
    is_recomputed = engine.draft.kind == "mtp" and model.megatron.get("recompute_granularity") == "full"
    layer = (PASSES + is_recomputed) * rows * draft_flops_of_row(arch, engine, keys)
    flops = engine.draft.depths * (layer + PASSES * labels * head_flops(model))
    parallel = engine.parallel
    width = arch.hidden / (1 if engine.draft.kind == "eagle" else parallel.tensor)
    efficiency = product_efficiency(rows / parallel.context, width)
    seconds = flops / (efficiency * parallel.tensor * parallel.context * device.flops(engine.model.dtype))
    fixed = devices.LAYER_S + devices.MIXTURE_S * (arch.mixture is not None)
    return seconds + engine.draft.depths * PASSES * fixed


def with_bubble(model: Model, microbatches: float) -> float:
    """Return the time of a pipeline, divided by the time that one stage takes for all microbatches."""
    parallel = model.engine.parallel
    # Idle over ideal time of interleaved 1F1B: (stages - 1) / (chunks x microbatches), arXiv 2104.04473, 2.2.2.
    return 1 + (parallel.pipeline - 1) / (parallel.virtual_pipeline * microbatches)


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
    nodes: int = 1
    """Number of nodes that the server's GPUs are on."""

    def seconds(self, replies: float, sequence_tokens: float) -> float:
        """Return the seconds of one decoding step of `replies` replies, each of which has `sequence_tokens` tokens."""
        # Each decoding step reads all weights once, and the keys and values of each reply.
        weights = self.model.itemsize * self._weights_read(replies) / self.gpus
        read = weights + replies * sequence_tokens * self.kv_per_token
        flops = forward_flops(self.model, replies, replies, sequence_tokens) / self.gpus
        peak = self.device.flops(self.model.engine.model.dtype)
        memory_s = read / (self.device.bandwidth * devices.DECODE_BANDWIDTH)
        layer_s = devices.DECODE_LAYER_S + devices.ALL_REDUCE_S * (self.nodes - 1)
        fixed_s = self.model.arch.layers * layer_s + replies * devices.DECODE_REPLY_S
        return max(memory_s, flops / (peak * devices.DECODE_EFFICIENCY)) + fixed_s

    def _weights_read(self, replies: float) -> float:
        """Return the number of parameters that a decoding step reads. A small batch does not use all experts."""
        arch, total = self.model.arch, float(self.model.parameters)
        if not arch.tied:
            total -= arch.hidden * arch.vocab  # only single rows of the embedding are read
        if (mixture := arch.mixture) is None:
            return total
        experts = sum(mixture.layers) * mixture.experts * 3 * mixture.ffn * arch.hidden
        # Probability that no reply uses a given expert, if each reply chooses uniformly among the experts.
        untouched: float = (1 - mixture.per_token / mixture.experts) ** replies
        return total - experts * untouched
