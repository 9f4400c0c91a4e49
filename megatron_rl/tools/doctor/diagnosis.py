"""Finds the first place at which an implementation differs from Hugging Face's model, and the likely cause.

`wrong_weights` compares weights. `diagnose` compares states: activations at named places of the forward pass. It
recomputes the first wrong place from the reference's states, with one known error after another. An error that
reproduces the wrong states is reported as the cause.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.tools.doctor.finding import Finding
from megatron_rl.tools.doctor.states import States, place_of, places
from megatron_rl.tools.embedded_server.decoder_config import DecoderConfig, inverse_frequencies

ALIKE = 0.05
"""A known error counts as the cause if recomputing with it leaves at most this share of the difference."""
Weights = Mapping[str, Tensor]
Variants = dict[str, Callable[[], Tensor]]
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


def wrong_weights(who: str, held: Weights, true: Weights) -> Finding | None:
    """Compare the weights `held` by implementation `who` with the true ones, by name. Return None if they agree.

    The finding names missing tensors, swapped tensors, a stale layer or the rows that differ.
    """
    both = [name for name in true if name in held]
    wrong = [name for name in both if not torch.equal(held[name].float(), true[name].float())]
    if missing := [name for name in true if name not in held and name != "lm_head.weight"]:
        return Finding(who=who, where=missing[0], cause=f"this tensor is missing ({len(missing)} are)")
    if not wrong:
        return None
    first = wrong[0]
    for name in wrong:
        others = (other for other in both if other != name and true[other].shape == true[name].shape)
        if source := next((other for other in others if torch.equal(held[name].float(), true[other].float())), ""):
            return Finding(
                who=who, where=name, cause=f"holds the values of {source}: {_swap(name, source)} are swapped"
            )
    layers = {match[1] for name in wrong if (match := re.search(r"layers\.(\d+)\.", name))}
    if len(layers) == 1 and len(wrong) > 1 and all(f"layers.{next(iter(layers))}." in name for name in wrong):
        if len(wrong) == sum(f"layers.{next(iter(layers))}." in name for name in both):
            return Finding(
                who=who, where=f"layer {next(iter(layers))}", cause="all its weights are others: it is stale"
            )
    if len(wrong) == len(both):
        return Finding(who=who, where="all tensors", cause="the weights are those of another version or model")
    rows = (held[first].float() != true[first].float()).flatten(1).any(1) if true[first].dim() > 1 else None
    part = ""
    if rows is not None and not rows.all():
        places = rows.nonzero()[:, 0]
        part = f", rows {int(places[0])} to {int(places[-1])} of {len(rows)}: a bad shard"
    more = f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else ""
    finite = "" if held[first].isfinite().all() else ", NaN or infinite"
    return Finding(who=who, where=first, cause=f"differs from the trainer's weights{finite}{part}{more}")


def _swap(name: str, source: str) -> str:
    if (a := _EXPERT.fullmatch(name)) and (b := _EXPERT.fullmatch(source)) and a[3] == b[3]:
        return f"experts {a[2]} and {b[2]}"
    if "gate" in name + source and "up_proj" in name + source:
        return "gate and up"
    return "the two tensors"


def first_place(found: States, reference: States, layers: int, tolerance: float) -> tuple[str, int] | None:
    """Return the first place at which states differ, and its first token position that does; None if all agree.

    Places are in the order of the forward pass. tolerance: maximum of `_distance` at which two rows agree.
    """
    for place in places(layers):
        if place not in found:
            continue
        a, b = found[place], reference[place]
        count = min(len(a), len(b))  # a trainer may not compute the last row
        wrong = _distance(a[:count], b[:count]) > tolerance
        if bool(wrong.any()):
            return place, int(wrong.nonzero()[0, 0])
    return None


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Return each row's largest absolute difference, divided by the root mean square of `b`'s row.

    For 1-D tensors, return the absolute differences. A distance that is NaN is returned as infinite.
    """
    if a.dim() == 1:
        return (a - b).abs().nan_to_num(torch.inf)
    scale = b.square().mean(-1).sqrt().clamp_min(1e-12)
    return ((a - b).abs().amax(-1) / scale).nan_to_num(torch.inf)


def diagnose(
    who: str,
    found: States,
    reference: States,
    weights: Weights,
    config: DecoderConfig,
    ids: list[int],
    tolerance: float,
) -> Finding | None:
    """Return where an implementation's states first differ from the reference's, and why. None if they agree.

    weights: the tensors, by Hugging Face name, with which both compute.
    """
    place = first_place(found, reference, config.num_layers, tolerance)
    if place is None:
        return None
    name, position = place
    expected = reference[name][: len(found[name])]
    variants = _variants(name, reference, weights, config, ids)
    whole = float(_distance(found[name][: len(expected)], expected).max())
    cause = "no known error explains it"
    if name == "logits":
        cause = "the tie of head and embedding is lost" if config.tied else "the head has other weights"
    for text, compute in variants.items():
        made = compute()[: len(expected)]
        left = float(_distance(found[name][: len(made)], made).max())
        if left <= max(tolerance, ALIKE * whole):
            cause = text
            break
    return Finding(who=who, where=f"{name}, position {position}", cause=cause)


def _variants(place: str, reference: States, weights: Weights, config: DecoderConfig, ids: list[int]) -> Variants:
    """Map each known error at `place`, as text, to a function that computes the states with this error."""
    match = re.fullmatch(r"layer (\d+): (.*)", place)
    if match is None:
        return _variants_of_ends(place, reference, weights, ids)
    layer, part = int(match[1]), match[2]
    if part.endswith("norm"):
        return _variants_of_norm(layer, part, reference, weights, config)
    x, prefix = (
        reference[place_of(layer, "first norm" if part == "attention" else "second norm")],
        f"model.layers.{layer}.",
    )
    if part == "attention":
        return _variants_of_attention(x, {k.removeprefix(prefix): v.float() for k, v in weights.items()}, config)
    own = {
        name.removeprefix(f"{prefix}mlp."): w.float() for name, w in weights.items() if name.startswith(f"{prefix}mlp.")
    }
    if config.experts is not None and layer in config.experts.layers:
        return {
            "the weights of the chosen experts are (not) rescaled to sum to 1": lambda: _mixture(x, own, config, True),
            "the routers' experts are shifted by one": lambda: _mixture(x, own, config, False, shift=1),
            "gate and up are swapped": lambda: _mixture(x, own, config, False, swaps=True),
        }
    gate, up, down = (own[f"{name}_proj.weight"] for name in ("gate", "up", "down"))
    biases = [own.get(f"{name}_proj.bias") for name in ("gate", "up", "down")]
    g, u = F.linear(x, gate, biases[0]), F.linear(x, up, biases[1])
    return {
        "gate and up are swapped": lambda: F.linear(F.silu(u) * g, down, biases[2]),
        "the activation is gelu, and should be silu": lambda: F.linear(F.gelu(g) * u, down, biases[2]),
        "the activation is gelu (tanh), and should be silu": lambda: F.linear(
            F.gelu(g, approximate="tanh") * u, down, biases[2]
        ),
        "the biases are left out": lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
    }


def _variants_of_ends(place: str, reference: States, weights: Weights, ids: list[int]) -> Variants:
    if place == "embedding":
        table = weights["model.embed_tokens.weight"].float()
        return {
            "the embedding is scaled by the square root of the hidden size": lambda: table[ids] * table.shape[1] ** 0.5,
            "the tokens are shifted by one": lambda: table[[ids[0], *ids[:-1]]],
        }
    if place == "logits":
        hidden, embedding = reference["last norm"], weights["model.embed_tokens.weight"].float()
        return {"the head is the embedding, though they are not tied": lambda: F.linear(hidden, embedding)}
    if place == "log-probs":
        logits = reference["logits"]
        targets = torch.tensor(ids)

        def at(shift: int) -> Tensor:
            rows = logits[:-1].log_softmax(-1)
            return rows.gather(1, targets.roll(-1 - shift)[:-1, None])[:-1, 0]  # at shift 1 the last row has no label

        found = {
            "the labels are shifted by one more token": lambda: at(1),
            "the labels are not shifted": lambda: at(-1),
        }
        for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0):
            found[f"the logits are divided by a temperature of {temperature}"] = lambda t=temperature: (
                (logits[:-1] / t).log_softmax(-1).gather(1, targets[1:, None])[:, 0]
            )
        return found
    return {}


def _variants_of_norm(layer: int, part: str, reference: States, weights: Weights, config: DecoderConfig) -> Variants:
    names = {"first norm": "input_layernorm", "second norm": "post_attention_layernorm"}
    weight = weights[f"model.layers.{layer}.{names[part]}.weight"].float()
    hidden = residual(reference, layer, part)
    size = (config.hidden_size,)

    def norm(eps: float) -> Tensor:
        return F.rms_norm(hidden, size, weight, eps)

    def rounded() -> Tensor:
        low = hidden.bfloat16()
        return F.rms_norm(low, size, weight.bfloat16(), config.rms_norm_eps).float()

    found: Variants = {
        f"the norm's eps is {eps:g}, and rms_norm_eps = {config.rms_norm_eps:g}": lambda eps=eps: norm(eps)
        for eps in (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 1e-2, 0.1)
        if eps != config.rms_norm_eps
    }
    found["the norm adds 1 to its weight"] = lambda: F.rms_norm(hidden, size, weight + 1, config.rms_norm_eps)
    found["the mean is subtracted: a layer norm"] = lambda: F.layer_norm(
        hidden, size, weight, None, config.rms_norm_eps
    )
    return {"the norm is computed in bfloat16": rounded} | found


def residual(reference: States, layer: int, part: str) -> Tensor:
    """Return the hidden state in front of a norm: the embedding plus all earlier outputs of attention and MLP."""
    hidden = reference["embedding"].clone()
    for number in range(layer + 1):
        if number == layer and part == "first norm":
            break
        hidden += reference[place_of(number, "attention")]
        if number < layer:
            hidden += reference[place_of(number, "feed-forward")]
    return hidden


def _variants_of_attention(x: Tensor, own: dict[str, Tensor], config: DecoderConfig) -> Variants:
    def attend(changed: DecoderConfig = config, **options: Any) -> Callable[[], Tensor]:
        return lambda: attention(x, own, changed, **options)

    rope, found = dict(config.rope), Variants()
    for base in (1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7):
        if base != rope["rope_theta"]:
            changed = replace(config, rope=rope | {"rope_theta": base})
            found[f"the rope's base is {base:g}, and rope_theta = {rope['rope_theta']:g}"] = attend(changed)
    if rope.get("rope_type", "default") != "default":
        plain = replace(config, rope={"rope_theta": rope["rope_theta"]})
        found[f"the rope's scaling ({rope['rope_type']}) is left out"] = attend(plain)
    for factor in (2.0, 4.0, 8.0):
        scaled = replace(config, rope={"rope_type": "linear", "factor": factor, "rope_theta": rope["rope_theta"]})
        found[f"the rope is scaled linearly by {factor:g}"] = attend(scaled)
    return found | {
        "the rope pairs neighbouring numbers, and should pair halves of a head": attend(interleaves=True),
        "there is no rope": attend(rotates=False),
        "the rope's positions run backwards": attend(sign=-1.0),
        "the norms of queries and keys are left out": attend(replace(config, qk_norm=False)),
        "the biases of queries, keys and values are left out": attend(replace(config, qkv_bias=False)),
        "the scores are not divided by the root of the head's size": attend(scale=1.0),
        "the scores are divided by the head's size": attend(scale=1.0 / config.head_dim),
        "query heads are matched with key heads in another order": attend(interleaves_heads=True),
        "attention is not causal": attend(is_causal=False),
    }


def attention(
    x: Tensor,
    own: dict[str, Tensor],
    config: DecoderConfig,
    *,
    scale: float | None = None,
    sign: float = 1.0,
    rotates: bool = True,
    interleaves: bool = False,
    interleaves_heads: bool = False,
    is_causal: bool = True,
) -> Tensor:
    """Compute a layer's attention over one sequence `[T, H]` in float32. The options introduce known errors.

    own: weights by name, without the layer's prefix `model.layers.N.`.
    """
    length, dim = len(x), config.head_dim
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    parts = {}
    for name, count in heads.items():
        bias = own.get(f"self_attn.{name}_proj.bias") if config.qkv_bias else None
        parts[name] = F.linear(x, own[f"self_attn.{name}_proj.weight"], bias).view(length, count, dim).transpose(0, 1)
    angles = torch.outer(torch.arange(length).float(), inverse_frequencies(config.rope, dim))
    cos, sin = angles.cos(), sign * angles.sin()
    for name in ("q", "k"):
        if config.qk_norm:
            parts[name] = F.rms_norm(parts[name], (dim,), own[f"self_attn.{name}_norm.weight"], config.rms_norm_eps)
        if rotates:
            whole = parts[name]
            a, b = (whole[..., ::2], whole[..., 1::2]) if interleaves else whole.chunk(2, -1)
            pair = a * cos - b * sin, b * cos + a * sin
            parts[name] = torch.stack(pair, -1).flatten(-2) if interleaves else torch.cat(pair, -1)
    repeats = config.num_heads // config.num_kv_heads
    for name in ("k", "v"):
        parts[name] = (
            parts[name].repeat(repeats, 1, 1) if interleaves_heads else parts[name].repeat_interleave(repeats, 0)
        )
    q, k, v = (parts[name][None] for name in "qkv")
    out = (
        F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)[0].transpose(0, 1).reshape(length, -1)
    )
    return F.linear(out, own["self_attn.o_proj.weight"], own.get("self_attn.o_proj.bias") if config.o_bias else None)


def _mixture(
    x: Tensor, own: dict[str, Tensor], config: DecoderConfig, flips: bool, *, shift: int = 0, swaps: bool = False
) -> Tensor:
    experts = config.experts
    assert experts is not None
    chances, chosen = F.linear(x, own["gate.weight"]).softmax(-1).topk(experts.per_token)
    if experts.renormalised != flips:
        chances = chances / chances.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for row, slot in itertools.product(range(len(x)), range(experts.per_token)):
        expert = (int(chosen[row, slot]) + shift) % experts.count
        gate, up, down = (own[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        g, u = F.linear(x[row], gate), F.linear(x[row], up)
        made = F.silu(u) * g if swaps else F.silu(g) * u
        out[row] += F.linear(made, down) * chances[row, slot]
    return out
