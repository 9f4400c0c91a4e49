"""The trainer's proxy for its rollout process, in which episodes run without using the trainer's interpreter.

The process runs one RolloutRank (rollout_rank.py). It answers calls in order; slow calls return a Future.
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

from megatron_rl.data.curriculum import Outcome
from megatron_rl.launch import file_lock
from megatron_rl.launch.start_up import python_path
from megatron_rl.life import process_exit
from megatron_rl.life.signs_of_life import Silence, where
from megatron_rl.rollout.rollout_rank import Beginning, RankServer, RolloutRank
from megatron_rl.rollout.rollout_stub import P, RolloutStub, T
from megatron_rl.rollout.rpc import PULSE, RpcClient, RpcSocket
from megatron_rl.telemetry.trace import Recording

logger = logging.getLogger(__name__)

STOP_S = 10.0
PULSE_S = 2.0
"""Seconds between two liveness checks."""
ANSWER_S = 4.0
"""Timeout for the hang report of a process that may itself hang."""
HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
"""Signals that ask a run to stop. The rollout process leaves them to the trainer: it starts with these signals blocked,
and unblocks them when it has installed handlers that do nothing."""


class RolloutDied(RuntimeError):
    """The rollout process has ended."""


class RolloutProcess(RolloutStub):
    """The trainer's proxy for the RolloutRank in its rollout process.

    process = RolloutProcess(folder / "rollout.log", on_death=stop)
    process.begin(Beginning(config=config, tokenizer=tokenizer, resume_point=point, ...))
    process.connect(["http://127.0.0.1:30000"])
    batch = process.rpc.start(RolloutRank.prepare_batch, 8).result()  # runs in the process
    process.close()

    Start methods that take long through `rpc`. Each method below calls the RolloutRank method of the same name and
    waits for its result.
    """

    def __init__(
        self,
        log: Path,
        *,
        on_death: Callable[[str], None],
        on_drop: Callable[[str, str], None] | None = None,
        lock: int | None = None,
    ) -> None:
        """Start the process; call `begin` and `connect` next.

        Call this from the main thread, because the process ends when the thread that started it ends.

        on_death(message) is called from a thread of this object if the process ends unexpectedly. on_drop(url, reason)
        is called for each server that fails a publication. lock: file descriptor of the journal's lock, which the
        process takes over.
        """
        self.log, self._on_death, self._on_drop = log, on_death, on_drop
        self._is_closing = False
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "megatron_rl.rollout", "--socket", str(theirs.fileno())]
        command += ["--trainer", str(os.getpid())] + ([] if lock is None else ["--lock", str(lock)])
        log.parent.mkdir(parents=True, exist_ok=True)
        # The child inherits this mask. Ctrl-C in a terminal reaches it before it can install its handlers.
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
            theirs.close()  # an open copy here would hide the child's end
        if lock is not None:
            file_lock.sign(lock, self.process.pid)
            os.close(lock)  # the child's copy keeps the lock while a child may write
        self._begun: Future[None] | None = None
        self.rpc = RpcClient(RpcSocket(ours), on_told=self._hear, on_end=self._find_out)
        # From the last answer: seconds for which the event loop has been blocked, and seconds of each current call.
        self._pulse: dict[str, float] = {}
        self._pulse_at, self._closed = time.monotonic(), threading.Event()
        process_exit.start_thread(self._feel_pulse, name="rollout-pulse")

    def begin(self, beginning: Beginning) -> None:
        """Send the process its run's configuration. Does not wait."""
        self._begun = self.rpc.start(RankServer.begin, beginning)

    def connect(self, urls: list[str]) -> None:
        """Wait until the process is ready and has connected to the servers. Raises the process's error if it fails."""
        assert self._begun is not None, "begin comes first"
        self._begun.result()
        self.rpc.start(RolloutRank.connect, urls).result()

    def close(self) -> None:
        """Shut the process down: it cancels what is in flight and closes the journal. May be called twice."""
        self._is_closing = True
        self._closed.set()
        if self.process.poll() is None:
            try:
                self.rpc.start(RolloutRank.close).result(STOP_S)
            except (TimeoutError, RuntimeError):  # a workflow that ignores cancellation, or a dying process
                self.process.kill()
        self.rpc.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # it answered but was then stopped, or its log's disk hangs
            self.process.kill()
            self.process.wait()

    # -- quick methods of RolloutRank, which documents them

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
        return self.rpc.start(method, *args, **kwargs).result()

    def _await(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return self.rpc.start(method, *args, **kwargs).result()

    def _value(self, name: str) -> Any:
        return self.rpc.start(name).result()

    # -- state of the process

    def fail(self, message: str) -> None:
        """Make calls that wait for replies or servers raise RuntimeError(message).

        This affects current and later calls. Callable from any thread.
        """
        self.rpc.tell("fail", message)

    def hang_report(self) -> str:
        """Describe what the process is doing, for the report of a run that hangs. Callable from any thread.

        The process writes its stacks and last events to hang/rollout-N.txt. If it does not answer, the description says
        so, and the process gets SIGUSR2. Its main thread then writes its stack even if C code blocks the interpreter.
        """
        try:
            return self.rpc.start(RolloutRank.hang_report).result(ANSWER_S)
        except TimeoutError:
            self.process.send_signal(signal.SIGUSR2)
            return f"the rollout process (pid {self.process.pid}), which does not answer"
        except RuntimeError as error:
            return str(error)

    def silent(self) -> Silence:
        """Return how long the process has not answered, and how long its event loop and its calls have been busy.

        The result is {name: (seconds, text for the warning)}. Callable from any thread.
        """
        who, age_s = f"the rollout process (pid {self.process.pid})", time.monotonic() - self._pulse_at
        stacks = f" kill -USR2 {self.process.pid} writes its main thread's stack to run.folder/hang."
        found = {who: (age_s, f" The thread that hears it is {where(self.rpc.hearing)}.{stacks}")}
        return found | {f"{who}, {what},": (seconds, stacks) for what, seconds in list(self._pulse.items())}

    # -- threads

    def _feel_pulse(self) -> None:
        while not self._closed.wait(PULSE_S):
            try:
                self._pulse = self.rpc.start(PULSE).result()
            except RuntimeError:  # it has ended, and the receiving thread has reported that
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
        except subprocess.TimeoutExpired:  # alive, but its socket is closed
            self.process.kill()
            code = self.process.wait()
        if self._is_closing:
            return RolloutDied("the rollout process was closed.")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        message = f"the rollout process (pid {self.process.pid}) {how}; its log is {self.log}."
        self._on_death(message)
        return RolloutDied(message)
