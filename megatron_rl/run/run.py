"""One rank's part of a run of any kind: process group, folder, log, checkpoints and early ends.

After a stop signal (life/stop_signal.py), a run with checkpoints writes one between two steps and ends. Ctrl-C and a
hang (life/hang_watch.py) end any run. Leaving the `with` block stops everything that was started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch

from megatron_rl import parallel
from megatron_rl.config import TrainConfig
from megatron_rl.config.import_path import refuse_while_importing
from megatron_rl.config.resume_rules import changes_at_resume, saved_form
from megatron_rl.engine.manifest import CheckpointError
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.launch import file_lock
from megatron_rl.launch.cores import free_cores
from megatron_rl.launch.start_up import python_path
from megatron_rl.life import process_exit
from megatron_rl.life.hang_watch import HangWatch
from megatron_rl.life.signs_of_life import Look, SignsOfLife, StoppedProcesses
from megatron_rl.life.stop_signal import StopSignal
from megatron_rl.run.run_checkpoints import RunCheckpoints, read_state, wait_for_earlier_processes
from megatron_rl.telemetry.run_log import RunLog
from megatron_rl.telemetry.sinks import Sinks
from megatron_rl.telemetry.timers import PhaseTimers
from megatron_rl.types import StepStats

LOCK = "run.lock"
"""File in run.folder whose lock keeps other runs out."""


class Run(ABC):
    """The parts that every run has. Collective: every rank calls every method.

    Entering the `with` block joins the process group, takes run.folder and starts all parts. A subclass starts in
    `_start`: it checks what it can, calls `_join`, then `_open`, and builds its engines.
    """

    def __init__(self, config: TrainConfig, *, resume: str = "", ends_process: bool = True) -> None:
        """resume: `auto`, or a checkpoint's folder, to resume a run.

        ends_process: if servers or rollouts die, end the process; otherwise fail only the step that needs them.
        """
        refuse_while_importing("a run")
        rollout = config.rollout.with_time_for(config.model.path)
        self.config, self.resume = dataclasses.replace(config, rollout=rollout), resume
        self.folder, self.timers, self.ends_process = Path(config.run.folder), PhaseTimers(), ends_process
        self.is_stopped = False
        """True if a stop signal ended the run before its last step."""
        self.is_interrupted = False
        """True if Ctrl-C on any rank stopped the run. Leaving the `with` block then raises KeyboardInterrupt."""
        self._skipped_in_a_row: Counter[str] = Counter()

    # -- what a subclass provides

    @abstractmethod
    def _start(self) -> None:
        """Start all parts, and register with `at_end` what must be stopped later."""

    @property
    @abstractmethod
    def trained(self) -> dict[str, MegatronEngine]:
        """The engines that a checkpoint holds, by the name that each has there. The first is the run's main model."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds in addition to the engines, as JSON data.

        It is called just before the checkpoint is written.
        """

    def _looks(self) -> list[Look]:
        """Return the checks for silent ranks. Subclasses add checks for their other processes."""
        return [self.hang_watch.silent]

    # -- life

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as at_end:  # stops the started parts if another fails to start
            self.at_end = at_end
            self._start()
            self._say_sizes()
            signs = SignsOfLife([StoppedProcesses(names_parent=self.groups.is_main), *self._looks()])
            at_end.callback(signs.close)
            signs.start()
            if threading.current_thread() is threading.main_thread():  # only this thread may set signal handlers
                self.stop_signal.listen([signal.SIGINT])  # until now, Ctrl-C ended the process
            self.at_end = at_end.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self.at_end.__exit__(kind, *rest)
        if self.is_interrupted and kind is None:
            raise KeyboardInterrupt("the run has stopped in order.")

    def _say_sizes(self) -> None:
        ranks = "1 rank" if self.groups.world_size == 1 else f"{self.groups.world_size} ranks"
        for name, engine in self.trained.items():
            parameters = sum(part.numel() for part in engine.parameters())
            self.say(f"{name}: {parameters:,} parameters on this rank, {ranks}, {self.config.model.dtype}")

    def _join(self) -> None:
        """Join the run's process group."""
        options = self.config.run
        threads = options.threads_per_rank or max(1, free_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        torch.manual_seed(options.seed)
        self.at_end.callback(parallel.stop)  # ends last, because other parts may need the groups to stop
        timeout_s = self.config.collective_timeout_s
        self.groups = parallel.start(self.config.parallel, seed=options.seed, timeout_s=timeout_s)
        torch.set_num_threads(self.groups.least(threads))  # equal: other summation orders make replicas drift

    def _open(self, *, on_half_time: Callable[[], None] = lambda: None, **hangs: Any) -> None:
        """Lock and open the run's folder, choose the checkpoint to resume, and start handling stop signals and hangs.

        Call this before anything is written or started. Raises ValueError if another run uses the folder. on_half_time:
        passed to StopSignal. hangs: passed to HangWatch.
        """
        options, groups = self.config.run, self.groups

        def keep_folder() -> None:
            self.at_end.callback(os.close, file_lock.keep_folder(self.folder, LOCK, "a run"))

        if fault := groups.on_main(keep_folder):  # before anything is read there, as another run may be changing it
            raise ValueError(f"run.folder = {str(self.folder)!r}: {fault}")
        wait_for_earlier_processes(self.folder, groups)
        leads = self.config.telemetry.records
        self.checkpoints = RunCheckpoints(self.folder, keep=options.keep_checkpoints, groups=groups, is_needed=leads)
        self.at_end.callback(self.checkpoints.close)
        with self.timers("resume"):
            self.resumed_from = self.checkpoints.choose(self.resume)
        # State of that checkpoint; {} if the resumed run had no checkpoint yet; None for a new run.
        self.resumed = read_state(self.resumed_from) if self.resumed_from else {} if self.resume else None
        changes: list[str] = []
        if self.resumed and "config" in self.resumed:  # earlier versions saved none
            changes = changes_at_resume(self.resumed["config"], self.config, str(self.resumed_from))
        self.first_step = self.checkpoints.newest = self.resumed["step"] if self.resumed else 0
        self.log_file = RunLog(self.folder, options.steps, groups.is_main, first_step=self.first_step)
        self.at_end.callback(self.log_file.close)
        self.log_file.log_config(self.config.to_yaml())
        for line in changes:
            self.say(line)
        if groups.is_main:
            settings = dataclasses.asdict(self.config)
            self.log_file.sinks = Sinks(self.config.telemetry, self.folder, self.first_step, settings)
        self.hang_watch = HangWatch(
            self.folder,
            rank=groups.rank,
            world_size=groups.world_size,
            control=groups.control,
            limit_s=options.phase_timeout_s,
            on_hang=process_exit.stop,
            grace_s=options.grace_s,
            **hangs,
        )
        self.at_end.callback(self.hang_watch.close)
        self.timers.on_change = self.hang_watch.enter
        saves = options.checkpoint_every_steps > 0
        self.stop_signal = StopSignal(options.grace_s, on_half_time=on_half_time, says_so=groups.is_main, saves=saves)
        self.at_end.callback(self.stop_signal.close)
        if saves:
            self.stop_signal.listen()

    def say(self, text: str) -> None:
        """Print one line on the main rank."""
        self.log_file.say(text)

    def check_updates(self, model: str, updates: list[StepStats], *, trained_on: str = "") -> None:
        """Raise RuntimeError if more than run.most_skipped_updates consecutive updates of `model` were skipped."""
        most = self.config.run.most_skipped_updates
        for update in updates:
            self._skipped_in_a_row[model] = 0 if update.applied else self._skipped_in_a_row[model] + 1
            if self._skipped_in_a_row[model] > most:  # on every rank, as all have the same statistics
                raise RuntimeError(
                    f"run.most_skipped_updates = {most}: {self._skipped_in_a_row[model]} updates of the {model} in a "
                    f"row had a NaN or infinite loss or gradient, and were skipped. The last one{trained_on}: "
                    f"{update.fault}. Correct the reward, advantage, loss or data that these numbers come from, or "
                    f"lower optimizer.lr. The weights are still those before the first skipped update; --resume auto "
                    f"continues from the last checkpoint."
                )

    # -- checkpoints

    def load_checkpoint(self) -> None:
        """Load the trained engines from the checkpoint `resumed_from`."""
        assert self.resumed_from is not None
        with self.timers("resume"):
            for name, engine in self.trained.items():
                engine.load(self.resumed_from / name, with_optimizer=True, is_checked=True)
        for fault in self.checkpoints.passed_over:
            self.say(f"WARNING: {fault}; it is set aside, and an earlier one is taken.")
        self.say(f"resumed after step {self.first_step} from {self.resumed_from}")

    def checkpoint(self, *, step: int) -> bool:
        """Begin to write a checkpoint of the state after `step` steps, if one is due.

        Return True if any rank received a stop signal. The checkpoint is then complete, and the run must stop here.
        """
        options = self.config.run
        # A collective, so whether it runs may depend only on the config and the step.
        if (options.checkpoint_every_steps > 0 or step < options.steps) and self.stop_is_near():
            self.stop_after(step)
            return True
        if options.checkpoint_every_steps == 0:
            return False
        is_due = step == options.steps or step % options.checkpoint_every_steps == 0
        with self.timers("checkpoint"):
            with self._warning_of_checkpoints():  # the previous one's error must not prevent this one
                self.checkpoints.finish(wait=is_due)
            if is_due:
                with self._warning_of_checkpoints():
                    self._start_checkpoint(step)
        return False

    def stop_is_near(self) -> bool:
        """Return True on all ranks if any of them received a stop signal."""
        return self.groups.any(self.stop_signal.came())

    def stop_after(self, step: int, why: str = "") -> None:
        """Write a checkpoint of the state after `step` steps unless it exists, and print how to resume.

        why: reason of the stop, for the message. After Ctrl-C, the report is written as well.
        """
        self.is_stopped, saves = True, self.config.run.checkpoint_every_steps > 0
        if saves:
            self.checkpoints.finish(wait=True)
            if step > self.checkpoints.newest:  # otherwise a step was abandoned, and its beginning has a checkpoint
                self._start_checkpoint(step, in_background=False)
                self.checkpoints.finish(wait=True)
        why = why or self.stop_signal.signal_name or "another rank's stop signal"
        lost = "nothing of it can be resumed; with run.checkpoint_every_steps=10 it can be"
        self.say(f"stopped after step {step} on {why}; {'--resume auto continues the run' if saves else lost}")
        self.is_interrupted = self.groups.any(self.stop_signal.signal_name == signal.SIGINT.name)
        if self.is_interrupted and step > 0:
            self._report()

    @contextlib.contextmanager
    def _warning_of_checkpoints(self) -> Iterator[None]:
        """Turn checkpoint errors in the block into warnings: training is worth more than the newest checkpoint."""
        try:
            yield
        except CheckpointError as error:
            self.say(f"WARNING: {error} Training goes on; the next one is tried when it is due.")

    def _start_checkpoint(self, step: int, *, in_background: bool = True) -> None:
        self.log_file.sync()  # before: a resumed run needs the whole log up to its checkpoint
        state = self._state() | {"config": saved_form(self.config)}
        self.checkpoints.start(step, self.trained, state, in_background=in_background)

    # -- results

    def save(self, *, step: int) -> None:
        """Write the model as a Hugging Face folder, if one is due.

        Raises CheckpointError if the folder of the last step cannot be written.
        """
        options = self.config.run
        is_last = step == options.steps
        if (is_last and options.save_at_end) or (options.save_every_steps and step % options.save_every_steps == 0):
            name = "final" if is_last else f"step-{step}"
            with self.timers("save"), contextlib.nullcontext() if is_last else self._warning_of_checkpoints():
                for number, (role, engine) in enumerate(self.trained.items()):
                    engine.save(self.folder / (f"{name}-{role}" if number else name))

    def finish(self) -> None:
        """Wait until the last checkpoint is complete, and write the report."""
        with self._warning_of_checkpoints(), self.timers("checkpoint"):
            self.checkpoints.finish(wait=True)
        self._report()

    def _report(self) -> None:
        self.log_file.close()  # the report reads it
        if not self.groups.is_main:
            return
        try:
            self.say(f"report: {write_report(self.folder)}")
        except RuntimeError as error:
            self.say(f"WARNING: {error}")


def write_report(folder: Path) -> Path:
    """Write a run's report.html and report.svg, and return the page's path. Raises RuntimeError with the reason.

    Runs in a separate process, so that a failing report cannot lose trained weights.
    """
    command = [sys.executable, "-P", "-m", "megatron_rl.cli", "report", str(folder)]
    made = subprocess.run(command, env=os.environ | {"PYTHONPATH": python_path()}, capture_output=True, text=True)
    if made.returncode != 0:
        last = (made.stderr.strip().splitlines() or [f"exit code {made.returncode}"])[-1]
        raise RuntimeError(f"no report could be made ({last}); megatron-rl report {folder} tries again.")
    return Path(made.stdout.strip())
