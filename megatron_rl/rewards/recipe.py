"""The reward that a config asks for: one function, or a weighted sum of several.

One call of the reward service computes all plain functions for a reply. Coroutine functions and AwaitedRewards are
awaited concurrently in the rollout process.
"""

from __future__ import annotations

import abc
import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.api import InfrastructureFailure, infrastructure_in, together
from megatron_rl.config.import_path import resolve
from megatron_rl.rewards.faults import as_score, place_of, words_of
from megatron_rl.rewards.reward_service import RewardFailed, RewardService, RewardTimeout, Score
from megatron_rl.rewards.worker import with_args
from megatron_rl.types import Reward

Part = dict[str, Any]
"""One entry of a config's recipe: `{reward: import path, weight: 1.0, args: {}, name: the function's by default}`.

For a function that returns several named numbers, weight may be a dict of weights by those names.
"""


class AwaitedReward(abc.ABC):
    """Reward that waits for an external service and holds resources such as connections. Use it in one event loop only.

    class Known(AwaitedReward):  # rollout.recipe: [{reward: "my_rewards:Known"}]
        async def __call__(self, prompt, completions, prompt_ids, completion_ids, **data):
            return float(await self.index.knows(completions))

        async def close(self):
            await self.index.close()
    """

    @abc.abstractmethod
    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float: ...

    def check_deadline(self, timeout_s: float) -> None:  # noqa: B027  (most do with any)
        """Raise ValueError if a workflow's `reward_timeout_s` is too short for this reward."""

    async def reach(self, patience_s: float) -> bool:
        """Wait until the external service answers, and return True. Return False if this reward cannot check that.

        If the service does not answer within `patience_s`, InfrastructureFailure names it.
        """
        return False

    @abc.abstractmethod
    async def close(self) -> None:
        """Release the resources. This is called in the event loop that uses the reward, and may be called twice."""


@dataclass(frozen=True, kw_only=True)
class Ingredient:
    """One reward of a recipe.

    function: the reward function with `args` bound to it, for this process. A worker process resolves `path` and binds
    `args` itself.
    """

    name: str
    path: str
    function: Callable[..., Any]
    weight: float | dict[str, float] = 1.0
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def is_awaited(self) -> bool:
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(type(self.function).__call__)

    @property
    def task(self) -> tuple[str, str, dict[str, Any]]:
        """Return the tuple of name, import path and arguments that the reward service takes."""
        return self.name, self.path, self.args


def ingredients(key: str, parts: Sequence[Part], import_from: list[str] | None) -> list[Ingredient]:
    """Resolve the parts of a recipe. ValueError names the wrong entry of the config option `key`."""
    found = []
    for number, part in enumerate(parts):
        path = part["reward"]
        function = resolve(path, key=f"{key}[{number}].reward", kind="reward", import_from=import_from)
        args = part.get("args", {})
        try:
            inspect.signature(function).bind_partial(**args)
            function = with_args(function, args)
        except TypeError as error:
            raise ValueError(f"{key}[{number}].args = {args}: {error}; {path} takes other arguments.") from error
        name = part.get("name", path.partition(":")[2])
        found.append(Ingredient(name=name, path=path, function=function, weight=part.get("weight", 1.0), args=args))
    names = [ingredient.name for ingredient in found]
    if len(set(names)) < len(names):
        raise ValueError(f"{key}: the parts' names are {names}; give each a `name` of its own.")
    return found


@dataclass
class Scored:
    """A reward with its parts.

    value: the weighted sum; this Reward also holds the parts if there are several. parts: {ingredient's name:
    unweighted value}; if the ingredient returns several numbers, each has the key NAME/PART. seconds: {ingredient's
    name: computing time}.
    """

    value: Reward
    parts: dict[str, float]
    seconds: dict[str, float]


class Recipe:
    """A weighted sum of rewards. It can be called like a reward function, from any thread; RewardCall awaits `score`.

    found = ingredients("rollout.recipe", [{"reward": "megatron_rl.rewards:exact_match", "weight": 2.0}], [])
    service = RewardService([one.task for one in found if not one.is_awaited], workers=4)
    scored = await Recipe(found, service).score(arguments, timeout_s=60.0)  # scored.value, scored.parts
    """

    def __init__(self, found: list[Ingredient], service: RewardService) -> None:
        """service: its rewards must be those ingredients that are not awaited, in the order of `found`."""
        self.ingredients, self.service = found, service
        self._awaited = [ingredient for ingredient in found if ingredient.is_awaited]
        self._plain = [ingredient for ingredient in found if not ingredient.is_awaited]
        self._held = [it.function for it in found if isinstance(it.function, AwaitedReward)]
        self.name = ", ".join(ingredient.path for ingredient in found)

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float:
        """Compute the reward, blocking until it is done. RuntimeError if a part must be awaited."""
        if self._awaited:
            path = self._awaited[0].path
            raise RuntimeError(f"reward {path}: is to be awaited; give the workflow's reward_fn to a RewardCall.")
        data |= {"prompt": prompt, "completions": completions}
        data |= {"prompt_ids": prompt_ids, "completion_ids": completion_ids}
        return self.added(self.service.call_now(data)).value

    async def score(self, arguments: dict[str, Any], timeout_s: float) -> Scored:
        """Compute all parts concurrently. RewardFailed or RewardTimeout names the part that failed.

        timeout_s: time limit of each part in seconds.
        """
        if not self._awaited:
            return self.added(await self.service.call(arguments, timeout_s))
        parts = [wait_for(ingredient, arguments, timeout_s) for ingredient in self._awaited]
        if self._plain:
            parts.append(self.service.call(arguments, timeout_s))
        # The first error is raised, and the other parts are cancelled.
        scores = sum(await together(parts), [])
        names = [ingredient.name for ingredient in (*self._awaited, *self._plain)]
        by_name = dict(zip(names, scores, strict=True))
        return self.added([by_name[ingredient.name] for ingredient in self.ingredients])

    async def reach(self, patience_s: float) -> None:
        """Wait until the services of the awaited parts answer, as the function `reach` does."""
        await reach(self.ingredients, patience_s)

    async def close(self) -> None:
        """Release all resources. Call this in the event loop of the awaited parts. It may be called twice."""
        for reward in self._held:
            await reward.close()
        self.service.close()

    def check_deadline(self, timeout_s: float) -> None:
        """Raise ValueError if a workflow's `reward_timeout_s` is too short for a part."""
        for reward in self._held:
            reward.check_deadline(timeout_s)

    def added(self, scores: list[Score]) -> Scored:
        """Return the weighted sum of the ingredients' scores. scores: one per ingredient, in the same order."""
        value, parts, seconds = 0.0, {}, {}
        for ingredient, score in zip(self.ingredients, scores, strict=True):
            seconds[ingredient.name] = score.seconds
            own = score.value if isinstance(score.value, dict) else {"": score.value}
            weight = ingredient.weight
            weights = weight if isinstance(weight, dict) else dict.fromkeys(own, weight)
            if unknown := weights.keys() - own.keys():
                given = sorted(filter(None, own))
                words = f"its weights name {sorted(unknown)}, and the parts that it gave are {given}"
                raise RewardFailed.by(words, ingredient.name, "")
            for part, number in own.items():
                value += weights.get(part, 1.0) * number
                parts[f"{ingredient.name}/{part}" if part else ingredient.name] = number
        return Scored(Reward(value, parts if len(parts) > 1 else {}), parts, seconds)


async def reach(found: Sequence[Ingredient], patience_s: float) -> list[str]:
    """Wait until the services of awaited rewards answer. Return the import paths of rewards that cannot be checked.

    InfrastructureFailure names the first reward whose service does not answer within `patience_s`.
    """
    unknown = []
    for ingredient in (it for it in found if it.is_awaited):
        function = ingredient.function
        try:
            is_there = isinstance(function, AwaitedReward) and await function.reach(patience_s)
        except InfrastructureFailure as error:
            raise InfrastructureFailure(f"reward {ingredient.path}: {error}", kind=error.kind) from error
        if not is_there:
            unknown.append(ingredient.path)
    return unknown


async def wait_for(ingredient: Ingredient, arguments: dict[str, Any], timeout_s: float) -> list[Score]:
    begin, limit = time.monotonic(), asyncio.timeout(timeout_s)
    try:
        async with limit:
            value = as_score(await ingredient.function(**arguments))
    except Exception as error:  # users' code may raise anything, including its own TimeoutError
        if limit.expired() and isinstance(error, TimeoutError):
            raise RewardTimeout(f"reward {ingredient.name}: no reward within {timeout_s:g} s.") from error
        place, failure = place_of(error, ingredient.function), infrastructure_in(error)
        kind = "" if failure is None else failure.kind
        raise RewardFailed.by(words_of(error), ingredient.name, place, kind) from error
    return [Score(value, time.monotonic() - begin)]
