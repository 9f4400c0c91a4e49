"""Chooses how to split the GPUs between trainer and servers. If no split fits, finds the nearest config that does."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from megatron_rl.config import PIPELINE_CUTS, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_rl.config.rules import as_part_of
from megatron_rl.tools.plan.devices import GIB, RESERVED_BYTES
from megatron_rl.tools.plan.memory import Model, models_of, server_memory, trainer_memory
from megatron_rl.tools.plan.plan import Cluster, Plan
from megatron_rl.tools.plan.step_sizes import PromptTokens, plan_batch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import check_layout, nearly_even

NODE_COUNTS_TRIED = 5
"""Number of cluster sizes tried in search of a plan that fits: 1, 2, 4, ... times the given nodes."""
MOST_SPLITS = 32
"""Maximum number of splits tried. If more are possible, evenly spaced ones are tried."""
OTHERS = 3
"""Number of alternative layouts that a plan lists."""
LAYOUT = ("parallel.tensor", "parallel.pipeline", "parallel.expert")
SELECTIVE = {"recompute_granularity": "selective"}
ON_CPU = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def check_models(models: list[Model], config: TrainConfig) -> None:
    """Raise ValueError if a layout does not suit its model, or if the config cannot run on GPUs."""
    config.rollout.check_for_gpus()
    config.rollout.check_servers()
    sections = {"critic": "critic.parallel", "reward model": "reward_model.parallel"}
    for model in models:
        with as_part_of(sections.get(model.name, "parallel")):
            check_layout(model.arch, model.engine.parallel, config.megatron)


def best_plan(config: TrainConfig, tokens: PromptTokens, cluster: Cluster) -> Plan:
    """Return the plan of the fastest split that fits. If none fits, return the one whose trainer has the lowest peak.

    Raises ValueError if no number of trainer ranks suits the layout.
    """
    plans = plans_of(config, tokens, cluster)
    best: Plan | None = None
    for plan in sorted((plan for plan in plans if plan.fits), key=lambda plan: plan.least_s):
        if best is not None and plan.least_s >= best.split.step_s:
            break  # no further plan is faster: even its lower bound is not below the best simulated time
        if best is None or plan.split.step_s < best.split.step_s:
            best = plan
    return best or min(plans, key=lambda plan: (plan.trainer.peak, -plan.server.kv_room))


def plans_of(config: TrainConfig, tokens: PromptTokens, cluster: Cluster, trainer_gpus: int = 0) -> list[Plan]:
    """Return a plan for each split to try. trainer_gpus: the only number of trainer GPUs to try; 0 tries all.

    Raises ValueError if the config cannot run on the cluster, or if every split leaves some replica without a prompt.
    """
    models = models_of(config)
    check_models(models, config)
    gpus, each = cluster.gpus, config.rollout.gpus_per_server
    if each > cluster.gpus_per_node and each % cluster.gpus_per_node:
        raise ValueError(
            f"rollout.server_args: {each} GPUs of a server (--tp x --pp-size): must be on one node, or on whole nodes "
            f"of {cluster.gpus_per_node} GPUs; take {each - each % cluster.gpus_per_node}."
        )
    external, takes_turns = len(config.rollout.servers), config.rollout.colocated
    on_node = cluster.gpus_per_node // each  # servers per node if they share the trainers' GPUs: none spans nodes then
    if takes_turns and cluster.nodes > 1:
        servers = replace(config.rollout, server_count=cluster.servers or max(1, on_node) * cluster.nodes)
        servers.check_share(cluster.nodes, cluster.gpus_per_node)
    # Every trainer rank has a part of every model, so the number of ranks must suit all layouts.
    unit = math.lcm(*(_ranks(model) for model in models))
    counts = [] if takes_turns else list(range(unit, (gpus if external else gpus - each) + 1, unit))
    shares_gpus = not external and not counts
    if not counts:
        config.check_world_size(gpus)
        counts = [gpus]
    if not external and cluster.servers:
        counts = _with_room(counts, cluster, each, shares_gpus=shares_gpus)
    if trainer_gpus:
        counts = [count for count in counts if count == trainer_gpus]
    plans: list[Plan] = []
    refused: ValueError | None = None
    parallel, beside = config.parallel, float(RESERVED_BYTES) if shares_gpus else 0.0
    for count in counts[:: -(-len(counts) // MOST_SPLITS) or 1]:  # rounded up
        try:
            batch = plan_batch(config, tokens, count // (parallel.tensor * parallel.pipeline * parallel.context))
        except ValueError as error:
            refused = error
            continue
        plans.append(
            Plan(
                config=config,
                cluster=cluster,
                tokens=tokens,
                models=models,
                batch=batch,
                trainer=trainer_memory(models, config, batch, tokens, count, cluster.device),
                server=server_memory(models[0], config, batch, cluster.device, beside),
                servers=external
                or cluster.servers
                or (on_node * cluster.nodes if takes_turns else (gpus if shares_gpus else gpus - count) // each),
                trainer_gpus=count,
                shares_gpus=shares_gpus,
            )
        )
    if refused is not None and not plans:
        raise refused
    return plans


def _with_room(counts: list[int], cluster: Cluster, each: int, *, shares_gpus: bool) -> list[int]:
    """Return the numbers of trainer GPUs that leave room for cluster.servers servers. Raises ValueError if none does.

    each: number of GPUs of one server.
    """
    room = {count: (cluster.gpus if shares_gpus else cluster.gpus - count) // each for count in counts}
    fitting = [count for count in counts if room[count] >= cluster.servers]
    if not fitting:
        raise ValueError(
            f"rollout.server_count = {cluster.servers}: of {cluster.gpus} GPUs the trainer leaves room for "
            f"{max(room.values())} servers of {each} at most; lower it, or leave it out, and the plan chooses."
        )
    return fitting


def _ranks(model: Model) -> int:
    """Return the smallest number of ranks that suits the model's layout. All suitable numbers are multiples of it."""
    layout = model.engine.parallel
    dense = layout.tensor * layout.pipeline * layout.context
    # Experts have separate axes over the same ranks, without a context axis.
    return math.lcm(dense, layout.expert * layout.expert_tensor * layout.pipeline)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def refusal(plan: Plan, nearest: tuple[list[str], Plan] | None, against: tuple[list[str], Plan] | None = None) -> str:
    """Return the message that says why the plan cannot run, and what would fit.

    nearest: result of `nearest_plan`. against: what would fit if keys that were set on the command line were changed,
    too. It is used only if `nearest` is None.
    """
    device = plan.cluster.device
    if not plan.has_gpus_for_both:
        ranks = math.lcm(*(_ranks(model) for model in plan.models))
        why = (
            f"{counted(ranks, 'GPU')} for the trainer and {plan.server.gpus} for a server are more than the "
            f"{plan.cluster.gpus} there are"
        )
    elif not plan.trainer.fits:
        parts, largest = plan.trainer.parts, plan.trainer.largest
        why = (
            f"a trainer GPU needs {plan.trainer.peak / GIB:.1f} GiB of the {device.memory / GIB:.1f} GiB of a "
            f"{device.name}; the largest part is {largest}, {parts[largest] / GIB:.1f} GiB"
        )
    else:
        server = plan.server
        why = (
            f"a server has {server.kv_room / GIB:.1f} GiB for keys and values beside {server.weights / GIB:.1f} GiB of "
            f"weights a GPU, and one reply of full length needs "
            f"{server.kv_per_token * server.longest_sequence / GIB:.1f} GiB"
        )
    if nearest is None and against is not None:
        return (
            f"does not fit: {why}. Nothing near it fits with what the command line sets; add what overrides it: "
            f"{shlex.join(against[0])}"
        )
    if nearest is None:
        most = 2 ** (NODE_COUNTS_TRIED - 1)
        return f"does not fit: {why}. Nothing near it fits either, nor on {most} times the nodes; take larger GPUs."
    return f"does not fit: {why}. Nearest that fits: {shlex.join(nearest[0])}"


def nearest_plan(
    config: TrainConfig, tokens: PromptTokens, cluster: Cluster, given: Collection[str] = ()
) -> tuple[list[str], Plan] | None:
    """Return the fewest `key=value` overrides with which the run fits, and its plan; None if nothing tried fits.

    Of equally short lists of overrides, the one with the lowest `least_s` is returned. Tries the changes of `_options`.
    If none helps, tries them with more nodes, and puts `--nodes=` before the overrides. Keys in `given` are not
    changed.
    """
    for nodes in (cluster.nodes * 2**n for n in range(NODE_COUNTS_TRIED)):
        found = _nearest(config, tokens, replace(cluster, nodes=nodes), given)
        if found is not None:
            words, plan = found
            return ([f"--nodes={nodes}"] if nodes > cluster.nodes else []) + words, plan
    return None


def _nearest(
    config: TrainConfig, tokens: PromptTokens, cluster: Cluster, given: Collection[str]
) -> tuple[list[str], Plan] | None:
    plan = best_plan(config, tokens, cluster)
    if plan.fits:
        return [], plan

    def plans_with(changes: dict[str, Any]) -> list[Plan]:
        try:
            return plans_of(_changed(config, changes), tokens, cluster)
        except ValueError:  # the layout does not suit the model or the GPUs
            return []

    options = _options(config, plan, given)
    if not plan.is_served and not options.keys() & {"rollout.server_args", "rollout.colocated"}:
        return None
    layouts = {key: [None, *values] for key, values in options.items() if key in LAYOUT}
    reliefs = {key: values[-1] for key, values in options.items() if key not in LAYOUT}
    roomy = set()  # layouts that fit with all memory savings; the others need not be tried with fewer
    for sizes in itertools.product(*layouts.values()):
        layout = {key: size for key, size in zip(layouts, sizes, strict=True) if size is not None}
        if any(plan.trainer.fits for plan in plans_with(reliefs | layout)):
            roomy.add(frozenset(layout.items()))
    for count in range(1, len(options) + 1):
        found = []
        for keys in itertools.combinations(options, count):
            for values in itertools.product(*(options[key] for key in keys)):
                changes = dict(zip(keys, values, strict=True))
                if frozenset((key, changes[key]) for key in keys if key in LAYOUT) not in roomy:
                    continue
                # A bound instead of a simulation: there may be hundreds of candidates, and only their order counts.
                fitting = [plan.least_s for plan in plans_with(changes) if plan.fits]
                if fitting:
                    found.append((min(fitting), changes))
        if found:
            _, changes = min(found, key=lambda entry: entry[0])
            return _overrides(config, changes), best_plan(_changed(config, changes), tokens, cluster)
    return None


def other_layouts(plan: Plan, given: Collection[str] = ()) -> list[tuple[list[str], Plan]]:
    """Return the OTHERS layouts near a plan's own with the most tokens per second and GPU, as (overrides, plan).

    Tries half and twice the size of each axis and of a server, with as many trainer and server GPUs as in the plan.
    Returns only layouts that fit and that the config accepts. Keys in `given` are not changed.
    """
    config, cluster, arch = plan.config, plan.cluster, plan.models[0].arch

    def near(size: int, most: int) -> list[int]:
        return [other for other in (size // 2, 2 * size) if 1 <= other <= most]

    options: dict[str, list[Any]] = {
        "parallel.tensor": near(config.parallel.tensor, cluster.gpus_per_node),
        "parallel.pipeline": [] if _is_cut(config) else near(config.parallel.pipeline, arch.layers),
        "parallel.expert": near(config.parallel.expert, arch.mixture.experts) if arch.mixture else [],
        "rollout.server_args": [] if config.rollout.servers else near(plan.server.gpus, cluster.gpus_per_node),
    }
    options = _free(options, config, given)
    found: list[tuple[dict[str, Any], Plan]] = []
    for sizes in itertools.product(*([None, *values] for values in options.values())):
        changes = {key: size for key, size in zip(options, sizes, strict=True) if size is not None}
        servers = plan.servers * plan.server.gpus // changes.get("rollout.server_args", plan.server.gpus)
        fixed = not (plan.shares_gpus or config.rollout.servers)
        try:
            changed, alike = _changed(config, changes), replace(cluster, servers=servers * fixed)
            plans = plans_of(changed, plan.tokens, alike, plan.trainer_gpus)
        except ValueError:  # the layout does not suit the model or the GPUs
            continue
        found += [(changes, other) for other in plans if changes and other.fits]
    shortest = sorted(found, key=lambda entry: entry[1].least_s)[: 2 * OTHERS]
    shortest.sort(key=lambda entry: -entry[1].tokens_per_s_of_gpu)
    return [(_overrides(config, changes), other) for changes, other in shortest[:OTHERS]]


def _options(config: TrainConfig, plan: Plan, given: Collection[str]) -> dict[str, list[Any]]:
    """Return {key of the config: values to try}, of which the last saves most memory. Keys in `given` are omitted."""

    def powers(most: int, other_than: int) -> list[int]:
        return [2**n for n in range(most.bit_length()) if 2**n <= most and 2**n != other_than]

    cluster, arch, budget = plan.cluster, plan.models[0].arch, config.batch.tokens_per_microbatch
    parallel, longest = config.parallel, plan.batch.longest_sequence
    # Halve the budget, but not below one sequence, which is never split: a lower budget would change nothing.
    shorter = [budget >> n for n in range(1, 8) if budget >> n >= longest] or [longest] * (longest < budget)
    optimizers = [config.optimizer, *([config.critic.optimizer] if config.has_critic else [])]
    granularity = config.megatron.get("recompute_granularity")
    recompute = [] if granularity == "full" else [RECOMPUTE] if granularity else [SELECTIVE, RECOMPUTE]
    options: dict[str, list[Any]] = {
        "parallel.tensor": powers(cluster.gpus_per_node, parallel.tensor),
        "parallel.pipeline": [] if _is_cut(config) else powers(min(cluster.gpus, arch.layers), parallel.pipeline),
        "parallel.expert": powers(arch.mixture.experts, parallel.expert) if arch.mixture else [],
        "batch.tokens_per_microbatch": shorter,
        "optimizer.distributed": [] if all(options.distributed for options in optimizers) else [True],
        "megatron": recompute,
    }
    if not (plan.is_served and plan.has_gpus_for_both):
        options["rollout.server_args"] = powers(cluster.gpus_per_node, config.rollout.gpus_per_server)
    if not plan.has_gpus_for_both and not config.rollout.router:
        options["rollout.colocated"] = [True]
    takes_turns = config.rollout.colocated or config.run.offload or "rollout.colocated" in options
    if config.model.dtype == "bfloat16" and not plan.models[0].share_on_cpu and not takes_turns:
        options["optimizer.megatron"] = [ON_CPU]

    return _free(options, config, given)


def _is_cut(config: TrainConfig) -> bool:
    """Return whether the config says how to cut the pipeline into stages, which fixes the number of stages."""
    return any(config.megatron.get(key) for key in PIPELINE_CUTS)


def _free(options: dict[str, list[Any]], config: TrainConfig, given: Collection[str]) -> dict[str, list[Any]]:
    """Return the options without the values that would change a key in `given`."""
    kept = {name.removeprefix("critic.") for name in given}

    def is_free(key: str, value: Any) -> bool:
        names = {word.partition("=")[0].removeprefix("critic.") for word in _overrides(config, {key: value})}
        return not any(f"{a}.".startswith(f"{b}.") for x in names for y in kept for a, b in ((x, y), (y, x)))

    free = {key: [value for value in values if is_free(key, value)] for key, values in options.items()}
    return {key: values for key, values in free.items() if values}


def _changed(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """Return the config with some keys changed.

    If an axis of the critic or the reward model had the same size as the policy's, it is changed, too.
    """
    critic, reward_model = config.critic, config.reward_model

    def layout(own: ParallelConfig) -> ParallelConfig:
        axes = [key.removeprefix("parallel.") for key in LAYOUT if key in changes and _shares_axis(own, config, key)]
        return replace(own, **{axis: changes[f"parallel.{axis}"] for axis in axes})

    def optimizer(given: OptimizerConfig) -> OptimizerConfig:
        moved = changes.get("optimizer.megatron", {})
        distributed = bool(moved) or "optimizer.distributed" in changes or given.distributed
        return replace(given, distributed=distributed, megatron=given.megatron | moved)

    if config.has_critic:
        critic = replace(critic, parallel=layout(critic.parallel), optimizer=optimizer(critic.optimizer))
    if reward_model.path:
        reward_model = replace(reward_model, parallel=layout(reward_model.parallel))
    rollout = config.rollout
    if "rollout.colocated" in changes:  # NCCL allows one rank per GPU; trainer and servers never run at the same time
        rollout = replace(rollout, colocated=True, publication="ipc", max_staleness=0)
    if "rollout.server_args" in changes:
        rollout = replace(rollout, server_args=[*rollout.server_args, "--tp", str(changes["rollout.server_args"])])
    return replace(
        config,
        parallel=layout(config.parallel),
        optimizer=optimizer(config.optimizer),
        critic=critic,
        reward_model=reward_model,
        rollout=rollout,
        batch=replace(
            config.batch,
            tokens_per_microbatch=changes.get("batch.tokens_per_microbatch", config.batch.tokens_per_microbatch),
        ),
        megatron=config.megatron | changes.get("megatron", {}) | _cut(config, changes),
    )


def _shares_axis(own: ParallelConfig, config: TrainConfig, key: str) -> bool:
    axis = key.removeprefix("parallel.")
    return bool(getattr(own, axis) == getattr(config.parallel, axis))


def _cut(config: TrainConfig, changes: dict[str, Any]) -> dict[str, str]:
    """Return Megatron's option for an uneven pipeline if the layers do not divide evenly among the stages, else {}."""
    layers = read_architecture(config.model.path).layers
    count = changes.get("parallel.pipeline", 1) * config.parallel.virtual_pipeline
    return {"pipeline_model_parallel_layout": nearly_even(layers, count)} if layers % count else {}


def _overrides(config: TrainConfig, changes: dict[str, Any]) -> list[str]:
    words = []
    for key, value in changes.items():
        if key == "megatron":
            words += [f"megatron.{name}={setting}" for name, setting in value.items()]
        elif key == "optimizer.megatron":
            of_all = [f"{key}.{name}={str(setting).lower()}" for name, setting in value.items()]
            of_all += [] if config.optimizer.distributed else ["optimizer.distributed=true"]
            words += of_all + [f"critic.{word}" for word in of_all if config.has_critic]
        elif key == "rollout.colocated":
            words += ["rollout.colocated=true", "rollout.publication=ipc"]
            words += ["rollout.max_staleness=0"] if config.rollout.max_staleness else []
        elif key == "rollout.server_args":
            words.append(f"rollout.server_args=[{','.join([*config.rollout.server_args, '--tp', str(value)])}]")
        else:
            words.append(f"{key}={str(value).lower()}")
            if config.has_critic and key == "optimizer.distributed":
                words.append(f"critic.{words[-1]}")
            # Without these words, a section that sets the axis itself would keep the old size.
            others = {"critic": config.critic.parallel} if config.has_critic else {}
            others |= {"reward_model": config.reward_model.parallel} if config.reward_model.path else {}
            followers = [name for name, own in others.items() if key in LAYOUT and _shares_axis(own, config, key)]
            words += [f"{name}.{key}={value}" for name in followers]
    words += [f"megatron.{name}={cut}" for name, cut in _cut(config, changes).items()]
    return list(dict.fromkeys(words))
