"""Rotary position embedding of packed rows, with the scalings of transformers' configs."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.weights.architecture import Architecture


class Rope:
    """Frequencies of one kind of rotary embedding; layers of one model may have different ones."""

    def __init__(self, inverse_frequencies: Tensor, attention_factor: float = 1.0) -> None:
        self.inverse_frequencies, self.attention_factor = inverse_frequencies.float(), attention_factor

    @classmethod
    def of(cls, arch: Architecture) -> Rope:
        """Return what transformers computes for the architecture's `rope_theta` and `rope_scaling`."""
        if arch.rope_scaling is None:
            # By transformers' own steps: rounded otherwise, the frequencies would differ in their last bits.
            exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
            return cls(1.0 / arch.rope_theta**exponents)
        config = PretrainedConfig(
            head_dim=arch.head_dim,
            hidden_size=arch.hidden,
            num_attention_heads=arch.heads,
            max_position_embeddings=arch.max_positions,
            rope_parameters={"rope_theta": arch.rope_theta} | arch.rope_scaling,
        )
        return cls(*ROPE_INIT_FUNCTIONS[arch.rope_scaling["rope_type"]](config, torch.device("cpu")))

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[R, 1, D]` float32 of `[R]` positions."""
        # Kept where they are read: a copy for each microbatch would wait for the device.
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self.inverse_frequencies)  # [R, D / 2]
        angles = torch.cat([angles, angles], dim=-1)[:, None]  # one for both of a pair, and for all heads
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `[R, heads, D]`: the pair (i, i + D/2) by the row's angle i (RoFormer, arXiv 2104.09864)."""
    cos, sin = (part.to(x.dtype) for part in rotation)  # as HF and the servers do: rounded before the product
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
