"""Who may import whom, as data: a room is a sub-package or a top-level module.

An import inside a function counts too: lazy is about time, not about who knows whom.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

import megatron_rl

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_rl"
EVERYTHING = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}

MAY_IMPORT: dict[str, set[str]] = {
    "adapter_sums": set(),
    "config": set(),
    "ops": set(),
    "platform": set(),
    "routes": set(),
    "support": set(),
    "types": {"config", "routes", "support"},
    "api": {"types"},
    "telemetry": {"config"},
    "parallel": {"config", "platform"},
    "life": {"config", "parallel", "telemetry"},
    "launch": {"config", "life"},
    "algo": {"api", "config", "ops", "support", "types"},
    "batch": {"ops", "parallel", "routes", "support", "types"},
    "weights": {"adapter_sums", "api", "config", "ops", "parallel", "routes", "types"},
    "sandbox": {"api"},
    "rewards": {"api", "config", "launch", "sandbox", "telemetry", "types"},
    "workflows": {"api", "config", "rewards", "sandbox", "support", "telemetry", "types"},
    "agents": {"api", "config", "rewards", "sandbox", "telemetry", "types", "workflows"},
    "data": {"config", "rewards", "types", "workflows"},
    "servers": {"adapter_sums", "api", "config", "launch", "life", "ops", "routes", "support", "telemetry", "types"},
    "rollout": {
        *("api", "config", "data", "launch", "life", "rewards", "routes", "servers", "support", "telemetry", "types"),
        "workflows",
    },
    "engine": {
        *("api", "batch", "config", "launch", "life", "ops", "parallel", "platform", "routes", "support", "types"),
        "weights",
    },
    # These put the parts together.
    "run": EVERYTHING - {"__init__", "cli", "python_run", "replay", "tools", "train", "training_server"},
    "train": EVERYTHING - {"__init__", "cli", "python_run", "replay", "tools", "training_server"},
    "replay": EVERYTHING - {"__init__", "cli", "python_run", "tools", "training_server"},
    "python_run": EVERYTHING - {"__init__", "cli", "replay", "tools", "training_server"},
    "tools": EVERYTHING - {"__init__", "cli", "python_run", "replay", "train", "training_server"},
    "training_server": {
        *("adapter_sums", "api", "batch", "config", "engine", "launch", "life", "parallel", "platform", "servers"),
        *("tools", "types", "weights"),  # tools/plan says how many models fit
    },
    "cli": EVERYTHING,
    "__init__": EVERYTHING,
}
"""The rooms that each room may import, all written above it: no arrow goes upward, and there is no circle."""

ONLY_IN: dict[str, set[str]] = {
    "megatron": {"engine", "parallel", "platform", "tools"},
    "transformer_engine": {"engine", "parallel", "platform", "tools"},
    "aiohttp": {"agents", "rewards", "rollout", "servers", "tools", "training_server", "workflows"},
    "httptools": {"servers"},
    "requests": set(),
    "sglang": {"servers", "tools"},
}
"""Packages of others that only some rooms may import."""

NEVER: dict[str, set[str]] = {
    "config": {"torch", "transformers"},
    "launch": {"torch", "megatron"},
    "telemetry": {"torch"},
    "algo": {"torch.distributed", "megatron"},
    "tools/plan": {"torch", "megatron"},
    "tools/report": {"torch", "megatron"},
}


@functools.cache
def modules_imported_by(path: Path) -> frozenset[str]:
    """Return the full names of all modules that a file imports, `from a import b` as `a` and `a.b`."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            modules |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(modules)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_part_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_stays_in_its_room(path):
    room, modules = room_of(path), modules_imported_by(path)
    assert room in MAY_IMPORT, f"{path}: {room} is a new room; give it a line in MAY_IMPORT"
    names = {m.split(".")[1] for m in modules if m.startswith("megatron_rl.")}
    # `from megatron_rl import LLMRequest` reaches into the room where the public name lives.
    rooms = {megatron_rl._HOME[name].split(".")[0] if name in megatron_rl._HOME else name for name in names}
    foreign = rooms & EVERYTHING - MAY_IMPORT[room] - {room}
    assert not foreign, f"{path} is in `{room}`, which may not import {sorted(foreign)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_packages_of_others_are_imported_where_they_belong(path):
    room, modules = room_of(path), modules_imported_by(path)
    for package, rooms in ONLY_IN.items():
        if any(is_part_of(m, package) for m in modules):
            assert room in rooms, f"{path} is in `{room}`; only {sorted(rooms)} may import {package}"
    never = NEVER.get(room, set()) | NEVER.get("/".join(path.relative_to(PACKAGE).parts[:2]), set())
    for package in never:
        assert not any(is_part_of(m, package) for m in modules), f"{path} is in `{room}`, which never imports {package}"


LIGHT = {
    "megatron_rl": {"torch", "megatron", "transformers", "aiohttp", "omegaconf"},
    "megatron_rl.tools.embedded_server.serve_command": {"torch", "aiohttp", "transformers"},
    "megatron_rl.config": {"torch", "megatron", "transformers"},
    "megatron_rl.api": {"torch", "megatron", "transformers"},
    "megatron_rl.tools.report.report": {"torch", "megatron"},
}
"""Modules that start at once, and packages that loading them does not load."""
WITH_TORCH = {
    "megatron_rl.rollout.rollout_rank": {"megatron", "transformers"},
    "megatron_rl.tools.plan.plan_command": {"megatron", "transformers"},
    "megatron_rl.algo.actor": {"megatron"},
    "megatron_rl.rollout.sglang_engine": {"megatron"},
    "megatron_rl.tools.embedded_server.server": {"megatron"},
}
"""The same of clients, plans, algorithms and servers, which load torch."""
LOAD = """
import json, sys

for module in sys.argv[1:]:
    __import__(module)
    names = {name.split(".")[0] for name in sys.modules}
    dist = sys.modules.get("torch.distributed")
    if dist and dist.is_available() and dist.is_initialized():
        names.add("a process group")
    print(json.dumps([module, sorted(names)]), flush=True)
"""


def loaded(modules: Iterable[str]) -> dict[str, set[str]]:
    """Load them one after the other; return, by module, the top-level packages that are there then.

    None of the tables loads what a module below it does without.
    """
    command = [sys.executable, "-c", LOAD, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {module: set(names) for module, names in map(json.loads, done.stdout.splitlines())}


def test_loading_a_module_loads_nothing_that_it_can_do_without():
    assert not {module: names & LIGHT[module] for module, names in loaded(LIGHT).items() if names & LIGHT[module]}


@pytest.mark.thorough  # torch alone takes seconds
def test_loading_a_module_with_torch_loads_nothing_else_that_it_can_do_without():
    unwanted = {module: {*names, "a process group"} for module, names in WITH_TORCH.items()}
    assert not {
        module: names & unwanted[module] for module, names in loaded(unwanted).items() if names & unwanted[module]
    }


@pytest.mark.parametrize("module", [*LIGHT, *WITH_TORCH])
def test_no_file_that_a_module_loads_names_what_it_can_do_without(module):
    unwanted = (LIGHT | WITH_TORCH)[module]
    to_read, read = [module], set()
    while to_read:
        name = to_read.pop()
        if name in read or not (path := file_of(name)):
            continue
        read.add(name)
        names = names_loaded_with(path)
        assert not {it.split(".")[0] for it in names} & unwanted, f"{module} loads {path}"
        to_read += [*names, name.rpartition(".")[0]]
    assert module in read


def file_of(module: str) -> Path | None:
    """The file of a module of the package; None for any other name."""
    path = ROOT.joinpath(*module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py")) if is_part_of(module, "megatron_rl") else ()
    return next((file for file in files if file.is_file()), None)


@functools.cache
def names_loaded_with(path: Path) -> frozenset[str]:
    """Return what a file imports as it is loaded, in no function, for no checker; of `from a import b` both names."""
    names, left = set(), list(ast.parse(path.read_text(encoding="utf-8")).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # A public name of the package is loaded when it is asked for, from where it lives.
            home = megatron_rl._HOME if node.module == "megatron_rl" else {}
            names |= {f"megatron_rl.{home[alias.name]}" for alias in node.names if alias.name in home}
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            is_checkers = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            left += node.orelse if is_checkers else ast.iter_child_nodes(node)
    return frozenset(names)


def test_the_table_is_complete_and_no_arrow_goes_upward():
    assert set(MAY_IMPORT) == EVERYTHING
    above: set[str] = set()
    for room, allowed in MAY_IMPORT.items():
        if allowed is not EVERYTHING:
            assert not allowed - above - {room}, f"{room} may not import {sorted(allowed - above)}, written below it"
        above.add(room)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def files_imported_by(path: Path, modules: dict[str, Path]) -> set[Path]:
    return {modules[name] for name in modules_imported_by(path) & set(modules)} - {path}


def test_no_files_import_each_other_in_a_circle():
    modules = {module_of(path): path for path in FILES if path.name != "__init__.py"}
    imports = {path: files_imported_by(path, modules) for path in modules.values()}
    while leaves := {path for path, imported in imports.items() if not imported & set(imports)}:
        imports = {path: imported for path, imported in imports.items() if path not in leaves}
    assert not imports, f"in a circle, or above one: {sorted(map(module_of, imports))}"


def test_tools_are_imported_by_the_commands_alone():
    modules = {module_of(path): path for path in FILES}
    for path in FILES:
        if room_of(path) not in ("cli", "tools", "training_server"):
            used = {room_of(imported) for imported in files_imported_by(path, modules)}
            assert "tools" not in used, f"{path} imports tools/, which training does not need"


def test_files_have_names_of_their_own():
    names = Counter(path.name for path in FILES if path.name not in ("__init__.py", "__main__.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_files_of_tests_have_names_of_their_own():
    """pytest imports each by its name alone, and leaves out all but the first of a name when it runs everything."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("room", sorted(p.parent for p in FILES if p.name == "__init__.py"), ids=lambda p: p.name)
def test_room_says_what_happens_there(room):
    assert ast.get_docstring(ast.parse((room / "__init__.py").read_text())), f"{room}/__init__.py has no docstring"
