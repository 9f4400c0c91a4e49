"""The tokens of a rollout server's JSON answer, without a Python object for each."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.ops.library import ops


def reply_tokens(
    content: bytearray, *, vocab_size: int, at_most: int, lowest: float, highest: float
) -> tuple[Tensor, Tensor, bytes] | None:
    """Return (ids `[n]` int32, log-probabilities `[n]` float32, the rest) of a /generate answer's bytes, or None.

    The rest is the answer with `[]` in place of `meta_info.output_token_logprobs`, and null in place of an `output_ids`
    that held the same ids. It is valid JSON if and only if the answer is. None for everything unusual, which a general
    reader has to decide: more than `at_most` entries, one that is not [log-probability, id, null], ids not in
    [0, vocab_size), log-probabilities outside [lowest, highest], other ids in `output_ids`, one of these keys twice, an
    escape in a key, what is not JSON. A log-probability is rounded to float64 first and then to float32, as Python
    does. Holds no GIL while it reads.
    """
    if not content:
        return None
    given = torch.frombuffer(content, dtype=torch.uint8)
    ids, logprobs, cuts = ops.reply_tokens(given, vocab_size, at_most, lowest, highest)
    if not len(cuts):
        return None
    ids_begin, ids_end, tokens_begin, tokens_end = cuts.tolist()
    kept, pieces, behind = memoryview(content), [], 0
    for begin, end, instead in sorted([(ids_begin, ids_end, b"null"), (tokens_begin, tokens_end, b"[]")]):
        if end:
            pieces += [kept[behind:begin], instead]
            behind = end
    return ids, logprobs, b"".join([*pieces, kept[behind:]])
