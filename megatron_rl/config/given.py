"""Functions that Python code gives in place of their import paths, by which other processes find them."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

MAIN = "__main__"
GIVEN = "given"
"""The folder in run.folder with the functions that a program has given by value (run/given_in_python.py)."""


def find_given(run_folder: str | Path) -> None:
    """Let this process, and those that it starts, find the modules of functions that it gives a run by value.

    Only the program that gave them calls this. For other commands code in a run's folder may be anybody's: they find it
    if the user puts the folder on PYTHONPATH.
    """
    folder = Path(run_folder).absolute() / GIVEN
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


class GivenPath(str):
    """The import path of what code gave itself, and so trusts."""


def path_of(given: Any, *, key: str, what: str = "rewards are computed") -> str:
    """Return the import path under which another process finds a function, a class or `__main__:name`.

    ValueError for what no other process can import. A path of another module is returned as it is. what: happens in
    those processes.
    """
    if isinstance(given, str):
        module, _, name = given.partition(":")
        return given if module != MAIN else f"{name_of_main(key, given, what)}:{name}"
    way_out = "write it as a function of a module, with def, and give that; arguments go into rollout.recipe"
    if not (inspect.isroutine(given) or inspect.isclass(given)):
        raise ValueError(f"{key} = {given!r}: is a {type(given).__name__}, no function; {way_out}.")
    module, name = str(given.__module__), str(given.__qualname__)
    # A nested function, a lambda or one that a decorator has replaced is not found again under its name.
    if module not in sys.modules or vars(sys.modules[module]).get(name) is not given:
        raise ValueError(
            f"{key} = {module}:{name}: {what} in other processes, which import them, and module {module} "
            f"has no such name at its top; {way_out}."
        )
    return GivenPath(f"{name_of_main(key, f'{module}:{name}', what) if module == MAIN else module}:{name}")


def name_of_main(key: str, given: str, what: str = "rewards are computed") -> str:
    """Return the name by which the program that runs can be imported; its guarded part is not run then."""
    main = sys.modules[MAIN]
    if main.__spec__ is not None:  # python -m
        return main.__spec__.name
    file = Path(str(vars(main).get("__file__", "")))
    # Another file of that name may come first on the path: the others would import it instead of this program.
    found = importlib.util.find_spec(file.stem) if file.suffix == ".py" and file.stem.isidentifier() else None
    if found is not None and found.origin is not None and file.exists() and Path(found.origin).samefile(file):
        return file.stem
    program = (
        f"the program {file} cannot be imported by a name" if file.name else "what is typed or a notebook has no file"
    )
    raise ValueError(
        f"{key} = {given!r}: {what} in other processes, which import them, and {program}; put the function "
        f"into a file beside it, such as my_rewards.py, and give that one's."
    )
