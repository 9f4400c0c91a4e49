"""Computes which tokens top-k, top-p and min-p keep, for servers that do not report it (megatron_rl/support.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.ops.logprobs import VocabShard
from megatron_rl.ops.reverse_kl import likeliest

NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Sampling options that exclude tokens, with SGLang's names and meaning.

    width: W, the number of tokens that a support can hold. If a row keeps more tokens, its support is the whole
    vocabulary.
    """

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    width: int


@dataclass(frozen=True)
class KeptTokens:
    """The supports of some rows.

    ids: `[c, W]` int32, as in megatron_rl/support.py.
    log_mass: `[c]`, the log of the probability that the support's tokens have together before the cut; 0 for the whole
      vocabulary.
    is_outside: `[c]` bool, True if the options exclude the sampled token. It is part of the support nevertheless.
    """

    ids: Tensor
    log_mass: Tensor
    is_outside: Tensor


def kept_tokens(logits: Tensor, labels: Tensor, cut: Cut, shard: VocabShard, temperature: float) -> KeptTokens:
    """Return the support of each row: the tokens that `cut` keeps, and the sampled token.

    logits: `[c, columns]` float32 or float64, without padding; they are overwritten.
    labels: `[c]` int64, the sampled tokens, all of 0 or more.

    Each option is evaluated on the probabilities before any other option has excluded tokens, as in the embedded server
    and in SGLang's sampler in torch. Collective over the tensor-parallel ranks.
    """
    count = min(cut.width + 1, shard.size)
    logprobs, tokens, own = likeliest(logits, count, shard, temperature)
    probs = logprobs.exp()
    keep = probs >= cut.min_p * probs[:, :1]
    if cut.top_k > 0:
        keep &= torch.arange(count, device=keep.device) < cut.top_k
    if cut.top_p < 1:
        keep &= probs.cumsum(1) - probs <= cut.top_p
    is_sampled = tokens == labels[:, None]
    is_outside = ~(keep & is_sampled).any(1)
    is_whole = keep.sum(1) + is_outside > cut.width
    extra = logprob_of(own, labels, shard).masked_fill(~is_outside, -torch.inf)
    masses = torch.cat([logprobs.masked_fill(~keep, -torch.inf), extra[:, None]], 1)
    others = tokens.masked_fill(~keep | is_sampled, shard.size).sort(1).values[:, : cut.width - 1]
    ids = torch.cat([labels[:, None], others.masked_fill(others == shard.size, NO_TOKEN)], 1)
    missing = (0, cut.width - ids.shape[1])
    ids = torch.nn.functional.pad(ids, missing, value=NO_TOKEN).masked_fill(is_whole[:, None], NO_TOKEN)
    return KeptTokens(ids.int(), masses.logsumexp(1).masked_fill(is_whole, 0.0), is_outside & ~is_whole)


def logprob_of(logprobs: Tensor, labels: Tensor, shard: VocabShard) -> Tensor:
    """Return the labels' log-probabilities `[c]`, given those of this rank's columns, `[c, columns]`.

    Each label is in the columns of exactly one rank. Collective over the tensor-parallel ranks.
    """
    places = labels - shard.start
    is_here = (places >= 0) & (places < logprobs.shape[1])
    if logprobs.shape[1]:
        found = logprobs.gather(1, places.where(is_here, 0)[:, None])[:, 0].masked_fill(~is_here, 0.0)
    else:
        found = logprobs.new_zeros(len(labels))
    if shard.is_split:
        dist.all_reduce(found, group=shard.group)
    return found
