"""A random model that calls a tool and gives grades by chance: each call and each grade is one token of its vocabulary.

Beside those its tokens are characters, so it can read whatever a chat template and a workflow write.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.kit.served_models import save_tiny_qwen

SPECIAL = ["<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
CALLS = [
    f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{n}/7"}}}}</tool_call>' for n in range(1, 7)
]
GRADES = [f"<score>{grade}</score>" for grade in range(11)]
TEMPLATE = (
    "{% for tool in tools or [] %}<|system|>{{ tool['function']['name'] }}<|end|>{% endfor %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_talkative_model(folder: Path, words: Sequence[str] = (*CALLS, *GRADES)) -> Path:
    """Write a Qwen3 of 80 k parameters and its tokenizer in Hugging Face form: the same bytes each time.

    words: texts that it has one token each for, beside the characters.
    """
    tokenizer = talkative_tokenizer(words)
    # Nearly uniform: every token is sampled now and then.
    return save_tiny_qwen(folder, tokenizer, vocab_size=len(tokenizer), spread=0.05)


def talkative_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    characters = string.ascii_letters + string.digits + string.punctuation + " \n"
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *characters])}
    by_letter = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    by_letter.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    by_letter.decoder = decoders.Fuse()
    by_letter.add_special_tokens(SPECIAL)
    by_letter.add_tokens([AddedToken(text, normalized=False) for text in words])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=by_letter, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
