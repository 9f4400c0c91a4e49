"""Compares the trainer in a parallel layout with transformers. Every rank runs this module."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

from megatron_rl.launch.local import Places, run
from megatron_rl.life.last_words import one_line
from megatron_rl.life.process_exit import exit_with


def doctor_in_layout(path: Path, overrides: list[str], layout: dict[str, int]) -> bool:
    """Run the comparison with one process per rank. Return True if it finds an error; rank 0 prints all errors.

    RuntimeError if a rank fails, after the rank has printed why.
    """
    dense = math.prod(layout.get(axis, 1) for axis in ("tensor", "pipeline", "context"))
    ranks = math.lcm(dense, math.prod(layout.get(axis, 1) for axis in ("expert", "expert_tensor", "pipeline")))
    settings = [*overrides, *(f"parallel.{axis}={size}" for axis, size in layout.items())]
    with tempfile.TemporaryDirectory(prefix="megatron_rl-doctor-") as folder:
        result = Path(folder) / "found.json"
        words = ["megatron_rl.tools.doctor.layout_doctor", str(path), *settings, "--result", str(result)]
        if run(Places(ranks=ranks), words):
            raise RuntimeError("--layout: a rank of the doctor has failed; its own message says why.")
        return bool(json.loads(result.read_text()))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("megatron_rl.tools.doctor.layout_doctor", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--result", type=Path, required=True, help="output file for the findings, as JSON")
    parser.add_argument("--exit-with", type=int, metavar="PID")
    args = parser.parse_intermixed_args(argv)
    if args.exit_with:
        exit_with(args.exit_with)
    with one_line("megatron-rl doctor"):
        from megatron_rl import platform

        platform.prepare(may_use_transformer_engine=False)
        from megatron_rl.config import load_config
        from megatron_rl.data.tokens import load_tokenizer, training_prompts
        from megatron_rl.tools.doctor.doctor import of_layout
        from megatron_rl.tools.evaluate_command import where_it_is

        config = load_config(*where_it_is(args.config, args.overrides))
        config.check_world_size(int(os.environ["WORLD_SIZE"]))
        tokenizer = load_tokenizer(config.model.path, config.data.template_args)
        found = of_layout(config, training_prompts(config, tokenizer), tokenizer)
    if os.environ["RANK"] == "0":
        for finding in found:
            print(f"FAULT: {finding}")
        if not found:
            print(f"ok: trainer on {os.environ['WORLD_SIZE']} ranks")
        args.result.write_text(json.dumps([str(finding) for finding in found]))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
