"""A random model that calls a tool and gives grades by chance: each call and each grade is one token of its vocabulary.

Beside those its tokens are characters, so it can read whatever a chat template and a workflow write.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05,  # nearly uniform: every token is sampled now and then
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
