"""Chooses the number of tokens to guess before a pass, by the share of earlier guesses that were right.

The time of a pass is estimated as the time to read the weights, plus arithmetic for each token, plus the guesses. The
constants were measured with SmolLM2-135M on a CPU (benchmarks/bench_draft.py). No clock is read, so the choice is the
same on each machine.
"""

from __future__ import annotations

DOUBLED_AT = 24
"""Number of tokens whose arithmetic takes as long as reading the weights."""
SINGLE = 0.7
"""Time to read the weights in a pass over one token, relative to a pass over several.

For one token, oneDNN multiplies the matrix by a vector, which is faster than by a matrix.
"""
GUESS = 0.07
"""Time to guess one token for each request, relative to the time to read the weights."""
FIRST_SHARE, FIRST_WEIGHT = 0.6, 30
"""Prior for a new head: share of right guesses, and the number of guesses that the prior counts as."""
KEPT = 0.5
"""Factor on the counts after an update of the model's weights. The prior is then added with the factor 1 - KEPT."""


class Hits:
    """Share of guesses that were right. A guess counts only if all guesses before it in the same pass were right.

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
        """Average the counts with the prior (see KEPT). Call this after an update of the model's weights."""
        self._right = KEPT * self._right + (1 - KEPT) * FIRST_SHARE * FIRST_WEIGHT
        self._tried = KEPT * self._tried + (1 - KEPT) * FIRST_WEIGHT

    def best_count(self, requests: int, most: int) -> int:
        """Return the number of guesses per request, at most `most`, with the highest expected tokens per second."""
        return max(range(max(most, 0) + 1), key=lambda count: self._tokens(count) / pass_time(requests, count))

    def _tokens(self, count: int) -> float:
        """Return the expected number of tokens that a request gains from one pass over `count` guesses."""
        return sum(self.share**number for number in range(count + 1))


def pass_time(requests: int, count: int) -> float:
    """Return the time of a pass with `count` guesses per request, relative to the time to read the weights."""
    tokens = requests * (1 + count)
    return (1 if tokens > 1 else SINGLE) + tokens / DOUBLED_AT + GUESS * count
