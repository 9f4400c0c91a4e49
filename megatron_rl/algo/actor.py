"""The RL step on top of any TrainEngine: PolicyActor trains the policy, Critic estimates values for PPO."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from tensordict import TensorDict
from torch import Tensor

from megatron_rl.algo import advantage
from megatron_rl.algo.aggregation import set_positive_weights, set_row_weights, trained_sequences, trained_tokens
from megatron_rl.algo.catalogue import find_estimator, find_loss
from megatron_rl.algo.loss import PolicyLoss, value_clip
from megatron_rl.algo.registry import TorchLoss
from megatron_rl.algo.reward_shaping import RewardShaper, token_rewards
from megatron_rl.algo.selection import high_entropy, keep, share_of
from megatron_rl.api import LogitsTerm, LogprobLoss, TrainEngine, ValueLoss
from megatron_rl.config import AlgorithmConfig, CorrectionConfig, CriticConfig, RewardShapingConfig
from megatron_rl.config.import_path import described
from megatron_rl.config.users_code import call
from megatron_rl.types import StepStats, TrajectoryBatch

logger = logging.getLogger(__name__)


class Reference(Protocol):
    """Frozen model that computes log-probabilities, such as a MegatronEngine."""

    def forward(self, data: TrajectoryBatch, *, temperature: float = 1.0) -> Tensor: ...


class EntropyController:
    """Weight of the entropy bonus: fixed, or adapted to keep the entropy above a target (arXiv 2505.22312).

    After a step whose entropy is at or below the target, the weight grows by `algo.entropy_step`. After a step whose
    entropy is above it, the weight shrinks by as much, and the next step has no bonus.
    """

    def __init__(self, options: AlgorithmConfig) -> None:
        self.options, self.value = options, options.entropy_coefficient
        self.is_below = True  # whether the last measured entropy was at or below the target

    @property
    def coefficient(self) -> float:
        return self.value if self.is_below else 0.0

    def update(self, entropy: float) -> None:
        """Adapt the weight after a step. entropy: the step's mean entropy per trained token, in nats."""
        if self.options.entropy_target > 0:
            self.is_below = entropy <= self.options.entropy_target
            step = self.options.entropy_step
            self.value = max(self.value + (step if self.is_below else -step), 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "is_below": self.is_below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.options.entropy_target > 0:  # a fixed weight always comes from the config, also after a resume
            self.value, self.is_below = state["value"], state["is_below"]


class PolicyActor:
    """The policy's part of a step: turns a batch of trajectories into updates of `engine`.

    `reference` is a frozen engine, needed only for a KL term.

        actor = PolicyActor(engine, config.algo, temperature=config.generation.temperature)
        actor.compute_advantages(batch)
        actor.compute_logprobs(updates)  # the batch's trajectories, divided over the step's optimizer steps
        stats = actor.update(updates)
    """

    def __init__(
        self,
        engine: TrainEngine,
        options: AlgorithmConfig,
        *,
        temperature: float,
        correction: CorrectionConfig | None = None,
        reference: Reference | None = None,
        shaper: RewardShaper | None = None,
        advantage_args: dict[str, Any] | None = None,
        teacher_coefficient: float = 0.0,
    ) -> None:
        """Find the estimator and the loss. Raises ValueError if a KL term is configured without a reference.

        shaper: None leaves the rewards unshaped. advantage_args: used in place of algo.advantage_args if given.
        teacher_coefficient: weight of the teacher's term in the advantages.
        """
        if options.kl_coefficient > 0 and reference is None:
            raise ValueError(
                f"algo.kl_coefficient = {options.kl_coefficient}: the KL term needs a reference engine; pass one or "
                f"set it to 0."
            )
        self.engine, self.reference = engine, reference
        self.options, self.correction, self.temperature = options, correction or CorrectionConfig(), temperature
        self.advantage_args = options.advantage_args if advantage_args is None else advantage_args
        self.teacher_coefficient = teacher_coefficient
        self.estimator = find_estimator(options.advantage, self.advantage_args)
        self.loss = find_loss(options.loss, options.loss_args)
        # The default shaping ignores lengths, so any longest_reply works.
        self.shaper = shaper or RewardShaper(RewardShapingConfig(), options, longest_reply=1)
        self.entropy = EntropyController(options)
        self._is_warned = False
        self.metrics: dict[str, float] = {}
        """Metrics of the last step's reward shaping and token selection."""

    @property
    def columns_needed(self) -> list[str]:
        """Names of the token columns `[N]` that `compute_advantages` needs.

        They come from the reference, from the teacher, and from the policy before its updates. `cold_logprobs` are the
        policy's log-probabilities at half the temperature.
        """
        penalizes = self.options.penalizes_reward
        wanted = {
            "ref_logprobs": penalizes,
            "teacher_logprobs": self.teacher_coefficient > 0,
            "proximal_logprobs": penalizes or self.loss.chooses,
            "entropies": self.options.high_entropy_share < 1,
        }
        wanted |= dict.fromkeys(self.estimator.needs, True)
        return [name for name, is_needed in wanted.items() if is_needed]

    def compute_advantages(self, batch: TrajectoryBatch) -> None:
        """Shape the rewards and set `advantages`. Collective: every rank calls it.

        The batch must have the `[B]` columns of all trajectories of the step, in whole groups, and the tokens of those
        that this replica trains.
        """
        self.shaper(batch)
        self.metrics = dict(self.shaper.last)
        options = self.options
        given = batch, options, self.advantage_args
        advantage.compute(self.estimator, *given, teacher_coefficient=self.teacher_coefficient)
        if self.teacher_coefficient > 0:
            # summed per trajectory, so that all ranks get the same bits
            total = batch.sums_of_tokens(advantage.of_teacher(batch)).sum()
            count = batch.total(batch["loss_mask"].sum())
            self.metrics["teacher/reverse_kl"] = -float(total) / max(int(count), 1)
        if options.positive_weight > 0:
            rewards = batch.sums_of_tokens(token_rewards(batch)) if "rewards" in batch.tokens else batch["rewards"]
            self.metrics["policy/positive_share"] = set_positive_weights(batch, rewards, options)
        # An unselected token gets advantage 0. KL and entropy terms still apply to it.
        if options.high_entropy_share < 1:
            kept = high_entropy(batch, share=options.high_entropy_share, level=options.high_entropy_level)
            self.metrics["policy/high_entropy_share"] = keep(batch, kept)
        of_loss = {"key": f"algo.loss = {options.loss!r}", "contract": f"the batch has {', '.join(batch.tokens)}"}
        if self.loss.select is not None:
            chosen = call(self.loss.select, [batch], options.loss_args, **of_loss)
            self.metrics["policy/selected_share"] = keep(batch, chosen)
        if isinstance(self.loss, TorchLoss) and self.loss.mark is not None:
            batch.tokens["marked"] = call(self.loss.mark, [batch], options.loss_args, **of_loss)
            self.metrics["policy/marked_share"] = share_of(batch, batch["marked"])

    def compute_logprobs(self, shares: list[TrajectoryBatch]) -> None:
        """Set the proximal and reference log-probs that the loss needs. Call this before the first update.

        The first update needs no proximal log-probs: the proximal policy is then the policy being trained, and the
        update's own forward pass computes them.
        """
        for number, share in enumerate(shares):
            is_known = "proximal_logprobs" in share
            if number > 0 and self.correction.proximal == "recompute" and not is_known:
                share.tokens["proximal_logprobs"] = self.engine.forward(share, temperature=self.temperature)
            if number > 0 and self.correction.proximal == "loglinear":
                # Versions count steps. Earlier steps are assumed to have had as many updates as this one.
                age = (self.engine.get_version() - share["versions"]) * len(shares)
                share.tokens["proximal_share"] = proximal_share(age, updates_done=number)
            if self.reference is not None and self.options.kl_in == "loss":
                share.tokens["ref_logprobs"] = self.reference.forward(share, temperature=self.temperature)

    def update(self, shares: list[TrajectoryBatch], targets: Sequence[LogitsTerm] | None = None) -> list[StepStats]:
        """Apply one optimizer step per share. Collective: every rank calls it with equally many shares.

        targets: for each share, the loss term of its teacher. The policy version rises by one in total if any update
        was applied, because the policy is published once per step.
        """
        options = replace(self.options, entropy_coefficient=self.entropy.coefficient)
        loss, version = PolicyLoss(options, self.correction), self.engine.get_version()
        for_engine = LogprobLoss(loss, temperature=self.temperature, by_row=not loss.by_sequence)
        weigh = trained_tokens
        if options.aggregation != "token_mean":
            weigh = trained_sequences
            for share in shares:
                set_row_weights(share, options)
        losses = [for_engine] * len(shares)
        if targets is not None:
            losses = [replace(for_engine, beside=of_share) for of_share in targets]
        stats = update_each(self.engine, shares, losses, weigh)
        self._warn_without_gradient(loss, shares, stats)
        self.engine.set_version(version + any(s.applied for s in stats))
        if options.entropy_target > 0 and stats:
            self.metrics["policy/entropy_coefficient"] = self.entropy.coefficient
            applied = [s for s in stats if s.applied]  # the sums of a skipped update may be NaN
            if applied:
                tokens = sum(s.sums["tokens"] for s in applied)
                self.entropy.update(sum(s.sums["entropy"] for s in applied) / max(tokens, 1.0))
        return stats

    def _warn_without_gradient(self, loss: PolicyLoss, shares: list[TrajectoryBatch], stats: list[StepStats]) -> None:
        """Warn once if the loss has no gradient although there are advantages."""
        if self._is_warned or not stats:
            return
        why = ""
        if loss.has_gradient == {False}:
            why = "what it returns does not depend on the policy: logprobs or ratio are detached on the way"
        elif stats[0].applied and stats[0].grad_norm == 0.0 and has_advantages(shares[0]):
            why = "the gradient is 0 though advantages are not: its slope in logprobs is 0, or every token is clipped"
        if why:
            self._is_warned = True
            name = f"algo.loss = {self.options.loss!r}, {described(self.loss.function)}"
            logger.warning("%s: trains nothing, as %s. Look at what it does with logprobs.", name, why)

    def state_dict(self) -> dict[str, Any]:
        return {"shaper": self.shaper.state_dict(), "entropy": self.entropy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shaper.load_state_dict(state["shaper"])
        self.entropy.load_state_dict(state["entropy"])


class Critic:
    """Value estimator of PPO: computes values, and trains `engine`, which has a value head, on returns."""

    def __init__(self, engine: TrainEngine, options: CriticConfig) -> None:
        self.engine, self.options = engine, options

    def values(self, share: TrajectoryBatch) -> Tensor:
        """Return `[N]` float32: the value of the state in which each trained token was chosen. Collective."""
        return self.engine.forward(share)

    def update(self, shares: list[TrajectoryBatch]) -> list[StepStats]:
        """Apply one optimizer step per share. Collective: every rank calls it with equally many shares."""
        loss = ValueLoss(partial(value_clip, clip=self.options.value_clip))
        return update_each(self.engine, shares, [loss] * len(shares))


def has_advantages(share: TrajectoryBatch) -> bool:
    return bool((share["advantages"][share["loss_mask"].bool()] != 0).any())


def proximal_share(age: Tensor, *, updates_done: int) -> Tensor:
    """Return the proximal policy's position between the behaviour policy (0) and the trained policy (1), `[N]` float32.

    age: `[N]`, the number of updates from the behaviour policy of each token to the step's first policy. updates_done:
    the number of this step's updates so far. The log-probability is assumed to move linearly with the updates (A-3PO,
    arXiv 2512.06547).
    """
    # positions in updates: behaviour policy -before, proximal policy 0, trained policy updates_done
    before = age.clamp_min(0).float()
    return before / (before + updates_done)


def update_each(
    engine: TrainEngine,
    shares: list[TrajectoryBatch],
    losses: Sequence[LogprobLoss | ValueLoss],
    weigh: Callable[[TensorDict], Tensor] | None = None,
) -> list[StepStats]:
    """Apply one optimizer step per share.

    weigh: function that computes the loss's weight from a microbatch. By default, the weight is the number of trained
    tokens.
    """
    engine.train()
    stats = []
    for share, loss in zip(shares, losses, strict=True):
        stats.append(engine.train_batch(share, loss, weigh))
        engine.step_lr_scheduler()
    return stats
