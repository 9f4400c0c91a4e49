"""The models of an RL run: the policy, and as configured reference, critic, reward model and teachers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl import parallel
from megatron_rl.algo.actor import Critic, PolicyActor
from megatron_rl.algo.reward_shaping import RewardShaper
from megatron_rl.config import ParallelConfig, TrainConfig
from megatron_rl.engine.megatron_engine import FrozenBase, MegatronEngine
from megatron_rl.engine.offload import SharedDevice
from megatron_rl.launch import own_gpu
from megatron_rl.parallel import ParallelGroups
from megatron_rl.run.demonstrated_rows import Demonstrations
from megatron_rl.run.teachers import Teachers
from megatron_rl.types import FinetuneSpec


@dataclass(frozen=True, kw_only=True)
class RLModels:
    """The initialized models of a run."""

    policy: MegatronEngine
    actor: PolicyActor
    reference: MegatronEngine | FrozenBase | None
    critic: Critic | None
    critic_engine: MegatronEngine | None
    reward_model: MegatronEngine | None
    teachers: Teachers
    demonstrations: Demonstrations


def policy_updates(config: TrainConfig) -> int:
    """Return the number of optimizer steps that the policy takes in the whole run."""
    return (config.run.steps - config.critic.warmup_steps) * config.batch.updates_per_step


def build_models(
    config: TrainConfig,
    groups: ParallelGroups,
    *,
    shared_device: SharedDevice | None,
    prompts: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
) -> RLModels:
    """Build the models of a run. Collective: every rank calls it. prompts: the training prompts."""
    own_gpu.stay_near()  # the servers have started by now, and do not inherit this CPU binding
    options: dict[str, Any] = {"megatron": config.megatron, "shared_device": shared_device}
    policy = MegatronEngine(config.actor, groups=groups, **options)
    policy.initialize(None, FinetuneSpec(total_updates=policy_updates(config)))
    reference: MegatronEngine | FrozenBase | None = None
    if config.algo.kl_coefficient > 0 and config.lora.rank > 0:
        reference = policy.base
    elif config.algo.kl_coefficient > 0:
        reference = MegatronEngine(config.unrouted, groups=groups, trainable=False, **options)
        reference.initialize()
    teachers = Teachers(config, groups, policy, prompts, tokenizer, **options)
    demonstrations = Demonstrations(config, groups, tokenizer, context=policy.arch.max_positions)
    actor = PolicyActor(
        policy,
        config.algo,
        temperature=config.generation.temperature,
        correction=config.correction,
        reference=reference,
        shaper=RewardShaper(config.reward_shaping, config.algo, longest_reply=config.generation.max_new_tokens),
        advantage_args=config.advantage_args,
        teacher_coefficient=config.teacher.coefficient if config.teacher.shapes_advantages else 0.0,
    )
    critic_engine: MegatronEngine | None = None
    if config.has_critic:
        its_groups = groups_of(config.critic.parallel, config, groups)
        critic_engine = MegatronEngine(config.critic_engine, groups=its_groups, head="value", **options)
        critic_engine.initialize(None, FinetuneSpec(total_updates=config.run.steps * config.batch.updates_per_step))
    reward_model: MegatronEngine | None = None
    if config.reward_model.path:
        its_groups = groups_of(config.reward_model.parallel, config, groups)
        reward_model = MegatronEngine(config.reward_engine, groups=its_groups, trainable=False, head="value", **options)
        reward_model.initialize()
    return RLModels(
        policy=policy,
        actor=actor,
        reference=reference,
        critic=None if critic_engine is None else Critic(critic_engine, config.critic),
        critic_engine=critic_engine,
        reward_model=reward_model,
        teachers=teachers,
        demonstrations=demonstrations,
    )


def groups_of(layout: ParallelConfig, config: TrainConfig, policys: ParallelGroups) -> ParallelGroups:
    """Return the process groups of a model with this layout: the policy's if it has the same, otherwise new ones."""
    if layout == config.parallel:
        return policys
    return parallel.start(layout, seed=config.run.seed, timeout_s=config.collective_timeout_s, control=policys.control)
