"""Number of random examples that a test tries: few in `make test`, more in `make test-all`."""

from __future__ import annotations

import os

IS_THOROUGH = os.environ.get("TESTS_THOROUGH") == "1"
"""`make test-all` sets it."""


def max_examples(default: int, thorough: int) -> int:
    """For hypothesis' settings and for loops over random cases.

    For example:

        @settings(max_examples=max_examples(50, 500), deadline=None)
    """
    return thorough if IS_THOROUGH else default
