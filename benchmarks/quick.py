"""`--quick` of every benchmark: the same code in seconds, on a tiny model, which shows that it runs and no more.

A benchmark says which of its arguments are others then; what the command line gives stays.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "configs" / "models" / "count_tiny"


def arguments(parser: argparse.ArgumentParser, argv: list[str] | None = None, **quick: object) -> argparse.Namespace:
    """Parse the command line; with `--quick` these are the defaults."""
    parser.add_argument("--quick", action="store_true", help="in seconds, on a tiny model: shows that it runs, no more")
    args = parser.parse_intermixed_args(argv)
    if args.quick:
        parser.set_defaults(**quick)
        args = parser.parse_intermixed_args(argv)
    return args


@contextlib.contextmanager
def tiny_model() -> Iterator[Path]:
    """Write a tiny random model whose tokens are bytes; it is there within this block."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = AutoConfig.from_pretrained(TINY, vocab_size=len(words), max_position_embeddings=512)
    with TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
        ).save_pretrained(folder)
        yield folder
