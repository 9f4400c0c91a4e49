"""The inside of a rollout process, called by the trainer: workflows, rewards, executor, client and resume state."""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megatron_rl.api import RolloutWorkflow
from megatron_rl.config import GenerationConfig
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.launch.run_token import servers_of
from megatron_rl.rollout import journal
from megatron_rl.rollout.dead_letters import DeadLetters
from megatron_rl.rollout.factory import make_workflow, serve_rewards
from megatron_rl.rollout.hang_report import HangReport
from megatron_rl.rollout.process import Beginning
from megatron_rl.rollout.resume_state import ResumeState
from megatron_rl.rollout.rollout_metrics import Counts
from megatron_rl.rollout.rpc import PULSE, RpcSocket, serve
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers.client import model_config
from megatron_rl.telemetry.trace import Recording
from megatron_rl.types import TrajectoryBatch


class RolloutRank:
    """Its public methods, and those of its engine, are what the trainer calls."""

    def __init__(self, beginning: Beginning, on_drop: Callable[[str, str], None]) -> None:
        sys.path[:] = beginning.sys_path
        torch.set_num_threads(1)
        config, point = beginning.config, beginning.resume_point
        self.config, self.held_out = config, beginning.held_out
        self.prompts = PromptIterator(
            beginning.prompts, seed=config.run.seed, shuffle=config.data.shuffle, weights=config.data.weights
        )
        folder = Path(config.run.folder)
        keeps_journal = config.run.checkpoint_every_steps > 0
        self.resume_state = ResumeState(
            self.prompts, point, config.rollout, folder / journal.FOLDER if keeps_journal else None
        )
        dead_letters = DeadLetters(folder / f"dead_letters{f'-{point.rank}' if point.rank else ''}.jsonl")
        events = [*self.resume_state.events, dead_letters]
        # The rank that publishes watches the registry; others learn from it which servers there are.
        run_name = folder.name if config.rollout.registry and point.rank == 0 else ""
        self.engine = RemoteSGLangEngine(
            servers_of(config),
            seed=config.run.seed,
            events=events,
            on_drop=on_drop,
            run_name=run_name,
            vocab_size=model_config(config.model.path).get("vocab_size"),
        )
        self._hang_report = HangReport(folder / "hang" / f"rollout-{point.rank}.txt", self.engine.spans)
        self.tokenizer = beginning.tokenizer
        self.recipe = serve_rewards(config, stacks=self._hang_report.file_number)
        self.workflow = self.resume_state.replaying(
            make_workflow(config, self.tokenizer, config.generation, self.recipe)
        )
        self._evaluating: dict[str, RolloutWorkflow] = {}
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="wait-for-groups")

    def connect(self, urls: list[str]) -> None:
        self.engine.initialize(urls)

    def prepare_batch(self, count: int) -> Future[TrajectoryBatch]:
        return self._waiting.submit(self.engine.prepare_batch, self.resume_state.ledger, self.workflow, count)

    def rollout_batch(self, first: int, count: int) -> Future[TrajectoryBatch]:
        """The groups of the prompts at `count` places of the endless order."""
        prompts = [self.prompts.at(number) for number in range(first, first + count)]
        return self._waiting.submit(self.engine.rollout_batch, prompts, self.workflow)

    def evaluate(self, generation: GenerationConfig) -> Future[TrajectoryBatch]:
        """Replies to the held-out prompts that are sampled as `generation` says."""
        workflow = self._evaluating.get(repr(generation))
        if workflow is None:
            workflow = make_workflow(self.config, self.tokenizer, generation, self.recipe, evaluates=True)
            self._evaluating[repr(generation)] = workflow
        return self.engine.evaluate(self.held_out, workflow)

    def record(self) -> None:
        self.engine.spans.record()

    def take_recording(self) -> Recording:
        spans = self.engine.spans
        difference_s = time.time() - time.monotonic()
        recorded = spans.take()
        return Recording(pid=os.getpid(), wall_minus_monotonic_s=difference_s, spans=recorded, left_out=spans.left_out)

    def hang_report(self) -> str:
        self.recipe.service.show_stacks()
        return self._hang_report.report()

    def pulse(self) -> dict[str, float]:
        """What of it stands still, and for how many seconds."""
        return {"its event loop": self.engine.stands_still_s}

    def counts(self) -> Counts:
        """What happened since the last call."""
        counts = self.engine.counts()
        counts.sums |= self.resume_state.metrics()
        return counts

    def ledger_state(self) -> dict[str, Any]:
        return self.resume_state.ledger.state_dict()

    def journal_faults(self) -> list[str]:
        return self.resume_state.faults

    def rotate_journal(self, oldest_checkpoint: int) -> None:
        self.resume_state.rotate_journal(oldest_checkpoint)

    def close(self) -> None:
        self.engine.destroy(self.recipe.close())
        self.resume_state.close()
        self._hang_report.close()


PLAIN = (str, int, float, bool, type(None))
"""Types of what a log record itself is made of."""


class ToTrainer(logging.handlers.QueueHandler):
    """Hands warnings on to the trainer's own logging."""

    def __init__(self, wire: RpcSocket) -> None:
        super().__init__(queue.Queue())  # which stays empty
        self.setLevel(logging.WARNING)
        self.wire = wire

    def enqueue(self, record: logging.LogRecord) -> None:
        """Without what users may have put into it: objects of classes that the trainer may not have, or cannot make."""
        tell(self.wire, "log", {name: value for name, value in vars(record).items() if type(value) in PLAIN})


def tell(wire: RpcSocket, name: str, *args: Any) -> None:
    try:
        wire.send((None, (name, args), None))
    except OSError:
        pass  # the trainer is gone, and so is this process in a moment


def serve_trainer(end: socket.socket) -> None:
    """Answer the trainer's calls, and end this process with it whatever else still runs here."""
    wire = RpcSocket(end)
    to_log = logging.StreamHandler()
    to_log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_log, ToTrainer(wire)])
    rank: RolloutRank | None = None

    def answer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal rank
        if name == "begin":
            rank = RolloutRank(*args, on_drop=lambda url, reason: tell(wire, "drop", url, reason))
            return None
        if rank is None:
            assert name in ("close", "fail", "hang_report", PULSE), "begin comes first, and failed"
            return {PULSE: {}, "hang_report": "the rollout process is about to begin"}.get(name)
        member = getattr(rank if hasattr(RolloutRank, name) else rank.engine, name)
        return member(*args, **kwargs) if callable(member) else member

    serve(wire, answer, at_once={"fail", "hang_report"})  # what ends or describes the call that is under way
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # a reward may still run in a thread
