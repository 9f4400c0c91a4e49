"""Objects named in a config by import path, `package.module:name`."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

OURS = "megatron_rl"
OFFERED: dict[str, dict[str, str]] = {
    "data": {
        "megatron_rl.data.tasks": "addition count_ones count_ones_pairs sort_digits copy_letters trail reasoning_gym",
        "megatron_rl.data.recipes": "gsm8k math countdown code",
        "megatron_rl.agents.worlds.task_folders": "task_prompts",
        "megatron_rl.agents.worlds.text_games": "game_prompts",
        "megatron_rl.agents.worlds.verifiers": "verifiers_prompts",
    },
    "workflow": {
        "megatron_rl.workflows": "BestOfNWorkflow DebateWorkflow JudgedWorkflow MultiTurnWorkflow RLVRWorkflow "
        "ReMaxWorkflow ToolUseWorkflow",
        "megatron_rl.agents": "AgentWorkflow",
        "megatron_rl.agents.worlds.text_games": "TextGames",
        "megatron_rl.agents.worlds.verifiers": "VerifiersWorkflow",
    },
    "reward": {
        "megatron_rl.rewards": "exact_match last_number tagged_answer right_positions matches length",
        "megatron_rl.rewards.code": "program_output assertions passes share_passed",
        "megatron_rl.rewards.judge": "Judge Rubric",
        "megatron_rl.rewards.mathematics": "math_answer",
        "megatron_rl.rewards.procedural": "reasoning_gym countdown",
        "megatron_rl.rewards.remote": "RemoteReward",
        "megatron_rl.data.recipes": "countdown_reward",
    },
    "environment": {
        "megatron_rl.workflows.environments": "SelfCorrection",
        "megatron_rl.workflows.trail": "Trail",
        "megatron_rl.agents.worlds.mcp_tools": "McpTools",
        "megatron_rl.agents.worlds.openenv": "OpenEnv",
        "megatron_rl.agents.worlds.task_folders": "TaskFolder",
    },
    "tool": {
        "megatron_rl.workflows.tools": "Calculator Search",
        "megatron_rl.workflows.python_tool": "Python",
    },
    "agent": {},
    "estimator": {},
    "loss": {},
}
"""Of this package, by kind: the modules and names that a config may call. Estimators and losses have names without a
path. Whatever else the package has, such as what deletes a journal, no config can call."""


def resolve(path: str, *, key: str, kind: str, import_from: Sequence[str] | None = ()) -> Any:
    """Return the object that `path` names. ValueError names `key` (where the path was configured), the path and why.

    It must be one that this package offers as that `kind` (one of OFFERED, or empty for any of them), or come from the
    modules in `import_from`, the config's run.import_from: to import a module is to run it, and a config may be
    somebody else's. import_from None, for a path that code names, allows all.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ValueError(
            f"{key} = {path!r}: must be an import path package.module:name, e.g. megatron_rl.rewards:exact_match."
        )
    # Before anything is imported, as that is what runs a stranger's code.
    _check_home(module_name, f"{key} = {path!r}: module {module_name}", import_from)
    is_ours = import_from is not None and is_in(OURS, module_name)
    if is_ours and path not in offered(kind):
        raise ValueError(f"{key} = {path!r}: {_not_offered(path, kind)}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{key} = {path!r}: module {module_name} cannot be imported ({error}); check the path, and that its folder "
            "is on PYTHONPATH or its package installed."
        ) from error
    # vars() and not getattr: a misspelt name must not find a submodule by accident of what was imported before.
    names = vars(module)
    if name not in names:
        raise ValueError(f"{key} = {path!r}: module {module_name} has no {name!r}; check the name after the colon.")
    found = names[name]
    if import_from is None or is_ours:
        return found
    # __builtins__ and imported modules would lead to everything that Python has.
    if inspect.ismodule(found) or name.startswith("__"):
        raise ValueError(f"{key} = {path!r}: is no object of {module_name}'s own; name a function or class of it.")
    # One that the module has only imported is not its own. A class stands for what it makes.
    origin = found.func if isinstance(found, functools.partial) else found
    if inspect.isclass(origin) or inspect.isroutine(origin):
        _check_home(str(origin.__module__), f"{key} = {path!r}: is defined in {origin.__module__}, which", import_from)
        if is_in(OURS, str(origin.__module__)) and not any(origin is ours for ours in _imported(kind)):
            raise ValueError(f"{key} = {path!r}: {_not_offered(f'{origin.__module__}:{origin.__qualname__}', kind)}")
    return found


def offered(kind: str) -> list[str]:
    """The import paths of this package that a config may give as this kind; of all kinds where it is empty."""
    kinds = [OFFERED[kind]] if kind else OFFERED.values()
    return [f"{module}:{name}" for modules in kinds for module, names in modules.items() for name in names.split()]


def is_in(package: str, module: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _imported(kind: str) -> list[Any]:
    """The offered objects whose modules have been imported: a module that names one has done so."""
    pairs = [path.split(":") for path in offered(kind)]
    return [vars(sys.modules[module])[name] for module, name in pairs if module in sys.modules]


def _not_offered(path: str, kind: str) -> str:
    choices = offered(kind)
    moved = [choice for choice in choices if choice.partition(":")[2] == path.partition(":")[2]]
    near = moved or difflib.get_close_matches(path, choices, n=1, cutoff=0.75)  # the package alone makes 0.6
    hint = f"did you mean {near[0]}" if near else f"they are {', '.join(choices)}" if choices else "it has none"
    what = f"no {kind}" if kind else "nothing"
    return f"{path} is {what} that {OURS} offers to configs; {hint}. One of your own goes into run.import_from."


def refuse_while_importing(what: str) -> None:
    """Raise ValueError where a module starts something at the moment that `resolve` imports it to find a name in it.

    A program without `if __name__ == "__main__":` would start itself again in every process that looks for its reward.
    """
    frame: FrameType | None = sys._getframe(1)
    file, line = "", 0
    while frame is not None:
        if frame.f_code.co_name == "<module>" and not file:  # the innermost: the module that is being imported
            file, line = frame.f_code.co_filename, frame.f_lineno
        if frame.f_code is resolve.__code__ and file:
            raise ValueError(
                f"{file}, line {line}: starts {what} while it is imported, which is how {frame.f_locals['path']!r} is "
                f'found; put what starts the run under `if __name__ == "__main__":`.'
            )
        frame = frame.f_back


def check_call(function: Callable[..., Any], given: int, args: Mapping[str, Any], *, key: str) -> None:
    """Raise ValueError, which names `key`, unless a call with `given` values and then `args` fits the signature."""
    try:
        inspect.signature(function).bind(*[None] * given, **args)
    except TypeError as error:
        raise ValueError(f"{key} = {dict(args)}: {error}; its signature is {inspect.signature(function)}.") from error


def _check_home(module: str, what: str, import_from: Sequence[str] | None) -> None:
    """Raise ValueError that begins with `what` unless the module is this package's or in `import_from`."""
    if import_from is None or any(is_in(home, module) for home in (OURS, *import_from)):
        return
    declared = ",".join([*import_from, module.partition(".")[0]])
    raise ValueError(
        f"{what} is not in {OURS} or run.import_from = {list(import_from)}, from where alone a config may take code; "
        f"if you trust it, set run.import_from=[{declared}]."
    )


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """Return the code that a call of `function` runs; None where it is not Python's."""
    while isinstance(function, functools.partial):
        function = function.func
    called = inspect.unwrap(function if inspect.isroutine(function) else type(function).__call__)
    if inspect.ismethod(called):
        called = called.__func__
    return called.__code__ if inspect.isfunction(called) else None


def described(function: Callable[..., Any]) -> str:
    """Return `name (file:line)` of a function, for errors that speak of it."""
    code = code_of(function)
    if code is None:
        return type(function).__qualname__
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
