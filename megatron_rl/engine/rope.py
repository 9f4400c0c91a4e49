"""Rotary position embedding of packed rows, with the scalings of transformers' configs."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.weights.decoder import Architecture

Rotation = tuple[Tensor, Tensor] | Tensor
"""Cosines and sines `[R, 1, D]` float32 of R rows, or their angles `[R, 1, 1, D]` for Transformer Engine's kernel."""


class Rope:
    """Frequencies of one kind of rotary embedding; layers of one model may have different ones."""

    is_fused = False
    """Does Transformer Engine's kernel rotate? Set after building; it knows no attention factor."""

    def __init__(self, inverse_frequencies: Tensor, attention_factor: float = 1.0) -> None:
        self.inverse_frequencies, self.attention_factor = inverse_frequencies.float(), attention_factor

    @classmethod
    def of(cls, arch: Architecture) -> Rope:
        """Return what transformers computes for the architecture's `rope_theta` and `rope_scaling`."""
        if arch.rope_scaling is None:
            # By transformers' own steps: rounded otherwise, the frequencies would differ in their last bits.
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
        return cls(frequencies.to(torch.get_default_device()), factor)  # here, so that no update waits for it

    def rotation(self, positions: Tensor) -> Rotation:
        """Return what rotates rows at `[R]` positions."""
        # Kept where they are read: a copy for each microbatch would wait for the device.
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self.inverse_frequencies)  # [R, D / 2]
        angles = torch.cat([angles, angles], dim=-1)[:, None]  # one for both of a pair, and for all heads
        if self.is_fused and self.attention_factor == 1.0:
            return angles[:, None]
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def rows_of(rotation: Rotation, start: int, stop: int) -> Rotation:
    """Return what rotates the rows from `start` on, up to `stop`."""
    if isinstance(rotation, Tensor):
        return rotation[start:stop]
    cos, sin = rotation
    return cos[start:stop], sin[start:stop]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first W of `[R, heads, D]`: the pair (i, i + W/2) by the row's angle i (RoFormer, arXiv 2104.09864).

    W is the width of the rotation, which may be that of the whole head.
    """
    if isinstance(rotation, Tensor):
        from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb

        return fused_apply_rotary_pos_emb(x[:, None], rotation)[:, 0]  # as R positions of one sequence
    cos, sin = (part.to(x.dtype) for part in rotation)  # as HF and the servers do: rounded before the product
    rotated, plain = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-high, low], dim=-1) * sin
    return rotated if plain.shape[-1] == 0 else torch.cat([rotated, plain], dim=-1)
