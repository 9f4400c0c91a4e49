"""Import paths `package.module:name` of objects that a config names, or that Python code passes."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

OURS = "megatron_rl"
MAIN = "__main__"
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
"""Objects of this package that a config may use: kind -> module -> names, separated by spaces. A config can use nothing
else in the package, such as code that deletes a journal. Estimators and losses are not listed, because a config
names them without a path."""


def resolve(path: str, *, key: str, kind: str, import_from: Sequence[str] | None = ()) -> Any:
    """Import the object that `path`, the value of option `key`, names. Raises ValueError if it is not allowed.

    An object is allowed if this package offers it as an object of kind `kind` (a key of OFFERED, or empty for any
    kind), or if its module is in `import_from`, the config's run.import_from. All others are refused, because importing
    a module runs its code, and a config may come from somebody else. import_from=None allows everything; it is for
    paths that are fixed in code.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        rule = "must be an import path package.module:name, e.g. megatron_rl.rewards:exact_match"
        raise ValueError(f"{key} = {path!r}: {rule}.")
    # Checked before any import, because importing is what would run a stranger's code.
    _check_home(module_name, f"{key} = {path!r}: module {module_name}", import_from)
    is_ours = import_from is not None and is_in(OURS, module_name)
    if is_ours and path not in offered(kind):
        raise ValueError(f"{key} = {path!r}: {_not_offered(path, kind)}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        way_out = "check the path, and that its folder is on PYTHONPATH or its package installed"
        raise ValueError(f"{key} = {path!r}: module {module_name} cannot be imported ({error}); {way_out}.") from error
    # vars() and not getattr: a misspelt name must not find a submodule that happens to be imported already.
    names = vars(module)
    if name not in names:
        raise ValueError(f"{key} = {path!r}: module {module_name} has no {name!r}; check the name after the colon.")
    found = names[name]
    if import_from is None or is_ours:
        return found
    # __builtins__ and imported modules would give access to everything in Python.
    if inspect.ismodule(found) or name.startswith("__"):
        raise ValueError(f"{key} = {path!r}: is no object of {module_name}'s own; name a function or class of it.")
    # An object that the module merely imported is not its own. Only classes and functions know where they are defined.
    origin = found.func if isinstance(found, functools.partial) else found
    if inspect.isclass(origin) or inspect.isroutine(origin):
        _check_home(str(origin.__module__), f"{key} = {path!r}: is defined in {origin.__module__}, which", import_from)
        if is_in(OURS, str(origin.__module__)) and not any(origin is ours for ours in _imported(kind)):
            raise ValueError(f"{key} = {path!r}: {_not_offered(f'{origin.__module__}:{origin.__qualname__}', kind)}")
    return found


def offered(kind: str) -> list[str]:
    """Return the import paths of this package's objects of this kind that a config may use; all if `kind` is empty."""
    kinds = [OFFERED[kind]] if kind else OFFERED.values()
    return [f"{module}:{name}" for modules in kinds for module, names in modules.items() for name in names.split()]


def is_in(package: str, module: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _imported(kind: str) -> list[Any]:
    """Return the offered objects whose modules are already imported. No other module can refer to any but these."""
    pairs = [path.split(":") for path in offered(kind)]
    return [vars(sys.modules[module])[name] for module, name in pairs if module in sys.modules]


def _not_offered(path: str, kind: str) -> str:
    choices = offered(kind)
    moved = [choice for choice in choices if choice.partition(":")[2] == path.partition(":")[2]]
    near = moved or difflib.get_close_matches(path, choices, n=1, cutoff=0.75)  # the package name alone gives 0.6
    hint = f"did you mean {near[0]}" if near else f"they are {', '.join(choices)}" if choices else "it has none"
    what = f"no {kind}" if kind else "nothing"
    return f"{path} is {what} that {OURS} offers to configs; {hint}. One of your own goes into run.import_from."


def refuse_while_importing(what: str) -> None:
    """Raise ValueError if this is called while `resolve` imports a module.

    The module would start `what`, such as a run. Without `if __name__ == "__main__":`, a program would start itself
    again in every process that imports its reward.
    """
    frame: FrameType | None = sys._getframe(1)
    file, line = "", 0
    while frame is not None:
        if frame.f_code.co_name == "<module>" and not file:  # the innermost one: the module being imported
            file, line = frame.f_code.co_filename, frame.f_lineno
        if frame.f_code is resolve.__code__ and file:
            raise ValueError(
                f"{file}, line {line}: starts {what} while it is imported, which is how {frame.f_locals['path']!r} is "
                f'found; put what starts the run under `if __name__ == "__main__":`.'
            )
        frame = frame.f_back


def check_call(function: Callable[..., Any], given: int, args: Mapping[str, Any], *, key: str) -> None:
    """Raise ValueError unless `function` accepts `given` positional arguments and the keyword arguments `args`.

    key: the option that has the arguments.
    """
    try:
        inspect.signature(function).bind(*[None] * given, **args)
    except TypeError as error:
        raise ValueError(f"{key} = {dict(args)}: {error}; its signature is {inspect.signature(function)}.") from error


def _check_home(module: str, what: str, import_from: Sequence[str] | None) -> None:
    """Raise ValueError unless the module is in this package or in a package of `import_from`.

    what: beginning of the message.
    """
    if import_from is None or any(is_in(home, module) for home in (OURS, *import_from)):
        return
    declared = ",".join([*import_from, module.partition(".")[0]])
    raise ValueError(
        f"{what} is not in {OURS} or run.import_from = {list(import_from)}; a config may load code from these only. "
        f"If you trust it, set run.import_from=[{declared}]."
    )


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """Return the code object that a call of `function` runs; None if it is not a Python function."""
    while isinstance(function, functools.partial):
        function = function.func
    called = inspect.unwrap(function if inspect.isroutine(function) else type(function).__call__)
    if inspect.ismethod(called):
        called = called.__func__
    return called.__code__ if inspect.isfunction(called) else None


def described(function: Callable[..., Any]) -> str:
    """Return `name (file:line)` of a function, for error messages."""
    code = code_of(function)
    if code is None:
        return type(function).__qualname__
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


class GivenPath(str):
    """Import path of an object that Python code passed itself and therefore trusts."""


def path_of(given: Any, *, key: str, what: str = "rewards are computed") -> str:
    """Return the import path under which another process finds a function, a class, or a given `__main__:name`.

    Raises ValueError if there is none. what: what those processes would do with the object, for the message.
    """
    if isinstance(given, str):
        module, _, name = given.partition(":")
        return given if module != MAIN else f"{name_of_main(key, given, what)}:{name}"
    way_out = "write it as a function of a module, with def, and give that; arguments go into rollout.recipe"
    if not (inspect.isroutine(given) or inspect.isclass(given)):
        raise ValueError(f"{key} = {given!r}: is a {type(given).__name__}, no function; {way_out}.")
    module, name = str(given.__module__), str(given.__qualname__)
    # A nested function, a lambda or a decorated function may not be reachable under its name.
    if module not in sys.modules or vars(sys.modules[module]).get(name) is not given:
        rule = f"{what} in other processes, which import them, and module {module} has no such name at its top"
        raise ValueError(f"{key} = {module}:{name}: {rule}; {way_out}.")
    return GivenPath(f"{name_of_main(key, f'{module}:{name}', what) if module == MAIN else module}:{name}")


def name_of_main(key: str, given: str, what: str = "rewards are computed") -> str:
    """Return the module name under which the running program can be imported. Its `__main__` block is not run then.

    Raises ValueError, which names `key`, `given` and `what`, if there is none.
    """
    main = sys.modules[MAIN]
    if main.__spec__ is not None:  # python -m
        return main.__spec__.name
    file = Path(str(vars(main).get("__file__", "")))
    # Another file of that name may come first on sys.path and would be imported instead.
    found = importlib.util.find_spec(file.stem) if file.suffix == ".py" and file.stem.isidentifier() else None
    if found is not None and found.origin is not None and file.exists() and Path(found.origin).samefile(file):
        return file.stem
    program = f"the program {file} cannot be imported by a name" if file.name else "a notebook or terminal has no file"
    way_out = "move the function into a module next to it, such as my_rewards.py, and import it from there"
    raise ValueError(f"{key} = {given!r}: {what} in other processes, which import them, and {program}; {way_out}.")
