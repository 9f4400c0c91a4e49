"""The metrics of one step for metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algo import mismatch
from megatron_rl.algo.aggregation import DEMONSTRATED
from megatron_rl.algo.loss import explained_variance
from megatron_rl.algo.normalize import deviation_of, group_numbers
from megatron_rl.algo.reward_shaping import written_tokens
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.groups import trained_versions
from megatron_rl.telemetry import stats_tracker
from megatron_rl.types import PART, REUSED, StepStats, TrajectoryBatch
from megatron_rl.weights.publish import Publication


def update_metrics(stats: list[StepStats]) -> dict[str, Any]:
    """Return the metrics common to policy and critic, from the updates of a step (at least one)."""
    seen = applied_of(stats)
    weight = max(sum(s.weight for s in seen), 1.0)  # 0 if no token of the step is trained
    return {
        "loss": sum(s.loss * s.weight for s in seen) / weight,
        "first_loss": stats[0].loss,  # before any update: with the policy that sampled, apart from staleness
        "first_grad_norm": stats[0].grad_norm,
        "grad_norm": max(s.grad_norm for s in seen),
        "skipped_updates": sum(not s.applied for s in stats),
        "lr": stats[-1].lr,
    }


def applied_of(stats: list[StepStats]) -> list[StepStats]:
    """Return the updates that were applied, because statistics of skipped ones may be NaN. Return all if none was."""
    return [s for s in stats if s.applied] or stats


def trained_tokens(stats: StepStats) -> float:
    """Return the number of tokens on which an update trained.

    `stats.weight` may instead be a number of trajectories.
    """
    return stats.sums.get("tokens", stats.weight)


def user_metrics(groups: ParallelGroups) -> dict[str, float]:
    """Return the means of what losses have passed to log_metric since the last call, on the main rank; {} on others.

    Collective: every rank calls it. The ranks of a replica have either different parts of a loss's values or equal
    copies of all of them. In both cases, the sum of numerators divided by the sum of denominators is the right mean.
    """
    own = stats_tracker.take()
    of_ranks = [own] * groups.world_size if groups.is_main else None
    if groups.world_size > 1:
        dist.gather_object(own, of_ranks, dst=0, group=groups.control)
    return {f"{stats_tracker.USER}{name}": mean for name, mean in stats_tracker.means_of(of_ranks or []).items()}


COUNTED_IN_ALL = ("bounded_tokens", "not_finite")
"""Counts that include skipped updates, because they explain why an update was skipped."""


def policy_metrics(stats: list[StepStats]) -> dict[str, Any]:
    """Return the policy's metrics. The loss's sums are divided by the number of trained tokens."""
    metrics = update_metrics(stats)
    for key in stats[0].sums:
        over = stats if key in COUNTED_IN_ALL else applied_of(stats)
        metrics[key] = sum(s.sums[key] for s in over) / max(sum(map(trained_tokens, over)), 1.0)
    metrics.pop("tokens", None)  # denominator of the means
    if metrics.pop("demonstrated_tokens", None) is not None:
        nll, count = (sum(s.sums[f"demonstrated_{key}"] for s in applied_of(stats)) for key in ("nll", "tokens"))
        metrics["demonstrated_nll"] = nll / max(count, 1.0)
    if "ratio_deviation" in metrics:
        metrics["first_ratio_deviation"] = stats[0].sums["ratio_deviation"] / max(trained_tokens(stats[0]), 1.0)
    return {f"policy/{key}": value for key, value in metrics.items()}


def critic_metrics(stats: list[StepStats]) -> dict[str, Any]:
    seen = applied_of(stats)
    weight = max(sum(s.weight for s in seen), 1.0)
    sums = {key: sum(s.sums[key] for s in seen) for key in stats[0].sums}
    metrics = update_metrics(stats) | {"explained_variance": explained_variance(sums, weight)}
    metrics["mean_return"] = sums["returns"] / weight
    if "clipped_values" in sums:
        metrics["clipped_values"] = sums["clipped_values"] / weight
    return {f"critic/{key}": value for key, value in metrics.items()}


OWN_COLUMNS = {"group", "sample", "agent", "pair", "prompt", "prompt_index", REUSED}
OWN_COLUMNS |= {"rewards", "scores", "model_rewards", "is_greedy", "greedy_reward", "greedy_score", "greedy_tokens"}
"""Per-trajectory columns for which no metric `trajectory/...` is logged, because they are not a workflow's own numbers
or have other metrics."""


def batch_metrics(batch: TrajectoryBatch, version: int) -> dict[str, Any]:
    """Return the metrics of the step's trajectories, whichever models train on them. Collective: every rank calls it.

    version: policy version before the updates. Reused trajectories count only in the reuse metrics.
    """
    reused = reuse_metrics(batch, version) if REUSED in batch else {}
    batch = batch.fresh()
    own = batch.own()
    rewards = batch["scores" if "rewards" in batch.tokens else "rewards"]  # per-token rewards have no mean of their own
    member = group_numbers(batch["group"])
    # All members of a group have the same deviation; keep one per group.
    deviations = torch.zeros(int(member.max()) + 1, dtype=torch.float64)
    deviations[member] = deviation_of(rewards, member, correction=0)
    metrics: dict[str, Any] = {
        "reward/mean": float(batch.means_of_samples(rewards).mean()),
        "reward/groups_without_variance": float((deviations == 0).double().mean()),
        "batch/trajectories": len(batch),
        "batch/sequence_tokens": float(batch.lengths.float().mean()),
        "histogram/reply_tokens": counts_by_doubling(own.sums_of_tokens(written_tokens(own).long()), batch.total),
        "histogram/token_age": counts_by_number(version - trained_versions(own), batch.total, most=version),
    }
    if "model_rewards" in batch:
        metrics["reward/model"] = float(batch.means_of_samples(batch["model_rewards"]).mean())
    for name, column in batch.sequences.items():
        if name.startswith(PART):
            metrics[f"reward/{name}"] = float(batch.means_of_samples(column).mean())
        elif name not in OWN_COLUMNS:
            metrics[f"trajectory/{name}"] = float(batch.means_of_samples(column.double()).mean())
    return metrics | reused


def reuse_metrics(batch: TrajectoryBatch, version: int) -> dict[str, Any]:
    """Return how many trajectories of the step are reused, their mean reward, and their mean staleness in versions.

    version: policy version before the updates. Collective: every rank calls it.
    """
    again = batch.select(batch.is_reused.nonzero()[:, 0].tolist())
    count = {"reuse/trajectories": len(again)}
    if not len(again):
        return count
    ages = version - trained_versions(again.own())
    sums = batch.total(torch.tensor([int(ages.sum()), len(ages)]))
    rewards = again["scores" if "rewards" in again.tokens else "rewards"]
    mean = {"reuse/reward": float(again.means_of_samples(rewards).mean())}
    return count | mean | {"reuse/staleness": int(sums[0]) / max(int(sums[1]), 1)}


def publication_metrics(publication: Publication) -> dict[str, Any]:
    sent = {} if publication.sent_bytes is None else {"publish/sent_bytes": publication.sent_bytes}
    return {
        "publish/duration_s": publication.seconds,
        "publish/paused_s": publication.paused_s,
        "publish/bytes": publication.nbytes,
        "publish/verified_tensors": publication.verified,
    } | sent


Total = Callable[[Tensor], Tensor]
"""Function that adds up the counts of all ranks, as TrajectoryBatch.total does."""


def counts_by_doubling(values: Tensor, total: Total = lambda counts: counts) -> dict[str, int]:
    """Return a histogram {range: count} of whole numbers. The ranges are [2^k, 2^(k+1)); 0 is counted as 1.

    total: adds up the counts of all ranks.
    """
    classes = total(torch.bincount(values.clamp_min(1).double().log2().floor().long(), minlength=63)).tolist()
    present = [number for number, count in enumerate(classes) if count]
    between = range(present[0], present[-1] + 1) if present else ()
    return {f"{2**k} to {2 ** (k + 1) - 1}" if k else "0 to 1": classes[k] for k in between}


def counts_by_number(values: Tensor, total: Total = lambda counts: counts, *, most: int = 0) -> dict[str, int]:
    """Return a histogram {value: count} of whole numbers. Its values go from 0 to the largest that occurs.

    total: adds up the counts of all ranks. most: an upper bound of the values, equal on all ranks.
    """
    counts = total(torch.bincount(values.clamp_min(0).long(), minlength=most + 1)).tolist()
    end = max((number + 1 for number, count in enumerate(counts) if count), default=0)
    return {str(number): count for number, count in enumerate(counts[:end])}


def mismatch_metrics(
    shares: list[TrajectoryBatch], stats: list[StepStats], version: int, groups: ParallelGroups
) -> dict[str, float]:
    """Compare the log-probabilities of trainer and servers for tokens of the step's first update.

    Reused trajectories and demonstrations are left out. version: policy version before the updates. Collective: every
    rank calls it.
    """
    if not stats or stats[0].logprobs is None:  # equal on all ranks
        return {}
    share = shares[0]
    sampled = share["loss_mask"] & ~share.spread(share.is_reused)
    if DEMONSTRATED in share:
        sampled = sampled & (share[DEMONSTRATED] == 0)  # no server sampled the others
    columns = share["logprobs"], sampled, share["versions"]
    sums, largest = mismatch.tally(stats[0].logprobs, *columns, share.lengths, version)
    if not groups.is_rollout_rank:  # the replica's rollout rank counts the same share
        sums, largest = sums.zero_(), largest.zero_()
    dist.all_reduce(sums, group=groups.control)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=groups.control)
    return mismatch.metrics(sums, largest)
