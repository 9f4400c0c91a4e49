"""`megatron-rl plan`: reads a config and its data, plans it and says what came out."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.config import TrainConfig, load_config
from megatron_rl.data.prompts import load_held_out
from megatron_rl.data.tokens import load_tokenizer, prompt_lengths, training_prompts
from megatron_rl.tools.plan.devices import DEVICES
from megatron_rl.tools.plan.fit import best_plan, nearest_plan, refusal
from megatron_rl.tools.plan.plan import Cluster, Plan
from megatron_rl.tools.plan.plan_text import as_dict, as_text
from megatron_rl.tools.plan.step_sizes import PromptTokens
from megatron_rl.weights.architecture import read_architecture


def plan_text(
    path: Path, overrides: list[str], *, nodes: int, gpus_per_node: int, device: str, as_json: bool = False
) -> str:
    """Return the plan of a run as a text or as JSON. It chooses the number of servers unless an override does.

    ValueError for bad input, and for a plan that does not fit: its message has the nearest one that does.
    """
    config = load_config(path, overrides)
    if config.learns_from_data:
        raise ValueError(f"{config.chosen_data}: only RL runs are planned; leave it out.")
    is_given = any(word.startswith("rollout.server_count=") for word in overrides)
    servers = config.rollout.server_count if is_given else 0
    cluster = Cluster(nodes=nodes, gpus_per_node=gpus_per_node, device=DEVICES[device], servers=servers)
    tokens = measure_prompts(config)
    plan = best_plan(config, tokens, cluster)
    if not plan.fits:
        raise ValueError(refusal(plan, nearest_plan(config, tokens, cluster)))
    command = start_command(plan, path, overrides)
    return json.dumps(as_dict(plan) | {"command": command}, indent=2) if as_json else as_text(plan, command)


def start_command(plan: Plan, path: Path, overrides: list[str]) -> list[str]:
    """Return the words of the command that starts the run on the plan's split, from the repository's folder.

    Empty where servers would be on the GPUs of trainers on several nodes, which no command starts.
    """
    cluster, config = plan.cluster, plan.config
    settings = [str(path), *(word for word in overrides if not word.startswith("rollout.server_count="))]
    if not config.rollout.servers:
        settings.append(f"rollout.server_count={plan.servers}")
    if plan.shares_gpus and cluster.nodes > 1:
        return []
    if plan.shares_gpus:  # the trainer starts them on its own host
        return [".venv/bin/megatron-rl", "launch", "--ranks", str(plan.trainer_gpus), *settings]
    script = "scripts/train_ppo.sh" if config.has_critic else "scripts/train_grpo.sh"
    nodes = ["--nodes", str(cluster.nodes), "--gpus-per-node", str(cluster.gpus_per_node)]
    return ["sbatch", *nodes, script, *settings, "--ranks", str(plan.trainer_gpus)]


def measure_prompts(config: TrainConfig) -> PromptTokens:
    """Tokenise the config's prompts. ValueError where one and its longest reply exceed the model's context."""
    context = read_architecture(config.model.path).max_positions
    tokenizer = load_tokenizer(config.model.path)
    train = training_prompts(config, tokenizer)
    lengths = prompt_lengths("data.train", train, tokenizer, config.generation, context=context)
    held_out = load_held_out(config)
    for name, prompts in held_out.items():
        prompt_lengths(f"evaluation {name}", prompts, tokenizer, config.generation, context=context)
    requests = sum(map(len, held_out.values())) * config.evaluation_generation.n_samples
    return PromptTokens.of(lengths, held_out=requests)
