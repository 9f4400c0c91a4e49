"""`megatron-rl replay RUN --step N`: parses the command, starts its ranks, and exits with 1 if the step differs.

With --at or --bisect, the ranks are those of other revisions (revisions.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

from megatron_rl.config import ParallelConfig
from megatron_rl.launch.local import Places, ranks_of_replica, run
from megatron_rl.launch.start_up import importing
from megatron_rl.life.last_words import one_line
from megatron_rl.life.process_exit import exit_with
from megatron_rl.life.stop_signal import EXIT_INTERRUPTED
from megatron_rl.replay.revisions import RESULT, bisect_command, bisect_replay, replay_at

AXES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
RECORDED = "recorded"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "megatron-rl replay",
        allow_abbrev=False,  # arguments are passed on, without some
        description="Take a recorded step of a run again and name the first value that differs from the record.",
        epilog="Further arguments are key=value settings, such as model.path=... where the model lies elsewhere.",
    )
    parser.add_argument("run", type=Path, nargs="?", help="the run's folder, e.g. runs/demo, or a file of --export")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. model.path=models/mine")
    parser.add_argument("--step", type=int, help="step to replay, counted from 0")
    parser.add_argument("--at", metavar="REVISION", help="replay with the code of this commit, tag or branch")
    parser.add_argument(
        "--bisect",
        nargs=2,
        metavar=("GOOD", "BAD"),
        help="find the first revision after GOOD, up to BAD, whose replay differs; or, with -- COMMAND as last words "
        "and without RUN, at which the command fails",
    )
    parser.add_argument("--layout", default="", help="tensor=2,pipeline=2 or `recorded`; default: one process")
    parser.add_argument("--ranks", type=int, help="processes; default: as few as hold the layout, or as recorded")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest relative difference that counts as equal; default: 0 in the recorded layout on the same kind of "
        "machine, otherwise 1e-6 with float32 and 2e-2 with bfloat16",
    )
    parser.add_argument("--checkpoint", type=Path, help="first checkpoint, if it is elsewhere: .../step-N")
    parser.add_argument(
        "--groups",
        type=lambda text: [int(part) for part in text.split(",")],
        help="compute only the log-probs of these groups, e.g. 3,17, if the step is larger than this machine",
    )
    parser.add_argument("--rewards", action="store_true", help="also call the run's reward functions again")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write a .tar.zst or .tar.gz with all of a replay")
    parser.add_argument("--with-weights", action="store_true", help="--export with checkpoint or model weights too")
    parser.add_argument("--folder", type=Path, help="folder for the replay's own records; default: RUN/replay")
    parser.add_argument("--exit-with", type=int, metavar="PID", help="stop when this process ends (launchers pass it)")
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[words.index("--") + 1 :] if "--" in words else []
    words = words[: words.index("--")] if "--" in words else words
    args = parser.parse_intermixed_args(words)
    if command and not args.bisect:
        parser.error("-- COMMAND: is for --bisect GOOD BAD")
    if args.at and args.bisect:
        parser.error("--at: one revision, or two with --bisect, and not both")
    if not command and (args.run is None or args.step is None):
        parser.error("RUN and --step are needed")
    if args.at or args.bisect:
        sys.exit(with_other_code(args, words, command))
    folder = folder_of(args)
    with one_line("megatron-rl replay"):
        layout, is_rank, run_folder = layout_of(args.layout), "WORLD_SIZE" in os.environ, args.run
        settings = [*args.overrides, *(f"parallel.{axis}={size}" for axis, size in layout.items())]
        if args.run.is_file() or args.export:
            prepare()
            from megatron_rl.replay import replay_file
        if args.run.is_file():
            run_folder = folder / "unpacked"
            if not is_rank:
                replay_file.unpack(args.run, run_folder)
            settings += replay_file.model_of(run_folder, settings)
        if args.export:
            options = {"with_weights": args.with_weights, "checkpoint": args.checkpoint}
            print(replay_file.write_replay_file(run_folder, args.step, args.export, **options))
            return
        ranks = args.ranks or ranks_of(run_folder, args.step, args.layout, layout)
        if ranks > 1 and not is_rank:
            sys.exit(run(Places(ranks=ranks), ["megatron_rl.replay", *words]) or differs(folder))
        if args.exit_with:
            exit_with(args.exit_with)
        with importing():
            prepare()
            from megatron_rl.replay.replay import replay

        found = replay(
            run_folder,
            args.step,
            folder=folder,
            overrides=settings,
            as_recorded=args.layout == RECORDED,
            tolerance=args.tolerance,
            checkpoint=args.checkpoint,
            groups=args.groups,
            rewards=args.rewards,
            say=lambda text: print(text, flush=True),
        )
        if os.environ.get("RANK", "0") == "0":
            (folder / RESULT).write_text(json.dumps({"differs": None if found is None else str(found)}))
        if not is_rank:
            sys.exit(differs(folder))


def folder_of(args: argparse.Namespace) -> Path:
    """Return the folder into which the replay writes its own records."""
    beside = args.run.with_name(f"{args.run.name}.replay") if args.run.is_file() else args.run / "replay"
    return args.folder or beside


def with_other_code(args: argparse.Namespace, words: list[str], command: list[str]) -> int:
    """Do what --at or --bisect asks for, and return the exit code.

    words: arguments of the replay. command: the command to bisect; [] bisects the replay itself.
    """
    own = without(words, {"--at": 1, "--bisect": 2, "--folder": 1})
    try:
        with one_line("megatron-rl replay"):
            if args.at:
                return replay_at(args.at, own, folder_of(args))
            print(bisect_command(*args.bisect, command) if command else bisect_replay(*args.bisect, own))
            return 0
    except KeyboardInterrupt:
        print("megatron-rl replay: interrupted; the worktree is removed.", file=sys.stderr)
        return EXIT_INTERRUPTED


def without(words: list[str], options: dict[str, int]) -> list[str]:
    """Remove some options and their values from the arguments. options: option -> number of its values."""
    kept, left = list[str](), iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        if name not in options:
            kept.append(word)
        elif not equals:
            for _ in range(options[name]):
                next(left, None)
    return kept


def prepare() -> None:
    """Make megatron.core importable. Takes seconds, so a process that only starts ranks does without it."""
    from megatron_rl import platform

    platform.prepare(may_use_transformer_engine=platform.has_cuda())


def differs(folder: Path) -> int:
    """Return the exit code of the replay that wrote `folder`: 1 if it found a difference, else 0."""
    return int(json.loads((folder / RESULT).read_text())["differs"] is not None)


def layout_of(text: str) -> dict[str, int]:
    """Parse the value of --layout. Return {axis: size}; {} for none or `recorded`.

    Raises ValueError for an unknown axis or an invalid size.
    """
    if text in ("", RECORDED):
        return {}
    sizes = dict(part.partition("=")[::2] for part in text.split(","))
    if wrong := [f"{axis}={size}" for axis, size in sizes.items() if axis not in AXES or not size.isdecimal()]:
        raise ValueError(
            f"--layout {text!r}: {wrong[0]} must be one of {', '.join(AXES)}, = and its size, or recorded."
        )
    return {axis: int(size) for axis, size in sizes.items()}


def ranks_of(run_folder: Path, step: int, text: str, layout: dict[str, int]) -> int:
    """Return the number of ranks of the replay: as many as recorded, or the fewest that `layout` needs.

    text: value of --layout.
    """
    if text == RECORDED:
        facts = json.loads((run_folder / "records" / f"step-{step}" / "record.json").read_text())
        sizes = facts["arithmetic"]["layout"]
        return math.prod(sizes[axis] for axis in ("tensor", "pipeline", "context", "data"))
    return ranks_of_replica(ParallelConfig(**layout))
