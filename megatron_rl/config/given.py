"""Import paths for functions that Python code passes, so that other processes can import them."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

MAIN = "__main__"
GIVEN = "given"
"""Name of the folder in run.folder that holds the rows and pickled functions of a program (run/given_in_python.py)."""


def find_given(run_folder: str | Path) -> None:
    """Add the run's folder of pickled functions to sys.path, for this process and those it starts.

    Only the program that passed the functions calls this: other commands do not trust the code in a run's folder.
    """
    folder = Path(run_folder).absolute() / GIVEN
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


class GivenPath(str):
    """Import path of an object that Python code passed itself and therefore trusts."""


def path_of(given: Any, *, key: str, what: str = "rewards are computed") -> str:
    """Return the import path under which another process finds a function, a class or `__main__:name`.

    Raises ValueError if there is none; `what` is then what those processes would do with the object.
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
    """Return the name under which the running program can be imported without running its `__main__` block."""
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
