"""Forked processes by their pids: the ranks of a world that nobody waits for yet, and how they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.launch.ports import free_port
from tests.kit.ranks import fork
from tests.kit.waiting import LATE_S, wait_until


def start_ranks(
    count: int, run: Callable[..., Any], overrides: tuple[str, ...], output: Path, *, nodes: int = 1
) -> list[int]:
    """Start `run(overrides)` on every rank of a world, told that they are on so many nodes; return the pids."""
    here = count // nodes
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(here), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port("127.0.0.1"))
    places = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank % here)} for rank in range(count)]

    def rank(place: dict[str, str]) -> None:
        os.environ |= place
        run(overrides)

    return [fork(rank, place, output) for place in places]


def has_ended(pid: int) -> bool:
    """True for a child that is gone; leaves it for waitpid."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def exit_codes(pids: Sequence[int]) -> list[int]:
    """Wait for children and return how they ended. One that does not is killed where the test's time is over."""
    try:
        wait_until(lambda: all(map(has_ended, pids)), f"processes {pids} do not end", limit_s=LATE_S)
    finally:
        codes = [killed(pid) for pid in pids]
    return codes


def killed(pid: int) -> int:
    """Kill a child that is still there; return how it ended."""
    if not has_ended(pid):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_end(pids: Sequence[int], output: Path, code: int = 0) -> None:
    """Wait for children that all must end with `code`; AssertionError shows what they wrote."""
    codes = exit_codes(pids)
    assert codes == [code] * len(pids), f"{codes}: {output.read_text()}"
