"""Options of the algorithm: advantage estimator, loss, reward shaping, off-policy correction, critic and reward model.
Also the sections for supervised and preference training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.model_section import OptimizerConfig, ParallelConfig
from megatron_rl.config.rules import Section, above, at_least, name_or_import_path, one_of, ruled, within

ESTIMATORS = (
    *("group_norm", "dr_grpo", "rloo", "reinforce", "reinforce++", "reinforce++-baseline", "remax", "opo", "cpgd"),
    *("otb", "maxrl", "pass@k", "gdpo", "gae", "none", "turn_norm", "gigpo", "agent_norm"),
)
"""Names in the catalogue of megatron_rl.algo. This module does not import it; tests compare the two lists."""
COMPARE_GROUP = (
    *("group_norm", "dr_grpo", "rloo", "reinforce++-baseline", "opo", "cpgd", "otb", "maxrl", "pass@k", "gdpo"),
    *("turn_norm", "gigpo", "agent_norm"),
)
"""Estimators that compare the replies to one prompt, and therefore need several of them."""
COMPARE_REWARDS = tuple(it for it in COMPARE_GROUP if it not in ("gdpo", "turn_norm", "gigpo"))
"""Estimators whose advantages are all 0 if a prompt's rewards are equal. Other members of COMPARE_GROUP compare reward
parts or turns."""
LOSSES = (
    "ppo_clip",
    "gspo",
    "cispo",
    "sapo",
    "reinforce",
    "m2po",
    "cpgd",
    "dppo",
    "gmpo",
    "topr",
    "clip_cov",
    "kl_cov",
)
PAIR_LOSSES = ("dpo", "ipo", "kto", "simpo", "bradley_terry")


@dataclass(kw_only=True)
class AlgorithmConfig(Section, name="algo"):
    """Advantage estimator, policy loss, KL term and entropy bonus.

    `megatron-rl algorithms` lists estimators and losses. docs/algorithms.md explains which options apply to which.
    """

    advantage: str = name_or_import_path(ESTIMATORS, kind="estimator", default="group_norm")
    """An estimator from the catalogue, such as group_norm (GRPO) or gae (with a critic), or the import path of your
    own."""
    advantage_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that estimator. gae's options are in the section critic instead."""
    advantage_mean: str = one_of("none", "group", "batch", "", default="")
    """Mean subtracted from the estimator's result: none, the group's or the batch's. Empty: the estimator's default."""
    advantage_std: str = one_of("none", "group", "batch", "", default="")
    """Standard deviation by which the estimator's result is divided: none, the group's or the batch's. Empty: the
    estimator's default."""
    advantage_clip: float = at_least(0, default=0.0, hint="0 sets no bound")
    """Advantages are clipped to [-advantage_clip, advantage_clip]; 0 disables clipping."""
    loss: str = name_or_import_path(LOSSES, kind="loss", default="ppo_clip")
    """A policy loss from the catalogue, or the import path of your own."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that loss."""
    clip_low: float = within("(0, 1]", default=0.2, hint="PPO's is 0.2, and 1 sets no lower bound, as in CISPO's paper")
    clip_high: float = 0.2
    """A value above clip_low gives DAPO's clip-higher."""
    dual_clip: float = ruled("must be 0 (off), or above 1", lambda it: it == 0 or it > 1, default=0.0)
    """Bounds the loss of a token with a negative advantage to this multiple of |advantage|. 3 is usual; 0 is off."""
    aggregation: str = one_of("token_mean", "sequence_mean", "sequence_sum", "constant", default="token_mean")
    """token_mean: mean over all trained tokens. The others average over trajectories: each trajectory's mean
    (sequence_mean), its sum (sequence_sum), or its sum divided by aggregation_length (constant, as in Dr. GRPO)."""
    aggregation_length: int = at_least(0, default=0)
    """Number of tokens to divide by; only for aggregation = constant."""
    high_entropy_share: float = within("(0, 1]", default=1.0, hint="1 trains all tokens")
    """Share of tokens that keep their advantage, namely those of highest entropy. A value below 1 costs an extra
    forward pass."""
    high_entropy_level: str = one_of("batch", "sequence", default="batch")
    """Whether the share is taken over the whole batch's tokens or within each sequence."""
    kl_coefficient: float = at_least(0, default=0.0)
    """Weight of the KL term against the frozen reference model. A value above 0 loads a second engine."""
    kl_estimator: str = one_of("k1", "k2", "k3", "unbiased", default="k3")
    """Estimator of the KL divergence. unbiased (only with kl_in = loss) is k3 times the ratio p / p(proximal),
    including the ratio's gradient."""
    kl_in: str = one_of("loss", "reward", default="loss")
    """loss: the term is added to the loss and differentiated. reward: it is subtracted from each token's reward."""
    kl_target: float = at_least(0, default=0.0, hint="0 keeps the coefficient")
    """With kl_in = reward: target KL per token in nats, to which the coefficient is adapted; 0 keeps it fixed."""
    kl_horizon: float = above(0, "trajectories", default=10_000.0)
    """Number of trajectories over which an adaptive coefficient changes by at most a fifth."""
    positive_weight: float = at_least(0, default=0.0, hint="0 disables the term")
    """Weight of an extra -log p term on trajectories with at least positive_reward (VAPO, arXiv 2504.05118, takes 0.1).
    The term is averaged over their tokens, or over the trajectories if `aggregation` averages over trajectories. 0
    disables it."""
    positive_reward: float = 1.0
    """Minimum reward, before shaping, for a trajectory to count as positive."""
    entropy_coefficient: float = at_least(0, default=0.0)
    entropy_target: float = at_least(0, default=0.0, hint="0 keeps the weight")
    """Target entropy per token in nats: entropy_coefficient is adapted to keep the entropy above it. 0 keeps the
    coefficient fixed."""
    entropy_step: float = above(0, default=0.005)
    """Change of an adaptive entropy coefficient per step."""
    routing_replay: str = one_of("off", "experts", "experts_and_weights", default="off")
    """Route each of the policy's tokens through the experts that the server chose for it (R3, arXiv 2510.11370).

    experts: weight those experts by the policy's own router. experts_and_weights: use the server's weights with the
    gradient of the policy's own weights; this needs servers that the run starts.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # clip_low = 1 means no lower bound on the ratio, so clip_high may then be smaller.
        if not (self.clip_high >= self.clip_low or (self.clip_low == 1 and self.clip_high > 0)):
            self.refuse("clip_high", f"must be at least clip_low = {self.clip_low}, or above 0 with clip_low = 1")
        # Other losses have no clipped term to bound.
        if self.dual_clip and self.loss not in ("ppo_clip", "gspo"):
            self.refuse("dual_clip", "must be 0 (off), or above 1 with algo.loss = ppo_clip or gspo")
        if (self.aggregation_length > 0) != (self.aggregation == "constant"):
            rule = (
                "must be at least 1 with algo.aggregation = constant, e.g. generation.max_new_tokens, and 0 elsewhere"
            )
            self.refuse("aggregation_length", rule)
        # The estimator is unbiased through its gradient, and a reward has none.
        if self.kl_estimator == "unbiased" and self.kl_in != "loss":
            self.refuse("kl_estimator", "must be k1, k2, k3, or, with algo.kl_in = loss, unbiased")
        if self.kl_target > 0 and not self.penalizes_reward:
            rule = "must be 0 (fixed), or above 0 with algo.kl_in = reward and algo.kl_coefficient > 0"
            self.refuse("kl_target", rule)

    @property
    def learns_from_equal_rewards(self) -> str:
        """Setting that lets a group with equal rewards still contribute to training; empty if there is none.

        User-defined estimators are not considered.
        """
        if self.advantage in ESTIMATORS and self.advantage not in COMPARE_REWARDS:
            return f"algo.advantage = {self.advantage}"
        if self.advantage_mean in ("none", "batch") and self.advantage in ("group_norm", "dr_grpo"):
            return f"algo.advantage_mean = {self.advantage_mean}"
        terms = ("kl_coefficient", "positive_weight", "entropy_coefficient", "entropy_target")
        return next((f"algo.{name} = {getattr(self, name):g}" for name in terms if getattr(self, name) > 0), "")

    @property
    def penalizes_reward(self) -> bool:
        """True if each token's reward is reduced by its divergence from the reference."""
        return self.kl_in == "reward" and self.kl_coefficient > 0


@dataclass(kw_only=True)
class RewardShapingConfig(Section, name="reward_shaping"):
    """Changes to the rewards before advantages are computed, applied in the order of the fields. A KL penalty
    (algo.kl_in = reward) is applied last."""

    cut_off_share: float = within("[0, 1]", default=1.0, hint="1 changes nothing")
    """Share of its reward that a reply keeps if it reached generation.max_new_tokens, whatever its last token is. For a
    dialogue the longest reply decides. NeMo-RL calls this the penalty for not stopping properly."""
    overlong_buffer: int = at_least(0, "tokens", default=0)
    """Tokens before generation.max_new_tokens over which the overlong penalty grows; 0 disables the penalty."""
    overlong_penalty: float = above(0, default=1.0)
    """Amount subtracted from the reward of a reply of length generation.max_new_tokens (DAPO's soft overlong
    punishment, arXiv 2503.14476). For a dialogue the longest reply decides."""
    per_token: bool = False
    """Divide a trajectory's reward by its number of model-generated tokens."""
    running: str = one_of("none", "std", "mean_std", default="none")
    """Normalize by statistics of all rewards of the run so far. std: divide by the standard deviation. mean_std:
    subtract the mean first."""
    clip: float = at_least(0, default=0.0, hint="0 sets no bound")
    """Rewards are clipped to [-clip, clip]; 0 disables clipping."""


@dataclass(kw_only=True)
class CorrectionConfig(Section, name="correction"):
    """Correction for tokens sampled by a different policy: an older version, or a server that computes differently.

    Decoupled PPO (arXiv 2505.24298) has three policies. The behavior policy sampled the token. The proximal policy is
    the trainer's at the start of the step. The trained policy's ratio to the proximal policy is clipped.
    """

    proximal: str = one_of("recompute", "loglinear", "behavior", default="recompute")
    """How to get the proximal log-probabilities. recompute: one extra forward pass before the first update, over the
    tokens of the later updates. The first update's own forward pass computes them for its tokens. loglinear: no extra
    pass; the log-probabilities are interpolated between the behavior and the trained policy's, by the share of the
    updates since sampling that came before this step. behavior: use the behavior policy itself, as in plain PPO;
    `weight` must then be off."""
    weight: str = one_of("off", "clamp", "mask", default="off")
    """Importance weight p(proximal) / p(behavior), without gradient. clamp: limit it to [low, high] (truncated
    importance sampling). mask: do not train tokens with a weight outside that range (IcePop, arXiv 2510.18855), or
    whole sequences if `level` is sequence or product. off: treat every token as sampled by the proximal policy."""
    level: str = one_of("token", "sequence", "product", default="token")
    """token: one weight per token. sequence: one weight per sequence, the geometric mean over its trained tokens.
    product: one weight per sequence, the product of its tokens' weights, i.e. the true importance weight."""
    low: float = within("[0, 1]", default=0.0, hint="a weight of 1 is no mismatch")
    high: float = at_least(1, default=5.0, hint="a weight of 1 is no mismatch")
    negative_bound: float = at_least(0, default=0.0, hint="0 keeps all")
    """Set the advantages of a trajectory to 0 if they are negative and the mean of log p(behavior) - log p over its
    trained tokens is above this, in nats. The policy need not unlearn what it no longer says (DeepSeek-V3.2, arXiv
    2512.02556). If advantages differ per token, their sum over the trajectory decides. 0 disables this."""
    reject: str = one_of("off", "k1", "k2", "k3", default="off")
    """Also reject tokens or trajectories far from the policy that sampled them, by an estimate of KL(behavior ||
    proximal). With w = p(proximal) / p(behavior): k1 = -log w, k2 = (log w)^2 / 2, k3 = w - 1 - log w, as in verl's
    correction."""
    reject_level: str = one_of("token", "mean", "sum", "max", default="token")
    """token: reject single tokens by their own estimate. mean, sum, max: reject whole trajectories by that statistic
    over their trained tokens."""
    reject_bound: float = at_least(0, default=0.0)
    """Threshold in nats; larger estimates are rejected. For k1 the absolute value is compared, or with max the largest
    absolute value."""
    alarm: float = at_least(0, default=0.0, hint="0 never stops")
    """Stop the run if trainer and server disagree by more than this: mean |log p - log q|, in nats, over the step's
    tokens of the current version. If there are no such tokens, all of the step's tokens count. 0 stops only if the
    difference is NaN or infinite."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The weight compares these two policies, which are then identical.
        if self.proximal == "behavior" and self.weight != "off":
            rule = "correction.proximal = behavior makes every weight 1; set it to off, or take another proximal policy"
            self.refuse("weight", rule)
        if self.proximal == "behavior" and self.reject != "off":
            rule = (
                "correction.proximal = behavior makes every estimate 0; set it to off, or take another proximal policy"
            )
            self.refuse("reject", rule)
        if (self.reject_bound > 0) != (self.reject != "off"):
            self.refuse("reject_bound", "must be above 0 with correction.reject = k1, k2 or k3, and 0 without")

    @property
    def leaves_out(self) -> bool:
        """True if tokens may lose their advantage because they are too far from the policy that sampled them."""
        return self.negative_bound > 0 or self.reject != "off"

    @property
    def leaves_out_sequences(self) -> bool:
        """True if whole trajectories may lose their advantage for being too far from the policy that sampled them."""
        return self.negative_bound > 0 or (self.reject != "off" and self.reject_level != "token")


@dataclass(kw_only=True)
class CriticConfig(Section, name="critic"):
    """The value model of algo.advantage = gae, which has its own layout and optimizer."""

    model: str = ""
    """Hugging Face folder of a language model, or of a sequence classification model with one label.

    Empty: start from the policy as it is when RL begins. If the model has no scalar head, the first values are 0.
    """
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    discount: float = within("(0, 1]", default=1.0, hint="1 discounts nothing")
    """Discount factor per trained token or turn."""
    trace_decay: float = within("[0, 1]", default=1.0)
    """GAE's lambda. 1 sums up all later rewards. 0 uses one reward, then the critic's value of the next state."""
    level: str = one_of("token", "turn", default="token")
    """What an advantage belongs to: a token, or a turn (an unbroken run of trained tokens)."""
    decoupled: bool = False
    """Use trace_decay only for the policy's advantages, and 1 for the critic's targets (VAPO, arXiv 2504.05118)."""
    length_factor: float = at_least(0, default=0.0, hint="0 uses trace_decay for all replies")
    """If above 0, trace_decay is 1 - 1 / (length_factor l) for a trajectory of l trained tokens or turns. VAPO uses
    0.05."""
    value_clip: float = at_least(0, default=0.2, hint="0 sets no bound")
    """Maximum change of a value in one step; 0 sets no bound."""
    warmup_steps: int = at_least(0, default=0)
    """Initial steps of the run that train only the critic and leave the policy unchanged."""


@dataclass(kw_only=True)
class RewardModelConfig(Section, name="reward_model"):
    """A frozen model that scores whole sequences, in addition to the workflow's own reward."""

    path: str = ""
    """Hugging Face folder of a sequence classification model with one label and the policy's tokenizer. Empty: none."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    coefficient: float = 1.0
    """A trajectory's reward is the workflow's reward plus this times the score."""


@dataclass(kw_only=True)
class PreferenceConfig(Section, name="preference"):
    """Training on pairs of replies instead of RL, with `megatron-rl preferences` or, for more ranks, `launch`.

    Each step is one update on batch.prompts_per_step pairs.
    """

    loss: str = name_or_import_path(PAIR_LOSSES, kind="pair_loss", default="")
    """dpo, ipo, kto and simpo train a policy, bradley_terry trains a reward model. The import path of your own loss is
    also valid. Empty: RL."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that loss."""


@dataclass(kw_only=True)
class DemonstrationsConfig(Section, name="demonstrations"):
    """Imitation learning mixed into RL steps, on rows with answers and on tokens that a workflow marks. A workflow
    stores the weights of marked tokens in Trajectory.tokens["demonstrated"]."""

    weight: float = at_least(0, default=0.0, hint="0 disables imitation")
    """Weight of the imitation term, the mean of -log p over an update's demonstrated tokens."""
    source: str = ""
    """Rows with answers, given like data.train. Empty: only marked tokens are imitated."""
    source_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of that source, like data.train_args."""
    answer: str = "answer"
    """Column of the rows that holds the answer's text, as in supervised.answer."""
    rows_per_step: int = at_least(1, default=16)
    """Rows per step, shared among the step's updates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source and self.weight == 0:
            self.refuse("weight", f"demonstrations.source = {self.source!r} would not be learned from; set it above 0")


@dataclass(kw_only=True)
class SupervisedConfig(Section, name="supervised"):
    """Supervised training on answers instead of RL, with `megatron-rl sft` or, for more ranks, `launch`.

    Each step is one update on batch.prompts_per_step rows.
    """

    answer: str = ""
    """Column of the rows that holds the answer's text. `messages`: the answer is the last message of a dialogue, which
    must be the assistant's, and the messages before it are the prompt. Empty: no supervised run."""
