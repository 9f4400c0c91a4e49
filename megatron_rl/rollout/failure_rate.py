"""Ends a run if infrastructure fails too many tries of samples, because the run would train only on the others."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from megatron_rl.api import InfrastructureFailure

NEWEST = 256
"""Minimum number of recent tries on which to judge. Fewer say little about a service that fails occasionally."""
WINDOW_S = 60.0
"""All tries of the last WINDOW_S seconds count. Otherwise a service that is down for one second could stop a large run,
because it fails hundreds of tries at once."""


class FailureRate:
    """Counts the most recent tries of samples by outcome.

    Use it on one event loop only, since it reads the loop's clock.
    """

    def __init__(self, most: float) -> None:
        """most: largest share of failures that does not stop the run, in (0, 1]."""
        self._most = most
        self._tries: deque[tuple[float, str]] = deque()
        self._counts: Counter[str] = Counter()
        self._newest: InfrastructureFailure | None = None

    def add(self, failure: InfrastructureFailure | None) -> None:
        """Count a try. failure: None if the try succeeded, or failed for another reason."""
        now, kind = asyncio.get_running_loop().time(), "" if failure is None else failure.kind
        self._newest = failure or self._newest
        self._tries.append((now, kind))
        self._counts[kind] += 1
        while len(self._tries) > NEWEST and self._tries[0][0] < now - WINDOW_S:
            self._counts[self._tries.popleft()[1]] -= 1

    def excess(self) -> str | None:
        """Return a message if the share of failures exceeds the limit, else None.

        The result is also None until NEWEST tries have ended.
        """
        tries, failed = len(self._tries), len(self._tries) - self._counts[""]
        if tries < NEWEST or failed <= self._most * tries:
            return None
        kinds = ", ".join(f"{kind} {count}" for kind, count in self._counts.most_common() if kind and count)
        return (
            f"rollout.max_infrastructure_failures = {self._most:g}: infrastructure failed {failed} of the last {tries} "
            f"tries of samples ({kinds}), and what is trained would be what happened to be spared. The newest error is "
            f"{type(self._newest).__name__}: {self._newest}. Mend that and resume the run, or raise the option."
        )
