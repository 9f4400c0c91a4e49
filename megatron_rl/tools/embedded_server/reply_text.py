"""The embedded server's tokenizer: it decodes replies, encodes prompts and renders chats.

A model folder may lack a tokenizer; clients must then send token ids.
"""

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
"""Template options that are accepted even if the model's template does not use them, as in other servers."""
WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
TEMPLATE_ERRORS = (
    *(TemplateError, ArithmeticError, LookupError, TypeError, AttributeError, ValueError),
    *(RecursionError, MemoryError),
)
"""Errors that a chat template may raise for messages it does not support."""


class Text:
    """The tokenizer of a model folder. Thread-safe after construction.

    For example:

        text = Text.load(folder)  # None if the folder has no tokenizer
        ids = text.render([{"role": "user", "content": "2 + 2?"}], options={})
        text.decode(ids)
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @classmethod
    def load(cls, folder: Path) -> "Text | None":
        """Load the tokenizer. None if the folder has no tokenizer.json; the server then supports token ids only."""
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
        # Import lazily: transformers takes seconds, and RL clients send token ids and never need it.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder)

    def encode(self, text: str) -> list[int]:
        return self._hf.encode(text)

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        """Render a chat with the model's template. Return its token ids, up to the start of the assistant's reply.

        options: the template's variables, and options in COMMON_OPTIONS. ValueError for any other name. In particular,
        a client cannot pass its own chat template, because a template is a program.
        """
        own = (self._hf.chat_template if isinstance(self._hf.chat_template, str) else "") if options else ""
        known = {*COMMON_OPTIONS, *WORD.findall(own)} - self._taken_names
        if unknown := sorted(options.keys() - known):
            raise ValueError(
                f"chat_template_kwargs.{unknown[0][:100]}: is no variable of the model's chat template that a request "
                f"may set; known are {', '.join(sorted(COMMON_OPTIONS))}, and what the template itself reads"
            )
        options = {"add_generation_prompt": not options.get("continue_final_message")} | options
        from megatron_rl.workflows.messages import normal_messages  # lazy: this imports all workflows

        messages = normal_messages(messages)  # other servers normalize messages before rendering, too
        try:
            text = self._hf.apply_chat_template(messages, tokenize=False, **options)
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"messages: the model's chat template refuses them: {str(error)[:500]}") from None
        return self._hf.encode(text, add_special_tokens=False)

    @cached_property
    def _taken_names(self) -> set[str]:
        """Names that clients may not set, because transformers passes them to templates or takes them as arguments."""
        arguments = set(inspect.signature(self._hf.apply_chat_template).parameters) - COMMON_OPTIONS
        return {*arguments, *self._hf.special_tokens_map, "messages", "raise_exception", "strftime_now"}
