"""Command line of one training process, whether it trains alone or as one of several ranks."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from megatron_rl.config import TrainConfig, load_config
from megatron_rl.config.loading import changed_yaml
from megatron_rl.launch import open_files, own_gpu, start_up
from megatron_rl.launch.placement import ranks_of_step
from megatron_rl.life import last_words, process_exit
from megatron_rl.life.stop_signal import EXIT_INTERRUPTED, EXIT_STOPPED

PROGRAM = "megatron_rl.train"
"""The module that every rank runs, for every kind of training."""
Check = Callable[[TrainConfig], object]
Train = Callable[..., bool]
"""A function train(config, resume=...). It returns False if a stop signal ended the run early."""


def resume_command(program: list[str], words: list[str]) -> str:
    """Return the command line that resumes a run.

    program: the command, without arguments, that started the run. words: the arguments.
    """
    kept = [word for word in words if not word.startswith("--resume=")]
    while "--resume" in kept:
        place = kept.index("--resume")
        del kept[place : place + 2]
    return shlex.join([*program, *kept, "--resume", "auto"])


def main(description: str, load: Callable[[TrainConfig], tuple[Check, Train]], argv: list[str] | None) -> None:
    """Parse the arguments, check the config, train, and exit with a code that says how the run ended.

    load: function that imports and returns the check function and the train function for a config. It takes seconds.
    """
    parser = argparse.ArgumentParser(PROGRAM, description=description)
    parser.add_argument("config", type=Path, help="config file, e.g. configs/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. optimizer.lr=1e-5")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check what needs no server, then stop: runs the data functions, and the rewards on one prompt",
    )
    parser.add_argument(
        "--resume",
        default="",
        metavar="auto|CHECKPOINT",
        help="continue a run: auto takes the newest good checkpoint in run.folder, or starts where there is none",
    )
    parser.add_argument("--exit-with", type=int, metavar="PID", help="stop when this process ends (launchers pass it)")
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_intermixed_args(words)
    # Must precede any query for the rank: srun does not set torch's variables.
    os.environ |= ranks_of_step(os.environ)
    open_files.raise_limit()
    outlive_readers()
    folder: list[Path] = []
    with last_words.one_line(PROGRAM, folder=lambda: folder[0] if folder else None):
        try:
            open_files.check_limit()
            config = load_config(args.config, args.overrides)
            folder.append(Path(config.run.folder))
            config.check_world_size(int(os.environ.get("WORLD_SIZE", 1)))
            own_gpu.set_variables(config)
            if args.exit_with:
                process_exit.exit_with(args.exit_with, says_so=os.environ.get("RANK", "0") == "0")
            with start_up.importing():
                check, train = load(config)
            if args.dry_run:
                found = check(config)
                if os.environ.get("RANK", "0") == "0":
                    print(f"{changed_yaml(config)}\nAll other options have their defaults.\n")
                    print(found if isinstance(found, str) else "ok: the rows fit. Data functions were run.")
            elif not train(config, resume=args.resume):
                sys.exit(EXIT_STOPPED)
        except KeyboardInterrupt as stop:
            if not args.exit_with and os.environ.get("RANK", "0") == "0":  # otherwise the launcher prints it
                print(f"{PROGRAM}: {str(stop) or 'interrupted, with nothing saved.'}", file=sys.stderr)
                if folder and config.run.checkpoint_every_steps > 0:  # folder is empty if the config was not loaded yet
                    print(f"To continue: {resume_command(['python', '-m', PROGRAM], words)}", file=sys.stderr)
            sys.exit(EXIT_INTERRUPTED)
        except RuntimeError as error:
            if not process_exit.is_lost_peer(error):
                raise
            process_exit.wait_to_be_stopped(int(os.environ.get("RANK", 0)))


class _Output(io.FileIO):
    """An output file that is redirected to /dev/null once nothing reads its pipe any more."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # child processes that start from now on write there too
            os.close(nowhere)
            return super().write(data)  # type: ignore[arg-type]


def outlive_readers() -> None:
    """Keep this process running when nothing reads its standard output or error any more."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # not a real file: a notebook's stream, or a test's
        return stream
    stream.flush()
    buffer = io.BufferedWriter(_Output(descriptor, "w", closefd=False))
    options = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
    return io.TextIOWrapper(buffer, **options)
