"""Builds the workflow and the rewards that a config names."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.api import InfrastructureFailure, RolloutWorkflow
from megatron_rl.config import GenerationConfig, TrainConfig
from megatron_rl.config.import_path import resolve
from megatron_rl.rewards.faults import shortened
from megatron_rl.rewards.recipe import Ingredient, Recipe, ingredients, reach
from megatron_rl.rewards.reward_service import SYNCHRONOUS_S, RewardFailed, RewardService, RewardTimeout
from megatron_rl.rewards.worker import with_args
from megatron_rl.rollout.workflow_form import check_workflow
from megatron_rl.workflows.rendering import prompt_ids
from megatron_rl.workflows.scoring import OWN_ARGUMENTS
from megatron_rl.workflows.taught import TaughtWorkflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = {"environment": "environment", "tools": "tool", "agent": "agent"}
"""Workflow argument -> the kind of object that it must name if its value is an import path. Other arguments may name
any."""


def configured_rewards(config: TrainConfig) -> list[Ingredient]:
    """Import the reward functions of rollout.recipe or, if that is empty, the one of rollout.reward."""
    options, allowed = config.rollout, config.run.import_from
    if options.recipe:
        return ingredients("rollout.recipe", options.recipe, allowed)
    function = resolve(options.reward, key="rollout.reward", kind="reward", import_from=allowed)
    try:
        function = with_args(function, {})
    except TypeError as error:
        raise ValueError(
            f"rollout.reward = {options.reward!r}: {error}; name it in rollout.recipe, which can give args to a reward."
        ) from error
    return [Ingredient(name=options.reward.partition(":")[2], path=options.reward, function=function)]


def serve_rewards(config: TrainConfig, *, stacks: int | None = None) -> Recipe:
    """Start the processes that compute the rewards. stacks: open file to which they write their stacks on request."""
    found = configured_rewards(config)
    tasks = [ingredient.task for ingredient in found if not ingredient.is_awaited]
    workers, allowed = config.rollout.reward_workers, config.run.import_from
    return Recipe(found, RewardService(tasks, workers=workers, import_from=allowed, stacks=stacks))


@dataclass(frozen=True)
class TriedReward:
    """Outcome of trying the configured reward before a run."""

    value: float | None
    """The reward that a worker computed. Parts of it that are coroutines are left out; None if all parts are."""
    reached: list[str]
    """Import paths of coroutines whose servers accept connections."""
    not_tried: list[str]
    """Import paths of coroutines whose servers could not be checked."""


def check_reward(config: TrainConfig, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> TriedReward:
    """Try the configured reward on a prompt's row, in a worker process as in the run.

    The row's answer is taken as the reply. For rewards that are coroutines, only check that their servers are
    reachable. Raises ValueError with the reason if the reward fails.
    """
    every, key = configured_rewards(config), f"rollout.{'recipe' if config.rollout.recipe else 'reward'}"
    awaited = [ingredient.path for ingredient in every if ingredient.is_awaited]
    try:
        not_tried = asyncio.run(reach(every, patience_s=0.0)) if awaited else []
    except InfrastructureFailure as error:
        raise ValueError(f"{key}: {error}") from error
    reached = [path for path in awaited if path not in not_tried]
    found = [ingredient for ingredient in every if not ingredient.is_awaited]
    if not found:
        return TriedReward(None, reached, not_tried)
    ids, reply = prompt_ids(tokenizer, row), str(row.get("answer", ""))
    arguments = {name: value for name, value in row.items() if name not in OWN_ARGUMENTS}
    arguments |= {"prompt": "" if tokenizer is None else tokenizer.decode(ids), "completions": reply}
    reply_ids = [] if tokenizer is None else list(tokenizer(reply, add_special_tokens=False)["input_ids"])
    arguments |= {"prompt_ids": ids, "completion_ids": reply_ids}
    recipe = Recipe(found, RewardService([it.task for it in found], workers=1, import_from=config.run.import_from))
    timeout_s = float(config.rollout.workflow_args.get("reward_timeout_s", SYNCHRONOUS_S))
    try:
        return TriedReward(recipe.added(recipe.service.call_now(arguments, timeout_s)).value, reached, not_tried)
    except (RewardFailed, RewardTimeout) as failure:
        failed = failure.reward if isinstance(failure, RewardFailed) else ""
        paths = [ingredient.path for ingredient in found if ingredient.name == failed] or [recipe.name]
        said = " ".join(str(failure).split()).rstrip(".")
        raise ValueError(
            f"{key} = {paths[0]!r}: {said}; so it was for a prompt with the fields {', '.join(map(str, row))} "
            f"and the reply {shortened(reply)}. Mend that line, or the prompts."
        ) from failure
    finally:
        recipe.service.close()


def make_workflow(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    gconfig: GenerationConfig,
    reward_fn: Callable[..., Any] | None = None,
    *,
    evaluates: bool = False,
) -> RolloutWorkflow:
    """Build the configured workflow. Raises ValueError if its constructor does not accept the arguments.

    reward_fn: the Recipe of the configured rewards. None passes the first configured reward function itself. evaluates:
    build the workflow for held-out prompts.
    """
    options, allowed = config.rollout, config.run.import_from
    factory = resolve(options.workflow, key="rollout.workflow", kind="workflow", import_from=allowed)
    if reward_fn is None:
        reward_fn = configured_rewards(config)[0].function
    arguments = {"reward_fn": reward_fn, "gconfig": gconfig, "tokenizer": tokenizer}
    own = dict(options.workflow_args)
    make: Callable[..., RolloutWorkflow] = factory
    if isinstance(factory, type) and issubclass(factory, RolloutWorkflow):
        make = factory.evaluating if evaluates else factory
        own |= {name: _resolved(own[name], name, allowed) for name in factory.IMPORT_PATHS if name in own}
        if "log_folder" in inspect.signature(factory).parameters:
            own.setdefault("log_folder", str(Path(config.run.folder) / "agents"))
    try:
        inspect.signature(factory).bind(**arguments, **own)
    except TypeError as error:
        raise ValueError(
            f"rollout.workflow = {options.workflow!r}: {error}; its signature is {inspect.signature(factory)} and it "
            f"is called with reward_fn, gconfig, tokenizer and rollout.workflow_args = {options.workflow_args}."
        ) from error
    workflow, teacher = make(**arguments, **own), config.teacher
    check_workflow(workflow, key=f"rollout.workflow = {options.workflow!r}")
    if evaluates or not any(it.servers for it in teacher.teachers.values()):
        return workflow
    return TaughtWorkflow(
        workflow,
        teacher.teachers,
        tokenizer,
        enable_thinking=bool(own.get("enable_thinking", False)),
        timeout_s=options.request_timeout_s,
        token_file=teacher.token_file,
    )


def _resolved(value: Any, name: str, allowed: Sequence[str]) -> Any:
    """Import the object that `value` names, if it is an import path.

    In a mapping, import the objects that its keys name. name: the workflow's argument.
    """
    options: dict[str, Any] = {"key": f"rollout.workflow_args.{name}", "kind": KINDS.get(name, "")}
    if isinstance(value, Mapping):
        return {resolve(str(path), **options, import_from=allowed): rest for path, rest in value.items()}
    return resolve(str(value), **options, import_from=allowed)
