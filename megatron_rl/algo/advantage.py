"""Advantage estimators, computed from the shaped rewards of whole groups of trajectories.

`reward_shaping.RewardShaper` sets `scores` `[B]`, one per trajectory, and `token_rewards` `[N]`. An estimator's result
is then normalised by its own defaults, unless `algo.advantage_mean` or `algo.advantage_std` is set.

A sample with several trajectories counts once in each mean and deviation of its group. Each trajectory is compared by
its own score, so agents of one sample keep their own credit.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import comb, sqrt
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algo.normalize import (
    EPS,
    count_of,
    deviation_of,
    group_numbers,
    mean_of,
    normalize,
    normalize_tokens,
    shares_of,
)
from megatron_rl.algo.registry import Estimator, estimator
from megatron_rl.algo.turns import first_of_turn, spread_over_turns, turns_of
from megatron_rl.config import AlgorithmConfig
from megatron_rl.config.import_path import described
from megatron_rl.config.users_code import call
from megatron_rl.ops import packed_discounted_returns, packed_gae
from megatron_rl.types import PART, TrajectoryBatch


@estimator("group_norm", mean="group", std="group", compares_group=True)
def group_norm(batch: TrajectoryBatch) -> Tensor:
    """(r - mean of the group) / std of the group.

    GRPO. The advantage is 0 if the group has only one trajectory, or if all its rewards are equal.
    Source: arXiv 2402.03300
    """
    return batch["scores"]


@estimator("dr_grpo", mean="group", compares_group=True)
def dr_grpo(batch: TrajectoryBatch) -> Tensor:
    """r - mean of the group.

    Omits GRPO's division by the std, which favours easy and hard prompts. With algo.aggregation = constant this is the
    complete Dr. GRPO.
    Source: arXiv 2503.20783
    """
    return batch["scores"]


@estimator("rloo", compares_group=True)
def rloo(batch: TrajectoryBatch, *, over_std: bool = False) -> Tensor:
    """r - mean of the others of the group.

    The advantage is 0 in a group of one. over_std = True divides by the standard deviation of the others, as in
    NeMo-RL. The result is then 0 if the others have equal rewards, or if there are fewer than two of them.
    Source: arXiv 2402.14740
    """
    scores, shares, group = batch["scores"].double(), sample_shares(batch), members(batch)
    count = count_of(group, shares)
    # The baseline also excludes the rewards of the sample's other trajectories.
    own = scores - mean_of(scores, batch.samples)
    between = mean_of(scores, batch.samples) - mean_of(scores, group, shares)
    # For n samples with mean m, s minus the mean of the others is s - (n m - s) / (n - 1) = (s - m) n / (n - 1).
    result = own.masked_fill(count == 1, 0.0) + between * count / (count - 1).clamp_min(1.0)
    if not over_std:
        return result
    # With q the sum of squares about the mean of n, the others' sum about theirs is q - (s - m)^2 n / (n - 1).
    squares = between.square()
    others = mean_of(squares, group, shares) * count - squares * count / (count - 1).clamp_min(1.0)
    deviation = (others.clamp_min(0.0) / (count - 2).clamp_min(1.0)).sqrt().masked_fill(count < 3, 0.0)
    largest = torch.zeros(int(group.max()) + 1, dtype=torch.float64).scatter_reduce_(0, group, scores.abs(), "amax")
    differs = deviation > EPS * largest[group]  # a difference of squares keeps half of float64's digits
    return torch.where(differs, result / (deviation + EPS), 0.0)


FIXED_POINT = 2.0**32
"""Weights are summed as integers in units of 1 / FIXED_POINT, so that the sums are the same in any order."""
DISCOUNT = {
    "discount": (lambda value: 0 < value <= 1, "must be in (0, 1]; 1 discounts nothing"),
    "level": (lambda value: value in ("token", "turn"), "must be token or turn"),
}
CPGD = {
    "weight": (lambda value: value in ("equal", "std", "clip_filter"), "must be equal, std or clip_filter"),
    "most": (lambda value: value >= 1, "must be at least 1; 1 weighs no group more"),
}
PASS_AT_K = {"k": (lambda k: isinstance(k, int) and k >= 1, "must be at least 1; 1 is the reward of each reply alone")}


@estimator("reinforce", rules=DISCOUNT)
def reinforce(batch: TrajectoryBatch, *, discount: float = 1.0, level: str = "token") -> Tensor:
    """sum over t' >= t of discount^(t' - t) r_t'.

    The discount counts trained tokens. With level = turn, t counts turns and r_t is the sum of the turn's token
    rewards.
    Source: Williams 1992
    """
    return returns(batch, discount, level)


@estimator("reinforce++", mean="batch", std="batch", rules=DISCOUNT)
def reinforce_plus_plus(batch: TrajectoryBatch, *, discount: float = 1.0, level: str = "token") -> Tensor:
    """(G_t - mean over the batch's tokens) / their std, G_t the discounted return.

    Meant for a KL penalty in the reward: algo.kl_in = reward. With level = turn, G_t is as in reinforce.
    Source: arXiv 2501.03262
    """
    return returns(batch, discount, level)


@estimator("reinforce++-baseline", mean="batch", std="batch", compares_group=True)
def reinforce_plus_plus_baseline(batch: TrajectoryBatch) -> Tensor:
    """(G_t - b - mean over the batch's tokens) / their std, b the group's mean reward.

    Source: arXiv 2501.03262
    """
    baseline = mean_of(batch["scores"], members(batch), sample_shares(batch))
    return returns(batch, 1.0) - batch.spread(baseline)


@estimator("remax")
def remax(batch: TrajectoryBatch) -> Tensor:
    """r - r(greedy reply).

    Both rewards are shaped. The reward of the sampled reply may include a KL penalty; the greedy reply's never does.
    Source: arXiv 2310.10505
    """
    if "greedy_reward" not in batch:
        raise ValueError(
            f"algo.advantage = remax: the trajectories carry {sorted(batch.sequences)} and no greedy_reward; use a "
            f"workflow that reports it, e.g. megatron_rl.workflows:ReMaxWorkflow."
        )
    return batch["scores"] - batch["greedy_score"]


@estimator("opo", compares_group=True)
def opo(batch: TrajectoryBatch) -> Tensor:
    """r - sum(l r) / sum(l) over the group, l the trained tokens.

    l is the number of a trajectory's trained tokens. The baseline minimises the variance if the squared gradient is
    proportional to the length.
    Source: arXiv 2505.23585
    """
    scores, group, tokens = batch["scores"].double(), members(batch), batch.sums_of_tokens(batch["loss_mask"].double())
    # A group without a trained token has no lengths to weigh by. It uses the plain mean over samples.
    weights = torch.where(mean_of(tokens, group) > 0, tokens, sample_shares(batch))
    return scores - mean_of(scores, group, weights)


@estimator("otb", compares_group=True, needs=("proximal_logprobs", "cold_logprobs"))
def otb(batch: TrajectoryBatch) -> Tensor:
    """G_t - sum(W_t G_t) / sum(W_t) over the group's t-th trained tokens, W_t = sum to t of 1 - 2 p + sum over v p_v^2.

    The optimal token baseline: 1 - 2 p + sum p_v^2 is the squared gradient of log p with respect to the logits. At a
    position that only one trajectory reaches, the advantage is 0. The sum over the vocabulary is exp(2 log p - log q),
    where q is the token's probability at half the temperature. p and q are the policy's before the updates.
    Source: arXiv 2602.07078
    """
    trained = batch["loss_mask"].nonzero()[:, 0]  # [M], trained tokens on this rank
    logprobs, cold = batch["proximal_logprobs"][trained].double(), batch["cold_logprobs"][trained].double()
    norms = (1.0 - 2.0 * logprobs.exp() + (2.0 * logprobs - cold).exp()).clamp_min(0.0)
    sequence = batch.sequence_ids[trained]
    first = torch.searchsorted(sequence, sequence)  # [M]: index of the first trained token of the token's trajectory
    parts = torch.split(norms, torch.bincount(sequence, minlength=len(batch)).tolist())
    # One cumulative sum per trajectory. A single one over all would round differently with the tokens on this rank.
    weights = torch.cat([part.cumsum(0) for part in parts]) * sample_shares(batch)[sequence]
    group, scores = members(batch), batch["scores"].double()
    earned = returns(batch, 1.0)[trained].double() - mean_of(scores, group, sample_shares(batch))[sequence]
    # One cell per position of each group, the same on all ranks, since a group's trajectories may be on several ranks.
    counts = batch.sums_of_tokens(batch["loss_mask"].long())
    longest = torch.zeros(int(group.max()) + 1, dtype=torch.int64).scatter_reduce_(0, group, counts, "amax")
    cell = (longest.cumsum(0) - longest)[group][sequence] + torch.arange(len(trained)) - first
    scale = max(float(scores.abs().max()), 1e-30)
    columns = [weights * earned / scale * FIXED_POINT, weights * FIXED_POINT, torch.ones_like(weights)]
    sums = torch.zeros(int(longest.sum()), 3, dtype=torch.int64)
    sums = batch.total(sums.index_add_(0, cell, torch.stack(columns, dim=1).round().long()))[cell]
    baseline = sums[:, 0].double() / sums[:, 1].clamp_min(1).double() * scale
    result = torch.zeros(len(batch["loss_mask"]), dtype=torch.float64)
    result[trained] = torch.where((sums[:, 1] > 0) & (sums[:, 2] > 1), earned - baseline, 0.0)
    return result


@estimator("cpgd", compares_group=True, rules=CPGD)
def cpgd(batch: TrajectoryBatch, *, weight: str = "std", most: float = 3.0) -> Tensor:
    """w (r - mean of the group), w by `weight`.

    With weight = equal, w is 1. With std, w is 1 / std of the group. With clip_filter, w is the number of groups
    divided by the number of groups with variance, at most `most`. clip_filter scales informative prompts up, as if the
    uninformative ones had been resampled.
    Source: arXiv 2505.12504
    """
    scores, shares, group = batch["scores"].double(), sample_shares(batch), members(batch)
    if weight != "clip_filter":
        return normalize(scores, group, mean="group", std="group" if weight == "std" else "none", shares=shares)
    differs = deviation_of(scores, group, correction=1, shares=shares) > 0
    informative = torch.bincount(group, differs.double()).count_nonzero()  # groups whose rewards differ
    centered = scores - mean_of(scores, group, shares)
    return centered * min((int(group.max()) + 1) / max(int(informative), 1), most)


@estimator("maxrl", compares_group=True)
def maxrl(batch: TrajectoryBatch) -> Tensor:
    """(r - m) / m, m the group's mean reward.

    Approximates the gradient of log p(success) to the order that the group size allows. Rewards must not be negative. A
    group whose rewards are all 0 has advantage 0.
    Source: arXiv 2602.02710
    """
    scores = batch["scores"].double()
    mean = mean_of(scores, members(batch), sample_shares(batch))
    return torch.where(mean > EPS, (scores - mean) / mean.clamp_min(EPS), 0.0)


@estimator("pass@k", compares_group=True, rules=PASS_AT_K)
def pass_at_k(batch: TrajectoryBatch, *, k: int = 4) -> Tensor:
    """(E[best of k with i in] - E[best of k]) / std[best of k], over the group's subsets of k.

    This is the paper's closed form for rewards of 0 and 1, generalised to any rewards. If the group is smaller than k,
    the whole group is the only subset. A sample with several trajectories is compared by its mean reward, and each of
    its trajectories gets its advantage.
    Source: arXiv 2508.10751
    """
    samples, scores = batch.samples, batch.means_of_samples(batch["scores"]).double()
    group = torch.zeros(len(scores), dtype=torch.int64)
    group[samples] = members(batch)  # a sample's trajectories all write the same group
    result = torch.zeros_like(scores)
    for number in range(int(group.max()) + 1):
        place = (group == number).nonzero()[:, 0]
        result[place] = _best_of_subsets(scores[place], min(k, len(place)))
    return result[samples]


def _best_of_subsets(rewards: Tensor, k: int) -> Tensor:
    """Compute `pass_at_k` of one group.

    Of the group's subsets of k, the j-th lowest reward is the best in C(j - 1, k - 1).
    """
    n, order = len(rewards), rewards.argsort()
    ascending = rewards[order].tolist()
    chance = [comb(j, k - 1) / comb(n, k) for j in range(n)]  # j counts from 0, so j rewards are lower
    mean = sum(r * p for r, p in zip(ascending, chance, strict=True))
    deviation = sqrt(max(sum(p * (r - mean) ** 2 for r, p in zip(ascending, chance, strict=True)), 0.0))
    result = torch.zeros(n, dtype=torch.float64)
    if deviation <= EPS * max(map(abs, ascending)):
        return result
    better = 0.0  # sum over higher ranks j of r_j times the number of subsets with both rewards in which j is the best
    for rank in reversed(range(n)):
        own = ascending[rank] * comb(rank, k - 1) + better  # sum over all C(n - 1, k - 1) subsets with this reward
        result[order[rank]] = (own / comb(n - 1, k - 1) - mean) / (deviation + EPS)
        # A subset with a given lower reward takes its other k - 2 members from the remaining rank - 1 lower ones.
        better += ascending[rank] * (comb(rank - 1, k - 2) if k > 1 and rank > 0 else 0)
    return result


@estimator("gdpo", mean="batch", std="batch", compares_group=True)
def gdpo(batch: TrajectoryBatch, *, weights: Mapping[str, float] | None = None) -> Tensor:
    """(B - mean of the batch) / std of the batch, B = sum of weight (part - mean of the group) / std of the group.

    The sum is over the parts of the reward, from rollout.recipe or from a reward function that returns several.
    `weights` must be those by which the parts add up to the reward. Each part is normalised on its own, so small
    differences in one part count as much as large ones in another.
    Source: arXiv 2601.05242
    """
    parts = {name.removeprefix(PART): column for name, column in batch.sequences.items() if name.startswith(PART)}
    if not parts:
        raise ValueError(
            f"algo.advantage = gdpo: the trajectories have the columns {sorted(batch.sequences)}, and no parts of a "
            f"reward; name several rewards in rollout.recipe, or have the reward function return a dict of its parts, "
            f"and use a workflow that returns the reward unchanged, such as megatron_rl.workflows:RLVRWorkflow."
        )
    of_part = {name: _weight_of(name, weights or {}) for name in parts}
    whole = torch.stack([of_part[name] * column.double() for name, column in parts.items()])  # [parts, B]
    scores = batch["scores"].double()
    apart = (whole.sum(0) - scores).abs() > 1e-4 * whole.abs().sum(0).clamp_min(1e-2)
    if bool(apart.any()):
        place = int(apart.nonzero()[0, 0])
        raise ValueError(
            f"algo.advantage = gdpo: the shaped reward of trajectory {place} is {float(scores[place]):g}, but its "
            f"parts with the weights {of_part} sum up to {float(whole[:, place].sum()):g}: something outside of the "
            f"parts changed the reward; remove reward_shaping, reward_model and algo.kl_in = reward."
        )
    group, shares = batch["group"], sample_shares(batch)
    normal = {
        name: normalize(column, group, mean="group", std="group", shares=shares) for name, column in parts.items()
    }
    return torch.stack([of_part[name] * column for name, column in normal.items()]).sum(0)


def _weight_of(part: str, weights: Mapping[str, float]) -> float:
    """Return the weight of a part of the reward: its own, or that of the function that returned it; 1 by default."""
    return weights.get(part, weights.get(part.partition("/")[0], 1.0))


@estimator("gae", mean="batch", std="batch")
def gae(
    batch: TrajectoryBatch,
    *,
    discount: float = 1.0,
    trace_decay: float = 1.0,
    level: str = "token",
    decoupled: bool = False,
    length_factor: float = 0.0,
) -> Tensor:
    """A_t = d_t + discount trace_decay A_t', d_t = r_t + discount V_t' - V_t, t' the next trained token or turn.

    Needs a critic's `values`, and sets the critic's targets `returns` = A + V. With level = turn, each turn has one
    reward, one advantage and one value, the value before its first token. Discounts then count turns. decoupled = True
    computes `returns` with a trace_decay of 1. With length_factor above 0, a sequence's trace_decay is 1 - 1 /
    (length_factor l), but at least 0; l is the number of its trained tokens or turns. decoupled and length_factor are
    from arXiv 2504.05118. All options are keys of the section `critic`.
    Source: arXiv 1506.02438
    """
    mask, bounds = batch["loss_mask"], batch.cu_seqlens
    rewards, values, turn = batch["token_rewards"], batch["values"], None
    if level == "turn":
        # From here on a turn replaces a token, and `bounds` replaces cu_seqlens.
        turn, bounds, earned = turn_rewards(batch)
        values, mask = values[first_of_turn(turn)], torch.ones(len(earned), dtype=torch.bool)
        rewards = earned.to(values.dtype)
    given = (rewards, values, mask, bounds)
    if length_factor > 0:
        advantages, found = _gae_by_length(*given, discount=discount, length_factor=length_factor)
    else:
        advantages, found = packed_gae(*given, discount=discount, trace_decay=trace_decay)
    if decoupled:
        found = packed_discounted_returns(rewards, mask, bounds, discount=discount)
    batch.tokens["returns"] = found if turn is None else spread_over_turns(found, turn)
    return advantages if turn is None else spread_over_turns(advantages, turn)


def _gae_by_length(
    rewards: Tensor, values: Tensor, mask: Tensor, bounds: Tensor, *, discount: float, length_factor: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns `[N]`. The trace_decay of each sequence depends on its length, as in `gae`."""
    parts = [(values[:0], values[:0])]
    for start, stop in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        own, count = slice(start, stop), int(mask[start:stop].sum())
        decay = max(0.0, 1.0 - 1.0 / (length_factor * max(count, 1)))
        whole = torch.tensor([0, stop - start])
        parts.append(packed_gae(rewards[own], values[own], mask[own], whole, discount=discount, trace_decay=decay))
    advantages, returns = (torch.cat(column) for column in zip(*parts, strict=True))
    return advantages, returns


@estimator("none")
def none(batch: TrajectoryBatch) -> Tensor:
    """0.

    Rewards are only measured. The training signal is a teacher's log-probabilities alone.
    Source: arXiv 2306.13649
    """
    return torch.zeros_like(batch["scores"])


def members(batch: TrajectoryBatch) -> Tensor:
    return group_numbers(batch["group"])


def sample_shares(batch: TrajectoryBatch) -> Tensor:
    """Return for each trajectory 1 / (number of trajectories of its sample), `[B]` float64.

    These are the weights of a mean over samples.
    """
    return shares_of(batch.samples)


def returns(batch: TrajectoryBatch, discount: float, level: str = "token") -> Tensor:
    """Return the sum of discounted rewards from each trained token onward, `[N]` float64.

    level: `token`, or `turn` to give each token the sum from its turn onward, discounted per turn.
    """
    if level == "turn":
        turn, bounds, earned = turn_rewards(batch)
        everything = torch.ones(len(earned), dtype=torch.bool)
        return spread_over_turns(packed_discounted_returns(earned, everything, bounds, discount=discount), turn)
    return packed_discounted_returns(
        batch["token_rewards"].double(), batch["loss_mask"], batch.cu_seqlens, discount=discount
    )


def turn_rewards(batch: TrajectoryBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's turn, the bounds of the sequences in turns, and each turn's summed reward (float64).

    The first two are the results of `turns_of` for the trained tokens.
    """
    mask = batch["loss_mask"]
    turn, bounds = turns_of(mask, batch.cu_seqlens)
    earned = torch.zeros(int(bounds[-1]), dtype=torch.float64)
    return turn, bounds, earned.index_add_(0, turn[mask], batch["token_rewards"][mask].double())


def of_teacher(batch: TrajectoryBatch) -> Tensor:
    """Return log p(teacher) - log p of each trained token, `[N]` float64; 0 for other tokens.

    log p is that of the policy before the step's updates if it is known, else that of the behaviour policy. The result,
    negated, estimates KL(policy || teacher).
    """
    own = batch["proximal_logprobs" if "proximal_logprobs" in batch else "logprobs"]
    return (batch["teacher_logprobs"].double() - own.double()).masked_fill(~batch["loss_mask"], 0.0)


def compute(
    entry: Estimator,
    batch: TrajectoryBatch,
    options: AlgorithmConfig,
    args: dict[str, Any],
    *,
    teacher_coefficient: float = 0.0,
) -> None:
    """Set `advantages` `[N]` float32, 0 for untrained tokens. Collective: every rank calls it.

    The batch is the whole step's. If the estimator's result is `[B]`, it is normalised over samples; if it is `[N]`,
    over trained tokens. The teacher's term, teacher_coefficient times `of_teacher`, is added without normalisation.
    Raises ValueError if scores or advantages are NaN or infinite, or if the estimator's result has another shape.
    """
    wrong = int((~batch["scores"].isfinite()).sum())
    _check_finite(batch["scores"], wrong, len(batch), "the shaped reward: scores")
    mask, contract = batch["loss_mask"].bool(), f"the batch has {', '.join([*batch.sequences, *batch.tokens])}"
    found = call(entry.function, [batch], args, key=f"algo.advantage = {options.advantage!r}", contract=contract)
    mean, std = options.advantage_mean or entry.mean, options.advantage_std or entry.std  # '' uses the entry's default
    # A rank may happen to hold as many tokens as there are trajectories, so the shapes on all ranks decide.
    is_other = not isinstance(found, Tensor) or found.shape != (len(batch),)
    if int(batch.total(torch.tensor([int(is_other)]))) == 0:
        found = batch.spread(normalize(found, batch["group"], shares=sample_shares(batch), mean=mean, std=std))
    elif isinstance(found, Tensor) and found.shape == mask.shape:
        found = normalize_tokens(found, batch, mean=mean, std=std)  # untrained tokens may hold any value
    else:
        returned = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"algo.advantage = {options.advantage!r}: {described(entry.function)} returned {returned}; must be "
            f"one number for each of {len(batch)} trajectories, or for each of {len(mask)} tokens, as a tensor."
        )
    if teacher_coefficient > 0:
        found = found.double() + teacher_coefficient * of_teacher(batch)
    if options.advantage_clip > 0:
        found = found.clamp(-options.advantage_clip, options.advantage_clip)
    found = found.masked_fill(~mask, 0.0).float()  # normalised in float64, so that rounding is no deviation
    wrong, count = batch.total(torch.tensor([int((~found.isfinite()).sum()), len(found)])).tolist()
    _check_finite(found, wrong, count, f"algo.advantage = {options.advantage!r}: advantages")
    batch.tokens["advantages"] = found


def _check_finite(values: Tensor, wrong: int, count: int, what: str) -> None:
    """Raise ValueError on all ranks if any of the values that `what` names is NaN or infinite.

    wrong, count: over all replicas, the number of values that are NaN or infinite, and the number of all values.
    """
    if wrong:
        here = (~values.isfinite()).nonzero()[:, 0].tolist()
        first = f"{what}[{here[0]}] = {float(values[here[0]])}, and" if here else f"{what}:"
        raise ValueError(
            f"{first} {wrong} of {count} are not finite; look at the rewards of the workflow and of the reward model, "
            f"and at the estimator."
        )
