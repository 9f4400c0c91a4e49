"""Checks that an object is a workflow, before or in the first episode. Errors name the user's class and line."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any, cast

from megatron_rl.api import InferenceEngine, RolloutWorkflow, Sampler
from megatron_rl.config.import_path import code_of, described
from megatron_rl.config.users_code import PACKAGE

FORM = "must be a coroutine function: async def arun_episode(self, engine, data)"


def check_workflow(workflow: Any, *, key: str = "workflow") -> None:
    """Raise ValueError if an object cannot be a workflow.

    key: the option or argument that names it, for the message.
    """
    if inspect.isclass(workflow):
        raise ValueError(
            f"{key}: is the class {workflow.__qualname__}; give an object of it, {workflow.__name__}(...)."
        )
    method = getattr(workflow, "arun_episode", None)
    if not callable(method):
        raise ValueError(
            f"{key}: is {type(workflow).__name__}, which has no arun_episode; give a workflow, an object of a subclass "
            f"of RolloutWorkflow."
        )
    if inspect.isasyncgenfunction(method) or inspect.isgeneratorfunction(method):
        raise ValueError(f"{key}: {described(method)} has a yield; {FORM}, which returns all trajectories at once.")
    try:
        inspect.signature(method).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{key}: {described(method)} does not take engine and data ({error}); {FORM}.") from error


def begun(workflow: RolloutWorkflow, engine: Sampler, data: dict[str, Any]) -> Awaitable[Any]:
    """Start an episode of the workflow: call its method and return the awaitable result.

    Raises TypeError if the result is not awaitable.
    """
    # The type is AReaL's; an episode only requests replies from its engine and does not control servers.
    episode: Any = workflow.arun_episode(cast(InferenceEngine, engine), data)
    if not inspect.isawaitable(episode):
        raise TypeError(f"{described(workflow.arun_episode)} returned {type(episode).__name__}; {FORM}.")
    return episode


def name_of(workflow: RolloutWorkflow) -> str:
    """Return the import path of a workflow's class and, for user code, its file and line."""
    code, path = code_of(workflow.arun_episode), f"{type(workflow).__module__}:{type(workflow).__qualname__}"
    is_theirs = code is not None and not code.co_filename.startswith(PACKAGE)
    return f"{path} at {code.co_filename}:{code.co_firstlineno}" if code is not None and is_theirs else path
