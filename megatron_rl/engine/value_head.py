"""The critic's and the reward model's head: one number per token, the same on every rank of the tensor axis."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class ValueHead(nn.Module):
    """A linear map to one number, computed in float32. It takes the place of a GPTModel's output layer.

    weight: `[1, H]`, replicated, no bias: `score.weight` of a HF sequence classification model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[T, H]` -> `[T]` float32."""
        return nn.functional.linear(hidden.float(), self.weight.float())[:, 0]
