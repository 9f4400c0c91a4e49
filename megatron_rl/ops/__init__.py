"""Numerical operators compiled from csrc/. Each is defined in plain torch in `tests/kit/operators.py`."""

# ruff: noqa: F401  other rooms import these names from here
from megatron_rl.ops.checksum import CHECKSUM_COLUMNS, HASH_TILE_BYTES, count_of_word_sums, tile_hashes, word_sums
from megatron_rl.ops.head import lm_head_logprobs, lm_head_loss
from megatron_rl.ops.kept_tokens import Cut, KeptTokens, kept_tokens
from megatron_rl.ops.logprobs import (
    VocabParallelLogits,
    VocabShard,
    gather_logprobs,
    gather_logprobs_entropy,
    packed_logprobs,
)
from megatron_rl.ops.packed import packed_discounted_returns, packed_gae, packed_labels
from megatron_rl.ops.ppo import PPO_SUMS, PpoOptions, ppo_loss
from megatron_rl.ops.replies import reply_tokens
from megatron_rl.ops.reverse_kl import TeacherStates, TeacherTargets, TopTokens, top_tokens
from megatron_rl.ops.taken_rows import TakenRows
