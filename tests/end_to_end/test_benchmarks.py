"""The benchmarks of docs/benchmarks.md run in their `--quick` form, on a tiny model, where all that they do is done."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
BEGINNING = ".venv/bin/python benchmarks/"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
COMMANDS = [line.removeprefix(BEGINNING) for line in PAGE.splitlines() if line.startswith(BEGINNING)]
"""The benchmark commands of the page, each a file and its arguments."""
TOGETHER = [
    ("bench_delta", "rollout_server", "bench_publish"),
    ("bench_ops_cpu", "bench_recovery"),
]
"""Run one after the other in a process, which imports once what takes longest."""
STARTS_TRAINING = ("bench_train_step", "demo_seeds", "bench_async", "bench_executor")
"""Take half a minute each for processes that only start; their arguments are checked, and `--quick` is for by hand."""
WITHOUT_QUICK = ("bench_rewards", "bench_packing")
"""Need no model, and have arguments for their size."""


def run(script: str, *arguments: str) -> str:
    paths = [str(ROOT), str(ROOT / "benchmarks")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-c", f"import importlib, shlex, sys\n{script}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands_of(names: tuple[str, ...]) -> list[str]:
    found = [command for command in COMMANDS if command.partition(".py")[0] in names]
    assert len(found) == len(names), f"the page has {found} of {names}"
    return found


def test_each_benchmark_of_the_page_is_tried_here():
    tried = [name for names in TOGETHER for name in names] + [*STARTS_TRAINING, *WITHOUT_QUICK]
    assert sorted(command.partition(".py")[0] for command in COMMANDS) == sorted(tried)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, shown",
    [
        (
            TOGETHER[0],
            ("| 1e-06 | bfloat16 |", "embedded server", "transformers generate", "| publication |", "checksums add"),
        ),
        (TOGETHER[1], ("GAE, 32 tokens in 4 sequences", "in the background, later")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_benchmark_of_the_page_runs(names, shown):
    script = (
        "for command in sys.argv[1:]:\n"
        "    name, *arguments = shlex.split(command)\n"
        "    importlib.import_module(name.removesuffix('.py')).main([*arguments, '--quick'])"
    )
    said = run(script, *commands_of(names))
    assert all(words in said for words in shown), said


def test_the_other_benchmarks_take_the_arguments_that_the_page_gives_them():
    script = (
        "for command in sys.argv[1:]:\n"
        "    name, *arguments = shlex.split(command)\n"
        "    sys.argv = [name, *arguments, '--quick', '--help']\n"
        "    try:\n"
        "        importlib.import_module(name.removesuffix('.py')).main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, (command, end.code)"
    )
    commands = commands_of(STARTS_TRAINING)
    further = shlex.join(["bench_async.py", "--etas", "8", "--decode-ms", "3.2"])
    assert "--etas 8 --decode-ms 3.2" in PAGE
    said = run(script, *commands, further, "bench_vs_trl.py")
    assert said.count("in seconds, on a tiny model:") == len(commands) + 2
