"""The algorithm: estimator and loss, reward shaping, corrections, critic and reward model; or a loss of answers, or of
pairs of replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.model_section import OptimizerConfig, ParallelConfig
from megatron_rl.config.rules import Section, above, at_least, name_or_import_path, one_of, ruled, within

ESTIMATORS = (
    *("group_norm", "dr_grpo", "rloo", "reinforce", "reinforce++", "reinforce++-baseline", "remax", "opo", "cpgd"),
    *("otb", "maxrl", "pass@k", "gdpo", "gae", "none", "turn_norm", "gigpo", "agent_norm"),
)
"""Names in the catalogue of megatron_rl.algo, which this module does not import; tests compare them."""
COMPARE_GROUP = (
    *("group_norm", "dr_grpo", "rloo", "reinforce++-baseline", "opo", "cpgd", "otb", "maxrl", "pass@k", "gdpo"),
    *("turn_norm", "gigpo", "agent_norm"),
)
"""Estimators that compare the replies of one prompt, so that there must be several."""
COMPARE_REWARDS = tuple(it for it in COMPARE_GROUP if it not in ("gdpo", "turn_norm", "gigpo"))
"""Estimators whose advantages are all 0 if a prompt's rewards are equal. Others compare parts or turns."""
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
    """Estimator, loss, KL term and entropy bonus.

    `megatron-rl algorithms` lists estimators and losses, docs/algorithms.md says which options go with which.
    """

    advantage: str = name_or_import_path(ESTIMATORS, kind="estimator", default="group_norm")
    """An estimator of the catalogue, such as group_norm (GRPO) or gae (a critic's), or the import path of your own."""
    advantage_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that estimator; gae's are in the section critic."""
    advantage_mean: str = one_of("none", "group", "batch", "", default="")
    """The mean that is subtracted: none, of the group or of the batch; empty does as the estimator says."""
    advantage_std: str = one_of("none", "group", "batch", "", default="")
    """The standard deviation that divides: none, of the group or of the batch; empty does as the estimator says."""
    advantage_clip: float = at_least(0, default=0.0, hint="0 sets no bound")
    """Largest advantage either way; 0 sets no bound."""
    loss: str = name_or_import_path(LOSSES, kind="loss", default="ppo_clip")
    """A policy loss of the catalogue, or the import path of your own."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that loss."""
    clip_low: float = within("(0, 1]", default=0.2, hint="PPO's is 0.2, and 1 sets no lower bound, as in CISPO's paper")
    clip_high: float = 0.2
    """Above clip_low this is DAPO's clip-higher."""
    dual_clip: float = ruled("must be 0 (off), or above 1", lambda it: it == 0 or it > 1, default=0.0)
    """Above 0: the clipped loss of a token with a negative advantage is at most this times its size; 3 is usual."""
    aggregation: str = one_of("token_mean", "sequence_mean", "sequence_sum", "constant", default="token_mean")
    """token_mean, or over trajectories the mean of each one's mean (sequence_mean) or sum (sequence_sum), or of the sum
    over aggregation_length (constant, Dr. GRPO)."""
    aggregation_length: int = at_least(0, default=0)
    """Tokens; with constant aggregation only."""
    high_entropy_share: float = within("(0, 1]", default=1.0, hint="1 trains all tokens")
    """Train the advantages of this share of the tokens, those of the highest entropy; below 1 takes a forward pass."""
    high_entropy_level: str = one_of("batch", "sequence", default="batch")
    """The share is taken of the batch's tokens, or of each sequence's."""
    kl_coefficient: float = at_least(0, default=0.0)
    """Weight of the KL term to the frozen reference; above 0 loads a second engine."""
    kl_estimator: str = one_of("k1", "k2", "k3", "unbiased", default="k3")
    """k1, k2, k3; or, in the loss, unbiased: k3 times the ratio to the proximal policy, gradient included."""
    kl_in: str = one_of("loss", "reward", default="loss")
    """loss: a term with gradient. reward: each token's reward is so much less."""
    kl_target: float = at_least(0, default=0.0, hint="0 keeps the coefficient")
    """In the reward: divergence per token, in nats, that the coefficient is steered to; 0 keeps it fixed."""
    kl_horizon: float = above(0, "trajectories", default=10_000.0)
    """Trajectories over which a steered coefficient changes by a fifth at most."""
    positive_weight: float = at_least(0, default=0.0, hint="0 leaves the term out")
    """Weight of -log p of the trajectories that have positive_reward, the mean over their tokens beside the policy's
    loss (over trajectories, where `aggregation` is): VAPO (arXiv 2504.05118) takes 0.1. 0 leaves the term out."""
    positive_reward: float = 1.0
    """The least reward, before shaping, of such a trajectory."""
    entropy_coefficient: float = at_least(0, default=0.0)
    entropy_target: float = at_least(0, default=0.0, hint="0 keeps the weight")
    """Steer the coefficient so that the entropy per token stays above this, in nats; 0 keeps it fixed."""
    entropy_step: float = above(0, default=0.005)
    """The change of a steered coefficient at each step."""
    routing_replay: str = one_of("off", "experts", "experts_and_weights", default="off")
    """The policy takes each token through the experts that the server chose for it (R3, arXiv 2510.11370).

    experts weighs them by the policy's own router. experts_and_weights takes the server's weights, with the gradient of
    the own ones, and needs servers that this run starts.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # With clip_low = 1 a ratio has no lower bound, so that clip_high need not be above it.
        if not (self.clip_high >= self.clip_low or (self.clip_low == 1 and self.clip_high > 0)):
            self.refuse("clip_high", f"must be at least clip_low = {self.clip_low}, or above 0 with clip_low = 1")
        # The other losses have no clipped term that this could bound.
        if self.dual_clip and self.loss not in ("ppo_clip", "gspo"):
            self.refuse("dual_clip", "must be 0 (off), or above 1 with algo.loss = ppo_clip or gspo")
        if (self.aggregation_length > 0) != (self.aggregation == "constant"):
            rule = (
                "must be at least 1 with algo.aggregation = constant, e.g. generation.max_new_tokens, and 0 elsewhere"
            )
            self.refuse("aggregation_length", rule)
        # Its gradient is what makes it unbiased, and a reward has none.
        if self.kl_estimator == "unbiased" and self.kl_in != "loss":
            self.refuse("kl_estimator", "must be k1, k2, k3, or, with algo.kl_in = loss, unbiased")
        if self.kl_target > 0 and not self.penalizes_reward:
            rule = "must be 0 (fixed), or above 0 with algo.kl_in = reward and algo.kl_coefficient > 0"
            self.refuse("kl_target", rule)

    @property
    def learns_from_equal_rewards(self) -> str:
        """The option by which a group trains though its trajectories have the same reward; empty if there is none.

        An estimator of your own is not looked at.
        """
        if self.advantage in ESTIMATORS and self.advantage not in COMPARE_REWARDS:
            return f"algo.advantage = {self.advantage}"
        if self.advantage_mean in ("none", "batch") and self.advantage in ("group_norm", "dr_grpo"):
            return f"algo.advantage_mean = {self.advantage_mean}"
        terms = ("kl_coefficient", "positive_weight", "entropy_coefficient", "entropy_target")
        return next((f"algo.{name} = {getattr(self, name):g}" for name in terms if getattr(self, name) > 0), "")

    @property
    def penalizes_reward(self) -> bool:
        """True if each token's reward is less for its divergence from the reference."""
        return self.kl_in == "reward" and self.kl_coefficient > 0


@dataclass(kw_only=True)
class RewardShapingConfig(Section, name="reward_shaping"):
    """Changes of the rewards before trajectories are compared, in this order. A KL penalty (algo.kl_in) comes last."""

    cut_off_share: float = within("[0, 1]", default=1.0, hint="1 changes nothing")
    """Share of its reward that a reply keeps which was cut off: one of generation.max_new_tokens, whatever its last
    token is. A dialogue keeps it for its longest reply. NeMo-RL calls it the penalty for not stopping properly."""
    overlong_buffer: int = at_least(0, "tokens", default=0)
    """The last tokens before generation.max_new_tokens, over which the overlong penalty grows; 0 punishes none."""
    overlong_penalty: float = above(0, default=1.0)
    """Subtracted from the reward of a reply of generation.max_new_tokens (DAPO's soft overlong punishment, arXiv
    2503.14476). A dialogue loses it for its longest reply."""
    per_token: bool = False
    """Divide a trajectory's reward by the tokens that the model wrote in it."""
    running: str = one_of("none", "std", "mean_std", default="none")
    """Divide by the standard deviation of all rewards of the run so far (std), after their mean is taken off
    (mean_std)."""
    clip: float = at_least(0, default=0.0, hint="0 sets no bound")
    """Largest reward either way; 0 sets no bound."""


@dataclass(kw_only=True)
class CorrectionConfig(Section, name="correction"):
    """The handling of tokens that another policy has sampled: an older one, or a server that computes differently.

    Decoupled PPO (arXiv 2505.24298) has three policies: the behaviour policy sampled a token, the proximal one is the
    trainer's when the step begins, and the trained one's ratio to it is clipped.
    """

    proximal: str = one_of("recompute", "loglinear", "behavior", default="recompute")
    """recompute: a forward pass, before the step's first update, over the tokens of the later ones; the first has the
    proximal policy's log-probs from its own. loglinear: without that pass, between the behaviour's and the trained
    log-prob by the share of updates that lie before the step. behavior: the behaviour policy itself, plain PPO; then
    there is no weight."""
    weight: str = one_of("off", "clamp", "mask", default="off")
    """p(proximal) / p(behaviour), constant for the gradient. clamp: moved into [low, high], truncated importance
    sampling. mask: a token outside them does not train, IcePop (arXiv 2510.18855); by sequence this masks sequences.
    off: every token counts as if the proximal policy had sampled it."""
    level: str = one_of("token", "sequence", "product", default="token")
    """token; or one weight for all of a sequence: the geometric mean over its trained tokens (sequence), or their
    product, its true importance weight."""
    low: float = within("[0, 1]", default=0.0, hint="a weight of 1 is no mismatch")
    high: float = at_least(1, default=5.0, hint="a weight of 1 is no mismatch")
    negative_bound: float = at_least(0, default=0.0, hint="0 leaves none out")
    """A trajectory is left out where its advantage is negative and log p(behaviour) - log p, in nats and the mean over
    its trained tokens, is above this: what the policy no longer says need not be unlearned (DeepSeek-V3.2, arXiv
    2512.02556). Where tokens have advantages of their own, their sum over the trajectory decides. 0 leaves none out."""
    reject: str = one_of("off", "k1", "k2", "k3", default="off")
    """Leave out, beside any weight, what is far from the policy that sampled it: estimates of KL(behaviour || proximal)
    by w = p(proximal) / p(behaviour), k1 = -log w, k2 = (log w)^2 / 2, k3 = w - 1 - log w, as in verl's correction."""
    reject_level: str = one_of("token", "mean", "sum", "max", default="token")
    """token: each token by its own estimate. mean, sum, max: a trajectory by that over its trained tokens."""
    reject_bound: float = at_least(0, default=0.0)
    """In nats. Left out is what has a larger estimate, of k1 either way (by max: its largest size)."""
    alarm: float = at_least(0, default=0.0, hint="0 never stops")
    """Stop the run when trainer and server differ by more than this, mean |log p - log q| in nats of a step's tokens of
    the current version (of all tokens where there are none). 0 stops only where a difference is not finite."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The weight compares these two policies, which are the same then.
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
        """True if tokens may lose their advantage for their distance from the policy that sampled them."""
        return self.negative_bound > 0 or self.reject != "off"

    @property
    def leaves_out_sequences(self) -> bool:
        """True if whole trajectories may."""
        return self.negative_bound > 0 or (self.reject != "off" and self.reject_level != "token")


@dataclass(kw_only=True)
class CriticConfig(Section, name="critic"):
    """The value model of algo.advantage = gae, with a layout and an optimizer of its own."""

    model: str = ""
    """Hugging Face folder of a language model or of a sequence classification model with one label.

    Empty starts from the policy as it is when RL begins. Without a scalar head the first values are 0.
    """
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    discount: float = within("(0, 1]", default=1.0, hint="1 discounts nothing")
    """Per trained token or turn."""
    trace_decay: float = within("[0, 1]", default=1.0)
    """GAE's lambda: 1 trusts the rewards alone, 0 the critic's next value."""
    level: str = one_of("token", "turn", default="token")
    """The span that an advantage belongs to: a token, or a turn (an unbroken run of trained tokens)."""
    decoupled: bool = False
    """The critic's targets take a trace_decay of 1: only the policy's advantages are cut short (VAPO, arXiv
    2504.05118)."""
    length_factor: float = at_least(0, default=0.0, hint="0 takes trace_decay for all")
    """Above 0, in place of trace_decay: 1 - 1 / (length_factor l) for a sequence of l trained tokens or turns (VAPO,
    whose factor is 0.05)."""
    value_clip: float = at_least(0, default=0.2, hint="0 sets no bound")
    """Largest move of a value in one step; 0 sets no bound."""
    warmup_steps: int = at_least(0, default=0)
    """First steps of the run, in which the critic learns and the policy stays as it is."""


@dataclass(kw_only=True)
class RewardModelConfig(Section, name="reward_model"):
    """A frozen model that scores whole sequences, beside the workflow's own reward."""

    path: str = ""
    """Hugging Face folder of a sequence classification model with one label and the policy's tokens; empty: none."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    coefficient: float = 1.0
    """A trajectory's reward is the workflow's plus this times the score."""


@dataclass(kw_only=True)
class PreferenceConfig(Section, name="preference"):
    """Training on pairs of replies in place of RL, by `megatron-rl preferences` or, with more ranks, `launch`.

    A step is one update by batch.prompts_per_step pairs.
    """

    loss: str = name_or_import_path(PAIR_LOSSES, kind="pair_loss", default="")
    """dpo, ipo or simpo train a policy, bradley_terry a reward model; or the import path of your own. Empty: RL."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that loss."""


@dataclass(kw_only=True)
class DemonstrationsConfig(Section, name="demonstrations"):
    """Tokens that are imitated in an RL step beside its trajectories: rows of answers, and tokens that a workflow marks
    with their weights in Trajectory.tokens["demonstrated"]."""

    weight: float = at_least(0, default=0.0, hint="0 imitates nothing")
    """An update's loss is the policy's plus this times the mean of -log p over the update's demonstrated tokens."""
    source: str = ""
    """Rows with answers, named like data.train; empty leaves marked tokens alone."""
    source_args: dict[str, Any] = field(default_factory=dict)
    """As data.train_args."""
    answer: str = "answer"
    """The rows' column with the text of the answer, as of supervised.answer."""
    rows_per_step: int = at_least(1, default=16)
    """Shared out to the step's updates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source and self.weight == 0:
            self.refuse("weight", f"demonstrations.source = {self.source!r} would not be learned from; set it above 0")


@dataclass(kw_only=True)
class SupervisedConfig(Section, name="supervised"):
    """Training on answers in place of RL, by `megatron-rl sft` or, with more ranks, `launch`.

    A step is one update by batch.prompts_per_step rows.
    """

    answer: str = ""
    """The rows' column with the text of the answer; or messages: the answer is the content of a dialogue's last one,
    which must be an assistant's, and the prompt is what comes before. Empty: no such run."""
