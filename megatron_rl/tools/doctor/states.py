"""Collects the activations ("states") of one token sequence from the trainer, transformers and the embedded server.

A place is a named point of the forward pass, such as `layer 3: attention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.tools.embedded_server.transformer import Decoder, KVCache, Span
from megatron_rl.types import TrajectoryBatch

States = dict[str, Tensor]
"""{place: its states, `[T, ...]` float32}. `log-probs` has shape `[T - 1]`: the log-prob of each token but the
first."""
LAYER_PLACES = ("first norm", "attention", "second norm", "feed-forward")


def places(layers: int) -> list[str]:
    """Return all places in the order of the forward pass."""
    inner = [place_of(layer, place) for layer in range(layers) for place in LAYER_PLACES]
    return ["embedding", *inner, "last norm", "logits", "log-probs"]


def place_of(layer: int, place: str) -> str:
    return place if place in ("embedding", "last norm", "logits") else f"layer {layer}: {place}"


@torch.no_grad()
def of_transformers(model: PreTrainedModel, ids: list[int]) -> States:
    """Return the states of Hugging Face's own model."""
    body, found = model.model, States()
    modules = {"embedding": body.embed_tokens, "last norm": body.norm}
    for number, layer in enumerate(body.layers):
        parts = (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)
        modules |= {place_of(number, place): part for place, part in zip(LAYER_PLACES, parts, strict=True)}
    with _hooked(modules, found):
        logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits
    return found | _ends(logits[0].float().cpu(), ids)


@torch.no_grad()
def of_embedded(decoder: Decoder, ids: list[int]) -> States:
    """Return the states of the embedded server's model, computed with a KV cache that is used only here."""
    found = States()
    cache = KVCache(decoder.config, decoder.dtype, decoder.device)
    cache.resize(rows=1, capacity=len(ids), kept=[])
    decoder.watch = lambda layer, place, states: found.update({place_of(layer, place): _kept(states)})
    try:
        hidden = decoder.prefill(torch.tensor(ids, device=decoder.device), [Span(0, 0, len(ids))], cache)
        logits = decoder.logits(hidden)
    finally:
        decoder.watch = lambda layer, place, states: None
    return found | {"last norm": _kept(hidden)} | _ends(logits.float().cpu(), ids)


@torch.no_grad()
def of_trainer(engine: MegatronEngine, ids: list[int]) -> States:
    """Return the states of the trainer, which must run on one process with Megatron's local layers."""
    found, chunk = States(), engine.chunks[0]
    modules = {"embedding": chunk.embedding, "last norm": chunk.decoder.final_layernorm}
    for number, layer in enumerate(chunk.decoder.layers):
        parts = (layer.input_layernorm, layer.self_attention, layer.pre_mlp_layernorm, layer.mlp)
        modules |= {place_of(number, place): part for place, part in zip(LAYER_PLACES, parts, strict=True)}
    batch = _one_sequence(ids)

    def keep(logits: Tensor, rows: Any) -> Tensor:
        found["logits"] = _kept(logits.as_subclass(Tensor))
        return logits.as_subclass(Tensor)[:, 0] * 0.0

    engine.eval()
    with _hooked(modules, found):
        engine.forward(batch, post_hook=keep)
    return found | {"log-probs": engine.forward(batch)[1:].float().cpu()}


def of_layout(engine: MegatronEngine, ids: list[int]) -> States:
    """Return the states of a trainer in any layout without context parallelism, on the main rank; {} on other ranks.

    Collective: every rank calls it. There are no logits, because no rank has whole rows of them.
    """
    groups, found = engine.groups, States()
    modules: dict[str, nn.Module | None] = {}
    for chunk in engine.chunks:
        ends = {"embedding": getattr(chunk, "embedding", None), "last norm": chunk.decoder.final_layernorm}
        modules |= {place: module for place, module in ends.items() if module is not None}
        for layer in chunk.decoder.layers:
            parts = (layer.input_layernorm, layer.self_attention, layer.pre_mlp_layernorm, layer.mlp)
            named = zip(LAYER_PLACES, parts, strict=True)
            modules |= {place_of(layer.layer_number - 1, place): part for place, part in named}
    engine.eval()
    with _hooked(modules, found):
        logprobs = engine.forward(_one_sequence(ids))
    own = (groups.data.rank, groups.tensor.rank, found)
    told: list[Any] = [None] * groups.world_size
    dist.all_gather_object(told, own, group=groups.control)
    if not groups.is_main:
        return States()
    is_split = engine.chunks[0].config.sequence_parallel
    whole = States()
    for place in dict.fromkeys(place for _, _, states in told for place in states):
        shares = {tensor: states[place] for replica, tensor, states in told if replica == 0 and place in states}
        rows = torch.cat([shares[rank] for rank in sorted(shares)]) if is_split else shares[0]
        whole[place] = rows[: len(ids) - 1]  # no label follows the last token, so its row may be padding
    return whole | {"log-probs": logprobs[1:].float().cpu()}


def _one_sequence(ids: list[int]) -> TrajectoryBatch:
    return TrajectoryBatch.from_padded(
        {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids)),
            "loss_mask": torch.tensor([[0] + [1] * (len(ids) - 1)]),
        }
    )


def _kept(states: Tensor) -> Tensor:
    return states.detach().float().cpu().clone()  # residuals may be added in place later


def _ends(logits: Tensor, ids: list[int]) -> States:
    rows = logits[:-1].log_softmax(-1)
    return {"logits": logits, "log-probs": rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]}


@contextlib.contextmanager
def _hooked(modules: Mapping[str, nn.Module | None], found: States) -> Iterator[None]:
    """Inside the `with` block, store a CPU copy of each module's output in `found`, under the module's place.

    modules: {place: module}; places whose module is None are skipped. If a module returns a tuple, its first entry is
    stored.
    """

    def keep(place: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            found[place] = _kept(states).reshape(-1, states.shape[-1])

        return hook

    handles = [it.register_forward_hook(keep(place)) for place, it in modules.items() if it is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
