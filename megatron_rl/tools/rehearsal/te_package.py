"""A stand-in for Transformer Engine 2.9, so that megatron.core builds and runs the layers of a cluster without it.

What it stands in for, read off Transformer Engine's published sources at v2.9, in bfloat16 without quantisation:

- Linear and LayerNormLinear keep this rank's input, and behind a norm its output and the factor of each row. Under
  sequence parallelism the product's input is gathered, not kept, and gathered again in backward. A bias is added by
  the product.
- GroupedLinear keeps its input, and is one product per expert with rows, on streams of their own.
- RMSNorm is one kernel, and two in backward. It keeps its input and the factor of each row.
- Attention is cuDNN's, as on GPUs from Hopper on. It keeps queries, keys, values, its result and four bytes for each
  row and head. Keys and values that do not lie side by side are copied where they are not dense. It is one kernel, and
  two in backward; zeros, lengths, offsets and a random state are four launches more, and five.
- Rotation is one kernel and keeps the angles. Tokens are permuted by four kernels (three make the map, which is kept:
  int32, twice the experts and one for each token), put back by one, and chunks of them sorted by two.
- Adam, the gradients' norm and their scaling are a launch for every 320 blocks of 65,536 elements or 30 to 110 tensors.
  Moments of 16 bits are unpacked to float32 for the whole step.
- With `fuse_wgrad_accumulation` products add to `main_grad`.
- `multi_tensor_scale_tensor` came with 2.14. megatron.core imports it together with the fused norm from 0.17 on, and
  without it reads the norm of each tensor by itself. Nobody calls it here: the engine reads the norm before it clips.

Left out: the 32 MiB that cuBLAS works in, for each of up to 5 streams, what cuDNN works in, and a bias' gradient
as a part of the product. What is not stood in for raises ImportError, NotImplementedError or AssertionError:
quantisation, LayerNorm, cross entropy, overlapped communication, biases of experts. On the host all of it computes with
plain torch.

Call `install()` before anything imports megatron.core, in a process of its own.
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
    """FP8GlobalStateManager: no quantisation at any time."""

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
    """Make `import transformer_engine` and its submodules find this one. RuntimeError where megatron.core is loaded."""
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise RuntimeError("megatron.core is imported already, without Transformer Engine; call install() before it.")
    for name, contents in _MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        # Found by importlib.util.find_spec as well; without a loader nothing beside these can be imported.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
