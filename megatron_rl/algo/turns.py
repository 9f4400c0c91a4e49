"""Turns of a trajectory: unbroken runs of tokens that a mask selects, such as trained or model-written tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.types import prefix_sums


def turns_of(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the turn of each token, `[N]` int64, and the bounds of the sequences in turns, `[B + 1]`.

    Turns are numbered over the whole batch. Tokens outside the mask get -1.
    """
    begins = mask.clone()
    begins[1:] &= ~mask[:-1]
    # A turn ends with its sequence. An empty last sequence starts after the last token and is excluded.
    starts = cu_seqlens[:-1][cu_seqlens[:-1] < len(mask)]
    begins[starts] |= mask[starts]
    count = prefix_sums(begins)  # [N + 1]: turns begun before each token
    return (count[1:] - 1).masked_fill(~mask, -1), count[cu_seqlens]


def first_of_turn(turn: Tensor) -> Tensor:
    """Return the index of each turn's first token, `[turns]` int64."""
    place = (turn >= 0).nonzero()[:, 0]
    own = turn[place]
    is_first = torch.ones(len(own), dtype=torch.bool)
    is_first[1:] = own[1:] != own[:-1]
    return place[is_first]


def spread_over_turns(values: Tensor, turn: Tensor) -> Tensor:
    """Give each token the value of its turn: `[turns]` -> `[N]`. Tokens outside all turns get 0."""
    result = values.new_zeros(len(turn))
    result[turn >= 0] = values[turn[turn >= 0]]
    return result
