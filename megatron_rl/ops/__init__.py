"""Numerical operators compiled from csrc/. Each has a plain-torch reference in `ops.reference`."""

from megatron_rl.ops.checksum import CHECKSUM_COLUMNS, HASH_TILE_BYTES, count_of_word_sums, tile_hashes, word_sums
from megatron_rl.ops.gae import packed_discounted_returns, packed_gae
from megatron_rl.ops.head import lm_head_logprobs, lm_head_loss, lm_head_ppo_loss
from megatron_rl.ops.kept_tokens import Cut, KeptTokens, kept_tokens
from megatron_rl.ops.labels import packed_labels
from megatron_rl.ops.logprobs import (
    VocabParallelLogits,
    VocabShard,
    gather_logprobs,
    gather_logprobs_entropy,
    packed_logprobs,
)
from megatron_rl.ops.ppo import PPO_SUMS, PpoOptions, ppo_loss
from megatron_rl.ops.replies import reply_tokens
from megatron_rl.ops.reverse_kl import TeacherStates, TeacherTargets, TopTokens, top_tokens
from megatron_rl.ops.taken_rows import TakenRows

__all__ = [
    "CHECKSUM_COLUMNS",
    "Cut",
    "HASH_TILE_BYTES",
    "KeptTokens",
    "PPO_SUMS",
    "PpoOptions",
    "TakenRows",
    "TeacherStates",
    "TeacherTargets",
    "TopTokens",
    "VocabParallelLogits",
    "VocabShard",
    "count_of_word_sums",
    "gather_logprobs",
    "gather_logprobs_entropy",
    "kept_tokens",
    "lm_head_logprobs",
    "lm_head_loss",
    "lm_head_ppo_loss",
    "packed_discounted_returns",
    "packed_gae",
    "packed_labels",
    "packed_logprobs",
    "ppo_loss",
    "reply_tokens",
    "tile_hashes",
    "top_tokens",
    "word_sums",
]
