"""Runs an agent once in a worker process.

This module does not import torch, because hundreds of these processes are forked, each for one run.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_rl.api import infrastructure_in
from megatron_rl.config.import_path import resolve
from megatron_rl.rewards.faults import shortened, words_of
from megatron_rl.rewards.worker import logged

NICENESS = 10
"""Niceness added to agents, so that the process that serves them keeps priority over hundreds of active agents."""


def running(path: str, args: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load the agent at the import path, bind `args` to it, and return a function that runs it.

    A class is instantiated here, once, with `args`. The processes forked later share what the object has loaded.
    """
    os.nice(NICENESS)
    agent = resolve(path, key="rollout.workflow_args.agent", kind="agent", import_from=None)
    return partial(run, agent(**args) if inspect.isclass(agent) else partial(agent, **args), os.getcwd())


def run(agent: Callable[..., Any], home: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run the agent once. Return a dict with its `value`, an `error`, or `wrong`.

    The agent works in the run's folder `home`; its temporary files are removed afterwards. The dict's `is_alone` is
    true if the agent left no child process. `wrong` is the text of a value whose type is not allowed. `error` holds the
    message, the traceback, and the kind of infrastructure failure (empty for any other error).
    """
    tempfile.tempdir = os.environ["TMPDIR"] = os.getcwd()
    os.chdir(home)
    try:
        found = agent(request["base_url"], request["api_key"], request["data"])
        answer = value_of(asyncio.run(as_coroutine(found)) if inspect.isawaitable(found) else found)
    except BaseException as error:  # users' code may raise anything
        failure = infrastructure_in(error)
        kind = "" if failure is None else failure.kind
        answer = {"error": [words_of(error)[:2000], traceback.format_exc()[-8000:], kind]}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return answer | {"is_alone": has_no_child()} | logged()


async def as_coroutine(awaitable: Any) -> Any:
    return await awaitable  # before Python 3.14 asyncio.run only takes coroutines


def value_of(found: Any) -> dict[str, Any]:
    if found is None:
        return {"value": None}
    try:
        value = list(map(float, found)) if isinstance(found, list | tuple) else float(found)
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return {"wrong": shortened(found)}
    return {"value": value}


def has_no_child() -> bool:
    """Reap exited children, which include orphaned descendants. Return True if no child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False
