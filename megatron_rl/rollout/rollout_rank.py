"""What runs in a data head's rollout process: workflows, rewards, executor, client and books, called by the trainer."""

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
from megatron_rl.rollout.hang_report import Standstill
from megatron_rl.rollout.process import Beginning
from megatron_rl.rollout.resume_state import HeadBooks
from megatron_rl.rollout.rollout_metrics import Counts
from megatron_rl.rollout.rpc import PULSE, Wire, serve
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers.client import model_config
from megatron_rl.telemetry.trace import Recording
from megatron_rl.types import TrajectoryBatch


class RolloutHead:
    """Its public methods, and those of its engine, are what the trainer calls."""

    def __init__(self, beginning: Beginning, on_drop: Callable[[str, str], None]) -> None:
        sys.path[:] = beginning.sys_path
        torch.set_num_threads(1)
        config, place = beginning.config, beginning.place
        self.config, self.held_out = config, beginning.held_out
        self.prompts = PromptIterator(
            beginning.prompts, seed=config.run.seed, shuffle=config.data.shuffle, weights=config.data.weights
        )
        folder = Path(config.run.folder)
        keeps_journal = config.run.checkpoint_every_steps > 0
        self.books = HeadBooks(self.prompts, place, config.rollout, folder / journal.FOLDER if keeps_journal else None)
        dead_letters = DeadLetters(folder / f"dead_letters{f'-{place.head}' if place.head else ''}.jsonl")
        events = [*self.books.events, dead_letters]
        # The head that publishes watches the registry; others learn from it which servers there are.
        run_name = folder.name if config.rollout.registry and place.head == 0 else ""
        self.engine = RemoteSGLangEngine(
            servers_of(config),
            seed=config.run.seed,
            events=events,
            on_drop=on_drop,
            run_name=run_name,
            vocab_size=model_config(config.model.path).get("vocab_size"),
        )
        self._standstill = Standstill(folder / "hang" / f"rollout-{place.head}.txt", self.engine.spans)
        self.tokenizer = beginning.tokenizer
        self.recipe = serve_rewards(config, stacks=self._standstill.file_number)
        self.workflow = self.books.replaying(make_workflow(config, self.tokenizer, config.generation, self.recipe))
        self._evaluating: dict[str, RolloutWorkflow] = {}
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="wait-for-groups")

    def connect(self, urls: list[str]) -> None:
        self.engine.initialize(urls)

    def prepare_batch(self, count: int) -> Future[TrajectoryBatch]:
        return self._waiting.submit(self.engine.prepare_batch, self.books.ledger, self.workflow, count)

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

    def standstill(self) -> str:
        self.recipe.service.show_stacks()
        return self._standstill.report()

    def pulse(self) -> dict[str, float]:
        """What of it stands still, and for how many seconds."""
        return {"its event loop": self.engine.stands_still_s}

    def counts(self) -> Counts:
        """What happened since the last call."""
        counts = self.engine.counts()
        counts.sums |= self.books.metrics()
        return counts

    def ledger_state(self) -> dict[str, Any]:
        return self.books.ledger.state_dict()

    def journal_faults(self) -> list[str]:
        return self.books.faults

    def turn_the_page(self, oldest_checkpoint: int) -> None:
        self.books.turn_the_page(oldest_checkpoint)

    def close(self) -> None:
        self.engine.destroy(self.recipe.close())
        self.books.close()
        self._standstill.close()


PLAIN = (str, int, float, bool, type(None))
"""Types of what a log record itself is made of."""


class ToTrainer(logging.handlers.QueueHandler):
    """Hands warnings on to the trainer's own logging."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(queue.Queue())  # which stays empty
        self.setLevel(logging.WARNING)
        self.wire = wire

    def enqueue(self, record: logging.LogRecord) -> None:
        """Without what users may have put into it: objects of classes that the trainer may not have, or cannot make."""
        tell(self.wire, "log", {name: value for name, value in vars(record).items() if type(value) in PLAIN})


def tell(wire: Wire, name: str, *args: Any) -> None:
    try:
        wire.send((None, (name, args), None))
    except OSError:
        pass  # the trainer is gone, and so is this process in a moment


def serve_trainer(end: socket.socket) -> None:
    """Answer the trainer's calls, and end this process with it whatever else still runs here."""
    wire = Wire(end)
    to_log = logging.StreamHandler()
    to_log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_log, ToTrainer(wire)])
    head: RolloutHead | None = None

    def answer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal head
        if name == "begin":
            head = RolloutHead(*args, on_drop=lambda url, reason: tell(wire, "drop", url, reason))
            return None
        if head is None:
            assert name in ("close", "fail", "standstill", PULSE), "begin comes first, and failed"
            return {PULSE: {}, "standstill": "the rollout process is about to begin"}.get(name)
        member = getattr(head if hasattr(RolloutHead, name) else head.engine, name)
        return member(*args, **kwargs) if callable(member) else member

    serve(wire, answer, at_once={"fail", "standstill"})  # what ends or describes the call that is under way
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # a reward may still run in a thread
