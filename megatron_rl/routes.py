"""Routes: the experts that a server chose for each token, which the trainer replays (algo.routing_replay).

A row is one token that the model reads. Its route has the row's experts in each mixture layer, in the order of the
server's slots. With `experts_and_weights` it also has each expert's weight. A row without a route has NO_ROUTE in every
slot.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

COLUMN = "routes"
"""Name of the batch's column with routes, `[N, layers, slots]`. Row t is the route of token t when it is read."""
NO_ROUTE = -1
EXPERT_BITS, WEIGHT_BITS = 10, 21
"""Bit widths in an int32 slot with a weight: the expert is in the lowest bits, then the weight in steps of 2^-21."""
LARGEST_WEIGHT = (1 << WEIGHT_BITS) - 1
SHIFT_MARGIN = 0.1
"""Routes count as shifted by a row if the share of the trainer's choices that agree with a neighbouring row's route
exceeds the share that agree with the same row's route by more than this. With few choices, the margin is larger."""
SHIFT_CHOICES = 32
"""With fewer of the trainer's choices than this, routes are never reported as shifted."""


@dataclass(frozen=True, kw_only=True)
class RouteForm:
    """Shape, dtype and wire format of a model's routes.

    For example:

        form = RouteForm(total_layers=4, layers=(0, 2, 3), slots=2, experts=8, has_weights=False)
        form.bytes_per_token  # 12: int16, only mixture layers
        routes = form.read(meta_info["routed_experts"], rows=prompt + reply - 1)  # [rows, 3, 2]
    """

    total_layers: int  # including dense layers, for which SGLang sends zeros
    layers: tuple[int, ...]  # numbers of the mixture layers, from 0
    slots: int  # experts per token
    experts: int
    has_weights: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.int32 if self.has_weights else torch.int16

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.slots * self.dtype.itemsize

    @property
    def wire_bytes_per_token(self) -> int:
        """Size of a token's route in a server's reply, in bytes: base64 of int32, for all layers."""
        return -(-self.total_layers * self.slots * 4 * 4 // 3)

    def read(self, text: str, rows: int) -> Tensor:
        """Decode SGLang's routes, base64 of int32 `[rows, total_layers, slots]`, into `[rows, layers, slots]`.

        Raises ValueError if they are invalid.
        """
        try:
            found = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.int8)
        except binascii.Error as error:
            raise ValueError(f"is not base64: {error}") from None
        each = self.total_layers * self.slots * 4
        if found.size != rows * each:
            raise ValueError(
                f"holds {found.size:,} bytes, {found.size / each:g} rows of {self.total_layers} layers x {self.slots} "
                f"slots x 4 bytes, for the {rows} rows of prompt and reply that were asked for"
            )
        slots = torch.from_numpy(found.view(np.int32).reshape(rows, self.total_layers, self.slots)[:, self.layers])
        experts = experts_of(slots) if self.has_weights else slots
        is_unknown = (experts < 0) | (experts >= self.experts) | (slots < 0)
        if bool(is_unknown.any()):
            raise ValueError(f"names expert {experts[is_unknown][0].item()}: the model has {self.experts}, from 0")
        repeats = (experts.sort(-1).values.diff(dim=-1) == 0).any(-1)
        if bool(repeats.any()):
            row, layer = repeats.nonzero()[0].tolist()
            raise ValueError(
                f"names an expert twice, {experts[row, layer].tolist()} in row {row} of layer {self.layers[layer]}: "
                f"the slots of a token have different ones"
            )
        if self.has_weights and rows and not bool(weights_of(slots).sum(-1).all()):
            raise ValueError("holds no weights beside the experts")
        return slots.to(self.dtype)


def pack(experts: Tensor, weights: Tensor) -> Tensor:
    """Combine experts and weights in [0, 1] into int32 slots. Weights are rounded to steps of 2^-21."""
    steps = (weights.double().clamp(0, 1) * LARGEST_WEIGHT).round().to(torch.int32)
    return experts.to(torch.int32) | (steps << EXPERT_BITS)


def experts_of(slots: Tensor) -> Tensor:
    """Return the experts of slots, which may also contain weights, as int32. NO_ROUTE gives a negative number."""
    if slots.dtype == torch.int16:
        return slots.int()
    return torch.where(slots < 0, slots, slots & ((1 << EXPERT_BITS) - 1))


def weights_of(slots: Tensor) -> Tensor:
    return (slots >> EXPERT_BITS).float() / LARGEST_WEIGHT


def with_no_routes(routes: Tensor, rows: int) -> Tensor:
    """Return routes with exactly `rows` rows. Further rows are cut off, and missing ones are filled with NO_ROUTE."""
    return torch.cat([routes[:rows], routes.new_full((max(0, rows - len(routes)), *routes.shape[1:]), NO_ROUTE)])


def check_complete(routes: Tensor | None, loss_mask: Tensor, cu_seqlens: Tensor, form: RouteForm) -> None:
    """Raise ValueError if routes do not have this form, or if a row that needs a route has none.

    The rows before a sequence's last trained token need a route.
    """
    if routes is None:
        raise ValueError(
            f"algo.routing_replay: the trajectories have no column {COLUMN!r}; a workflow that makes Trajectory itself "
            f"passes LLMResponse.routes on in Trajectory.tokens, as Trajectory.from_reply does."
        )
    if routes.shape[1:] != (len(form.layers), form.slots) or routes.dtype != form.dtype:
        raise ValueError(
            f"algo.routing_replay: routes have shape {tuple(routes.shape)} of {routes.dtype}; the model's are "
            f"[tokens, {len(form.layers)} layers, {form.slots} slots] of {form.dtype}."
        )
    # Trained tokens up to each row, `[N + 1]`. A row is needed if its sequence has trained tokens after it.
    counted = torch.cat([loss_mask.new_zeros(1, dtype=torch.int64), loss_mask.bool().cumsum(0)])
    sequence = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
    is_needed = counted[cu_seqlens[1:]][sequence] > counted[1:]
    missing = (is_needed & (routes < 0).flatten(1).any(1)).nonzero()[:, 0]
    if len(missing):
        first = int(missing[0])
        place = first - int(cu_seqlens[sequence[first]])
        raise ValueError(
            f"algo.routing_replay: {len(missing)} rows have no route that trained tokens depend on, the first is token "
            f"{place} of trajectory {int(sequence[first])}: the servers' map is cut short, or the workflow moved it."
        )


def shift_fault(agreed: Tensor) -> str:
    """Return an error message if the servers' routes are shifted by a row against the tokens, else ''.

    agreed: four counts of the trainer's choices: those that are also in the server's route of the same row, of the row
    before, and of the row after, and the number of all choices.
    """
    own, before, after, choices = agreed.tolist()
    margin = max(SHIFT_MARGIN, 4.0 / max(choices, 1) ** 0.5)
    where, most = max((("before", before), ("after", after)), key=lambda pair: pair[1])
    if choices < SHIFT_CHOICES or most - own <= margin * choices:
        return ""
    return (
        f"algo.routing_replay: the servers' map of routes is shifted: the trainer's router agrees with the row {where} "
        f"in {most / choices:.0%} of {int(choices)} choices, and with the row itself in {own / choices:.0%}; nothing "
        f"was trained on it. Use an SGLang whose routed_experts begin at routed_experts_start_len."
    )
