"""Conversion of a checkpoint's optimizer state between plain Adam and Megatron's distributed optimizer.

The two kinds of optimizer give the main parameters different names. The plain optimizer of a float32 model has no main
parameters, because it updates the weights themselves. Megatron also arranges the rest of the state differently for the
two kinds. torch's Adam stores the number of updates with each parameter's moments; apex and Transformer Engine store it
in the parameter group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values

State = dict[Any, Any]
DISTRIBUTED, PLAIN = "optimizer.state.param.", "optimizer.state.fp32_param."
"""Prefixes of the main parameters' names in checkpoints of the two kinds of optimizer."""


def ask_as_plain(wanted: State, path: str) -> None:
    """Rename the tensors in a distributed optimizer's state, so that they load from a plain optimizer's checkpoint.

    wanted: the state to load into. path: the checkpoint. If the checkpoint has no main parameters, they are loaded
    here, from the weights, because one load may request a name only once.
    """
    saved = dist_checkpointing.load_tensors_metadata(path)
    missing = []
    for part in _parts(wanted).values():
        for number, block in list(part["param_state"].items()):
            name = block.key.removeprefix(DISTRIBUTED)
            if PLAIN + name in saved:
                block.key = PLAIN + name
            elif name != block.key:
                block.key = name
                missing.append(part["param_state"].pop(number))
    if missing:
        dist_checkpointing.load({"param": missing}, path)


def ask_as_distributed(wanted: State) -> None:
    """Rename the tensors in a plain optimizer's state, so that they load from a distributed optimizer's checkpoint.

    wanted: the state to load into.
    """
    for part in _parts(wanted).values():
        for tensor in nested_values(part.get("fp32_from_fp16_params", [])):
            tensor.key = DISTRIBUTED + tensor.key.removeprefix(PLAIN)


def arrange_as_distributed(loaded: State) -> State:
    """Rearrange a state for a distributed optimizer, after it was loaded from a plain optimizer's checkpoint.

    The result has no tensors, because they were loaded in place.
    """

    def arrange(part: State) -> State:
        inner = part.get("optimizer", part)  # one level deeper if a bfloat16 model has main parameters
        return {"optimizer": {"param_groups": [_without(group, "params") for group in inner["param_groups"]]}}

    return _each(loaded, arrange)


def arrange_as_plain(loaded: State) -> State:
    """Rearrange a state for a plain optimizer, after it was loaded from a distributed optimizer's checkpoint."""

    def arrange(part: State) -> State:
        groups = part["optimizer"]["param_groups"]
        is_deeper = "fp32_from_fp16_params" in part
        own = part["optimizer"] if is_deeper else part
        inner = {
            "param_groups": [
                group | {"params": mine["params"]} for group, mine in zip(groups, own["param_groups"], strict=True)
            ],
            "state": own["state"],
        }
        if not is_deeper:
            return inner
        return {"optimizer": inner, "fp32_from_fp16_params": part["fp32_from_fp16_params"]}

    return _each(loaded, arrange)


def counts_by_parameter(optimizer: Any) -> bool:
    """Return True if an optimizer stores the number of updates with each parameter. It must already have state."""
    return any("step" in state for state in optimizer.state.values())


def step_count(saved: State) -> int:
    """Return the number of updates that an optimizer has made. saved: its unsharded state from a checkpoint."""
    counts = [0]
    for part in _parts(saved).values():
        inner = part.get("optimizer", part)
        # The largest: a group without parameters does not count, and Transformer Engine's may have a 0 besides.
        counts += [int(group["step"]) for group in inner["param_groups"] if "step" in group]
        counts.append(int(inner.get("state", {}).get("common_step", 0)))
    return max(counts)


def fit_adam(loaded: State, count: int, optimizers: list[Any]) -> None:
    """Adapt a loaded state to the class of Adam that each of these optimizers uses.

    count: the number of updates that were made. `betas`, `eps`, and options that the saved class of Adam lacked, such
    as torch's `fused`, are taken from this run.
    """
    for number, optimizer in enumerate(optimizers):
        if optimizer.optimizer is None:  # this rank has no parameters of this kind
            continue
        part = _parts(loaded)[number]
        inner = part.get("optimizer", part)
        by_parameter = "state" in inner and counts_by_parameter(optimizer.optimizer)
        options = _without(optimizer.optimizer.param_groups[0], "params")
        own = {name: options[name] for name in ("betas", "eps") if name in options}
        for group in inner["param_groups"]:
            # The count is an int, as the kernels require; torch's Adam does not read it.
            group |= options | group | own | {"step": count}
        inner.get("state", {}).pop("common_step", None)
        if by_parameter:
            inner["state"]["common_step"] = torch.tensor(float(count))


def _parts(state: State) -> dict[int, State]:
    """Return the state of each optimizer, by its number. For a model with experts, Megatron chains several of them."""
    return state if 0 in state else {0: state}


def _each(state: State, arrange: Callable[[State], State]) -> State:
    parts = {number: arrange(part) for number, part in _parts(state).items() if isinstance(number, int)}
    return parts if 0 in state else parts[0]


def _without(group: State, key: str) -> State:
    return {name: value for name, value in group.items() if name != key}
