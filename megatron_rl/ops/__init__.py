"""Public numerical operators, compiled from csrc/, each with its plain-torch reference in `ops.reference`."""

from megatron_rl.ops.head import lm_head_logprobs
from megatron_rl.ops.logprobs import (
    VocabParallelLogits,
    VocabShard,
    gather_logprobs,
    gather_logprobs_entropy,
    packed_logprobs,
)

__all__ = [
    "VocabParallelLogits",
    "VocabShard",
    "gather_logprobs",
    "gather_logprobs_entropy",
    "lm_head_logprobs",
    "packed_logprobs",
]
