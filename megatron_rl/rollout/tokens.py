"""A model folder's tokenizer, and how long a data set's prompts are in its tokens."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.config import GenerationConfig
from megatron_rl.rollout.workflows.scoring import prompt_ids


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `model.path`; ValueError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model.path = {folder!r}: no usable tokenizer there ({error}); copy the model's.") from error


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
