"""Builds the parts of a run from its config, checked before anything is started, and holds them for the loop.

The order of starting: checks (no process, no GPU), process group, servers, engines. Every method is called by all
ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_rl import parallel
from megatron_rl.algo import mismatch
from megatron_rl.algo.actor import PolicyActor
from megatron_rl.algo.critic import Critic
from megatron_rl.api import NoServerLeft
from megatron_rl.batch import exchange
from megatron_rl.config import ParallelConfig, TrainConfig
from megatron_rl.engine.manifest import CheckpointError
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.offload import Turns
from megatron_rl.experiment.checks import check
from megatron_rl.experiment.evaluation import Evaluations, decode_samples
from megatron_rl.experiment.hang import HangWatch
from megatron_rl.experiment.metrics import batch_metrics, critic_metrics, mismatch_metrics, policy_metrics
from megatron_rl.experiment.warm_start import WarmStart
from megatron_rl.launch import watch
from megatron_rl.launch.notice import StopNotice
from megatron_rl.recovery import RolloutBooks, RunCheckpoints, read_state
from megatron_rl.rollout.dead_letters import DeadLetters
from megatron_rl.rollout.import_path import make_workflow
from megatron_rl.rollout.prompts import PromptIterator
from megatron_rl.rollout.sglang import RemoteSGLangEngine
from megatron_rl.serving.supervisor import Supervisor
from megatron_rl.telemetry.report import write_report
from megatron_rl.telemetry.run_log import RunLog
from megatron_rl.telemetry.sinks import Sinks
from megatron_rl.telemetry.timers import PhaseTimers
from megatron_rl.types import FinetuneSpec, StepStats, TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture

logger = logging.getLogger(__name__)

T = TypeVar("T")

SERVER_DIES_BEFORE_NOTICE_S = 1.0
"""Some schedulers send a notice to every process of a job, also to the servers."""
SERVER_LOOK_S = 0.2
"""How often a rank that waits for replies looks whether a server is left to give them."""
PUBLICATION_ATTEMPTS = 3
"""How often a version may cost every server before the run ends."""
SAMPLES_LOGGED = 8
"""Trajectories of a training step that go to samples.jsonl."""


class Experiment:
    """All parts of one run on this rank: a context manager that starts them and always stops them."""

    def __init__(self, config: TrainConfig, *, needs_servers: bool = True, resume: str = "") -> None:
        """resume: `auto`, or the folder of a checkpoint, continues a run."""
        self.config, self.needs_servers, self.resume = config, needs_servers, resume
        self.timers = PhaseTimers()
        self.supervisor: Supervisor | None = None
        self.rollout: RemoteSGLangEngine | None = None
        self.engine: MegatronEngine | None = None
        self.warm_start = WarmStart(self)
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="wait-for-replies")

    # -- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Experiment:
        config = self.config
        self.tokenizer, train_prompts, self.held_out = check(config)
        self.folder = Path(config.run.folder)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.cores = max(1, (os.cpu_count() or 1) // local_ranks)
        torch.set_num_threads(config.run.threads_per_rank or self.cores)
        torch.manual_seed(config.run.seed)
        self.groups = parallel.start(config.parallel, seed=config.run.seed)
        replicas, prompts_per_step = self.groups.data.size, config.batch.prompts_per_step
        if prompts_per_step < replicas:
            raise ValueError(
                f"batch.prompts_per_step = {prompts_per_step}: each of the {replicas} data-parallel replicas drives "
                f"rollouts and "
                f"needs one prompt at least; raise it, or start fewer ranks."
            )
        self.checkpoints = RunCheckpoints(self.folder, keep=config.run.keep_checkpoints, groups=self.groups)
        self.resumed_from = self.checkpoints.choose(self.resume)
        resumed = read_state(self.resumed_from) if self.resumed_from else {} if self.resume else None
        self.first_step = self.checkpoints.newest = resumed["step"] if resumed else 0
        self.log_file = RunLog(self.folder, config.run.steps, self.groups.is_main, first_step=self.first_step)
        self.log_file.log_config(config.to_yaml())
        if self.groups.is_main:
            settings = dataclasses.asdict(config)
            self.log_file.sinks = Sinks(config.telemetry, self.folder, self.first_step, settings)
        self.evaluations = Evaluations(config, self.held_out, self.log_file, self.tokenizer)
        self.prompts = PromptIterator(train_prompts, seed=config.run.seed, shuffle=config.data.shuffle)
        self.books = RolloutBooks(config, self.prompts, self.groups, resumed)
        self.notice = StopNotice(config.run.grace_s, on_half_time=self._leave_step, says_so=self.groups.is_main)
        if config.run.checkpoint_every_steps > 0:
            self.notice.listen()
        self.hang_watch = HangWatch(
            self.folder,
            rank=self.groups.rank,
            world_size=self.groups.world_size,
            control=self.groups.control,
            limit_s=config.run.phase_timeout_s,
            on_hang=watch.stop,
        )
        self.timers.on_change = self.hang_watch.enter
        try:
            if self.needs_servers:
                self._start_servers()
            self._start_engines()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, error_type: type | None = None, *_: object) -> None:
        self.notice.close()
        self.hang_watch.close()
        self.log_file.close()
        if self.engine is not None and self.engine.publisher is not None and error_type is None:
            self.engine.publisher.close()  # servers that go on after this run forget its group
        if self.rollout is not None:
            self.rollout.destroy()
            self.books.close()
        self._waiting.shutdown()
        if self.supervisor is not None:
            self.supervisor.stop()
        parallel.stop()

    def _start_servers(self) -> None:
        """Rank 0 starts the servers, or takes those of the config; every data head connects to all of them."""
        config = self.config
        urls: list[Any] = [list(config.rollout.servers)]
        if self.groups.is_main and not urls[0]:
            arch = read_architecture(config.model.path)
            self.supervisor = Supervisor(
                config.rollout,
                config.model.path,
                self.folder / "servers",
                dtype=config.model.dtype,
                context_length=arch.max_positions,
                dummy_weights=True,  # version 0 is published before the first request
                threads_per_server=config.run.threads_per_rank or (os.cpu_count() or 1),
                on_death=self._on_server_death,
            )
            self.say(f"starting {config.rollout.server_count} {self.supervisor.backend} rollout server(s)")
            urls = [self.supervisor.start()]
        dist.broadcast_object_list(urls, src=0, group=self.groups.control)
        if self.groups.is_data_head:
            rank = self.groups.data.rank
            dead_letters = DeadLetters(self.folder / f"dead_letters{f'-{rank}' if rank else ''}.jsonl")
            events = [*self.books.events, dead_letters]
            on_drop = None if self.supervisor is None else self.supervisor.replace
            self.rollout = RemoteSGLangEngine(config.rollout, seed=config.run.seed, events=events, on_drop=on_drop)
            self.rollout.initialize(urls[0])
            self.workflow = self.books.replaying(make_workflow(config, self.tokenizer, config.generation))
            greedy = config.generation.new(greedy=True, n_samples=1)
            self.evaluation_workflow = make_workflow(config, self.tokenizer, greedy)

    def _on_server_death(self, message: str) -> None:
        """End the run, unless whoever ended the server has sent this process a notice too: then save first."""
        if self.notice.came(within_s=SERVER_DIES_BEFORE_NOTICE_S):
            self._leave_step()
        else:
            watch.stop(message)

    def _leave_step(self) -> None:
        """Let the rollout of the step that is under way fail."""
        if self.rollout is not None:
            self.rollout.fail(f"{self.notice.signal_name or 'a notice'}: the run is about to be ended.")

    def _start_engines(self) -> None:
        config = self.config
        options: dict[str, Any] = {"megatron": config.megatron, "turns": Turns() if config.run.offload else None}
        self.engine = MegatronEngine(config.actor, groups=self.groups, **options)
        self.engine.initialize(None, FinetuneSpec(total_updates=self.policy_updates))
        reference = None
        if config.algo.kl_coefficient > 0:
            reference = MegatronEngine(config.actor, groups=self.groups, trainable=False, **options)
            reference.initialize()
        self.reference = reference
        self.actor = PolicyActor(
            self.engine,
            config.algo,
            temperature=config.generation.temperature,
            correction=config.correction,
            reference=reference,
        )
        self.critic: Critic | None = None
        if config.has_critic:
            groups = self._layout(config.critic.parallel)
            engine = MegatronEngine(config.critic_engine, groups=groups, head="value", **options)
            engine.initialize(None, FinetuneSpec(total_updates=config.run.steps * config.batch.updates_per_step))
            self.critic = Critic(engine, config.critic)
        self.reward_model: MegatronEngine | None = None
        if config.reward_model.path:
            groups = self._layout(config.reward_model.parallel)
            self.reward_model = MegatronEngine(
                config.reward_engine, groups=groups, trainable=False, head="value", **options
            )
            self.reward_model.initialize()
        parameters = sum(p.numel() for p in self.engine.parameters())
        self.say(
            f"policy: {parameters:,} parameters on this rank, {self.groups.world_size} rank(s), {config.model.dtype}"
        )

    def _layout(self, layout: ParallelConfig) -> parallel.ParallelGroups:
        """The policy's groups where another model has its layout too, else groups of its own."""
        same = layout == self.config.parallel
        return self.groups if same else parallel.start(layout, seed=self.config.run.seed)

    @property
    def policy_updates(self) -> int:
        return (self.config.run.steps - self.config.critic.warmup_steps) * self.config.batch.updates_per_step

    def say(self, text: str) -> None:
        """Print one line on the main rank."""
        self.log_file.say(text)

    # -- the loop's parts ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Bring models and servers to where the first step starts: resumed from a checkpoint, or warm-started."""
        if self.resumed_from:
            self._continue_from(self.resumed_from)
        else:
            self.warm_start.run()
        self.publish()
        # A checkpoint is written after its step's evaluation has begun, which may not have ended.
        if not self.resumed_from or self.first_step in read_state(self.resumed_from)["evaluating"]:
            self.evaluate(step=self.first_step)
        self.timers.snapshot()  # starting up is not part of the first step

    def _continue_from(self, path: Path) -> None:
        with self.timers("resume"):
            for name, engine in self._trained.items():
                engine.load(path / name, with_optimizer=True, is_checked=True)
        self.evaluations.scores = read_state(path)["held_out_scores"]
        if self.reference is not None and self.config.warm_start.updates > 0:
            self.warm_start.load(self.reference)
        for fault in self.checkpoints.passed_over:
            self.say(f"WARNING: {fault}; it is set aside, and an earlier one is taken.")
        for fault in self.books.faults:
            self.say(f"rollout journal: {fault}; the prompts of what is missing are sampled again.")
        self.say(f"resumed after step {self.first_step} from {path}")

    @property
    def _trained(self) -> dict[str, MegatronEngine]:
        """The engines that a checkpoint holds, by their name in it."""
        return {"policy": self.engine} | ({"critic": self.critic.engine} if self.critic is not None else {})

    def checkpoint(self, *, step: int) -> bool:
        """Begin to write what a later run continues from after `step` steps, where it is time to.

        True if a notice came to any rank, and the run is to stop here: the checkpoint is written then.
        """
        options = self.config.run
        if options.checkpoint_every_steps == 0:
            return False
        self.books.note_step()
        if self.groups.any(self.notice.came()):
            self._stop_after(step)
            return True
        is_due = step == options.steps or step % options.checkpoint_every_steps == 0
        with self.timers("checkpoint"):
            with self._warning_of_checkpoints():
                self.checkpoints.finish(wait=is_due)
            if is_due:
                with self._warning_of_checkpoints():
                    self._start_checkpoint(step)
        return False

    @contextlib.contextmanager
    def _warning_of_checkpoints(self) -> Iterator[None]:
        """Say what could not be written and go on: training is worth more than the newest checkpoint."""
        try:
            yield
        except CheckpointError as error:
            self.say(f"WARNING: {error} Training goes on; the next checkpoint is tried when it is due.")

    def _start_checkpoint(self, step: int, *, in_background: bool = True) -> None:
        self.log_file.sync()
        self.books.turn_the_page(self.checkpoints.oldest)
        state = {"version": self.engine.get_version(), "held_out_scores": self.evaluations.scores}
        state |= {"evaluating": self.evaluations.steps_under_way} | self.books.state_dict()
        self.checkpoints.start(step, self._trained, state, in_background=in_background)

    def _stop_after(self, step: int) -> None:
        """Write the checkpoint of this place, where there is something new, and say how to go on."""
        self.checkpoints.finish(wait=True)
        if step > self.checkpoints.newest:
            self._start_checkpoint(step, in_background=False)
            self.checkpoints.finish(wait=True)
        why = self.notice.signal_name or "another rank's notice"
        self.say(f"stopped after step {step} on {why}; --resume auto continues the run")

    def publish(self) -> None:
        """Bring the servers to the engine's weights and version: all that take part, at least one.

        Servers that fail are left out, and those restarted since the last time take part again.
        """
        version, served_by = self.engine.get_version(), [[""]]
        watched = nullcontext() if self.supervisor is None else self.supervisor.publication()
        with watched:
            is_published, attempt = [False], 0
            while not is_published[0]:
                is_published, attempt = [True], attempt + 1
                if self.groups.is_main:
                    self.rollout.muster()
                try:
                    self.engine.update_weights(self.rollout if self.groups.is_main else None, version)
                except NoServerLeft as error:  # those that are restarted, or come back, get it in another attempt
                    if attempt == PUBLICATION_ATTEMPTS:
                        raise
                    logger.warning("%s", error)
                    is_published = [False]
                dist.broadcast_object_list(is_published, src=0, group=self.groups.control)
        if self.groups.is_main:
            served_by = [self.rollout.serving]
        # No head may ask for a reply before the servers have the version.
        dist.broadcast_object_list(served_by, src=0, group=self.groups.control)
        if self.rollout is not None and not self.groups.is_main:
            self.rollout.settle(served_by[0], version)

    def next_batch(self, step: int) -> TrajectoryBatch | None:
        """Return the step's trajectories on every rank, or None where a notice stops the run.

        A rollout that a notice cuts short is left, and so is the step: the checkpoint is that of its beginning.
        """
        own: TrajectoryBatch | None = None
        is_left = False
        with self.timers("rollout"):
            self.books.note_step()
            try:
                own = self.rollout_batch()
            except RuntimeError:
                if not self.notice.came():
                    raise
                is_left = True
            if self.config.run.checkpoint_every_steps > 0 and self.groups.any(is_left):
                self._stop_after(step)
                return None
            return self.exchange(own)

    def rollout_batch(self) -> TrajectoryBatch | None:
        """Generate this data head's part of the step's groups; None on ranks that drive no rollouts.

        A run takes each step's prompts in order, unless it is asynchronous or may replace some: then each head takes as
        many as it needs from its own share of the prompts, which its ledger hands out.
        """
        total, data = self.config.batch.prompts_per_step, self.groups.data
        first, last = data.rank * total // data.size, (data.rank + 1) * total // data.size
        if not self.config.rollout.takes_prompts_in_order:
            return self._roll_out(lambda r: r.prepare_batch(self.books.ledger, self.workflow, last - first))
        prompts = self.prompts.next_batch(total)
        return self._roll_out(lambda r: r.rollout_batch(prompts[first:last], self.workflow))

    def _roll_out(self, call: Callable[[RemoteSGLangEngine], TrajectoryBatch]) -> TrajectoryBatch | None:
        """Call this rank's rollout engine, where it has one, and return what that gives."""
        return self.wait_for(None if self.rollout is None else self._waiting.submit(call, self.rollout))

    def wait_for(self, pending: Future[T] | None) -> T | None:
        """Return the result of `pending`, None on ranks that have nothing to wait for.

        Should every server be lost meanwhile, it goes on waiting while all ranks publish the weights once more, to
        servers that were restarted.
        """
        stalled = torch.ones(1)
        while stalled:
            stalled.zero_()
            while pending is not None and not stalled and not wait([pending], SERVER_LOOK_S).done:
                stalled.fill_(self.rollout.needs_weights)
            dist.all_reduce(stalled, group=self.groups.control)
            if stalled:
                self.publish()
        return None if pending is None else pending.result()

    def exchange(self, batch: TrajectoryBatch | None) -> TrajectoryBatch:
        """Return the whole step's trajectories on every rank."""
        return exchange.gather(batch, self.groups)

    def score(self, batch: TrajectoryBatch) -> None:
        """Add the reward model's scores, where there is one, to the workflow's rewards; `model_rewards` keeps them."""
        if self.reward_model is None:
            return
        engine, shared = self.reward_model, self.config.batch.share_prompts
        with self.timers("score"):
            scores = exchange.by_sequence(batch, engine.groups, engine.score, share_prompts=shared)
        batch.sequences["model_rewards"] = scores
        batch.sequences["rewards"] = batch["rewards"] + self.config.reward_model.coefficient * scores

    def compute_advantages(self, batch: TrajectoryBatch) -> None:
        """Set `advantages`, and with a critic its `values` and `returns`."""
        if self.critic is None:
            self.actor.compute_advantages(batch)
        else:
            groups, shared = self.critic.engine.groups, self.config.batch.share_prompts
            with self.timers("values"):
                values = exchange.by_token(batch, groups, self.critic.values, share_prompts=shared)
            batch.tokens["values"] = values
            self.critic.compute_advantages(batch)

    def split(self, batch: TrajectoryBatch, step: int) -> list[TrajectoryBatch]:
        """Return this data-parallel rank's share of each of the policy's updates: none while the critic warms up."""
        return [] if step < self.config.critic.warmup_steps else self._shares(batch, step, self.groups)

    def _shares(self, batch: TrajectoryBatch, step: int, groups: parallel.ParallelGroups) -> list[TrajectoryBatch]:
        seed = self.config.run.seed * 1_000_003 + step
        options = self.config.batch
        return exchange.update_shares(
            batch, options.updates_per_step, groups, seed=seed, share_prompts=options.share_prompts
        )

    def update_critic(self, batch: TrajectoryBatch, step: int) -> list[StepStats]:
        """Train the critic, where there is one, on the same split of the step in its own layout."""
        if self.critic is None:
            return []
        if step < self.config.critic.warmup_steps:  # admission counts versions, so one passes though the policy stays
            self.engine.set_version(self.engine.get_version() + 1)
        with self.timers("critic"):
            return self.critic.update(self._shares(batch, step, self.critic.engine.groups))

    def evaluate(self, *, step: int) -> None:
        """Answer the held-out prompts greedily where it is time to, and log what is there."""
        if not self.evaluations.is_due(step):
            return
        with self.timers("evaluate"):
            if self.groups.is_main:
                self.evaluations.begin(step, self.rollout.evaluate(self.held_out, self.evaluation_workflow))
            if self.evaluations.are_waited_for(step):
                under_way = self.evaluations.replies_under_way
                self.wait_for(self._waiting.submit(wait, under_way) if self.groups.is_main else None)
            self.evaluations.log_finished()

    def log(
        self,
        step: int,
        batch: TrajectoryBatch,
        shares: list[TrajectoryBatch],
        stats: list[StepStats],
        critic_stats: list[StepStats],
    ) -> None:
        """Write the step's metrics. Means over the step's updates weigh trained tokens.

        RuntimeError where trainer and servers differ by more than correction.alarm.
        """
        version = self.engine.get_version()
        metrics = batch_metrics(batch, version - sum(stat.applied for stat in stats)) | {
            "policy/version": version,
            "batch/trained_tokens": sum(stat.weight for stat in stats or critic_stats),
        }
        if stats:
            metrics |= policy_metrics(stats)
        differences = mismatch_metrics(shares, stats, version, self.groups)
        metrics |= differences
        if critic_stats:
            metrics |= critic_metrics(critic_stats)
        if self.groups.is_main:
            self.evaluations.log_finished()
            metrics |= self.rollout.metrics() | self.books.metrics()
        metrics |= self.timers.snapshot()
        samples = decode_samples(self.tokenizer, batch, SAMPLES_LOGGED) if self.groups.is_main else []
        self.log_file.log_step(step, metrics, samples)
        mismatch.check_alarm(differences, self.config.correction.alarm)

    def save(self, *, step: int) -> None:
        """Write HF weights where it is time to."""
        options = self.config.run
        is_last = step == options.steps
        if (is_last and options.save_at_end) or (options.save_every_steps and step % options.save_every_steps == 0):
            with self.timers("save"):
                name = "final" if is_last else f"step-{step}"
                self.engine.save(self.folder / name)
                if self.critic is not None:
                    self.critic.engine.save(self.folder / f"{name}-critic")

    def finish(self) -> None:
        """Wait for the last checkpoint, write the report and say what the run achieved."""
        with self._warning_of_checkpoints():
            self.checkpoints.finish(wait=True)
        self.log_file.close()
        if self.groups.is_main:
            report = write_report(self.folder)
            if self.evaluations.scores:
                before, after = self.evaluations.scores[0], self.evaluations.scores[-1]
                self.say(f"held-out accuracy {before:.2f} -> {after:.2f} after {self.config.run.steps} steps")
            self.say(f"report: {report}")
