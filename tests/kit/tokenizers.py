"""A tokenizer that is made in milliseconds, and the fixture of it. Its chat template has tools, calls and thoughts."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is 12 + 30? The answer is 42.",
    "user assistant system: a rollout server samples tokens, and the trainer learns from them.",
]
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for message in messages %}"
    "<|{{ 'user' if message['role'] == 'tool' else message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def make_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Train a ByteLevel BPE on the corpus. It has fewer ids than the model, which so samples ids without text too."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<think>"]
    bpe.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()
