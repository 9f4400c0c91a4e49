"""Runs a function on forked ranks of a gloo world. megatron is imported once, by the parent, and only forked after."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from megatron_rl import platform
from megatron_rl.launch import start_up
from megatron_rl.launch.ports import free_port
from tests.kit.waiting import SLOWNESS

platform.prepare()
LATER = (
    "models.mimo",
    "dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.state_dict_saver",
)
"""Modules of megatron.core that each rank would import for an engine or a checkpoint; some versions lack some."""
with start_up.importing():
    import megatron_rl.engine.megatron_engine  # noqa: F401  the children inherit the import

    for module in LATER:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"megatron.core.{module}")
# Each rank's torch asks for its backends, for which Python would read a file of every package: a tenth of a second.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
importlib.metadata.entry_points(group="torch.distributed.backends")

HANGS_S = 500.0 * SLOWNESS
"""After which a world is ended that hangs: before pytest ends the test, which would not say where its ranks are."""
FAILS_S = 3.0 * SLOWNESS


def run_ranks(count: int, function: Callable[..., Any], *args: Any, timeout_s: float = HANGS_S) -> list[Any]:
    """Run `function(*args)` in `count` forked processes and return what each returned, by rank.

    Raises AssertionError with the first failing rank's traceback; a rank that hangs is killed at the deadline.
    """
    port, pids = str(free_port("127.0.0.1")), {}
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                _child(rank, count, port, folder, function, args)
            pids[pid] = rank
        failed = _reap(pids, time.monotonic() + timeout_s)
        if failed:
            reports = {rank: folder / f"{rank}.error" for rank in sorted(failed)}
            texts = [
                f"rank {rank}: {path.read_text() if path.exists() else failed[rank]}" for rank, path in reports.items()
            ]
            raise AssertionError("\n".join(texts))
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(count)]


def run_each(
    count: int, function: Callable[..., Any], cases: Mapping[Any, tuple[Any, ...]], *, timeout_s: float = HANGS_S
) -> dict[Any, list[Any]]:
    """Run `function(*arguments)` of each case, one after the other on the same ranks; by case, what each rank returned.

    Starting a world takes longer than most cases, and so do its layouts, of which `tiny.start` builds each once.
    """
    ranks = run_ranks(count, _each, function, cases, timeout_s=timeout_s)
    return {case: [found[case] for found in ranks] for case in cases}


def _each(function: Callable[..., Any], cases: Mapping[Any, tuple[Any, ...]]) -> dict[Any, Any]:
    found = {}
    for case, arguments in cases.items():
        try:
            found[case] = function(*arguments)
        except BaseException as error:
            error.add_note(f"in case {case!r}")
            raise
    return found


def _child(rank: int, count: int, port: str, folder: Path, function: Callable[..., Any], args: tuple) -> None:
    import torch

    code = 1
    try:
        torch.set_num_threads(1)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        result = function(*args)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        for child in psutil.Process().children(recursive=True):  # dist_checkpointing leaves a queue manager running
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no atexit handlers: they belong to the parent


def fork(function: Callable[..., Any], args: tuple[Any, ...], output: Path) -> int:
    """Start `function(args)` in a forked process, a world of its own that writes to `output`; return its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with output.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # whoever captured them
        import torch

        torch.set_num_threads(1)
        function(args)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
        if isinstance(stop.code, str):  # as the interpreter does
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap(pids: dict[int, int], deadline: float) -> dict[int, str]:
    """Wait for all ranks; once one fails the others get FAILS_S to fail too and are then killed."""
    failed: dict[int, str] = {}
    left = dict(pids)
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = left.pop(pid)
                if code := os.waitstatus_to_exitcode(status):
                    failed[rank] = f"exit code {code}"
                    deadline = min(deadline, time.monotonic() + FAILS_S)
        if left and time.monotonic() > deadline:
            for pid, rank in left.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                failed.setdefault(rank, "killed at the deadline")
            left.clear()
        time.sleep(0.01)
    return failed
