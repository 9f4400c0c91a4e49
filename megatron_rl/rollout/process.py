"""The trainer's hold on its rollout process, in which episodes fly without the trainer's interpreter.

The process runs one RolloutRank (rollout_rank.py). Calls are answered in their order; what takes long gives a Future.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate

from megatron_rl.config import GenerationConfig
from megatron_rl.data.curriculum import Outcome
from megatron_rl.launch import file_lock
from megatron_rl.launch.start_up import python_path
from megatron_rl.life import process_exit
from megatron_rl.life.signs_of_life import Silence, where
from megatron_rl.rollout.rollout_rank import Beginning, RolloutRank
from megatron_rl.rollout.rollout_stub import P, RolloutStub, T
from megatron_rl.rollout.rpc import PULSE, RpcClient, RpcSocket
from megatron_rl.telemetry.rollout_metrics import Counts
from megatron_rl.telemetry.trace import Recording
from megatron_rl.types import TrajectoryBatch

logger = logging.getLogger(__name__)

STOP_S = 10.0
PULSE_S = 2.0
"""How often it is asked whether it lives."""
ANSWER_S = 4.0
"""How long a process that may itself stand still has to say what it does."""
HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
"""Signals that the process leaves to the trainer; here they wait until it has said so."""


class RolloutDied(RuntimeError):
    """The rollout process is gone."""


class RolloutProcess(RolloutStub):
    """The trainer's stub of the RolloutRank in a process beside it.

    process = RolloutProcess(folder / "rollout.log", on_death=stop)
    process.begin(Beginning(config=config, tokenizer=tokenizer, resume_point=point, ...))
    process.connect(["http://127.0.0.1:30000"])
    batch = process.prepare_batch(8).result()  # RolloutRank.prepare_batch, over there
    process.close()
    """

    def __init__(
        self,
        log: Path,
        *,
        on_death: Callable[[str], None],
        on_drop: Callable[[str, str], None] | None = None,
        lock: int | None = None,
    ) -> None:
        """Start it; `begin` and `connect` follow. The main thread calls this: the process ends with that thread.

        on_death(message) is called from a thread of this object if the process ends unasked, and on_drop(url, reason)
        for a server that fails a publication. `lock` is the journal's, which the process takes over.
        """
        self.log, self._on_death, self._on_drop = log, on_death, on_drop
        self._is_closing = False
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "megatron_rl.rollout", "--socket", str(theirs.fileno())]
        command += ["--trainer", str(os.getpid())] + ([] if lock is None else ["--lock", str(lock)])
        log.parent.mkdir(parents=True, exist_ok=True)
        # A child begins with this mask: Ctrl-C in a terminal reaches it too, before it can say that it leaves it to us.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"},
                    pass_fds=[theirs.fileno(), *([] if lock is None else [lock])],
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()  # with a copy here, the end of the child would not be heard
        if lock is not None:
            file_lock.sign(lock, self.process.pid)
            os.close(lock)  # the child's copy keeps it, for as long as there is a child that may write
        self._begun: Future[None] | None = None
        self._caller = RpcClient(RpcSocket(ours), on_told=self._hear, on_end=self._find_out)
        # What stands still over there, by name, with its seconds: as the last answer had it.
        self._pulse: dict[str, float] = {}
        self._pulse_at, self._closed = time.monotonic(), threading.Event()
        process_exit.start_thread(self._feel_pulse, name="rollout-pulse")

    def begin(self, beginning: Beginning) -> None:
        """Tell it of its run; does not wait."""
        self._begun = self._caller.start("begin", beginning)

    def connect(self, urls: list[str]) -> None:
        """Return once it is ready and has reached the servers; raises what kept it from that."""
        assert self._begun is not None, "begin comes first"
        self._begun.result()
        self._caller.call("connect", urls)

    def close(self) -> None:
        """End it in order: what is in flight is cancelled, and the journal is closed. May be called twice."""
        self._is_closing = True
        self._closed.set()
        if self.process.poll() is None:
            try:
                self._caller.start("close").result(STOP_S)
            except (TimeoutError, RuntimeError):  # a workflow that cannot be cancelled, or it is dying
                self.process.kill()
        self._caller.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # it has answered, and was stopped then, or its log's disk hangs
            self.process.kill()
            self.process.wait()

    # -- the methods of its RolloutRank, which are documented there

    def prepare_batch(self, count: int = 0) -> Future[TrajectoryBatch]:
        return self._caller.start("prepare_batch", count)

    def evaluate(self, generation: GenerationConfig) -> Future[TrajectoryBatch]:
        return self._caller.start("evaluate", generation)

    def counts(self) -> Counts:
        return self._call(RolloutRank.counts)

    def record(self) -> None:
        self._call(RolloutRank.record)

    def take_recording(self) -> Recording:
        return self._call(RolloutRank.take_recording)

    def ledger_state(self) -> dict[str, Any]:
        return self._call(RolloutRank.ledger_state)

    def add_outcomes(self, outcomes: list[Outcome]) -> None:
        self._call(RolloutRank.add_outcomes, outcomes)

    def journal_faults(self) -> list[str]:
        return self._call(RolloutRank.journal_faults)

    def rotate_journal(self, oldest_checkpoint: int) -> None:
        self._await(RolloutRank.rotate_journal, oldest_checkpoint)

    def _call(self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        answer: T = self._caller.call(method.__name__, *args, **kwargs)
        return answer

    def _await(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        answer: T = self._caller.call(method.__name__, *args, **kwargs)  # the other process awaits it
        return answer

    def _value(self, name: str) -> Any:
        return self._caller.call(name)

    # -- its life

    def fail(self, message: str) -> None:
        """Make what waits for replies or servers raise RuntimeError(message), now and later. From any thread."""
        self._caller.tell("fail", message)

    def hang_report(self) -> str:
        """Say what it has under way, for a run that stands still; its stacks and last events go to hang/rollout-N.txt.

        From any thread. One that does not answer is said to be so, and writes its stacks if it still runs at all.
        """
        try:
            return str(self._caller.start("hang_report").result(ANSWER_S))
        except TimeoutError:
            self.process.send_signal(signal.SIGUSR2)
            return f"the rollout process (pid {self.process.pid}), which does not answer"
        except RuntimeError as error:
            return str(error)

    def silent(self) -> Silence:
        """Return the parts of it that stand still, each with for how long and the remedy. From any thread."""
        who, age_s = f"the rollout process (pid {self.process.pid})", time.monotonic() - self._pulse_at
        stacks = f" kill -USR2 {self.process.pid} writes its stacks to run.folder/hang."
        found = {who: (age_s, f" The thread that hears it is {where(self._caller.hearing)}.{stacks}")}
        return found | {f"{who}, {what},": (seconds, stacks) for what, seconds in list(self._pulse.items())}

    # -- threads

    def _feel_pulse(self) -> None:
        while not self._closed.wait(PULSE_S):
            try:
                self._pulse = self._caller.call(PULSE)
            except RuntimeError:  # it is gone, and the thread that hears has said so
                return
            self._pulse_at = time.monotonic()

    def _hear(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "log":
            record = logging.makeLogRecord(*args)
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        elif self._on_drop is not None:
            self._on_drop(*args)

    def _find_out(self, fault: BaseException | None) -> RolloutDied:
        if fault is not None and not self._is_closing:
            self.process.kill()
            logger.critical("nothing more is heard of the rollout process", exc_info=fault)
            message = f"the rollout process (pid {self.process.pid}) is ended: {fault}; its log is {self.log}."
            self._on_death(message)
            return RolloutDied(message)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # alive, and cut off
            self.process.kill()
            code = self.process.wait()
        if self._is_closing:
            return RolloutDied("the rollout process was closed.")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        message = f"the rollout process (pid {self.process.pid}) {how}; its log is {self.log}."
        self._on_death(message)
        return RolloutDied(message)
