"""SGLang plugin that adds the routing weight of each expert to `routed_experts`: R3 with experts_and_weights.

SGLang captures the ids of a token's experts as int32, of which it needs only the lowest bits. This plugin stores the
weight in the other bits (megatron_rl/routes.py), so that it travels through the same buffers to the same reply. The
run's servers find the plugin by an entry point of the group `sglang.srt.plugins` (server_process.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_rl import routes

TOPK = "sglang.srt.layers.moe.topk"


def register() -> None:
    """Register the hooks. SGLang calls this in each of its processes, before it builds a model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    capture = CaptureWithWeights()
    for function in ("_post_process_topk_ids", "build_precomputed_topk_output"):
        HookRegistry.register(f"{TOPK}.{function}", capture.note_weights, HookType.AROUND)
    HookRegistry.register(f"{TOPK}.capture_routed_experts_if_allowed", capture.capture, HookType.AROUND)


class CaptureWithWeights:
    """Hooks around two SGLang functions: the outer one has the routing weights, the inner one captures the ids."""

    def __init__(self) -> None:
        self.weights: Tensor | None = None

    def note_weights(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.weights = next(
            value for value in [*args, *kwargs.values()] if isinstance(value, Tensor) and value.is_floating_point()
        )
        try:
            return original(*args, **kwargs)
        finally:
            self.weights = None

    def capture(self, original: Callable[..., Any], topk_config: Any, layer_id: int, topk_ids: Tensor) -> Any:
        assert self.weights is not None, "no other function of SGLang captures experts"
        weights = self.weights
        if topk_config.apply_routed_scaling_factor_on_output:
            weights = weights / (topk_config.routed_scaling_factor or 1.0)
        return original(topk_config, layer_id, routes.pack(topk_ids, weights))
