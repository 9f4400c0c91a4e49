"""Runs inside a rollout process for the trainer: workflows, rewards, executor, client and resume state."""

from __future__ import annotations

import asyncio
import gc
import logging
import logging.handlers
import os
import queue
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import uvloop

from megatron_rl.api import RolloutWorkflow
from megatron_rl.config import GenerationConfig, TrainConfig
from megatron_rl.data.curriculum import Outcome
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.launch.run_token import servers_of
from megatron_rl.life.beat import Beat, HoldWatch
from megatron_rl.life.hang_report import HangReport
from megatron_rl.rollout import journal, status
from megatron_rl.rollout.events import DeadLetters
from megatron_rl.rollout.factory import make_workflow, serve_rewards
from megatron_rl.rollout.ledger import Share
from megatron_rl.rollout.resume_state import ResumePoint, ResumeState
from megatron_rl.rollout.reuse_buffer import with_reused
from megatron_rl.rollout.rollout_service import RolloutService
from megatron_rl.rollout.rpc import PULSE, RpcServer, RpcSocket
from megatron_rl.rollout.status import StatusFile
from megatron_rl.routes import RouteForm
from megatron_rl.servers.event_loop import allow_blocking_steps, cancel_others, in_own_thread
from megatron_rl.servers.pool import ClientOptions
from megatron_rl.servers.server_info import model_config
from megatron_rl.telemetry import stats_tracker
from megatron_rl.telemetry.rollout_metrics import Counts
from megatron_rl.telemetry.trace import Recording
from megatron_rl.types import TrajectoryBatch
from megatron_rl.workflows.taught import TaughtWorkflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = {"fail", "hang_report"}
"""Calls that end or describe the current call. They run at once, because the current call may never end by itself."""
BESIDE = {"prepare_batch", "evaluate"}
"""Calls that run concurrently with others, because they last as long as episodes do."""
REWARDS_START_S = 20.0
"""Time allowed for reward servers that start together with the run."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The first message to a rollout process. It has all that the process learns about its run."""

    config: TrainConfig
    tokenizer: PreTrainedTokenizerBase
    """The trainer's tokenizer. Loading another one here would import all of transformers' models, which takes
    seconds."""
    resume_point: ResumePoint
    prompts: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    sys_path: list[str]
    """The trainer's sys.path, so that this process can import the same user workflows and rewards."""
    routes: RouteForm | None = None
    """Shape and dtype of the model's expert routes, if the trainer replays them."""


class RolloutRank(RolloutService):
    """The workflows, rewards and resume state of one rollout rank, together with the service that runs them.

    The trainer calls the public methods of this class and of RolloutService through a RolloutProcess. They run on the
    event loop one after the other, except those in BESIDE, which run concurrently.
    """

    def __init__(self, beginning: Beginning, on_drop: Callable[[str, str], None]) -> None:
        sys.path[:] = beginning.sys_path
        torch.set_num_threads(1)  # the trainer computes; this process joins a few tensors
        config, point = beginning.config, beginning.resume_point
        self.run_config, self.held_out = config, beginning.held_out
        prompts = PromptIterator(
            beginning.prompts, seed=config.run.seed, shuffle=config.data.shuffle, weights=config.data.weights
        )
        share = Share.of_rank(point.rank, point.ranks, per_step=config.batch.prompts_per_step)
        folder = Path(config.run.folder)
        keeps_journal = config.run.checkpoint_every_steps > 0
        self.resume_state = ResumeState(
            prompts, share, point, config.rollout, folder / journal.FOLDER if keeps_journal else None, config.reuse
        )
        dead_letters = DeadLetters(folder / f"dead_letters{f'-{point.rank}' if point.rank else ''}.jsonl")
        options = ClientOptions(
            seed=config.run.seed,
            on_drop=on_drop,
            # Only the publishing rank watches the registry; it tells the other ranks which servers exist.
            run_name=folder.name if config.rollout.registry and point.rank == 0 else "",
            vocab_size=model_config(config.model.path).get("vocab_size"),
            routes=beginning.routes,
            trained_as=config.generation,
            rank=point.rank,
            ranks=point.ranks,
        )
        events = [*self.resume_state.events, dead_letters]
        super().__init__(servers_of(config), options, events=events, records=self.resume_state.records)
        self._hang_report = HangReport(folder / "hang" / f"rollout-{point.rank}.txt", self.client.spans)
        self.tokenizer = beginning.tokenizer
        self.recipe = serve_rewards(config, stacks=self._hang_report.file_number)
        workflow = make_workflow(config, self.tokenizer, config.generation, self.recipe)
        self._taught = workflow if isinstance(workflow, TaughtWorkflow) else None
        self.workflow = workflow
        self._evaluating: dict[str, RolloutWorkflow] = {}
        self._status = StatusFile(
            folder / status.FOLDER / f"rollout-{point.rank}.json",
            lambda: self.executor,
            self.tokenizer,
            version=self.client.get_version,
            servers=lambda: self._fleet.members.states(),
        )

    async def connect(self, urls: list[str]) -> None:
        """Connect to the servers, and check that they accept weights and that the rewards' servers answer.

        In addition to RolloutService's errors, raises ValueError for a server that accepts no weights. Raises
        InfrastructureFailure if a reward's server does not answer. Without these checks the run would fail later.
        """
        await self.recipe.reach(REWARDS_START_S)
        await super().connect(urls)
        self._fleet.check_publishable()
        self._status.begin()

    async def close(self) -> None:
        """Cancel what is in flight. Then close the rewards, the journal and the hang report."""
        await self._status.close()
        # In this order, because episodes ask for rewards and both are recorded.
        await super().close()
        await cancel_others()
        await self.recipe.close()
        if self._taught is not None:
            await self._taught.close()
        self.resume_state.close()
        self._hang_report.close()

    # -- groups

    async def prepare_batch(self, count: int = 0) -> TrajectoryBatch:
        """Keep as many of this rank's episodes in flight as staleness allows, and return the next `count` groups.

        count: 0 means this rank's share of a step. Groups from the reuse buffer are appended.
        """
        self._check_connected()
        ledger, buffer = self.resume_state.ledger, self.resume_state.buffer
        count = count or len(ledger.share)
        if buffer is None:
            return await self.executor.prepare_batch(ledger, self.workflow, count)
        drawn = buffer.draw()  # before this step's groups enter it
        batch = await self.executor.prepare_batch(ledger, self.workflow, count)
        read = in_own_thread(lambda: [buffer.read(entry) for entry in drawn], name="reuse")
        return with_reused(batch, await read)

    async def evaluate(self, generation: GenerationConfig) -> TrajectoryBatch:
        """Answer the held-out prompts with the given sampling options, in slots that training leaves free."""
        self._check_connected()
        workflow = self._evaluating.get(repr(generation))
        if workflow is None:
            workflow = make_workflow(self.run_config, self.tokenizer, generation, self.recipe, evaluates=True)
            self._evaluating[repr(generation)] = workflow
        return await self.executor.evaluate(self.held_out, workflow)

    def counts(self) -> Counts:
        counts = super().counts()
        counts.sums |= self.resume_state.metrics()
        counts.observed |= {f"{stats_tracker.USER}{name}": sums for name, sums in stats_tracker.take().items()}
        return counts

    # -- traces and hangs

    def record(self) -> None:
        """Start recording spans for a trace."""
        self.client.spans.record()

    def take_recording(self) -> Recording:
        """End the recording and return it."""
        spans = self.client.spans
        difference_s = time.time() - time.monotonic()
        recorded = spans.take()
        return Recording(pid=os.getpid(), wall_minus_monotonic_s=difference_s, spans=recorded, left_out=spans.left_out)

    def hang_report(self) -> str:
        """Describe what this process is doing. Callable from any thread.

        The description and all stacks are also written to hang/rollout-N.txt.
        """
        words = self._hang_report.report()
        # Last, because the reward processes write to the same file and would interrupt a line.
        self.recipe.service.show_stacks()
        return words

    # -- resume state

    def ledger_state(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint.

        It has the open prompts, the next prompt, the reuse buffer, and the outcomes that were not yet added to the
        rates.
        """
        return self.resume_state.state_dict()

    def add_outcomes(self, outcomes: list[Outcome]) -> None:
        """Add the outcomes of all ranks' prompts to the success rates, by which further prompts are chosen."""
        self.resume_state.ledger.add_outcomes(outcomes)

    def journal_faults(self) -> list[str]:
        """Return descriptions of the parts of earlier journals that cannot be read."""
        return self.resume_state.faults

    async def rotate_journal(self, oldest_checkpoint: int) -> None:
        """Begin a new journal file when a checkpoint begins.

        Runs in a thread, so that a slow disk does not block episodes.
        """
        await in_own_thread(lambda: self.resume_state.rotate_journal(oldest_checkpoint), name="journal")


PLAIN = (str, int, float, bool, type(None))
"""Types of the values in log records that are sent to the trainer."""


class ToTrainer(logging.handlers.QueueHandler):
    """Forwards warnings to the trainer's logging."""

    def __init__(self, wire: RpcSocket) -> None:
        super().__init__(queue.Queue())  # this queue stays empty
        self.setLevel(logging.WARNING)
        self.wire = wire

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send the record without objects of users' classes, which the trainer may lack or fail to construct."""
        tell(self.wire, "log", {name: value for name, value in vars(record).items() if type(value) in PLAIN})


def tell(wire: RpcSocket, name: str, *args: object) -> None:
    try:
        wire.send((None, (name, args), None))
    except OSError:
        pass  # the trainer is gone, and this process ends in a moment


def collect_garbage_seldom() -> None:
    """Exempt all current objects from garbage collection. Then collect after every 100,000 new objects instead of 700.

    Replies are tensors, so they create few objects and hardly any reference cycles. With the default, collection took a
    quarter of the time of short replies.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


class RankServer:
    """Finds the function that answers each call of the trainer.

    The call `begin` creates the RolloutRank. Its methods answer all other calls.
    """

    def __init__(self, wire: RpcSocket, loop: asyncio.AbstractEventLoop) -> None:
        self.beat, self._wire, self._loop = Beat(loop), wire, loop
        self._rank: RolloutRank | None = None

    def begin(self, beginning: Beginning) -> None:
        allow_blocking_steps(self._loop, beginning.config.rollout.max_concurrent_episodes)
        self._rank = RolloutRank(beginning, on_drop=lambda url, reason: tell(self._wire, "drop", url, reason))
        collect_garbage_seldom()
        HoldWatch(self.beat).begin()  # after the constructor of the user's workflow, which may be slow

    def find(self, name: str) -> Callable[..., Any]:
        if name == PULSE:
            return lambda: {"its event loop": self.beat.stands_still_s}
        if name == "begin":
            return self.begin
        if self._rank is None:
            assert name in ("close", "fail", "hang_report"), "begin comes first, and failed"
            return lambda *_: {"hang_report": "the rollout process is about to begin"}.get(name)
        if isinstance(getattr(RolloutRank, name), property):
            return lambda: getattr(self._rank, name)
        found: Callable[..., Any] = getattr(self._rank, name)
        return found


def serve_trainer(end: socket.socket) -> None:
    """Answer the trainer's calls until it closes the connection or dies. Then end this process unconditionally.

    The main thread runs the event loop. Two more threads read calls and send the results of futures.
    """
    wire = RpcSocket(end)
    to_log = logging.StreamHandler()
    to_log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_log, ToTrainer(wire)])
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    server = RankServer(wire, loop)
    server.beat.begin()
    loop.run_until_complete(RpcServer(wire, server.find, at_once=AT_ONCE, beside=BESIDE).serve())
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # a reward may still run in a thread
