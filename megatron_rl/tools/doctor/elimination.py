"""Finds why log-probs of a server are wrong if the server's activations cannot be inspected, as with SGLang.

The embedded server's model recomputes the server's replies with one known error after another. An error that gives the
server's log-probs is reported as the cause. Stale weights are recognised too, because the doctor first published the
right weights times EARLIER.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.tools.doctor.diagnosis import ALIKE
from megatron_rl.tools.embedded_server.decoder_config import DecoderConfig
from megatron_rl.tools.embedded_server.transformer import Decoder, KVCache, Span

EARLIER = 1.1
"""Factor by which all weights were scaled in the publication before the checked one."""
ALIKE_WITH_KEYS = 0.3
"""Replaces ALIKE when the error is stale keys. It is larger because we cannot know exactly which keys a server kept."""
TRIED = 4
"""Each error is first tried on this many replies. An error that explains these is then tried on all replies."""
MOST_EXPERTS = 16
"""Swapped experts are only tried in models with at most this many experts per layer."""
Reply = tuple[list[int], Tensor, Tensor]
"""Ids `[T]` of a prompt and its reply, mask `[T]` bool of the sampled tokens, and the server's log-probs `[T]`."""
Change = Callable[[Decoder], contextlib.AbstractContextManager[object]]
"""Function that takes a model and returns a context manager, inside which the model has a known error."""


@torch.no_grad()
def explain(folder: Path, replies: Sequence[Reply], temperature: float, tolerance: float) -> str:
    """Return the known error that gives the server's log-probs; "" if none does.

    folder: the model that the server should have. tolerance: largest difference in nats that counts as equal.
    """
    config = DecoderConfig.read(folder)
    right = _decoder(folder, config, replies)
    whole = _distance(right, replies, temperature)
    limit = max(tolerance, ALIKE * whole)

    def explains(decoder: Decoder) -> bool:
        return all(_distance(decoder, some, temperature) <= limit for some in (replies[:TRIED], replies))

    for text, change in weight_errors(right, config):
        with change(right):
            if explains(right):
                return text
    for text, changed in config_errors(config):
        if explains(_decoder(folder, changed, replies)):
            return text
    if _distance(right, replies, temperature, keeps_keys=True) <= max(tolerance, ALIKE_WITH_KEYS * whole):
        return "keys of earlier weights are in the KV cache: it was not flushed"
    return ""


def _decoder(folder: Path, config: DecoderConfig, replies: Sequence[Reply]) -> Decoder:
    context = max(64, *(len(ids) for ids, _, _ in replies))
    decoder = Decoder(config, dtype=torch.float32, device=torch.device("cpu"), context_length=context)
    decoder.load(folder)
    return decoder


def _distance(decoder: Decoder, replies: Sequence[Reply], temperature: float, *, keeps_keys: bool = False) -> float:
    """Return the largest difference between the decoder's and the server's log-probs, in nats; infinite for NaN.

    keeps_keys: compute the keys of the prompt's tokens, except the last, with the earlier weights.
    """
    most = 0.0
    for ids, mask, told in replies:
        at = mask.nonzero()[:, 0]
        cache = KVCache(decoder.config, decoder.dtype, decoder.device)
        cache.resize(rows=1, capacity=len(ids), kept=[])
        tokens, kept = torch.tensor(ids), int(at[0]) - 1 if keeps_keys else 0
        if kept > 0:
            with _scaled(decoder, list(decoder.parameters)):
                decoder.prefill(tokens[:kept], [Span(0, 0, kept)], cache)
        logits = decoder.logits(decoder.prefill(tokens[kept:], [Span(0, kept, len(ids) - kept)], cache)).float()
        rows = (logits[at - 1 - kept] / temperature).log_softmax(-1)
        own = rows.gather(1, tokens[at][:, None])[:, 0]
        most = max(most, float((own - told[at].float()).abs().nan_to_num(torch.inf).max()))
    return most


def weight_errors(decoder: Decoder, config: DecoderConfig) -> Iterator[tuple[str, Change]]:
    """Yield each known weight error, as text, and the Change that introduces it. Errors in many tensors come first."""
    names = list(decoder.parameters)

    def stale(chosen: list[str]) -> Change:
        return lambda model: _scaled(model, chosen)

    yield "all weights are those of the publication before", stale(names)
    for layer in range(config.num_layers):
        own = [name for name in names if name.startswith(f"model.layers.{layer}.")]
        yield f"layer {layer}: all its weights are those of the publication before: it is stale", stale(own)
    pairs = [(name, name.replace("gate_proj", "up_proj")) for name in names if "gate_proj" in name]
    yield "gate and up are swapped", lambda model: _swapped(model, pairs)
    for layer in range(config.num_layers):
        here = [pair for pair in pairs if pair[0].startswith(f"model.layers.{layer}.")]
        yield f"layer {layer}: gate and up are swapped", lambda model, here=here: _swapped(model, here)
    if config.experts is not None and config.experts.count <= MOST_EXPERTS:
        for a, b in itertools.combinations(range(config.experts.count), 2):
            for layers in ([*config.experts.layers], *([layer] for layer in config.experts.layers)):
                both = [
                    tuple(f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight" for expert in (a, b))
                    for layer in layers
                    for kind in ("gate", "up", "down")
                ]
                where = f"layer {layers[0]}: " if len(layers) == 1 else ""
                yield f"{where}experts {a} and {b} are swapped", lambda model, both=both: _swapped(model, both)
    for name in names:
        yield f"{name}: is that of the publication before: it is stale", stale([name])
        rows = len(decoder.parameters[name])
        for first, end in ((0, rows // 2), (rows // 2, rows)):
            for what, factor in (("are those of the publication before", EARLIER), ("are zero", 0.0)):
                text = f"{name}: rows {first} to {end - 1} of {rows} {what}: a bad shard"
                yield text, lambda model, n=name, f=first, e=end, by=factor: _scaled(model, [n], slice(f, e), by)
    if config.qk_norm:
        yield "the norms of queries and keys are left out", lambda model: _without(model, "qk_norm")
    if config.qkv_bias:
        yield "the biases of queries, keys and values are left out", lambda model: _without(model, "qkv_bias")


def config_errors(config: DecoderConfig) -> Iterator[tuple[str, DecoderConfig]]:
    """Yield (text, config) for each error that wrong server arguments can cause. The config contains the error."""
    rope = dict(config.rope)
    if rope.get("rope_type", "default") != "default":
        plain = replace(config, rope={"rope_theta": rope["rope_theta"]})
        yield f"the rope's scaling ({rope['rope_type']}) is left out", plain
    for base in (1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7):
        if base != rope["rope_theta"]:
            text = f"the rope's base is {base:g}, and rope_theta = {rope['rope_theta']:g}"
            yield text, replace(config, rope=rope | {"rope_theta": base})
    for factor in (2.0, 4.0, 8.0):
        scaled = {"rope_type": "linear", "factor": factor, "rope_theta": rope["rope_theta"]}
        yield f"the rope is scaled linearly by {factor:g}", replace(config, rope=scaled)
    for eps in (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 1e-2, 0.1):
        if eps != config.rms_norm_eps:
            text = f"the norms' eps is {eps:g}, and rms_norm_eps = {config.rms_norm_eps:g}"
            yield text, replace(config, rms_norm_eps=eps)
    if config.experts is not None:
        flipped = replace(config.experts, renormalised=not config.experts.renormalised)
        yield (
            "the weights of the chosen experts are (not) rescaled to sum to 1",
            replace(config, experts=flipped),
        )
    if not config.tied:
        yield "the head is the embedding, though they are not tied", replace(config, tied=True)


@contextlib.contextmanager
def _scaled(decoder: Decoder, names: list[str], rows: slice | None = None, factor: float = EARLIER) -> Iterator[None]:
    kept = {name: decoder.parameters[name].clone() for name in names}
    for name in names:
        decoder.parameters[name][rows or slice(None)] *= factor
    try:
        yield
    finally:
        for name, weight in kept.items():
            decoder.parameters[name].copy_(weight)


@contextlib.contextmanager
def _swapped(decoder: Decoder, pairs: Sequence[tuple[str, ...]]) -> Iterator[None]:
    def swap() -> None:
        for one, other in pairs:
            kept = decoder.parameters[one].clone()
            decoder.parameters[one].copy_(decoder.parameters[other])
            decoder.parameters[other].copy_(kept)

    swap()
    try:
        yield
    finally:
        swap()


@contextlib.contextmanager
def _without(decoder: Decoder, part: str) -> Iterator[None]:
    kept = [getattr(layer, part) for layer in decoder.layers]
    for layer in decoder.layers:
        setattr(layer, part, None)
    try:
        yield
    finally:
        for layer, value in zip(decoder.layers, kept, strict=True):
            setattr(layer, part, value)
