"""Public numerical operators, each with its plain-torch reference in `ops.reference`."""

from megatron_rl.ops.logprobs import (
    VocabParallelLogits,
    VocabShard,
    gather_logprobs,
    gather_logprobs_entropy,
    lm_head_logprobs,
)

__all__ = ["VocabParallelLogits", "VocabShard", "gather_logprobs", "gather_logprobs_entropy", "lm_head_logprobs"]
