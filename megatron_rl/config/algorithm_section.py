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
"""Estimators in the catalogue of megatron_rl.algo, which this module does not import. A test compares the two."""
COMPARE_GROUP = (
    *("group_norm", "dr_grpo", "rloo", "reinforce++-baseline", "opo", "cpgd", "otb", "maxrl", "pass@k", "gdpo"),
    *("turn_norm", "gigpo", "agent_norm"),
)
"""Estimators that compare the replies to one prompt, and therefore need several of them."""
COMPARE_REWARDS = tuple(it for it in COMPARE_GROUP if it not in ("gdpo", "turn_norm", "gigpo"))
"""Estimators whose advantages are all 0 if a prompt's rewards are equal. The other members of COMPARE_GROUP compare
parts of rewards, or turns, which may differ although the rewards are equal."""
LOSSES = tuple("ppo_clip gspo cispo sapo reinforce m2po cpgd dppo gmpo topr clip_cov kl_cov".split())
PAIR_LOSSES = ("dpo", "ipo", "kto", "simpo", "bradley_terry")


@dataclass(kw_only=True)
class AlgorithmConfig(Section, name="algo"):
    """Advantage estimator, policy loss, KL term and entropy bonus. docs/algorithms.md says what applies to which."""

    advantage: str = name_or_import_path(ESTIMATORS, kind="estimator", default="group_norm")
    """Advantage estimator that `megatron-rl algorithms` lists, such as group_norm (GRPO), or the path of your own."""
    advantage_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the estimator in `advantage`. For gae, set the options of the section critic instead."""
    advantage_mean: str = one_of("none", "group", "batch", "", default="")
    """Mean that is subtracted from the estimator's result. Empty: the estimator's default."""
    advantage_std: str = one_of("none", "group", "batch", "", default="")
    """Standard deviation by which the estimator's result is divided. Empty: the estimator's default."""
    advantage_clip: float = at_least(0, default=0.0, hint="0 sets no bound")
    """Advantages are clipped to [-advantage_clip, advantage_clip]; 0 disables clipping."""
    loss: str = name_or_import_path(LOSSES, kind="loss", default="ppo_clip")
    """Policy loss: one that `megatron-rl algorithms` lists, or the import path of your own."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss in `loss`."""
    clip_low: float = within("(0, 1]", default=0.2, hint="PPO's is 0.2, and 1 sets no lower bound, as in CISPO's paper")
    """Losses that clip the policy's probability ratio, such as ppo_clip, clip it to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    """See clip_low. A value above clip_low gives DAPO's clip-higher."""
    dual_clip: float = ruled("must be 0 (off), or above 1", lambda it: it == 0 or it > 1, default=0.0)
    """Limits the loss of a token with a negative advantage to dual_clip times |advantage|. 3 is usual; 0 sets none."""
    aggregation: str = one_of("token_mean", "sequence_mean", "sequence_sum", "constant", default="token_mean")
    """Averaging of the tokens' losses. token_mean: the mean over all trained tokens. The other choices take the mean
    over trajectories of each one's mean over tokens (sequence_mean), its sum (sequence_sum), or its sum divided by
    aggregation_length (constant, as in Dr. GRPO)."""
    aggregation_length: int = at_least(0, default=0)
    """Number of tokens by which a trajectory's sum is divided; only for aggregation = constant."""
    high_entropy_share: float = within("(0, 1]", default=1.0, hint="1 trains all tokens")
    """Share of the trained tokens that keep their advantages: those with the highest entropy. All others get advantage
    0. A value below 1 costs an extra forward pass."""
    high_entropy_level: str = one_of("batch", "sequence", default="batch")
    """Tokens among which high_entropy_share selects: the whole batch's, or each sequence's separately."""
    kl_coefficient: float = at_least(0, default=0.0)
    """Weight of the KL term against the frozen reference model. A value above 0 loads a second engine for the
    reference, but not with `lora`, where the policy without adapters is the reference."""
    kl_estimator: str = one_of("k1", "k2", "k3", "unbiased", default="k3")
    """Estimator of the KL divergence; docs/algorithms.md has the formulas. unbiased, which needs kl_in = loss, is k3
    times the ratio p / p(proximal). The gradient of the ratio is included."""
    kl_in: str = one_of("loss", "reward", default="loss")
    """loss: the KL term is added to the loss and differentiated. reward: it is subtracted from each token's reward."""
    kl_target: float = at_least(0, default=0.0, hint="0 keeps the coefficient")
    """Target KL per token in nats, reached by adapting kl_coefficient; needs kl_in = reward. 0 keeps it fixed."""
    kl_horizon: float = above(0, "trajectories", default=10_000.0)
    """Number of trajectories over which an adapted kl_coefficient changes by at most a fifth."""
    positive_weight: float = at_least(0, default=0.0, hint="0 disables the term")
    """Weight of an extra loss term -log p on trajectories whose reward is at least positive_reward (VAPO, arXiv
    2504.05118, uses 0.1). The term is averaged over their tokens, or over trajectories if `aggregation` does so."""
    positive_reward: float = 1.0
    """Minimum reward for positive_weight. The reward before reward_shaping counts."""
    entropy_coefficient: float = at_least(0, default=0.0)
    """Weight of the entropy bonus; 0 disables it."""
    entropy_target: float = at_least(0, default=0.0, hint="0 keeps the weight")
    """Minimum entropy per token in nats, kept by adapting entropy_coefficient. 0 keeps the coefficient fixed."""
    entropy_step: float = above(0, default=0.005)
    """Amount by which an adapted entropy_coefficient rises or falls per step."""
    routing_replay: str = one_of("off", "experts", "experts_and_weights", default="off")
    """Send each of the policy's tokens through the MoE experts that the server chose for it (R3, arXiv 2510.11370).
    experts: the policy's own router computes their routing weights. experts_and_weights: the routing weights are the
    server's too, with the gradient of the policy's own; needs servers that the run starts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # clip_low = 1 means no lower bound on the ratio, so clip_high may then be smaller.
        if not (self.clip_high >= self.clip_low or (self.clip_low == 1 and self.clip_high > 0)):
            self.refuse("clip_high", f"must be at least clip_low = {self.clip_low}, or above 0 with clip_low = 1")
        # Other losses have no clipped term to bound.
        if self.dual_clip and self.loss not in ("ppo_clip", "gspo"):
            self.refuse("dual_clip", "must be 0 (off), or above 1 with algo.loss = ppo_clip or gspo")
        if (self.aggregation_length > 0) != (self.aggregation == "constant"):
            wanted = "at least 1 with algo.aggregation = constant, e.g. generation.max_new_tokens, and 0 elsewhere"
            self.refuse("aggregation_length", f"must be {wanted}")
        # The estimator is unbiased through its gradient, and a reward has none.
        if self.kl_estimator == "unbiased" and self.kl_in != "loss":
            self.refuse("kl_estimator", "must be k1, k2, k3, or, with algo.kl_in = loss, unbiased")
        if self.kl_target > 0 and not self.penalizes_reward:
            rule = "must be 0 (fixed), or above 0 with algo.kl_in = reward and algo.kl_coefficient > 0"
            self.refuse("kl_target", rule)

    @property
    def learns_from_equal_rewards(self) -> str:
        """Setting that trains a group with equal rewards; empty if there is none, or the estimator is the user's."""
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
    """Changes to rewards before advantages are computed, in this order. A KL penalty (algo.kl_in = reward) is last."""

    cut_off_share: float = within("[0, 1]", default=1.0, hint="1 changes nothing")
    """A reply whose length reaches generation.max_new_tokens keeps only this share of its reward, even if its last
    token ends it properly. For a dialogue, the length of the longest reply counts."""
    overlong_buffer: int = at_least(0, "tokens", default=0)
    """Number of tokens before generation.max_new_tokens over which overlong_penalty grows from 0. 0 disables it."""
    overlong_penalty: float = above(0, default=1.0)
    """Amount subtracted from the reward of a reply with generation.max_new_tokens tokens (DAPO's soft overlong
    punishment, arXiv 2503.14476). For a dialogue, the length of the longest reply counts."""
    per_token: bool = False
    """Divide a trajectory's reward by its number of model-generated tokens."""
    running: str = one_of("none", "std", "mean_std", default="none")
    """Normalize rewards by the statistics of all rewards of the run so far. std: divide by the standard deviation.
    mean_std: subtract the mean, then divide by the standard deviation."""
    clip: float = at_least(0, default=0.0, hint="0 sets no bound")
    """Rewards are clipped to [-clip, clip]; 0 disables clipping."""


@dataclass(kw_only=True)
class CorrectionConfig(Section, name="correction"):
    """Correction for tokens that another policy sampled: an older version, or a server that computes differently from
    the trainer. As in decoupled PPO (arXiv 2505.24298), there are three policies. The behavior policy sampled the
    token. The proximal policy is the trainer's policy at the start of the step. The trained policy is the one that the
    updates change, and the loss clips its ratio to the proximal policy."""

    proximal: str = one_of("recompute", "loglinear", "behavior", default="recompute")
    """Source of the proximal policy's log-probabilities. recompute: one extra forward pass before the first update,
    except for the tokens of that update, whose own forward pass computes them. loglinear: no extra pass, but the
    estimate log p(proximal) = (1 - s) log p(behavior) + s log p, with s = b / (b + d), for b updates between sampling
    and this step, and d updates in it. behavior: the behavior policy itself, as in plain PPO, with `weight` off."""
    weight: str = one_of("off", "clamp", "mask", default="off")
    """Importance weight p(proximal) / p(behavior), without gradient. clamp: limit the weight to [low, high] (truncated
    importance sampling). mask: do not train tokens, or by `level` sequences, whose weight is outside that range
    (IcePop, arXiv 2510.18855). off: treat every token as if the proximal policy had sampled it."""
    level: str = one_of("token", "sequence", "product", default="token")
    """Unit with one importance weight. token: each token. sequence: a sequence, with the geometric mean of its trained
    tokens' weights. product: a sequence, with the product of these weights, which is its true importance weight."""
    low: float = within("[0, 1]", default=0.0, hint="a weight of 1 means that trainer and server agree")
    """Lower bound of the importance weight."""
    high: float = at_least(1, default=5.0, hint="a weight of 1 means that trainer and server agree")
    """Upper bound of the importance weight."""
    negative_bound: float = at_least(0, default=0.0, hint="0 keeps all")
    """Set the advantages of a trajectory to 0 if they are negative and the policy no longer says it (DeepSeek-V3.2,
    arXiv 2512.02556): the mean of log p(behavior) - log p over its trained tokens exceeds this bound, in nats. If
    advantages differ per token, the sign of their sum over the trajectory counts. 0 disables this option."""
    reject: str = one_of("off", "k1", "k2", "k3", default="off")
    """Estimate of KL(behavior || proximal) by which tokens or trajectories are rejected, i.e. get advantage 0, if it
    exceeds reject_bound. The estimates are those of verl's correction: k1 = -log w, k2 = (log w)^2 / 2 and k3 = w - 1 -
    log w, where w = p(proximal) / p(behavior)."""
    reject_level: str = one_of("token", "mean", "sum", "max", default="token")
    """token: reject single tokens by their own estimate. mean, sum, max: reject whole trajectories by the mean, sum or
    maximum of the estimates of their trained tokens."""
    reject_bound: float = at_least(0, default=0.0)
    """Threshold in nats. For k1, which may be negative, the absolute value counts (with max, that of each token)."""
    alarm: float = at_least(0, default=0.0, hint="0 stops only for NaN or infinity")
    """Stop the run if trainer and server disagree by more than this number of nats: the mean of |log p - log q| for
    probabilities p of the trainer and q of the server, over the step's tokens that the current policy version sampled
    or, if there are none, over all. With 0, only a NaN or infinite difference stops the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The weight and the estimate compare these two policies, which are then identical.
        way_out = "set it to off, or take another proximal policy"
        if self.proximal == "behavior" and self.weight != "off":
            self.refuse("weight", f"correction.proximal = behavior makes every weight 1; {way_out}")
        if self.proximal == "behavior" and self.reject != "off":
            self.refuse("reject", f"correction.proximal = behavior makes every estimate 0; {way_out}")
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
    """The value model for algo.advantage = gae. It has the policy's layout and optimizer where none are given."""

    model: str = ""
    """Hugging Face folder of a language model, or of a sequence classification model with one label. Empty: start from
    the policy as it is when RL begins. If the model has no scalar head, all values are 0 at first."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The critic's layout, with the keys of `parallel:`. A key left out has its value from there."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The critic's optimizer, with the keys of `optimizer:`. A key left out has its value from there."""
    discount: float = within("(0, 1]", default=1.0, hint="1 discounts nothing")
    """Discount factor per trained token or turn."""
    trace_decay: float = within("[0, 1]", default=1.0)
    """GAE's lambda. 1: an advantage sums up all later rewards. 0: only the next reward and the next state's value."""
    level: str = one_of("token", "turn", default="token")
    """Unit that has an advantage: a token, or a turn. A turn is an unbroken run of trained tokens."""
    decoupled: bool = False
    """Use trace_decay only for the policy's advantages, and 1 for the critic's targets (VAPO, arXiv 2504.05118)."""
    length_factor: float = at_least(0, default=0.0, hint="0 uses trace_decay for all replies")
    """If above 0, 1 - 1 / (length_factor l) replaces trace_decay, for l trained tokens or turns. VAPO uses 0.05."""
    value_clip: float = at_least(0, default=0.2, hint="0 sets no bound")
    """Maximum change of a value in one step."""
    warmup_steps: int = at_least(0, default=0)
    """Number of steps at the start of the run that train only the critic and leave the policy unchanged."""


@dataclass(kw_only=True)
class RewardModelConfig(Section, name="reward_model"):
    """A frozen model that scores whole sequences. Its scores are added to the workflow's own rewards."""

    path: str = ""
    """Hugging Face folder of a sequence classification model with one label and the policy's tokenizer. Empty: none."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The reward model's layout, with the keys of `parallel:`. A key left out has its value from there."""
    coefficient: float = 1.0
    """A trajectory's reward is the workflow's reward plus this coefficient times the score."""


@dataclass(kw_only=True)
class PreferenceConfig(Section, name="preference"):
    """Training on pairs of replies instead of RL, started by `megatron-rl preferences` or, on more than one rank,
    `megatron-rl launch`. Each step is one update on batch.prompts_per_step pairs."""

    loss: str = name_or_import_path(PAIR_LOSSES, kind="pair_loss", default="")
    """dpo, ipo, kto and simpo, or your own loss by its import path, train a policy; bradley_terry trains a reward
    model. Empty: no training on pairs."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss in `loss`."""


@dataclass(kw_only=True)
class DemonstrationsConfig(Section, name="demonstrations"):
    """Imitation learning as a part of RL steps, on rows with answers and on tokens that a workflow marks by storing
    their weights in Trajectory.tokens["demonstrated"]."""

    weight: float = at_least(0, default=0.0, hint="0 disables imitation")
    """Weight of the imitation term, which is the mean of -log p over an update's demonstrated tokens."""
    source: str = ""
    """Rows with answers, in any form that data.train can have. Empty: only marked tokens are imitated."""
    source_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `source`, in the form of data.train_args."""
    answer: str = "answer"
    """Column of the rows that holds the answer's text. `messages` has the meaning that it has in supervised.answer."""
    rows_per_step: int = at_least(1, default=16)
    """Rows per step. They are divided among the step's updates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source and self.weight == 0:
            self.refuse("weight", f"demonstrations.source = {self.source!r} would not be learned from; set it above 0")


@dataclass(kw_only=True)
class SupervisedConfig(Section, name="supervised"):
    """Training on answers instead of RL, started by `megatron-rl sft` or, on more than one rank, `megatron-rl launch`.
    Each step is one update on batch.prompts_per_step rows."""

    answer: str = ""
    """Column of the rows that holds the answer's text. `messages`: the answer is the last message of a dialogue, which
    must be the assistant's, and the messages before it are the prompt. Empty: no supervised run."""
