"""configs/models/count_tiny is maintained by hand; these are the constants that it must keep."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

FOLDER = Path(__file__).parents[3] / "configs" / "models" / "count_tiny"
CHARACTERS = "\n0123456789abcdefghijklmnopqrstuvwxyz?>+=-*,. "


def test_every_character_is_one_token_after_pad_and_eos():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.encode(CHARACTERS) == list(range(2, 48))
    assert tokenizer.decode(range(2, 48)) == CHARACTERS


def test_prompt_of_the_count_task_is_nine_tokens_and_comes_back():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer.encode("01101001?")
    assert ids == [3, 4, 4, 3, 4, 3, 3, 4, 39]
    assert tokenizer.decode([*ids, 7, 1], skip_special_tokens=True) == "01101001?4"


def test_unknown_character_is_an_error_and_not_dropped():
    with pytest.raises(Exception, match="Missing .UNK. token"):
        AutoTokenizer.from_pretrained(FOLDER).encode("A")


def test_model_fits_the_tokenizer_and_splits_over_four_ranks():
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["vocab_size"] == len(CHARACTERS) + 2
    assert (config["eos_token_id"], config["pad_token_id"]) == (1, 0)
    for key in ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size"):
        assert config[key] % 4 == 0, key
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
