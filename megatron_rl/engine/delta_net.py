"""Gated delta nets in place of attention, built from Megatron's linear layers and split by heads over tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_rl.engine import delta_kernels
from megatron_rl.engine.delta_kernels import Calls
from megatron_rl.engine.delta_rule import Chunks, causal_convolution, gated_delta_rule
from megatron_rl.engine.one_copy import one_copy
from megatron_rl.engine.packed_rows import PackedRows
from megatron_rl.engine.sharded_module import ShardedModule
from megatron_rl.weights.decoder import DeltaNet


class GatedDeltaNet(ShardedModule, MegatronModule):
    """A delta net in the attention slot of a layer. Each tensor rank has some of the key heads, and their value heads.

    The output rows of the matrix `linear_in` are ordered by key head. For each key head they are its query, its key,
    and then all values, gates, betas and decays of its value heads.
    """

    cut = ("conv_weight", "decay_rate", "decay_bias")
    uses_kernels = False  # True to use the kernels of flash-linear-attention

    def __init__(
        self, config: TransformerConfig, layer_number: int, sizes: DeltaNet, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config)
        self.sizes, self.tp_group = sizes, pg_collection.tp
        self.key_heads = sizes.key_heads // self.tp_group.size()
        values = sizes.value_heads // self.tp_group.size()
        options: dict[str, Any] = dict(config=config, init_method=config.init_method, bias=False)
        self.linear_in = ColumnParallelLinear(
            config.hidden_size, sizes.in_rows, gather_output=False, tp_group=self.tp_group, **options
        )
        self.linear_out = RowParallelLinear(
            sizes.value_heads * sizes.value_dim,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
            **options,
        )
        dtype = config.params_dtype
        channels = 2 * self.key_heads * sizes.key_dim + values * sizes.value_dim
        self.conv_weight = nn.Parameter(torch.empty(channels, 1, sizes.kernel, dtype=dtype))
        self.decay_rate = nn.Parameter(torch.empty(values, dtype=dtype))
        self.decay_bias = nn.Parameter(torch.empty(values, dtype=dtype))
        self.norm_weight = nn.Parameter(torch.empty(sizes.value_dim, dtype=dtype))

    def forward(self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedRows, **_: Any):
        """Map hidden states `[R / tensor ranks, 1, H]` to the same shape.

        The second result is None. Megatron expects a bias there, and this layer has none.
        """
        projected, _ = self.linear_in(hidden_states)
        plan = packed_seq_params.once("delta net", lambda: self._plan(packed_seq_params.segments))
        # Recompute in the backward pass, because a row takes much more memory in `_mix` than its hidden state.
        mixed = checkpoint(self._mix, projected, plan, use_reentrant=False, preserve_rng_state=False)
        return self.linear_out(mixed)

    def _plan(self, segments: Tensor) -> Chunks | Calls:
        plan = Calls.of(segments, self.sizes.kernel) if self.uses_kernels else Chunks.of(segments)
        return one_copy(plan, self.norm_weight.device)

    def _mix(self, projected: Tensor, plan: Chunks | Calls) -> Tensor:
        """Mix the rows of each sequence by convolution and delta rule, and apply the gates.

        projected: `[R, 1, C]`, the output of `linear_in`. Returns `[R, 1, this rank's value heads * D_v]`.
        """
        sizes = self.sizes
        grouped = projected.squeeze(1).unflatten(-1, (self.key_heads, -1))  # [R, K heads, ...]
        per_key = sizes.value_heads // sizes.key_heads
        parts = [2 * sizes.key_dim + per_key * sizes.value_dim, per_key * sizes.value_dim, per_key, per_key]
        mixed, gate, beta, decay = grouped.split(parts, dim=-1)
        if isinstance(plan, Chunks):
            mixed = F.silu(causal_convolution(mixed.flatten(1), self.conv_weight[:, 0], plan))
        else:
            mixed = delta_kernels.convolution(mixed.flatten(1), self.conv_weight[:, 0], plan)
        mixed = mixed.unflatten(-1, (self.key_heads, -1))
        query, key, value = mixed.split([sizes.key_dim, sizes.key_dim, per_key * sizes.value_dim], dim=-1)
        value, gate = (x.reshape(len(x), -1, sizes.value_dim) for x in (value, gate))
        decay = F.softplus(decay.flatten(1).float() + self.decay_bias)
        log_decay = -self.decay_rate.float().exp() * decay
        inputs = (query, key, value, log_decay, beta.flatten(1).sigmoid())
        if isinstance(plan, Chunks):
            out = gated_delta_rule(*inputs, plan).to(gate.dtype)
        else:
            out = delta_kernels.gated_delta_rule(*inputs, plan)
        # One weight for all heads. Each rank has some of the heads, so the gradient is the sum over ranks.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        normed = F.rms_norm(out.float(), weight.shape, eps=self.config.layernorm_epsilon).to(out.dtype) * weight
        gated = (normed * F.silu(gate.float())).to(out.dtype)
        return gated.flatten(1)[:, None]
