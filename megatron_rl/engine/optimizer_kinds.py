"""A checkpoint's optimizer state for an optimizer of the other kind: plain Adam or Megatron's distributed one.

Their tensors are the same but for the main parameters: these have another name, and the plain optimizer of a float32
model has none beside the weights. The rest upstream arranges in two ways. The number of updates is beside each
parameter's moments in torch's Adam and in the parameter group in that of apex and Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values

State = dict[Any, Any]
DISTRIBUTED, PLAIN = "optimizer.state.param.", "optimizer.state.fp32_param."
"""Prefixes of main parameters."""


def ask_as_plain(wanted: State, path: str) -> None:
    """Let a distributed optimizer's `wanted` ask a plain one's checkpoint.

    Main parameters that it lacks are loaded in place from its weights, and taken out of `wanted`: a name is asked for
    once only.
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
    """Let a plain optimizer's `wanted` ask a distributed one's checkpoint."""
    for part in _parts(wanted).values():
        for tensor in nested_values(part.get("fp32_from_fp16_params", [])):
            tensor.key = DISTRIBUTED + tensor.key.removeprefix(PLAIN)


def arrange_as_distributed(loaded: State) -> State:
    """Rearrange what was loaded from a checkpoint of either kind, but for the tensors, which are loaded in place."""

    def arrange(part: State) -> State:
        inner = part.get("optimizer", part)  # one level deeper where bfloat16 has main parameters
        return {"optimizer": {"param_groups": [_without(group, "params") for group in inner["param_groups"]]}}

    return _each(loaded, arrange)


def arrange_as_plain(loaded: State) -> State:
    """Rearrange what was loaded from a distributed optimizer's checkpoint."""

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
    """Return True if an optimizer with state has the number of its updates beside each parameter's moments."""
    return any("step" in state for state in optimizer.state.values())


def step_count(saved: State) -> int:
    """Return the number of updates that the optimizer of a checkpoint has made, by its unsharded state."""
    counts = [0]
    for part in _parts(saved).values():
        inner = part.get("optimizer", part)
        # The largest, as a group without parameters does not count, and Transformer Engine's has had a 0 beside it.
        counts += [int(group["step"]) for group in inner["param_groups"] if "step" in group]
        counts.append(int(inner.get("state", {}).get("common_step", 0)))
    return max(counts)


def fit_adam(loaded: State, count: int, optimizers: list[Any]) -> None:
    """Fit a loaded state, of `count` updates, to the class of Adam that each of Megatron's `optimizers` has.

    This run's are `betas` and `eps`, and the options of that class which the saved one did not have, such as
    Transformer Engine's `bias_correction` and torch's `fused`.
    """
    for number, optimizer in enumerate(optimizers):
        if optimizer.optimizer is None:  # a rank without parameters of this kind
            continue
        part = _parts(loaded)[number]
        inner = part.get("optimizer", part)
        by_parameter = "state" in inner and counts_by_parameter(optimizer.optimizer)
        options = _without(optimizer.optimizer.param_groups[0], "params")
        own = {name: options[name] for name in ("betas", "eps") if name in options}
        for group in inner["param_groups"]:
            # The count is an int, as kernels want it; torch's Adam does not read it.
            group |= options | group | own | {"step": count}
        inner.get("state", {}).pop("common_step", None)
        if by_parameter:
            inner["state"]["common_step"] = torch.tensor(float(count))


def _parts(state: State) -> dict[int, State]:
    """One state per optimizer: with experts upstream chains several."""
    return state if 0 in state else {0: state}


def _each(state: State, arrange: Callable[[State], State]) -> State:
    parts = {number: arrange(part) for number, part in _parts(state).items() if isinstance(number, int)}
    return parts if 0 in state else parts[0]


def _without(group: State, key: str) -> State:
    return {name: value for name, value in group.items() if name != key}
