"""Makes a model's layers compute each row in an order that does not depend on the other rows (rollout.exact).

The values are those of ops/fixed_order.py, and the gradients those of Megatron's layers. So a forward pass takes both.
The embedded server with --exact computes the same values.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from megatron_rl.config import EngineConfig
from megatron_rl.engine.attention import PackedAttention
from megatron_rl.ops import fixed_order
from megatron_rl.weights.decoder import Architecture


def check_exact(arch: Architecture, config: EngineConfig, *, uses_transformer_engine: bool) -> None:
    """Raise ValueError for a model or layout whose values could not be the servers' to the bit."""
    parallel, lora = config.parallel, config.lora.rank
    is_plain = arch.mixture is arch.latent is arch.delta_net is None and not any(arch.windows) and not arch.has_sinks
    faults = {
        f"model.dtype = {config.model.dtype!r}; set it to float32": config.model.dtype != "float32",
        f"parallel.tensor = {parallel.tensor}, which adds up parts of sums; set it to 1": parallel.tensor > 1,
        f"parallel.context = {parallel.context}; set it to 1": parallel.context > 1,
        f"lora.rank = {lora}; set it to 0": lora > 0,
        f"{arch.family}, whose layers the embedded server lacks; choose another model": not is_plain,
        "Transformer Engine's layers; set model.transformer_impl=local": uses_transformer_engine,
    }
    if fault := next((text for text, holds in faults.items() if holds), ""):
        raise ValueError(f"rollout.exact = true: does not work with {fault}, or leave rollout.exact out.")


def compute_in_fixed_order(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.register_forward_hook(_fixed_order_product, prepend=True)
        elif isinstance(module, PackedAttention):
            module.in_fixed_order = True
            if module.rope is not None:
                module.rope.in_fixed_order = True


def _fixed_order_product(
    layer: nn.Module, inputs: tuple[Tensor, ...], result: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    bias = None if layer.skip_bias_add else layer.bias
    return fixed_order.with_value(result[0], fixed_order.linear(inputs[0], layer.weight, bias)), result[1]
