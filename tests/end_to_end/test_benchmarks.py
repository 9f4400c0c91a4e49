"""The benchmarks of docs/benchmarks.md run in their `--quick` form, on a tiny model, where all that they do is done."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
import warnings
from pathlib import Path

import pytest

from tests.kit.forks import check_end
from tests.kit.ranks import fork

ROOT = Path(__file__).resolve().parents[2]
BEGINNING = ".venv/bin/python benchmarks/"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
COMMANDS = [line.removeprefix(BEGINNING) for line in PAGE.splitlines() if line.startswith(BEGINNING)]
"""The benchmark commands of the page, each a file and its arguments."""
QUICK = ("bench_delta", "publication_times", "bench_ops_cpu", "bench_recovery", "bench_packing", "bench_rewards")
QUICK += ("bench_spread", "bench_agents", "bench_draft")
STARTS_PROCESSES = ("rollout_server", "bench_publish", "bench_exchange")
"""Each take up to 20 s of a core to import what others have imported."""
STARTS_TRAINING = ("bench_train_step", "bench_trees", "demo_seeds", "bench_async", "bench_executor", "bench_senders")
STARTS_TRAINING += ("bench_distillation", "trail_seeds", "bench_exact")
"""Take half a minute each for processes that only start: their arguments are checked, and the tables that they print of
what those processes give. `--quick` is for by hand."""


def said_by(act, commands: list[str], folder: Path) -> str:
    """Return the output of a forked process, which need not import anything, that does `act(command)` one by one."""
    output = folder / "output.txt"

    def run(commands: list[str]) -> None:
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT / "benchmarks"))
        warnings.simplefilter("ignore")
        for command in commands:
            act(*shlex.split(command))

    check_end([fork(run, commands, output)], output)
    return output.read_text()


def try_it(file, *arguments):
    importlib.import_module(file.removesuffix(".py")).main([*arguments, "--quick"])


def ask_for_help(file, *arguments):
    sys.argv = [file, *arguments, "--quick", "--help"]
    try:
        importlib.import_module(file.removesuffix(".py")).main()
    except SystemExit as end:
        assert not end.code, (file, end.code)


def print_tables(*_) -> None:
    """Of what the processes would give."""
    import bench_async
    import bench_distillation
    import bench_exact
    import bench_train_step
    import bench_vs_trl
    import demo_seeds
    import trail_seeds

    phases = {"tokens": 256, "step": 6.0, "rollout": 2.0, "update": 3.5, "publish": 0.5}
    bench_vs_trl.run_ours, bench_vs_trl.run_trl = lambda *_: 2 * [phases], lambda *_: 2 * [phases | {"step": 24.0}]
    bench_vs_trl.main(["--quick", "--trl-python", sys.executable])
    beside = {"waits": 3, "waits by line": {"a.py:1": 3}}
    speed = {"memory": 2**30, "flops": 1e10, "tokens": 64, "matmul": 4e10, "beside": beside}
    bench_train_step.run_side = lambda side, *_: speed | {"times": [1.0 if side == "megatron_rl" else 5.0]}
    bench_train_step.main(["--quick"])
    shares = {"waited": 0.5, "slots_used": 0.25, "decoding": 0.75, "dropped": 0, "ages": {"0": 1, "1": 3}}
    bench_async.run = lambda *_, eta, **__: shares | {"samples": 128, "seconds": 2.0 - eta, "publish_s": 0.01}
    bench_async.main(["--quick"])
    step = {"time/step": 2.0, "time/rollout": 1.0, "time/update": 0.5, "time/publish": 0.1, "mismatch/equal": 1.0}
    bench_exact.run = lambda *_, exact, **__: [step | {"time/step": 2.0 + exact}]
    bench_exact.main(["--quick"])
    answers = {"before": 0.375, "accuracy": 0.9, "answers": 32, "seconds": 30.0}
    demo_seeds.run = lambda config, seed, *_: answers | {"samples": 768 * (1 + ("async" in config))}
    assert demo_seeds.main([]) == 0
    bench_distillation.run = lambda side, *_: ([0.4, 0.6, 0.9] if "distillation" in side[0] else [0.4, 0.5, 0.6], 6.0)
    assert bench_distillation.main(["--steps", "2"]) == 0 and bench_distillation.main(["--score", "0.95"]) == 1
    trail = {"first": 0.1, "before": 0.2, "after": 1.0, "rows": 900, "computed": 0.25, "step": 2.0, "pass": 0.5}
    trail_seeds.run = lambda _, seed, *rest: trail | {"last": 0.4 if seed == 1 else 0.3}
    assert trail_seeds.main(["--seeds", "1"]) == 0 and trail_seeds.main(["--seeds", "2"]) == 1


def commands_of(names: tuple[str, ...]) -> list[str]:
    found = [command for command in COMMANDS if command.partition(".py")[0] in names]
    assert len(found) == len(names), f"the page has {found} of {names}"
    return found


def test_each_benchmark_of_the_page_is_tried_here():
    tried = [*QUICK, *STARTS_PROCESSES, *STARTS_TRAINING]
    assert sorted(command.partition(".py")[0] for command in COMMANDS) == sorted(tried)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, shown",
    [
        pytest.param(
            QUICK,
            ("| 1e-06 | bfloat16 |", "GAE, 32 tokens in 4 sequences")
            + ("in the background, later", "first-fit-decreasing", "code, one test", "right for 1.3x"),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            STARTS_PROCESSES,
            ("embedded server", "transformers generate", "| publication |", "checksums add"),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["quick", "starts processes"],
)
def test_a_benchmark_of_the_page_runs(names, shown, tmp_path):
    said = said_by(try_it, commands_of(names), tmp_path)
    assert all(words in said for words in shown), said


def test_the_other_benchmarks_take_the_arguments_that_the_page_gives_them(tmp_path):
    commands = commands_of(STARTS_TRAINING)
    further = shlex.join(["bench_async.py", "--etas", "8", "--decode-ms", "3.2"])
    assert "--etas 8 --decode-ms 3.2" in PAGE
    said = said_by(ask_for_help, [*commands, further, "bench_vs_trl.py"], tmp_path)
    assert said.count("in seconds, on a tiny model:") == len(commands) + 2


def test_the_tables_of_what_the_other_benchmarks_start_are_right(tmp_path):
    said = said_by(print_tables, ["-"], tmp_path)
    for row in (
        r"demo +256 +24.00 +2.00 +6.00 +2.00 +3.50 +0.50 +4.00",
        r"\| quick \| 64 \| megatron_rl \| 1.00 \(1.00-1.00\) \| 64 \| 5.00 \| 1.00 \| 1.00 \| 0.010 \| 25% \|",
        r"eta 1, interrupt +128.0 +2.00 +50% +75% +25% +0  0: 25%  1: 75%",
        r"\| true \| 3.00 \| 1.00 \| 0.50 \| 0.10 \| 1.50 \| 1.000 \|",
        r"distillation, seed 2 +0.400 +0.600 +0.900 +2 +6.0",
        r"GRPO, seed 3 +0.400 +0.500 +0.600 +never +6.0",
        r"0.1 M +1 +0.100 +0.400 +0.200 +1.000 +900 +0.250 +2.00 +2.00 +0.50 +0.50",
        r"asynchronous +0.375 +0.900 +0.900 +0.900 +0.900 +0.000 +0.032 +30.0 +51.2 +2.00",
    ):
        assert re.search(row, said), said
