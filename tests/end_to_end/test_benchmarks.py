"""The benchmarks of docs/benchmarks.md run in their `--quick` form, on a tiny model, where all that they do is done."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import warnings
from pathlib import Path

import pytest
from kills import exit_codes
from ranks import fork

ROOT = Path(__file__).resolve().parents[2]
BEGINNING = ".venv/bin/python benchmarks/"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
COMMANDS = [line.removeprefix(BEGINNING) for line in PAGE.splitlines() if line.startswith(BEGINNING)]
"""The benchmark commands of the page, each a file and its arguments."""
TOGETHER = [
    ("bench_delta", "rollout_server", "bench_publish"),
    ("bench_ops_cpu", "bench_recovery"),
]
"""Run one after the other in a process."""
STARTS_TRAINING = ("bench_train_step", "demo_seeds", "bench_async", "bench_executor")
"""Take half a minute each for processes that only start; their arguments are checked, and `--quick` is for by hand."""
WITHOUT_QUICK = ("bench_rewards", "bench_packing")
"""Need no model, and have arguments for their size."""


def said_by(act, commands: list[str], folder: Path) -> str:
    """What a forked process, which need not import anything, prints while it does `act(command)` for one by one."""
    output = folder / "output.txt"

    def run(commands: list[str]) -> None:
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT / "benchmarks"))
        warnings.simplefilter("ignore")
        for command in commands:
            act(*shlex.split(command))

    codes = exit_codes([fork(run, commands, output)])
    assert codes == [0], output.read_text()
    return output.read_text()


def try_it(file, *arguments):
    importlib.import_module(file.removesuffix(".py")).main([*arguments, "--quick"])


def ask_for_help(file, *arguments):
    sys.argv = [file, *arguments, "--quick", "--help"]
    try:
        importlib.import_module(file.removesuffix(".py")).main()
    except SystemExit as end:
        assert not end.code, (file, end.code)


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
def test_a_benchmark_of_the_page_runs(names, shown, tmp_path):
    said = said_by(try_it, commands_of(names), tmp_path)
    assert all(words in said for words in shown), said


def test_the_other_benchmarks_take_the_arguments_that_the_page_gives_them(tmp_path):
    commands = commands_of(STARTS_TRAINING)
    further = shlex.join(["bench_async.py", "--etas", "8", "--decode-ms", "3.2"])
    assert "--etas 8 --decode-ms 3.2" in PAGE
    said = said_by(ask_for_help, [*commands, further, "bench_vs_trl.py"], tmp_path)
    assert said.count("in seconds, on a tiny model:") == len(commands) + 2
