"""Every option of an experiment, checked before any process group or GPU is touched; one dataclass per YAML section.

`load_config` refuses an unknown key, a wrong type and a value out of range with the key, the value, the rule and the
way out. Importing this module imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def check(section: str, **rules: tuple[Any, bool, str]) -> None:
    """Raise for the first `key=(value, holds, "rule; way out")` that does not hold."""
    for key, (value, holds, rule) in rules.items():
        if not holds:
            raise ValueError(f"{section}.{key} = {value!r}: {rule}.")


@dataclass(kw_only=True)
class GenerationConfig:
    """How a reply is sampled. Field names and meanings are SGLang's where it has the field."""

    n_samples: int = 1
    """Replies a workflow asks for per prompt: the group size. Each is a request of its own."""
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    """Above 0. Greedy decoding is `greedy`, not temperature 0."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all tokens."""
    greedy: bool = False
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None
    """Seed of this request's sampling; None derives one per request where a run has a seed, else the server chooses."""

    def __post_init__(self) -> None:
        check(
            "generation",
            n_samples=(self.n_samples, self.n_samples >= 1, "must be at least 1; ask for one reply or more"),
            max_new_tokens=(self.max_new_tokens, self.max_new_tokens >= 1, "must be at least 1; set the longest reply"),
            min_new_tokens=(
                self.min_new_tokens,
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"must be in [0, max_new_tokens = {self.max_new_tokens}]; lower it",
            ),
            temperature=(
                self.temperature,
                self.temperature > 0,
                "must be above 0; for greedy decoding set greedy: true",
            ),
            top_p=(self.top_p, 0 < self.top_p <= 1, "must be in (0, 1]; 1.0 keeps all tokens"),
            top_k=(self.top_k, self.top_k == -1 or self.top_k >= 1, "must be -1 or at least 1; -1 keeps all tokens"),
        )

    def new(self, **changes: Any) -> GenerationConfig:
        """Return a copy with some fields replaced, e.g. `gconfig.new(greedy=True)`."""
        return dataclasses.replace(self, **changes)


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


ESTIMATORS = (
    *("group_norm", "dr_grpo", "rloo", "reinforce", "reinforce++", "reinforce++-baseline", "remax", "opo", "cpgd"),
    *("maxrl", "pass@k", "gae"),
)
"""Names in the catalogue of megatron_rl.algo, which this module does not import; tests compare them."""
COMPARE_GROUP = ("group_norm", "dr_grpo", "rloo", "reinforce++-baseline", "opo", "cpgd", "maxrl", "pass@k")
LOSSES = ("ppo_clip", "gspo", "cispo", "sapo", "reinforce", "m2po", "cpgd", "dppo")


@dataclass(kw_only=True)
class AlgorithmConfig:
    """`megatron-rl algorithms` lists estimators and losses, docs/algorithms.md says which options go with which."""

    advantage: str = "group_norm"
    """An estimator of the catalogue, such as group_norm (GRPO) or gae (a critic's), or the import path of your own."""
    advantage_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that estimator; gae's are in the section critic."""
    advantage_mean: str = ""
    """What is subtracted: none, group or batch mean; empty does as the estimator says."""
    advantage_std: str = ""
    """What divides: none, group or batch standard deviation; empty does as the estimator says."""
    advantage_clip: float = 0.0
    """Largest advantage either way; 0 sets no bound."""
    loss: str = "ppo_clip"
    """A policy loss of the catalogue, or the import path of your own."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that loss."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """Above clip_low this is DAPO's clip-higher."""
    dual_clip: float = 0.0
    """Above 0: the clipped loss of a token with a negative advantage is at most this times its size; 3 is usual."""
    aggregation: str = "token_mean"
    """token_mean, or over trajectories the mean of each one's mean (sequence_mean) or sum (sequence_sum), or of the sum
    over aggregation_length (constant, Dr. GRPO)."""
    aggregation_length: int = 0
    """Tokens; with constant aggregation only."""
    high_entropy_share: float = 1.0
    """Train the advantages of this share of the tokens, those of the highest entropy; below 1 takes a forward pass."""
    high_entropy_level: str = "batch"
    """The share is taken of the batch's tokens, or of each sequence's."""
    kl_coefficient: float = 0.0
    """Weight of the KL term to the frozen reference; above 0 loads a second engine."""
    kl_estimator: str = "k3"
    """k1, k2, k3; or, in the loss, unbiased: k3 times the ratio to the proximal policy, gradient included."""
    kl_in: str = "loss"
    """loss: a term with gradient. reward: each token's reward is so much less."""
    kl_target: float = 0.0
    """In the reward: divergence per token, in nats, that the coefficient is steered to; 0 keeps it fixed."""
    kl_horizon: float = 10_000.0
    """Trajectories over which a steered coefficient changes by a fifth at most."""
    entropy_coefficient: float = 0.0
    entropy_target: float = 0.0
    """Steer the coefficient so that the entropy per token stays above this, in nats; 0 keeps it fixed."""
    entropy_step: float = 0.005
    """What a steered coefficient changes by at each step."""

    def __post_init__(self) -> None:
        levels = ("", "none", "group", "batch")
        aggregations = ("token_mean", "sequence_mean", "sequence_sum", "constant")
        check(
            "algo",
            advantage=(self.advantage, *_is_known(self.advantage, ESTIMATORS)),
            advantage_mean=(self.advantage_mean, self.advantage_mean in levels, "must be none, group, batch or empty"),
            advantage_std=(self.advantage_std, self.advantage_std in levels, "must be none, group, batch or empty"),
            advantage_clip=(self.advantage_clip, self.advantage_clip >= 0, "must be at least 0; 0 sets no bound"),
            loss=(self.loss, *_is_known(self.loss, LOSSES)),
            clip_low=(self.clip_low, 0 < self.clip_low < 1, "must be in (0, 1); PPO's is 0.2"),
            clip_high=(self.clip_high, self.clip_high >= self.clip_low, f"must be at least clip_low = {self.clip_low}"),
            dual_clip=(
                self.dual_clip,
                self.dual_clip == 0 or (self.dual_clip > 1 and self.loss in ("ppo_clip", "gspo")),
                "must be 0 (off), or above 1 with algo.loss = ppo_clip or gspo",
            ),
            aggregation=(
                self.aggregation,
                self.aggregation in aggregations,
                f"must be one of {', '.join(aggregations)}",
            ),
            aggregation_length=(
                self.aggregation_length,
                self.aggregation_length >= 0 and (self.aggregation_length > 0) == (self.aggregation == "constant"),
                "must be at least 1 with algo.aggregation = constant, e.g. generation.max_new_tokens, and 0 elsewhere",
            ),
            high_entropy_share=(
                self.high_entropy_share,
                0 < self.high_entropy_share <= 1,
                "must be in (0, 1]; 1 trains all tokens",
            ),
            high_entropy_level=(
                self.high_entropy_level,
                self.high_entropy_level in ("batch", "sequence"),
                "must be batch or sequence",
            ),
            kl_coefficient=(self.kl_coefficient, self.kl_coefficient >= 0, "must be at least 0"),
            kl_in=(self.kl_in, self.kl_in in ("loss", "reward"), "must be loss or reward"),
            kl_estimator=(
                self.kl_estimator,
                self.kl_estimator in ("k1", "k2", "k3") or (self.kl_estimator == "unbiased" and self.kl_in == "loss"),
                "must be k1, k2, k3, or, with algo.kl_in = loss, unbiased",
            ),
            kl_target=(
                self.kl_target,
                self.kl_target == 0 or (self.kl_target > 0 and self.kl_in == "reward" and self.kl_coefficient > 0),
                "must be 0 (fixed), or above 0 with algo.kl_in = reward and algo.kl_coefficient > 0",
            ),
            kl_horizon=(self.kl_horizon, self.kl_horizon > 0, "must be above 0 trajectories"),
            entropy_coefficient=(self.entropy_coefficient, self.entropy_coefficient >= 0, "must be at least 0"),
            entropy_target=(self.entropy_target, self.entropy_target >= 0, "must be at least 0; 0 keeps the weight"),
            entropy_step=(self.entropy_step, self.entropy_step > 0, "must be above 0"),
        )


def _is_known(name: str, names: tuple[str, ...]) -> tuple[bool, str]:
    module, _, attribute = name.partition(":")
    known = name in names or bool(module and attribute)
    return known, f"must be one of {', '.join(names)}, or an import path package.module:name of your own"


@dataclass(kw_only=True)
class RewardShapingConfig:
    """What is done to rewards before trajectories are compared, in this order. A KL penalty (algo.kl_in) comes last."""

    overlong_buffer: int = 0
    """The last tokens before generation.max_new_tokens, over which the overlong penalty grows; 0 punishes none."""
    overlong_penalty: float = 1.0
    """What a reply of generation.max_new_tokens loses (DAPO's soft overlong punishment, arXiv 2503.14476)."""
    per_token: bool = False
    """Divide a trajectory's reward by its trained tokens."""
    running: str = "none"
    """Divide by the standard deviation of all rewards of the run so far (std), after their mean is taken off
    (mean_std)."""
    clip: float = 0.0
    """Largest reward either way; 0 sets no bound."""

    def __post_init__(self) -> None:
        check(
            "reward_shaping",
            overlong_buffer=(self.overlong_buffer, self.overlong_buffer >= 0, "must be at least 0 tokens"),
            overlong_penalty=(self.overlong_penalty, self.overlong_penalty > 0, "must be above 0"),
            running=(self.running, self.running in ("none", "std", "mean_std"), "must be none, std or mean_std"),
            clip=(self.clip, self.clip >= 0, "must be at least 0; 0 sets no bound"),
        )


@dataclass(kw_only=True)
class CorrectionConfig:
    """What is done about tokens that another policy has sampled: an older one, or a server that computes differently.

    Decoupled PPO (arXiv 2505.24298) has three policies: the behaviour policy sampled a token, the proximal one is the
    trainer's when the step begins, and the trained one's ratio to it is clipped.
    """

    proximal: str = "recompute"
    """recompute: a forward pass, before the step's first update, over the tokens of the later ones; the first has the
    proximal policy's log-probs from its own. loglinear: without that pass, between the behaviour's and the trained
    log-prob by the share of updates that lie before the step. behavior: the behaviour policy itself, plain PPO; then
    there is no weight."""
    weight: str = "off"
    """p(proximal) / p(behaviour), constant for the gradient. clamp: moved into [low, high], truncated importance
    sampling. mask: a token outside them does not train, IcePop (arXiv 2510.18855); by sequence this masks sequences.
    off: every token counts as if the proximal policy had sampled it."""
    level: str = "token"
    """token, or sequence: one weight for all, the geometric mean over its trained tokens."""
    low: float = 0.0
    high: float = 5.0
    alarm: float = 0.0
    """Stop the run when trainer and server differ by more than this, mean |log p - log q| in nats of a step's tokens of
    the current version (of all tokens where there are none). 0 never stops."""

    def __post_init__(self) -> None:
        check(
            "correction",
            proximal=(
                self.proximal,
                self.proximal in ("recompute", "loglinear", "behavior"),
                "must be recompute, loglinear or behavior",
            ),
            weight=(self.weight, self.weight in ("off", "clamp", "mask"), "must be off, clamp or mask"),
            level=(self.level, self.level in ("token", "sequence"), "must be token or sequence"),
            low=(self.low, 0 <= self.low <= 1, "must be in [0, 1]: a weight of 1 is no mismatch"),
            high=(self.high, self.high >= 1, "must be at least 1: a weight of 1 is no mismatch"),
            alarm=(self.alarm, self.alarm >= 0, "must be at least 0; 0 never stops"),
        )
        if self.proximal == "behavior" and self.weight != "off":
            raise ValueError(
                f"correction.weight = {self.weight!r}: correction.proximal = behavior makes every weight 1; set it to "
                f"off, or take another proximal policy."
            )


@dataclass(kw_only=True)
class CriticConfig:
    """The value model of algo.advantage = gae, with a layout and an optimizer of its own."""

    model: str = ""
    """Hugging Face folder of a language model or of a sequence classification model with one label.

    Empty starts from the policy as it is when RL begins. Without a scalar head the first values are 0.
    """
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    discount: float = 1.0
    """Per trained token or turn."""
    trace_decay: float = 1.0
    """GAE's lambda: 1 trusts the rewards alone, 0 the critic's next value."""
    level: str = "token"
    """What an advantage belongs to: a token, or a turn (an unbroken run of trained tokens)."""
    value_clip: float = 0.2
    """How far one step may move a value; 0 sets no bound."""
    warmup_steps: int = 0
    """First steps of the run, in which the critic learns and the policy stays as it is."""

    def __post_init__(self) -> None:
        check(
            "critic",
            discount=(self.discount, 0 < self.discount <= 1, "must be in (0, 1]; 1 discounts nothing"),
            trace_decay=(self.trace_decay, 0 <= self.trace_decay <= 1, "must be in [0, 1]"),
            level=(self.level, self.level in ("token", "turn"), "must be token or turn"),
            value_clip=(self.value_clip, self.value_clip >= 0, "must be at least 0; 0 sets no bound"),
            warmup_steps=(self.warmup_steps, self.warmup_steps >= 0, "must be at least 0"),
        )


@dataclass(kw_only=True)
class RewardModelConfig:
    """A frozen model that scores whole sequences, beside the workflow's own reward."""

    path: str = ""
    """Hugging Face folder of a sequence classification model with one label and the policy's tokens; empty: none."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    coefficient: float = 1.0
    """A trajectory's reward is the workflow's plus this times the score."""


@dataclass(kw_only=True)
class RolloutConfig:
    workflow: str = "megatron_rl.rollout.workflows:RLVRWorkflow"
    """Import path of a RolloutWorkflow; it is called with reward_fn, gconfig, tokenizer and workflow_args."""
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward: str = "megatron_rl.rollout.rewards:exact_match"
    """Import path of `reward(prompt, completions, prompt_ids, completion_ids, **data) -> float`."""
    servers: list[str] = field(default_factory=list)
    """URLs of running SGLang (or embedded) servers; empty starts `server_count` of `backend` on this host."""
    registry: str = ""
    """Folder, shared with the servers, in which those of this run register: they may come and go while it lasts.

    `megatron-rl serve MODEL --register FOLDER --run NAME`, where NAME is the last part of run.folder. The run starts
    once `server_count` are there; none are started.
    """
    router: str = ""
    """URL of an SGLang router (sglang-router 0.3) that picks a server for each request; it is told which there are."""
    backend: str = "auto"
    """embedded, sglang, or auto: sglang where CUDA is, embedded where it is not."""
    server_count: int = 1
    server_restarts: int = 3
    """Restarts of a started server that died or hangs, before it is given up. A server that lasts is forgiven them."""
    health_timeout_s: float = 120.0
    """A server that gives no sign of life for so long hangs, and gets no more requests.

    One that this run started and that does not answer /health_generate for so long is killed and restarted.
    """
    server_args: list[str] = field(default_factory=list)
    """Further command-line arguments of each started server."""
    token_file: str = ""
    """File of mode 600 with the token that the servers ask for; made where there is none.

    Empty: `token` in run.folder, or with a registry RUN.token there. Servers that a user starts are given the same file
    (`megatron-rl serve --token-file`); one with SGLang's --api-key expects that key to be in it.
    """
    devices: list[str] = field(default_factory=list)
    """GPUs of this host for the started servers, as CUDA_VISIBLE_DEVICES names them: as many for each as its --tp.

    Empty: `megatron-rl launch` chooses them, and otherwise a server sees what the trainer's first rank sees.
    """
    colocated: bool = False
    """Started servers and trainer take turns on the same devices: servers have no weights and no cache while the
    trainer works, and its models wait in host memory while they generate. Synchronous runs."""
    max_concurrent_episodes: int = 256
    max_staleness: int = 0
    """Most policy versions between sampling and training; 0 is synchronous. A step publishes one version, whatever its
    number of updates."""
    stale: str = "drop"
    """A group with a token older than that when it would be trained: drop (its prompt is sampled again), mask (such
    tokens are not trained) or keep. Admission makes them rare: replies that take longer than the steps they span."""
    max_uniform_resamples: int = 0
    """Dynamic sampling (DAPO): groups without variance of rewards are replaced by those of other prompts, at most so
    many times a step's groups; the rest is trained as it is. 0 replaces none."""
    oversample: float = 1.0
    """Synchronous runs: start so many episodes for each that a step takes, and train the first ones to finish. The
    others' prompts are the first of the next step, which waits for them."""
    interruption: str = "retract"
    """What new weights do to replies under way, which all go on with them afterwards.

    abort ends them and sends what they have again; retract puts them back into the server's queue; in_place freezes
    them with the keys of the old weights.
    """
    max_cache_age: int = 0
    """Publications that a server's prefix cache may outlive; 0 flushes it at each."""
    request_timeout_s: float = 600.0
    start_timeout_s: float = 300.0
    publication: str = "group"
    """How new weights reach the servers: `group`, a process group (NCCL or gloo); `ipc`, memory that servers on the
    host of the first rank share with it (CUDA IPC, or /dev/shm); `delta`, what changed since the last time, over HTTP,
    for slow links to embedded servers; or `disk`, a folder under run.folder.

    Servers that are given in `servers` must be able to read that folder. delta keeps a copy of the weights on the host
    of the first rank.
    """
    episode_attempts: int = 3
    """Tries of an episode before its prompt is given up and counted."""
    journal_replies: bool = False
    """Runs with checkpoints: a killed run keeps the finished replies of unfinished episodes too, not only whole groups.

    For long replies and many turns. The journal doubles in size.
    """

    def __post_init__(self) -> None:
        for key in ("workflow", "reward"):
            value = getattr(self, key)
            module, _, name = value.partition(":")
            check("rollout", **{key: (value, bool(module and name), "must be an import path package.module:name")})
        backends = ("auto", "embedded", "sglang")
        check(
            "rollout",
            backend=(self.backend, self.backend in backends, f"must be one of {', '.join(backends)}"),
            registry=(
                self.registry,
                not (self.registry and self.servers),
                "must be empty where rollout.servers names them; give one of the two",
            ),
            server_count=(self.server_count, self.server_count >= 1, "must be at least 1"),
            server_args=(
                "..." if (names_key := any("api-key" in argument for argument in self.server_args)) else "",
                not names_key,
                "names a key, which every user of the host could see; put it into the file rollout.token_file",
            ),
            publication=(
                self.publication,
                self.publication in ("group", "ipc", "delta", "disk")
                and not (self.publication == "delta" and self.backend == "sglang"),
                "must be group, ipc, delta or disk; SGLang does not take deltas",
            ),
            server_restarts=(self.server_restarts, self.server_restarts >= 0, "must be at least 0; 0 restarts none"),
            health_timeout_s=(self.health_timeout_s, self.health_timeout_s > 0, "must be above 0 seconds"),
            interruption=(
                self.interruption,
                self.interruption in ("abort", "retract", "in_place"),
                "must be abort, retract or in_place",
            ),
            max_cache_age=(
                self.max_cache_age,
                self.max_cache_age >= (self.interruption == "in_place"),
                "must be at least 0; 1 with rollout.interruption = in_place, which keeps the cache",
            ),
            max_concurrent_episodes=(
                self.max_concurrent_episodes,
                self.max_concurrent_episodes >= 1,
                "must be at least 1",
            ),
            max_staleness=(self.max_staleness, self.max_staleness >= 0, "must be at least 0; 0 is synchronous"),
            max_uniform_resamples=(
                self.max_uniform_resamples,
                0 <= self.max_uniform_resamples <= 50,
                "must be in [0, 50]; DAPO takes 10",
            ),
            oversample=(
                self.oversample,
                1 <= self.oversample <= 2 and (self.oversample == 1 or self.max_staleness == 0),
                "must be in [1, 2], and 1 where max_staleness > 0, which runs ahead as it is",
            ),
            stale=(self.stale, self.stale in ("drop", "mask", "keep"), "must be drop, mask or keep"),
            request_timeout_s=(self.request_timeout_s, self.request_timeout_s > 0, "must be above 0 seconds"),
            start_timeout_s=(self.start_timeout_s, self.start_timeout_s > 0, "must be above 0 seconds"),
            episode_attempts=(self.episode_attempts, self.episode_attempts >= 1, "must be at least 1"),
            colocated=(self.colocated, *self._may_be_colocated()),
            devices=(
                self.devices,
                not self.devices or (self.starts_servers and len(self.devices) == self.server_gpus),
                f"must name rollout.server_count({self.server_count}) x --tp({self.gpus_per_server}) GPUs for servers "
                f"that this run starts; name as many, or leave the key out",
            ),
        )

    def _may_be_colocated(self) -> tuple[bool, str]:
        """Whether the servers can take turns with the trainer, or are not to; and if neither, why not."""
        for key in ("servers", "registry", "router"):
            if value := getattr(self, key):
                return (
                    not self.colocated,
                    f"needs servers that this run starts, and rollout.{key} = {value!r}; empty it",
                )
        if self.max_staleness > 0:
            rule = f"trainer and servers take turns, and rollout.max_staleness = {self.max_staleness} has both work at"
            return not self.colocated, f"{rule} once; set it to 0, or give servers devices of their own"
        if self.publication == "delta":
            rule = "servers keep no weights that rollout.publication = delta could change; set it to ipc"
            return not self.colocated, rule
        return True, ""

    def check_for_gpus(self) -> None:
        """Raise ValueError for what works without GPUs only."""
        if self.colocated and self.publication == "group":
            raise ValueError(
                "rollout.publication = 'group': NCCL takes a GPU once, and rollout.colocated = true has a server on "
                "the trainer's; set rollout.publication=ipc."
            )

    @property
    def starts_servers(self) -> bool:
        """Whether the run starts its servers itself."""
        return not (self.servers or self.registry)

    @property
    def gpus_per_server(self) -> int:
        """SGLang's --tp in server_args."""
        given = self.server_option("--tp", "--tp-size", "--tensor-parallel-size") or "1"
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"rollout.server_args: --tp {given}: must be a number of GPUs of at least 1; correct it.")
        return int(given)

    @property
    def server_gpus(self) -> int:
        """GPUs of all started servers together."""
        return self.server_count * self.gpus_per_server

    def server_option(self, *names: str) -> str | None:
        """The value of the last of these options in server_args, which counts: `--tp 2` or `--tp=2`."""
        found = None
        for word, following in itertools.zip_longest(self.server_args, self.server_args[1:]):
            name, equals, value = word.partition("=")
            if name in names:
                found = value if equals else following
        return found

    @property
    def takes_prompts_in_order(self) -> bool:
        """Every step has the prompts that come next: none is sampled ahead, replaced or put off."""
        return self.max_staleness == 0 and self.max_uniform_resamples == 0 and self.oversample == 1


@dataclass(kw_only=True)
class DataConfig:
    train: str = "???"
    """A .jsonl file of prompts, or the import path of a function that returns a list of them."""
    train_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function."""
    evaluation: str = ""
    """Held-out prompts, named like `train`; empty evaluates nothing."""
    evaluation_args: dict[str, Any] = field(default_factory=dict)
    shuffle: bool = True


@dataclass(kw_only=True)
class WarmStartConfig:
    """Supervised training on the prompts' own answers before RL begins."""

    updates: int = 0
    """0 leaves it out."""
    prompts_per_update: int = 128
    lr: float = 2e-3
    stop_at_reward: float = 1.0
    """End early once the mean reward of sampled replies to held-out prompts reaches this."""
    check_every_updates: int = 20
    folder: str = ""
    """Keep the result here as a HF folder and start from it when the same warm start is asked for again.

    Empty repeats it.
    """

    def __post_init__(self) -> None:
        check(
            "warm_start",
            updates=(self.updates, self.updates >= 0, "must be at least 0; 0 leaves the warm start out"),
            prompts_per_update=(self.prompts_per_update, self.prompts_per_update >= 1, "must be at least 1"),
            lr=(self.lr, self.lr > 0, "must be above 0"),
            stop_at_reward=(self.stop_at_reward, 0 < self.stop_at_reward <= 1, "must be in (0, 1]"),
            check_every_updates=(self.check_every_updates, self.check_every_updates >= 1, "must be at least 1"),
        )


@dataclass(kw_only=True)
class RunConfig:
    folder: str = "runs/default"
    """Where metrics, report and weights are written."""
    import_from: list[str] = field(default_factory=list)
    """Packages or modules beside megatron_rl from which a config may import: workflow, reward, data, advantage, loss.

    A module of your own, such as my_rewards.py in a folder on PYTHONPATH: [my_rewards].
    """
    seed: int = 1
    steps: int = 100
    evaluate_every_steps: int = 0
    """0 evaluates before the first and after the last step only."""
    save_every_steps: int = 0
    """HF weights under folder/step-N; 0 saves after the last step only."""
    save_at_end: bool = True
    checkpoint_every_steps: int = 0
    """What `--resume` continues from, under folder/checkpoints; 0 writes none."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay."""
    grace_s: float = 60.0
    """Seconds after SIGTERM or SIGUSR1 to finish the step or leave it and save; a run without checkpoints just ends."""
    phase_timeout_s: float = 3600.0
    """Longest that one phase of a step (rollout, update, publish, ...) may take; then every rank says where it stands,
    and the run ends: with a checkpoint where only rollouts are waited for."""
    threads_per_rank: int = 0
    """CPU threads of one trainer rank; 0 shares the cores evenly among the ranks of this host."""
    offload: bool = False
    """Policy and reference take turns in device memory; the one that is not used waits in host memory."""

    def __post_init__(self) -> None:
        wrong = [name for name in self.import_from if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name)]
        check(
            "run",
            import_from=(self.import_from, not wrong, "each must be a module's name, e.g. my_project or my.rewards"),
        )
        for key in ("grace_s", "phase_timeout_s"):
            value = getattr(self, key)
            check("run", **{key: (value, value > 0, "must be above 0 seconds")})
        for key in ("steps", "keep_checkpoints"):
            value = getattr(self, key)
            check("run", **{key: (value, value >= 1, "must be at least 1")})
        for key in ("evaluate_every_steps", "save_every_steps", "checkpoint_every_steps", "threads_per_rank"):
            value = getattr(self, key)
            check("run", **{key: (value, value >= 0, "must be at least 0")})


@dataclass(kw_only=True)
class TelemetryConfig:
    """Where a run's numbers go besides its own folder."""

    loggers: list[str] = field(default_factory=list)
    """Any of tensorboard, wandb, trackio."""
    project: str = "megatron_rl"
    """The run's project in services that have them; the run is called as its folder."""
    prometheus: str = ""
    """host:port on which rank 0 offers the newest numbers, e.g. 127.0.0.1:9464; port 0 takes a free one, '' none."""
    trace_steps: list[int] = field(default_factory=list)
    """Steps, counted from 0, of which trace/step-N.json.gz shows what trainer ranks, rollouts and servers did when: for
    ui.perfetto.dev."""

    def __post_init__(self) -> None:
        known = ("tensorboard", "wandb", "trackio")
        wrong = [name for name in self.loggers if name not in known]
        check(
            "telemetry",
            loggers=(self.loggers, not wrong, f"each must be one of {', '.join(known)}; leave the others out"),
            prometheus=(
                self.prometheus,
                not self.prometheus or bool(re.fullmatch(r".+:\d{1,5}", self.prometheus)),
                "must be host:port, e.g. 127.0.0.1:9464",
            ),
            trace_steps=(
                self.trace_steps,
                all(step >= 0 for step in self.trace_steps),
                "each must be at least 0, the first step",
            ),
        )


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


@dataclass(kw_only=True)
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    algo: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward_shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    run: RunConfig = field(default_factory=RunConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Passed to megatron.core's TransformerConfig by its own field names."""

    def __post_init__(self) -> None:
        batch, samples = self.batch, self.generation.n_samples
        if batch.prompts_per_step * samples < batch.updates_per_step:
            raise ValueError(
                f"batch.updates_per_step = {batch.updates_per_step}: a step has batch.prompts_per_step x "
                f"generation.n_samples = "
                f"{batch.prompts_per_step} x {samples} trajectories, and every update needs one at least; lower it."
            )
        if self.algo.advantage in COMPARE_GROUP and samples < 2:
            raise ValueError(
                f"generation.n_samples = {samples}: algo.advantage = {self.algo.advantage} compares the replies of one "
                f"prompt and needs 2 or more; raise it, or set algo.advantage=reinforce."
            )
        if self.has_critic and self.algo.advantage_args:
            raise ValueError(
                f"algo.advantage_args = {self.algo.advantage_args}: gae's options are critic.discount, "
                f"critic.trace_decay and critic.level; set them there."
            )
        if self.reward_shaping.overlong_buffer > self.generation.max_new_tokens:
            raise ValueError(
                f"reward_shaping.overlong_buffer = {self.reward_shaping.overlong_buffer}: every reply of "
                f"generation.max_new_tokens = {self.generation.max_new_tokens} would be overlong; lower it."
            )
        if self.rollout.max_uniform_resamples > 0 and samples < 2:
            raise ValueError(
                f"rollout.max_uniform_resamples = {self.rollout.max_uniform_resamples}: with generation.n_samples = 1 "
                f"every group is uniform; raise it, or leave the key out."
            )
        if self.rollout.journal_replies and self.run.checkpoint_every_steps == 0:
            raise ValueError(
                "rollout.journal_replies = true: a run with run.checkpoint_every_steps = 0 is not resumed and keeps no "
                "journal; set that, or leave the key out."
            )
        if self.algo.advantage == "remax" and "ReMax" not in self.rollout.workflow:
            raise ValueError(
                f"rollout.workflow = {self.rollout.workflow!r}: algo.advantage = remax needs a workflow that reports "
                f"greedy_reward; use megatron_rl.rollout.workflows:ReMaxWorkflow."
            )
        if self.critic.warmup_steps >= self.run.steps:
            raise ValueError(
                f"critic.warmup_steps = {self.critic.warmup_steps}: the policy would not be trained in any of the "
                f"run.steps = {self.run.steps}; lower it."
            )
        updates = (self.run.steps - self.critic.warmup_steps) * batch.updates_per_step
        if updates < self.optimizer.warmup_updates:
            raise ValueError(
                f"optimizer.warmup_updates = {self.optimizer.warmup_updates}: the policy has only (run.steps - "
                f"critic.warmup_steps) x batch.updates_per_step = {updates} updates; lower it."
            )
        if not self.has_critic and self.critic != CriticConfig():
            raise ValueError(
                f"critic: algo.advantage = {self.algo.advantage!r} has no critic, and its options are set; set "
                f"algo.advantage=gae, or leave the section out."
            )

    @property
    def has_critic(self) -> bool:
        return self.algo.advantage == "gae"

    @property
    def advantage_args(self) -> dict[str, Any]:
        """The estimator's options, wherever they are set."""
        if not self.has_critic:
            return self.algo.advantage_args
        names = ("discount", "trace_decay", "level")
        return {name: getattr(self.critic, name) for name in names}

    @property
    def critic_engine(self) -> EngineConfig:
        """The critic's engine: the policy's options but for model, layout and optimizer."""
        critic, own = self.critic, ModelConfig(path=self.critic.model, dtype=self.model.dtype)
        model = own if critic.model else self.model
        return dataclasses.replace(self.actor, model=model, parallel=critic.parallel, optimizer=critic.optimizer)

    @property
    def reward_engine(self) -> EngineConfig:
        model = ModelConfig(path=self.reward_model.path, dtype=self.model.dtype)
        return dataclasses.replace(self.actor, model=model, parallel=self.reward_model.parallel)

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError where a layout does not divide the number of processes."""
        self.parallel.check_world_size(world_size)
        if self.has_critic:
            with as_part_of("critic.parallel"):
                self.critic.parallel.check_world_size(world_size)
        if self.reward_model.path:
            with as_part_of("reward_model.parallel"):
                self.reward_model.parallel.check_world_size(world_size)

    @property
    def actor(self) -> EngineConfig:
        return EngineConfig(
            model=self.model,
            parallel=self.parallel,
            optimizer=self.optimizer,
            tokens_per_microbatch=self.batch.tokens_per_microbatch,
            allow_longer_sequences=self.batch.allow_longer_sequences,
            share_prompts=self.batch.share_prompts,
            seed=self.run.seed,
            publication=self.rollout.publication,
            publication_folder=f"{self.run.folder}/published",
        )

    def to_yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.structured(self))


def load_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Read an experiment file, apply `key=value` overrides and check everything. Raises ValueError."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"config = {str(path)!r}: no such file; give an experiment file such as configs/demo.yaml.")
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"config = {str(path)!r}: must hold sections such as model:, batch: and run:, not a list.")
    merged = loaded
    try:
        for override in overrides or []:
            key, equals, text = override.partition("=")
            if not equals:
                raise ValueError(f"override {override!r}: must be key=value, e.g. batch.prompts_per_step=32.")
            # Set and not merged, so that data.train_args={} empties it.
            value = OmegaConf.select(OmegaConf.from_dotlist([override]), key) if text else ""
            OmegaConf.update(merged, key, value, merge=False, force_add=True)
        refuse_unknown_keys(TrainConfig, merged, "")
        config = OmegaConf.merge(OmegaConf.structured(TrainConfig), merged)
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ValueError(
                f"{missing[0]}: has no value; set it in {path} or as {missing[0]}=... on the command line."
            )
        for name in (name for name in SECTIONS if "." in name):
            with as_part_of(name):
                OmegaConf.to_object(OmegaConf.select(config, name))
        checked = OmegaConf.to_object(config)
        assert isinstance(checked, TrainConfig)
        return checked
    except OmegaConfBaseException as error:
        key = str(error.full_key or error.key)
        found = OmegaConf.select(merged, key)
        reason = str(error).splitlines()[0]
        raise ValueError(f"{key} = {found!r}: {reason}; correct it in {path} or on the command line.") from error


@contextmanager
def as_part_of(name: str) -> Iterator[None]:
    """Let an error of a section that is known under a shorter name as well, such as `parallel`, say this one."""
    short = name.rpartition(".")[2]
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(rf"(?<![\w.]){short}(?=[.:])", name, str(error))) from error


def refuse_unknown_keys(schema: type, given: DictConfig, prefix: str) -> None:
    """Raise ValueError for the first key that the dataclass lacks, with the nearest one that it has."""
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for key in map(str, given):
        name = f"{prefix}{key}"
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"the keys here are {', '.join(fields)}."
            raise ValueError(f"{name} = {OmegaConf.select(given, str(key))!r}: unknown key; {hint}")
        section = SECTIONS.get(name)
        if section is not None:
            value = given[key]
            if not isinstance(value, DictConfig):
                raise ValueError(
                    f"{name} = {value!r}: must be a section with keys "
                    f"{', '.join(f.name for f in dataclasses.fields(section))}."
                )
            refuse_unknown_keys(section, value, f"{name}.")


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "optimizer": OptimizerConfig,
    "batch": BatchConfig,
    "generation": GenerationConfig,
    "algo": AlgorithmConfig,
    "reward_shaping": RewardShapingConfig,
    "correction": CorrectionConfig,
    "critic": CriticConfig,
    "critic.parallel": ParallelConfig,
    "critic.optimizer": OptimizerConfig,
    "reward_model": RewardModelConfig,
    "reward_model.parallel": ParallelConfig,
    "rollout": RolloutConfig,
    "data": DataConfig,
    "warm_start": WarmStartConfig,
    "run": RunConfig,
    "telemetry": TelemetryConfig,
}
