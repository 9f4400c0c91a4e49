"""Turns of a trajectory: unbroken runs of tokens that are trained, or written by the model, whatever the mask says.

Between them is what a user, a tool or an environment said.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.types import prefix_sums


def turns_of(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's turn, `[N]` int64, -1 outside the mask, and the bounds of the sequences' turns.

    mask: `[N]` bool. Turns are numbered over the whole batch; bounds are `[B + 1]` int64, prefix sums of their counts.
    """
    begins = mask.clone()
    begins[1:] &= ~mask[:-1]
    # A turn does not go on into the next sequence. An empty one at the end would begin behind the last token.
    starts = cu_seqlens[:-1][cu_seqlens[:-1] < len(mask)]
    begins[starts] |= mask[starts]
    count = prefix_sums(begins)  # [N + 1]: turns that have begun before each token
    return (count[1:] - 1).masked_fill(~mask, -1), count[cu_seqlens]


def first_of_turn(turn: Tensor) -> Tensor:
    """Return the place of each turn's first token, `[turns]` int64."""
    place = (turn >= 0).nonzero()[:, 0]
    own = turn[place]
    is_first = torch.ones(len(own), dtype=torch.bool)
    is_first[1:] = own[1:] != own[:-1]
    return place[is_first]


def spread_over_turns(values: Tensor, turn: Tensor) -> Tensor:
    """`[turns]` -> `[N]`: each trained token's turn's value, 0 where a token is not trained."""
    result = values.new_zeros(len(turn))
    result[turn >= 0] = values[turn[turn >= 0]]
    return result
