"""A stand-in for Transformer Engine 2.9. With it, megatron.core builds and runs a cluster's layers on any machine.

It models bfloat16 without quantisation, according to Transformer Engine's published sources at v2.9:

- Linear and LayerNormLinear keep this rank's input. LayerNormLinear also keeps the norm's output and one factor per
  row. Under sequence parallelism, the gathered input of the matrix product is not kept, but gathered again in backward.
  The product adds the bias.
- GroupedLinear keeps its input. It is one product per expert that has rows, on separate streams.
- RMSNorm is one kernel, two in backward. It keeps its input and one factor per row.
- Attention is cuDNN's, as on GPUs from Hopper on. It keeps queries, keys, values, its result and four bytes per row and
  head. Non-contiguous keys and values are copied unless they are interleaved in one tensor. It is one kernel, two in
  backward. In addition, launches fill tensors with zeros and prepare lengths, offsets and a random state: four launches
  in forward, five in backward.
- Rotation is one kernel and keeps the angles. Permuting tokens takes four kernels, three of them for the map. The map
  is kept; per token, it has int32 entries of twice the number of experts plus one. Unpermuting takes one kernel,
  sorting chunks of tokens two.
- Adam, the gradient norm and gradient scaling take a launch per 320 blocks of 65,536 elements or per 30 to 110 tensors.
  16-bit moments are unpacked to float32 for the whole step.
- With `fuse_wgrad_accumulation`, products accumulate into `main_grad`.
- `multi_tensor_scale_tensor` is provided, although Transformer Engine has it only from 2.14 on. megatron.core from 0.17
  on imports the fused norm only together with it, and otherwise reads the norm of each tensor separately. It is never
  called here, because the engine reads the norm before it clips.

Not modelled: cuBLAS's workspaces (32 MiB for each of up to 5 streams), cuDNN's workspace, and the fusion of a bias
gradient into the product. Quantisation, LayerNorm, cross entropy, overlapped communication and biases of experts are
not supported: they raise ImportError, NotImplementedError or AssertionError. On the host, everything is computed with
plain torch.

Call `install()` before megatron.core is imported, in a separate process.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl import platform
from megatron_rl.tools.rehearsal import te_functions as functions
from megatron_rl.tools.rehearsal import te_modules as modules
from megatron_rl.tools.rehearsal.te_adam import FusedAdam

VERSION = "2.9.0"


class _SilentState:
    """A stand-in for FP8GlobalStateManager whose quantisation is always off."""

    is_fp8_enabled = staticmethod(lambda: False)


@contextlib.contextmanager
def autocast(enabled: bool = True, **options: Any):
    assert not enabled, "quantisation is not stood in for"
    yield


def get_cpu_offload_context(
    enabled=False, num_layers=1, model_layers=1, offload_activations=True, offload_weights=False, double_buffering=False
):
    assert not enabled, "offloading of activations is not stood in for"
    return contextlib.nullcontext(), lambda x: x


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()


def _not_here(name: str) -> Callable[..., Any]:
    def raise_(*args: Any, **kwargs: Any):
        raise NotImplementedError(f"{name} of Transformer Engine is not stood in for")

    return raise_


# -- the package -------------------------------------------------------------------------------------------------------

_PYTORCH = "transformer_engine.pytorch"
_MODULES: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": VERSION},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {
        name: type(name, (), {})
        for name in (
            "Recipe",
            "Format",
            "DelayedScaling",
            "Float8CurrentScaling",
            "Float8BlockScaling",
            "MXFP8BlockScaling",
            "NVFP4BlockScaling",
            "CustomRecipe",
        )
    },
    _PYTORCH: {
        "Linear": modules.Linear,
        "LayerNormLinear": modules.LayerNormLinear,
        "GroupedLinear": modules.GroupedLinear,
        "LayerNorm": modules.LayerNorm,
        "RMSNorm": modules.RMSNorm,
        "DotProductAttention": modules.DotProductAttention,
        "fp8_autocast": autocast,
        "fp8_model_init": _not_here("fp8_model_init"),
        "Fp8Padding": _not_here("Fp8Padding"),
        "Fp8Unpadding": _not_here("Fp8Unpadding"),
    },
    f"{_PYTORCH}.attention": {"DotProductAttention": modules.DotProductAttention},
    f"{_PYTORCH}.attention.rope": {"apply_rotary_pos_emb": functions.apply_rotary_pos_emb},
    f"{_PYTORCH}.cpp_extensions": {"general_gemm": functions.general_gemm},
    f"{_PYTORCH}.cpu_offload": {"get_cpu_offload_context": get_cpu_offload_context},
    f"{_PYTORCH}.cross_entropy": {"parallel_cross_entropy": _not_here("parallel_cross_entropy")},
    f"{_PYTORCH}.distributed": {
        "CudaRNGStatesTracker": CudaRNGStatesTracker,
        "checkpoint": _not_here("checkpoint"),
        "activation_recompute_forward": contextlib.nullcontext,
    },
    f"{_PYTORCH}.float8_tensor": {"Float8Tensor": type("Float8Tensor", (Tensor,), {})},
    f"{_PYTORCH}.fp8": {
        "FP8GlobalStateManager": _SilentState,
        "fp8_autocast": autocast,
        "fp8_model_init": _not_here("fp8_model_init"),
    },
    f"{_PYTORCH}.module": {},
    f"{_PYTORCH}.module.base": {
        "TransformerEngineBaseModule": modules.TransformerEngineBaseModule,
        "get_workspace": lambda: None,
        "get_dummy_wgrad": lambda shape, dtype, zero=False: torch.zeros(shape, dtype=dtype, device=platform.device()),
    },
    f"{_PYTORCH}.ops": {
        name: type(name, (nn.Module,), {}) for name in ("FusibleOperation", "Sequential", "BasicLinear", "SwiGLU")
    },
    f"{_PYTORCH}.optimizers": {
        "FusedAdam": FusedAdam,
        "FusedSGD": type("FusedSGD", (torch.optim.SGD,), {}),
        "multi_tensor_applier": functions.multi_tensor_applier,
        "multi_tensor_l2norm": functions.multi_tensor_l2norm,
        "multi_tensor_scale": functions.multi_tensor_scale,
        "multi_tensor_scale_tensor": _not_here("multi_tensor_scale_tensor"),
    },
    f"{_PYTORCH}.permutation": {
        "moe_permute": functions.moe_permute,
        "moe_permute_with_probs": functions.moe_permute_with_probs,
        "moe_unpermute": functions.moe_unpermute,
        "moe_sort_chunks_by_index": functions.moe_sort_chunks_by_index,
        "moe_sort_chunks_by_index_with_probs": functions.moe_sort_chunks_by_index_with_probs,
    },
    f"{_PYTORCH}.router": {
        name: _not_here(name)
        for name in ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss")
    },
    f"{_PYTORCH}.tensor": {"QuantizedTensor": type("QuantizedTensor", (Tensor,), {})},
}


def install() -> None:
    """Make `import transformer_engine` find this package. Raises RuntimeError if megatron.core is already imported."""
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise RuntimeError("megatron.core is imported already, without Transformer Engine; call install() before it.")
    for name, contents in _MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        # The spec lets importlib.util.find_spec find it. Without a loader, no other submodule can be imported.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
