"""Environments of the verifiers package. Their rollouts call the agents' proxy, and their rubrics give the rewards.

Each rollout is an agent run, in a process forked from one that has loaded the environment. If the rollout fails or a
reward function raises, the sample fails, unless the policy is at fault. The package itself would count a reward
function that raises as 0.
"""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_rl.agents.agent import AgentWorkflow
from megatron_rl.api import InfrastructureFailure
from megatron_rl.config import GenerationConfig
from megatron_rl.config.import_path import check_call, path_of, resolve
from megatron_rl.workflows.scoring import RewardFn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "rollout.workflow_args.environment"


def verifiers_prompts(
    environment: str,
    environment_args: dict[str, Any] | None = None,
    held_out: bool = False,
    first: int = 0,
    count: int | None = None,
    *,
    import_from: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return one prompt per row of the environment's training data set or, with `held_out`, its evaluation data set.

    Use this as data.train or data.evaluation.

    import_from: the config's run.import_from, which `data.prompts` passes to functions with this parameter.
    """
    load = resolve(environment, key="environment", kind="environment", import_from=import_from)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        world = load(**environment_args or {})
    finally:  # the environment may replace the handlers, and this process needs its own
        for number, handler in handlers.items():
            signal.signal(number, handler)
    rows = world.get_eval_dataset() if held_out else world.get_dataset()
    chosen = [rows[number] for number in range(len(rows))[first:][:count]]
    if not chosen:
        raise ValueError(f"environment = {environment!r}: has {len(rows)} rows, and none from {first} on.")
    # A table gives each message the keys of all others, with None as their value.
    messages = [[{k: v for k, v in message.items() if v is not None} for message in row["prompt"]] for row in chosen]
    return [{"messages": prompt, "row": row} for prompt, row in zip(messages, chosen, strict=True)]


class VerifiersWorkflow(AgentWorkflow):
    """Runs `gconfig.n_samples` rollouts of an environment per prompt of `verifiers_prompts`.

    For example:

        VerifiersWorkflow(reward, GenerationConfig(n_samples=4), tokenizer, "wordle:load_environment", max_tokens=4096)
    """

    IMPORT_PATHS = ("environment",)

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        environment: Callable[..., Any] | str,
        max_tokens: int,
        environment_args: dict[str, Any] | None = None,
        agent_timeout_s: float = 1800.0,
        agent_workers: int = 128,
        enable_thinking: bool = False,
        tool_format: str = "auto",
        log_folder: str = "",
    ) -> None:
        """environment: a `load_environment` function, which is called with environment_args.

        reward_fn is not used, because the environment's rubrics give the reward.
        """
        if not isinstance(environment, str):
            check_call(environment, 0, environment_args or {}, key="rollout.workflow_args.environment_args")
        path = path_of(environment, key=KEY, what="rollouts run")
        super().__init__(
            reward_fn,
            gconfig,
            tokenizer,
            f"{Rollout.__module__}:{Rollout.__name__}",
            max_tokens,
            agent_args={"environment": path, "environment_args": environment_args or {}},
            agent_timeout_s=agent_timeout_s,
            agent_workers=agent_workers,
            enable_thinking=enable_thinking,
            tool_format=tool_format,
            log_folder=log_folder,
        )


class Rollout:
    """An agent that runs one rollout in a loaded environment and returns its reward."""

    def __init__(self, environment: str, environment_args: dict[str, Any]) -> None:
        self.name = f"environment {environment}"
        self.world = resolve(environment, key=KEY, kind="environment", import_from=None)(**environment_args)
        self.failures: list[Exception] = []
        for rubric in rubrics_of(self.world):
            # A function without weight is only a metric.
            pairs = zip(rubric.funcs, rubric.weights, strict=True)
            rubric.funcs = [self._watched(function) if weight else function for function, weight in pairs]

    async def __call__(self, base_url: str, api_key: str, data: dict[str, Any]) -> float:
        from openai import AsyncOpenAI
        from verifiers import InvalidModelResponseError, OpenAIChatCompletionsClient, ToolError

        if self.world.rubric.has_group_rewards:
            raise ValueError(f"{self.name}: its rubric compares rollouts; a reward is of one rollout here.")
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None) as client:
            state = await self.world.rollout(data["row"], OpenAIChatCompletionsClient(client), "policy", {})
            error = TimeoutError("its own time limit") if state.get("timed_out") else state.get("error")
            # An empty reply, an unreadable call or a full context is the policy's fault: the rubric scores it.
            is_policys = isinstance(error, InvalidModelResponseError | ToolError) or state.get("prompt_too_long")
            if error is not None and not is_policys:
                raise InfrastructureFailure(f"{self.name}: {type(error).__name__}: {error}", kind="world") from error
            await self.world.rubric.score_rollout(state)
            await self.world.rubric.cleanup(state)
        if self.failures and not is_policys:
            raise RuntimeError(f"{self.name}: a reward function raised.") from self.failures[0]
        return float(state["reward"])

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                found = function(*args, **kwargs)
                return await found if inspect.isawaitable(found) else found
            except Exception as error:  # the package only logs it, and counts 0
                self.failures.append(error)
                raise

        return call


def rubrics_of(world: Any) -> Iterator[Any]:
    """Yield all rubrics of an environment, including those inside groups of environments or rubrics."""
    parts = [*getattr(world, "envs", ()), *getattr(world, "rubrics", ()), getattr(world, "rubric", None)]
    for part in filter(None, parts):
        yield from rubrics_of(part)
    if hasattr(world, "funcs"):
        yield world
