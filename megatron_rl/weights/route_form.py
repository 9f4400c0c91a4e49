"""Determine the format of expert routes that rollout servers report, for `algo.routing_replay`."""

from __future__ import annotations

from megatron_rl.routes import EXPERT_BITS, RouteForm
from megatron_rl.weights.architecture import Architecture


def route_form(arch: Architecture, replay: str) -> RouteForm | None:
    """Return the format of expert routes for a value of `algo.routing_replay`, or None if replay is off.

    Raises ValueError if the model has no experts, or too many for the format.
    """
    if replay == "off":
        return None
    mixture, has_weights = arch.mixture, replay == "experts_and_weights"
    if mixture is None:
        raise ValueError(f"algo.routing_replay = {replay!r}: {arch.family} has no experts; leave it out.")
    most = 1 << (EXPERT_BITS if has_weights else 15)
    if mixture.experts > most:
        raise ValueError(
            f"algo.routing_replay = {replay!r}: the model has {mixture.experts} experts, and there is room for {most}; "
            f"set it to experts, or leave it out."
        )
    layers = tuple(number for number, is_mixture in enumerate(mixture.layers) if is_mixture)
    sizes = {"slots": mixture.per_token, "experts": mixture.experts}
    return RouteForm(total_layers=arch.layers, layers=layers, has_weights=has_weights, **sizes)
