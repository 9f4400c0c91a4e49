"""Supports: the tokens from which a server sampled each token, after top-k, top-p and min-p had excluded the others.

A reply that was sampled with a cut-off comes from a distribution over few tokens:

    log p(token) = logit / temperature - logsumexp of logit / temperature over the support

The trainer computes every log-probability over the server's support: the behaviour policy's, the proximal and current
policy's, and the reference's. Their ratios and KL terms then compare distributions over the same tokens, and the
gradient is that of the distribution that was sampled.

The support is recorded as token ids, not as a threshold. A threshold is applied to logits, and each of these policies
has other logits, so each would get a support of its own: a sampled token could have probability 0 under one of them,
and a ratio would compare different sets. Even with the server's own weights, rounding in the trainer would move tokens
at the edge in or out. Ids have neither problem, and their log-probabilities need only the logits of these tokens.
`generation.top_k` limits their number, which is why top-p and min-p are trained only together with it.

In a batch, the column `support` is `[N, W]` int32 with 4 W bytes per token. Row t holds the token itself, then the
other tokens of its support in the order of their ids, then NO_TOKEN. So the sampled token is always part of its
support. A row of only NO_TOKEN stands for the whole vocabulary: prompts, and tokens that no server sampled. W is twice
generation.top_k, because some samplers keep all tokens whose logits are equal to the least likely one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

COLUMN = "support"
"""Name of the batch's column with supports, `[N, W]`. Row t is the support of token t."""
NO_TOKEN = -1


def read(masks: Sequence[Any], ids: Tensor, *, width: int, vocab_size: int) -> Tensor:
    """Convert the supports of a reply's tokens to rows `[n, width]`. Raises ValueError if they are invalid.

    masks: for each token, the list of its support's ids, in any order. ids: `[n]`, the tokens.
    """
    if len(masks) != len(ids):
        raise ValueError(f"has {len(masks)} entries for {len(ids)} tokens")
    for place, mask in enumerate(masks):
        if type(mask) is not list or not mask or not all(type(token) is int for token in mask):
            raise ValueError(f"[{place}] = {str(mask)[:80]}: must be a list of token ids")
    lengths = np.fromiter(map(len, masks), dtype=np.int64, count=len(masks))
    if len(lengths) and lengths.max() > width:
        place = int(lengths.argmax())
        raise ValueError(
            f"[{place}] has {lengths[place]} ids, and {width} fit, twice generation.top_k: too many tokens are as "
            f"likely as the last one that was kept; set another generation.top_k, or let the server compute logits in "
            f"float32"
        )
    for mask in masks:  # as Python's integers, because a server may send one that int64 cannot hold
        if not 0 <= min(mask) <= max(mask) < vocab_size:
            wrong = min(mask) if min(mask) < 0 else max(mask)
            raise ValueError(f"has the id {wrong}: must be an id of the vocabulary of {vocab_size}")
    flat = np.fromiter(chain.from_iterable(masks), dtype=np.int64, count=int(lengths.sum()))
    of = np.repeat(np.arange(len(masks)), lengths)
    sampled = ids.numpy().astype(np.int64)
    is_sampled = flat == sampled[of]
    found = np.bincount(of[is_sampled], minlength=len(masks))
    if (found != 1).any():
        place = int((found != 1).argmax())
        raise ValueError(
            f"[{place}] has the token {sampled[place]} that was sampled {found[place]} times: must be once"
        )
    order = np.lexsort((flat, ~is_sampled, of))  # by token, then the sampled one, then by id
    flat = flat[order]
    if (repeats := (np.diff(flat) == 0) & (np.diff(of) == 0)).any():
        raise ValueError(f"[{of[:-1][repeats][0]}] has the id {flat[:-1][repeats][0]} twice")
    rows = np.full((len(masks), width), NO_TOKEN, dtype=np.int32)
    starts = np.cumsum(lengths) - lengths
    rows[of, np.arange(len(flat)) - starts[of]] = flat
    return torch.from_numpy(rows)


def column(support: Tensor | None, prompt: int, tokens: int) -> dict[str, Tensor]:
    """Return {"support": column} of `tokens` tokens, of which the first `prompt` have none. {} if support is None."""
    if support is None:
        return {}
    return {COLUMN: torch.cat([whole(prompt, support.shape[1]), support[: tokens - prompt]])}


def whole(rows: int, width: int) -> Tensor:
    """Return rows that stand for the whole vocabulary."""
    return torch.full((rows, width), NO_TOKEN, dtype=torch.int32)


def check_complete(found: Tensor | None, input_ids: Tensor, loss_mask: Tensor) -> None:
    """Raise ValueError if a trained token has no support, or the support of another token."""
    key = "generation.top_k"
    if found is None:
        raise ValueError(
            f"{key}: the trajectories have no column {COLUMN!r}, the tokens that servers sampled from; a workflow that "
            f"makes Trajectory itself passes LLMResponse.support on in Trajectory.tokens, as Trajectory.from_reply "
            f"does."
        )
    other = loss_mask.bool() & (found[:, 0] != input_ids)
    if other.any():
        place = int(other.nonzero()[0])
        why = "no support" if found[place, 0] == NO_TOKEN else f"the support of token {int(found[place, 0])}"
        raise ValueError(
            f"{key}: {int(other.sum())} trained tokens were not sampled from the support that they have; the first is "
            f"token {place} of the batch, {int(input_ids[place])}, with {why}. Ask for replies with the run's "
            f"generation.top_k, and keep Trajectory.tokens[{COLUMN!r}] beside input_ids."
        )
