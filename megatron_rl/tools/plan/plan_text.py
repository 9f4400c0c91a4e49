"""Formats a plan as text that fits on one screen, and as a dict for JSON."""

from __future__ import annotations

import dataclasses
import shlex
import textwrap
from collections.abc import Collection
from typing import Any

from megatron_rl.config import ParallelConfig
from megatron_rl.tools.plan.devices import GIB, assumptions
from megatron_rl.tools.plan.draft_costs import draft_parameters
from megatron_rl.tools.plan.fit import counted, other_layouts
from megatron_rl.tools.plan.plan import Plan
from megatron_rl.weights.architecture import quantization_fault

WIDTH = 118
NOT_MEASURED = "Times are predicted, by constants fitted to other trainers' runs; none is measured (docs/cluster.md)."
LAYERS = "Activations are of Transformer Engine's layers, or of megatron.core's with model.transformer_impl=local."


def as_dict(plan: Plan, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the plan's counts, bytes and seconds under their names in the code.

    given: keys that the other layouts must not change, as in `other_layouts`.
    """
    split, server = plan.split, plan.server
    return {
        "model": {
            "path": plan.config.model.path,
            "parameters": plan.models[0].parameters,
            "draft_parameters": _draft_parameters(plan),
        },
        "cluster": dataclasses.asdict(plan.cluster),
        "prompts": {name: getattr(plan.tokens, name) for name in ("shortest", "longest", "mean", "count")},
        "replies": {"longest": plan.replies.lengths[-1], "mean": plan.replies.mean},
        "batch": dataclasses.asdict(plan.batch),
        "trainer": {
            "gpus": plan.trainer_gpus,
            "bytes": plan.trainer.parts,
            "peak_bytes": plan.trainer.peak,
            "fullest_moment": plan.trainer.fullest_moment,
            "models": {name: dataclasses.asdict(memory) for name, memory in plan.trainer.by_model.items()},
        },
        "traffic": {
            "update": {
                name: [part.as_dict(plan.cluster.device) for part in sent] for name, sent in plan.traffic.items()
            },
            "publication": [part.as_dict(plan.cluster.device) for part in plan.publication_traffic],
        },
        "servers": {
            "count": plan.servers,
            "gpus_each": server.gpus,
            "share_gpus_with_trainers": plan.shares_gpus,
            "weights_bytes": server.weights,
            "kv_bytes_per_token": server.kv_per_token,
            "kv_room_bytes": server.kv_room,
            "full_replies": server.replies,
        },
        "time": {
            "rollout_s": split.rollout_s,
            "wait_s": split.wait_s,
            "update_s": split.update_s,
            "publish_s": split.publish_s,
            "turns_s": split.turns_s,
            "step_s": split.step_s,
            "step_range_s": plan.step_range_s,
            "work": {name: dataclasses.asdict(work) for name, work in plan.work.items()},
            "bound": plan.bound[0],
            "reply_tokens_per_s": split.tokens_per_s,
            "tokens_per_s_of_gpu": plan.tokens_per_s_of_gpu,
            "mfu": plan.mfu,
            "server_idle": split.server_idle,
            "trainer_idle": split.trainer_idle,
        },
        "other_layouts": [
            {"overrides": words, "tokens_per_s_of_gpu": other.tokens_per_s_of_gpu}
            for words, other in other_layouts(plan, given)
        ],
        "assumptions": assumptions(plan.cluster.device) | {"note": NOT_MEASURED, "layers": LAYERS},
    }


def as_text(plan: Plan, command: list[str], given: Collection[str] = ()) -> str:
    sections = {
        "run": _run(plan),
        "a step": _step(plan),
        "trainer GPU": _trainer(plan),
        "sent in an update": _traffic(plan),
        "server GPU": _server(plan),
        "time of a step, predicted": _time(plan) | _others(plan, given),
    }
    width = 2 + max(len(name) for rows in sections.values() for name in rows)
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name:<{width}}{value}" for name, value in rows.items())]
    assumed = (
        "Assumed: " + "; ".join(f"{name}: {value}" for name, value in assumptions(plan.cluster.device).items()) + "."
    )
    notes = textwrap.wrap(f"{assumed} {NOT_MEASURED} {LAYERS}", WIDTH)
    return "\n".join([*lines, "start it", *_shell_lines(command), *notes])


def _shell_lines(command: list[str]) -> list[str]:
    """Return the quoted command for a shell, wrapped with backslashes."""
    lines = [""]
    for word in map(shlex.quote, command):
        if len(lines[-1]) + len(word) > WIDTH - len("   \\"):
            lines.append("")
        lines[-1] += f" {word}"
    return [f" {line}" + " \\" * (line is not lines[-1]) for line in lines]


def _run(plan: Plan) -> dict[str, str]:
    config, cluster = plan.config, plan.cluster
    layout, arch = config.parallel, plan.models[0].arch
    axes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context, "expert": layout.expert}
    model = f"{config.model.path}, {arch.family}, {_count(plan.models[0].parameters)} parameters, {config.model.dtype}"
    trainer = " x ".join(
        [counted(plan.batch.replicas, "replica"), *(f"{name} {size}" for name, size in axes.items() if size > 1)]
    )
    where = "on the trainers' GPUs, by turns" if plan.shares_gpus else f"on {counted(plan.server.gpus, 'GPU')}"
    if config.rollout.servers:
        where = "running already (rollout.servers)"
    draft = _draft_parameters(plan)
    rows = {
        "model": model,
        **({"draft head": f"{config.draft.kind}, {_count(draft)} parameters"} if draft else {}),
        "GPUs": f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.device.name}",
        "trainer": f"{counted(plan.trainer_gpus, 'GPU')}: {trainer}",
        "servers": f"{plan.servers}, each {where}",
    }
    if fault := quantization_fault(config.model.path):
        rows["first of all"] = f"{fault}. The plan is for bfloat16."
    if not config.rollout.servers and config.rollout.server_count != plan.servers:
        rows["servers"] += f" (rollout.server_count={plan.servers}; the config has {config.rollout.server_count})"
    return rows


def _draft_parameters(plan: Plan) -> int:
    policy = plan.models[0]
    return draft_parameters(policy.arch, policy.engine, 0, ParallelConfig()).total


def _step(plan: Plan) -> dict[str, str]:
    batch, config, tokens = plan.batch, plan.config, plan.tokens
    generation = config.generation
    run = f"{batch.all_requests:,} in {config.run.steps:,} steps"
    if batch.evaluations:
        run += f", beside {batch.evaluations} evaluations"
    epochs = "" if batch.epochs is None else f" of {tokens.count:,} ({batch.epochs:.3g} epochs in all)"
    flight = f"{batch.groups_in_flight:,} groups at most, {batch.replies_running:,} replies with servers"
    return {
        "prompts": f"{batch.prompts:,}{epochs}",
        "prompt tokens": f"{tokens.mean:.0f} on average, {tokens.longest:,} at most",
        "trajectories": f"{batch.trajectories:,}: {generation.n_samples} replies a prompt, of up to "
        f"{generation.max_new_tokens:,} tokens",
        "tokens": f"{batch.prompt_tokens:,} of prompts, up to {batch.most_reply_tokens:,} of replies; a model "
        f"computes up to {batch.computed_rows:,} rows",
        "updates": f"{batch.updates}, which make one policy version",
        "of one update": f"{batch.trajectories_per_replica} trajectories a replica, in {batch.microbatches} "
        f"microbatch{'es' * (batch.microbatches.most > 1)} of up to {config.batch.tokens_per_microbatch:,} rows",
        "in flight": f"{flight} (max_staleness {config.rollout.max_staleness})",
        "requests": f"{batch.requests:,}; {run}",
    }


def _trainer(plan: Plan) -> dict[str, str]:
    trainer, policy = plan.trainer, plan.trainer.by_model["policy"]
    rows: dict[str, str] = {}
    for name, memory in trainer.by_model.items():
        prefix = "" if memory is policy else f"{name}: "
        rows |= {prefix + part: _size(size) for part, size in (memory.states | memory.update).items()}
    for name, size in policy.moments.items():
        rows[f"or {name}"] = f"{_size(size)} in place of activations and head"
    for name, size in policy.beside_weights.items():
        rows[f"or {name}"] = f"{_size(size)} beside the policy's weights alone"
    if on_cpu := sum(memory.on_cpu for memory in trainer.by_model.values()):
        rows["on the CPU"] = f"{_size(on_cpu)} of optimizer and gradients, in host memory"
    written = sum(memory.checkpoint for memory in trainer.by_model.values())
    rows["checkpoint"] = f"{_size(written)} of host memory, until it is written"
    if trainer.offload:
        rows["run.offload"] = "of these models one at a time, the others wait in host memory"
    parts = trainer.parts
    rows |= {name: _size(parts[name]) for name in ("fragmentation", "reserved")}
    share = f"{_size(trainer.peak)} of {_size(trainer.available).strip()} ({trainer.peak / trainer.available:.0%})"
    return rows | {"at the fullest": f"{share}, {trainer.fullest_moment}"}


def _traffic(plan: Plan) -> dict[str, str]:
    rows = {}
    for name, sent in plan.traffic.items():
        prefix = "" if name == "policy" else f"{name}: "
        for part in sent:
            seconds = part.seconds(plan.cluster.device)
            rows[f"{prefix}{part.axis} {part.ranks}"] = f"{_size(part.nbytes)} {part.link}, {_seconds(seconds)}"
    to_publish = plan.publication_traffic
    if to_publish:
        nbytes = sum(part.nbytes for part in to_publish)
        seconds = sum(part.seconds(plan.cluster.device) for part in to_publish)
        rows["publication"] = f"{_size(nbytes)} to a rank that sends, {_seconds(seconds)}"
    return rows or {"nothing": "a rank has the whole model, and no other has it"}


def _server(plan: Plan) -> dict[str, str]:
    server, wanted = plan.server, plan.batch.replies_running
    if not server.fits:
        return {"unknown": "the servers run already, with more GPUs each: rollout.server_args=[--tp,N] tells how many"}
    room = server.replies * plan.servers
    fits = (
        f"{server.replies:,} replies of full length a server, {room:,} in all; up to {wanted:,} are asked for at once"
    )
    rows = {
        "weights": _size(server.weights),
        "keys and values": f"{_size(server.kv_room)}, {_size(server.kv_per_token).strip()} a token",
        "room": fits,
    }
    if room < wanted:
        rows["not all fit"] = "some replies wait, unless they end early or share a prompt's keys"
    return rows


def _time(plan: Plan) -> dict[str, str]:
    split, (bound, bound_s), (shortest, longest) = plan.split, plan.bound, plan.step_range_s
    first, updates, optimizer = (_seconds(part.seconds) for part in plan.work.values())
    rows = {
        "servers work": f"{_seconds(split.rollout_s)}, idle {split.server_idle:.0%}; the trainer waits "
        f"{_seconds(split.wait_s)}, idle {split.trainer_idle:.0%}",
        "update": f"{_seconds(split.update_s)}: {first} of passes before it, {updates} of training, {optimizer} of the "
        f"optimizer; MFU {plan.mfu:.0%}",
        "publication": _seconds(split.publish_s),
    }
    if split.turns_s:
        rows["turns"] = f"{_seconds(split.turns_s)} to host memory and back"
    rows["step"] = f"{_seconds(split.step_s)}; {_seconds(shortest)} to {_seconds(longest)} by errors for published runs"
    rates = f"{plan.tokens_per_s_of_gpu:,.0f} a second and GPU, {_count(split.tokens_per_s)} of replies in all"
    rows["tokens"] = f"{rates}; bound by {bound}, {_seconds(bound_s)}"
    return rows


def _others(plan: Plan, given: Collection[str]) -> dict[str, str]:
    found = [
        f"{other.tokens_per_s_of_gpu:,.0f} tokens a second and GPU with {' '.join(words)}"
        for words, other in other_layouts(plan, given)
    ]
    return {f"layout {number}": text for number, text in enumerate(found, start=2)}


def _size(size: float) -> str:
    for unit, bytes_each in (("GiB", GIB), ("MiB", 2**20)):
        if size >= bytes_each / 10:
            return f"{size / bytes_each:7.2f} {unit}"
    return f"{size / 1024:7.2f} KiB"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{value * 1e3:,.1f} ms"


def _count(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f}"
