"""Counts of what the rollout did since they were last taken."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

is_counted = ContextVar("is_counted", default=True)
"""False in the episodes of an evaluation, which are no part of a step's rollout."""


@dataclass(kw_only=True)
class Counts:
    """The counts of one client of a run in a while. Several add up: a mean is one over what all of them counted."""

    seconds: float
    sums: dict[str, float]
    """By name; one that is a metric's own, `rollout/...`, is reported as it is."""
    most: dict[str, float]
    observed: dict[str, tuple[float, float]]
    """Total and number of what it is of, such as calls."""


def metrics_of(clients: Sequence[Counts]) -> dict[str, float]:
    """Return the rollout metrics of all clients together."""
    sums: dict[str, float] = defaultdict(float)
    most: dict[str, float] = {}
    observed: dict[str, tuple[float, float]] = {}
    for counts in clients:
        for name, amount in counts.sums.items():
            sums[name] += amount
        for name, value in counts.most.items():
            most[name] = max(value, most.get(name, value))
        for name, (total, count) in counts.observed.items():
            before, number = observed.get(name, (0.0, 0.0))
            observed[name] = before + total, number + count
    seconds = sum(counts.seconds for counts in clients)
    outcomes = ("accepted", "rejected", "failed", "retried", "stale", "uniform")
    metrics = {f"rollout/episodes_{name}": sums[name] for name in outcomes}
    metrics |= {
        "rollout/generated_tokens": sums["tokens"],
        "rollout/masked_tokens": sums["masked_tokens"],
        "rollout/constrained_tokens": sums["constrained_tokens"],
        "rollout/masked_cut_offs": sums["masked_cut_offs"],
        "rollout/rewards_late": sums["rewards_late"],
        "rollout/infrastructure_failures": sums["rollout/infrastructure_failures"],
        "rollout/interruptions": sums["interruptions"],
        "rollout/request_retries": sums["request_retries"],
        "rollout/server_failures": sums["server_failures"],
        "rollout/bad_replies": sums["bad_replies"],
        "rollout/unknown_logprobs": sums["unknown_logprobs"],
        "rollout/stale_cache_tokens": sums["stale_cache_tokens"],
        "rollout/servers_idle_share": 1.0 - sums["generating_s"] / seconds if seconds else 0.0,
    }
    # A mean exists only where something was counted; 0 would read as a measurement.
    means = {
        "rollout/reply_tokens": ("tokens", "replies"),
        "rollout/truncated_fraction": ("truncated", "replies"),
        "rollout/cut_off_share": ("cut_off", "trajectories"),
        "rollout/reply_latency_s": ("latency_s", "replies"),
        "rollout/queue_wait_s": ("queue_wait_s", "started"),
        "rollout/reward_s": ("reward_s", "rewards"),
        "rollout/staleness": ("staleness", "aged_tokens"),
    }
    metrics |= {key: sums[top] / sums[bottom] for key, (top, bottom) in means.items() if sums[bottom]}
    if sums["generating_s"]:  # clients generate at the same time
        metrics["rollout/tokens_per_s"] = len(clients) * sums["tokens"] / sums["generating_s"]
    metrics |= {name: total / count for name, (total, count) in observed.items() if count}
    metrics |= {name: value for name, value in sums.items() if name.startswith("rollout/")}
    return metrics | {f"rollout/{name}": value for name, value in most.items()}


class RolloutMetrics:
    """Sums by name, from any thread. `generating` of them is the time with at least one request in flight.

    Where `is_counted` is False, calls do nothing.

        metrics = RolloutMetrics()
        metrics.enter()
        metrics.add(tokens=12, replies=1)
        metrics.leave()
        metrics_of([metrics.take()])["rollout/reply_tokens"]  # 12.0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = defaultdict(float)
        self._most: dict[str, float] = {}
        self._observed: dict[str, tuple[float, float]] = {}
        self._in_flight = 0
        self._busy_since = self._taken = time.monotonic()

    def add(self, **amounts: float) -> None:
        if not is_counted.get():
            return
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def at_least(self, **values: float) -> None:
        """Keep the largest value of each name."""
        if not is_counted.get():
            return
        with self._lock:
            for name, value in values.items():
                self._most[name] = max(value, self._most.get(name, value))

    def observe(self, values: dict[str, float]) -> None:
        """Metrics whose means over the calls are reported, under the names given."""
        if not is_counted.get():
            return
        with self._lock:
            for name, value in values.items():
                total, count = self._observed.get(name, (0.0, 0.0))
                self._observed[name] = (total + value, count + 1)

    def enter(self) -> None:
        """A request goes out."""
        self._change_in_flight(+1)

    def leave(self) -> None:
        """A request is over."""
        self._change_in_flight(-1)

    def take(self) -> Counts:
        """Return what happened since the last call and begin anew."""
        with self._lock:
            self._accrue()
            # `_accrue` has just set it to now: both spans of time end at the same moment.
            seconds, self._taken = self._busy_since - self._taken, self._busy_since
            # Requests in flight stay counted: the rest of their time is the next call's.
            counts = Counts(seconds=seconds, sums=dict(self._sums), most=self._most, observed=self._observed)
            self._sums, self._most, self._observed = defaultdict(float), {}, {}
        return counts

    def _change_in_flight(self, by: int) -> None:
        if is_counted.get():
            with self._lock:
                self._accrue()
                self._in_flight += by

    def _accrue(self) -> None:
        now = time.monotonic()
        # Charged at each change of the number in flight, so that time with several requests counts once.
        if self._in_flight:
            self._sums["generating_s"] += now - self._busy_since
        self._busy_since = now
