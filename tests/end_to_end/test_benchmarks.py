"""The benchmarks of docs/benchmarks.md run in their `--quick` form, on a tiny model, where all that they do is done."""

from __future__ import annotations

import os
import re
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
    ("bench_ops_cpu", "bench_recovery", "bench_packing", "bench_rewards"),
]
"""Run one after the other in a process, which imports once what takes longest."""
STARTS_TRAINING = ("bench_train_step", "demo_seeds", "bench_async", "bench_executor")
"""Take half a minute each for processes that only start: their arguments are checked, and the tables that they print of
what those processes give. `--quick` is for by hand."""
STARTED = """
import bench_async, bench_train_step, bench_vs_trl, demo_seeds
phases = {"tokens": 256, "step": 6.0, "rollout": 2.0, "update": 3.5, "publish": 0.5}
bench_vs_trl.run_ours, bench_vs_trl.run_trl = lambda *_: 2 * [phases], lambda *_: 2 * [phases | {"step": 24.0}]
bench_vs_trl.main(["--quick", "--trl-python", sys.executable])
speed = {"memory": 2**30, "flops": 1e10, "tokens": 64, "matmul": 4e10}
bench_train_step.run_side = lambda side, *_: speed | {"times": [1.0 if side == "megatron_rl" else 5.0]}
bench_train_step.main(["--quick"])
shares = {"waited": 0.5, "slots_used": 0.25, "decoding": 0.75, "dropped": 0, "ages": {"0": 1, "1": 3}}
bench_async.run = lambda *_, eta, **__: shares | {"samples": 128, "seconds": 2.0 - eta, "publish_s": 0.01}
bench_async.main(["--quick"])
demo_seeds.run = lambda config, seed, *_: (
    {"before": 0.375, "accuracy": 0.9, "answers": 32, "seconds": 30.0, "samples": 768 * (1 + ("async" in config))}
)
assert demo_seeds.main([]) == 0
"""


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
    tried = [*TOGETHER[0], *TOGETHER[1], *STARTS_TRAINING]
    assert sorted(command.partition(".py")[0] for command in COMMANDS) == sorted(tried)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, shown",
    [
        (
            TOGETHER[0],
            ("| 1e-06 | bfloat16 |", "embedded server", "transformers generate", "| publication |", "checksums add"),
        ),
        (
            TOGETHER[1],
            ("GAE, 32 tokens in 4 sequences", "in the background, later", "first-fit-decreasing", "code, one test"),
        ),
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


def test_the_other_benchmarks_take_the_arguments_that_the_page_gives_them_and_print_their_tables():
    script = (
        "for command in sys.argv[1:]:\n"
        "    name, *arguments = shlex.split(command)\n"
        "    sys.argv = [name, *arguments, '--quick', '--help']\n"
        "    try:\n"
        "        importlib.import_module(name.removesuffix('.py')).main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, (command, end.code)\n"
    )
    commands = commands_of(STARTS_TRAINING)
    further = shlex.join(["bench_async.py", "--etas", "8", "--decode-ms", "3.2"])
    assert "--etas 8 --decode-ms 3.2" in PAGE
    said = run(script + STARTED, *commands, further, "bench_vs_trl.py")
    assert said.count("in seconds, on a tiny model:") == len(commands) + 2
    for row in (
        r"demo +256 +24.00 +2.00 +6.00 +2.00 +3.50 +0.50 +4.00",
        r"\| quick \| 64 \| megatron_rl \| 1.00 \(1.00-1.00\) \| 64 \| 5.00 \| 1.00 \| 1.00 \| 0.010 \| 25% \|",
        r"eta 1, interrupt +128.0 +2.00 +50% +75% +25% +0  0: 25%  1: 75%",
        r"asynchronous +0.375 +0.900 +0.900 +0.900 +0.900 +0.000 +0.032 +30.0 +51.2 +2.00",
    ):
        assert re.search(row, said), said
