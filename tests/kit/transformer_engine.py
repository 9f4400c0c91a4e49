"""Transformer Engine's own modules on a CPU. Torch computes in place of its libraries, and Triton interprets."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron_rl import platform

HOPPER = SimpleNamespace(major=9, minor=0, multi_processor_count=132)


def load_on_cpu() -> None:
    """Import Transformer Engine in a process of a test. Its literals "cuda" are rewritten, as megatron.core's are."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]  # triton decides at its import whether kernels are interpreted
    platform.prepare()
    torch.cuda.get_device_properties = lambda *_: HOPPER
    torch.cuda.is_current_stream_capturing = lambda: False
    from triton.runtime.autotuner import Autotuner

    from megatron_rl.tools.rehearsal import te_package

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the configuration with the largest blocks. Which is the fastest, only a GPU can tell."""
        return self.fn.run(*args, **kwargs, **self.configs[-1].all_kwargs())

    Autotuner.run = run
    te_package.load()
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and hasattr(module, "canonicalize_device"):
            module.canonicalize_device = lambda device: torch.device(device or "cpu")
    let_modules_be_made()
    let_attention_take_float32()


class _Torch(ModuleType):
    """The module torch, in which one of the dtypes that attention accepts is float32."""

    float16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def let_attention_take_float32() -> None:
    """Let cuDNN's attention, for which torch computes here, take the dtype of tests. It is made for 16 bits."""
    from transformer_engine.pytorch.attention.dot_product_attention import backends, utils

    choose = utils.get_attention_backend
    utils.get_attention_backend = lambda params: choose(replace(params, qkv_dtype=torch.bfloat16))
    backends.torch = _Torch("torch")


def let_modules_be_made() -> None:
    """Transformer Engine's modules look for CUDA when they are made, and at no other time."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule as Base

    make = Base.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            make(self, *args, **kwargs)

    Base.__init__ = made
