"""The model, its layout and its optimizer: what a training engine needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.config.rules import check


@dataclass(kw_only=True)
class ModelConfig:
    path: str = "???"
    """Hugging Face folder: config.json, safetensors (unless init is random) and the tokenizer."""
    init: str = "hf"
    """`hf` loads the folder's safetensors; `random` draws weights from run.seed, the same in every layout."""
    dtype: str = "float32"
    """Compute dtype: float32 or bfloat16. bfloat16 keeps float32 main parameters in the optimizer."""
    transformer_impl: str = "auto"
    """Layers of transformer_engine, or megatron.core's local ones; auto takes the former where they are installed."""

    def __post_init__(self) -> None:
        check(
            "model",
            init=(self.init, self.init in ("hf", "random"), "must be hf or random"),
            dtype=(self.dtype, self.dtype in ("float32", "bfloat16"), "must be float32 or bfloat16"),
            transformer_impl=(
                self.transformer_impl,
                self.transformer_impl in ("auto", "transformer_engine", "local"),
                "must be auto, transformer_engine or local",
            ),
        )


@dataclass(kw_only=True)
class ParallelConfig:
    """A model's layout. The data axis is what remains: world size / (tensor x pipeline x context)."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Model chunks per pipeline stage (interleaved 1F1B): a smaller bubble for more communication."""
    context: int = 1
    """Ranks that share the rows of a microbatch: for sequences too long for one."""
    expert: int = 1
    """Ranks that share a mixture's experts; they are taken from tensor x context x data."""
    expert_tensor: int = 1
    """Ranks that split each expert's matrices."""
    sequence: bool | None = None
    """Split norms and dropout along the sequence over the tensor axis; None does it where tensor > 1."""

    def __post_init__(self) -> None:
        for key in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor"):
            value = getattr(self, key)
            check("parallel", **{key: (value, value >= 1, "must be at least 1; 1 leaves the axis out")})
        chunks, rule = self.virtual_pipeline, "needs parallel.pipeline > 1; chunks take turns on pipeline stages"
        check("parallel", virtual_pipeline=(chunks, chunks == 1 or self.pipeline > 1, rule))
        check("parallel", sequence=(self.sequence, not self.sequence or self.tensor > 1, "needs parallel.tensor > 1"))
        rule = "a mixture of experts under parallel.tensor > 1 needs sequence parallelism; leave the key out"
        is_mixed = self.expert > 1 and self.tensor > 1
        check("parallel", sequence=(self.sequence, not is_mixed or self.sequence_parallel, rule))

    @property
    def sequence_parallel(self) -> bool:
        return self.tensor > 1 if self.sequence is None else self.sequence

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError where the layout does not divide the number of processes."""
        ranks = self.tensor * self.pipeline * self.context
        if world_size % ranks:
            raise ValueError(
                f"parallel: tensor({self.tensor}) x pipeline({self.pipeline}) x context({self.context}) = {ranks} "
                f"ranks per replica, which does not divide the world size {world_size}. Lower one of them, or start a "
                f"multiple of {ranks} ranks, e.g. torchrun --nproc-per-node {ranks}."
            )
        experts = self.expert * self.expert_tensor * self.pipeline
        if world_size % experts:
            raise ValueError(
                f"parallel: expert({self.expert}) x expert_tensor({self.expert_tensor}) x pipeline({self.pipeline}) = "
                f"{experts} ranks hold all experts once, which does not divide the world size {world_size}. Lower one "
                f"of them, or start a multiple of {experts} ranks."
            )


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW as Megatron-Core runs it."""

    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: str = "constant"
    """constant, linear or cosine, from `lr` to `min_lr` over all updates, after the warm-up."""
    warmup_updates: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 leaves gradients alone."""
    distributed: bool = False
    """Split optimizer state over the data axis (Megatron's distributed optimizer)."""
    overlap: bool = False
    """Reduce gradients during the backward pass and gather updated weights during the next forward pass."""

    def __post_init__(self) -> None:
        check(
            "optimizer",
            lr=(self.lr, self.lr > 0, "must be above 0; RL of a language model starts near 1e-6"),
            min_lr=(self.min_lr, 0 <= self.min_lr <= self.lr, f"must be in [0, optimizer.lr = {self.lr}]"),
            schedule=(
                self.schedule,
                self.schedule in ("constant", "linear", "cosine"),
                "must be constant, linear or cosine",
            ),
            warmup_updates=(self.warmup_updates, self.warmup_updates >= 0, "must be at least 0"),
            weight_decay=(self.weight_decay, self.weight_decay >= 0, "must be at least 0"),
            beta1=(self.beta1, 0 <= self.beta1 < 1, "must be in [0, 1)"),
            beta2=(self.beta2, 0 <= self.beta2 < 1, "must be in [0, 1)"),
            eps=(self.eps, self.eps > 0, "must be above 0"),
            clip_grad=(self.clip_grad, self.clip_grad >= 0, "must be at least 0; 0 turns clipping off"),
            overlap=(
                self.overlap,
                self.distributed or not self.overlap,
                "hides the distributed optimizer's communication; set optimizer.distributed=true too",
            ),
        )


@dataclass(kw_only=True)
class BatchConfig:
    prompts_per_step: int = 64
    """Prompts of one step, counted over all ranks. Trajectories per step: this times generation.n_samples."""
    updates_per_step: int = 1
    """Optimizer steps that the trajectories of one step are split over."""
    tokens_per_microbatch: int = 16_384
    """Most packed tokens in one forward pass of one data-parallel rank."""
    allow_longer_sequences: bool = True
    """Give a sequence above that budget a pass of its own; false stops the run there with an error."""
    share_prompts: bool = True
    """Compute the common beginning of a prompt's replies once; the update is the same, and shorter."""

    def __post_init__(self) -> None:
        for key in ("prompts_per_step", "updates_per_step", "tokens_per_microbatch"):
            value = getattr(self, key)
            check("batch", **{key: (value, value >= 1, "must be at least 1")})


@dataclass(kw_only=True)
class EngineConfig:
    """What a training engine needs to know; `TrainConfig.actor` cuts it out of an experiment."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tokens_per_microbatch: int = 16_384
    allow_longer_sequences: bool = True
    share_prompts: bool = True
    seed: int = 1
    bucket_bytes: int = 256 * 1024 * 1024
    """A weight publication takes two of these, and no fewer bytes than the largest tensor has."""
    publication: str = "group"
    publication_folder: str = "runs/default/published"
