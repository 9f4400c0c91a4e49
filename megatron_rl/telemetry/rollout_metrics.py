"""Counters of the rollout, which are reset when they are read."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

is_counted = ContextVar("is_counted", default=True)
"""Whether work in the current task counts towards a step's rollout metrics. False inside evaluation episodes."""


COUNTED = (
    *("masked_tokens", "constrained_tokens", "stale_cache_tokens", "masked_cut_offs", "rewards_late", "interruptions"),
    *("request_retries", "server_failures", "bad_replies", "unknown_logprobs"),
)
"""Names of the sums that are reported as `rollout/<name>`."""
OUTCOMES = ("accepted", "rejected", "failed", "retried", "stale", "uniform")
"""Names of the sums that are reported as `rollout/episodes_<name>`."""
MEANS = {
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
"""{metric: (name of the sum that is its numerator, name of the sum that is its denominator)}."""
Fractions = dict[str, tuple[float, float]]
"""{metric: (numerator, denominator)}."""


@dataclass(kw_only=True)
class Counts:
    """One client's counts over a period."""

    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """{name: sum}. If the name begins with `rollout/`, the sum is reported as a metric of this name."""
    most: dict[str, float] = field(default_factory=dict)
    observed: Fractions = field(default_factory=dict)
    """{metric: (total, number of observations)}. The metric is reported as the mean."""


def means_of(parts: Iterable[Fractions]) -> dict[str, float]:
    """Return {metric: sum of its numerators / sum of its denominators}. Metrics with denominator 0 are left out."""
    sums: Fractions = {}
    for part in parts:
        for name, (total, count) in part.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
    return {name: total / count for name, (total, count) in sums.items() if count}


def metrics_of(clients: Sequence[Counts]) -> dict[str, float]:
    """Return {metric: value} of the rollout, for all clients together."""
    sums: dict[str, float] = defaultdict(float, {"rollout/infrastructure_failures": 0.0})
    most: dict[str, float] = {}
    for counts in clients:
        for name, amount in counts.sums.items():
            sums[name] += amount
        for name, value in counts.most.items():
            most[name] = max(value, most.get(name, value))
    seconds = sum(counts.seconds for counts in clients)
    metrics = {f"rollout/episodes_{name}": sums[name] for name in OUTCOMES}
    metrics |= {f"rollout/{name}": sums[name] for name in COUNTED}
    metrics["rollout/generated_tokens"] = sums["tokens"]
    metrics["rollout/servers_idle_share"] = 1.0 - sums["generating_s"] / seconds if seconds else 0.0
    # Report a mean only if something was counted; 0 would look like a measurement.
    metrics |= {key: sums[top] / sums[bottom] for key, (top, bottom) in MEANS.items() if sums[bottom]}
    if sums["generating_s"]:  # clients generate concurrently
        metrics["rollout/tokens_per_s"] = len(clients) * sums["tokens"] / sums["generating_s"]
    metrics |= means_of(counts.observed for counts in clients)
    metrics |= {name: value for name, value in sums.items() if name.startswith("rollout/")}
    return metrics | {f"rollout/{name}": value for name, value in most.items()}


class RolloutMetrics:
    """Collector of one client's counts. It is thread-safe.

    The sum `generating_s` is the time with at least one request in flight. Calls do nothing while `is_counted` is
    False, except for `take`.

        metrics = RolloutMetrics()
        metrics.enter()
        metrics.add(tokens=12, replies=1)
        metrics.leave()
        metrics_of([metrics.take()])["rollout/reply_tokens"]  # 12.0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()
        self._in_flight = 0
        self._busy_since = self._taken = time.monotonic()

    def add(self, **amounts: float) -> None:
        if not is_counted.get():
            return
        with self._lock:
            for name, amount in amounts.items():
                self._counts.sums[name] += amount

    def at_least(self, **values: float) -> None:
        """Record values by name. For each name, the largest recorded value is reported."""
        if not is_counted.get():
            return
        with self._lock:
            for name, value in values.items():
                self._counts.most[name] = max(value, self._counts.most.get(name, value))

    def observe(self, values: dict[str, float]) -> None:
        """Record one value of each metric in `values`. A metric is reported as the mean of its recorded values."""
        if not is_counted.get():
            return
        with self._lock:
            for name, value in values.items():
                total, count = self._counts.observed.get(name, (0.0, 0.0))
                self._counts.observed[name] = (total + value, count + 1)

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
            counts, self._counts = self._counts, Counts()
            # `_accrue` has just set _busy_since to now, so both periods end at the same moment.
            counts.seconds, self._taken = self._busy_since - self._taken, self._busy_since
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
            self._counts.sums["generating_s"] += now - self._busy_since
        self._busy_since = now
