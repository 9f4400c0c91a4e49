"""A bound on what peers can make a server write into its log."""

from __future__ import annotations

import logging
import time

WINDOW_S = 60.0
MOST_IN_WINDOW = 20
MOST_KINDS = 256


class LogRate(logging.Filter):
    """Lets a message of one wording through so many times a minute, and says how often it was left out after that.

    handler.addFilter(LogRate())
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """(logger, wording) -> when its window began, and how many came in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, str(record.msg)[:200]), time.monotonic()
        if len(self._kinds) >= MOST_KINDS and kind not in self._kinds:
            self._kinds.clear()
        since, count = self._kinds.get(kind, (now, 0))
        if now - since > WINDOW_S:
            left_out = count - MOST_IN_WINDOW
            if left_out > 0:
                record.msg = f"{record.msg} ({left_out} more of these were left out)"
            since, count = now, 0
        self._kinds[kind] = (since, count + 1)
        return count < MOST_IN_WINDOW
