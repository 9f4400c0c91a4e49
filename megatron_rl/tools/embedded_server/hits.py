"""Chooses the number of tokens to guess before a pass, by the share of earlier guesses that were right.

The times are those of SmolLM2-135M on a CPU (benchmarks/bench_draft.py). With few tokens a pass takes as long as
reading the weights, with many as long as the arithmetic. A single token is faster: oneDNN then multiplies a matrix by a
vector. The rule reads no clock, so it does the same on each machine.
"""

from __future__ import annotations

DOUBLED_AT = 24
"""Number of tokens whose arithmetic takes as long as reading the weights."""
SINGLE = 0.7
"""Time of reading the weights for a single token, relative to that for several."""
GUESS = 0.07
"""Time of a guess, relative to that of reading the weights."""
FIRST_SHARE, FIRST_WEIGHT = 0.6, 30
"""Share of right guesses that is assumed of a new head, and the number of guesses that it counts as. The first guesses
of a new head thus show how good it is."""
KEPT = 0.5
"""Weight of earlier guesses after new weights have arrived."""


class Hits:
    """The share of guesses that were right, of those whose predecessors were right.

    For example:

        hits = Hits()
        hits.count(right=150, tried=200)
        hits.best_count(requests=2, most=3)  # 3
    """

    def __init__(self) -> None:
        self._right, self._tried = FIRST_SHARE * FIRST_WEIGHT, float(FIRST_WEIGHT)

    @property
    def share(self) -> float:
        return self._right / self._tried

    def count(self, right: int, tried: int) -> None:
        self._right += right
        self._tried += tried

    def forget(self) -> None:
        """Forget a part of what was counted, because weights have changed."""
        self._right = KEPT * self._right + (1 - KEPT) * FIRST_SHARE * FIRST_WEIGHT
        self._tried = KEPT * self._tried + (1 - KEPT) * FIRST_WEIGHT

    def best_count(self, requests: int, most: int) -> int:
        """Return how many tokens to guess for each request, at most `most`, so that tokens arrive fastest."""
        return max(range(max(most, 0) + 1), key=lambda count: self._tokens(count) / pass_time(requests, count))

    def _tokens(self, count: int) -> float:
        """Return the expected number of tokens of a request from one pass over `count` guesses."""
        return sum(self.share**number for number in range(count + 1))


def pass_time(requests: int, count: int) -> float:
    """Return the time of a pass with `count` guesses for each request, relative to that of reading the weights."""
    tokens = requests * (1 + count)
    return (1 if tokens > 1 else SINGLE) + tokens / DOUBLED_AT + GUESS * count
