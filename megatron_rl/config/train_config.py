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
from megatron_rl.config.import_path import MAIN, GivenPath, name_of_main
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
from megatron_rl.config.rules import as_part_of, refuse
from megatron_rl.config.run_section import RunConfig, TelemetryConfig
from megatron_rl.config.teacher_section import POLICY, TeacherConfig

REMAX = "megatron_rl.workflows:ReMaxWorkflow"
WHOLE_OF_TEACHER = "a teacher's distribution is over the whole vocabulary, and the policy's would be over"


@dataclass(kw_only=True)
class TrainConfig:
    """Config of a run, with one field per section of its YAML file. It is checked on construction.

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
        # First, because the checks below, and copies of this config, expect import paths only.
        self._trust_what_is_given()
        self._check_data()
        if not self.learns_from_data:
            self._check_sampling()
        if self.algo.routing_replay != "off":
            self._check_routing_replay()
        self._check_algorithm()
        if self.rollout.max_uniform_resamples > 0:
            self._check_resamples()
        if self.rollout.journal_replies and self.run.checkpoint_every_steps == 0:
            rule = "a run with run.checkpoint_every_steps = 0 keeps no journal; set that, or leave the key out"
            self.rollout.refuse("journal_replies", rule)
        if self.learns_from_data and set(self.telemetry.record_steps) - {"on_alarm"}:
            self.telemetry.refuse("record_steps", f"records steps of RL, and {self.chosen_data} is set; leave it out")
        if self.reuse.groups_per_step > 0:
            self._check_reuse()
        self._check_models()
        self._check_draft()
        self._refuse_offload_of_what_moves()
        layouts = (self.parallel, self.critic.parallel, self.reward_model.parallel)
        cut = next((key for key in PIPELINE_CUTS if self.megatron.get(key)), None)
        if cut and all(layout.pipeline == 1 for layout in layouts):
            rule = "cuts a pipeline, and no model has one; set parallel.pipeline, or leave it out"
            refuse(f"megatron.{cut}", self.megatron[cut], rule)

    def _check_data(self) -> None:
        """Check the options that choose between RL and training on data, and those that only one of the two has."""
        data, mixed, updates = self.data, self.demonstrations, self.batch.updates_per_step
        if self.supervised.answer and self.preference.loss:
            rule = f"preference.loss = {self.preference.loss!r} is set too, and a run learns from one of the two"
            self.supervised.refuse("answer", f"{rule}; leave one of them out")
        if mixed.weight > 0 and self.learns_from_data:
            rule = f"{self.chosen_data} is set, and demonstrations are mixed into steps of RL; leave one of them out"
            mixed.refuse("weight", rule)
        if mixed.source and mixed.rows_per_step < updates:
            mixed.refuse("rows_per_step", f"each of batch.updates_per_step = {updates} needs one at least; raise it")
        if data.max_tokens > 0 and not self.learns_from_data:
            rule = "counts replies too, and the prompts of RL bring none; set data.max_prompt_tokens, or leave it out"
            data.refuse("max_tokens", rule)
        thinks, own = data.template_args.get("enable_thinking"), self.rollout.workflow_args.get("enable_thinking")
        if thinks is not None and own is not None and thinks != own:
            rule = f"rollout.workflow_args.enable_thinking is {own}; leave one of them out"
            refuse("data.template_args.enable_thinking", thinks, rule)
        if data.sampling != "all" and self.learns_from_data:
            rule = f"follows the rewards of RL, and {self.chosen_data} trains on data; leave it out"
            data.refuse("sampling", rule)

    def _check_algorithm(self) -> None:
        """Check the options of the algorithm against the size of a step and the teacher."""
        algo, batch, generation = self.algo, self.batch, self.generation
        prompts, samples = batch.prompts_per_step, generation.n_samples
        if prompts * samples < batch.updates_per_step:
            step = f"batch.prompts_per_step x generation.n_samples = {prompts} x {samples} trajectories"
            batch.refuse("updates_per_step", f"a step has {step}, and every update needs one at least; lower it")
        if algo.advantage in COMPARE_GROUP and samples < 2 and not self.learns_from_data:
            needs = f"algo.advantage = {algo.advantage} compares the replies of one prompt and needs 2 or more"
            generation.refuse("n_samples", f"{needs}; raise it, or set algo.advantage=reinforce")
        if algo.advantage == "none" and not self.teacher.is_there:
            rule = "learns from no reward, and there is no teacher; set teacher.path, or take an estimator"
            algo.refuse("advantage", rule)
        if any(it.servers for it in self.teacher.teachers.values()) and generation.temperature != 1:
            rule = "teacher servers compute log-probabilities at temperature 1; set it to 1, or use teacher.path"
            generation.refuse("temperature", rule)
        if self.has_critic and algo.advantage_args:
            rule = "gae's options are critic.discount, critic.trace_decay and others of the section critic; set those"
            algo.refuse("advantage_args", rule)
        if self.reward_shaping.overlong_buffer > generation.max_new_tokens:
            limit = f"generation.max_new_tokens = {generation.max_new_tokens}"
            self.reward_shaping.refuse("overlong_buffer", f"every reply of {limit} would be overlong; lower it")

    def _check_resamples(self) -> None:
        if self.generation.n_samples < 2:
            rule = "with generation.n_samples = 1 every group is uniform; raise that, or leave the key out"
            self.rollout.refuse("max_uniform_resamples", rule)
        if source := self._learns_from_equal_rewards:
            rule = f"throws groups with equal rewards away, and {source} trains them; set it to 0, or leave that out"
            self.rollout.refuse("max_uniform_resamples", rule)

    def _check_reuse(self) -> None:
        if self.learns_from_data:
            rule = f"reuses what RL has sampled, and {self.chosen_data} is set; leave it out"
            self.reuse.refuse("groups_per_step", rule)
        if self.run.checkpoint_every_steps == 0:
            rule = "the buffer's groups are those of the journal, and run.checkpoint_every_steps = 0 keeps none"
            self.reuse.refuse("groups_per_step", f"{rule}; set that, or leave the key out")
        if self.correction.weight == "off":
            rule = "an older policy sampled what is reused, and correction.weight = off counts it as the current one's"
            self.reuse.refuse("groups_per_step", f"{rule}; set correction.weight=clamp or mask")

    def _check_models(self) -> None:
        """Check the options of the critic, the reward model and the adapters."""
        critic, lora = self.critic, self.lora
        # A reward model scores the batch, and ReMax keeps its greedy replies out of the batch unless told otherwise.
        hides_greedy = self.rollout.workflow == REMAX and not self.rollout.workflow_args.get("keep_greedy", False)
        if self.algo.advantage == "remax" and self.reward_model.path and hides_greedy:
            rule = (
                "scores trajectories, and algo.advantage = remax compares them with a greedy reply that is not scored"
            )
            self.reward_model.refuse("path", f"{rule}; set rollout.workflow_args.keep_greedy=true")
        if critic.warmup_steps >= self.run.steps:
            rule = f"the policy would not be trained in any of the run.steps = {self.run.steps}; lower it"
            critic.refuse("warmup_steps", rule)
        updates = (self.run.steps - critic.warmup_steps) * self.batch.updates_per_step
        if updates < self.optimizer.warmup_updates:
            has = f"(run.steps - critic.warmup_steps) x batch.updates_per_step = {updates} updates"
            self.optimizer.refuse("warmup_updates", f"the policy has only {has}; lower it")
        # Set options that nothing reads most likely mean a mistake in algo.advantage.
        if not self.has_critic and critic != CriticConfig():
            raise ValueError(
                f"critic: algo.advantage = {self.algo.advantage!r} has no critic, and its options are set; set "
                f"algo.advantage=gae, or leave the section out."
            )
        if lora.rank > 0 and self.warm_start.updates > 0:
            rule = f"trains the weights that lora.rank = {lora.rank} freezes"
            way_out = "start from a model that megatron-rl sft has trained, or leave one of them out"
            self.warm_start.refuse("updates", f"{rule}; {way_out}")
        if lora.path and lora.rank == 0:
            rule = "lora.rank = 0 trains the whole model; set lora.rank, or merge the adapters into model.path first"
            lora.refuse("path", rule)
        if self.rollout.publication == "adapters" and lora.rank == 0:
            rule = "lora.rank = 0 trains the whole model; set lora.rank, or publish by group"
            self.rollout.refuse("publication", rule)

    def _check_draft(self) -> None:
        """Refuse a draft head that no server could use."""
        if self.draft.kind != "eagle" or self.learns_from_data:  # mtp: no server decodes with it
            return
        if self.rollout.backend == "sglang" and self.generation.counts_tokens:
            rule = "while SGLang decodes with a draft head, its penalties count tokens too late"
            way_out = "set generation's penalties to their defaults, or draft.kind=none, or rollout.backend=embedded"
            self.draft.refuse("kind", f"{rule}; {way_out}")
        if self.rollout.publication == "adapters":
            rule = "rollout.publication = adapters sends only the adapters of lora; set rollout.publication=group"
            self.draft.refuse("kind", rule)
        if self.rollout.exact:
            self.draft.refuse("kind", "rollout.exact = true has no sums of a fixed order for it; leave one of them out")

    def _refuse_offload_of_what_moves(self) -> None:
        """Refuse to keep an optimizer on the host if its whole engine is moved off the GPU at times."""
        shares = "run.offload" if self.run.offload else "rollout.colocated" if self.rollout.colocated else ""
        if not shares or self.learns_from_data:
            return
        for name, options in {"optimizer": self.optimizer, "critic.optimizer": self.critic.optimizer}.items():
            if options.megatron.get("optimizer_cpu_offload"):
                rule = f"with {shares} = true the whole engine moves to the host while others use its GPU"
                key = f"{name}.megatron.optimizer_cpu_offload"
                refuse(key, True, f"{rule}; leave it out, or set {shares}=false")

    def _check_sampling(self) -> None:
        """Refuse sampling options for which the trainer could not compute the tokens' probabilities."""
        generation = self.generation
        own = "Evaluations have eval.top_p and eval.temperature of their own"
        if generation.greedy:
            rule = "every reply to a prompt would be the same, so nothing could be learned; set it to false"
            generation.refuse("greedy", f"{rule}. {own}")
        if generation.top_k == 1:
            rule = "always samples the most likely token, so nothing could be learned"
            generation.refuse("top_k", f"{rule}; set it from 2 to {MOST_REPORTED}, or to -1. {own}")
        if generation.computed_size:
            self._check_computed_supports()
            return
        if generation.top_k > MOST_REPORTED:
            rule = f"a batch has room for {MOST_REPORTED} of the tokens that a server sampled a token from"
            generation.refuse("top_k", f"{rule}; lower it to that, or set it to -1. {own}")
        if generation.support_size:
            self._check_supports()
            self._check_counted_tokens()
            return
        if generation.changed_size:
            self._check_changed_tokens()
            self._check_counted_tokens()
        for name, everything in (("top_p", 1.0), ("min_p", 0.0), ("min_new_tokens", 0)):
            or_computed = "" if name == "min_new_tokens" else "or generation.supports=computed, "
            if getattr(generation, name) != everything:
                rule = "replies would be sampled from a part of the vocabulary, and trained over all of it"
                way_out = f"set generation.top_k={MOST_REPORTED} or less too, so that servers report that part"
                generation.refuse(name, f"{rule}; {way_out}, {or_computed}or set it to {everything}. {own}")

    def _check_computed_supports(self) -> None:
        """Refuse options with which the trainer could not compute from which tokens each token was sampled."""
        generation, rollout = self.generation, self.rollout
        if self.teacher.is_there:
            way_out = "leave top_k, top_p and min_p out, or the teacher"
            generation.refuse("supports", f"{WHOLE_OF_TEACHER} the tokens that the trainer computes; {way_out}")
        for name, nothing in {"min_new_tokens": 0, **UNADJUSTED}.items():
            if getattr(generation, name) != nothing:
                rule = "the trainer computes only what top_k, top_p and min_p exclude"
                way_out = f"set generation.supports=reported and generation.top_k={MOST_REPORTED} or less"
                generation.refuse(name, f"{rule}; {way_out}, or set it to {nothing}")
        older = ""
        if rollout.max_staleness > 0:
            older = f"rollout.max_staleness = {rollout.max_staleness} allows replies of older ones; set it to 0"
        elif rollout.oversample > 1 and rollout.stale != "drop":
            both = f"rollout.oversample = {rollout.oversample} with rollout.stale = {rollout.stale}"
            older = f"{both} allows replies of older ones; set rollout.stale=drop"
        elif self.reuse.groups_per_step > 0:
            older = f"reuse.groups_per_step = {self.reuse.groups_per_step} allows replies of older ones; set it to 0"
        if older:
            generation.refuse("supports", f"the trainer computes supports with the step's weights, but {older}")

    def _check_supports(self) -> None:
        """Refuse options that need log-probabilities over the whole vocabulary.

        With generation.top_k, servers report log-probabilities over the kept tokens only.
        """
        if self.teacher.is_there:
            way_out = "set it to -1, or leave the teacher out"
            self.generation.refuse("top_k", f"{WHOLE_OF_TEACHER} the tokens that servers kept; {way_out}")
        if self.rollout.router:
            rule = "rollout.router passes on only fields that it knows, and reported tokens are none of them"
            self.generation.refuse("top_k", f"{rule}; set it to -1, or leave rollout.router out")

    def _check_changed_tokens(self) -> None:
        """Refuse penalties and biases that the trainer could not repeat.

        They change logits of replies that are trained over the whole vocabulary.
        """
        generation, (name, nothing) = self.generation, self._adjustment
        if generation.changed_size > MOST_CHANGED:
            replies = (
                f" and generation.max_new_tokens = {generation.max_new_tokens}" if generation.counts_tokens else ""
            )
            needed = f"{len(generation.logit_bias)} biases{replies} need {generation.changed_size - 1}"
            rule = f"without generation.top_k, a batch has room for {MOST_CHANGED - 1} changed logits, and {needed}"
            generation.refuse(name, f"{rule}; set generation.top_k={MOST_REPORTED} or less, or set it to {nothing}")
        if self.teacher.is_there:
            rule = "a teacher's distribution is of logits that nothing changed"
            generation.refuse(name, f"{rule}; set it to {nothing}, or leave the teacher out")
        if self.rollout.router:
            rule = "rollout.router passes on only fields that it knows, and this has not been tried"
            generation.refuse(name, f"{rule}; set it to {nothing}, or leave rollout.router out")

    def _check_counted_tokens(self) -> None:
        """Refuse penalties that depend on counts of tokens, if an SGLang server would not count correctly."""
        if self.rollout.backend != "sglang" or not self.starts_servers or not self.generation.counts_tokens:
            return
        name, _ = self._adjustment
        if "--disable-overlap-schedule" not in self.rollout.server_args:
            self.generation.refuse(name, f"{COUNTS_LATE}; add --disable-overlap-schedule to rollout.server_args")
        if self.generation.mixes_penalties:
            self.generation.refuse(name, f"{NO_ORDER}; set it to 1, or the others to 0")
        if self.rollout.interruption == "retract":
            self.generation.refuse(name, f"{FORGETS_COUNTS}; set rollout.interruption=abort")

    @property
    def _adjustment(self) -> tuple[str, Any]:
        """The first option of `generation` that changes logits, and the value with which it changes none."""
        return next(it for it in UNADJUSTED.items() if getattr(self.generation, it[0]) != it[1])

    def _check_routing_replay(self) -> None:
        algo = self.algo
        if self.learns_from_data:
            algo.refuse("routing_replay", f"{self.chosen_data} has replies that no server has sampled; remove it")
        if any(teacher.path == POLICY for teacher in self.teacher.teachers.values()):
            rule = "a teacher that is the policy itself reads prompts for which no server has reported routes"
            algo.refuse("routing_replay", f"{rule}; remove one of the two")
        if self.rollout.interruption == "retract" and self.rollout.max_staleness > 0:
            rule = "with rollout.interruption = 'retract' a server reads an interrupted reply again with new weights"
            why = "and reports the new routes for tokens that the old weights sampled"
            way_out = "set rollout.interruption=abort, or rollout.max_staleness=0"
            algo.refuse("routing_replay", f"{rule}, {why}; {way_out}")
        if algo.routing_replay == "experts_and_weights" and not self.rollout.starts_servers:
            rule = "SGLang tells experts alone, and weights through a plugin of the servers that a run starts"
            way_out = "set it to experts, or leave rollout.servers and rollout.registry out"
            algo.refuse("routing_replay", f"{rule}; {way_out}")

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
        """The setting that lets groups with equal rewards contribute to training; empty if there is none."""
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
        """Timeout in seconds for a collective of the trainer's ranks, which may last while servers start.

        It is long enough that the hang watch reports late ranks first.
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
        """True if the rows of data.train contain what is to be learned (answers or pairs); False for RL."""
        return bool(self.supervised.answer or self.preference.loss)

    @property
    def chosen_data(self) -> str:
        """Text `name = value` of the option that makes this run train on data, for messages."""
        if self.supervised.answer:
            return f"supervised.answer = {self.supervised.answer!r}"
        return f"preference.loss = {self.preference.loss!r}"

    @property
    def has_critic(self) -> bool:
        return self.algo.advantage == "gae"

    @property
    def advantage_args(self) -> dict[str, Any]:
        """Keyword arguments of the advantage estimator.

        They come from `critic` for gae, and from `algo.advantage_args` for all others. For gdpo, the weights default to
        those of rollout.recipe.
        """
        if self.algo.advantage == "gdpo":
            return {"weights": self.rollout.weights} | self.algo.advantage_args
        if not self.has_critic:
            return self.algo.advantage_args
        names = ("discount", "trace_decay", "level", "decoupled", "length_factor")
        return {name: getattr(self.critic, name) for name in names}

    @property
    def critic_engine(self) -> EngineConfig:
        critic = self.critic
        model = ModelConfig(path=critic.model, dtype=self.model.dtype) if critic.model else self.model
        return dataclasses.replace(self.unrouted, model=model, parallel=critic.parallel, optimizer=critic.optimizer)

    @property
    def reward_engine(self) -> EngineConfig:
        model = ModelConfig(path=self.reward_model.path, dtype=self.model.dtype)
        return dataclasses.replace(self.unrouted, model=model, parallel=self.reward_model.parallel)

    def teacher_engine(self, path: str) -> EngineConfig:
        return dataclasses.replace(self.unrouted, model=dataclasses.replace(self.model, path=path, init="hf"))

    @property
    def may_use_transformer_engine(self) -> bool:
        """False if local layers are chosen and no other option asks for Transformer Engine."""
        optimizers, kernels = (self.optimizer, self.critic.optimizer), ("moe_permute_fusion", "moe_router_fusion")
        return (
            self.model.transformer_impl != "local"
            or self.model.flash_attention == "TE"
            or any(it.megatron.get("use_precision_aware_optimizer") for it in optimizers)
            or any(self.megatron.get(name) for name in kernels)
        )

    @property
    def unrouted(self) -> EngineConfig:
        """The policy's engine options, as other models take them: without routing replay, adapters and a draft head."""
        return dataclasses.replace(self.actor, routing_replay="off", lora=LoraConfig(), draft=DraftConfig())

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError if the number of processes does not fit the layout of one of the models."""
        layouts = {"parallel": self.parallel}
        layouts |= {"critic.parallel": self.critic.parallel} if self.has_critic else {}
        layouts |= {"reward_model.parallel": self.reward_model.parallel} if self.reward_model.path else {}
        for name, layout in layouts.items():
            with as_part_of(name):
                layout.check_world_size(world_size)

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
