"""External loggers for a run's metrics: TensorBoard, Weights & Biases, trackio, and a Prometheus endpoint.

The complete record is metrics.jsonl; these loggers only show it. If a logger cannot be opened, the run does not start.
A logger that fails later is dropped with a warning, because training matters more than a dashboard.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import TelemetryConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sink:
    """An external logger."""

    name: str
    log: Callable[[int, dict[str, float]], object]
    """Function log(step, numbers) that logs finite numbers by name.

    `step` is the number of finished steps. Several calls may have the same one.
    """
    close: Callable[[], object]


def tensorboard(folder: Path, first_step: int, project: str, settings: dict[str, Any]) -> Sink:
    """Open a TensorBoard log in the subfolder `tensorboard` of `folder`.

    In a resumed run, TensorBoard discards what an earlier process logged after `first_step` steps.
    """
    files = _package("tensorboard.summary.writer.event_file_writer", "tensorboard")
    events = _package("tensorboard.compat.proto.event_pb2", "tensorboard")
    summaries = _package("tensorboard.compat.proto.summary_pb2", "tensorboard")
    writer = files.EventFileWriter(str(folder / "tensorboard"))

    def add(step: int, **content: Any) -> None:
        writer.add_event(events.Event(wall_time=time.time(), step=step, **content))

    def log(step: int, numbers: dict[str, float]) -> None:
        values = [summaries.Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        add(step, summary=summaries.Summary(value=values))
        writer.flush()

    # On this event, readers drop what an earlier process logged from its step on.
    add(first_step + 1, session_log=events.SessionLog(status=events.SessionLog.START))
    return Sink("tensorboard", log, writer.close)


def weights_and_biases(folder: Path, first_step: int, project: str, settings: dict[str, Any]) -> Sink:
    """Open a Weights & Biases run. Its id is stored in folder/wandb_id, so that a resumed run continues it.

    The package reads its own environment variables (WANDB_MODE=offline, WANDB_API_KEY, WANDB_ENTITY).
    """
    wandb = _package("wandb", "wandb")
    id_file = folder / "wandb_id"
    # A new run in an old folder must not continue the old run's curves.
    if first_step == 0 or not id_file.is_file():
        id_file.write_text(uuid.uuid4().hex[:8])
    run = wandb.init(
        project=project,
        name=folder.name,
        dir=str(folder),
        id=id_file.read_text(),
        resume="allow",
        config=settings,
        settings=wandb.Settings(silent=True),
    )
    # wandb counts one step per call, and a step and its evaluation are two calls.
    run.define_metric("*", step_metric="finished_steps")
    return Sink("wandb", lambda step, numbers: run.log({"finished_steps": step} | numbers), run.finish)


def trackio(folder: Path, first_step: int, project: str, settings: dict[str, Any]) -> Sink:
    """Open a trackio run. It is stored on this machine, unless environment variables of trackio say otherwise.

    TRACKIO_SPACE_ID is such a variable.
    """
    resume = "allow" if first_step else "never"
    run = _package("trackio", "trackio").init(project=project, name=folder.name, resume=resume, config=settings)
    return Sink("trackio", lambda step, numbers: run.log(numbers, step=step), run.finish)


LOGGERS = {"tensorboard": tensorboard, "wandb": weights_and_biases, "trackio": trackio}
"""{name in telemetry.loggers: function that opens the logger}."""


def prometheus(address: str, run: str) -> Sink:
    """Serve the latest value of each metric at http://ADDRESS/metrics.

    Metrics are called `megatron_rl_<name>{run="..."}` there.
    """
    package = _package("prometheus_client", "prometheus")
    registry, gauges = package.CollectorRegistry(), {}
    host, _, port = address.rpartition(":")
    try:
        server, _ = package.start_http_server(int(port), host, registry=registry)
    except OSError as error:
        raise ValueError(
            f"telemetry.prometheus = {address!r}: cannot be listened on ({error}); give another host:port, or '' "
            f"for none."
        ) from error

    def log(step: int, numbers: dict[str, float]) -> None:
        for key, value in {"finished_steps": step, **numbers}.items():
            name = "megatron_rl_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            if name not in gauges:
                gauges[name] = package.Gauge(name, key, ["run"], registry=registry)
            gauges[name].labels(run).set(value)

    def close() -> None:
        server.shutdown()
        server.server_close()

    return Sink("prometheus", log, close)


class Sinks:
    """The external loggers that a run's config names.

    The constructor raises ValueError, which names the config key, if one of them cannot be opened.

    sinks = Sinks(TelemetryConfig(loggers=["tensorboard"]), Path("runs/demo"), first_step=0, settings={})
    sinks.log(1, {"reward/mean": 0.5})
    sinks.close()
    """

    def __init__(self, config: TelemetryConfig, folder: Path, first_step: int, settings: dict[str, Any]) -> None:
        self._open: list[Sink] = []
        try:
            for name in config.loggers:
                self._open.append(LOGGERS[name](folder, first_step, config.project, settings))
            if config.prometheus:
                self._open.append(prometheus(config.prometheus, folder.name))
        except BaseException:  # the loggers that are already open have threads and files
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the finite numbers among `metrics` with every logger. step: number of finished steps."""
        numbers = {
            key: float(value)
            for key, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        for sink in list(self._open):
            try:
                sink.log(step, dict(numbers))
            # Third-party packages that talk to services may raise anything; the run's own log has the numbers.
            except Exception as error:
                logger.warning("telemetry: %s is left out from here on: %s: %s", sink.name, type(error).__name__, error)
                self._open.remove(sink)

    def close(self) -> None:
        for sink in self._open:
            try:
                sink.close()
            except Exception as error:
                logger.warning("telemetry: %s was not closed: %s: %s", sink.name, type(error).__name__, error)
        self._open = []


def _package(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        key = "telemetry.prometheus" if name == "prometheus" else f"telemetry.loggers: {name}"
        raise ValueError(
            f"{key}: cannot be used here ({error}); pip install 'megatron-rl[loggers]' brings what it needs, or leave "
            f"it out."
        ) from error
