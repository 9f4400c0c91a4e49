"""Checks of a run that need no started process."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl import platform
from megatron_rl.algo.catalogue import find_estimator, find_loss
from megatron_rl.config import EngineConfig, TrainConfig
from megatron_rl.config.import_path import OURS
from megatron_rl.config.rules import as_part_of
from megatron_rl.config.train_config import REMAX
from megatron_rl.data.prompts import load_held_out
from megatron_rl.data.tokens import load_tokenizer, prompt_lengths, training_prompts
from megatron_rl.engine.model import transformer_config
from megatron_rl.ops import library
from megatron_rl.rollout.factory import check_reward, make_workflow
from megatron_rl.run.demonstrated_rows import load_demonstrations
from megatron_rl.run.teachers import check_teachers
from megatron_rl.run.warm_start import warm_start_rows
from megatron_rl.types import TrajectoryBatch
from megatron_rl.weights.adapter_rules import adapted_experts
from megatron_rl.weights.architecture import quantization_fault, read_architecture
from megatron_rl.weights.companions import check_companions
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.mapping import weight_source

Prompts = list[dict[str, Any]]
CHECKPOINT_COPIES = 7
"""Bytes of a checkpoint per byte of bfloat16 weights: 1 for the weights, and 2 each for main weights and two
moments in float32."""


def check(config: TrainConfig) -> tuple[PreTrainedTokenizerBase, Prompts, dict[str, Prompts]]:
    """Check everything that can be checked before a process starts. Raises ValueError.

    Return the tokenizer, the training prompts and the held-out prompts of each set.
    """
    if platform.has_cuda():
        library.check_cuda()
    allowed = config.run.import_from
    if config.learns_from_data:
        raise ValueError(
            f"{config.chosen_data}: trains on the rows' own replies, and this is RL; start it by megatron-rl launch, "
            f"or leave the section out."
        )
    estimator = find_estimator(config.algo.advantage, config.advantage_args, import_from=allowed)
    if estimator.compares_group and config.generation.n_samples < 2:  # for user estimators; the config checks ours
        raise ValueError(
            f"generation.n_samples = {config.generation.n_samples}: algo.advantage = {config.algo.advantage} compares "
            f"the replies of one prompt and needs 2 or more; raise it."
        )
    if config.rollout.max_uniform_resamples > 0 and not estimator.compares_group:
        raise ValueError(
            f"rollout.max_uniform_resamples = {config.rollout.max_uniform_resamples}: throws groups with equal rewards "
            f"away, and algo.advantage = {config.algo.advantage} may train them; set it to 0, or declare the estimator "
            f"with compares_group=True."
        )
    find_loss(config.algo.loss, config.algo.loss_args, import_from=allowed)
    arch = read_architecture(config.model.path).with_head("policy")
    if config.starts_servers and (fault := quantization_fault(config.model.path)):
        raise ValueError(f"model.path = {config.model.path!r}: {fault}.")
    if config.model.init == "hf":
        weight_source(config.model.path, arch)
    transformer_config(arch, config.actor, config.megatron)  # raises if the layout does not fit the model
    check_publication(config, arch)
    if config.has_critic:
        with as_part_of("critic.parallel"), as_part_of("critic.optimizer"):
            check_value_model(config.critic_engine, config.megatron)
    if config.reward_model.path:
        with as_part_of("reward_model.parallel"):
            check_value_model(config.reward_engine, config.megatron)
    check_companions(config)
    config.rollout.check_servers()
    if platform.has_cuda():
        config.rollout.check_for_gpus()
    tokenizer = load_tokenizer(config.model.path, config.data.template_args)
    make_workflow(config, tokenizer, config.generation)  # for its errors only; the rollout process makes its own
    make_workflow(config, tokenizer, config.evaluation_generation, evaluates=True)
    longest = config.rollout.workflow_args.get("max_tokens", 0)
    is_ours = config.rollout.workflow.startswith(f"{OURS}.")
    if is_ours and not (isinstance(longest, int) and longest <= arch.max_positions):
        raise ValueError(
            f"rollout.workflow_args.max_tokens = {longest!r}: the model's context is {arch.max_positions} tokens, and "
            f"a dialogue that outgrows it is refused with all it has earned; lower it."
        )
    train, sizes = training_prompts(config, tokenizer), {"context": arch.max_positions, "vocab": arch.vocab}
    held_out = load_held_out(config)
    for key, prompts in {"data.train": train, **{f"evaluation {name}": held_out[name] for name in held_out}}.items():
        prompt_lengths(key, prompts, tokenizer, config.generation, **sizes)
    check_teachers(config, arch, tokenizer, train)
    load_demonstrations(config, tokenizer, **sizes)
    if config.warm_start.updates > 0:
        warm_start_rows(config.warm_start, train, tokenizer, **sizes)
    return tokenizer, train, held_out


def dry_run(config: TrainConfig) -> str:
    """Run `check`, and try the rewards on the first training prompt. Return a line that says which parts were run."""
    tokenizer, train, held_out = check(config)
    options, folder = config.rollout, Path(config.run.folder)
    for key, prompts in {"data.train": train, **{f"evaluation {name}": held_out[name] for name in held_out}}.items():
        check_fields(key, prompts)
    if config.starts_servers and options.backend == "sglang" and importlib.util.find_spec("sglang") is None:
        raise ValueError(
            "rollout.backend = 'sglang': the package sglang is not installed here; install it (docs and "
            "scripts/install_sglang_cpu.sh), name running servers in rollout.servers, or take another backend."
        )
    copies = 1 + (1 + config.run.keep_checkpoints) * CHECKPOINT_COPIES * (config.run.checkpoint_every_steps > 0)
    needed = copies * sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    # The run creates its folder later, so measure the disk of the nearest existing parent.
    there = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.is_dir())
    if (free := shutil.disk_usage(there).free) < needed:
        raise ValueError(
            f"run.folder = {str(folder)!r}: {free / 1e9:.1f} GB are free there, and checkpoints and weights take about "
            f"{needed / 1e9:.1f} GB; make room, name another disk, or lower run.keep_checkpoints."
        )
    tried = check_reward(config, train[0], tokenizer)
    gave = "" if tried.value is None else f"; the reward of the first one's own answer is {tried.value:g}"
    done = ["data functions", "the workflow's constructor"] + ([] if tried.value is None else ["the rewards"])
    said = f"{', '.join(done[:-1])} and {done[-1]} were run"
    if tried.reached:
        said += f", and a server of {', '.join(tried.reached)} takes connections"
    left = ["rollout servers", *tried.reached, *tried.not_tried]
    counts = f"{len(train)} prompts and {sum(map(len, held_out.values()))} held-out ones"
    return f"ok: {counts} fit{gave}. {said[0].upper()}{said[1:]}; not run: {', '.join(left)}."


def check_fields(key: str, prompts: Prompts) -> None:
    """Raise ValueError for a prompt that has lost its `answer` or `tests`.

    A prompt without the field is an error if at least 90 % of the prompts of the same source have it. If fewer have it,
    the field is taken to be optional. key: config key of the prompts.
    """
    for source in dict.fromkeys(prompt.get("source") for prompt in prompts):
        members = [(n, it) for n, it in enumerate(prompts, start=1) if it.get("source") == source]
        for name in ("answer", "tests"):
            lacking = [number for number, prompt in members if prompt.get(name) in (None, "", [])]
            if lacking and 10 * len(lacking) <= len(members):  # if more lack it, it is meant to be optional
                raise ValueError(
                    f"{key}, prompt {lacking[0]}: has no {name!r}, as {len(lacking)} of {len(members)} prompts; add "
                    f"it, or leave that row out."
                )


def check_value_model(engine: EngineConfig, megatron: dict[str, Any]) -> None:
    """Raise ValueError if a value model's folder lacks weights, or the model does not fit its parallel layout."""
    arch = read_architecture(engine.model.path).with_head("value")
    if engine.model.init == "hf":
        weight_source(engine.model.path, arch)
    transformer_config(arch, engine, megatron)


def check_publication(config: TrainConfig, arch: Architecture) -> None:
    """Raise ValueError if the run publishes adapters that the servers which it starts cannot compute."""
    options = config.rollout
    if options.publication != "adapters" or options.backend != "sglang" or platform.has_cuda():
        return
    if config.starts_servers and (experts := adapted_experts(arch, config.lora)):
        raise ValueError(
            f"rollout.publication = 'adapters': lora.targets = {config.lora.targets} adapt {', '.join(experts)}, and "
            f"SGLang computes adapters of experts by Triton's kernels, which no CPU runs; leave experts out of "
            f"lora.targets, set rollout.publication=group, or take rollout.backend=embedded."
        )


def check_greedy(config: TrainConfig, batch: TrajectoryBatch) -> None:
    """Raise ValueError if the run uses ReMax and the workflow's trajectories report no greedy reply."""
    model = config.reward_model.path
    reported = ["is_greedy"] if model else ["is_greedy", "greedy_reward"]
    if config.algo.advantage != "remax" or any(name in batch for name in reported):
        return
    scored = f" and reward_model.path = {model!r}, which scores it," if model else ""
    raise ValueError(
        f"rollout.workflow = {config.rollout.workflow!r}: returned trajectories with {sorted(batch.sequences)}, and "
        f"algo.advantage = remax{scored} needs {' or '.join(reported)} of the greedy reply; report it in "
        f"Trajectory.sequence, or use {REMAX}."
    )
