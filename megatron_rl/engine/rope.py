"""Rotary position embedding of packed rows, with the scalings of transformers' configs."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.ops import fixed_order
from megatron_rl.weights.decoder import Architecture

Rotation = tuple[Tensor, Tensor] | Tensor
"""The rotation of R rows: cosines and sines, `[R, 1, D]` float32 each. For Transformer Engine's kernel, it is the
angles `[R, 1, 1, D]` instead."""


class Rope:
    """Frequencies of a rotary embedding. The layers of one model may use different ones."""

    is_fused = False
    """True to rotate with Transformer Engine's kernel, if there is no attention factor. It is set after the model is
    built."""
    in_fixed_order = False  # True to compute cosines and sines as servers with --exact do. Set after building

    def __init__(self, inverse_frequencies: Tensor, attention_factor: float = 1.0) -> None:
        self.inverse_frequencies, self.attention_factor = inverse_frequencies.float(), attention_factor

    @classmethod
    def of(cls, arch: Architecture) -> Rope:
        """Return the embedding that transformers computes from the architecture's `rope_theta` and `rope_scaling`."""
        if arch.rope_scaling is None:
            # Same operations as in transformers: different rounding would change the last bits of the frequencies.
            width = int(arch.head_dim * arch.rotary_share)
            exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
            return cls(1.0 / arch.rope_theta**exponents)
        config = PretrainedConfig(
            head_dim=arch.head_dim,
            hidden_size=arch.hidden,
            num_attention_heads=arch.heads,
            max_position_embeddings=arch.max_positions,
            rope_parameters={"rope_theta": arch.rope_theta, "partial_rotary_factor": arch.rotary_share}
            | arch.rope_scaling,
        )
        with torch.device("cpu"):
            frequencies, factor = ROPE_INIT_FUNCTIONS[arch.rope_scaling["rope_type"]](config, torch.device("cpu"))
        # moved here, so that no update waits for the copy
        return cls(frequencies.to(torch.get_default_device()), factor)

    def rotation(self, positions: Tensor) -> Rotation:
        """Return the rotation of rows. positions: `[R]`, the position of each row."""
        # Kept on the device: a copy for each microbatch would make the host wait.
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self.inverse_frequencies)  # [R, D / 2]
        angles = torch.cat([angles, angles], dim=-1)[:, None]  # one angle for both members of a pair, and for all heads
        if self.is_fused and self.attention_factor == 1.0:
            return angles[:, None]
        cos, sin = fixed_order.cos_and_sin(angles) if self.in_fixed_order else (angles.cos(), angles.sin())
        return cos * self.attention_factor, sin * self.attention_factor


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first W of the D features of x, `[R, heads, D]`; W is the rotation's width.

    The features i and i + W/2 are a pair. Each pair is rotated by the row's i-th angle.
    """
    if isinstance(rotation, Tensor):
        from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb

        return fused_apply_rotary_pos_emb(x[:, None], rotation)[:, 0]  # as one sequence of R positions
    cos, sin = (part.to(x.dtype) for part in rotation)  # rounded before the product, as in HF and the servers
    rotated, plain = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-high, low], dim=-1) * sin
    return rotated if plain.shape[-1] == 0 else torch.cat([rotated, plain], dim=-1)
