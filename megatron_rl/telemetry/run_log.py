"""A run's log files and console output. Rank 0 writes; on other ranks every call does nothing.

    metrics.jsonl   one object per step (`kind: step`) or evaluation (`kind: evaluation`, `name`), in order
    samples.jsonl   one object per prompt and reply (`split`: train, or the evaluation's name); `turns` of dialogues
    config.yaml     the config, with all defaults and overrides, below a line with version, commit and time

Each line is written in one call, so a killed process leaves at most one incomplete line, which `read_run` drops. A
failed write raises RuntimeError and ends the run.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from megatron_rl.telemetry.provenance import provenance
from megatron_rl.telemetry.sinks import Sinks

logger = logging.getLogger(__name__)
METRICS, SAMPLES, CONFIG = "metrics.jsonl", "samples.jsonl", "config.yaml"
COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("length", "rollout/reply_tokens", ",.0f"),
    ("tokens/s", "rollout/tokens_per_s", ",.0f"),
    # A run has one of the three losses: it learns from rewards, from answers or from preference pairs.
    ("loss", "policy/loss", ".4f"),
    ("grad norm", "policy/grad_norm", ".3f"),
    ("loss", "supervised/loss", ".4f"),
    ("loss", "preference/loss", ".4f"),
    ("accuracy", "preference/accuracy", ".0%"),
    ("margin", "preference/margin", ".2f"),
    ("staleness", "rollout/staleness", ".2f"),
    ("trainer waited", "rollout/trainer_idle_share", ".0%"),
    ("servers idle", "rollout/servers_idle_share", ".0%"),
    ("step time", "time/step", ".1f"),
)
"""Columns of a step's line on the console: (heading, metric, format).

A column is left out if the step lacks the metric.
"""
TEXT: dict[str, str] = {"encoding": "utf-8", "errors": "backslashreplace"}
"""How text is encoded in files. Lone surrogates, which JSON may contain, become JSON escapes."""
EMPTY = {"prompt": "", "answer": "", "reply": "", "reward": None}
"""Defaults for fields that a sample lacks."""
MOST_STEPS = 10**12
BARS = "▁▂▃▄▅▆▇█"


@dataclass(kw_only=True)
class Turn:
    """A part of a dialogue as text. by: its author, `policy` or `others` (the prompt, an environment, ...)."""

    by: str
    text: str


@dataclass(kw_only=True)
class Sample:
    """One prompt and one reply as text. For a dialogue, they are its beginning and its last reply."""

    prompt: str
    reply: str
    reward: float
    answer: str = ""
    turns: list[Turn] = field(default_factory=list)
    """All parts of a dialogue; empty unless it has several replies."""

    @property
    def said(self) -> str:
        """The text that the policy wrote in all turns."""
        return "".join(turn.text for turn in self.turns if turn.by == "policy") or self.reply


class _Console(Console):
    """A console that discards its output once its pipe is closed, as after `| head`."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # otherwise the interpreter's last flush fails
        os.close(nowhere)


class RunLog:
    """Writes a run's folder and shows its progress. Use it as a context manager, or call `close` at the end.

        with RunLog("runs/mine", total_steps=100) as log:
            log.log_step(0, {"reward/mean": 0.5}, samples=[])
            log.log_evaluation(1, "held_out", {"accuracy": 0.25})

    is_main: True on rank 0; if False, every call does nothing.
    first_step: number of the step with which the run begins. If it is above 0, the log in the folder is continued, and
    entries of this step and later ones are dropped, because these steps run again. If it is 0, an earlier run's files
    are renamed to `previous-*`.
    """

    def __init__(
        self,
        folder: str | Path,
        total_steps: int,
        is_main: bool = True,
        *,
        first_step: int = 0,
        console: Console | None = None,
    ) -> None:
        self.folder, self.total_steps, self.is_main = Path(folder), total_steps, is_main
        self._rewards: list[float] = []
        self._progress: Progress | None = None
        self.sinks: Sinks | None = None
        """External loggers, which get the metrics, too. None if there are none."""
        self.newest: dict[str, Any] = {}
        """The line of metrics.jsonl for the last step, as a dict."""
        self._cell: Cell | None = None
        if not is_main:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = [make_room(self.folder / name, first_step) for name in (METRICS, SAMPLES)]
            # Unbuffered: after a failed write, closing the file would write a buffer again.
            self._metrics = (self.folder / METRICS).open("ab", buffering=0)
            self._samples = (self.folder / SAMPLES).open("ab", buffering=0)
        except OSError as error:
            raise ValueError(f"run.folder = {str(folder)!r}: cannot be written ({error}); name another one.") from error
        if console is None and is_notebook():
            self._cell = Cell()
        self._console = console or _Console(highlight=False)
        self._opened = time.monotonic()
        # A resumed run's elapsed time continues from the interrupted run's.
        self._start = self._opened - max((float(line.get("elapsed_s", 0.0)) for line in kept[0]), default=0.0)
        self._first_logged: tuple[int, float] | None = None
        if self._console.is_terminal and self._cell is None:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("[cyan]{task.fields[curve]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(elapsed_when_finished=False),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("step", total=total_steps, completed=first_step, curve="")
            self._progress.start()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log_config(self, yaml: str) -> None:
        """Write `yaml` to config.yaml, below a line with the code's version."""
        if self.is_main:
            with disk_errors(self.folder / CONFIG):
                (self.folder / CONFIG).write_text(f"{provenance()}\n{yaml}", encoding="utf-8")

    def say(self, text: str) -> None:
        """Show one line on the console, above the progress bar. Allowed after `close`."""
        if self.is_main:
            self._show(escape(text))

    def log_step(self, step: int, metrics: dict[str, Any], samples: list[Sample] | None = None) -> None:
        """Write the metrics and samples of step `step` (from 0), and show the step on the console."""
        if not self.is_main:
            return
        self.newest = self._write({"kind": "step", "step": step}, metrics, samples or [], split="train")
        if self.sinks is not None:
            # Sinks count finished steps, whereas the files number steps from 0.
            self.sinks.log(step + 1, metrics)
        if "reward/mean" in metrics:
            self._rewards.append(float(metrics["reward/mean"]))
        self._show(self._step_line(step, metrics), stays=False)
        if self._progress is not None:
            self._progress.update(self._task, completed=step + 1, curve=sparkline(self._rewards[-24:]))

    def log_evaluation(
        self, step: int, name: str, metrics: dict[str, Any], samples: list[Sample] | None = None
    ) -> None:
        """Write and show an evaluation of the policy after `step` steps.

        name: name of the evaluation data, such as `held_out`.
        """
        if not self.is_main:
            return
        self._write({"kind": "evaluation", "step": step, "name": name}, metrics, samples or [], split=name)
        if self.sinks is not None:
            self.sinks.log(step, {f"{name}/{key}": value for key, value in metrics.items()})
        shown = "  ".join(f"{key} {plain(value)}" for key, value in metrics.items())
        self._show(f"[bold green]evaluation[/] {escape(f'{name} after {step} steps: {shown}')}")

    def sync(self) -> None:
        """Flush the log to disk with fsync, because a checkpoint taken now relies on it."""
        if self.is_main:
            for file in (self._metrics, self._samples):
                with disk_errors(file.name):
                    os.fsync(file.fileno())

    def close(self) -> None:
        """Finish the console display and close the files. May be called twice."""
        if not self.is_main or self._metrics.closed:
            return
        if self._progress is not None:
            self._progress.stop()
        if self._cell is not None:
            self._cell.end()
        self._metrics.close()
        self._samples.close()
        if self.sinks is not None:
            self.sinks.close()

    def _write(
        self, head: dict[str, Any], metrics: dict[str, Any], samples: list[Sample], split: str
    ) -> dict[str, Any]:
        elapsed = round(time.monotonic() - self._start, 3)
        line = head | {"elapsed_s": elapsed} | {key: as_json(value) for key, value in metrics.items()}
        rows = []
        for number, sample in enumerate(samples):
            row = {"step": head["step"], "split": split, "number": number} | asdict(sample)
            row["reward"] = as_json(sample.reward)
            if not sample.turns:
                del row["turns"]
            rows.append(row)
        # Samples first: a reader that sees a step's metrics can then rely on its samples.
        append(self._samples, rows)
        append(self._metrics, [line])
        return line

    def _step_line(self, step: int, metrics: dict[str, Any]) -> str:
        width = len(str(self.total_steps))
        cells = [f"[bold]step {step + 1:>{width}}/{self.total_steps}[/]"]
        for heading, key, form in COLUMNS:
            if metrics.get(key) is not None:
                unit = " s" if key.startswith("time/") else ""
                cells.append(f"[dim]{heading}[/] {float(metrics[key]):{form}}{unit}")
        if self._progress is None:  # the progress bar shows both
            cells.append(f"elapsed {clock(time.monotonic() - self._start)}")
            cells.append(f"left {clock(self._seconds_per_step(step) * (self.total_steps - step - 1))}")
        return "  ".join(cells)

    def _seconds_per_step(self, step: int) -> float:
        """Return the mean seconds per step. The first step does not count, because it includes the run's start.

        When only one step was logged, return its time.
        """
        now = time.monotonic()
        if self._first_logged is None:
            self._first_logged = (step, now)
            return now - self._opened
        first_step, first_time = self._first_logged
        return (now - first_time) / max(step - first_step, 1)

    def _show(self, line: str, *, stays: bool = True) -> None:
        if self._cell is not None:
            self._cell.show(Text.from_markup(line).plain, stays=stays)
            return
        # soft_wrap keeps one line per step in a log file, regardless of the terminal width that rich assumes.
        self._console.print(line, soft_wrap=True)


class Cell:
    """Output of a notebook cell. Each step's line replaces that of the previous step, and other lines stay above it."""

    def __init__(self) -> None:
        self._line, self._width = "", 0

    def show(self, line: str, *, stays: bool) -> None:
        self._width = max(self._width, len(line))
        if stays:
            print(f"\r{line.ljust(self._width)}")
        else:
            self._line = line
        if self._line:
            print(f"\r{self._line.ljust(self._width)}", end="", flush=True)

    def end(self) -> None:
        """Keep the last step's line, so that later output appears below it."""
        if self._line:
            print()
        self._line = ""


def is_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def append(file: io.FileIO, rows: list[dict[str, Any]]) -> None:
    """Append one line of JSON per row to a file, all in a single write."""
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(**TEXT)
    with disk_errors(file.name):
        written = file.write(data) if data else 0
        if written < len(data):
            raise OSError(f"only {written:,} of {len(data):,} bytes could be written")


@contextmanager
def disk_errors(path: object) -> Iterator[None]:
    """Turn an OSError in the `with` block into a RuntimeError that names the file `path` and the remedy."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"{path}: {error}; make room on the disk and resume.") from error


def make_room(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Prepare a .jsonl file of the log for a run that begins with step `first_step`. Return the entries that it keeps.

    If `first_step` is 0, an earlier run's file is renamed. Otherwise entries of this step and later ones are removed,
    except for an evaluation before this step.
    """
    if not path.exists():
        return []
    if first_step == 0:
        path.rename(path.with_name(f"previous-{path.name}"))  # replaces that of the run before
        return []
    kept = [line for line in read_lines(path) if line["step"] < first_step or happened_at(line, first_step)]
    # Write a second file and rename it: a crash in between leaves the whole log.
    shorter = path.with_suffix(".unfinished")
    shorter.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept), **TEXT)
    os.replace(shorter, path)
    return kept


def happened_at(line: dict[str, Any], step: int) -> bool:
    """Return True if a line belongs to an evaluation after exactly `step` steps.

    A run that is resumed at that step need not repeat the evaluation.
    """
    is_evaluation = line.get("kind") == "evaluation" or line.get("split", "train") != "train"
    return bool(is_evaluation and line["step"] == step)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the valid entries of a .jsonl file of the log.

    An incomplete last line is dropped. Other invalid lines are left out with a warning. When a machine crashes, zero
    bytes may take the place of what did not reach the disk. They are ignored if they are in front of a whole line.
    """
    rows, damaged = [], []
    # Only "\n" ends a line, and line by line a large file takes no memory of its own.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            try:
                row = json.loads(line.lstrip("\0"))
            except (ValueError, RecursionError):
                row = None
            if is_line(row, of_samples=path.name == SAMPLES):
                rows.append(row)
            else:
                damaged.append(str(number))
    if damaged:
        shown = ", ".join(damaged[:10]) + (" and others" if len(damaged) > 10 else "")
        logger.warning("%s: %d line(s) are damaged and left out: %s", path, len(damaged), shown)
    return rows


def is_line(row: Any, *, of_samples: bool) -> bool:
    """Return True if `row` is a valid entry of metrics.jsonl, or if `of_samples`, of samples.jsonl."""
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < MOST_STEPS:
        return False
    if not of_samples:
        is_known = row.get("kind") == "step" or (row.get("kind") == "evaluation" and isinstance(row.get("name"), str))
        return is_known and all(map(is_metric, row.values())) and is_number(row.get("elapsed_s", 0.0))
    turns = row.get("turns") or []
    return (
        isinstance(row.get("split"), str)
        and all(isinstance(row.get(name, ""), str) for name in ("prompt", "answer", "reply"))
        and type(row.get("number")) is int
        and (row.get("reward") is None or is_number(row["reward"]))
        and isinstance(turns, list)
        and all(isinstance(turn, dict) and all(type(turn.get(it)) is str for it in ("by", "text")) for turn in turns)
    )


def is_metric(value: Any) -> bool:
    """Return True if `as_json` may return this value for a metric."""
    if isinstance(value, dict):
        return all(count is None or is_number(count) for count in value.values())
    return value is None or isinstance(value, bool | str) or is_number(value)


def is_number(value: Any) -> bool:
    """Return True for a number that a chart can show. Booleans are excluded."""
    return type(value) in (int, float) and abs(value) < 1e300  # comparisons with NaN are False


@dataclass
class RunRecord:
    """The content of a run's folder.

    `steps` and `evaluations` are entries of metrics.jsonl in the order of steps. `samples` is
    {(split, step): entries of samples.jsonl}.
    """

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: dict[tuple[str, int], list[dict[str, Any]]]
    config: str


def read_run(folder: str | Path, *, with_samples: bool = True) -> RunRecord:
    """Read the folder of a running or finished run. If a step was logged twice, the later entry is used.

    with_samples: if False, `samples` stays empty. A long run's samples may not fit into memory; SampleIndex reads only
    some of them.
    """
    folder = Path(folder)
    if not (folder / METRICS).is_file():
        raise ValueError(f"folder = {str(folder)!r}: has no {METRICS}; give the run.folder of a run that has begun.")
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[tuple[str, int], dict[str, Any]] = {}
    for line in read_lines(folder / METRICS):
        if line["kind"] == "step":
            steps[line["step"]] = line
        else:
            # A resumed run may have logged it again; the dict keeps the last.
            evaluations[line["name"], line["step"]] = line
    samples: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    if with_samples and (folder / SAMPLES).is_file():
        for row in read_lines(folder / SAMPLES):
            samples.setdefault((row["split"], row["step"]), {})[row["number"]] = EMPTY | row
    config = folder / CONFIG
    return RunRecord(
        steps=[steps[step] for step in sorted(steps)],
        evaluations=sorted(evaluations.values(), key=lambda line: line["step"]),
        samples={key: [rows[number] for number in sorted(rows)] for key, rows in samples.items()},
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
    )


def as_json(value: Any) -> Any:
    """Convert a metric (number, text, None or histogram {class: count}) to JSON. NaN and infinity become null."""
    if isinstance(value, dict):
        return {key: as_json(count) for key, count in value.items()}
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else value if isinstance(value, str) else f"{float(value):.3f}"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def sparkline(values: list[float]) -> str:
    """Return one block character per value, whose height is scaled to the values' range. NaN and infinity become ×."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    return "".join(BARS[round((v - low) / span * (len(BARS) - 1))] if math.isfinite(v) else "×" for v in values)
