"""Supports that the trainer computes, if servers do not report which tokens they sampled from.

The policy's logits before the first update tell what top_k, top_p and min_p left. All policies of the step use these
supports, like reported ones (megatron_rl/support.py). The servers' log-probabilities are over the whole vocabulary, so
the trainer's log-probability of the support is subtracted from them.

Trainer and server round differently. A sampled token that the trainer's options exclude is added to its own support, so
that its ratio is that of an unchanged policy too. `mismatch/outside_support` is the share of such tokens: if it is not
small, servers sample with other options or weights. If a support has more than MOST_COMPUTED tokens, the token's
log-probabilities are over the whole vocabulary (`rollout/whole_supports`).
"""

from __future__ import annotations

import torch

from megatron_rl import support
from megatron_rl.batch.step_batch import StepBatch
from megatron_rl.config import GenerationConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.ops import Cut


def add_computed_supports(batch: StepBatch, engine: MegatronEngine, generation: GenerationConfig) -> dict[str, float]:
    """Compute the supports of a step's trained tokens. Return metrics.

    Adds the column `support` to the batch, and changes its `logprobs` from the whole vocabulary to the support. engine:
    the policy, with the weights with which the servers sampled. Collective: every rank calls it.
    """
    options = {"top_k": generation.top_k, "top_p": generation.top_p, "min_p": generation.min_p}
    cut = Cut(**options, width=generation.computed_size)
    found = engine.kept_tokens(batch.own(), cut, temperature=generation.temperature)
    sizes = support.sizes(found.ids)
    largest = max(1, int(sizes.max())) if len(sizes) else 1
    widest = -engine.groups.least(-largest)
    trained = batch["loss_mask"].bool()
    batch.tokens[support.COLUMN] = found.ids[:, :widest].contiguous()
    batch.tokens["logprobs"] = batch["logprobs"] - found.log_mass.masked_fill(~trained, 0.0)
    counts = [trained.sum(), found.is_outside.sum(), (trained & (sizes == 0)).sum(), sizes.sum()]
    tokens, outside, whole, kept = batch.total(torch.stack(counts)).tolist()
    if not tokens:
        return {}
    metrics = {"mismatch/outside_support": outside / tokens, "rollout/whole_supports": whole / tokens}
    return metrics | ({"rollout/support_size": kept / (tokens - whole)} if tokens > whole else {})
