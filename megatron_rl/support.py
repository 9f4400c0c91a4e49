"""Supports: the tokens from which a server sampled each token, after top-k, top-p and min-p had excluded the others.

A reply that was sampled with a cut-off comes from a distribution over few tokens:

    log p(token) = logit / temperature - logsumexp of logit / temperature over the support

The trainer computes every log-probability over the server's support: the behaviour policy's, the proximal and current
policy's, and the reference's. Their ratios and KL terms then compare distributions over the same tokens. The support is
recorded as token ids, not as a threshold on logits, because each of these policies has other logits and would get
another support. `generation.top_k` limits the number of ids, so top-p and min-p are trained only together with it.

The batch column `support` is `[N, W]` int32. Row t holds the sampled token itself, then the other tokens of its support
in the order of their ids, then NO_TOKEN. Rows of prompts, and of tokens that no server sampled, hold only NO_TOKEN,
which stands for the whole vocabulary. W is twice generation.top_k, because some samplers also keep all tokens whose
logits are equal to the smallest logit that they keep.

Penalties and biases change the logits of a support's tokens before they are divided by the temperature, as in SGLang:

    adjusted = scaled(logit - frequency * count - presence * [count > 0]) + bias
    scaled(x) = x * repetition if x < 0 else x / repetition, for tokens with a count above 0; x for others

`count` is the number of times that the request has generated the token before. Tokens of the prompt do not count.
Neither do tokens that were generated before an abort, because the server then got them as a prompt. The adjustment does
not depend on the policy, so it is computed once, when a reply is read.

The batch column `adjustment` is `[N, W, P]` float32. Without a repetition penalty, P is 1: the number that is added to
the logit. With it, P is 3: a number that is added, the penalty by which the sum is then scaled (0 if the token has
none), and a number that is added last. So zeros change nothing. If a run's requests have no penalties and biases, the
batch has no such column.

Without `generation.top_k`, penalties and biases change the whole vocabulary's distribution. A row then has NO_TOKEN in
its first place, so that it stands for the whole vocabulary, and in its other places the tokens whose logits are
changed. W is large enough for a reply in which all tokens differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

COLUMN = "support"
"""Name of the batch's column with supports, `[N, W]`. Row t is the support of token t."""
ADJUSTMENT = "adjustment"
"""Name of the batch's column with adjustments, `[N, W, P]`. Entry (t, j) is for place j of row t's support."""
NO_TOKEN = -1
SHIFTS_ONLY, WITH_SCALE = 1, 3
"""The two possible values of P: without and with a repetition penalty."""


@dataclass(frozen=True, kw_only=True)
class Adjusting:
    """A request's options that change logits, with SGLang's names and meaning."""

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs."""

    @property
    def counts(self) -> bool:
        """True if the change of a logit depends on the tokens that were generated before."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def size(self) -> int:
        """P, the size of an entry in the column of adjustments; 0 if no logit is changed."""
        if self.repetition_penalty != 1.0:
            return WITH_SCALE
        return SHIFTS_ONLY if self.counts or self.logit_bias else 0

    def adjustments(self, rows: Tensor, ids: Tensor) -> Tensor | None:
        """Return the adjustments `[n, W, P]` of a reply's supports `[n, W]`, or None if the request changes no logit.

        rows: the supports. ids: `[n]`, the tokens of the reply.
        """
        if not self.size:
            return None
        counts = np.zeros(rows.shape, dtype=np.int64)
        if self.counts:
            row, place, count = counts_before(rows.numpy(), ids.numpy())
            counts[row, place] = count
        biased = [token for token, _ in self.logit_bias]
        row, place = ((counts > 0) | np.isin(rows.numpy(), biased)).nonzero()
        found = np.zeros((*rows.shape, self.size), dtype=np.float32)
        found[row, place] = self.changes(rows.numpy()[row, place], counts[row, place])
        return torch.from_numpy(found)

    def changes(self, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the adjustments `[n, P]` float32 of `tokens` `[n]`.

        counts: `[n]`, how many times each token is already in the reply.
        """
        found, came = np.zeros((len(tokens), self.size), dtype=np.float32), counts > 0
        # SGLang adds the penalty once for each occurrence, in float32, which differs from a product.
        shifts = summed(self.frequency_penalty, int(counts.max(initial=0)))[counts]
        found[came, 0] = -(shifts + np.float32(self.presence_penalty))[came]
        if self.size == WITH_SCALE:
            found[came, 1] = self.repetition_penalty
        if self.logit_bias:
            known, biases = (np.array(column) for column in zip(*sorted(self.logit_bias), strict=True))
            which = np.searchsorted(known, tokens).clip(max=len(known) - 1)
            has_bias = known[which] == tokens
            found[has_bias, -1] += biases.astype(np.float32)[which[has_bias]]
        return found

    def changed(self, ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return rows for supports that are the whole vocabulary: rows `[n, width]` and their adjustments.

        Each row lists the tokens whose logits are changed, after NO_TOKEN in its first place. ids: `[n]`, the tokens of
        the reply. Raises ValueError if the changed tokens do not fit into `width`.
        """
        sampled, biased = ids.numpy().astype(np.int64), np.array([token for token, _ in self.logit_bias], np.int64)
        tokens = np.union1d(sampled[:-1] if self.counts else [], biased).astype(np.int64)
        # Only the places of tokens that some row changes, in the order of their ids.
        rows = np.full((len(sampled), width), NO_TOKEN, dtype=np.int32)
        found = np.zeros((len(sampled), width, self.size), dtype=np.float32)
        if len(tokens) > width - 1:
            raise ValueError(f"has {len(tokens)} tokens that penalties and biases change, and {width - 1} fit")
        if not len(tokens) or not len(sampled):  # without any option there is no column to write into, either
            return torch.from_numpy(rows), torch.from_numpy(found)
        counts = np.zeros((len(sampled), len(tokens)), dtype=np.int64)
        if self.counts:
            counts[np.arange(1, len(sampled)), np.searchsorted(tokens, sampled[:-1])] = 1
            counts = counts.cumsum(0)
        row, place = ((counts > 0) | np.isin(tokens, biased)).nonzero()
        rows[row, place + 1] = tokens[place]
        found[row, place + 1] = self.changes(tokens[place], counts[row, place])
        return torch.from_numpy(rows), torch.from_numpy(found)


NOT_ADJUSTED = Adjusting()


def counts_before(rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count how often each token of `rows` was generated before its row.

    Returns three int64 arrays, row t, place j and count, with an entry for each token rows[t, j] that is in ids[:t].
    """
    row, place = np.isin(rows, ids).nonzero()
    # Occurrences as numbers that are sorted by token, then by position.
    occurrences = np.sort((ids.astype(np.int64) << 32) + np.arange(len(ids)))
    first = rows[row, place].astype(np.int64) << 32
    count = np.searchsorted(occurrences, first + row) - np.searchsorted(occurrences, first)
    came = count > 0
    return row[came], place[came], count[came]


def summed(amount: float, most: int) -> np.ndarray:
    """Return `amount` times each number from 0 to `most`, `[most + 1]` float32, computed by repeated addition."""
    return np.concatenate([np.zeros(1, np.float32), np.full(most, amount, np.float32).cumsum(dtype=np.float32)])


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


def columns(support: Tensor | None, adjustment: Tensor | None, prompt: int) -> dict[str, Tensor]:
    """Return the batch columns of a prompt and its reply, from the support and the adjustment of the reply.

    prompt: number of prompt tokens. A column is absent if the reply has no tensor for it.
    """
    found = {} if support is None else {COLUMN: torch.cat([whole(prompt, support.shape[1]), support])}
    if adjustment is not None:
        found[ADJUSTMENT] = torch.cat([unchanged(prompt, adjustment), adjustment])
    return found


def whole(rows: int, width: int) -> Tensor:
    """Return supports `[rows, width]` that stand for the whole vocabulary."""
    return torch.full((rows, width), NO_TOKEN, dtype=torch.int32)


def sizes(rows: Tensor) -> Tensor:
    """Return the number of tokens in each support, `[n]`; 0 for rows that stand for the whole vocabulary."""
    return (rows != NO_TOKEN).sum(1) * (rows[:, 0] != NO_TOKEN)


def unchanged(rows: int, like: Tensor) -> Tensor:
    """Return adjustments `[rows, W, P]` that change nothing. W and P are those of `like` `[n, W, P]`."""
    return like.new_zeros(rows, *like.shape[1:])


def check_complete(
    found: Tensor | None,
    input_ids: Tensor,
    loss_mask: Tensor,
    *,
    adjustment: Tensor | None = None,
    is_adjusted: bool = False,
) -> None:
    """Raise ValueError if a trained token has no support, or if its support is that of another token.

    found: the batch's column of supports. is_adjusted: True if the run changes logits, so that the batch must have the
    column `adjustment`.
    """
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
    if is_adjusted:
        check_adjusted(adjustment)


def check_adjusted(adjustment: Tensor | None) -> None:
    """Raise ValueError if there is no `adjustment`. Call this only in runs that change logits."""
    if adjustment is None:
        raise ValueError(
            f"generation: the run has penalties or a logit_bias, and the trajectories have no column {ADJUSTMENT!r}, "
            f"what these added to logits; a workflow that makes Trajectory itself passes LLMResponse.adjustment on in "
            f"Trajectory.tokens, as Trajectory.from_reply does."
        )
