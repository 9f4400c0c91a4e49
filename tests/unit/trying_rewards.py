"""Rewards that try the processes they are computed in."""

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from megatron_rl import log_metric
from megatron_rl.sandbox.locked import SandboxFailed, TextFailed, evaluate
from tests.kit.waiting import wait_until

HEAVY = ("torch", "transformers", "numpy", "aiohttp", "omegaconf")


def process_id(until="", **_):
    """Return this worker's id, once the file `until` exists."""
    wait_until(lambda: not until or os.path.exists(until), "the file is not written")
    return os.getpid()


def workers_met(folder, **_):
    """How many workers compute this at the same time, of two that wait for each other."""
    Path(folder, str(os.getpid())).touch()
    wait_until(lambda: len(os.listdir(folder)) >= 2, "the other one does not come")
    return len(os.listdir(folder))


def heavy_modules(**_):
    return sum(name in sys.modules for name in HEAVY)


def evaluated(completions, *, time_s=0.5, **_):
    """1 if the text, as Python, is 1: as some scorers go about it."""
    try:
        return float(evaluate(evaluated_text, completions, time_s=time_s, memory_bytes=256 << 20) == 1.0)
    except TextFailed:
        return 0.0


def evaluated_text(text):
    return float(eval(text))


class NoVerdict(Exception):
    pass


def misbehaves(completions, path="", **_):
    """Do what the reply says; a reward's own faults, not those of text that it runs."""
    if completions == "raise":
        raise NoVerdict(f"no verdict on {completions!r} \ud800")
    if completions == "die":
        os._exit(3)
    if completions == "crash":
        ctypes.string_at(0)
    if completions == "exit":
        sys.exit(0)
    if completions == "hog":
        return len(bytearray(64 << 30))
    if completions == "write":
        with open("here", "w") as file:
            file.write("x")
        return 1.0
    if completions == "start a process and hang":
        with open(path, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "3600"]).pid))
        time.sleep(3600)
    return {"nan": float("nan"), "huge": 10**400, "a word": "word", "right": 1.0}[completions]


async def awaited(completions, *, factor=1.0, **_):
    await asyncio.sleep(0.01)
    return factor * len(completions)


async def awaited_for_long(**_):
    await asyncio.sleep(3600)


async def awaits_a_slow_service(**_):
    raise TimeoutError("the service took its time")


def half(scale=1.0, **_):
    return 0.5 * scale


def in_parts(completions, **_):
    special = {"none": {}, "nan": {"short": float("nan")}}
    return special.get(completions, {"short": 1.0, "long": len(completions)})


async def awaited_in_parts(**_):
    return {"seven": 7}


def logs(completions, **_):
    log_metric("length", len(completions))
    log_metric("length", 2)
    if completions == "raises":
        raise KeyError("weight")
    log_metric("share", float("nan") if completions == "nan" else 0.5)
    return 1.0


def loses_its_sandbox(**_):
    raise SandboxFailed("no memory")
