"""The two forward passes of a turn: prompt tokens of many rows at once, and the next token of every row that is ready.

For the batcher's thread alone, which decides who runs and what becomes of the tokens. Both passes count what they wrote
with the rows of the cache; a prompt is prefilled up to its last token, which `next_tokens` decodes like all others.
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
"""Rows of logits computed at a time when a prompt is scored: a vocabulary's width of float32 each."""


def prefill(model: Decoder, kv_rows: KVRows, requests: Sequence[Request], budget: int) -> int:
    """Compute at most `budget` tokens of these requests, the first ones first; return how many it computed."""
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
    """Append log-probabilities of the prompt tokens after those of `span`, at temperature 1 like SGLang's."""
    stop = min(span.start + span.count, len(request.prompt) - 1)
    for begin in range(max(request.next_score, span.start), stop, LOGIT_ROWS):
        end = min(begin + LOGIT_ROWS, stop)
        logits = model.logits(hidden[begin - span.start : end - span.start])
        targets = torch.tensor(request.prompt[begin + 1 : end + 1], device=logits.device)
        request.input_logprobs += packed_logprobs(logits, targets).tolist()


def next_tokens(
    model: Decoder, kv_rows: KVRows, batch: Sequence[Request], eos_token_ids: frozenset[int]
) -> tuple[list[int], list[float]]:
    """Return the next token of each request and its log-probability. `batch` is in the order of its rows."""
    hidden = model.decode(
        [r.tokens[-1] for r in batch], [r.filled for r in batch], [r.row for r in batch], kv_rows.cache
    )
    logits = model.logits(hidden)
    for row, request in zip(logits, batch, strict=True):
        if request.params.adjusts_logits:
            stop_ids = request.params.stop_ids(eos_token_ids)
            sampling.adjust_logits(row, request.params, request.prompt, request.output, stop_ids)
    # By place in the reply and not by turn: a reply that is retracted and goes on draws what it would have drawn.
    uniforms = [sampling.uniform(r.seed, r.generated) for r in batch]
    return sampling.sample(logits, [r.params for r in batch], uniforms)
