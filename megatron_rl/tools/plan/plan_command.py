"""The command `megatron-rl plan`: reads a config and its models' config.json, plans the run and prints the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config import TrainConfig, load_config
from megatron_rl.config.rules import as_part_of
from megatron_rl.config.teacher_section import POLICY
from megatron_rl.tools.plan.devices import DEVICES
from megatron_rl.tools.plan.fit import best_plan, check_models, nearest_plan, refusal
from megatron_rl.tools.plan.length_files import UNKNOWN, read_lengths
from megatron_rl.tools.plan.memory import models_of
from megatron_rl.tools.plan.plan import Cluster, Plan
from megatron_rl.tools.plan.plan_text import as_dict, as_text
from megatron_rl.tools.plan.step_sizes import PromptTokens, ReplyTokens
from megatron_rl.tools.plan.week_text import week_text
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.companions import check_companions
from megatron_rl.weights.published_models import hub_name


def plan_text(path: Path, overrides: list[str], *, as_json: bool = False, week: bool = False, **options: Any) -> str:
    """Return the plan of a run as text or JSON. Takes make_plan's options and raises its errors.

    week: append a simulated week with faults. Text only.
    """
    plan = make_plan(path, overrides, **options)
    command, given = start_command(plan, path, overrides), keys_of(overrides)
    if as_json:
        return json.dumps(as_dict(plan, given) | {"command": command}, indent=2)
    return as_text(plan, command, given) + (f"\n{week_text(plan)}" if week else "")


def make_plan(
    path: Path,
    overrides: list[str],
    *,
    nodes: int,
    gpus_per_node: int,
    device: str,
    models: Path | None = None,
    lengths: Path | None = None,
) -> Plan:
    """Return the best plan of a run. The number of servers is chosen unless an override sets it.

    models, lengths: the options of `megatron-rl plan`. Raises ValueError for bad input and for a plan that does not
    fit. In the latter case, the message names the nearest plan that fits and keeps to the overrides.
    """
    config = with_models(load_config(path, overrides), models)
    check_as_started(config)
    given = keys_of(overrides)
    servers = config.rollout.server_count if "rollout.server_count" in given else 0
    cluster = Cluster(nodes=nodes, gpus_per_node=gpus_per_node, device=DEVICES[device], servers=servers)
    tokens = prompt_tokens(config, lengths)
    plan = best_plan(config, tokens, cluster)
    if not plan.fits:
        nearest = nearest_plan(config, tokens, cluster, given)
        against = nearest_plan(config, tokens, replace(cluster, servers=0)) if nearest is None and given else None
        raise ValueError(refusal(plan, nearest, against))
    return plan


def check_as_started(config: TrainConfig) -> None:
    """Raise ValueError if the run would refuse to start, as far as the config and the config.json files show it.

    Also raises ValueError for a run that learns from data. The message says which RL run to plan or rehearse instead.
    """
    if config.learns_from_data:
        key, longest = config.chosen_data.partition(" ")[0], config.data.max_tokens
        longest = longest or read_architecture(config.model.path).max_positions
        alike = {key: "", "data.max_tokens": 0, "data.max_prompt_tokens": 1, "algo.advantage": "reinforce"}
        alike |= {"generation.n_samples": 1 + bool(config.preference.loss), "generation.max_new_tokens": longest - 1}
        words = " ".join(f"{name}={value}" for name, value in alike.items())
        raise ValueError(
            f"{config.chosen_data}: plans and rehearsals are of RL runs; add {words} rollout.servers=[http://none] for "
            f"the memory of an RL run's updates on sequences of the same length, without servers."
        )
    models = models_of(config)
    check_models(models, config)
    check_companions(config)
    # Late, because megatron.core takes seconds to import.
    from megatron_rl import platform
    from megatron_rl.engine.model import transformer_config

    for model in models:
        with as_part_of("critic.optimizer" if model.name == "critic" else "optimizer"):
            transformer_config(model.arch, model.engine, config.megatron, is_elsewhere=True)
        if model.arch.delta_net is not None:
            platform.check_delta_kernel(model.engine.model.delta_kernel, model.engine.model.dtype, is_elsewhere=True)


def keys_of(overrides: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in overrides}


def with_models(config: TrainConfig, models: Path | None) -> TrainConfig:
    """Return the config with each model path replaced by the folder that has its config.json.

    If a path has no such file, the model is looked up in `models`. Raises ValueError if it is not there either.
    """

    def located(key: str, path: str) -> str:
        folder = Path(path).parent if path.endswith("/config.json") else Path(path)
        name = folder.name.lower()
        if not path or (folder / "config.json").is_file():
            return str(folder) if path else path
        if models is not None and (models / name / "config.json").is_file():
            return str(models / name)
        nor = f", nor in {models / name}" if models else ""
        raise ValueError(
            f"{key} = {path!r}: no config.json there{nor}; a plan needs that file alone: hf download "
            f"{hub_name(path)} config.json --local-dir FOLDER/{name}, and "
            f"--models FOLDER."
        )

    teacher = config.teacher
    own_path = teacher.path if teacher.path == POLICY else located("teacher.path", teacher.path)
    parts = {
        source: part | ({"path": located(f"teacher.by_source.{source}.path", part["path"])})
        if part.get("path", POLICY) != POLICY
        else part
        for source, part in teacher.by_source.items()
    }
    return replace(
        config,
        model=replace(config.model, path=located("model.path", config.model.path)),
        teacher=replace(teacher, path=own_path, by_source=parts),
        critic=replace(config.critic, model=located("critic.model", config.critic.model)),
        reward_model=replace(config.reward_model, path=located("reward_model.path", config.reward_model.path)),
    )


def start_command(plan: Plan, path: Path, overrides: list[str]) -> list[str]:
    """Return the words of the command that starts the run with the plan's split, from the repository's folder."""
    cluster, config = plan.cluster, plan.config
    settings = [str(path), *(word for word in overrides if not word.startswith("rollout.server_count="))]
    if not config.rollout.servers:
        settings.append(f"rollout.server_count={plan.servers}")
    if plan.shares_gpus and cluster.nodes == 1:  # the trainer starts the servers on its own host
        return [".venv/bin/megatron-rl", "launch", "--ranks", str(plan.trainer_gpus), *settings]
    script = "scripts/train_ppo.sh" if config.has_critic else "scripts/train_grpo.sh"
    nodes = ["--nodes", str(cluster.nodes), "--gpus-per-node", str(cluster.gpus_per_node)]
    return ["sbatch", *nodes, script, *settings, "--ranks", str(plan.trainer_gpus)]


def prompt_tokens(config: TrainConfig, lengths: Path | None = None) -> PromptTokens:
    """Return the lengths in tokens: from the file `lengths`, or otherwise from the config's limits.

    Lines without a reply's length do not influence the distribution of reply lengths. Raises ValueError if a prompt and
    its longest reply exceed the model's context, or a microbatch that must hold them.
    """
    context, longest = read_architecture(config.model.path).max_positions, config.generation.max_new_tokens
    longest += config.data.max_prompt_tokens or 1
    if longest > config.batch.tokens_per_microbatch and not config.batch.allow_longer_sequences:
        raise ValueError(
            f"batch.tokens_per_microbatch = {config.batch.tokens_per_microbatch}: a prompt with its reply may have "
            f"{longest} tokens, and batch.allow_longer_sequences = false ends the run there; set it to {longest}."
        )
    if lengths is None:
        return PromptTokens.within_limits(config, context)
    found = read_lengths(lengths, config, context)
    replies = sorted(reply for _, reply in found if reply != UNKNOWN)
    return PromptTokens.of([prompt for prompt, _ in found], ReplyTokens(tuple(replies)) if replies else None)
