"""The head of a critic or reward model: one number per token, the same on every rank of the tensor axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """A linear map without bias to one number, computed in float32.

    weight: `[1, H]`, replicated, initially zero. It is `score.weight` of a HF sequence classification model.
    """

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states `[T, H]` to values `[T]` float32."""
        # bfloat16 has three decimal digits: too few, because advantages are differences of values.
        return nn.functional.linear(hidden.float(), self.weight.float())[:, 0]
