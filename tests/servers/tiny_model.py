"""A tiny random Qwen3 with a real tokenizer, in Hugging Face format: 140 k parameters, made in a second."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 512
CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is 12 + 30? The answer is 42.",
    "user assistant system: a rollout server samples tokens, and the trainer learns from them.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def make_tiny_model(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, tied: bool = False) -> Path:
    """Write config.json, model.safetensors and the tokenizer into `folder`; the same bytes for the same seed."""
    return save_tiny_qwen(folder, make_tokenizer(), vocab_size=VOCAB_SIZE, seed=seed, dtype=dtype, tied=tied)


def save_tiny_qwen(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    vocab_size: int,
    spread: float = 0.2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
) -> Path:
    """Write a random Qwen3 of two layers and its tokenizer in Hugging Face form; return the folder.

    spread: standard deviation of its weights. The larger, the surer the model is of its tokens.
    """
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=spread,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
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
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
