"""The complete config of a run, and the rules between its sections."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.algorithm_section import (
    COMPARE_GROUP,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    DemonstrationsConfig,
    PreferenceConfig,
    RewardModelConfig,
    RewardShapingConfig,
    SupervisedConfig,
)
from megatron_rl.config.data_section import DataConfig, EvalConfig, WarmStartConfig
from megatron_rl.config.given import MAIN, GivenPath, name_of_main
from megatron_rl.config.model_section import (
    PIPELINE_CUTS,
    BatchConfig,
    DraftConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from megatron_rl.config.rollout_section import (
    COUNTS_LATE,
    FORGETS_COUNTS,
    MOST_CHANGED,
    MOST_REPORTED,
    NO_ORDER,
    UNADJUSTED,
    GenerationConfig,
    ReuseConfig,
    RolloutConfig,
)
from megatron_rl.config.rules import as_part_of
from megatron_rl.config.run_section import RunConfig, TelemetryConfig
from megatron_rl.config.teacher_section import POLICY, TeacherConfig

REMAX = "megatron_rl.workflows:ReMaxWorkflow"


@dataclass(kw_only=True)
class TrainConfig:
    """Config of a run, with one field per section of its YAML file. It is checked on construction.

    For example:

        config = load_config("configs/demo.yaml", ["run.steps=5", "optimizer.lr=1e-5"])
        config.optimizer.lr  # 1e-05
        print(config.to_yaml())
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    algo: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward_shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    demonstrations: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    supervised: SupervisedConfig = field(default_factory=SupervisedConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    run: RunConfig = field(default_factory=RunConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options that are passed to megatron.core's TransformerConfig, under the names of its fields."""

    def __post_init__(self) -> None:
        # Must come first: the checks below, and copies of this config, expect import paths only.
        self._trust_what_is_given()
        batch, samples = self.batch, self.generation.n_samples
        if self.supervised.answer and self.preference.loss:
            raise ValueError(
                f"supervised.answer = {self.supervised.answer!r}: preference.loss = {self.preference.loss!r} is set "
                f"too, and a run learns from answers or from pairs of replies; leave one of them out."
            )
        mixed = self.demonstrations
        if mixed.weight > 0 and self.learns_from_data:
            raise ValueError(
                f"demonstrations.weight = {mixed.weight}: {self.chosen_data} is set, and demonstrations are mixed into "
                f"steps of RL; leave one of them out."
            )
        if mixed.source and mixed.rows_per_step < batch.updates_per_step:
            raise ValueError(
                f"demonstrations.rows_per_step = {mixed.rows_per_step}: each of batch.updates_per_step = "
                f"{batch.updates_per_step} needs one at least; raise it."
            )
        if self.data.max_tokens > 0 and not self.learns_from_data:
            raise ValueError(
                f"data.max_tokens = {self.data.max_tokens}: counts the tokens of replies too, and the prompts of RL "
                f"bring none; set data.max_prompt_tokens, or leave it out."
            )
        thinks, own = self.data.template_args.get("enable_thinking"), self.rollout.workflow_args.get("enable_thinking")
        if thinks is not None and own is not None and thinks != own:
            raise ValueError(
                f"data.template_args.enable_thinking = {thinks}: rollout.workflow_args.enable_thinking is {own}; leave "
                f"one of them out."
            )
        if self.data.sampling != "all" and self.learns_from_data:
            raise ValueError(
                f"data.sampling = {self.data.sampling!r}: follows the rewards of RL, and {self.chosen_data} trains on "
                f"data; leave it out."
            )
        if not self.learns_from_data:
            self._check_sampling()
        if self.algo.routing_replay != "off":
            self._check_routing_replay()
        if batch.prompts_per_step * samples < batch.updates_per_step:
            raise ValueError(
                f"batch.updates_per_step = {batch.updates_per_step}: a step has batch.prompts_per_step x "
                f"generation.n_samples = {batch.prompts_per_step} x {samples} trajectories, and every update needs one "
                f"at least; lower it."
            )
        if self.algo.advantage in COMPARE_GROUP and samples < 2 and not self.learns_from_data:
            raise ValueError(
                f"generation.n_samples = {samples}: algo.advantage = {self.algo.advantage} compares the replies of one "
                f"prompt and needs 2 or more; raise it, or set algo.advantage=reinforce."
            )
        if self.algo.advantage == "none" and not self.teacher.is_there:
            raise ValueError(
                "algo.advantage = 'none': learns from no reward, and there is no teacher to learn from; set "
                "teacher.path, or take an estimator."
            )
        if any(it.servers for it in self.teacher.teachers.values()) and self.generation.temperature != 1:
            raise ValueError(
                f"generation.temperature = {self.generation.temperature}: teacher servers compute log-probabilities at "
                f"temperature 1, which could not be compared with the policy's; set it to 1, or load the teacher by "
                f"teacher.path."
            )
        if self.has_critic and self.algo.advantage_args:
            raise ValueError(
                f"algo.advantage_args = {self.algo.advantage_args}: gae's options are critic.discount, "
                f"critic.trace_decay and others of the section critic; set them there."
            )
        if self.reward_shaping.overlong_buffer > self.generation.max_new_tokens:
            raise ValueError(
                f"reward_shaping.overlong_buffer = {self.reward_shaping.overlong_buffer}: every reply of "
                f"generation.max_new_tokens = {self.generation.max_new_tokens} would be overlong; lower it."
            )
        if self.rollout.max_uniform_resamples > 0 and samples < 2:
            raise ValueError(
                f"rollout.max_uniform_resamples = {self.rollout.max_uniform_resamples}: with generation.n_samples = 1 "
                f"every group is uniform; raise it, or leave the key out."
            )
        if self.rollout.max_uniform_resamples > 0 and (source := self._learns_from_equal_rewards):
            raise ValueError(
                f"rollout.max_uniform_resamples = {self.rollout.max_uniform_resamples}: throws groups with equal "
                f"rewards away, and {source} trains them; set it to 0, or leave that out."
            )
        if self.rollout.journal_replies and self.run.checkpoint_every_steps == 0:
            raise ValueError(
                "rollout.journal_replies = true: a run with run.checkpoint_every_steps = 0 is not resumed and keeps no "
                "journal; set that, or leave the key out."
            )
        if self.learns_from_data and set(self.telemetry.record_steps) - {"on_alarm"}:
            self.telemetry.refuse("record_steps", f"records steps of RL, and {self.chosen_data} is set; leave it out")
        if self.reuse.groups_per_step > 0:
            self._refuse_a_reuse_that_cannot_be()
        # A reward model scores the batch, and ReMax keeps its greedy replies out of the batch unless told otherwise.
        hides_greedy = self.rollout.workflow == REMAX and not self.rollout.workflow_args.get("keep_greedy", False)
        if self.algo.advantage == "remax" and self.reward_model.path and hides_greedy:
            raise ValueError(
                f"reward_model.path = {self.reward_model.path!r}: scores trajectories, and the greedy reply that "
                f"algo.advantage = remax compares them with is not one of them; set "
                f"rollout.workflow_args.keep_greedy=true."
            )
        if self.critic.warmup_steps >= self.run.steps:
            raise ValueError(
                f"critic.warmup_steps = {self.critic.warmup_steps}: the policy would not be trained in any of the "
                f"run.steps = {self.run.steps}; lower it."
            )
        updates = (self.run.steps - self.critic.warmup_steps) * batch.updates_per_step
        if updates < self.optimizer.warmup_updates:
            raise ValueError(
                f"optimizer.warmup_updates = {self.optimizer.warmup_updates}: the policy has only (run.steps - "
                f"critic.warmup_steps) x batch.updates_per_step = {updates} updates; lower it."
            )
        # Set options that nothing reads most likely mean a mistake in algo.advantage.
        if not self.has_critic and self.critic != CriticConfig():
            raise ValueError(
                f"critic: algo.advantage = {self.algo.advantage!r} has no critic, and its options are set; set "
                f"algo.advantage=gae, or leave the section out."
            )

        if self.lora.rank > 0 and self.warm_start.updates > 0:
            raise ValueError(
                f"warm_start.updates = {self.warm_start.updates}: trains the weights that lora.rank = {self.lora.rank} "
                f"freezes; start from a model that megatron-rl sft has trained, or leave one of them out."
            )

        if self.lora.path and self.lora.rank == 0:
            raise ValueError(
                f"lora.path = {self.lora.path!r}: lora.rank = 0 trains the whole model; set lora.rank to that of the "
                f"folder, or merge the adapters into model.path first."
            )
        if self.rollout.publication == "adapters" and self.lora.rank == 0:
            raise ValueError(
                "rollout.publication = 'adapters': lora.rank = 0 trains the whole model; set lora.rank, or publish by "
                "group."
            )
        self._check_draft()
        self._refuse_offload_of_what_moves()
        layouts = (self.parallel, self.critic.parallel, self.reward_model.parallel)
        cut = next((key for key in PIPELINE_CUTS if self.megatron.get(key)), None)
        if cut and all(layout.pipeline == 1 for layout in layouts):
            raise ValueError(
                f"megatron.{cut} = {self.megatron[cut]!r}: cuts a pipeline, and no model has one; set "
                f"parallel.pipeline, or leave it out."
            )

    def _check_draft(self) -> None:
        """Raise ValueError for a draft head that no server could use."""
        key = f"draft.kind = {self.draft.kind!r}"
        if self.draft.kind != "eagle" or self.learns_from_data:  # mtp: no server decodes with it
            return
        if self.rollout.backend == "sglang" and self.generation.counts_tokens:
            raise ValueError(
                f"{key}: while SGLang decodes with a draft head, its penalties count tokens too late; set generation's "
                f"penalties to their defaults, or draft.kind=none, or rollout.backend=embedded."
            )
        if self.rollout.publication == "adapters":
            raise ValueError(
                f"{key}: rollout.publication = adapters sends only the adapters of lora; set rollout.publication=group."
            )
        if self.rollout.exact:
            raise ValueError(f"{key}: rollout.exact = true has no sums of a fixed order for it; leave one of them out.")

    def _refuse_offload_of_what_moves(self) -> None:
        """Raise ValueError for an optimizer on the host if its engine also leaves the GPU as a whole."""
        shares = "run.offload" if self.run.offload else "rollout.colocated" if self.rollout.colocated else ""
        if not shares or self.learns_from_data:
            return
        for name, options in {"optimizer": self.optimizer, "critic.optimizer": self.critic.optimizer}.items():
            if options.megatron.get("optimizer_cpu_offload"):
                raise ValueError(
                    f"{name}.megatron.optimizer_cpu_offload = True: with {shares} = true the whole engine moves to the "
                    f"host while others use its GPU; leave it out, or set {shares}=false."
                )

    def _refuse_a_reuse_that_cannot_be(self) -> None:
        key = f"reuse.groups_per_step = {self.reuse.groups_per_step}"
        if self.learns_from_data:
            raise ValueError(f"{key}: reuses what RL has sampled, and {self.chosen_data} is set; leave it out.")
        if self.run.checkpoint_every_steps == 0:
            raise ValueError(
                f"{key}: the buffer's groups are those of the journal, and a run with run.checkpoint_every_steps = 0 "
                f"keeps none; set that, or leave the key out."
            )
        if self.correction.weight == "off":
            raise ValueError(
                f"{key}: an older policy has sampled what is reused, and correction.weight = off counts it as if the "
                f"policy of now had; set correction.weight=clamp or mask."
            )

    def _check_sampling(self) -> None:
        """Raise ValueError for sampling whose probabilities the trainer could not compute."""
        generation = self.generation
        own = "Evaluations have eval.top_p and eval.temperature of their own."
        if generation.greedy:
            raise ValueError(
                f"generation.greedy = true: every reply to a prompt would be the same, and its tokens would have "
                f"probability 1, so nothing could be learned; set it to false. {own}"
            )
        if generation.top_k == 1:
            raise ValueError(
                f"generation.top_k = 1: always samples the most likely token, so nothing could be learned; set it from "
                f"2 to {MOST_REPORTED}, or to -1. {own}"
            )
        if generation.computed_size:
            self._check_computed_supports()
            return
        if generation.top_k > MOST_REPORTED:
            raise ValueError(
                f"generation.top_k = {generation.top_k}: the trainer's log-probabilities are over the tokens that a "
                f"server sampled from, and a batch has room for {MOST_REPORTED} of them; lower it to that, or set it "
                f"to -1. {own}"
            )
        if generation.support_size:
            self._check_supports()
            self._check_counted_tokens()
            return
        if generation.changed_size:
            self._check_changed_tokens()
            self._check_counted_tokens()
        for name, everything in (("top_p", 1.0), ("min_p", 0.0), ("min_new_tokens", 0)):
            value = getattr(generation, name)
            or_computed = "" if name == "min_new_tokens" else "or generation.supports=computed, "
            if value != everything:
                raise ValueError(
                    f"generation.{name} = {value}: replies would be sampled from a part of the vocabulary, and trained "
                    f"with log-probabilities over all of it; set generation.top_k={MOST_REPORTED} or less too, so that "
                    f"servers report which tokens they sampled from, {or_computed}or set it to {everything}. {own}"
                )

    def _check_computed_supports(self) -> None:
        """Raise ValueError for options with which the trainer could not compute what a token was sampled from."""
        generation, rollout, key = self.generation, self.rollout, "generation.supports = computed"
        if self.teacher.is_there:
            raise ValueError(
                f"{key}: a teacher's distribution is over the whole vocabulary, and the policy's log-probabilities "
                f"would be over the tokens that top_k, top_p and min_p keep; leave these three out, or the teacher."
            )
        for name, nothing in {"min_new_tokens": 0, **UNADJUSTED}.items():
            if (value := getattr(generation, name)) != nothing:
                raise ValueError(
                    f"generation.{name} = {value}: the trainer computes only what top_k, top_p and min_p exclude; set "
                    f"generation.supports=reported and generation.top_k={MOST_REPORTED} or less, or set it to "
                    f"{nothing}."
                )
        own, from_others = "the trainer computes supports with the step's weights", "replies that older weights sampled"
        if rollout.max_staleness > 0:
            raise ValueError(
                f"{key}: {own}, but rollout.max_staleness = {rollout.max_staleness} allows {from_others}; set it to 0."
            )
        if rollout.oversample > 1 and rollout.stale != "drop":
            raise ValueError(
                f"{key}: {own}, but rollout.oversample = {rollout.oversample} with rollout.stale = {rollout.stale} "
                f"allows {from_others}; set rollout.stale=drop."
            )
        if self.reuse.groups_per_step > 0:
            raise ValueError(
                f"{key}: {own}, but reuse.groups_per_step = {self.reuse.groups_per_step} allows {from_others}; set it "
                f"to 0."
            )

    def _check_supports(self) -> None:
        """Raise ValueError for options that need log-probabilities over the whole vocabulary."""
        key = f"generation.top_k = {self.generation.top_k}"
        if self.teacher.is_there:
            raise ValueError(
                f"{key}: a teacher's distribution is over the whole vocabulary, and the policy's log-probabilities "
                f"would be over the tokens that servers kept; set it to -1, or leave the teacher out."
            )
        if self.rollout.router:
            raise ValueError(
                f"{key}: rollout.router passes on only the fields that it knows, and the request for the tokens that a "
                f"server sampled from is not one of them; set it to -1, or leave rollout.router out."
            )

    def _check_changed_tokens(self) -> None:
        """Raise ValueError for changes of the whole vocabulary's logits that the trainer could not repeat."""
        generation = self.generation
        name, nothing = next(it for it in UNADJUSTED.items() if getattr(generation, it[0]) != it[1])
        key = f"generation.{name} = {getattr(generation, name)}"
        if generation.changed_size > MOST_CHANGED:
            counted = (
                f" and generation.max_new_tokens = {generation.max_new_tokens}" if generation.counts_tokens else ""
            )
            raise ValueError(
                f"{key}: without generation.top_k, a batch has room for {MOST_CHANGED - 1} tokens whose logits change, "
                f"and {len(generation.logit_bias)} biases{counted} need {generation.changed_size - 1}; set "
                f"generation.top_k={MOST_REPORTED} or less, or set it to {nothing}."
            )
        if self.teacher.is_there:
            raise ValueError(
                f"{key}: a teacher's distribution is of logits that nothing changed; set it to {nothing}, or leave the "
                f"teacher out."
            )
        if self.rollout.router:
            raise ValueError(
                f"{key}: rollout.router passes on only the fields that it knows, and this has not been tried; set it "
                f"to {nothing}, or leave rollout.router out."
            )

    def _check_counted_tokens(self) -> None:
        """Raise ValueError for penalties whose counts of tokens an SGLang server would not keep."""
        if self.rollout.backend != "sglang" or not self.starts_servers or not self.generation.counts_tokens:
            return
        name = next(name for name, nothing in UNADJUSTED.items() if getattr(self.generation, name) != nothing)
        key = f"generation.{name} = {getattr(self.generation, name)}"
        if "--disable-overlap-schedule" not in self.rollout.server_args:
            raise ValueError(f"{key}: {COUNTS_LATE}; add --disable-overlap-schedule to rollout.server_args.")
        if self.generation.mixes_penalties:
            raise ValueError(f"{key}: {NO_ORDER}; set it to 1, or the others to 0.")
        if self.rollout.interruption == "retract":
            raise ValueError(f"{key}: {FORGETS_COUNTS}; set rollout.interruption=abort.")

    def _check_routing_replay(self) -> None:
        key = f"algo.routing_replay = {self.algo.routing_replay!r}"
        if self.learns_from_data:
            raise ValueError(f"{key}: {self.chosen_data} has replies that no server has sampled; remove it.")
        if any(teacher.path == POLICY for teacher in self.teacher.teachers.values()):
            raise ValueError(
                f"{key}: a teacher that is the policy itself reads prompts for which no server has reported routes; "
                f"remove one of the two."
            )
        if self.rollout.interruption == "retract" and self.rollout.max_staleness > 0:
            raise ValueError(
                f"{key}: with rollout.interruption = 'retract' a server reads an interrupted reply again with new "
                f"weights, and reports the new routes for tokens that the old weights sampled; set "
                f"rollout.interruption=abort, or rollout.max_staleness=0."
            )
        if self.algo.routing_replay == "experts_and_weights" and not self.rollout.starts_servers:
            raise ValueError(
                f"{key}: SGLang tells experts alone, and weights through a plugin of the servers that a run starts; "
                f"set it to experts, or leave rollout.servers and rollout.registry out."
            )

    def _trust_what_is_given(self) -> None:
        """Add to run.import_from the modules of functions that Python code passed, since that code is trusted."""
        allowed = [name_of_main("run.import_from", MAIN) if it == MAIN else it for it in self.run.import_from]
        for path in (self.rollout.reward, *(part.get("reward") for part in self.rollout.recipe)):
            module = path.partition(":")[0] if isinstance(path, GivenPath) else ""
            if module and module.partition(".")[0] != "megatron_rl" and module not in allowed:
                allowed.append(module)
        # Replace the sections instead of changing them: another config may share them.
        if allowed != list(self.run.import_from):
            self.run = dataclasses.replace(self.run, import_from=allowed)
        recipe = [{**part, "reward": str(part["reward"])} if "reward" in part else part for part in self.rollout.recipe]
        self.rollout = dataclasses.replace(self.rollout, reward=str(self.rollout.reward), recipe=recipe)

    @property
    def _learns_from_equal_rewards(self) -> str:
        """Setting that lets groups with equal rewards still contribute to training; empty if there is none."""
        if source := self.algo.learns_from_equal_rewards:
            return source
        if self.teacher.is_there:
            return "a teacher"
        if self.reward_model.path:  # it scores trajectories after the groups were compared
            return f"reward_model.path = {self.reward_model.path!r}"
        # Rows of a source are trained in any case; this is about tokens that a workflow marks.
        mixed = self.demonstrations
        return f"demonstrations.weight = {mixed.weight:g}" if mixed.weight > 0 and not mixed.source else ""

    @property
    def collective_timeout_s(self) -> float:
        """Timeout for a collective of the trainer's ranks.

        It is long enough that the hang watch reports late ranks first. Ranks may also wait in a collective while
        servers start before the first phase.
        """
        starting_s = self.rollout.start_timeout_s * (1 + self.rollout.server_restarts)
        return max(self.run.phase_timeout_s, starting_s) + self.run.grace_s + 600.0

    @property
    def evaluation_generation(self) -> GenerationConfig:
        """Sampling parameters for evaluation."""
        if self.eval.temperature == 0:
            return self.generation.new(greedy=True, n_samples=1, top_p=1.0, top_k=-1, min_p=0.0)
        options = {"temperature": self.eval.temperature, "top_p": self.eval.top_p, "top_k": -1, "min_p": 0.0}
        return self.generation.new(greedy=False, n_samples=self.eval.samples_per_prompt, **options)

    @property
    def starts_servers(self) -> bool:
        """True if the run starts rollout servers itself. A run that learns from data needs none."""
        return self.rollout.starts_servers and not self.learns_from_data

    @property
    def learns_from_data(self) -> bool:
        """True if the rows of data.train contain what is learned (answers or pairs); False for RL."""
        return bool(self.supervised.answer or self.preference.loss)

    @property
    def chosen_data(self) -> str:
        """Name and value of the option that makes this run train on stored data instead of rollouts, for messages."""
        if self.supervised.answer:
            return f"supervised.answer = {self.supervised.answer!r}"
        return f"preference.loss = {self.preference.loss!r}"

    @property
    def has_critic(self) -> bool:
        return self.algo.advantage == "gae"

    @property
    def advantage_args(self) -> dict[str, Any]:
        """Keyword arguments of the estimator: from `critic` for gae, otherwise from `algo.advantage_args`.

        For gdpo, the weights default to the recipe's.
        """
        if self.algo.advantage == "gdpo":
            return {"weights": self.rollout.weights} | self.algo.advantage_args
        if not self.has_critic:
            return self.algo.advantage_args
        names = ("discount", "trace_decay", "level", "decoupled", "length_factor")
        return {name: getattr(self.critic, name) for name in names}

    @property
    def critic_engine(self) -> EngineConfig:
        """Options of the critic's engine: the policy's, except for model, layout and optimizer."""
        critic, own = self.critic, ModelConfig(path=self.critic.model, dtype=self.model.dtype)
        model = own if critic.model else self.model
        engine = dataclasses.replace(self.unrouted, parallel=critic.parallel, optimizer=critic.optimizer)
        return dataclasses.replace(engine, model=model, lora=LoraConfig())

    @property
    def reward_engine(self) -> EngineConfig:
        model = ModelConfig(path=self.reward_model.path, dtype=self.model.dtype)
        return dataclasses.replace(self.unrouted, model=model, parallel=self.reward_model.parallel, lora=LoraConfig())

    def teacher_engine(self, path: str) -> EngineConfig:
        """Return options of a teacher's engine: the policy's, including the layout, except for the model."""
        model = dataclasses.replace(self.model, path=path, init="hf")
        return dataclasses.replace(self.unrouted, model=model, lora=LoraConfig())

    @property
    def may_use_transformer_engine(self) -> bool:
        """False if local layers are chosen and no other option asks for Transformer Engine."""
        optimizers = [
            it.megatron.get("use_precision_aware_optimizer") for it in (self.optimizer, self.critic.optimizer)
        ]
        kernels = [self.megatron.get(name) for name in ("moe_permute_fusion", "moe_router_fusion")]
        asks = self.model.flash_attention == "TE" or any(optimizers) or any(kernels)
        return self.model.transformer_impl != "local" or asks

    @property
    def unrouted(self) -> EngineConfig:
        """The policy's options for other models, which do not replay the server's routing and have no draft head."""
        return dataclasses.replace(self.actor, routing_replay="off", draft=DraftConfig())

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError if a layout does not divide the number of processes."""
        self.parallel.check_world_size(world_size)
        if self.has_critic:
            with as_part_of("critic.parallel"):
                self.critic.parallel.check_world_size(world_size)
        if self.reward_model.path:
            with as_part_of("reward_model.parallel"):
                self.reward_model.parallel.check_world_size(world_size)

    @property
    def actor(self) -> EngineConfig:
        return EngineConfig(
            model=self.model,
            parallel=self.parallel,
            optimizer=self.optimizer,
            lora=self.lora,
            draft=self.draft,
            tokens_per_microbatch=self.batch.tokens_per_microbatch,
            allow_longer_sequences=self.batch.allow_longer_sequences,
            share_prompts=self.batch.share_prompts,
            routing_replay=self.algo.routing_replay,
            exact=self.rollout.exact,
            seed=self.run.seed,
            bucket_bytes=self.rollout.bucket_bytes,
            publication=self.rollout.publication,
            publication_folder=f"{self.run.folder}/published",
        )

    def to_yaml(self) -> str:
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.structured(self))
