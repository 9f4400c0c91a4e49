"""`megatron-rl eval`: measures how well a model, or a run's newest weights, answers its config's evaluation sets."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config import TrainConfig, load_config
from megatron_rl.data.curriculum import digest_of
from megatron_rl.data.prompts import load_held_out
from megatron_rl.data.tokens import load_tokenizer, prompt_lengths
from megatron_rl.launch import file_lock
from megatron_rl.launch.cores import free_cores
from megatron_rl.launch.run_token import servers_of
from megatron_rl.rollout.factory import make_workflow, serve_rewards
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.run.evaluation import SetScores, score_sets
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.types import TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture

RESULTS, LOCK = "eval.jsonl", "eval.lock"


def evaluate(path: Path, overrides: list[str]) -> str:
    """Evaluate a config's model, or the newest weights in a run's folder. Return a line of metrics for each set.

    The returned text's last line has the path of the results. Writes eval.jsonl into run.folder: each prompt's set,
    index, digest, rewards and final answers. Uses the servers in rollout.servers, which must hold the weights, or
    starts servers and stops them at the end.
    """
    config = load_config(*where_it_is(path, overrides))
    prompts = load_held_out(config)
    if not prompts:
        raise ValueError("data.evaluation = '': names no prompts, and eval.sets none either; set one of them.")
    if config.model.init != "hf":
        raise ValueError(
            f"model.init = {config.model.init!r}: is not trained, and has no weights to evaluate; name a run's folder, "
            f"or a model with weights."
        )
    tokenizer, arch = load_tokenizer(config.model.path, config.data.template_args), read_architecture(config.model.path)
    sizes = {"context": arch.max_positions, "vocab": arch.vocab}
    for name, members in prompts.items():
        prompt_lengths(f"evaluation {name}", members, tokenizer, config.evaluation_generation, **sizes)
    make_workflow(config, tokenizer, config.evaluation_generation, evaluates=True)
    # Publish whole weights: a run merges adapters into the weights that it saves.
    config.rollout = replace(config.rollout, publication="group")
    folder = Path(config.run.folder)
    try:  # two evaluations would write the same eval.jsonl
        lock = file_lock.keep_folder(folder, LOCK, "an evaluation")
    except OSError as error:
        raise ValueError(f"run.folder = {str(folder)!r}: {error}") from error
    try:
        batch = answers(config, folder, tokenizer, [prompt for members in prompts.values() for prompt in members])
        scored = score_sets(tokenizer, batch, prompts)
        write_results(folder / RESULTS, scored, prompts)
    finally:
        os.close(lock)
    lines = []
    for name, one in scored.items():
        values = "  ".join(f"{metric} {value:.4f}" for metric, value in one.metrics.items())
        lines.append(f"{name}: {len(one.places)} of {len(prompts[name])} prompts  {values}")  # some may have failed
    return "\n".join([*lines, str(folder / RESULTS)])


def answers(
    config: TrainConfig, folder: Path, tokenizer: PreTrainedTokenizerBase, prompts: list[dict[str, Any]]
) -> TrajectoryBatch:
    """Generate and score the replies to all prompts. If this function starts servers, it also stops them."""
    servers = servers_of(config)
    engine, recipe = RemoteSGLangEngine(servers, seed=config.run.seed), serve_rewards(config)
    supervisor: Supervisor | None = None
    try:
        if not servers.servers:
            supervisor = Supervisor(
                servers.with_time_for(config.model.path),
                config.model.path,
                folder / "eval_servers",
                dtype=config.model.dtype,
                context_length=read_architecture(config.model.path).max_positions,
                threads_per_server=config.run.threads_per_rank or free_cores(),
                on_death=engine.fail,
            )
            supervisor.start()
        engine.initialize(servers.servers if supervisor is None else supervisor.urls)
        workflow = make_workflow(config, tokenizer, config.evaluation_generation, recipe, evaluates=True)
        return engine.evaluate(prompts, workflow).result()
    finally:
        engine.destroy(recipe.close())  # before the servers, which still process its requests
        if supervisor is not None:
            supervisor.stop()


def where_it_is(path: Path, overrides: list[str]) -> tuple[Path, list[str]]:
    """Return the config file and the overrides. For a run's folder, add overrides that select its newest weights."""
    if not path.is_dir():
        return path, overrides
    steps = [file.parent for file in path.glob("step-*/config.json") if file.parent.name[5:].isdecimal()]
    saved = sorted(steps, key=lambda folder: int(folder.name[5:]))  # as text, step-10 precedes step-9
    if (path / "final" / "config.json").is_file():
        saved.append(path / "final")
    if not saved:
        raise ValueError(
            f"{path}: holds no weights, neither final nor step-N; set run.save_every_steps or run.save_at_end, or "
            f"give the config and model.path."
        )
    return path / "config.yaml", [f"model.path={saved[-1]}", "model.init=hf", *overrides]


def write_results(path: Path, scored: dict[str, SetScores], prompts: dict[str, list[dict[str, Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for name, one in scored.items():
            for place, rewards, answers in zip(one.places, one.rewards, one.answers, strict=True):
                line = {"set": name, "prompt_index": place, "prompt": digest_of(prompts[name][place])}
                line |= {"rewards": rewards, "answers": answers}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
