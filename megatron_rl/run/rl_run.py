"""Builds the parts of an RL run from its config. RLRun has the methods that the loop in `megatron_rl.train` calls.

Start-up order: checks (no process, no GPU), process group, servers, engines. All ranks must call every method.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl import support
from megatron_rl.algo import mismatch
from megatron_rl.algo.reward_shaping import add_scores, take_out_greedy
from megatron_rl.batch import exchange
from megatron_rl.batch.step_batch import StepBatch
from megatron_rl.config import TrainConfig
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.life import process_exit
from megatron_rl.life.signs_of_life import Look
from megatron_rl.ops import TeacherTargets
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.rollout_rank import RolloutRank
from megatron_rl.run.checks import check, check_greedy
from megatron_rl.run.computed_supports import add_computed_supports
from megatron_rl.run.device_sharing import DeviceSharing
from megatron_rl.run.evaluation import Evaluations, decode_samples, draw
from megatron_rl.run.rl_models import build_models, policy_updates
from megatron_rl.run.rollouts import RolloutProcesses, Rollouts
from megatron_rl.run.run import Run
from megatron_rl.run.run_checkpoints import PromptResumeState
from megatron_rl.run.step_metrics import (
    batch_metrics,
    critic_metrics,
    mismatch_metrics,
    policy_metrics,
    publication_metrics,
    trained_tokens,
    user_metrics,
)
from megatron_rl.run.step_records import StepRecorder
from megatron_rl.run.step_traces import StepTraces
from megatron_rl.run.warm_start import WarmStart
from megatron_rl.telemetry import stats_tracker
from megatron_rl.telemetry.rollout_metrics import metrics_of
from megatron_rl.types import StepStats, TrajectoryBatch

DIES_BEFORE_STOP_SIGNAL_S = 1.0
"""Seconds to wait for a stop signal after servers have died. Some schedulers signal every process of a job, so servers
may die shortly before this process receives the signal."""


class RLRun(Run):
    """All parts of one RL run on this rank.

        with RLRun(load_config("configs/demo.yaml", [])) as run:
            run.begin()
            batch = run.next_batch(0)
            run.compute_advantages(run.add_reward_model_scores(batch))

    `megatron_rl.train` has the whole loop.
    """

    engine: MegatronEngine
    rollouts: Rollouts

    def __init__(self, config: TrainConfig, *, resume: str = "", ends_process: bool = True) -> None:
        super().__init__(config, resume=resume, ends_process=ends_process)
        self.has_hung = False
        """True once a rollout has lasted too long and was abandoned."""
        self.trained_version = 0
        """Policy version when this step's batch was taken."""
        self.supports: dict[str, float] = {}
        """Metrics of this step's supports (the tokens left by top-k, top-p and min-p), if the trainer computed them."""
        self.is_built = False
        """True once models and rollouts exist."""

    @property
    def is_ending(self) -> bool:
        """True once this rank knows of a stop signal or a hang. After that, waiting for replies or servers may fail."""
        return self.stop_signal.came() or self.has_hung

    # -- start and end ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        config = self.config
        self.tokenizer, self.train_prompts, held_out = check(config)
        self._join()
        replicas, prompts_per_step = self.groups.data.size, config.batch.prompts_per_step
        if prompts_per_step < replicas:
            raise ValueError(
                f"batch.prompts_per_step = {prompts_per_step}: each of the {replicas} data-parallel replicas drives "
                f"rollouts and needs one prompt at least; raise it, or start fewer ranks."
            )
        self.processes = RolloutProcesses(config, self.groups, on_death=self._on_death, say=self.say)
        self.at_end.push(self._stop_rollouts)  # before `_open`, so that it runs after the cleanup of `_open`
        self._open(
            on_half_time=self._leave_on_stop_signal,
            waits_for=lambda phase: self.rollouts.waits_for(phase) if self.is_built else "",
            can_leave="rollout" if config.run.checkpoint_every_steps > 0 else "",
            on_leave=self._leave_hung_rollout,
        )
        self.evaluations = Evaluations(config, held_out, self.log_file, self.tokenizer)
        self.prompts = PromptIterator(
            self.train_prompts, seed=config.run.seed, shuffle=config.data.shuffle, weights=config.data.weights
        )
        self.resume_state = PromptResumeState(config, self.prompts, self.groups, self.resumed)
        together = [prompt for prompts in held_out.values() for prompt in prompts]
        self.processes.start(self.tokenizer, self.prompts, together, self.resume_state)
        processes, process = self.processes, self.processes.process
        self.devices = DeviceSharing(
            config,
            self.groups,
            self.timers,
            processes.supervisor,
            process,
            nodes=processes.nodes,
            dropped=processes.dropped,
        )
        self.devices.give_to_trainer()  # so that the engines find the memory free
        self._build_models(self.train_prompts, self.tokenizer)
        self.rollouts = Rollouts(
            config, self.groups, self.processes, self.devices, self.engine, is_ending=lambda: self.is_ending
        )
        self.is_built = True
        self.traces = StepTraces(config, self.groups, self.timers, self.engine, process, say=self.say)
        self.records = StepRecorder(config, self.groups, self.trained, self.timers, say=self.say)
        self.at_end.push(self._record_alarm)
        self.warm_start = WarmStart(
            config,
            self.groups,
            self.engine,
            self.train_prompts,
            self.tokenizer,
            measure=(lambda: self.rollouts.mean_reward(config.generation.new(n_samples=2))) if together else None,
            say=self.say,
            check=lambda stats: self.check_updates("policy", [stats]),
        )

    def _record_alarm(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the step records that are still in memory to disk if an error ends the run."""
        if kind is not None and issubclass(kind, Exception):
            self.records.alarm()

    def _looks(self) -> list[Look]:
        return [*super()._looks(), self.processes.silent]

    def _stop_rollouts(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self.is_built and self.engine.publisher is not None and error_type is None:
            self.engine.publisher.close()  # servers that outlive this run then forget its group
        self.processes.stop()

    def _on_death(self, message: str) -> None:
        """End the run because its servers or its rollout process have died. After a stop signal, save first.

        If `ends_process` is False, only the current step fails.
        """
        if self.stop_signal.came(within_s=DIES_BEFORE_STOP_SIGNAL_S):
            self._leave_on_stop_signal()
        elif self.ends_process:
            process_exit.stop(message)
        else:
            self.processes.leave_step(message)

    def _leave_on_stop_signal(self) -> None:
        self.processes.leave_step(f"{self.stop_signal.signal_name or 'a stop signal'}: the run is about to be ended.")

    def _build_models(self, prompts: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> None:
        models = build_models(
            self.config, self.groups, shared_device=self.devices.engines, prompts=prompts, tokenizer=tokenizer
        )
        self.engine, self.actor, self.reference = models.policy, models.actor, models.reference
        self.critic, self.critic_engine, self.reward_model = models.critic, models.critic_engine, models.reward_model
        self.teachers, self.demonstrations = models.teachers, models.demonstrations

    @staticmethod
    def _groups_of(engine: MegatronEngine | None) -> ParallelGroups:
        assert engine is not None and engine.groups is not None
        return engine.groups

    # -- the loop's parts ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Bring models and servers to the state of the first step: resumed from a checkpoint, or warm-started."""
        if self.resumed:
            self.load_checkpoint()
            self.evaluations.scores = self.resumed["held_out_scores"]
            self._continue_algorithm(self.resumed)
        else:
            self._begin_from_warm_start()
        for fault in self.processes.on_main.journal_faults() if self.groups.is_main else []:
            self.say(f"rollout journal: {fault}; the prompts of what is missing are sampled again.")
        with self.timers("publish"):  # before the first request: servers that the run started have no weights yet
            self.rollouts.publish()
        # A checkpoint may be written while its step's evaluation is unfinished.
        if not self.resumed or self.first_step in self.resumed["evaluating"]:
            self.evaluate(step=self.first_step)
        starting_up = self.timers.snapshot()  # excludes start-up time from the first step
        stats_tracker.take()  # discards metrics logged while the rewards were tried out
        self.traces.begin(self.first_step)
        if self.resumed_from:
            self.say(f"the checkpoint took {starting_up['time/resume']:.1f} s to check and to load")

    def _begin_from_warm_start(self) -> None:
        """Warm-start the policy if the config asks for it. Copy its weights to the reference and the critic."""
        if not self.warm_start.run():
            return
        self.engine.reset_optimizer(policy_updates(self.config))
        self.engine.set_version(0)
        if isinstance(self.reference, MegatronEngine):  # with adapters, the reference is the policy's base model
            self.reference.copy_weights(self.engine)
        critic = None if self.config.critic.model else self.critic
        is_needed_later = self.reference is not None and self.config.run.checkpoint_every_steps > 0
        if critic is not None or is_needed_later:
            self.warm_start.save()
        if critic is not None:
            critic.engine.load(self.warm_start.folder)  # through files, because the layouts may differ

    def _continue_algorithm(self, state: dict[str, Any]) -> None:
        """Restore the algorithm's state from a checkpoint: all that a step depends on in addition to the engines."""
        self.actor.load_state_dict(state["algorithm"])
        self.demonstrations.load_state_dict(state)
        if isinstance(self.reference, MegatronEngine) and self.config.warm_start.updates > 0:
            self.warm_start.load(self.reference)

    @property
    def trained(self) -> dict[str, MegatronEngine]:
        return {"policy": self.engine} | ({"critic": self.critic_engine} if self.critic_engine is not None else {})

    def checkpoint(self, *, step: int) -> bool:
        # Before the checkpoint, which must hold the position in the prompts between this step and the next.
        self.resume_state.note_step(self.processes.process)
        return super().checkpoint(step=step)

    def _state(self) -> dict[str, Any]:
        if self.processes.process is not None:  # entries older than the oldest checkpoint are useless
            self.processes.process.rotate_journal(self.checkpoints.oldest)
        state = {"version": self.engine.get_version(), "held_out_scores": self.evaluations.scores}
        state |= {"evaluating": self.evaluations.steps_under_way, "algorithm": self.actor.state_dict()}
        return state | self.demonstrations.state_dict() | self.resume_state.state_dict()

    def _leave_hung_rollout(self, message: str) -> None:
        """Abandon the current rollout, because it has lasted too long although nothing else is wrong.

        Callable from any thread.
        """
        self.has_hung = True
        self.say(message)
        self.processes.leave_step(message)

    def next_batch(self, step: int) -> StepBatch | None:
        """Return the step's trajectories; None if a stop signal ends the run early.

        Every rank has the per-trajectory columns of all trajectories, but only the tokens on which its replica trains.
        If a stop signal or the time limit cuts a rollout short, the whole step is abandoned. The checkpoint then has
        the state at the step's start.
        """
        own: TrajectoryBatch | None = None
        is_left = False  # on this rank; other ranks may have their replies
        self.trained_version = self.engine.get_version()
        with self.timers("rollout"):
            self.resume_state.note_step(self.processes.process)  # an abandoned step restarts here
            try:
                self.rollouts.give_to_servers()
                process = self.processes.process
                pending = [process.rpc.start(RolloutRank.prepare_batch)] if process is not None else []
                self.rollouts.wait_for(pending)  # on all ranks: next, the trainer takes the devices from the servers
                self.devices.give_to_trainer()
                own = pending[0].result() if pending else None
            except RuntimeError:
                if not self.is_ending:
                    raise
                is_left = True
            if self.groups.any(is_left):
                self.stop_after(step, "a hang" if self.has_hung else "")
                return None
            if own is not None and self.reward_model is None:
                own = take_out_greedy(own)  # not needed for any computation, so their tokens are not exchanged
            options = self.config.batch
            batch = exchange.share_out(
                own,
                self.groups,
                updates=options.updates_per_step,
                seed=self.config.run.seed * 1_000_003 + step,  # from the step alone, so that a resumed run splits alike
                share_prompts=options.share_prompts,
            )
            if self.config.generation.support_size:
                support.check_complete(
                    *(batch.tokens.get(support.COLUMN), batch["input_ids"], batch["loss_mask"]),
                    adjustment=batch.tokens.get(support.ADJUSTMENT),
                    is_adjusted=self.config.generation.adjustment_size > 0,
                )
            elif self.config.generation.changed_size:
                support.check_adjusted(batch.tokens.get(support.ADJUSTMENT))
        rows = self.prompts.prompts
        self.records.begin(step, batch, prompts=rows, oldest_checkpoint=lambda: self.checkpoints.oldest)
        return batch

    def add_reward_model_scores(self, batch: StepBatch) -> StepBatch:
        """Add the reward model's scores, if there is one, to the rewards. Return the trajectories on which to train."""
        check_greedy(self.config, batch)  # before the greedy replies are removed below
        if self.reward_model is not None:
            with self.timers("score"):
                scores = batch.in_layout(self._groups_of(self.reward_model)).by_sequence(self.reward_model.score)
            add_scores(batch, scores, coefficient=self.config.reward_model.coefficient)
        trained = take_out_greedy(batch)
        assert isinstance(trained, StepBatch)
        return trained

    def compute_advantages(self, batch: StepBatch) -> None:
        """Set the batch's column `advantages` and, if there is a critic, `values` and `returns`.

        If the trainer computes supports, their column is set as well.
        """
        if self.critic is not None:
            with self.timers("values"):
                there = batch.in_layout(self._groups_of(self.critic_engine))
                there.tokens["values"] = self.critic.values(there.own())
                batch.tokens["values"] = batch.taken_from(there, there["values"])
        if self.config.generation.computed_size:
            with self.timers("supports"):
                self.supports = add_computed_supports(batch, self.engine, self.config.generation)
        for name in self.actor.columns_needed:
            if name == "teacher_logprobs":
                with self.timers("teacher"):
                    batch.tokens[name] = self.teachers.logprobs(batch)
                continue
            engine = self.reference if name == "ref_logprobs" else self.engine
            assert engine is not None
            temperature = self.config.generation.temperature / (2 if name == "cold_logprobs" else 1)
            with self.timers("first_pass"):
                batch.tokens[name] = engine.forward(batch.own(), temperature=temperature, entropy=name == "entropies")
        self.actor.compute_advantages(batch)

    def split_into_updates(self, batch: StepBatch, step: int) -> list[TrajectoryBatch]:
        """Return this data-parallel rank's share of each policy update. The list is empty while the critic warms up."""
        return [] if step < self.config.critic.warmup_steps else batch.shares()

    def add_demonstrations(self, batch: StepBatch, updates: list[TrajectoryBatch]) -> list[TrajectoryBatch]:
        """Add the demonstrations to the updates, as the config section `demonstrations` says.

        Call this just before the updates, because earlier forward passes must not include demonstrations.
        """
        return self.demonstrations.add(batch, updates)

    def teacher_targets(self, updates: list[TrajectoryBatch]) -> list[TeacherTargets] | None:
        """Return the teachers' targets for the tokens of each update; None unless teacher.kl_in is `loss`.

        Call this before the first update.
        """
        if not self.config.teacher.is_there or self.config.teacher.shapes_advantages:
            return None
        with self.timers("teacher"):
            return [self.teachers.targets(share) for share in updates]

    def update_critic(self, batch: StepBatch, step: int) -> list[StepStats]:
        """Train the critic, if there is one. Return the statistics of each of its updates.

        The batch is split into updates as it is for the policy, but in the critic's parallel layout.
        """
        if self.critic is None:
            return []
        if step < self.config.critic.warmup_steps:  # admission counts versions, so raise it without an update
            self.engine.set_version(self.engine.get_version() + 1)
        with self.timers("critic"):
            there = batch.in_layout(self._groups_of(self.critic_engine))
            there.tokens["returns"] = there.taken_from(batch, batch["returns"])
            return self.critic.update(there.shares())

    def evaluate(self, *, step: int) -> None:
        """Begin to answer the held-out prompts if an evaluation is due, and log the finished evaluations."""
        if not self.evaluations.is_due(step):
            return
        with self.timers("evaluate"):
            for replies in self.rollouts.evaluate(self.config.evaluation_generation):
                self.evaluations.begin(step, replies)
            if self.evaluations.are_waited_for(step):
                self.rollouts.wait_for(self.evaluations.replies_under_way)
            self.evaluations.log_finished(is_ending=self.is_ending)

    def log(
        self,
        step: int,
        batch: StepBatch,
        shares: list[TrajectoryBatch],
        stats: list[StepStats],
        critic_stats: list[StepStats],
    ) -> None:
        """Write the step's metrics. Means over the step's updates are weighted by trained tokens.

        Raises RuntimeError if log-probabilities of trainer and servers differ by more than correction.alarm, or if too
        many updates in a row were skipped.
        """
        metrics = (
            batch_metrics(batch, self.trained_version)
            | {
                "policy/version": self.engine.get_version(),
                "batch/trained_tokens": sum(trained_tokens(stat) for stat in stats or critic_stats),
            }
            | self.actor.metrics
            | self.supports
            | (self.resume_state.rates.metrics() if self.resume_state.rates is not None else {})
        )
        if stats:
            metrics |= policy_metrics(stats)
        if self.engine.draft is not None:
            metrics |= self.engine.draft.metrics()
        differences = mismatch_metrics(shares, stats, self.trained_version, self.groups)
        metrics |= differences
        if critic_stats:
            metrics |= critic_metrics(critic_stats)
        own = user_metrics(self.groups)
        counts = self.rollouts.counts()  # collective, so outside of the main rank's branch
        if self.groups.is_main:
            self.evaluations.log_finished(is_ending=self.is_ending)
            metrics |= metrics_of(counts) | own
            if self.engine.publisher is not None and self.engine.publisher.last is not None:
                metrics |= publication_metrics(self.engine.publisher.last)
        metrics |= self.timers.snapshot()  # this step's time ends here and the next one's begins
        metrics["rollout/trainer_idle_share"] = metrics["time/rollout"] / metrics["time/step"]
        self.traces.end(step)
        self.traces.begin(step + 1)
        drawn = draw(batch, self.config.telemetry.samples_logged, seed=self.config.run.seed * 1_000_003 + step)
        shown, samples = batch.shown(drawn), []
        if self.groups.is_main:
            samples = decode_samples(self.tokenizer, shown, prompts=self.prompts.prompts)
        self.log_file.log_step(step, metrics, samples)
        self.records.end(batch, {"policy": stats, "critic": critic_stats})
        # These may end the run, so they follow the log, which shows why.
        is_skipped = bool(stats) and not stats[0].applied
        mismatch.check_alarm(differences, self.config.correction.alarm, is_skipped=is_skipped)
        self.check_updates("policy", stats)
        self.check_updates("critic", critic_stats)

    def finish(self) -> None:
        if self.groups.is_main and self.evaluations.scores:
            self.say(f"{self.evaluations.change} after {self.config.run.steps} steps")
        super().finish()
