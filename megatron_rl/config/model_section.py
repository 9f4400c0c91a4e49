"""Options of a training engine: model, parallel layout and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.rules import Section, above, at_least, one_of, within


@dataclass(kw_only=True)
class ModelConfig(Section, name="model"):
    """The policy model, and the layers, kernels and dtype with which it is computed."""

    path: str = "???"
    """Hugging Face folder with config.json, a tokenizer and, unless init is random, safetensors files."""
    init: str = one_of("hf", "random", default="hf")
    """hf: load the folder's safetensors. random: draw the weights from run.seed, the same for every parallel layout."""
    dtype: str = one_of("float32", "bfloat16", default="float32")
    """Compute dtype. With bfloat16, the optimizer keeps its main parameters in float32."""
    transformer_impl: str = one_of("auto", "transformer_engine", "local", default="auto")
    """Layers to use: Transformer Engine's (transformer_engine) or megatron.core's own (local). auto uses Transformer
    Engine if it is installed. local does not import it, unless another option asks for it."""
    flash_attention: str = one_of("torch", "FA3", "TE", default="torch")
    """Attention kernel for bfloat16 on CUDA. torch: PyTorch's FlashAttention 2. FA3: FlashAttention 3 from an installed
    flash_attn_interface, faster but for Hopper only. TE: the cuDNN or FlashAttention kernel of Transformer Engine."""
    shared_keys: str = one_of("copied", "flex", default="copied")
    """Use of the attention keys that the branches of a forked dialogue share, for bfloat16 on CUDA. copied: copy the
    keys for each branch, then run the kernel set in flash_attention. flex: use FlexAttention without copies, which
    torch compiles in the first step; for long dialogues that fork often. Without forks, both use flash_attention's."""
    delta_kernel: str = one_of("torch", "fla", default="torch")
    """Implementation of gated delta net layers. torch: plain PyTorch. fla: the flash-linear-attention kernels, for
    bfloat16 on CUDA. They need this package's extra `fla`, and Triton compiles and tunes them in the first step. `plan`
    always assumes torch, and `rehearse` does so where the extra is not installed."""


PIPELINE_CUTS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Fields of `megatron:` that give pipeline stages different numbers of layers. Models with one stage ignore them."""


@dataclass(kw_only=True)
class ParallelConfig(Section, name="parallel"):
    """A model's parallel layout. The data-parallel size is world size / (tensor x pipeline x context)."""

    tensor: int = at_least(1, default=1, hint="1 disables the axis")
    """Tensor-parallel ranks, which split the matrices of each layer."""
    pipeline: int = at_least(1, default=1, hint="1 disables the axis")
    """Pipeline stages. Layers are split evenly among them, unless `megatron:` says otherwise (docs/cluster.md)."""
    virtual_pipeline: int = at_least(1, default=1, hint="1 disables the axis")
    """Model chunks per pipeline stage (interleaved 1F1B). More chunks: a smaller bubble, but more communication."""
    context: int = at_least(1, default=1, hint="1 disables the axis")
    """Context-parallel ranks, which divide the tokens of a microbatch, for sequences too long for one rank."""
    expert: int = at_least(1, default=1, hint="1 disables the axis")
    """Expert-parallel ranks, which divide the experts of an MoE layer. They reuse the tensor x context x data ranks."""
    expert_tensor: int = at_least(1, default=1, hint="1 disables the axis")
    """Ranks that split each expert's matrices."""
    sequence: bool | None = None
    """Sequence parallelism: tensor-parallel ranks split norms and dropout along the sequence. null: if tensor > 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            self.refuse("virtual_pipeline", "needs parallel.pipeline > 1; chunks take turns on pipeline stages")
        if self.sequence and self.tensor == 1:
            self.refuse("sequence", "needs parallel.tensor > 1")
        if self.expert > 1 and self.tensor > 1 and not self.sequence_parallel:
            rule = "a mixture of experts under parallel.tensor > 1 needs sequence parallelism; leave the key out"
            self.refuse("sequence", rule)

    @property
    def sequence_parallel(self) -> bool:
        return self.tensor > 1 if self.sequence is None else self.sequence

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError if the layout does not divide the number of processes."""
        ranks = self.tensor * self.pipeline * self.context
        if world_size % ranks:
            raise ValueError(
                f"parallel: tensor({self.tensor}) x pipeline({self.pipeline}) x context({self.context}) = {ranks} "
                f"ranks per replica, which does not divide the world size {world_size}. Lower one of them, or start a "
                f"multiple of {ranks} ranks, e.g. torchrun --nproc-per-node {ranks}."
            )
        # Experts have their own layout over the same ranks, which must divide them too.
        experts = self.expert * self.expert_tensor * self.pipeline
        if world_size % experts:
            raise ValueError(
                f"parallel: expert({self.expert}) x expert_tensor({self.expert_tensor}) x pipeline({self.pipeline}) = "
                f"{experts} ranks hold all experts once, which does not divide the world size {world_size}. Lower one "
                f"of them, or start a multiple of {experts} ranks."
            )


@dataclass(kw_only=True)
class LoraConfig(Section, name="lora"):
    """Low-rank adapters. The model's own weights stay frozen, and the model without adapters is the reference."""

    rank: int = at_least(0, default=0, hint="0 trains the whole model")
    """Rank of every adapter; 0 trains the whole model."""
    alpha: float = above(0, default=16.0)
    """An adapter's output is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Projections that get an adapter, by the ends of their names in the model's files (`q_proj`, `experts.up_proj`).
    Empty: all projections of attention, feed-forward layers and experts."""
    path: str = ""
    """Folder with initial adapters in PEFT's format, such as another run's `final/adapter`, of this rank, alpha and
    targets. Empty: start with adapters that do not change the model's output."""


@dataclass(kw_only=True)
class DraftConfig(Section, name="draft"):
    """A draft head, which guesses tokens that the policy then reads several at a time, for the same replies in fewer
    passes. The head is trained in each update, and the policy is trained as without it."""

    kind: str = one_of("none", "eagle", "mtp", default="none")
    """none: no draft head. eagle: one transformer layer as in EAGLE (arXiv 2401.15077), for embedded servers or SGLang
    on GPUs, and families of models that the embedded server runs. mtp: the multi-token-prediction layer in the model's
    folder, trained and saved with the model; no server of the run decodes with it."""
    tokens: int = at_least(1, default=3)
    """Number of tokens that a server guesses before each pass of the policy."""
    tokens_per_pass: int = at_least(1, default=64, hint="a CPU reads a few dozen in twice the time of one")
    """Maximum number of tokens, guesses included, that a pass of the policy reads in an embedded server. By how often
    guesses were right, it guesses fewer if that is faster. SGLang always guesses `tokens`."""
    depths: int = at_least(1, default=1, hint="1 trains the first guess alone")
    """Number of consecutive guesses that the head learns, each for a pass of it. From the second on, it reads its own
    states instead of the policy's, as when servers guess several tokens."""
    lr: float = above(0, default=1e-3)
    """Constant learning rate of the head's own AdamW."""


@dataclass(kw_only=True)
class OptimizerConfig(Section, name="optimizer"):
    """Options of Megatron-Core's AdamW."""

    lr: float = above(0, default=1e-6, hint="RL of a language model starts near 1e-6")
    """Learning rate at the end of the warm-up."""
    min_lr: float = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    schedule: str = one_of("constant", "linear", "cosine", default="constant")
    """Learning rate after the warm-up: constantly `lr`, or falling from it to `min_lr` over the run's updates."""
    warmup_updates: int = at_least(0, default=0)
    """Number of updates in which the learning rate rises from 0 to `lr`. The first update has rate 0 and changes
    nothing, as in transformers and Megatron-LM."""
    weight_decay: float = at_least(0, default=0.0)
    beta1: float = within("[0, 1)", default=0.9)
    beta2: float = within("[0, 1)", default=0.95)
    eps: float = above(0, default=1e-8)
    clip_grad: float = at_least(0, default=1.0, hint="0 turns clipping off")
    """Maximum global gradient norm; 0 disables clipping."""
    distributed: bool = False
    """Shard the optimizer state over the data-parallel ranks (Megatron's distributed optimizer)."""
    overlap: bool = False
    """Reduce gradients during the backward pass, and gather updated weights during the next forward pass."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Memory options of megatron.core's optimizer and gradient buffers, by its own field names, such as
    `grad_reduce_in_fp32: false` or `optimizer_cpu_offload: true`. docs/cluster.md says what each saves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_lr <= self.lr:
            self.refuse("min_lr", f"must be in [0, optimizer.lr = {self.lr}]")
        if self.overlap and not self.distributed:
            rule = "hides the distributed optimizer's communication; set optimizer.distributed=true too"
            self.refuse("overlap", rule)


@dataclass(kw_only=True)
class BatchConfig(Section, name="batch"):
    """Size of a step, and how a step is split into updates and forward passes."""

    prompts_per_step: int = at_least(1, default=64)
    """Prompts per step over all ranks. The number of trajectories per step is this times generation.n_samples."""
    updates_per_step: int = at_least(1, default=1)
    """Optimizer updates per step; the step's trajectories are split among them."""
    tokens_per_microbatch: int = at_least(1, default=16_384)
    """Maximum number of packed tokens in one forward pass of one data-parallel rank."""
    allow_longer_sequences: bool = True
    """Give a sequence longer than tokens_per_microbatch a forward pass of its own. false: it ends the run."""
    share_prompts: bool = True
    """Compute a prefix only once if several replies or branches of a dialogue share it. The update stays the same."""


@dataclass(kw_only=True)
class EngineConfig:
    """Options of one training engine. `TrainConfig.actor` builds the policy's from a run's config."""

    # No rules here: every value comes from a section that has already checked it.
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    """For the policy only. Other models have no draft head."""
    tokens_per_microbatch: int = 16_384
    allow_longer_sequences: bool = True
    share_prompts: bool = True
    routing_replay: str = "off"
    """As algo.routing_replay, for the policy only. Other models use their own routing."""
    exact: bool = False
    """As rollout.exact, for the policy and its frozen copy."""
    seed: int = 1
    bucket_bytes: int = 1 << 28
    """Size of each of a publication's two buffers, which are at least as large as the largest tensor."""
    publication: str = "group"
    publication_folder: str = "runs/default/published"
