"""Who may import whom, as data. A room is a sub-package or a top-level module; the table is the design's.

An import inside a function counts too: lazy is about time, not about who knows whom.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_rl

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_rl"
EVERYTHING = {p.stem if p.suffix else p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()}

MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "types": {"config", "api"},
    "api": {"config", "types"},
    "import_path": set(),
    "update_group": {"ops"},
    "shared_bucket": {"update_group"},
    "weight_delta": set(),
    "ops": set(),
    "platform": set(),
    "telemetry": {"config", "types"},
    "launch": {"config", "types"},
    "parallel": {"config", "platform"},
    "algo": {"api", "config", "import_path", "ops", "types"},
    "batch": {"config", "ops", "parallel", "types"},
    "rollout": {"api", "config", "import_path", "launch", "telemetry", "types", "update_group"},
    "serving": {"api", "config", "launch", "shared_bucket", "telemetry", "types", "update_group", "weight_delta"},
    "weights": {"api", "config", "ops", "parallel", "shared_bucket", "types", "update_group", "weight_delta"},
    "engine": {
        "algo",
        "api",
        "batch",
        "config",
        "launch",
        "ops",
        "parallel",
        "platform",
        "types",
        "update_group",
        "weights",
    },
    # These put the parts together.
    "__init__": EVERYTHING,
    "cli": EVERYTHING,
    "experiment": EVERYTHING,
    "recovery": EVERYTHING,
    "plan": {"config", "rollout", "weights"},
    "preferences": EVERYTHING,
    "sft": EVERYTHING,
    "train": EVERYTHING,
}

ONLY_IN: dict[str, set[str]] = {
    "megatron": {"engine", "parallel", "platform"},
    "transformer_engine": {"engine", "parallel", "platform"},
    "aiohttp": {"rollout", "serving"},
    "httpx": {"rollout", "serving"},
    "requests": set(),
    "sglang": {"serving"},
}
"""Packages of others that only some rooms may import."""

NEVER: dict[str, set[str]] = {
    "config": {"torch", "transformers"},
    "launch": {"torch", "megatron"},
    "telemetry": {"torch"},
    "algo": {"torch.distributed", "megatron"},
    "plan": {"torch", "megatron"},
}


def modules_imported_by(path: Path) -> set[str]:
    """Return the full names of all modules that a file imports, `from a import b` as `a` and `a.b`."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            modules |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


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
    for package in NEVER.get(room, ()):
        assert not any(is_part_of(m, package) for m in modules), f"{path} is in `{room}`, which never imports {package}"


def imported_by(statement: str) -> tuple[set[str], float]:
    """Run a statement in a new process; return the top-level packages it loaded and its seconds."""
    code = (
        "import json, sys, time; start = time.perf_counter()\n"
        f"{statement}\n"
        "seconds = time.perf_counter() - start\n"
        "dist = sys.modules.get('torch.distributed')\n"
        "initialized = bool(dist) and dist.is_available() and dist.is_initialized()\n"
        "names = {m.split('.')[0] for m in sys.modules} | ({'a process group'} if initialized else set())\n"
        "print(json.dumps([sorted(names), seconds]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names, seconds = json.loads(done.stdout.splitlines()[-1])
    return set(names), seconds


def test_importing_the_package_is_fast_and_loads_nothing_heavy():
    runs = [imported_by("import megatron_rl") for _ in range(5)]
    assert not runs[0][0] & {"torch", "megatron", "transformers", "aiohttp", "omegaconf"}
    assert min(seconds for _, seconds in runs) < 0.3


def test_config_needs_no_torch():
    assert not imported_by("import megatron_rl.config, megatron_rl.api")[0] & {"torch", "megatron", "transformers"}


def test_report_needs_no_torch():
    assert not imported_by("import megatron_rl.telemetry.report")[0] & {"torch", "megatron", "matplotlib"}


@pytest.mark.parametrize(
    "module",
    ["megatron_rl.serving.server", "megatron_rl.rollout.sglang", "megatron_rl.algo.actor", "megatron_rl.plan.command"],
)
def test_servers_clients_algorithms_and_plans_do_not_load_megatron(module):
    assert not imported_by(f"import {module}")[0] & {"megatron", "a process group"}


def test_a_rollout_process_loads_neither_megatron_nor_transformers():
    assert not imported_by("import megatron_rl.rollout.head")[0] & {"megatron", "transformers", "a process group"}


def test_what_starts_a_server_needs_no_torch_itself():
    assert not imported_by("import megatron_rl.serving.registered")[0] & {"torch", "aiohttp", "transformers"}


def test_every_room_in_the_table_is_complete():
    for room, allowed in MAY_IMPORT.items():
        unknown = allowed - set(MAY_IMPORT) - EVERYTHING
        assert not unknown, f"MAY_IMPORT[{room!r}] names {sorted(unknown)}, which do not exist"
