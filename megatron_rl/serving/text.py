"""Text of the embedded server: decoding always, prompts and chat templates on demand. Optional: ids need none of it."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class Text:
    """The tokenizer of a model folder. Thread-safe after construction."""

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
        """Token ids of a chat, ending where the assistant speaks."""
        text = self._hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        return self._hf.encode(text, add_special_tokens=False)
