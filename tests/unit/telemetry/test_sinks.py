from __future__ import annotations

import io
import json
import sys
import urllib.request

import pytest
from rich.console import Console

from megatron_rl.config import TelemetryConfig
from megatron_rl.launch.ports import free_port
from megatron_rl.telemetry.run_log import RunLog
from megatron_rl.telemetry.sinks import Sink, Sinks
from tests.kit.interpreters import run_python
from tests.kit.waiting import LATE_S


def write_run(folder, config, *, steps=2, first_step=0):
    with RunLog(folder, steps, console=Console(file=io.StringIO()), first_step=first_step) as log:
        log.sinks = Sinks(config, folder, first_step, settings={"optimizer": {"lr": 1e-5}})
        for step in range(first_step, steps):
            log.log_step(step, {"reward/mean": 0.25 * step, "policy/loss": float("nan"), "is_odd": bool(step % 2)})
        log.log_evaluation(steps, "held_out", {"accuracy": 0.75})


def read_tensorboard(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_finite_number(tmp_path):
    pytest.importorskip("tensorboard")
    write_run(tmp_path, TelemetryConfig(loggers=["tensorboard"]))
    assert read_tensorboard(tmp_path) == {
        "reward/mean": [(1, 0.0), (2, 0.25)],
        "held_out/accuracy": [(2, 0.75)],
    }


def test_tensorboard_of_a_resumed_run_has_no_step_twice(tmp_path):
    pytest.importorskip("tensorboard")
    write_run(tmp_path, TelemetryConfig(loggers=["tensorboard"]), steps=4)
    write_run(tmp_path, TelemetryConfig(loggers=["tensorboard"]), steps=3, first_step=1)  # killed; goes on after one
    assert [step for step, _ in read_tensorboard(tmp_path)["reward/mean"]] == [1, 2, 3]


@pytest.mark.thorough
@pytest.mark.slow
def test_wandb_offline_keeps_one_id_over_a_resume(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    write_run(tmp_path, TelemetryConfig(loggers=["wandb"]))
    run_id = (tmp_path / "wandb_id").read_text()
    write_run(tmp_path, TelemetryConfig(loggers=["wandb"]), steps=3, first_step=2)
    assert (tmp_path / "wandb_id").read_text() == run_id
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))) >= 1


def test_trackio_has_the_run(tmp_path):
    pytest.importorskip("trackio")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path.parent)!r})
from pathlib import Path
from megatron_rl.config import TelemetryConfig
from megatron_rl.telemetry.sinks import Sinks
sinks = Sinks(TelemetryConfig(loggers=["trackio"], project="sinks"), Path({str(tmp_path)!r}), 0, {{}})
sinks.log(1, {{"reward/mean": 0.5}})
sinks.close()
"""
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "PATH": "/usr/bin:/bin"}
    done = run_python(code, env=environment)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "trackio").glob("sinks*"))


def test_prometheus_offers_the_newest_numbers(tmp_path):
    pytest.importorskip("prometheus_client")
    config = TelemetryConfig(prometheus=f"127.0.0.1:{free_port('127.0.0.1')}")
    sinks = Sinks(config, tmp_path / "run 7", 0, {})
    sinks.log(1, {"reward/mean": 0.25})
    sinks.log(2, {"reward/mean": 0.5})
    with urllib.request.urlopen(f"http://{config.prometheus}/metrics", timeout=LATE_S) as answer:
        text = answer.read().decode()
    assert 'megatron_rl_reward_mean{run="run 7"} 0.5' in text
    assert 'megatron_rl_finished_steps{run="run 7"} 2.0' in text
    with pytest.raises(ValueError, match=r"telemetry.prometheus = .*cannot be listened on"):
        Sinks(config, tmp_path, 0, {})
    sinks.close()


def test_sink_that_fails_is_left_out_and_the_others_go_on(tmp_path, caplog):
    def unreachable(step, numbers):
        raise OSError("service unreachable")

    def never():
        raise AssertionError("was left out")

    steps = []
    kept = Sink("kept", lambda step, numbers: steps.append(step), lambda: steps.append("closed"))
    with RunLog(tmp_path, 2, console=Console(file=io.StringIO())) as log:
        log.sinks = Sinks(TelemetryConfig(), tmp_path, 0, {})
        log.sinks._open = [Sink("broken", unreachable, never), kept]
        log.log_step(0, {"a": 1.0})
        log.log_step(1, {"a": 2.0})
    assert steps == [1, 2, "closed"]
    assert caplog.text.count("broken is left out from here on: OSError: service unreachable") == 1
    assert [json.loads(line)["a"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1.0, 2.0]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_missing_package_stops_the_run_and_says_how_to_get_it(name, tmp_path, monkeypatch):
    for module in ("tensorboard.summary.writer.event_file_writer", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"telemetry.loggers: {name}: cannot be used .*megatron-rl\[loggers\]"):
        Sinks(TelemetryConfig(loggers=[name]), tmp_path, 0, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loggers": ["tensorbord"]}, "telemetry.loggers = .*each must be one of tensorboard, wandb, trackio"),
        ({"prometheus": "9464"}, "telemetry.prometheus = '9464': must be host:port"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TelemetryConfig(**options)
