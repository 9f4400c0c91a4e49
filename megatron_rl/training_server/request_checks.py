"""Checks of what clients send, before any rank works on it. Each check raises ValueError."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.rules import refuse
from megatron_rl.training_server.losses import CLIPS, LOSSES
from megatron_rl.training_server.shared_engine import TARGETS, AdamStep, Adapted
from megatron_rl.training_server.wire import Datum

CLIENT_SIDE = "call forward_backward_custom with a function, whose gradient the client computes"
WITHOUT = {"stable_reinforce": "needs what the official service records while it samples, whose form is not published"}
"""Losses that the client offers and this server lacks -> the reason."""
SEVERAL = "cross_entropy"
"""Name of the only loss for which a token may have several targets."""
MOST_TARGETS = 128
"""Maximum number of targets of a token. Each target costs one multiplication with the output layer."""


def checked_data(
    data: Sequence[Datum], loss: str, options: Mapping[str, Any], *, vocab: int, longest: int
) -> list[Datum]:
    """Check the data, and return it with only the inputs that the loss reads.

    The targets become int64 and all other inputs float32. vocab: size of the vocabulary. longest: maximum number of
    tokens of a datum.
    """
    check_loss(loss, options)
    if not data:
        raise ValueError("data: is empty; send at least one datum.")
    wanted, width = LOSSES[loss].inputs, _width(data[0], loss)
    extra = [key for key in CLIPS if key in LOSSES[loss].options and any(key in datum.inputs for datum in data)]
    found = []
    for number, datum in enumerate(data):
        place, length = f"data[{number}]", len(datum.tokens)
        if not 1 <= length <= longest:
            raise ValueError(f"{place}.model_input: has {length} tokens, and must have 1 to {longest}; cut it.")
        check_ids(f"{place}.model_input", datum.tokens, vocab)
        inputs = {TARGETS: _column(datum, TARGETS, number, loss, width).long()}
        check_ids(f"{place}.loss_fn_inputs['{TARGETS}']", inputs[TARGETS], vocab)
        for key in (*wanted, *extra):
            inputs[key] = _column(datum, key, number, loss, width).float()
            if not bool(torch.isfinite(inputs[key]).all()):
                rule = "has numbers that are NaN or infinite; correct them"
                raise ValueError(f"{place}.loss_fn_inputs[{key!r}]: {rule}.")
        found.append(Datum(datum.tokens, inputs))
    return found


def check_loss(loss: str, options: Mapping[str, Any]) -> None:
    if loss not in LOSSES:
        why = f" {WITHOUT[loss]}, and" if loss in WITHOUT else ""
        has = f"this server has {', '.join(LOSSES)}"
        raise ValueError(f"loss_fn = {loss!r}:{why} {has}; take one of them, or {CLIENT_SIDE}.")
    known = LOSSES[loss].options
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"loss_fn_config[{key!r}]: {loss} has {', '.join(known) or 'no options'}; leave it out.")
        if isinstance(value, str) or not math.isfinite(value):
            raise ValueError(f"loss_fn_config[{key!r}] = {value!r}: must be a finite number.")


def check_ids(key: str, ids: Tensor, vocab: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ValueError(f"{key}: has the id {worst}, and the vocabulary has {vocab}; take the tokenizer of the model.")


def _width(datum: Datum, loss: str) -> tuple[int, ...]:
    """Return the shape of a token's targets: `()`, or `(K,)` if each token of the datum has K targets."""
    targets = datum.inputs.get(TARGETS)
    if targets is None or targets.ndim < 2:
        return ()
    width = targets.shape[1]
    found = f"data[0].loss_fn_inputs['{TARGETS}']: has {width} targets of each token"
    if loss != SEVERAL:
        raise ValueError(f"{found}, and {loss} takes one; send one, or take {SEVERAL}.")
    if not 1 <= width <= MOST_TARGETS:
        raise ValueError(f"{found}; send 1 to {MOST_TARGETS}, the most likely ones.")
    return (width,)


def _column(datum: Datum, key: str, number: int, loss: str, width: tuple[int, ...]) -> Tensor:
    place = f"data[{number}].loss_fn_inputs[{key!r}]"
    if key not in datum.inputs:
        raise ValueError(f"{place}: is missing, and {loss} needs it for each token of model_input; add it.")
    column = datum.inputs[key]
    if column.shape != (len(datum.tokens), *width):
        rest = f" of {width[0]} numbers each, as in data[0]" if width else ""
        raise ValueError(
            f"{place}: has shape {list(column.shape)}, and model_input has {len(datum.tokens)} tokens; send as many "
            f"entries as tokens{rest}."
        )
    return column


def adam_step(given: Mapping[str, Any]) -> AdamStep:
    """Return the optimizer step that an `optim_step` request asks for."""
    if not isinstance(params := given.get("adam_params"), dict):
        raise ValueError(f"adam_params = {params!r}: this server has Adam alone; send AdamParams.")
    usual = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
    found = {key: number(f"adam_params.{key}", params.get(key), default) for key, default in usual.items()}
    for key, value in found.items():
        if key.startswith("beta") and not 0 <= value < 1:
            refuse(f"adam_params.{key}", value, "must be in [0, 1)")
        if value < 0:
            refuse(f"adam_params.{key}", value, "must be at least 0")
    clip = max(0.0, number("adam_params.grad_clip_norm", params.get("grad_clip_norm"), 0.0))
    lr, beta1, beta2, eps, weight_decay = found.values()
    return AdamStep(lr, (beta1, beta2), eps, weight_decay, clip)


def number(key: str, value: Any, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(key, value, "must be a finite number")
    return float(value)


def adapted_of(lora: Any, rank: int, model: str) -> Adapted:
    """Return the adapters that a client's lora_config asks for.

    If the config has no seed, the seed is derived from the model's id. rank: the engine's LoRA rank, which is the
    largest allowed; 0 if the engine trains whole models.
    """
    seed = zlib.crc32(model.encode()) >> 1
    if rank == 0:
        return Adapted(0, seed)
    given = lora if isinstance(lora, dict) else {}
    asked = given.get("rank", rank)
    if type(asked) is not int or not 1 <= asked <= rank:
        rule = f"this server has room for adapters of rank 1 to {rank} (its lora.rank)"
        refuse("lora_config.rank", asked, f"{rule}; ask for one of them, or start it with a higher lora.rank")
    own = seed if given.get("seed") is None else given["seed"]
    if type(own) is not int or not 0 <= own < 2**31:
        refuse("lora_config.seed", own, "must be an integer in [0, 2^31)")
    found = Adapted(asked, own, bool(given.get("train_attn", True)), bool(given.get("train_mlp", True)))
    if not (found.attention or found.mlp):
        rule = "train_attn and train_mlp are false; the output layer has no adapter here, so set one"
        raise ValueError(f"lora_config: {rule}.")
    return found
