"""Parses the tokens in a rollout server's JSON reply without creating a Python object per token."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.ops.library import ops


def reply_tokens(
    content: bytearray, *, vocab_size: int, at_most: int, lowest: float, highest: float
) -> tuple[Tensor, Tensor, bytes] | None:
    """Parse the bytes of a /generate reply into (ids `[n]` int32, log-probabilities `[n]` float32, the rest), or None.

    The rest is the reply's JSON with `meta_info.output_token_logprobs` replaced by `[]`. If `output_ids` held the same
    ids, null replaces it. The rest is valid JSON if and only if the reply is.

    Returns None for anything unusual, which a general parser must then handle:
    - invalid JSON, one of these keys twice, or an escape in a key
    - more than `at_most` entries, or an entry that is not [log-probability, id, null]
    - ids not in [0, vocab_size), or different from `output_ids`
    - log-probabilities outside [lowest, highest]

    Log-probabilities are rounded to float64 and then to float32, as Python does. Releases the GIL while parsing.
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
