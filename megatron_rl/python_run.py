"""Training inside a Python program or notebook, from rows, a model and a reward, with the loop of train.py."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_rl.config import RunConfig, TrainConfig
from megatron_rl.config.loading import config_of
from megatron_rl.config.rules import refuse
from megatron_rl.launch import open_files, own_gpu, start_up
from megatron_rl.launch.local import arrange, gpus_of_host
from megatron_rl.run.given_in_python import Given
from megatron_rl.telemetry.run_log import RunRecord, read_run


def train_on(rows: Any, model: str | Path | Mapping[str, Any], reward: Any = None, **options: Any) -> Run:
    """Train a model on prompts with a reward. Return the run with its metrics, samples and report.

    Arguments are as in Run.

    run = train_on(rows, "models/smollm2-135m-instruct", reward, generation={"n_samples": 8}, run={"steps": 20})
    run.metrics[-1]["reward/mean"]
    """
    run = Run(rows, model, reward, **options)
    run.train()
    return run


@dataclass(frozen=True)
class Report:
    """A run's report: an HTML page, and a picture that notebooks display."""

    page: Path
    picture: Path

    def _repr_svg_(self) -> str:
        return self.picture.read_text(encoding="utf-8")


class Run:
    """A run that a program advances step by step.

        run = Run(rows, "models/smollm2-135m-instruct", reward, generation={"n_samples": 8}, optimizer={"lr": 1e-5})
        run.step()["reward/mean"]  # the first step starts servers and engine
        run.train()  # the steps that are left
        run.report()

    The run ends on an error, on Ctrl-C, with `close`, or at the end of a `with` block. If run.checkpoint_every_steps is
    set, a new Run with the same arguments and resume="auto" continues it.
    """

    def __init__(
        self,
        rows: Any,
        model: str | Path | Mapping[str, Any],
        reward: Any = None,
        *,
        held_out: Any = None,
        resume: str = "",
        **options: Any,
    ) -> None:
        """Check the arguments and build the config; the run starts with the first step.

        rows, held_out: a list of dicts with `prompt` or `messages` and the fields that the reward needs, a Hugging Face
          data set, or any value of data.train, such as a file or hf:NAME.
        model: the model's folder, or a dict for the section `model`.
        reward: a function of one reply, a list of functions whose rewards are added, or an import path.
        options: config sections, such as `optimizer={"lr": 1e-5}`. They accept functions and classes instead of import
          paths.
        """
        self._begin_with(*config_on(rows, model, reward, held_out=held_out, **options), resume)

    @classmethod
    def of(cls, config: TrainConfig, *, resume: str = "") -> Self:
        """Return a run of any kind from a whole config, such as `load_config("configs/demo.yaml")`."""
        run = cls.__new__(cls)
        run._begin_with(config, None, resume)
        return run

    def _begin_with(self, config: TrainConfig, given: Given | None, resume: str) -> None:
        config.check_world_size(int(os.environ.get("WORLD_SIZE", 1)))
        self.config, self._given, self._resume = config, given, resume
        self._parts = contextlib.ExitStack()
        self._run: Any = None
        self._steps: Iterator[int] = iter(())
        self.is_over = False
        """True if all steps are done, or the run was stopped or closed."""

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder)

    # -- steps

    def step(self) -> dict[str, Any] | None:
        """Take the next step and return its metrics. Return None if the run is over."""
        if self.is_over:
            return None
        try:
            if self._run is None:
                self._start()
            if threading.current_thread() is threading.main_thread():  # a notebook resets the handler before each cell
                self._run.stop_signal.listen([signal.SIGINT])
            done = next(self._steps, None)
            if done is None or done == self.config.run.steps:
                next(self._steps, None)  # after the last step the run writes its report
                self.close()
        except BaseException as error:
            self.is_over = True
            self._parts.__exit__(type(error), error, error.__traceback__)
            raise
        return None if done is None else dict(self._run.log_file.newest)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Take the remaining steps. After each, yield its metrics."""
        while (metrics := self.step()) is not None:
            yield metrics

    def train(self) -> None:
        """Take the remaining steps."""
        for _ in self:
            pass

    def close(self) -> None:
        """End the run now. May be called twice."""
        self.is_over = True
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        open_files.raise_limit()
        own_gpu.set_variables(self.config)
        if self._given is not None:
            self._given.write()
        with start_up.importing():
            from megatron_rl.train import parts_of

            parts = parts_of(self.config)
        self._run = self._parts.enter_context(parts.run(self.config, resume=self._resume, ends_process=False))
        self._steps = parts.steps(self._run)
        atexit.register(self.close)
        self._parts.callback(atexit.unregister, self.close)

    # -- results

    @property
    def record(self) -> RunRecord:
        """Contents of the run's files: steps, evaluations, and samples. The samples' keys are (split, step)."""
        return read_run(self.folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each step."""
        return self.record.steps

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Scores on held-out prompts, one entry for each step at which the model was evaluated."""
        return self.record.evaluations

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Some prompts and replies of the newest step, with their rewards."""
        steps = {step: rows for (split, step), rows in self.record.samples.items() if split == "train"}
        return steps[max(steps)] if steps else []

    def save(self, folder: str | Path) -> None:
        """Write the current weights as a Hugging Face folder.

        The run itself writes the final ones to its subfolder `final`.
        """
        if self._run is None or self.is_over:
            raise RuntimeError(f"save({str(folder)!r}): the run has no engine now; call it between two steps.")
        next(iter(self._run.trained.values())).save(folder)

    def report(self) -> Report:
        """Write the report of the steps so far. Notebooks display its picture."""
        from megatron_rl.run.run import write_report

        page = write_report(self.folder)
        return Report(page=page, picture=page.with_suffix(".svg"))


def config_on(
    rows: Any, model: str | Path | Mapping[str, Any], reward: Any, *, held_out: Any = None, **options: Any
) -> tuple[TrainConfig, Given]:
    """Build the config from the arguments of Run. Return it and the `Given` that holds the passed rows and functions.

    Raises ValueError.
    """
    sections = {name: dict(part) if isinstance(part, Mapping) else part for name, part in options.items()}
    named = dict(model) if isinstance(model, Mapping) else {"path": str(model)}
    own: dict[str, dict[str, Any]] = {"model": named, "data": {}, "rollout": {}, "run": {}}
    for name in own:
        if not isinstance(sections.setdefault(name, {}), dict):
            refuse(name, sections[name], "must be a dict of its keys, such as those of docs/options.md")
    given = Given(Path(sections["run"].get("folder", options.get("run.folder", RunConfig.folder))))
    for key, part in {"train": rows, "evaluation": held_out}.items():
        if part is not None:
            is_named = isinstance(part, str | Path)
            own["data"][key] = str(part) if is_named else given.rows(part, key="rows" if key == "train" else "held_out")
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        own["rollout"]["recipe"] = [part if isinstance(part, Mapping) else {"reward": part} for part in reward]
    elif reward is not None:
        own["rollout"]["reward"] = reward
    for name, keys in own.items():
        if twice := sorted(set(keys) & set(sections[name])):
            refuse(f"{name}.{twice[0]}", sections[name][twice[0]], "is given twice; leave it out there")
        sections[name] = sections[name] | keys
    sections = given.without_functions(sections)
    run = sections["run"]
    if given.modules:
        declared = run.get("import_from", [])
        run["import_from"] = [*([declared] if isinstance(declared, str) else declared), *given.modules]
    config = config_of(sections)
    if "WORLD_SIZE" not in os.environ and (gpus := arrange(config, gpus_of_host(), 1).server_gpus):
        sections["rollout"]["devices"] = gpus
        config = config_of(sections)
    return config, given
