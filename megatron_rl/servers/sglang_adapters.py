"""SGLang plugin that compares the adapters that SGLang has read with the trainer's checksums.

SGLang itself has no such check. With the plugin, each process of a server refuses a folder whose tensors differ from
those that the trainer wrote (megatron_rl/adapter_sums.py), and /load_lora_adapter reports why. The run's servers find
the plugin in the same way as sglang_routes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_rl.adapter_sums import check_sums, sum_of

ADAPTER = "sglang.srt.lora.lora.LoRAAdapter"


def register() -> None:
    """Register the hooks. SGLang calls this in each of its processes, before it builds a model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    reading = ReadAdapters()
    HookRegistry.register(f"{ADAPTER}._process_weight", reading.note, HookType.AROUND)
    HookRegistry.register(f"{ADAPTER}.initialize_weights", reading.check, HookType.AROUND)


class ReadAdapters:
    """Hooks around two SGLang methods: one is called for each tensor of a folder, the other reads the whole folder."""

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
