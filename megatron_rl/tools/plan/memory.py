"""Estimates the memory of a trainer GPU and of a server GPU, by part, in bytes.

Weights, gradients and optimizer states are as in megatron.core: float32 gradients, AdamW's two float32 states, and
float32 main weights in addition to bfloat16 weights, unless `optimizer.megatron` says otherwise. The distributed
optimizer shards its states over the replicas, but not gradients and weights. For each model, the pipeline stage that
needs most memory counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_rl.config import EngineConfig, GenerationConfig, ParallelConfig, TrainConfig
from megatron_rl.tools.plan.activations import Activations
from megatron_rl.tools.plan.devices import FRAGMENTATION, RESERVED_BYTES, SERVER_MEMORY_SHARE, Device
from megatron_rl.tools.plan.draft_costs import draft_pass_bytes, draft_state_bytes
from megatron_rl.tools.plan.step_sizes import BatchPlan, PromptTokens
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.layout import (
    Shares,
    adapters_of_stage,
    attention_parameters,
    largest_tensor,
    parameters,
    parameters_of_stage,
)

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
CHUNK_BYTES, MOST_ROWS, PARTS, TILE_ROWS = 1 << 30, 4096, 4, 256
"""Chunk sizes of the head's float32 logits. Copied from ops/head.py, whose import needs compiled operators."""
SUPPORT_WORK_BYTES = 32
"""Bytes per support token while the head computes a chunk: indices, logits and their gradient, and copies of these."""


@dataclass(frozen=True)
class Model:
    """One of the models of a run. A frozen model has only weights.

    For example:

        policy = Model("policy", read_architecture("models/qwen3"), config.actor)
        states_of_stage(policy, stage=0, world_size=8)  # {"weights": ..., "gradients": ..., "optimizer": ...}
    """

    name: str
    arch: Architecture
    engine: EngineConfig
    is_trained: bool = True
    megatron: dict[str, Any] = field(default_factory=dict)
    """The config's `megatron:` section."""

    @property
    def has_fused_layers(self) -> bool:
        """True if the model uses Transformer Engine's layers on a cluster where Transformer Engine is installed."""
        wants_them = self.engine.model.transformer_impl != "local" and self.engine.lora.rank == 0
        return wants_them and self.arch.fits_transformer_engine

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.engine.model.dtype]

    @property
    def share_on_cpu(self) -> float:
        """Share of the optimizer that is offloaded to the CPU."""
        given = self.engine.optimizer.megatron
        return float(given.get("optimizer_offload_fraction", 1.0)) if given.get("optimizer_cpu_offload") else 0.0

    @cached_property
    def parameters(self) -> int:
        return parameters(self.arch)

    @cached_property
    def windows(self) -> Counter[int | None]:
        """{attention window in tokens, or None if unlimited: number of layers with this window}."""
        return Counter(window for n, window in enumerate(self.arch.windows) if not self.arch.has_delta_net(n))

    @property
    def published_bytes(self) -> float:
        """Bytes of the whole model, or of its adapters if only those are published."""
        if self.engine.publication != "adapters":
            return float(self.itemsize * self.parameters)
        return float(self.itemsize * adapters_of_stage(self.arch, self.engine.lora, ParallelConfig(), 0).total)

    def trained_of_stage(self, stage: int, parallel: ParallelConfig | None = None) -> Shares:
        """Return the number of trained parameters on each rank of a stage: with LoRA only those of adapters, else all.

        parallel: a layout to use instead of the model's own.
        """
        layout = (parallel or self.engine.parallel, stage, self.megatron)
        if self.engine.lora.rank > 0:
            return adapters_of_stage(self.arch, self.engine.lora, *layout)
        return parameters_of_stage(self.arch, *layout)


def models_of(config: TrainConfig) -> list[Model]:
    """Read config.json of the policy and, if configured, of reference, teachers, critic and reward model."""
    arch = read_architecture(config.model.path).with_head("policy")
    found = [Model("policy", arch, config.actor, megatron=config.megatron)]
    # With LoRA, the policy without adapters is the reference, so there is no second model.
    if config.algo.kl_coefficient > 0 and config.lora.rank == 0:
        found.append(Model("reference model", arch, config.actor, is_trained=False, megatron=config.megatron))
    for path in config.teacher.engine_paths:
        teacher = read_architecture(path).with_head("policy")
        engine = config.teacher_engine(path)
        found.append(Model("teacher model", teacher, engine, is_trained=False, megatron=config.megatron))
    if config.has_critic:
        engine = config.critic_engine
        arch = read_architecture(engine.model.path).with_head("value")
        found.append(Model("critic", arch, engine, megatron=config.megatron))
    if config.reward_model.path:
        engine = config.reward_engine
        arch = read_architecture(engine.model.path).with_head("value")
        found.append(Model("reward model", arch, engine, is_trained=False, megatron=config.megatron))
    return found


@dataclass(frozen=True)
class ModelMemory:
    """Memory of a model on its fullest rank, in bytes: the permanent `states`, and temporary memory."""

    states: dict[str, float]
    update: dict[str, float] = field(default_factory=dict)
    """Temporary memory, by part, after the last microbatch's forward pass. All parts exist at the same time."""
    moments: dict[str, float] = field(default_factory=dict)
    """{other moment of a step: temporary memory}. These memories and `update` are never needed at the same time."""
    beside_weights: dict[str, float] = field(default_factory=dict)
    """{moment at which this model's weights are the only states on the GPU: temporary memory}."""
    on_cpu: float = 0.0
    """Host memory of the optimizer's part on the CPU, including float32 copies of its gradients."""
    checkpoint: float = 0.0
    """Host memory of this rank's part of a checkpoint, until it is written."""

    @property
    def kept(self) -> float:
        return sum(self.states.values())

    @property
    def peak(self) -> float:
        """Bytes at the fullest moment, without other models."""
        with_states = self.kept + max([sum(self.update.values()), *self.moments.values()])
        return max([with_states, *(self.states["weights"] + size for size in self.beside_weights.values())])


def states_of_stage(model: Model, stage: int, world_size: int) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer states on each rank of a stage after the first update."""
    shares = parameters_of_stage(model.arch, model.engine.parallel, stage, model.megatron)
    weights = {"weights": float(shares.total * model.itemsize)}
    if not model.is_trained:
        return weights
    if model.engine.lora.rank > 0:
        shares = model.trained_of_stage(stage)
        weights["weights"] += shares.total * model.itemsize
    optimizer = (1 - model.share_on_cpu) * _optimizer_bytes(model, shares, world_size)
    gradient = 4.0 if model.engine.optimizer.megatron.get("grad_reduce_in_fp32", True) else float(model.itemsize)
    states = weights | {"gradients": gradient * shares.total, "optimizer": optimizer}
    if draft := draft_state_bytes(model.arch, model.engine, stage, model.itemsize):
        states["draft head"] = draft
    return states


def _optimizer_bytes(model: Model, shares: Shares, world_size: int) -> float:
    """Return the bytes of AdamW's two moments and, for bfloat16, main weights, on the GPU and the CPU together."""
    tensors = ["exp_avg", "exp_avg_sq", *(["main_params"] if model.itemsize == 2 else [])]
    dtypes = [model.engine.optimizer.megatron.get(f"{tensor}_dtype", "float32") for tensor in tensors]
    return sum(ITEMSIZE[dtype] for dtype in dtypes) * _of_optimizer(shares, model.engine, world_size)


def float32_copies(model: Model) -> int:
    """Return the temporary memory of an optimizer step, as a number of float32 copies of all parameters.

    torch's AdamW allocates one copy. Transformer Engine's Adam allocates one for each state that is not float32, but
    none for the moments if both are bfloat16. megatron.core adds one for 16-bit gradients, unless the optimizer is
    precision-aware.
    """
    if not model.has_fused_layers:
        return 1
    options = model.engine.optimizer.megatron
    moments = [options.get(name, "float32") for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    copied = [] if moments == ["bfloat16", "bfloat16"] else moments
    rounded = sum(dtype != "float32" for dtype in (*copied, options.get("main_params_dtype", "float32")))
    takes_16_bits = options.get("grad_reduce_in_fp32", True) or options.get("use_precision_aware_optimizer", False)
    return rounded + (not takes_16_bits)


def _of_optimizer(shares: Shares, engine: EngineConfig, world_size: int) -> float:
    """Return the number of parameters that one rank's optimizer updates."""
    return _of_replica(shares, engine, world_size) if engine.optimizer.distributed else shares.total


def _of_replica(shares: Shares, engine: EngineConfig, world_size: int) -> float:
    """Return the number of parameters in one rank's shard.

    shares: numbers of the parameters that the replicas shard among themselves.
    """
    parallel = engine.parallel
    replicas = world_size // (parallel.tensor * parallel.pipeline)  # context ranks are replicas too
    expert_replicas = world_size // (parallel.expert * parallel.expert_tensor * parallel.pipeline)
    return shares.dense / replicas + shares.expert / expert_replicas


def head_bytes(model: Model, rows: int) -> tuple[float, float]:
    """Return the bytes of the output layer and the loss: (kept for the backward pass, needed only temporarily)."""
    arch, b = model.arch, model.itemsize
    if arch.head == "value":
        return 4.0 * rows * arch.hidden, 0.0
    columns = -(-arch.vocab // model.engine.parallel.tensor)
    kept = rows * arch.hidden * b  # the rows' gradients; the weight's gradient counts among the model's gradients
    logits = 4.0 * min(rows_of_chunk(columns), rows) * columns
    if b == 2:  # a 16-bit gradient of a chunk, and float32 logits of one part of the chunk
        chunk = rows_of_gradient(columns)
        logits = (2.0 * min(chunk, rows) + 4.0 * min(chunk // PARTS, rows)) * columns
    # A placeholder for the weight's gradient, allocated after the logits are freed.
    placeholder = 0 if arch.tied or model.engine.lora.rank > 0 else columns * arch.hidden * b
    gathered = rows * arch.hidden * b if model.engine.parallel.sequence_parallel else 0
    return kept, max(logits, placeholder) + rows * arch.hidden * b + gathered


def places_of_support(generation: GenerationConfig) -> int:
    """Return the maximum number of token ids stored per row: those of its support, or those whose logits change."""
    return generation.support_size or generation.computed_size or generation.changed_size


def support_bytes(generation: GenerationConfig, rows: int, own: int) -> float:
    """Return the bytes of the supports (the tokens that each token was sampled from) and of their logits' changes.

    rows: number of rows of a microbatch; every context rank holds the supports of all. own: number of rows that this
    rank's head copies and computes.
    """
    ids, numbers = places_of_support(generation), 1 + generation.adjustment_size
    return 4.0 * numbers * ids * (rows + own) + SUPPORT_WORK_BYTES * ids * min(MOST_ROWS, own)


def rows_of_chunk(columns: int) -> int:
    """Return the number of rows whose logits `lm_head_loss` holds at the same time."""
    rows = min(MOST_ROWS, max(1, CHUNK_BYTES // (4 * columns)))
    return rows - rows % TILE_ROWS if rows > TILE_ROWS else rows


def rows_of_gradient(columns: int) -> int:
    """Return the number of rows whose 16-bit logit gradients `lm_head_loss` holds at the same time.

    In addition, it holds the float32 logits of one of the PARTS parts of these rows.
    """
    return min(MOST_ROWS, 2 * rows_of_chunk(columns))


def rows_of_microbatch(config: TrainConfig, batch: BatchPlan) -> int:
    """Return the maximum number of rows of a microbatch.

    This is the token budget, unless a replica has fewer rows or a single sequence has more.
    """
    whole = batch.trajectories_per_replica.most * batch.longest_sequence
    return max(min(config.batch.tokens_per_microbatch, whole), batch.longest_sequence)


def keys_per_row(config: TrainConfig, tokens: PromptTokens) -> float:
    """Return the number of keys gathered per computed row: more than 1 if replies share their prompt's rows."""
    samples, reply = config.generation.n_samples, config.generation.max_new_tokens
    # Rows: the prompt once, and each reply. Keys: prompt and reply once for each sample.
    if samples == 1 or not config.batch.share_prompts:
        return 1.0
    return samples * (tokens.mean + reply) / (tokens.mean + samples * reply)


def memory_of(
    model: Model, config: TrainConfig, batch: BatchPlan, tokens: PromptTokens, world_size: int
) -> ModelMemory:
    """Return a model's memory at its fullest pipeline stage."""
    stages = range(model.engine.parallel.pipeline)
    by_stage = [memory_of_stage(model, stage, config, batch, tokens, world_size) for stage in stages]
    return max(by_stage, key=lambda memory: memory.peak)


def memory_of_stage(
    model: Model, stage: int, config: TrainConfig, batch: BatchPlan, tokens: PromptTokens, world_size: int
) -> ModelMemory:
    """Return a model's memory on a rank of a pipeline stage, including publication buffers if the rank publishes."""
    states = states_of_stage(model, stage, world_size)
    if not model.is_trained:  # a pass without gradients keeps little compared with a trained model's
        return ModelMemory(states)
    parallel = model.engine.parallel
    whole = rows_of_microbatch(config, batch)
    rows = -(-whole // parallel.context)  # rounded up, because each context rank has a part of every sequence
    activations = Activations(
        model.arch,
        model.engine,
        model.megatron,
        uses_kernel=model.itemsize == 2,
        keys_per_row=keys_per_row(config, tokens),
        has_fused_layers=model.has_fused_layers,
    )
    kept, again = activations.of_stage(stage, rows, batch.microbatches.most)
    between = activations.between_stages(stage, rows, batch.microbatches.most)
    update = {"activations": kept + between}
    if stage == parallel.pipeline - 1:
        update["head and loss"] = sum(head_bytes(model, rows))
        if model.arch.head == "policy" and places_of_support(config.generation):
            update["supports"] = support_bytes(config.generation, whole, rows)
        if model.engine.draft.kind != "none":
            tokens_in_all = whole * keys_per_row(config, tokens)
            chunk = rows_of_chunk(-(-model.arch.vocab // parallel.tensor))
            given = model.arch, model.engine, model.megatron, tokens_in_all, chunk, model.itemsize
            update["draft head's pass"] = draft_pass_bytes(*given)
    moments = {"backward pass": again + between + activations.working(stage, rows)}
    shares = model.trained_of_stage(stage)
    updated = (1 - model.share_on_cpu) * _of_optimizer(shares, model.engine, world_size)
    moments["optimizer step"] = 4 * float32_copies(model) * updated
    beside_weights: dict[str, float] = {}
    if model.engine.optimizer.distributed:
        beside_weights["start"] = buffer_bytes(model, shares, states["gradients"] / max(shares.total, 1))
    if model.name == "policy":
        if config.rollout.colocated:  # on each node, one rank hands the buckets to the servers; it may be of any stage
            servers = model.itemsize * model.parameters / config.rollout.gpus_per_server
            beside_weights["publication"] = publication_bytes(model) + servers
        elif stage == 0 or model.engine.publication == "group":
            moments["publication"] = publication_bytes(model)
    on_cpu = _optimizer_bytes(model, shares, world_size) + 4 * _of_optimizer(shares, model.engine, world_size)
    written = checkpoint_bytes(model, shares, world_size)
    return ModelMemory(states, update, moments, beside_weights, model.share_on_cpu * on_cpu, written)


def buffer_bytes(model: Model, shares: Shares, gradient: float) -> float:
    """Return the bytes needed in addition to the weights while the distributed optimizer allocates its last buffers.

    For each chunk, first its dense parameters and then its experts are copied into a weight buffer, and the originals
    are freed after all of them are copied. A gradient buffer is allocated with each weight buffer. shares: the rank's
    trained parameters. gradient: bytes per gradient element.
    """
    chunks = model.engine.parallel.virtual_pipeline
    earlier = gradient * shares.total * (chunks - 1) / chunks
    dense, expert = shares.dense / chunks, shares.expert / chunks
    copied = max(model.itemsize * dense, (model.itemsize + gradient) * expert)
    return earlier + gradient * dense + copied


def checkpoint_bytes(model: Model, shares: Shares, world_size: int) -> float:
    """Return the bytes of a checkpoint that one rank writes. Replicas share the writing.

    shares: the rank's trained parameters.
    """
    has_main_weights = model.itemsize == 2 or model.engine.optimizer.distributed
    # Weights, two moments and main weights. Optimizer states are always float32 in a checkpoint.
    return (model.itemsize + 8 + 4 * has_main_weights) * _of_replica(shares, model.engine, world_size)


def publication_bytes(model: Model) -> float:
    """Return the temporary bytes of a publication on a rank that sends to servers.

    These are two buckets, of which one is filled while the other is sent, and two tensors from which they are filled.
    If adapters are merged, the merged matrix and the parts it is computed from are in float32. Publishing only adapters
    needs no extra memory, because they are sent one by one.
    """
    if model.engine.publication == "adapters":
        return 0.0
    bucket = min(model.engine.bucket_bytes, model.itemsize * model.parameters)
    merged = 3 * 4 * largest_tensor(model.arch) if model.engine.lora.rank > 0 else 0
    return 2.0 * (bucket + model.itemsize * largest_tensor(model.arch)) + merged


def _of(model: str, part: str) -> str:
    return part if model == "policy" else f"{model}: {part}"


@dataclass(frozen=True)
class TrainerMemory:
    """Memory of the fullest trainer GPU, in bytes: its `peak`, the `parts` of the peak, and its `fullest_moment`."""

    by_model: dict[str, ModelMemory]
    offload: bool
    available: float
    reserved: float = float(RESERVED_BYTES)
    """Memory that is not in tensors, for all processes on the GPU."""

    @property
    def fullest_moment(self) -> str:
        """The moment at which most memory is needed, e.g. `update` or `critic: optimizer step`."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def parts(self) -> dict[str, float]:
        """Bytes at the fullest moment, by part. They sum to `peak`."""
        parts = self.moments[self.fullest_moment]
        # Added last, because it is a share of the sum of all tensors.
        return parts | {"fragmentation": FRAGMENTATION * sum(parts.values()), "reserved": self.reserved}

    @cached_property
    def moments(self) -> dict[str, dict[str, float]]:
        """{moment of a step: {part: bytes}}, for all tensors."""
        found: dict[str, dict[str, float]] = {}
        for name, memory in self.by_model.items():
            there = {name: memory} if self.offload else self.by_model
            states = {_of(each, part): size for each, its in there.items() for part, size in its.states.items()}
            found[_of(name, "update")] = states | {_of(name, part): size for part, size in memory.update.items()}
            for moment, size in memory.moments.items():
                found[_of(name, moment)] = states | {_of(name, moment): size}
            for moment, size in memory.beside_weights.items():
                found[_of(name, moment)] = {_of(name, "weights"): memory.states["weights"], _of(name, moment): size}
        return found

    @property
    def peak(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.available

    @property
    def largest(self) -> str:
        parts = self.parts
        return max(parts, key=lambda name: parts[name])


def trainer_memory(
    models: list[Model], config: TrainConfig, batch: BatchPlan, tokens: PromptTokens, world_size: int, device: Device
) -> TrainerMemory:
    """Return the memory of the fullest GPU among `world_size` trainer ranks."""
    by_model = {model.name: memory_of(model, config, batch, tokens, world_size) for model in models}
    processes = 2 if config.rollout.colocated else 1
    return TrainerMemory(by_model, config.run.offload, device.memory, processes * float(RESERVED_BYTES))


@dataclass(frozen=True)
class ServerMemory:
    """Memory of one server with `gpus` GPUs. Sizes are bytes per GPU."""

    gpus: int
    replicas: int
    """Number of attention replicas (SGLang's DP attention). Each replica holds the KV cache of its own replies."""
    weights: float
    kv_per_token: float
    kv_room: float
    longest_sequence: int
    available: float
    state_per_reply: float = 0.0
    """Bytes of a reply's delta net states, which are needed in addition to the KV cache."""

    @property
    def replies(self) -> int:
        """Number of full-length replies, with prompts of maximum length, whose KV caches fit in memory together."""
        return self.replies_of(self.longest_sequence)

    def replies_of(self, tokens: float) -> int:
        """Return how many replies' KV caches fit in memory together. tokens: length of each reply with its prompt."""
        return self.replicas * max(0, int(self.kv_room / (self.state_per_reply + self.kv_per_token * tokens)))

    @property
    def fits(self) -> bool:
        return self.replies > 0


def kv_bytes_per_token(arch: Architecture, itemsize: int, gpus: int = 1) -> float:
    """Return the KV cache bytes of one token on one GPU.

    If several GPUs share a KV head, each of them stores it. With latent attention, each GPU stores all compressed rows.
    """
    if arch.latent is not None:  # one compressed row for all heads, and the key's rotary part
        return float(arch.layers * (arch.latent.kv_rank + arch.head_dim) * itemsize)
    layers = arch.layers - (sum(arch.delta_net.layers) if arch.delta_net else 0)
    return float(layers * 2 * max(1, arch.kv_heads // gpus) * arch.head_dim * itemsize)


def state_bytes_per_reply(arch: Architecture, itemsize: int, gpus: int = 1) -> float:
    """Return the bytes of a reply's delta net states on one GPU: float32 states and the convolutions' last inputs."""
    if (delta := arch.delta_net) is None:
        return 0.0
    key, value = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    return sum(delta.layers) * (4 * value * delta.key_dim + itemsize * (delta.kernel - 1) * (2 * key + value)) / gpus


def server_memory(
    policy: Model, config: TrainConfig, batch: BatchPlan, device: Device, beside: float = 0.0
) -> ServerMemory:
    """Return the memory of one server of the policy. beside: bytes per GPU that a trainer uses on the same GPUs."""
    arch, gpus, replicas = policy.arch, config.rollout.gpus_per_server, config.rollout.attention_replicas
    share = float(config.rollout.server_option("--mem-fraction-static") or SERVER_MEMORY_SHARE)
    on_one = float(policy.parameters)
    if replicas > 1:  # with DP attention, SGLang puts the whole embedding on every GPU
        on_one += (replicas - 1) * attention_parameters(arch) + (gpus - 1) * arch.vocab * arch.hidden
    weights = policy.itemsize * on_one / gpus
    return ServerMemory(
        gpus=gpus,
        replicas=replicas,
        weights=weights,
        kv_per_token=kv_bytes_per_token(arch, policy.itemsize, gpus // replicas),
        state_per_reply=state_bytes_per_reply(arch, policy.itemsize, gpus // replicas),
        # SGLang's memory share is of the whole device and includes the weights.
        kv_room=max(0.0, min(share * device.memory, device.memory - beside) - weights),
        longest_sequence=batch.longest_sequence,
        available=device.memory,
    )
