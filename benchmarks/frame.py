"""The frame of every benchmark: its arguments, a tiny model, the machine that figures are of, and its results file.

`--quick` is the same code in seconds, on a tiny model, which shows that it runs and no more. A benchmark says which of
its arguments are others then; what the command line gives stays. `--write` puts what it prints into results/NAME.txt.

    def main(argv=None):
        parser = frame.parser(__doc__)
        parser.add_argument("--repeats", type=int, default=5)
        args = frame.arguments(parser, argv, repeats=1)  # 1 with --quick
        machine = frame.Machine()
        with frame.model_of(args, MODEL) as model:
            times = [frame.seconds(lambda: work(model)) for _ in range(args.repeats)]
        print(f"{model.name}, {statistics.median(times):.2f} s, {machine}")

    if __name__ == "__main__":
        frame.run(main)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn, TextIO

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "configs" / "models" / "count_tiny"
RESULTS = ROOT / "benchmarks" / "results"

sys.path.insert(0, str(ROOT))  # for tests.kit


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


def parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a benchmark that its docstring describes."""
    # Without abbreviations, as `run` looks for --write itself.
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def arguments(parser: argparse.ArgumentParser, argv: list[str] | None = None, **quick: object) -> argparse.Namespace:
    """Parse the command line; with `--quick` these are the defaults."""
    parser.add_argument("--quick", action="store_true", help="in seconds, on a tiny model: shows that it runs, no more")
    parser.add_argument("--write", action="store_true", help="keep what is printed in benchmarks/results/NAME.txt")
    args = parser.parse_intermixed_args(argv)
    if args.quick and args.write:
        parser.error("--write: with --quick nothing is measured; leave one of the two out")
    if args.quick:
        parser.set_defaults(**quick)
        args = parser.parse_intermixed_args(argv)
    return args


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark as a program, and write its results file where `--write` is given and it came to its end."""
    if "--write" not in sys.argv[1:]:
        sys.exit(main())
    script, *given = sys.argv
    with contextlib.redirect_stdout(Copied(sys.stdout)) as copied:
        status = main()  # what ends in between, by an error or sys.exit, is no result
    name, options = Path(script).stem, shlex.join(word for word in given if word != "--write")
    write_result(RESULTS / f"{name}.txt", f"$ python benchmarks/{name}.py {options}".rstrip(), copied.text)
    sys.exit(status)


class Copied:
    """A stream that keeps what it passes on in `text`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.text = stream, ""

    def write(self, text: str) -> int:
        self.text += text
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


def write_result(path: Path, command: str, printed: str) -> None:
    """Put what a command printed below its line `$ ...`, instead of what it printed before; other commands' stay."""
    text = path.read_text() if path.exists() else ""
    blocks = [block.strip("\n") for block in re.split(r"^(?=\$ )", text, flags=re.MULTILINE)]
    kept = {block.partition("\n")[0]: block for block in blocks if block.startswith("$ ")}
    kept[command] = f"{command}\n" + printed.strip("\n")
    path.write_text("\n\n".join(kept.values()) + "\n")


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes, on a GPU until it is done."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


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
