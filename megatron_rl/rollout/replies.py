"""Pairs of replies: prompts (prompts.py) with the texts `chosen` and `rejected`, and as training takes them.

Both follow the prompt as a model's own reply would, and end with the end-of-sequence token.

Every rank holds the texts of all rows, as it does of prompts, and the tokens of the pairs that it is at work on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import TrainConfig
from megatron_rl.rollout.prompts import load_held_out
from megatron_rl.rollout.tokens import reply_ids, training_prompts
from megatron_rl.rollout.workflows.scoring import prompt_ids
from megatron_rl.types import TrajectoryBatch

REPLIES = ("chosen", "rejected")
Encoded = tuple[list[int], list[int], list[int]]
"""Token ids of a prompt and of its chosen and its rejected reply."""


class PairRows:
    """Rows that have been found to be pairs; they are tokenised when they are asked for."""

    def __init__(
        self, key: str, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, *, context: int
    ) -> None:
        """ValueError names the first row that is no pair, or does not fit into `context` tokens."""
        self.key, self.rows, self.tokenizer, self.context = key, rows, tokenizer, context
        for number in range(len(rows)):
            self._encoded(number)

    def batch(self, numbers: Iterable[int]) -> TrajectoryBatch:
        """Return the pairs of these rows, counted from 0, as `join_pairs` does; one that is named twice is two."""
        return join_pairs([self._encoded(number) for number in numbers])

    def _encoded(self, number: int) -> Encoded:
        return encode(f"{self.key}, pair {number + 1}", self.rows[number], self.tokenizer, self.context)


def load_pairs(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, *, context: int
) -> tuple[PairRows, dict[str, TrajectoryBatch]]:
    """Return the pairs of data.train, and the held-out ones of each set: these as a batch, as they are evaluated.

    ValueError for a row that is no pair, or whose longer reply does not fit into `context` tokens behind the prompt.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"model.path = {config.model.path!r}: its tokenizer has no end-of-sequence token, with which replies end; "
            f"set eos_token in tokenizer_config.json."
        )

    def pairs(key: str, rows: list[dict[str, Any]]) -> PairRows:
        return PairRows(key, rows, tokenizer, context=context)

    train, held_out = training_prompts(config, tokenizer), load_held_out(config)
    others = {name: pairs(f"evaluation {name}", rows).batch(range(len(rows))) for name, rows in held_out.items()}
    return pairs("data.train", train), others


def encode(where: str, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, context: int) -> Encoded:
    """Tokenise a row; errors say where it is."""
    for name in REPLIES:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise ValueError(
                f"{where}: {name} = {row.get(name)!r}: must be the text of a reply; give every prompt a chosen and a "
                f"rejected one, of a dialogue the last message's content."
            )
    if row["chosen"] == row["rejected"]:
        raise ValueError(f"{where}: chosen and rejected are the same reply, {row['chosen']!r}; leave the row out.")
    prompt, chosen, rejected = prompt_ids(tokenizer, row), *(reply_ids(tokenizer, row[name]) for name in REPLIES)
    longest = len(prompt) + max(len(chosen), len(rejected))
    if longest > context:
        raise ValueError(
            f"{where}: has {longest} tokens, more than the model's context of {context}; shorten it or leave it out "
            f"(data.max_prompt_tokens does by its prompt)."
        )
    return prompt, chosen, rejected


def join_pairs(pairs: list[Encoded]) -> TrajectoryBatch:
    """Return all replies, of pair n the chosen one as sequence 2 n and the rejected one after it; both are trained."""
    sequences = [(prompt, reply) for prompt, *replies in pairs for reply in replies]
    lengths = torch.tensor([0] + [len(prompt) + len(reply) for prompt, reply in sequences])
    tokens = {
        "input_ids": torch.tensor([token for prompt, reply in sequences for token in (*prompt, *reply)]),
        "loss_mask": torch.tensor([own for p, r in sequences for own in [False] * len(p) + [True] * len(r)]),
    }
    number = torch.arange(len(pairs)).repeat_interleave(2)
    return TrajectoryBatch(tokens, {"pair": number, "group": number}, lengths.cumsum(0))
