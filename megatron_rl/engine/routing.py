"""Routers that replay the rollout servers' expert choices (R3), if `algo.routing_replay` is on.

Megatron's own RouterReplay keeps the experts of one pass in the order of calls. Here each microbatch brings its experts
in PackedRows. So the order of microbatches, pipeline chunks and recomputed layers does not matter.

    row with a route    -> the server's experts in place of the trainer's top-k. Their weights are the trainer's, with
                           gradient (experts), or the server's values with the trainer's gradient (experts_and_weights)
    row without a route -> the trainer's own experts. Such rows are the last row of a sequence, and padding
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from megatron_rl import routes
from megatron_rl.engine.packed_rows import PackedRows
from megatron_rl.routes import RouteForm
from megatron_rl.types import TrajectoryBatch


class ReplayedTop:
    """Selects the servers' experts instead of the top-k ones. Megatron's router calls it through `router_replay`."""

    def __init__(self, slots: Tensor, changed: Tensor, agreed: Tensor | None) -> None:
        self.experts, self.changed, self.agreed = routes.experts_of(slots).long(), changed, agreed
        self.has_route = (self.experts >= 0).all(-1, keepdim=True)  # [R, 1]

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        is_other = (own[:, :, None] != self.experts[:, None]).all(-1) & self.has_route  # [R, slots]
        self.changed += torch.stack([is_other.sum(), self.has_route.sum() * topk])
        if self.agreed is not None:
            self.agreed += self._agreements(own)
        experts = torch.where(self.has_route, self.experts, own)
        return scores.gather(1, experts), experts

    def _agreements(self, own: Tensor) -> Tensor:
        """Return the four counts that `routes.shift_fault` takes, over the rows whose two neighbors also have routes.

        own: the trainer's own choices.
        """
        # At the few borders, a neighbor is of another sequence, which biases both neighbors' counts equally.
        inner = (self.has_route[:-2] & self.has_route[1:-1] & self.has_route[2:])[:, 0]
        chosen = own[1:-1, :, None]
        found = [
            ((chosen == self.experts[first : len(own) - 2 + first, None]).any(-1) & inner[:, None]).sum()
            for first in (1, 0, 2)
        ]
        return torch.stack([*found, inner.sum() * own.shape[1]])


class ReplayRouter(TopKRouter):
    """Megatron's router, except that it selects the experts that `slots` names, if they are set."""

    slots: Tensor | None = None  # the servers' routes for the rows, `[R, slots]`
    has_weights = False
    changed: Tensor  # `[2]` counters: choices that are not the trainer's own, and all choices
    agreed: Tensor | None = None  # `[4]` counters for routes.shift_fault

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.slots is None:
            self.router_replay = None
            return super().routing(logits, *args, **kwargs)
        self.router_replay = replayed = ReplayedTop(self.slots, self.changed, self.agreed)
        weights, is_chosen = super().routing(logits, *args, **kwargs)  # [R, experts]
        if not self.has_weights:
            return weights, is_chosen
        given = routes.weights_of(self.slots)  # [R, slots], then normalized and scaled as the model does
        if not self.config.moe_router_pre_softmax or self.score_function == "sigmoid":
            given = given / given.sum(-1, keepdim=True).clamp_min(1e-6)
        given = (given * (self.config.moe_router_topk_scaling_factor or 1.0)).to(weights.dtype)
        given = torch.zeros_like(weights).scatter(1, replayed.experts.clamp_min(0), given)
        # The server's value with the gradient of the trainer's, so that the router keeps learning.
        return torch.where(replayed.has_route, weights + (given - weights).detach(), weights), is_chosen


def recompute_with_own_slots(mixture: MoELayer) -> None:
    """Make a mixture layer be recomputed with the routes that its forward pass had.

    Megatron would use the routes that a later microbatch has set.
    """
    if not mixture.moe_layer_recompute:
        return
    mixture.moe_layer_recompute, compute = False, mixture.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute(hidden_states, *args, **kwargs)
        slots = mixture.router.slots

        def with_its_slots(hidden: Tensor) -> Any:
            mixture.router.slots = slots
            return compute(hidden, *args, **kwargs)

        return tensor_parallel.checkpoint(with_its_slots, False, hidden_states)

    mixture.forward = forward


class RoutingReplay:
    """Gives each mixture layer of an engine the routes of the rows that it is about to compute."""

    def __init__(self, form: RouteForm, chunks: list[Any], device: torch.device) -> None:
        self.form = form
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers if isinstance(layer.mlp, MoELayer)]
        # Megatron numbers layers from 1. Only the columns of this rank's layers are copied to the device.
        self.mixtures = [form.layers.index(layer.layer_number - 1) for layer in layers]
        self._counts = torch.zeros(6, dtype=torch.int64, device=device)
        self.changed_share = 0.0  # share of the last pass's choices that are not the trainer's own
        for column, layer in enumerate(layers):
            layer.mlp.router.has_weights, layer.mlp.router.changed = form.has_weights, self._counts[4:]
            # the first mixture only: the inputs of later ones depend on its replayed choices
            if self.mixtures[column] == 0:
                layer.mlp.router.agreed = self._counts[:4]
            recompute_with_own_slots(layer.mlp)
            layer.register_forward_pre_hook(functools.partial(_hand_over, column=column), with_kwargs=True)

    def check(self, batch: TrajectoryBatch) -> None:
        found = batch.tokens.get(routes.COLUMN)
        routes.check_complete(found, batch["loss_mask"], batch.cu_seqlens, self.form)

    def finish_pass(self, group: dist.ProcessGroup) -> None:
        """Set `changed_share`: the share of choices since the last call that are not the trainer's own. Collective.

        group: a gloo group of all ranks. Raises RuntimeError if the servers' routes are shifted against the tokens.
        """
        counts = self._counts.cpu().clone()  # .cpu() makes no copy of a host tensor
        self._counts.zero_()
        dist.all_reduce(counts, group=group)
        if fault := routes.shift_fault(counts[:4]):
            raise RuntimeError(fault)
        changed, choices = counts[4:].tolist()
        self.changed_share = changed / max(choices, 1)


def _hand_over(layer: nn.Module, args: Any, kwargs: dict[str, Any], *, column: int) -> None:
    """Give a layer's router the routes of this tensor rank's rows. This hook runs before the layer computes.

    It also runs before the layer is recomputed. column: the layer's index in `PackedRows.routes`.
    """
    packed: PackedRows = kwargs["packed_seq_params"]
    router, slots = layer.mlp.router, None
    if packed.routes is not None:
        slots = packed.routes[:, column]
        if layer.config.sequence_parallel:
            slots = slots.chunk(router.tp_group.size())[router.tp_group.rank()]
    router.slots = slots
