"""Prompts (prompts.py) with given replies, answers or pairs, and their conversion to training batches.

A reply follows its prompt as a model's own reply would, and ends as the chat template ends a turn
(workflows/rendering.py). Every rank holds the texts of all rows, but only the tokens of the rows it is working on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import DataConfig, TrainConfig
from megatron_rl.data.prompts import PAIR, Row, as_reply, load_held_out, says
from megatron_rl.data.tokens import at_most, check_ids, training_rows
from megatron_rl.types import TrajectoryBatch
from megatron_rl.workflows.rendering import with_replies

Encoded = tuple[list[int], ...]
"""Token ids of a prompt, followed by those of each of its replies."""
DIALOGUE = "messages"
"""The form of a prompt whose last message can be the answer."""


@dataclass(frozen=True)
class Measured:
    """A row that was tokenized once to measure it.

    number: its number in the data set, from 1. prompt_tokens: number of the prompt's tokens. tokens: number of tokens
    of the prompt and the longest reply.
    """

    number: int
    row: Row
    prompt_tokens: int
    tokens: int


class ReplyRows:
    """Prompts with a reply `chosen` and a reply `rejected`, or with an answer.

    They are validated, and tokenized on demand. column: column of the answer; DIALOGUE if the answer is the last
    message of the dialogue; None for pairs.

        pairs = ReplyRows("data.train", rows, tokenizer, context=512)
        batch = pairs.batch([0, 7])  # sequences: 0's chosen reply, its rejected one, then the two of 7
        answers = ReplyRows("data.train", rows, tokenizer, column="answer", setting="supervised.answer", context=512)
        batch = answers.batch(range(8))  # the answers are trained, their prompts are not
    """

    def __init__(
        self,
        key: str,
        rows: list[Row],
        tokenizer: PreTrainedTokenizerBase,
        *,
        context: int,
        column: str | None = None,
        setting: str = "",
        vocab: int | None = None,
        limits: DataConfig | None = None,
    ) -> None:
        """Validate the rows. Raises ValueError for the first row that is invalid or does not fit into `context` tokens.

        setting: the option that requires an answer, for error messages. vocab: size of the model's vocabulary, which
        all token ids must be below; None disables this check. limits: rows that exceed its token limits are discarded.
        """
        self.tokenizer, self.column, self.setting = tokenizer, column, setting
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"model.path = {tokenizer.name_or_path!r}: its tokenizer has no end-of-sequence token, with which "
                f"replies end; set eos_token in tokenizer_config.json."
            )
        kept, word = [], "pair" if column is None else "row"
        for number, row in enumerate(rows, start=1):
            where = f"{key}, {word} {number}"
            self._check(row, where)
            # Keep only the lengths: the tokens of all rows would take several times the memory of their texts.
            try:
                prompt, *replies = self._encode(row)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            for ids in (prompt, *replies):
                check_ids(ids, vocab, where)
            kept.append(Measured(number, row, len(prompt), len(prompt) + max(map(len, replies))))
        if limits is not None:
            kept = at_most(limits.max_prompt_tokens, "data.max_prompt_tokens", kept, lambda one: one.prompt_tokens)
            kept = at_most(limits.max_tokens, "data.max_tokens", kept, lambda one: one.tokens)
        for one in kept:
            if one.tokens > context:
                raise ValueError(
                    f"{key}, {word} {one.number}: has {one.tokens} tokens, more than the model's context of "
                    f"{context}; shorten it or leave it out{' (data.max_tokens does)' if limits is not None else ''}."
                )
        self.rows = [one.row for one in kept]
        self.left_out = len(rows) - len(kept)

    def batch(self, numbers: Iterable[int]) -> TrajectoryBatch:
        """Return the rows with these indices, from 0, as a batch.

        A row whose index is given twice is included twice.
        """
        encoded = [self._encode(self.rows[number]) for number in numbers]
        return join_pairs(encoded) if self.column is None else join_replies(encoded)

    def _check(self, row: Row, where: str) -> None:
        """Raise ValueError if the row lacks a valid reply. where: the row's place, for the message."""
        if self.column is None:
            for name in PAIR:
                if as_reply(row.get(name)) is None:
                    raise ValueError(
                        f"{where}: {name} = {row.get(name)!r}: must be the text of a reply; give every prompt a chosen "
                        f"and a rejected reply, as text or as the last message of the dialogue."
                    )
            if row["chosen"] == row["rejected"]:
                raise ValueError(
                    f"{where}: chosen and rejected are the same reply, {row['chosen']!r}; leave the row out."
                )
        elif self.column == DIALOGUE:
            found = row[DIALOGUE] if isinstance(row.get(DIALOGUE), list) else []
            last = found[-1] if found else None
            is_answer = isinstance(last, dict) and last.get("role") == "assistant" and says(last)
            if not is_answer or len(found) < 2:
                raise ValueError(
                    f"{where}: the last of {len(found)} messages is {last!r}: with {self.setting} it must be an "
                    f"assistant's message with text or tool calls, after at least one other message; end the dialogue "
                    f"with the answer, or name the column that has it."
                )
        elif as_reply(row.get(self.column)) is None:
            raise ValueError(
                f"{where}: {self.column} = {row.get(self.column)!r}: must be the answer that {self.setting} "
                f"trains on; give every row one, as text or as an assistant's message."
            )

    def _encode(self, row: Row) -> Encoded:
        """Tokenize a row that has passed `_check`."""
        if self.column == DIALOGUE:
            *before, last = row[DIALOGUE]
            return with_replies(self.tokenizer, row | {DIALOGUE: before}, [last])
        names = PAIR if self.column is None else (self.column,)
        return with_replies(self.tokenizer, row, [as_reply(row[name]) or "" for name in names])


def load_replies(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, *, context: int, vocab: int | None = None
) -> tuple[ReplyRows, dict[str, TrajectoryBatch]]:
    """Load the training rows of data.train, and the held-out rows of each set.

    The held-out rows are returned as batches, ready for evaluation. Raises ValueError for a row that has no reply, that
    exceeds `context` tokens with its longest reply, or that has token ids of `vocab` or more.
    """

    def rows_of(key: str, rows: list[Row], limits: DataConfig | None = None) -> ReplyRows:
        kind = partial(ReplyRows, column=config.supervised.answer or None, setting=config.chosen_data)
        return kind(key, rows, tokenizer, context=context, vocab=vocab, limits=limits)

    train, held_out = rows_of("data.train", training_rows(config), config.data), load_held_out(config)
    return train, {name: rows_of(f"evaluation {name}", own).batch(range(len(own))) for name, own in held_out.items()}


def join_replies(rows: list[Encoded]) -> TrajectoryBatch:
    """Join the rows into a batch with one sequence per reply, prompt included. A row's sequences are adjacent.

    Only replies are trained. The column `group` is the row's index in `rows`.
    """
    sequences = [(prompt, reply) for prompt, *replies in rows for reply in replies]
    # Starts with 0, so that the cumulative sum gives the start of each sequence and the end of the last.
    lengths = torch.tensor([0] + [len(prompt) + len(reply) for prompt, reply in sequences])
    tokens = {
        "input_ids": torch.tensor([t for prompt, reply in sequences for t in (*prompt, *reply)], dtype=torch.int32),
        "loss_mask": torch.tensor([own for p, r in sequences for own in [False] * len(p) + [True] * len(r)]),
    }
    group = torch.tensor([number for number, (_, *replies) in enumerate(rows) for _ in replies])
    return TrajectoryBatch(tokens, {"group": group}, lengths.cumsum(0))


def join_pairs(rows: list[Encoded]) -> TrajectoryBatch:
    """Join pairs into a batch. Sequence 2 n is the chosen reply of pair n, and sequence 2 n + 1 the rejected one.

    The column `pair` is n.
    """
    batch = join_replies(rows)
    batch.sequences["pair"] = batch["group"]
    return batch
