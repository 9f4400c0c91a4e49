"""What is learned from trajectories: estimator and loss, reward shaping, corrections, critic and reward model; or from
answers, or pairs of replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.model_section import OptimizerConfig, ParallelConfig
from megatron_rl.config.rules import check

ESTIMATORS = (
    *("group_norm", "dr_grpo", "rloo", "reinforce", "reinforce++", "reinforce++-baseline", "remax", "opo", "cpgd"),
    *("maxrl", "pass@k", "gae"),
)
"""Names in the catalogue of megatron_rl.algo, which this module does not import; tests compare them."""


COMPARE_GROUP = ("group_norm", "dr_grpo", "rloo", "reinforce++-baseline", "opo", "cpgd", "maxrl", "pass@k")


LOSSES = ("ppo_clip", "gspo", "cispo", "sapo", "reinforce", "m2po", "cpgd", "dppo")


PAIR_LOSSES = ("dpo", "ipo", "simpo", "bradley_terry")


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
            clip_low=(
                self.clip_low,
                0 < self.clip_low <= 1,
                "must be in (0, 1]; PPO's is 0.2, and 1 sets no lower bound, as in CISPO's paper",
            ),
            clip_high=(
                self.clip_high,
                self.clip_high >= self.clip_low or (self.clip_low == 1 and self.clip_high > 0),
                f"must be at least clip_low = {self.clip_low}, or above 0 with clip_low = 1",
            ),
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

    @property
    def penalizes_reward(self) -> bool:
        """Whether each token's reward is less for its divergence from the reference."""
        return self.kl_in == "reward" and self.kl_coefficient > 0


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
    """What a reply of generation.max_new_tokens loses (DAPO's soft overlong punishment, arXiv 2503.14476). A dialogue
    loses it for its longest reply."""
    per_token: bool = False
    """Divide a trajectory's reward by the tokens that the model wrote in it."""
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
    the current version (of all tokens where there are none). 0 stops only where a difference is not finite."""

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
class PreferenceConfig:
    """Training on pairs of replies in place of RL, by `megatron-rl preferences` or, with more ranks, `launch`.

    A step is one update by batch.prompts_per_step pairs.
    """

    loss: str = ""
    """dpo, ipo or simpo train a policy, bradley_terry a reward model; or the import path of your own. Empty: RL."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that loss."""

    def __post_init__(self) -> None:
        is_known, rule = _is_known(self.loss, PAIR_LOSSES)
        check("preference", loss=(self.loss, not self.loss or is_known, rule))


@dataclass(kw_only=True)
class SupervisedConfig:
    """Training on answers in place of RL, by `megatron-rl sft` or, with more ranks, `launch`.

    A step is one update by batch.prompts_per_step rows.
    """

    answer: str = ""
    """The rows' column with the text of the answer; or messages: the answer is the content of a dialogue's last one,
    which must be an assistant's, and the prompt is what comes before. Empty: no such run."""
