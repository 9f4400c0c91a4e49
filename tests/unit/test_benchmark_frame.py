"""The frame of the benchmarks: `--write` keeps what a command printed, below the command, if it came to its end."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def frame(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import frame

    monkeypatch.setattr(frame, "RESULTS", tmp_path)
    return frame


@pytest.fixture
def run(frame, monkeypatch):
    """Run a main as the program bench_it.py with these arguments; return its exit status."""

    def run(main, *argv):
        monkeypatch.setattr(sys, "argv", ["benchmarks/bench_it.py", *argv])
        with pytest.raises(SystemExit) as end:
            frame.run(main)
        return end.value.code

    return run


def test_each_command_has_one_block_in_the_results_file_in_the_order_of_their_first_runs(run, tmp_path, capsys):
    def say(*words, status=None):
        return lambda: print(*words) or status

    result = tmp_path / "bench_it.txt"
    result.write_text("a table without its command\n")
    run(say("two steps\n\n   2 s"), "--steps", "2", "--write")
    assert result.read_text() == "$ python benchmarks/bench_it.py --steps 2\ntwo steps\n\n   2 s\n"
    assert run(say("a name with a space", status=1), "--write", "--name", "a b") == 1, "a result, too"
    run(say("   1 s"), "--steps", "2", "--write")
    assert result.read_text() == (
        "$ python benchmarks/bench_it.py --steps 2\n   1 s\n\n"
        "$ python benchmarks/bench_it.py --name 'a b'\na name with a space\n"
    )
    assert capsys.readouterr().out == "two steps\n\n   2 s\na name with a space\n   1 s\n", "it is printed as well"


def test_nothing_is_written_without_the_option_or_of_a_benchmark_that_did_not_come_to_its_end(run, tmp_path):
    run(lambda: print("fast"))
    assert run(lambda: print("half of it") or sys.exit("a server ended with 1"), "--write") == "a server ended with 1"
    assert not list(tmp_path.iterdir())


def test_quick_figures_are_never_written(frame, capsys):
    for argv in (["--quick", "--write"], ["--wri"]):
        with pytest.raises(SystemExit):
            frame.arguments(frame.parser(None), argv)
    assert "--write: with --quick nothing is measured" in capsys.readouterr().err


def test_every_benchmark_that_takes_the_option_runs_in_the_frame():
    for path in BENCHMARKS.glob("*.py"):
        text = path.read_text()
        if "frame.arguments(" in text and path.name != "frame.py":
            assert text.endswith("    frame.run(main)\n"), path.name
