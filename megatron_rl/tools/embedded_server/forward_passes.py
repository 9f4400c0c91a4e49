"""The two forward passes of a turn: prefill of many rows at once, and decoding of one token per ready row.

Only the batcher's thread calls them. The batcher chooses the requests and handles the new tokens. `prefill` records in
`KVRows` what it wrote. `prefill` skips a prompt's last token, because `next_tokens` decodes that token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.ops import packed_logprobs
from megatron_rl.tools.embedded_server import sampling
from megatron_rl.tools.embedded_server.kv_rows import KVRows
from megatron_rl.tools.embedded_server.request import Request
from megatron_rl.tools.embedded_server.transformer import Decoder, Span

LOGIT_ROWS = 256
"""Rows of float32 logits computed at a time when a prompt is scored. This limits the memory of the logits."""


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
    hidden = model.prefill(torch.tensor(tokens, device=model.device), spans, kv_rows.cache)
    begin = 0
    for request, span in zip(owners, spans, strict=True):
        if request.next_score is not None:
            _score(model, request, hidden[begin : begin + span.count], span)
        begin += span.count
        kv_rows.advance(request, span.count)
    return len(tokens)


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


def next_tokens(
    model: Decoder, kv_rows: KVRows, batch: Sequence[Request], eos_token_ids: frozenset[int]
) -> tuple[list[int], list[float]]:
    """Sample one token per request; return the tokens and their log-probabilities. `batch` must be sorted by row.

    Supports are added to the requests that ask for them.
    """
    hidden = model.decode(
        [r.tokens[-1] for r in batch], [r.filled for r in batch], [r.row for r in batch], kv_rows.cache
    )
    logits = model.logits(hidden)
    for row, request in zip(logits, batch, strict=True):
        if request.params.adjusts_logits:
            stop_ids = request.params.stop_ids(eos_token_ids)
            sampling.adjust_logits(row, request.params, request.output, stop_ids)
    # The uniform depends on the position in the reply, not on the turn, so retraction does not change a reply.
    uniforms = [sampling.uniform(r.seed, r.generated) for r in batch]
    wants = [i for i, request in enumerate(batch) if request.tells_support]
    chosen, logprobs, supports = sampling.sample(logits, [r.params for r in batch], uniforms, wants)
    for i, (support, logprob) in zip(wants, supports, strict=True):
        batch[i].supports.append(support)
        batch[i].support_logprobs.append(logprob)
    return chosen, logprobs
