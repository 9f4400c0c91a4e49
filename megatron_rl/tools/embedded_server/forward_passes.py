"""The forward passes of a turn: prefill of many rows at once, and decoding of the rows whose prompt is complete.

Only the batcher's thread calls these functions. The batcher chooses the requests and handles the new tokens. `prefill`
records in `KVRows` what it wrote. It skips a prompt's last token, because `decode` reads that token.

With a draft head, `guesses` proposes some tokens per request, and one pass of the model reads all of them. At each
position a token is then sampled as if there were no guesses, with that position's random numbers. A guess is accepted
if it equals the sampled token. So replies are the same with and without a draft head, and their distribution needs no
correction. The head samples its guesses with the same random numbers, so they are mostly right if its distribution is
close to the model's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.ops import packed_logprobs
from megatron_rl.tools.embedded_server import sampling
from megatron_rl.tools.embedded_server.drafting_decoder import DraftingDecoder
from megatron_rl.tools.embedded_server.kv_rows import KVRows
from megatron_rl.tools.embedded_server.request import Request
from megatron_rl.tools.embedded_server.transformer import Decoder, Span

LOGIT_ROWS = 256
"""Number of rows of float32 logits computed at a time when a prompt is scored, which limits their memory."""


def prefill(model: Decoder, kv_rows: KVRows, requests: Sequence[Request], budget: int) -> int:
    """Prefill at most `budget` tokens of these requests, in order. Return how many tokens were computed."""
    spans, owners, tokens = [], [], []
    for request in requests:
        count = min(len(request.tokens) - 1 - request.filled, budget)
        if count > 0:
            spans.append(Span(request.row, request.filled, count))
            owners.append(request)
            tokens += request.tokens[request.filled : request.filled + count]
            budget -= count
    if not spans:
        return 0
    following = [_following(model, owners, spans)] if isinstance(model, DraftingDecoder) else []
    hidden = model.prefill(torch.tensor(tokens, device=model.device), spans, kv_rows.cache, *following)
    begin = 0
    for request, span in zip(owners, spans, strict=True):
        if request.next_score is not None:
            _score(model, request, hidden[begin : begin + span.count], span)
        begin += span.count
        kv_rows.advance(request, span.count)
        request.drafted = request.filled
    return len(tokens)


def _following(model: Decoder, owners: Sequence[Request], spans: Sequence[Span]) -> Tensor:
    """Return the token `[T]` that follows each position of the spans, span by span."""
    after = (r.tokens[s.start + 1 : s.start + 1 + s.count] for r, s in zip(owners, spans, strict=True))
    return torch.tensor([token for own in after for token in own], device=model.device)


def _score(model: Decoder, request: Request, hidden: Tensor, span: Span) -> None:
    """Append the log-probability of each prompt token whose preceding token is in `span`.

    As in SGLang, the temperature is 1.
    """
    stop = min(span.start + span.count, len(request.prompt) - 1)
    for begin in range(max(request.next_score, span.start), stop, LOGIT_ROWS):
        end = min(begin + LOGIT_ROWS, stop)
        logits = model.logits(hidden[begin - span.start : end - span.start])
        targets = torch.tensor(request.prompt[begin + 1 : end + 1], device=logits.device)
        request.input_logprobs += packed_logprobs(logits, targets).tolist()


def guesses(
    model: DraftingDecoder, kv_rows: KVRows, batch: Sequence[Request], count: int, most: int
) -> list[list[int]]:
    """Return for each request guesses of its next `count` tokens. `batch` must be sorted by row.

    most: maximum number of positions per request that the head reads in one pass.
    """
    rows, params, cache = [r.row for r in batch], [r.params for r in batch], kv_rows.cache
    width = min(max(1, *(r.filled - r.drafted for r in batch)), most)
    # If nothing was guessed while many requests ran, the head has missed more than `width` positions.
    if behind := [r for r in batch if r.filled - r.drafted > width]:
        spans = [Span(r.row, r.drafted, r.filled - width - r.drafted) for r in behind]
        model.draft_spans(_following(model, behind, spans), spans, cache)
    for request in batch:
        request.drafted = request.filled
    # Positions that the head reads a second time get the same keys again.
    starts = [max(r.filled - width, 0) for r in batch]
    following: list[int] = []
    for request, start in zip(batch, starts, strict=True):
        known = request.tokens[start + 1 : start + 1 + width]
        following += known + [0] * (width - len(known))  # padding: the states of these positions are not used
    at = torch.tensor(starts, device=model.device)[:, None] + torch.arange(width, device=model.device)
    known_states = cache.states[torch.tensor(rows, device=model.device)[:, None], at].flatten(0, 1)
    states = model.draft(following, known_states, starts, rows, cache, width=width)
    newest = [i * width + max(r.filled - 1 - start, 0) for i, (r, start) in enumerate(zip(batch, starts, strict=True))]
    states, found = states[newest], []
    for number in range(count):
        keys = [sampling.key_of(r.seed, r.generated + number) for r in batch]
        found.append(sampling.choose(model.guessed_logits(states), params, keys)[0].tolist())
        if number + 1 < count:
            states = model.draft(found[-1], states, [r.filled + number for r in batch], rows, cache)
    return [list(column) for column in zip(*found, strict=True)]


def decode(model: Decoder, kv_rows: KVRows, batch: Sequence[Request], guessed: Sequence[list[int]]) -> Tensor:
    """Run the model on each request's last token and its guesses. Return hidden states `[B, 1 + guesses, H]`.

    guessed: the guesses of each request; all requests have the same number of guesses. `batch` must be sorted by row.
    """
    tokens = [token for request, own in zip(batch, guessed, strict=True) for token in (request.tokens[-1], *own)]
    width = len(tokens) // len(batch)
    positions, rows = [r.filled for r in batch], [r.row for r in batch]
    return model.decode(tokens, positions, rows, kv_rows.cache, width=width).view(len(batch), width, -1)


def next_tokens(
    logits: Tensor, batch: Sequence[Request], eos_token_ids: frozenset[int]
) -> tuple[list[int], list[float]]:
    """Sample one token per request from logits `[B, V]`; return the tokens and their log-probabilities.

    If a request has `tells_support`, the token's support is appended to the request's lists. Penalties and biases
    change `logits` in place.
    """
    for row, request in zip(logits, batch, strict=True):
        if request.params.adjusts_logits:
            stop_ids = request.params.stop_ids(eos_token_ids)
            sampling.adjust_logits(row, request.params, request.output, stop_ids)
    # The key depends on the position in the reply, not on the turn, so retraction does not change a reply.
    keys = [sampling.key_of(r.seed, r.generated) for r in batch]
    wants = [i for i, request in enumerate(batch) if request.tells_support]
    chosen, logprobs, supports = sampling.sample(logits, [r.params for r in batch], keys, wants)
    for i, (support, logprob) in zip(wants, supports, strict=True):
        batch[i].supports.append(support)
        batch[i].support_logprobs.append(logprob)
    return chosen, logprobs
