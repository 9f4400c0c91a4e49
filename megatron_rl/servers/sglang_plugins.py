"""Hooks into SGLang: they add experts' routing weights to replies, and check the adapters that SGLang reads.

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
    """Add experts' routing weights to the field `routed_experts` of replies, for routing replay.

    SGLang reports each expert as an int32, of which the expert's number needs only the lowest bits. The routing weight
    is put into the other bits (routes.py).
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    weights: Tensor | None = None

    def note_weights(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal weights
        weights = next(
            value for value in [*args, *kwargs.values()] if isinstance(value, Tensor) and value.is_floating_point()
        )
        try:
            return original(*args, **kwargs)
        finally:
            weights = None

    def capture(original: Callable[..., Any], topk_config: Any, layer_id: int, topk_ids: Tensor) -> Any:
        assert weights is not None, "no other function of SGLang captures experts"
        plain = weights
        if topk_config.apply_routed_scaling_factor_on_output:
            plain = weights / (topk_config.routed_scaling_factor or 1.0)
        return original(topk_config, layer_id, routes.pack(topk_ids, plain))

    # SGLang calls `capture` inside each of the others.
    for function in ("_post_process_topk_ids", "build_precomputed_topk_output"):
        HookRegistry.register(f"{TOPK}.{function}", note_weights, HookType.AROUND)
    HookRegistry.register(f"{TOPK}.capture_routed_experts_if_allowed", capture, HookType.AROUND)


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
