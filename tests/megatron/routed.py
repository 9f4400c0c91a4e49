"""transformers' mixtures with the routes of their rows recorded, or replayed: the plain reference of routing replay."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from megatron_rl import routes
from megatron_rl.types import TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.route_form import route_form


class RoutedModel:
    """A model whose mixtures tell which experts rows take, with which weights, or are told by `given`.

    given: `[rows, layers, slots]` of the sequence that is computed next, as megatron_rl/routes.py has them.
    """

    def __init__(self, model, folder) -> None:
        self.model, self.given, self.seen, self._logits = model, None, [], None
        self.form = route_form(read_architecture(folder), "experts_and_weights")
        self.mixture = read_architecture(folder).mixture
        for column, number in enumerate(self.form.layers):
            block = model.model.layers[number].mlp
            block.gate.register_forward_hook(self._note)
            block.experts.register_forward_pre_hook(lambda _, args, column=column: self._route(args, column))

    def _note(self, gate, args, output) -> None:
        self._logits = output[0] if isinstance(output, tuple) else output

    def _route(self, args, column):
        hidden, experts, weights = args
        if self.given is None:
            self.seen.append((experts, weights))
            return None
        slots = self.given[:, column]
        has_route = (slots >= 0).all(-1, keepdim=True)
        chosen = routes.experts_of(slots).long().clamp_min(0)
        own = self._own_weights(chosen)
        if slots.dtype == torch.int32:  # the server's number, with the gradient of the model's own
            shares = routes.weights_of(slots)
            given = shares / shares.sum(-1, keepdim=True) if self.mixture.renormalised else shares
            own = own + (given * (self.mixture.scale or 1.0) - own).detach()
        return hidden, torch.where(has_route, chosen, experts), torch.where(has_route, own, weights)

    def _own_weights(self, chosen: Tensor) -> Tensor:
        logits = self._logits.float()
        scores = (logits.sigmoid() if self.mixture.is_biased else logits.softmax(-1)).gather(1, chosen)
        if self.mixture.renormalised:
            scores = scores / scores.sum(-1, keepdim=True)
        return (scores * (self.mixture.scale or 1.0)).to(self._logits.dtype)

    def logprobs(self, batch: TrajectoryBatch, given: Tensor | None = None) -> Tensor:
        """`[N]` log p of each token, 0 where it is not trained; replaying `given` `[N, layers, slots]`."""
        parts, bounds = [], batch.cu_seqlens.tolist()
        for a, b in zip(bounds, bounds[1:], strict=False):
            self.given = None if given is None else given[a:b]
            ids = batch["input_ids"][a:b].long()
            found = self.model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            parts.append(torch.cat([found.new_zeros(1), found]))
        return torch.cat(parts).masked_fill(~batch["loss_mask"], 0.0)

    @torch.no_grad()
    def routes(self, batch: TrajectoryBatch) -> Tensor:
        """`[N, layers, slots]` int32 routes that the model takes by itself, the last rows without one."""
        parts, bounds = [], batch.cu_seqlens.tolist()
        for a, b in zip(bounds, bounds[1:], strict=False):
            self.given, self.seen = None, []
            self.model(batch["input_ids"][a:b].long()[None])
            shares = [weights / (self.mixture.scale or 1.0) for _, weights in self.seen]
            whole = torch.stack([routes.pack(e, s) for (e, _), s in zip(self.seen, shares, strict=True)], dim=1)
            parts.append(routes.with_no_routes(whole[:-1], b - a))
        return torch.cat(parts)


def with_routes(batch: TrajectoryBatch, found: Tensor, replay: str) -> TrajectoryBatch:
    """Return the batch with routes in the form of `algo.routing_replay`."""
    if replay == "experts":
        found = routes.experts_of(found).to(torch.int16)
    return TrajectoryBatch(batch.tokens | {"routes": found}, batch.sequences, batch.cu_seqlens, batch.versions)


def perturbed(model, *, scale: float, bias: float = 0.0):
    """Return a copy of the model whose routers have noise in their weights, and in the bias that chooses alone."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in [*other.named_parameters(), *other.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("mlp.gate.weight"):
                tensor.add_(noise * scale * tensor.std())
            elif name.endswith("e_score_correction_bias"):
                tensor.add_(noise * bias)
    return other
