"""Hooks into SGLang: routing weights of experts in `routed_experts`, and checks of the adapters that it reads.

SGLang calls the `register_...` functions in each of its processes, before it builds a model. The run's servers find
them by entry points of the group `sglang.srt.plugins` (server_process.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_rl import routes
from megatron_rl.adapter_sums import check_sums, sum_of

TOPK = "sglang.srt.layers.moe.topk"
ADAPTER = "sglang.srt.lora.lora.LoRAAdapter"


def register_routes() -> None:
    """Add the routing weights of experts to replies (R3 with experts_and_weights)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    capture = CaptureWithWeights()
    for function in ("_post_process_topk_ids", "build_precomputed_topk_output"):
        HookRegistry.register(f"{TOPK}.{function}", capture.note_weights, HookType.AROUND)
    HookRegistry.register(f"{TOPK}.capture_routed_experts_if_allowed", capture.capture, HookType.AROUND)


class CaptureWithWeights:
    """Hooks around two SGLang functions: the outer one has the routing weights, the inner one captures the ids.

    Ids are int32, of which SGLang needs only the lowest bits. The weights travel in the others (megatron_rl/routes.py).
    """

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


def register_adapters() -> None:
    """Make /load_lora_adapter refuse adapters that differ from those that the trainer wrote (adapter_sums.py)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    sums: dict[str, str] = {}

    def note(original: Callable[..., Any], adapter: Any, name: str, weight: Tensor) -> Any:
        sums[name] = sum_of(weight)
        return original(adapter, name, weight)

    def check(original: Callable[..., Any], adapter: Any) -> Any:
        sums.clear()
        result = original(adapter)
        check_sums(adapter.config.path, sums)
        return result

    # SGLang calls the first method for each tensor of a folder, and the second one for the whole folder.
    HookRegistry.register(f"{ADAPTER}._process_weight", note, HookType.AROUND)
    HookRegistry.register(f"{ADAPTER}.initialize_weights", check, HookType.AROUND)
