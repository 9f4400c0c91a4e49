from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl import cli
from megatron_rl.telemetry.run_log import RunLog, Sample, read_run
from megatron_rl.tools.report.compare import compare, distinct_names, partings, what_they_reached
from tests.kit.waiting import LATE_S


def write_run(folder: Path, lr: str, gain: float, steps: int = 4) -> Path:
    with RunLog(folder, steps, console=Console(file=io.StringIO())) as log:
        log.log_config(f"optimizer: {{lr: {lr}, eps: 1e-8}}\nrun: {{folder: {folder}}}\nmegatron: {{}}\n")
        log.log_evaluation(0, "held_out", {"accuracy": 0.25})
        for step in range(steps):
            log.log_step(step, {"reward/mean": gain * step, "time/step": 2.0, "policy/loss": 0.5 - gain})
        log.log_evaluation(steps, "held_out", {"accuracy": 0.25 + gain})
    return folder


def test_table_shows_what_runs_reached_and_where_their_configs_differ(tmp_path, capsys):
    slow, fast = write_run(tmp_path / "slow", "1e-6", 0.1), write_run(tmp_path / "fast", "1e-5", 0.2, steps=6)
    cli.main(["compare", str(slow), str(fast)])
    out = capsys.readouterr().out
    lines = {line.split("│")[1].strip(): line.split("│")[2:4] for line in out.splitlines() if line.count("│") == 4}
    cells = {key: [cell.strip() for cell in row] for key, row in lines.items()}
    assert cells["held-out accuracy"] == ["25% → 35%", "25% → 45%"]
    assert cells["steps"] == ["4", "6"]
    assert cells["step time, median"] == ["2 s", "2 s"]
    assert [float(cell) for cell in cells["optimizer.lr"]] == [1e-6, 1e-5]
    assert "optimizer.eps" not in cells and "run.folder" not in cells
    assert str(tmp_path / "compare.html") in out.replace("\n", "")


def write_replies(folder: Path, *replies: str, reward: float = 1.0) -> Path:
    """A run with one sample a step."""
    with RunLog(folder, len(replies), console=Console(file=io.StringIO())) as log:
        for step, reply in enumerate(replies):
            samples = [Sample(prompt="1+1=", reply=reply, reward=reward)]
            log.log_step(step, {"reward/mean": reward, "time/step": 2.0 + len(str(folder))}, samples)
    return folder


def test_runs_that_part_are_named_with_step_and_replies_and_a_bound_makes_it_an_error(tmp_path, capsys):
    one, other = write_replies(tmp_path / "one", "2", "is 2."), write_replies(tmp_path / "other", "2", "is 3.")
    cli.main(["compare", str(one), str(other)])
    out = capsys.readouterr().out
    assert "one and other part at step 1\nsample 0: the replies part at character 3\n" in out
    assert "  prompt: '1+1='\n  'is 2.'\n  'is 3.'\n" in out
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", str(one), str(other), "--bound", "0.5"])
    assert ended.value.code == 1 and capsys.readouterr().out
    cli.main(["compare", str(one), str(write_replies(tmp_path / "same", "2", "is 2.")), "--bound", "0"])
    assert " part at step" not in capsys.readouterr().out


def test_the_bound_is_for_numbers_that_do_not_depend_on_time(tmp_path):
    runs = [write_replies(tmp_path / str(reward), "2", reward=reward) for reward in (1.0, 1.25)]
    (text,) = partings(runs).values()
    assert "part at step 0: reward/mean 1.0 and 1.25" in text and "the same reply has reward 1.0 and 1.25" in text
    assert partings(runs, bound=0.5) == {}


def test_runs_of_every_aim_are_compared_by_what_they_work_towards(tmp_path):
    aims = {"reward/mean": 0.5, "preference/accuracy": 0.75, "supervised/loss": 2.25}
    for number, (metric, value) in enumerate(aims.items()):
        with RunLog(tmp_path / str(number), 2, console=Console(file=io.StringIO())) as log:
            for step in range(2):
                log.log_step(step, {metric: value - 0.25 * step})
            log.log_evaluation(2, "held_out", {"loss": 2.0} if number == 2 else {"accuracy": 0.5, "loss": 0.7})
    reached = dict(what_they_reached([read_run(tmp_path / str(number)) for number in range(3)]))
    assert reached["train reward, first and last tenth"] == ["0.50 → 0.25", "–", "–"]
    assert reached["train accuracy, first and last tenth"] == ["–", "75% → 50%", "–"]
    assert reached["train loss (lower is better), first and last tenth"] == ["–", "–", "2.250 → 2.000"]
    assert reached["held-out accuracy"] == ["50% → 50%", "50% → 50%", "–"]
    assert reached["held-out loss (lower is better)"] == ["–", "–", "2.000 → 2.000"]


def test_page_lays_the_curves_of_all_runs_over_one_another(tmp_path):
    folders = [write_run(tmp_path / name, "1e-6", gain) for name, gain in (("a<b>", 0.1), ("c", 0.2))]
    _, page = compare(folders)
    source = page.read_text(encoding="utf-8")
    chart = source[source.index('aria-label="reward/mean"') :]
    chart = chart[: chart.index("</svg>")]
    assert chart.count('class="line c0"') == chart.count('class="line c1"') == 1
    assert "<b>" not in source and "a&lt;b&gt;" in source
    assert source.count("<svg") == 4  # the evaluation, the reward, the step time, the loss


def test_columns_of_the_page_break_between_words_alone(tmp_path):
    runs = [write_run(tmp_path / name, "1e-6", 0.1) for name in ("a_rather_long_name_of_a_run", "another_long_name")]
    _, page = compare(runs)
    source = page.read_text()
    assert source.count("<table class='compared'>") >= 1 and "<table>" not in source
    assert re.search(r"\.compared\{table-layout:auto\}", source)
    assert re.search(r"\.compared th,\.compared td\{overflow-wrap:normal;word-break:normal;width:auto\}", source)


def test_runs_of_one_name_are_told_apart_by_their_parents():
    assert distinct_names([Path("/x/seed1/demo"), Path("/x/seed2/demo")]) == ["seed1/demo", "seed2/demo"]
    assert distinct_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert distinct_names([Path("/x/a"), Path("/x/a")]) == ["/x/a (1)", "/x/a (2)"]


def test_one_run_and_folders_without_one_are_refused(tmp_path):
    run = write_run(tmp_path / "run", "1e-6", 0.1)
    with pytest.raises(SystemExit, match="nothing to compare; give two folders"):
        cli.main(["compare", str(run)])
    with pytest.raises(SystemExit, match="has no metrics.jsonl"):
        cli.main(["compare", str(run), str(tmp_path)])


@pytest.mark.parametrize("arguments", [["compare", "one", "two"], ["--help"]], ids=lambda a: a[0])
def test_a_reader_that_has_enough_ends_the_command_quietly(tmp_path, arguments):
    """As `| head` does: nothing is said on the terminal."""
    for name in ("one", "two"):
        with RunLog(tmp_path / name, 1, console=Console(file=io.StringIO())) as log:
            log.log_step(0, {"reward/mean": 0.5})
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "megatron_rl.cli", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=LATE_S)
    os.close(writing)
    assert done.stderr == ""
