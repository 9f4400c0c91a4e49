"""A plugin of SGLang, which has no checksums of adapters, that compares those it has read with the trainer's sums.

Each process of a server refuses a folder whose tensors are others than were written (megatron_rl/adapter_sums.py), and
/load_lora_adapter says why. The run's servers find the plugin as they do sglang_routes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_rl.adapter_sums import check_sums, sum_of

ADAPTER = "sglang.srt.lora.lora.LoRAAdapter"


def register() -> None:
    """Called by SGLang in each of its processes, before a model is built."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    reading = ReadAdapters()
    HookRegistry.register(f"{ADAPTER}._process_weight", reading.note, HookType.AROUND)
    HookRegistry.register(f"{ADAPTER}.initialize_weights", reading.check, HookType.AROUND)


class ReadAdapters:
    """Around two of SGLang's methods: the inner one is handed each tensor of a folder, the outer one has read all."""

    def __init__(self) -> None:
        self.sums: dict[str, str] = {}

    def note(self, original: Callable[..., Any], adapter: Any, name: str, weight: Tensor) -> Any:
        self.sums[name] = sum_of(weight)
        return original(adapter, name, weight)

    def check(self, original: Callable[..., Any], adapter: Any) -> Any:
        self.sums = {}
        result = original(adapter)
        check_sums(adapter.config.path, self.sums)
        return result
