"""Memory of a trainer GPU and of a server GPU, by part, in bytes.

Weights, gradients and optimizer are what megatron.core keeps: gradients in float32, AdamW's two states in float32, and
float32 main weights beside bfloat16 ones, unless `optimizer.megatron` says otherwise; the distributed optimizer divides
all but gradients and weights over the replicas. Each model counts at its fullest pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_rl.config import EngineConfig, ParallelConfig, TrainConfig
from megatron_rl.tools.plan.activations import Activations
from megatron_rl.tools.plan.devices import FRAGMENTATION, RESERVED_BYTES, SERVER_MEMORY_SHARE, Device
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
"""Of a chunk of the head's float32 logits, as ops/head.py has them, which needs compiled operators."""


@dataclass(frozen=True)
class Model:
    """One of the models of a run. A frozen one has weights alone.

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
        """True where a cluster with Transformer Engine builds its layers."""
        wants_them = self.engine.model.transformer_impl != "local" and self.engine.lora.rank == 0
        return wants_them and self.arch.fits_transformer_engine

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.engine.model.dtype]

    @property
    def share_on_cpu(self) -> float:
        """Of the optimizer."""
        given = self.engine.optimizer.megatron
        return float(given.get("optimizer_offload_fraction", 1.0)) if given.get("optimizer_cpu_offload") else 0.0

    @cached_property
    def parameters(self) -> int:
        return parameters(self.arch)

    @property
    def published_bytes(self) -> float:
        """Of the whole model, or of adapters where servers are sent these alone."""
        if self.engine.publication != "adapters":
            return float(self.itemsize * self.parameters)
        return float(self.itemsize * adapters_of_stage(self.arch, self.engine.lora, ParallelConfig(), 0).total)

    def trained_of_stage(self, stage: int, parallel: ParallelConfig | None = None) -> Shares:
        """Return the parameters that each rank of a stage has gradients of: all, or those of adapters.

        parallel: another layout than the model's own.
        """
        layout = (parallel or self.engine.parallel, stage, self.megatron)
        if self.engine.lora.rank > 0:
            return adapters_of_stage(self.arch, self.engine.lora, *layout)
        return parameters_of_stage(self.arch, *layout)


def models_of(config: TrainConfig) -> list[Model]:
    """The policy, and where the config has them its reference, teachers, critic and reward model. Reads their
    config.json."""
    arch = read_architecture(config.model.path).with_head("policy")
    found = [Model("policy", arch, config.actor, megatron=config.megatron)]
    if config.algo.kl_coefficient > 0 and config.lora.rank == 0:  # which is the policy without its adapters
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
    """Bytes that a model takes on its fullest rank: what stays, and what comes and goes in an update."""

    states: dict[str, float]
    update: dict[str, float] = field(default_factory=dict)
    """Together when the last microbatch has been computed."""
    moments: dict[str, float] = field(default_factory=dict)
    """Other moments of a step, none of them at the same time as another or as `update`."""
    on_cpu: float = 0.0
    """In host memory: of the optimizer, and float32 copies of gradients for it."""
    checkpoint: float = 0.0
    """In host memory until a checkpoint is written: the copy of what this rank writes of it."""

    @property
    def kept(self) -> float:
        return sum(self.states.values())

    @property
    def passing(self) -> float:
        return max([sum(self.update.values()), *self.moments.values()])


def states_of_stage(model: Model, stage: int, world_size: int) -> dict[str, float]:
    """Weights, gradients and optimizer state of each rank of a stage after the first update."""
    shares = parameters_of_stage(model.arch, model.engine.parallel, stage, model.megatron)
    weights = {"weights": float(shares.total * model.itemsize)}
    if not model.is_trained:
        return weights
    if model.engine.lora.rank > 0:
        shares = model.trained_of_stage(stage)
        weights["weights"] += shares.total * model.itemsize
    optimizer = (1 - model.share_on_cpu) * _optimizer_bytes(model, shares, world_size)
    gradient = 4.0 if model.engine.optimizer.megatron.get("grad_reduce_in_fp32", True) else float(model.itemsize)
    return weights | {"gradients": gradient * shares.total, "optimizer": optimizer}


def _optimizer_bytes(model: Model, shares: Shares, world_size: int) -> float:
    """AdamW's two moments, and main weights beside bfloat16, wherever they are."""
    tensors = ["exp_avg", "exp_avg_sq", *(["main_params"] if model.itemsize == 2 else [])]
    dtypes = [model.engine.optimizer.megatron.get(f"{tensor}_dtype", "float32") for tensor in tensors]
    return sum(ITEMSIZE[dtype] for dtype in dtypes) * _of_optimizer(shares, model.engine, world_size)


def float32_copies(model: Model) -> int:
    """Return how many tensors of the optimizer's size a step makes: torch's AdamW one, of all parameters at once.

    Transformer Engine's Adam makes one of each state that is not float32, and megatron.core of 16-bit gradients.
    """
    if not model.has_fused_layers:
        return 1
    options = model.engine.optimizer.megatron
    names = ["exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"]
    rounded = sum(options.get(name, "float32") != "float32" for name in names)
    takes_16_bits = options.get("grad_reduce_in_fp32", True) or options.get("use_precision_aware_optimizer", False)
    return rounded + (not takes_16_bits)


def _of_optimizer(shares: Shares, engine: EngineConfig, world_size: int) -> float:
    """The parameters that one rank's optimizer updates."""
    return _of_replica(shares, engine, world_size) if engine.optimizer.distributed else shares.total


def _of_replica(shares: Shares, engine: EngineConfig, world_size: int) -> float:
    """A rank's part of the parameters, where replicas divide them among each other."""
    parallel = engine.parallel
    replicas = world_size // (parallel.tensor * parallel.pipeline)  # context ranks are replicas too
    expert_replicas = world_size // (parallel.expert * parallel.expert_tensor * parallel.pipeline)
    return shares.dense / replicas + shares.expert / expert_replicas


def head_bytes(model: Model, rows: int) -> tuple[float, float]:
    """Of the output layer and the loss: what is kept for the backward pass, and what passes while it is formed."""
    arch, b = model.arch, model.itemsize
    if arch.head == "value":
        return 4.0 * rows * arch.hidden, 0.0
    columns = -(-arch.vocab // model.engine.parallel.tensor)
    kept = rows * arch.hidden * b  # gradients of the rows; the weight's is among the gradients
    logits = 4.0 * min(rows_of_chunk(columns), rows) * columns
    if b == 2:  # the gradient of a chunk has 16 bits, the logits of one part of it 32
        chunk = rows_of_gradient(columns)
        logits = (2.0 * min(chunk, rows) + 4.0 * min(chunk // PARTS, rows)) * columns
    # Of the weight's gradient, once the logits are gone.
    placeholder = 0 if arch.tied or model.engine.lora.rank > 0 else columns * arch.hidden * b
    gathered = rows * arch.hidden * b if model.engine.parallel.sequence_parallel else 0
    return kept, max(logits, placeholder) + rows * arch.hidden * b + gathered


def rows_of_chunk(columns: int) -> int:
    """Return the rows of which `lm_head_loss` holds the logits at one time."""
    rows = min(MOST_ROWS, max(1, CHUNK_BYTES // (4 * columns)))
    return rows - rows % TILE_ROWS if rows > TILE_ROWS else rows


def rows_of_gradient(columns: int) -> int:
    """Return the rows of which it holds a gradient of 16 bits, beside the logits of one of their PARTS."""
    return min(MOST_ROWS, 2 * rows_of_chunk(columns))


def rows_of_microbatch(config: TrainConfig, batch: BatchPlan) -> int:
    """The most rows of one microbatch: the budget, unless a replica has fewer or one sequence has more."""
    whole = batch.trajectories_per_replica.most * batch.longest_sequence
    return max(min(config.batch.tokens_per_microbatch, whole), batch.longest_sequence)


def keys_per_row(config: TrainConfig, tokens: PromptTokens) -> float:
    """Keys that attention reads for each computed row, where the replies of a group share their prompt's rows."""
    samples, reply = config.generation.n_samples, config.generation.max_new_tokens
    # Computed are the prompt once and each reply; read are prompt and reply once for each sample.
    if samples == 1 or not config.batch.share_prompts:
        return 1.0
    return samples * (tokens.mean + reply) / (tokens.mean + samples * reply)


def memory_of(
    model: Model, config: TrainConfig, batch: BatchPlan, tokens: PromptTokens, world_size: int
) -> ModelMemory:
    """Return a model's memory at its fullest pipeline stage."""
    stages = range(model.engine.parallel.pipeline)
    by_stage = [memory_of_stage(model, stage, config, batch, tokens, world_size) for stage in stages]
    return max(by_stage, key=lambda memory: memory.kept + memory.passing)


def memory_of_stage(
    model: Model, stage: int, config: TrainConfig, batch: BatchPlan, tokens: PromptTokens, world_size: int
) -> ModelMemory:
    """Return a model's memory on a rank of a pipeline stage: the same on all, but for its head's publication."""
    states = states_of_stage(model, stage, world_size)
    if not model.is_trained:  # a pass without gradients keeps little beside a trained model's
        return ModelMemory(states)
    parallel = model.engine.parallel
    whole = rows_of_microbatch(config, batch)
    rows = -(-whole // parallel.context)  # rounded up: each context rank has a part of every sequence
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
    moments = {"backward pass": again + between + activations.working(stage, rows)}
    shares = model.trained_of_stage(stage)
    updated = (1 - model.share_on_cpu) * _of_optimizer(shares, model.engine, world_size)
    moments["optimizer step"] = 4 * float32_copies(model) * updated
    if model.name == "policy" and (stage == 0 or config.rollout.colocated or model.engine.publication == "group"):
        # Of several nodes each has a rank that hands its servers the buckets, of whichever stage that is.
        moments["publication"] = publication_bytes(model)
        if config.rollout.colocated:
            moments["publication"] += model.itemsize * model.parameters / config.rollout.gpus_per_server
    on_cpu = _optimizer_bytes(model, shares, world_size) + 4 * _of_optimizer(shares, model.engine, world_size)
    written = checkpoint_bytes(model, shares, world_size)
    return ModelMemory(states, update, moments, model.share_on_cpu * on_cpu, written)


def checkpoint_bytes(model: Model, shares: Shares, world_size: int) -> float:
    """Return what a rank of a stage with these parameters writes of a checkpoint: replicas share the writing."""
    has_main_weights = model.itemsize == 2 or model.engine.optimizer.distributed
    # The weights, two moments and main weights, which are float32 in a checkpoint whatever they are in memory.
    return (model.itemsize + 8 + 4 * has_main_weights) * _of_replica(shares, model.engine, world_size)


def publication_bytes(model: Model) -> float:
    """Two buckets on a rank that sends, one being filled and one on its way, and two tensors for them.

    A matrix that an adapter is merged into is formed in float32 first, as its parts are. Adapters alone leave one by
    one.
    """
    if model.engine.publication == "adapters":
        return 0.0
    bucket = min(model.engine.bucket_bytes, model.itemsize * model.parameters)
    merged = 3 * 4 * largest_tensor(model.arch) if model.engine.lora.rank > 0 else 0
    return 2.0 * (bucket + model.itemsize * largest_tensor(model.arch)) + merged


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of the fullest trainer GPU: `peak`, its `parts`, and the `fullest_moment` that they are of."""

    by_model: dict[str, ModelMemory]
    offload: bool
    available: float
    reserved: float = float(RESERVED_BYTES)
    """For what is no tensor, of all processes on the GPU."""

    @property
    def fullest_moment(self) -> str:
        """The work under way when most memory is taken, e.g. `update` or `critic: optimizer step`."""
        name = max(self.by_model, key=lambda name: self._working(self.by_model[name]))
        memory = self.by_model[name]
        at = {"update": sum(memory.update.values())} | memory.moments
        moment = max(at, key=lambda moment: at[moment])
        return moment if name == "policy" else f"{name}: {moment}"

    @property
    def parts(self) -> dict[str, float]:
        """The bytes at the fullest moment, by part; they sum to `peak`."""
        owner, _, moment = self.fullest_moment.rpartition(": ")
        owner = owner or "policy"
        parts: dict[str, float] = {}
        for name, memory in self.by_model.items():
            prefix = "" if name == "policy" else f"{name}: "
            if name == owner or not self.offload:
                parts |= {prefix + part: size for part, size in memory.states.items()}
            if name == owner:
                passing = memory.update if moment == "update" else {moment: memory.moments[moment]}
                parts |= {prefix + part: size for part, size in passing.items()}
        # Behind all tensors, as it is a share of their sum.
        parts["fragmentation"] = FRAGMENTATION * sum(parts.values())
        return parts | {"reserved": self.reserved}

    def _working(self, memory: ModelMemory) -> float:
        # With offload a model's states are there only while it works, so a large one may be the fullest without much
        # passing; without, all states are there at any moment.
        return memory.passing + (memory.kept if self.offload else 0.0)

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
    """One server of `gpus` GPUs. Sizes are bytes of one of them."""

    gpus: int
    replicas: int
    """Of attention (SGLang's DP attention), each of which has the keys and values of its own replies."""
    weights: float
    kv_per_token: float
    kv_room: float
    longest_sequence: int
    available: float
    state_per_reply: float = 0.0
    """Of a model with delta nets, beside keys and values."""

    @property
    def replies(self) -> int:
        """Replies of full length, each with the longest prompt of its own, whose keys and values fit at one time."""
        if self.state_per_reply == 0:
            return self.replicas * max(0, int(self.kv_room / self.kv_per_token) // self.longest_sequence)
        one = self.state_per_reply + self.kv_per_token * self.longest_sequence
        return self.replicas * max(0, int(self.kv_room / one))

    @property
    def fits(self) -> bool:
        return self.replies > 0


def kv_bytes_per_token(arch: Architecture, itemsize: int, gpus: int = 1) -> float:
    """Keys and values of one token on one GPU; a head that GPUs share is on each, as latent attention's are."""
    if arch.latent is not None:  # one compressed row for all heads, and the rotated part of a key
        return float(arch.layers * (arch.latent.kv_rank + arch.head_dim) * itemsize)
    layers = arch.layers - (sum(arch.delta_net.layers) if arch.delta_net else 0)
    return float(layers * 2 * max(1, arch.kv_heads // gpus) * arch.head_dim * itemsize)


def state_bytes_per_reply(arch: Architecture, itemsize: int, gpus: int = 1) -> float:
    """The states of a reply's delta nets on one GPU, in float32, and the last inputs of their convolutions."""
    if (delta := arch.delta_net) is None:
        return 0.0
    key, value = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    return sum(delta.layers) * (4 * value * delta.key_dim + itemsize * (delta.kernel - 1) * (2 * key + value)) / gpus


def server_memory(
    policy: Model, config: TrainConfig, batch: BatchPlan, device: Device, beside: float = 0.0
) -> ServerMemory:
    """Return the memory of one server with the policy; `beside`: bytes that a trainer has on the same GPUs."""
    arch, gpus, replicas = policy.arch, config.rollout.gpus_per_server, config.rollout.attention_replicas
    share = float(config.rollout.server_option("--mem-fraction-static") or SERVER_MEMORY_SHARE)
    on_one = float(policy.parameters)
    if replicas > 1:  # SGLang gives every GPU the whole embedding then
        on_one += (replicas - 1) * attention_parameters(arch) + (gpus - 1) * arch.vocab * arch.hidden
    weights = policy.itemsize * on_one / gpus
    return ServerMemory(
        gpus=gpus,
        replicas=replicas,
        weights=weights,
        kv_per_token=kv_bytes_per_token(arch, policy.itemsize, gpus // replicas),
        state_per_reply=state_bytes_per_reply(arch, policy.itemsize, gpus // replicas),
        # SGLang's share is of the whole device, weights included.
        kv_room=max(0.0, min(share * device.memory, device.memory - beside) - weights),
        longest_sequence=batch.longest_sequence,
        available=device.memory,
    )
