"""Objects named in a config by import path, `package.module:name`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OURS = "megatron_rl"


def resolve(path: str, *, key: str, import_from: Sequence[str] | None = ()) -> Any:
    """Return the object that `path` names. ValueError names `key` (where the path was configured), the path and why.

    It must come from this package or from those in `import_from`, the config's run.import_from: to import a module is
    to run it, and a config may be somebody else's. None, for a path that code names, allows all.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ValueError(
            f"{key} = {path!r}: must be an import path package.module:name, "
            "e.g. megatron_rl.rollout.rewards:exact_match."
        )
    _check_home(module_name, f"{key} = {path!r}: module {module_name}", import_from)
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
    if inspect.isclass(found) or inspect.isroutine(found):  # one that the module has only imported is not its own
        _check_home(str(found.__module__), f"{key} = {path!r}: is defined in {found.__module__}, which", import_from)
    return found


def check_call(function: Callable[..., Any], given: int, args: Mapping[str, Any], *, key: str) -> None:
    """Raise ValueError, which names `key`, unless a call with `given` values and then `args` fits the signature."""
    try:
        inspect.signature(function).bind(*[None] * given, **args)
    except TypeError as error:
        raise ValueError(f"{key} = {dict(args)}: {error}; its signature is {inspect.signature(function)}.") from error


def _check_home(module: str, what: str, import_from: Sequence[str] | None) -> None:
    """Raise ValueError that begins with `what` unless the module is this package's or in `import_from`."""
    if import_from is None or any(module == home or module.startswith(f"{home}.") for home in (OURS, *import_from)):
        return
    declared = ",".join([*import_from, module.partition(".")[0]])
    raise ValueError(
        f"{what} is not in {OURS} or run.import_from = {list(import_from)}, from where alone a config may take code; "
        f"if you trust it, set run.import_from=[{declared}]."
    )
