"""External loggers for a run's metrics: TensorBoard, Weights & Biases, trackio, and a Prometheus endpoint.

The complete record is metrics.jsonl; these loggers only show it. A logger that cannot be opened stops the run
before it starts. One that fails later is dropped with a warning: training matters more than a dashboard.
"""

from __future__ import annotations

import abc
import importlib
import logging
import math
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config import TelemetryConfig

logger = logging.getLogger(__name__)


class Sink(abc.ABC):
    """An external logger."""

    name: str

    @abc.abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log finite numbers by name. `step` counts finished steps and may repeat (a step, then its evaluation)."""

    @abc.abstractmethod
    def close(self) -> None: ...


class TensorBoard(Sink):
    """Writes folder/tensorboard. In a resumed run, TensorBoard discards what was logged after `first_step`."""

    name = "tensorboard"

    def __init__(self, folder: Path, first_step: int) -> None:
        writer = _package("tensorboard.summary.writer.event_file_writer", self.name)
        self._events = _package("tensorboard.compat.proto.event_pb2", self.name)
        self._summary = _package("tensorboard.compat.proto.summary_pb2", self.name)
        self._writer = writer.EventFileWriter(str(folder / "tensorboard"))
        # On this event, readers drop what an earlier process logged from its step on.
        self._add(first_step + 1, session_log=self._events.SessionLog(status=self._events.SessionLog.START))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._add(step, summary=self._summary.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Sink):
    """One Weights & Biases run. Its id is stored in folder/wandb_id, so that a resumed run continues it.

    The package reads its own environment variables (WANDB_MODE=offline, WANDB_API_KEY, WANDB_ENTITY).
    """

    name = "wandb"

    def __init__(self, folder: Path, first_step: int, project: str, settings: dict[str, Any]) -> None:
        wandb = _package("wandb", self.name)
        id_file = folder / "wandb_id"
        # A new run in an old folder must not continue the old run's curves.
        if first_step == 0 or not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=project,
            name=folder.name,
            dir=str(folder),
            id=id_file.read_text(),
            resume="allow",
            config=settings,
            settings=wandb.Settings(silent=True),
        )
        # wandb counts one step per call, and a step and its evaluation are two calls.
        self._run.define_metric("*", step_metric="finished_steps")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"finished_steps": step} | dict(metrics))

    def close(self) -> None:
        self._run.finish()


class Trackio(Sink):
    """One trackio run, stored on this machine unless TRACKIO_SPACE_ID or similar variables say otherwise."""

    name = "trackio"

    def __init__(self, folder: Path, first_step: int, project: str, settings: dict[str, Any]) -> None:
        trackio = _package("trackio", self.name)
        resume = "allow" if first_step else "never"
        self._run = trackio.init(project=project, name=folder.name, resume=resume, config=settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Prometheus(Sink):
    """The latest value of each metric at http://ADDRESS/metrics, as `megatron_rl_<name>{run="..."}`."""

    name = "prometheus"

    def __init__(self, address: str, run: str) -> None:
        self._package = _package("prometheus_client", self.name)
        self._registry = self._package.CollectorRegistry()
        self._run, self._gauges = run, {}
        host, _, port = address.rpartition(":")
        try:
            self._server, _ = self._package.start_http_server(int(port), host, registry=self._registry)
        except OSError as error:
            raise ValueError(
                f"telemetry.prometheus = {address!r}: cannot be listened on ({error}); give another host:port, or '' "
                f"for none."
            ) from error

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in {"finished_steps": step, **metrics}.items():
            name = "megatron_rl_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            if name not in self._gauges:
                self._gauges[name] = self._package.Gauge(name, key, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Sinks:
    """The loggers named in a run's config. Raises ValueError, naming the config key, if one cannot be opened.

    For example:

        sinks = Sinks(TelemetryConfig(loggers=["tensorboard"]), Path("runs/demo"), first_step=0, settings={})
        sinks.log(1, {"reward/mean": 0.5})
        sinks.close()
    """

    def __init__(self, config: TelemetryConfig, folder: Path, first_step: int, settings: dict[str, Any]) -> None:
        self._open: list[Sink] = []
        try:
            for name in config.loggers:
                if name == TensorBoard.name:
                    self._open.append(TensorBoard(folder, first_step))
                else:
                    kind = WeightsAndBiases if name == WeightsAndBiases.name else Trackio
                    self._open.append(kind(folder, first_step, config.project, settings))
            if config.prometheus:
                self._open.append(Prometheus(config.prometheus, folder.name))
        except BaseException:  # the loggers that are already open have threads and files
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Pass on the finite numbers among `metrics`."""
        numbers = {
            key: float(value)
            for key, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        for sink in list(self._open):
            try:
                sink.log(step, numbers)
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
        key = "telemetry.prometheus" if name == Prometheus.name else f"telemetry.loggers: {name}"
        raise ValueError(
            f"{key}: cannot be used here ({error}); pip install 'megatron-rl[loggers]' brings what it needs, or leave "
            f"it out."
        ) from error
