"""The frame of every benchmark: its arguments with `--quick`, a tiny model, and the machine that figures are of.

`--quick` is the same code in seconds, on a tiny model, which shows that it runs and no more. A benchmark says which of
its arguments are others then; what the command line gives stays. What it prints lies in results/NAME.txt.

    args = frame.arguments(parser, argv, repeats=1)
    machine = frame.Machine()
    with frame.model_of(args, MODEL) as model:
        ...
    print(f"{model.name}, median of {args.repeats}, {machine}")
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "configs" / "models" / "count_tiny"


class Machine:
    """The machine that figures are of, and how busy it was when this was made: what a benchmark's head names.

    >>> print(frame.Machine())
    2 cores of AMD EPYC 7R13 Processor, commit 4247df5, load before 0.3
    """

    def __init__(self) -> None:
        self.load = os.getloadavg()[0]
        self.cores = f"{os.cpu_count()} cores of {cpu_name()}"
        self.state = f"commit {commit()}, load before {self.load:.1f}"

    def __str__(self) -> str:
        return f"{self.cores}, {self.state}"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or "uncommitted"


def arguments(parser: argparse.ArgumentParser, argv: list[str] | None = None, **quick: object) -> argparse.Namespace:
    """Parse the command line; with `--quick` these are the defaults."""
    parser.add_argument("--quick", action="store_true", help="in seconds, on a tiny model: shows that it runs, no more")
    args = parser.parse_intermixed_args(argv)
    if args.quick:
        parser.set_defaults(**quick)
        args = parser.parse_intermixed_args(argv)
    return args


def model_of(args: argparse.Namespace, model: Path) -> contextlib.AbstractContextManager[Path]:
    """Return a context with the folder of the model to measure: the tiny one with `--quick`."""
    return tiny_model() if args.quick else contextlib.nullcontext(model)


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
