"""A model folder's tokenizer, and how long a data set's prompts are in its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.config import GenerationConfig, TrainConfig
from megatron_rl.data.curriculum import by_success
from megatron_rl.data.prompts import load_prompts
from megatron_rl.workflows.scoring import prompt_ids

Entry = TypeVar("Entry")


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `model.path`; ValueError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model.path = {folder!r}: no usable tokenizer there ({error}); copy the model's.") from error


def reply_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a reply that is given as text, with the end-of-sequence token that a model ends it by."""
    # The prompt has brought the token that begins a sequence, where the model wants one.
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def training_prompts(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the prompts of data.train that the section's other keys leave. ValueError where these leave none."""
    prompts, longest = training_rows(config), config.data.max_prompt_tokens
    return at_most(longest, "data.max_prompt_tokens", prompts, lambda prompt: len(prompt_ids(tokenizer, prompt)))


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
) -> list[int]:
    """Return the tokens of each prompt. ValueError where one and its longest reply do not fit into `context` tokens."""
    lengths = []
    for number, prompt in enumerate(prompts, start=1):
        lengths.append(len(prompt_ids(tokenizer, prompt)))
        if lengths[-1] + generation.max_new_tokens > context:
            raise ValueError(
                f"{key}, prompt {number}: has {lengths[-1]} tokens, and with generation.max_new_tokens = "
                f"{generation.max_new_tokens} more than the model's context of {context}; shorten it or lower the "
                f"other."
            )
    return lengths
