"""What a workflow must be, said of the user's own class and line before or as its first episode begins."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any, cast

from megatron_rl.api import InferenceEngine, RolloutWorkflow, Sampler
from megatron_rl.config.import_path import described

FORM = "must be a coroutine function: async def arun_episode(self, engine, data)"


def check_workflow(workflow: Any, *, key: str = "workflow") -> None:
    """Raise ValueError for what cannot be a workflow. `key` is where it was given."""
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
    """Return the episode, to be awaited. TypeError where the workflow's method gives nothing to await."""
    # AReaL's name for it; an episode asks its engine for replies, and commands no servers.
    episode: Any = workflow.arun_episode(cast(InferenceEngine, engine), data)
    if not inspect.isawaitable(episode):
        raise TypeError(f"{described(workflow.arun_episode)} returned {type(episode).__name__}; {FORM}.")
    return episode
