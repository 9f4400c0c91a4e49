"""Counters of the rollout, which are reset when they are read."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

is_counted = ContextVar("is_counted", default=True)
"""False inside evaluation episodes, which do not count towards a step's rollout metrics."""


@dataclass(kw_only=True)
class Counts:
    """One client's counts over a period. Those of several clients are added up before means are computed."""

    seconds: float
    sums: dict[str, float]
    """Sums by name. Names that begin with `rollout/` are reported as metrics unchanged."""
    most: dict[str, float]
    observed: dict[str, tuple[float, float]]
    """Name -> (total, number of observations), reported as the mean."""


def metrics_of(clients: Sequence[Counts]) -> dict[str, float]:
    """Compute the rollout metrics of all clients together."""
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
    # Report a mean only if something was counted; 0 would look like a measurement.
    means = {
        "rollout/reply_tokens": ("tokens", "replies"),
        "rollout/truncated_fraction": ("truncated", "replies"),
        "rollout/cut_off_share": ("cut_off", "trajectories"),
        "rollout/right_guesses": ("right_guesses", "guessed_passes"),
        "rollout/reply_latency_s": ("latency_s", "replies"),
        "rollout/queue_wait_s": ("queue_wait_s", "started"),
        "rollout/reward_s": ("reward_s", "rewards"),
        "rollout/support_size": ("support_tokens", "supports"),
        "rollout/staleness": ("staleness", "aged_tokens"),
    }
    metrics |= {key: sums[top] / sums[bottom] for key, (top, bottom) in means.items() if sums[bottom]}
    if sums["generating_s"]:  # clients generate concurrently
        metrics["rollout/tokens_per_s"] = len(clients) * sums["tokens"] / sums["generating_s"]
    metrics |= {name: total / count for name, (total, count) in observed.items() if count}
    metrics |= {name: value for name, value in sums.items() if name.startswith("rollout/")}
    return metrics | {f"rollout/{name}": value for name, value in most.items()}


class RolloutMetrics:
    """Thread-safe sums by name. `generating_s` is the time with at least one request in flight.

    Calls do nothing while `is_counted` is False.

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
        """Record values by name. The maximum of each name is reported."""
        if not is_counted.get():
            return
        with self._lock:
            for name, value in values.items():
                self._most[name] = max(value, self._most.get(name, value))

    def observe(self, values: dict[str, float]) -> None:
        """Record one value per metric. Each metric is reported as its mean over the calls."""
        if not is_counted.get():
            return
        with self._lock:
            for name, value in values.items():
                total, count = self._observed.get(name, (0.0, 0.0))
                self._observed[name] = (total + value, count + 1)

    def enter(self) -> None:
        """Record that a request was sent."""
        self._change_in_flight(+1)

    def leave(self) -> None:
        """Record that a request has ended."""
        self._change_in_flight(-1)

    def take(self) -> Counts:
        """Return the counts since the last call and reset them."""
        with self._lock:
            self._accrue()
            # `_accrue` has just set _busy_since to now, so both periods end at the same moment.
            seconds, self._taken = self._busy_since - self._taken, self._busy_since
            # Requests in flight stay counted: their remaining time belongs to the next call.
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
        # Charge at each change of the number in flight, so that time with several requests counts once.
        if self._in_flight:
            self._sums["generating_s"] += now - self._busy_since
        self._busy_since = now
