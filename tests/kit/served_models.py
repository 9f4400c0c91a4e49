"""A tiny random Qwen3 with a real tokenizer, in Hugging Face format: 140 k parameters, made in a second."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.kit.tokenizers import VOCAB_SIZE, make_tokenizer


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
