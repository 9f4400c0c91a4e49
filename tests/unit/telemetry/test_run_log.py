from __future__ import annotations

import io
import json
import signal

import numpy as np
import pytest
from rich.console import Console

from megatron_rl.telemetry import run_log
from megatron_rl.telemetry.run_log import RunLog, Sample, clock, read_run, sparkline
from tests.kit.interpreters import run_python

METRICS = {
    "reward/mean": 0.25,
    "rollout/tokens_per_s": 1234.5,
    "policy/loss": -0.0125,
    "policy/grad_norm": 0.5,
    "rollout/staleness": 0.0,
    "rollout/reply_tokens": 12.4,
    "rollout/trainer_idle_share": 0.25,
    "rollout/servers_idle_share": 0.031,
    "time/step": 2.0,
}


def text_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def steps_of(folder) -> list[int]:
    return [line["step"] for line in read_run(folder).steps]


def test_step_is_one_json_line_with_its_metrics_and_samples(tmp_path):
    with RunLog(tmp_path, 2, console=text_console()) as log:
        log.log_step(0, METRICS, [Sample(prompt="1+1=", reply="2", reward=1.0, answer="2")])
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["kind"] == "step" and row["step"] == 0 and row["elapsed_s"] >= 0
    assert {key: row[key] for key in METRICS} == METRICS
    (sample,) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert sample == {
        "step": 0,
        "split": "train",
        "number": 0,
        "prompt": "1+1=",
        "reply": "2",
        "reward": 1.0,
        "answer": "2",
    }


def test_a_notebooks_cell_has_one_line_for_all_steps_below_what_else_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_log, "is_notebook", lambda: True)
    with RunLog(tmp_path, 3) as log:
        log.say("starting servers")
        for step in range(3):
            log.log_step(step, METRICS)
            if step == 1:
                log.log_evaluation(2, "held_out", {"accuracy": 0.5})
    shown: list[str] = []
    for line in capsys.readouterr().out.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):  # each is written over the one before
            cells = [*part, *cells[len(part) :]]
        shown.append("".join(cells).rstrip())
    assert shown[:2] == ["starting servers", "evaluation held_out after 2 steps: accuracy 0.500"]
    assert shown[2].startswith("step 3/3  reward 0.250") and shown[3:] == [""]


def test_line_is_on_disk_before_the_next_step(tmp_path):
    log = RunLog(tmp_path, 2, console=text_console())
    log.log_step(0, METRICS)
    assert steps_of(tmp_path) == [0]
    log.close()


def test_numbers_of_any_library_are_written_and_nan_becomes_null(tmp_path):
    with RunLog(tmp_path, 1, console=text_console()) as log:
        log.log_step(0, {"a": np.float32(0.5), "b": float("nan"), "c": float("inf"), "d": 3, "e": np.int64(4)})
    (row,) = read_run(tmp_path).steps
    assert [row[key] for key in "abcde"] == [0.5, None, None, 3, 4.0]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_console_that_is_no_terminal_gets_one_plain_line_per_step(tmp_path):
    console = text_console()
    with RunLog(tmp_path, 12, console=console) as log:
        for step in range(2):
            log.log_step(step, METRICS)
        log.log_evaluation(2, "held_out", {"accuracy": 0.5, "prompts": 32})
    first, second, evaluation = console.file.getvalue().splitlines()
    numbers = "reward 0.250  length 12  tokens/s 1,234  loss -0.0125  grad norm 0.500  staleness 0.00  "
    numbers += "trainer waited 25%  servers idle 3%  step time 2.0 s"
    assert first.startswith(f"step  1/12  {numbers}  elapsed ")
    assert "left" in first and second.startswith("step  2/12")
    assert evaluation == "evaluation held_out after 2 steps: accuracy 0.500  prompts 32"


def test_terminal_shows_a_progress_bar_and_closing_twice_is_fine(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    log = RunLog(tmp_path, 2, console=console)
    log.log_step(0, METRICS)
    log.close()
    log.close()
    assert "1/2" in console.file.getvalue() and "reward" in console.file.getvalue()


def test_remarks_are_shown_as_they_are_even_after_the_end(tmp_path):
    console = text_console()
    with RunLog(tmp_path, 1, console=console) as log:
        log.say("starting 2 [embedded] servers")
    log.say("report: runs/[1]/report.html")
    assert console.file.getvalue() == "starting 2 [embedded] servers\nreport: runs/[1]/report.html\n"


def test_metric_that_is_missing_is_left_out_of_the_line(tmp_path):
    console = text_console()
    with RunLog(tmp_path, 1, console=console) as log:
        log.log_step(0, {"reward/mean": 1.0})
    assert "loss" not in console.file.getvalue()


def test_other_ranks_write_nothing(tmp_path):
    with RunLog(tmp_path / "run", 1, is_main=False) as log:
        log.log_config("a: 1")
        log.say("nothing")
        log.log_step(0, METRICS)
        log.log_evaluation(1, "held_out", {"accuracy": 1.0})
    assert not (tmp_path / "run").exists()


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="run.folder = .*/file/run': cannot be written .*name another one"):
        RunLog(tmp_path / "file" / "run", 1)


def test_new_run_in_an_old_folder_sets_the_old_files_aside(tmp_path):
    for reward in (0.1, 0.9):
        with RunLog(tmp_path, 1, console=text_console()) as log:
            log.log_step(0, {"reward/mean": reward})
    assert [line["reward/mean"] for line in read_run(tmp_path).steps] == [0.9]
    assert json.loads((tmp_path / "previous-metrics.jsonl").read_text())["reward/mean"] == 0.1


def test_resumed_run_forgets_the_steps_that_run_again(tmp_path):
    sample = [Sample(prompt="p", reply="old", reward=0.0)]
    with RunLog(tmp_path, 5, console=text_console()) as log:
        log.log_evaluation(0, "held_out", {"accuracy": 0.1}, sample)
        for step in range(4):
            log.log_step(step, {"reward/mean": step}, sample)
        log.log_evaluation(2, "held_out", {"accuracy": 0.2}, sample)
        log.log_evaluation(4, "held_out", {"accuracy": 0.4}, sample)
    with RunLog(tmp_path, 5, first_step=2, console=text_console()) as log:
        log.log_step(2, {"reward/mean": 20}, [Sample(prompt="p", reply="new", reward=0.0)])
    run = read_run(tmp_path)
    assert [line["reward/mean"] for line in run.steps] == [0, 1, 20]
    assert [line["step"] for line in run.evaluations] == [0, 2]
    assert run.samples["train", 2][0]["reply"] == "new"
    assert set(run.samples) == {("held_out", 0), ("held_out", 2), ("train", 0), ("train", 1), ("train", 2)}


def test_repeated_evaluation_counts_once(tmp_path):
    with RunLog(tmp_path, 1, console=text_console()) as log:
        for reply in ("old", "new"):
            log.log_evaluation(0, "held_out", {"accuracy": 0.5}, [Sample(prompt="p", reply=reply, reward=0.0)])
    run = read_run(tmp_path)
    assert len(run.evaluations) == 1
    assert [s["reply"] for s in run.samples["held_out", 0]] == ["new"]


def test_torn_last_line_is_dropped_and_the_run_goes_on(tmp_path):
    with RunLog(tmp_path, 3, console=text_console()) as log:
        log.log_step(0, METRICS)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 1, "rew')
    assert steps_of(tmp_path) == [0]
    with RunLog(tmp_path, 3, first_step=1, console=text_console()) as log:
        log.log_step(1, METRICS)
    assert steps_of(tmp_path) == [0, 1]


def test_killed_process_loses_no_logged_step(tmp_path):
    script = """
        import os, signal, sys
        from megatron_rl.telemetry.run_log import RunLog
        log = RunLog(sys.argv[1], 9)
        for step in range(5): log.log_step(step, {'reward/mean': 0.5})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_python(script, tmp_path).returncode == -signal.SIGKILL
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]


def test_damage_in_the_middle_is_named_and_a_resumed_run_goes_on_without_it(tmp_path, caplog):
    lines = ['{"kind": "step", "step": 0, "elapsed_s": 1.0}', "rubbish", "\0" * 9 + '{"kind": "step", "step": 2}']
    lines += ["\0" * 5000, "[1]", '{"step": -5, "kind": "step"}', '{"step": "3", "kind": "step"}', "[" * 100_000]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "step", "step": 4}', '{"kind": "st']))
    (tmp_path / "samples.jsonl").write_text('{"step": 0}\n{"step": 0, "split": "train", "number": 0, "reply": "a"}\n')
    run = read_run(tmp_path)
    assert [line["step"] for line in run.steps] == [0, 2, 4] and len(run.samples["train", 0]) == 1
    assert "metrics.jsonl: 6 line(s) are damaged and left out: 2, 4, 5, 6, 7, 8" in caplog.text
    assert "samples.jsonl: 1 line(s) are damaged and left out: 1" in caplog.text
    with RunLog(tmp_path, 5, first_step=3, console=text_console()) as log:
        log.log_step(3, METRICS)
    assert steps_of(tmp_path) == [0, 2, 3]


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no metrics.jsonl; give the run.folder of a run that has begun"):
        read_run(tmp_path)


def test_line_break_characters_inside_a_reply_do_not_split_its_line(tmp_path):
    reply = "a\u2028b\x0bc\r\n\x00d"
    with RunLog(tmp_path, 1, console=text_console()) as log:
        log.log_step(0, METRICS, [Sample(prompt="p", reply=reply, reward=0.0)])
    assert read_run(tmp_path).samples["train", 0][0]["reply"] == reply


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.9, "1:01"), (3725, "1:02:05")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_sparkline_spans_lowest_to_highest():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
