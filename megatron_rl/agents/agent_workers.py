"""Pool of worker processes for agents. Each process serves one run and is killed at the run's end or deadline."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import orjson

from megatron_rl.api import InfrastructureFailure
from megatron_rl.config.import_path import path_of
from megatron_rl.rewards.reward_service import WorkersTraceback
from megatron_rl.rewards.worker_pool import WorkerDied, WorkerPool
from megatron_rl.telemetry import stats_tracker

AT_ONCE = 16
"""Maximum number of processes that are being started at a time. A fork is quick, so hundreds at once would only wait
for each other."""
MOST_LOGS = 1024
"""Maximum number of log files; the oldest are deleted."""
DRAIN_S = 0.1
"""Seconds to wait for output after a process died or failed. Its parent process may not have written all of it yet."""
SHOWN = 2000
"""Maximum length, in bytes, of a failed agent's output in an error message."""


class AgentTimeout(InfrastructureFailure):
    """An agent exceeded its time limit and was killed, with all processes that it started."""

    KIND = "agent"


class AgentFailed(RuntimeError):
    """An agent raised an exception. Its traceback is this error's cause."""


class AgentLost(AgentFailed, InfrastructureFailure):
    """An agent raised an InfrastructureFailure: something that the agent depends on failed."""


class AgentDied(InfrastructureFailure):
    """An agent's process died before its deadline. The failure never becomes a reward."""

    KIND = "agent"


class AgentWorkers:
    """The agent processes of one workflow. They start with the first run and must be used from one event loop.

    For example:

        workers = AgentWorkers("my_agents:solve", {}, most=64, folder="runs/mine/agents")
        value = await workers.run(base_url, api_key, data, name="12-3", timeout_s=600.0)  # a number, several, or None
    """

    def __init__(self, agent: Any, args: dict[str, Any], *, most: int, folder: str = "") -> None:
        """agent: a module-level function, or its import path. folder: folder for output, one file per sample."""
        self.path = path_of(agent, key="rollout.workflow_args.agent", what="agents run")
        self._args, self._most, self._given_folder = args, most, folder
        self._pool: WorkerPool | None = None
        self._starting = asyncio.Semaphore(AT_ONCE)
        self._logs: deque[Path] = deque()

    async def run(self, base_url: str, api_key: str, data: dict[str, Any], *, name: str, timeout_s: float) -> Any:
        """Run the agent and return its value: a number, a list of numbers or None.

        Raises AgentTimeout if the agent takes longer than `timeout_s` from the start of its process, AgentFailed if it
        raises an exception, AgentDied if its process dies, and ValueError if it returns any other value. Cancelling
        this call kills the process.
        """
        pool = self._started()
        log = self._log(name)
        frame = pool.frame({"base_url": base_url, "api_key": api_key, "data": data})
        is_alone = False
        async with self._starting:
            try:
                worker = await pool.acquire(str(log.absolute()))
            except WorkerDied as error:
                raise AgentDied(f"agent {self.path}: {error}") from error
        try:
            async with asyncio.timeout(timeout_s):
                answer = orjson.loads(await worker.ask(frame))
            is_alone = bool(answer["is_alone"])
        except TimeoutError as error:
            raise AgentTimeout(
                f"agent {self.path}: did not end within {timeout_s:g} s, and was killed with all that it had started; "
                f"raise the workflow's agent_timeout_s, or let it give up earlier.{last_words(log)}"
            ) from error
        except WorkerDied as error:
            await asyncio.sleep(DRAIN_S)
            raise AgentDied(f"agent {self.path}: {pool.died()}{last_words(log)}") from error
        finally:
            # The process is discarded even after success: no agent sees what another one left behind.
            pool.discard(worker, is_alone=is_alone)
        if "error" in answer:
            await asyncio.sleep(DRAIN_S)
        return self._value(answer, log)

    def close(self) -> None:
        """Stop all processes. Without this call they stop when this object is deleted or the current process exits."""
        if self._pool is not None:
            self._pool.close()

    def _value(self, answer: dict[str, Any], log: Path) -> float | list[float] | None:
        if "error" in answer:
            words, trace, kind = map(str, answer["error"])
            message = f"agent {self.path}: {words}{last_words(log)}"
            raise (AgentLost(message, kind=kind) if kind else AgentFailed(message)) from WorkersTraceback(trace)
        if "wrong" in answer:
            raise ValueError(
                f"agent {self.path}: returned {answer['wrong']}; must be a finite number or None, or a list of one "
                f"number for each reply."
            )
        stats_tracker.add(answer["logged"])
        value: float | list[float] | None = answer["value"]
        return value

    def _started(self) -> WorkerPool:
        if self._pool is None:
            # An agent's imports run once, in the process that workers are forked from.
            given = {"path": self.path, "args": self._args}
            self._pool = WorkerPool("agent", "megatron_rl.rewards.agent_worker:running", given, workers=self._most)
            self._folder = Path(self._given_folder or tempfile.mkdtemp(prefix="agent-logs-"))
            self._folder.mkdir(parents=True, exist_ok=True)
        return self._pool

    def _log(self, name: str) -> Path:
        """Return the file for a sample's output. Retries of the sample append to the same file."""
        path = self._folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.log"
        if path not in self._logs:
            self._logs.append(path)
        while len(self._logs) > MOST_LOGS:
            self._logs.popleft().unlink(missing_ok=True)
        return path


def last_words(log: Path) -> str:
    """Return the end of an agent's output, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - SHOWN))
            text = file.read().decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""
    return f" Its last words, in {log}:\n{text}" if text else ""
