"""The model, its layout and its optimizer: the options of a training engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.rules import Section, above, at_least, one_of, within


@dataclass(kw_only=True)
class ModelConfig(Section, name="model"):
    """The policy's folder, and the layers and the dtype it computes with."""

    path: str = "???"
    """Hugging Face folder: config.json, safetensors (unless init is random) and the tokenizer."""
    init: str = one_of("hf", "random", default="hf")
    """`hf` loads the folder's safetensors; `random` draws weights from run.seed, the same in every layout."""
    dtype: str = one_of("float32", "bfloat16", default="float32")
    """Compute dtype: float32 or bfloat16. bfloat16 keeps float32 main parameters in the optimizer."""
    transformer_impl: str = one_of("auto", "transformer_engine", "local", default="auto")
    """Layers of transformer_engine, or megatron.core's local ones; auto takes the former where they are installed."""
    flash_attention: str = one_of("torch", "FA3", "TE", default="torch")
    """Attention's kernel in bfloat16 on CUDA: torch's own FlashAttention 2, FA3 of a flash_attn_interface that is
    installed, which is faster on Hopper and computes on no other GPU, or TE, which is what Transformer Engine chooses
    of cuDNN's and FlashAttention's kernels."""
    shared_keys: str = one_of("copied", "flex", default="copied")
    """Keys that branches of a dialogue share, in bfloat16 on CUDA: `copied` for each branch before flash_attention's
    kernel; `flex` leaves them where they are, for FlexAttention, which torch compiles at the first step. For dialogues
    of many turns that fork often. Microbatches that do not fork take flash_attention's kernel either way."""
    delta_kernel: str = one_of("torch", "fla", default="torch")
    """Layers of gated delta nets: plain torch, or in bfloat16 on CUDA the kernels of flash-linear-attention, of the
    extra `fla`, which Triton compiles and tunes at the first step. `plan` and `rehearse` count torch's either way."""


PIPELINE_CUTS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Fields of `megatron:` that give pipeline stages different numbers of layers, in each model that has stages."""


@dataclass(kw_only=True)
class ParallelConfig(Section, name="parallel"):
    """A model's layout. The data axis is what remains: world size / (tensor x pipeline x context)."""

    tensor: int = at_least(1, default=1, hint="1 leaves the axis out")
    pipeline: int = at_least(1, default=1, hint="1 leaves the axis out")
    """Stages that share the layers: evenly, or as upstream's fields in `megatron:` say; docs/cluster.md names them."""
    virtual_pipeline: int = at_least(1, default=1, hint="1 leaves the axis out")
    """Model chunks per pipeline stage (interleaved 1F1B): a smaller bubble for more communication."""
    context: int = at_least(1, default=1, hint="1 leaves the axis out")
    """Ranks that share the rows of a microbatch: for sequences too long for one."""
    expert: int = at_least(1, default=1, hint="1 leaves the axis out")
    """Ranks that share a mixture's experts; they are taken from tensor x context x data."""
    expert_tensor: int = at_least(1, default=1, hint="1 leaves the axis out")
    """Ranks that split each expert's matrices."""
    sequence: bool | None = None
    """Split norms and dropout along the sequence over the tensor axis; None does it where tensor > 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            self.refuse("virtual_pipeline", "needs parallel.pipeline > 1; chunks take turns on pipeline stages")
        if self.sequence and self.tensor == 1:
            self.refuse("sequence", "needs parallel.tensor > 1")
        if self.expert > 1 and self.tensor > 1 and not self.sequence_parallel:
            mixture = "a mixture of experts under parallel.tensor > 1"
            self.refuse("sequence", f"{mixture} needs sequence parallelism; leave the key out")

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
        # Experts have a layout of their own over the same ranks, which must divide them too.
        experts = self.expert * self.expert_tensor * self.pipeline
        if world_size % experts:
            raise ValueError(
                f"parallel: expert({self.expert}) x expert_tensor({self.expert_tensor}) x pipeline({self.pipeline}) = "
                f"{experts} ranks hold all experts once, which does not divide the world size {world_size}. Lower one "
                f"of them, or start a multiple of {experts} ranks."
            )


@dataclass(kw_only=True)
class LoraConfig(Section, name="lora"):
    """Low-rank adapters: the model's own weights stay as they are, and are the reference too."""

    rank: int = at_least(0, default=0, hint="0 trains the whole model")
    """Rank of every adapter; 0 trains the whole model."""
    alpha: float = above(0, default=16.0)
    """An adapter's output counts alpha / rank times."""
    targets: list[str] = field(default_factory=list)
    """Projections that have an adapter, by the ends of their names in the model's files (`q_proj`,
    `experts.up_proj`); empty takes all of attention, feed-forward and experts."""
    path: str = ""
    """A folder in PEFT's format, such as another run's `final/adapter`, whose adapters this one begins with, of its
    rank, alpha and targets; empty begins with adapters that change nothing. The reference is the model below them."""


@dataclass(kw_only=True)
class OptimizerConfig(Section, name="optimizer"):
    """AdamW as Megatron-Core runs it."""

    lr: float = above(0, default=1e-6, hint="RL of a language model starts near 1e-6")
    min_lr: float = 0.0
    schedule: str = one_of("constant", "linear", "cosine", default="constant")
    """constant, linear or cosine, from `lr` to `min_lr` over all updates, after the warm-up."""
    warmup_updates: int = at_least(0, default=0)
    """Updates in which the rate rises from 0 to `lr`. The first of them has a rate of 0 and changes nothing, as with
    the warm-ups of transformers and Megatron-LM."""
    weight_decay: float = at_least(0, default=0.0)
    beta1: float = within("[0, 1)", default=0.9)
    beta2: float = within("[0, 1)", default=0.95)
    eps: float = above(0, default=1e-8)
    clip_grad: float = at_least(0, default=1.0, hint="0 turns clipping off")
    """Largest global gradient norm; 0 leaves gradients alone."""
    distributed: bool = False
    """Split optimizer state over the data axis (Megatron's distributed optimizer)."""
    overlap: bool = False
    """Reduce gradients during the backward pass and gather updated weights during the next forward pass."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options of memory, passed to megatron.core's optimizer and gradient buffers by their own field names, such as
    `grad_reduce_in_fp32: false` or `optimizer_cpu_offload: true`; docs/cluster.md says what each saves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_lr <= self.lr:
            self.refuse("min_lr", f"must be in [0, optimizer.lr = {self.lr}]")
        if self.overlap and not self.distributed:
            self.refuse(
                "overlap", "hides the distributed optimizer's communication; set optimizer.distributed=true too"
            )


@dataclass(kw_only=True)
class BatchConfig(Section, name="batch"):
    """The size of a step, and its split into updates and forward passes."""

    prompts_per_step: int = at_least(1, default=64)
    """Prompts of one step, counted over all ranks. Trajectories per step: this times generation.n_samples."""
    updates_per_step: int = at_least(1, default=1)
    """Optimizer steps that the trajectories of one step are split over."""
    tokens_per_microbatch: int = at_least(1, default=16_384)
    """Most packed tokens in one forward pass of one data-parallel rank."""
    allow_longer_sequences: bool = True
    """Give a sequence above that budget a pass of its own; false stops the run there with an error."""
    share_prompts: bool = True
    """Compute once what replies to a prompt, or forks of dialogues, begin with: the same update for less."""


@dataclass(kw_only=True)
class EngineConfig:
    """The options of one training engine; `TrainConfig.actor` cuts the policy's out of a run's config."""

    # No rules here: each value comes from a section that has checked it.
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    tokens_per_microbatch: int = 16_384
    allow_longer_sequences: bool = True
    share_prompts: bool = True
    routing_replay: str = "off"
    """The policy's alone: other models route by themselves."""
    seed: int = 1
    bucket_bytes: int = 1 << 28
    """A weight publication takes two of these, and no fewer bytes than the largest tensor has."""
    publication: str = "group"
    publication_folder: str = "runs/default/published"
