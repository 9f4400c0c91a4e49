"""Compute how many of a model's parameters each rank of a parallel layout holds, without building the model."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl.config import PIPELINE_CUTS, LoraConfig, ParallelConfig
from megatron_rl.parallel import Cut, cut_by_upstream
from megatron_rl.weights.adapter_rules import adapted, adapter_rule
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.mapping import edges, layer_rules, sizes
from megatron_rl.weights.tensor_rules import EXPERT_BIAS, Rule


def check_layout(arch: Architecture, parallel: ParallelConfig, megatron: dict[str, Any]) -> None:
    """Raise ValueError if the model cannot be divided as the parallel layout and the section `megatron:` demand."""
    layers_of_stages(arch, parallel, megatron)
    if (arch.mixture or arch.latent) and parallel.tensor > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"parallel.sequence = False: {arch.family} under parallel.tensor > 1 needs sequence parallelism; leave the "
            f"key out."
        )
    if arch.mixture is None:
        for key in ("expert", "expert_tensor"):
            if getattr(parallel, key) > 1:
                raise ValueError(
                    f"parallel.{key} = {getattr(parallel, key)}: {arch.family} has no experts to share; leave it out."
                )
    elif (experts := arch.mixture.experts) % parallel.expert:
        raise ValueError(
            f"parallel.expert = {parallel.expert}: does not divide the model's {experts} experts; set it to "
            f"{_largest(parallel.expert, lambda size: experts % size == 0)}."
        )
    if arch.kv_heads < parallel.tensor and (arch.wide_qk_norm or arch.gated_attention):
        reason = f"has gated attention with {arch.kv_heads} key-value heads, and"
        if arch.wide_qk_norm:
            reason = f"normalizes its {arch.kv_heads} key-value heads together, so"
        raise ValueError(
            f"parallel.tensor = {parallel.tensor}: {arch.family} {reason} each rank needs at least one of them; set it "
            f"to {arch.kv_heads} or a divisor."
        )
    if arch.has_biases and parallel.expert_tensor > 1:
        raise ValueError(
            f"parallel.expert_tensor = {parallel.expert_tensor}: {arch.family}'s experts have biases, which "
            f"megatron.core does not divide; set it to 1."
        )
    if arch.delta_net is not None and parallel.context > 1:
        raise ValueError(
            f"parallel.context = {parallel.context}: the state of {arch.family}'s delta nets goes from row to row, and "
            f"is not handed on between context ranks; set it to 1."
        )
    for key, undivided in {"tensor": _undivided_by_tensor, "expert_tensor": _undivided_by_expert_tensor}.items():
        size = getattr(parallel, key)
        if name := undivided(arch, size):
            smaller = _largest(size, lambda size, undivided=undivided: not undivided(arch, size))
            raise ValueError(
                f"parallel.{key} = {size}: does not divide evenly with the model's {name}; set it to {smaller}."
            )


def _largest(below: int, fits: Callable[[int], bool]) -> int:
    """Return the largest size smaller than `below` for which `fits` is True. It is taken as True for size 1."""
    return next((size for size in range(below - 1, 1, -1) if fits(size)), 1)


def _undivided_by_tensor(arch: Architecture, ranks: int) -> str:
    """Return the first part of the model that `ranks` tensor-parallel ranks cannot share equally; '' if there is none.

    The part is described in words, such as `8 key-value heads`.
    """
    widths = {f"{arch.heads} attention heads": arch.heads}
    if arch.delta_net is not None:
        widths[f"{arch.delta_net.key_heads} key heads of delta nets"] = arch.delta_net.key_heads
    if arch.latent is None and arch.kv_heads >= ranks:
        widths[f"{arch.kv_heads} key-value heads"] = arch.kv_heads
    if arch.mixture is None or not all(arch.mixture.layers):
        widths[f"feed-forward width of {arch.ffn}"] = arch.ffn
    if arch.mixture is not None and (shared := arch.mixture.shared_ffn):
        widths[f"shared expert width of {shared}"] = shared
    if found := next((name for name, width in widths.items() if width % ranks), ""):
        return found
    is_shared = arch.latent is None and arch.kv_heads < ranks  # several ranks share a key-value head
    return f"{arch.kv_heads} key-value heads" if is_shared and ranks % arch.kv_heads else ""


def _undivided_by_expert_tensor(arch: Architecture, ranks: int) -> str:
    if arch.mixture is None or arch.mixture.ffn % ranks == 0:
        return ""
    return f"expert width of {arch.mixture.ffn}"


def layers_of_stages(arch: Architecture, parallel: ParallelConfig, megatron: dict[str, Any]) -> Cut:
    """Return, for each pipeline stage, the global layer numbers of each of its model chunks.

    megatron: the config section of this name. If it sets any of the keys PIPELINE_CUTS, megatron.core divides the
    layers accordingly. Otherwise all chunks have equally many layers. Raises ValueError if the layers cannot be divided
    in this way.
    """
    layers, stages, chunks = arch.layers, parallel.pipeline, parallel.virtual_pipeline
    count = stages * chunks
    fields = {key: megatron[key] for key in PIPELINE_CUTS if stages > 1 and megatron.get(key) is not None}
    each, rest = divmod(layers, count)
    reason = ""
    if not fields and not rest:  # same as upstream, without its slow import
        firsts = [[(chunk * stages + stage) * each for chunk in range(chunks)] for stage in range(stages)]
        return tuple(tuple(range(first, first + each) for first in row) for row in firsts)
    if fields:
        try:
            cut = cut_by_upstream(layers, stages, chunks, json.dumps(fields, default=str))
            # A chunk without parameters cannot train. Only the first and the last have any without a layer.
            if all(itertools.chain(cut[0][1:], *cut[1:-1], cut[-1][:-1])):
                return cut
            reason = " (a chunk between the first and the last would have no layer)"
        except ValueError as error:
            reason = f" ({error})"
    given = ", ".join(f"megatron.{key} = {value!r}" for key, value in fields.items())
    smaller = _largest(stages, lambda size: layers % (size * chunks) == 0)
    way_out = f"parallel.pipeline={smaller}"
    if chunks > 1 and (smaller == 1 or layers % (smaller * chunks)):  # chunks need stages
        way_out = f"parallel.pipeline={_largest(stages, lambda size: layers % size == 0)} parallel.virtual_pipeline=1"
    names = ", ".join(f"megatron.{key}" for key in fields)
    way_out = f"leave out {names}" if layers % count == 0 else f"set {way_out}" + f" without {names}" * bool(fields)
    if layers >= count - 2:
        way_out = f"set megatron.pipeline_model_parallel_layout='{nearly_even(layers, count)}' alone, or {way_out}"
    raise ValueError(
        f"{given or 'parallel'}: pipeline({stages}) x virtual_pipeline({chunks}) does not divide the model's {layers} "
        f"layers{reason}; {way_out}."
    )


def nearly_even(layers: int, count: int) -> str:
    """Return a `pipeline_model_parallel_layout` string for `count` chunks whose sizes differ by at most one layer.

    The chunks directly after the first one get the additional layers, because the first chunk also holds the embedding
    and the last one the head.
    """
    each, rest = divmod(layers, count)
    sizes = [each + (0 < number <= rest) for number in range(count)]
    middle = "".join(f"(t*{size}|)*{len(list(run))}" for size, run in itertools.groupby(sizes[1:-1]))
    return f"Et*{sizes[0]}|{middle}t*{sizes[-1]}L"


@dataclass(frozen=True)
class Shares:
    """Numbers of parameters that one rank holds: those of experts, and all others (`dense`).

    They are counted separately because the optimizer is sharded over replicas, and experts have other replicas.
    """

    dense: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: Shares) -> Shares:
        return Shares(self.dense + other.dense, self.expert + other.expert)


def parameters_of_stage(
    arch: Architecture, parallel: ParallelConfig, stage: int, megatron: dict[str, Any] | None = None
) -> Shares:
    """Return the number of parameters on each rank of a pipeline stage. All ranks of a stage hold equally many.

    megatron: the config section of this name, see `layers_of_stages`.
    """
    embedding, final_norm, output = edges(arch)
    rules = [embedding] if stage == 0 else []
    if stage == parallel.pipeline - 1:
        rules.append(final_norm)
        if not arch.tied or parallel.pipeline > 1:  # the last stage has a copy of a tied embedding
            rules.append(output)
    shares = _shares(rules, arch, parallel)
    alike: dict[tuple[bool, bool], Shares] = {}
    for number in itertools.chain(*layers_of_stages(arch, parallel, megatron or {})[stage]):
        kind = arch.kind(number)
        if kind not in alike:
            alike[kind] = _shares(layer_rules(arch, number), arch, parallel)
        shares += alike[kind]
    return shares


def adapters_of_stage(
    arch: Architecture, lora: LoraConfig, parallel: ParallelConfig, stage: int, megatron: dict[str, Any] | None = None
) -> Shares:
    """Return the number of adapter parameters on each rank of a pipeline stage.

    megatron: the config section of this name, see `layers_of_stages`.
    """
    words, shares = sizes(arch), Shares()
    numbers = itertools.chain(*layers_of_stages(arch, parallel, megatron or {})[stage])
    for rule in itertools.chain.from_iterable(layer_rules(arch, number) for number in numbers):
        parts = adapted(rule, lora)
        dims = [tuple(words[word] for word in dims.split()) for dims in rule.hf.values()]
        widths = {"lora_A": len(parts) * dims[0][-1], "lora_B": sum(rows for rows, *_ in dims)}
        for part, width in widths.items() if parts else ():
            shares += _share(adapter_rule(rule, part, lora), lora.rank * width, arch, parallel)
    return shares


def parameters_of_mtp_layer(arch: Architecture, parallel: ParallelConfig) -> Shares:
    """Return the number of parameters of a model's multi-token-prediction layer on each rank of the last stage."""
    layer = arch.mtp_layer()
    return _shares([*edges(layer), *layer_rules(layer, 0)], layer, parallel)


def parameters(arch: Architecture) -> int:
    """Return the number of parameters of the whole model."""
    return parameters_of_stage(arch, ParallelConfig(), 0).total


def attention_parameters(arch: Architecture) -> int:
    """Return the number of attention parameters of all layers together.

    Servers with data-parallel attention hold one copy of these parameters per replica.
    """
    rules = (rule for number in range(arch.layers) for rule in layer_rules(arch, number))
    own = [rule for rule in rules if rule.megatron.startswith("self_attention.")]
    return _shares(own, arch, ParallelConfig()).total


def largest_tensor(arch: Architecture) -> int:
    """Return the number of elements in the largest HF tensor of the model."""
    words = sizes(arch)
    firsts = {arch.kind(number): number for number in range(arch.layers)}.values()
    rules = [*edges(arch), *(rule for number in firsts for rule in layer_rules(arch, number))]
    return max(math.prod(words[word] for word in dims.split()) for rule in rules for dims in rule.hf.values())


def _shares(rules: list[Rule], arch: Architecture, parallel: ParallelConfig) -> Shares:
    """Return how many of the parameters of these rules one rank holds.

    A router's bias is not counted, because it is a buffer.
    """
    words, shares = sizes(arch), Shares()
    # The vocabulary is padded so that all ranks have equally many rows.
    words["vocab"] = -(-arch.vocab // parallel.tensor) * parallel.tensor
    for rule in rules:
        own = words | {"experts": 1} if rule.is_stacked else words  # one expert's part of a stack
        if rule.megatron != EXPERT_BIAS:
            whole = sum(math.prod(own[word] for word in dims.split()) for dims in rule.hf.values())
            shares += _share(rule, whole, arch, parallel)
    return shares


def _share(rule: Rule, whole: int, arch: Architecture, parallel: ParallelConfig) -> Shares:
    """Return how many elements of a rule's parameter one rank holds.

    whole: number of elements of the undivided parameter. In an expert's rule, each expert has such a parameter, and the
    rank's experts are counted together.
    """
    is_cut = rule.layout.split_dim is not None
    if "{}" not in rule.megatron:
        return Shares(dense=whole // parallel.tensor if is_cut else whole)
    assert arch.mixture is not None
    experts = arch.mixture.experts // parallel.expert
    return Shares(expert=experts * (whole // parallel.expert_tensor if is_cut else whole))
