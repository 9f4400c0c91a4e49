"""Text of the embedded server: decoding always, prompts and chat templates on demand. Optional: ids need none of it."""

import inspect
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

COMMON_OPTIONS = frozenset(
    (
        *("add_generation_prompt", "continue_final_message"),
        *("enable_thinking", "thinking", "thinking_budget", "reasoning_effort"),
    )
)
"""Taken also where the model's template does not read them, as other servers do."""
WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
TEMPLATE_ERRORS = (
    *(TemplateError, ArithmeticError, LookupError, TypeError, AttributeError, ValueError),
    *(RecursionError, MemoryError),
)
"""Errors that the model's template may raise over messages that it was not written for."""


class Text:
    """The tokenizer of a model folder. Thread-safe after construction.

    text = Text.load(folder)  # None where there is no tokenizer
    ids = text.render([{"role": "user", "content": "2 + 2?"}], options={})
    text.decode(ids)
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @classmethod
    def load(cls, folder: Path) -> "Text | None":
        """None where the folder has no tokenizer.json: the server then speaks token ids only."""
        return cls(folder) if (folder / "tokenizer.json").is_file() else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        path = self._folder / "tokenizer_config.json"
        token = json.loads(path.read_text()).get("eos_token") if path.is_file() else None
        token = token.get("content") if isinstance(token, dict) else token
        id_ = self._tokenizer.token_to_id(token) if token else None
        return frozenset() if id_ is None else frozenset([id_])

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def _hf(self) -> Any:
        # transformers takes seconds to import, and RL clients send ids: only texts and chats pay for it.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder)

    def encode(self, text: str) -> list[int]:
        return self._hf.encode(text)

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        """Token ids of a chat by the model's own template, ending where the assistant speaks.

        options: variables of the template, and `add_generation_prompt` and `continue_final_message`. ValueError for
        others, first of all a template: nobody who asks for text may bring one, which is a program.
        """
        own = (self._hf.chat_template if isinstance(self._hf.chat_template, str) else "") if options else ""
        known = {*COMMON_OPTIONS, *WORD.findall(own)} - self._taken_names
        if unknown := sorted(options.keys() - known):
            raise ValueError(
                f"chat_template_kwargs.{unknown[0][:100]}: is no variable of the model's chat template that a request "
                f"may set; known are {', '.join(sorted(COMMON_OPTIONS))}, and what the template itself reads"
            )
        options = {"add_generation_prompt": not options.get("continue_final_message")} | options
        from megatron_rl.workflows.messages import normal_messages  # with all workflows, as seldom as the tokenizer

        messages = normal_messages(messages)  # as other servers do before they render
        try:
            text = self._hf.apply_chat_template(messages, tokenize=False, **options)
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"messages: the model's chat template refuses them: {str(error)[:500]}") from None
        return self._hf.encode(text, add_special_tokens=False)

    @cached_property
    def _taken_names(self) -> set[str]:
        """Names that transformers itself gives a template, or takes as an argument."""
        arguments = set(inspect.signature(self._hf.apply_chat_template).parameters) - COMMON_OPTIONS
        return {*arguments, *self._hf.special_tokens_map, "messages", "raise_exception", "strftime_now"}
