"""A model folder's tokenizer, and how long a data set's prompts are in its tokens."""

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
    """Return the tokenizer of `model.path`; ValueError where there is none.

    template_args: those that its chat template is given whatever is rendered, the config's data.template_args.
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
    """Return a prompt's token ids. ValueError names the row that cannot be rendered, or has ids from `vocab` on."""
    try:
        ids = prompt_ids(tokenizer, prompt)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    check_ids(ids, vocab, where)
    return ids


def check_ids(ids: Sequence[int], vocab: int | None, where: str) -> None:
    """Raise ValueError for a token id that a model with `vocab` ids has no embedding of; None checks nothing."""
    if vocab is not None and (highest := max(ids, default=0)) >= vocab:
        raise ValueError(
            f"{where}: has the token id {highest}, and the model's vocabulary has {vocab}; take the model's own "
            f"tokenizer, or a model whose embedding has a row for every token."
        )


def training_prompts(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the prompts of data.train that the section's other keys leave. ValueError where these leave none."""
    numbered, longest = list(enumerate(training_rows(config), start=1)), config.data.max_prompt_tokens

    def tokens_of(entry: tuple[int, dict[str, Any]]) -> int:
        return len(row_ids(tokenizer, entry[1], f"data.train, prompt {entry[0]}"))

    return [prompt for _, prompt in at_most(longest, "data.max_prompt_tokens", numbered, tokens_of)]


def training_rows(config: TrainConfig) -> list[dict[str, Any]]:
    """Return the prompts of data.train that data.success_rates leaves, of any length."""
    data = config.data
    prompts = load_prompts(data.train, data.train_args, key="data.train", import_from=config.run.import_from)
    chooses = bool(data.success_rates) and data.sampling == "all"
    return by_success(prompts, data.success_rates, data.success_band) if chooses else prompts


def at_most(longest: int, key: str, prompts: list[Entry], tokens_of: Callable[[Entry], int]) -> list[Entry]:
    """Return those of up to `longest` tokens, which `key` sets; all where it is 0. ValueError where none is left."""
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
    """Return the tokens of each prompt. ValueError where one and its longest reply do not fit into `context` tokens.

    So it is where a prompt cannot be rendered, or has ids from `vocab` on; None checks no ids.
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
