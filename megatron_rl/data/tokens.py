"""Loads a model folder's tokenizer, and measures the prompts of a data set in tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.config import GenerationConfig, TrainConfig
from megatron_rl.data.curriculum import by_success
from megatron_rl.data.prompts import load_prompts
from megatron_rl.workflows.rendering import TEMPLATE_ARGS, prompt_ids

Entry = TypeVar("Entry")


def load_tokenizer(folder: str, template_args: Mapping[str, Any] | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a model's folder. Raises ValueError if there is none.

    template_args: the config's data.template_args, which are passed to the chat template whenever it renders something.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model.path = {folder!r}: no usable tokenizer there ({error}); copy the model's.") from error
    if template_args:
        tokenizer.init_kwargs[TEMPLATE_ARGS] = dict(template_args)
    return tokenizer


def row_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: dict[str, Any], where: str, vocab: int | None = None
) -> list[int]:
    """Return a prompt's token ids.

    Raises ValueError, which names the row by `where`, if it cannot be rendered or has ids of `vocab` or more.
    """
    try:
        ids = prompt_ids(tokenizer, prompt)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    check_ids(ids, vocab, where)
    return ids


def check_ids(ids: Sequence[int], vocab: int | None, where: str) -> None:
    """Raise ValueError for a token id of `vocab` or more, which has no embedding. vocab=None disables the check."""
    if vocab is not None and (highest := max(ids, default=0)) >= vocab:
        raise ValueError(
            f"{where}: has the token id {highest}, and the model's vocabulary has {vocab}; take the model's own "
            f"tokenizer, or a model whose embedding has a row for every token."
        )


def training_prompts(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the prompts of data.train that pass the data section's filters. Raises ValueError if none does."""
    numbered, longest = list(enumerate(training_rows(config), start=1)), config.data.max_prompt_tokens

    def tokens_of(entry: tuple[int, dict[str, Any]]) -> int:
        return len(row_ids(tokenizer, entry[1], f"data.train, prompt {entry[0]}"))

    return [prompt for _, prompt in at_most(longest, "data.max_prompt_tokens", numbered, tokens_of)]


def training_rows(config: TrainConfig) -> list[dict[str, Any]]:
    """Return the prompts of data.train, filtered by their success rates as configured, but not by length."""
    data = config.data
    prompts = load_prompts(data.train, data.train_args, key="data.train", import_from=config.run.import_from)
    chooses = bool(data.success_rates) and data.sampling == "all"
    return by_success(prompts, data.success_rates, data.success_band) if chooses else prompts


def at_most(longest: int, key: str, prompts: list[Entry], tokens_of: Callable[[Entry], int]) -> list[Entry]:
    """Return the prompts of up to `longest` tokens; all if that is 0. Raises ValueError if none is left.

    tokens_of: returns a prompt's number of tokens. key: config key of the limit.
    """
    kept = [prompt for prompt in prompts if tokens_of(prompt) <= longest] if longest else prompts
    if not kept:
        raise ValueError(f"{key} = {longest}: all {len(prompts)} prompts of data.train have more; raise it.")
    return kept


def prompt_lengths(
    key: str,
    prompts: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig,
    *,
    context: int,
    vocab: int | None = None,
) -> list[int]:
    """Return the number of tokens of each prompt.

    Raises ValueError if a prompt plus generation.max_new_tokens exceeds `context` tokens, or for the reasons of
    `row_ids`.
    """
    lengths = []
    for number, prompt in enumerate(prompts, start=1):
        lengths.append(len(row_ids(tokenizer, prompt, f"{key}, prompt {number}", vocab)))
        if lengths[-1] + generation.max_new_tokens > context:
            raise ValueError(
                f"{key}, prompt {number}: has {lengths[-1]} tokens, and with generation.max_new_tokens = "
                f"{generation.max_new_tokens} more than the model's context of {context}; shorten it or lower the "
                f"other."
            )
    return lengths
