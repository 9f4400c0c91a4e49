"""The critic's and the reward model's head: one number per token, the same on every rank of the tensor axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """A linear map to one number, computed in float32.

    weight: `[1, H]`, replicated, no bias: `score.weight` of a HF sequence classification model. It starts at zero.
    """

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[T, H]` -> `[T]` float32."""
        # bfloat16 has three digits, and advantages are differences of values.
        return nn.functional.linear(hidden.float(), self.weight.float())[:, 0]
