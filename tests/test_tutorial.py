"""Every block of docs/tutorial.md runs, in the order in which a reader types them.

Few things are changed: the path of SmolLM2 becomes that of a model of 140 k parameters, a step has 2 prompts of 4
replies and one reward worker, and run.steps becomes 2, with a checkpoint after the first one; 8 sums are held out. The
block that installs is left to `make --dry-run`. `megatron-rl` and `python` are forked from this process, whose imports
they need not repeat.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.kit.served_models import make_tiny_model
from tests.kit.waiting import LATE_S

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
MODEL = "models/smollm2-135m-instruct"
INSTALLS = "make operators"
COMMANDS = {"megatron-rl": "megatron_rl.cli", "python": "script"}


def smaller(block: str, model: Path) -> str:
    """Return the block with the tiny model and few steps, prompts and held-out sums."""
    for written, tried in (
        (MODEL, str(model)),
        ("run.checkpoint_every_steps=6", "run.checkpoint_every_steps=1"),
        ("step-6", "step-1"),
        ("prompts_per_step: 8", "prompts_per_step: 2"),
        ("n_samples: 8", "n_samples: 4"),
        ('"my_task.rewards:right_sum"', '"my_task.rewards:right_sum", reward_workers: 1'),
        ("max_tokens=400", "max_tokens=200"),
        ("sums[32:]", "sums[8:]"),
        ("sums[:32]", "sums[:8]"),
    ):
        block = block.replace(written, tried)
    return re.sub(r"steps(: |=)\d+(?=[ }])", r"steps\g<1>2", block)


def file_of(block: str) -> str:
    """Return the name under which a reader saves the block."""
    return re.match(r"# (my_task/\w+\.\w+)\n", block).group(1)


def test_blocks_are_short_and_files_say_their_names():
    assert len(BLOCKS) >= 15
    for language, block in BLOCKS:
        assert len(block.splitlines()) <= 15, block
        assert max(map(len, block.splitlines())) <= 110, block
        if language != "bash":
            assert file_of(block)


def test_make_knows_what_the_first_block_asks_for():
    language, block = BLOCKS[0]
    assert language == "bash" and block.startswith(INSTALLS)
    line = block.splitlines()[0]
    done = subprocess.run([*line.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def programs(monkeypatch):
    """The folders of `megatron-rl` and `python`, as a PATH."""
    pytest.importorskip("megatron", reason="megatron-core is not installed")
    from tests.kit.programs import fork_programs, forked_commands

    fork_programs(monkeypatch)
    with tempfile.TemporaryDirectory(prefix="programs-") as folder, forked_commands(Path(folder), COMMANDS):
        yield os.pathsep.join([folder, str(Path(sys.executable).parent), os.environ["PATH"]])


@pytest.mark.slow
def test_a_reader_can_type_every_block_in_order(tmp_path, programs):
    model = make_tiny_model(tmp_path / "model")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": programs}
    printed = ""
    (tmp_path / "my_task").mkdir()
    for language, written in BLOCKS[1:]:
        block = smaller(written, model)
        if language != "bash":
            (tmp_path / file_of(block)).write_text(block)
            continue
        command = ["bash", "-euo", "pipefail", "-c", block]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LATE_S,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        printed += done.stdout
    check_what_is_there(tmp_path, printed)


def check_what_is_there(folder: Path, printed: str) -> None:
    runs = folder / "runs"
    for name in ("sums", "own", "agent"):
        lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        assert sum(line["kind"] == "step" for line in lines) == 2, name
        assert (runs / name / "report.html").is_file()
        assert (runs / name / "final" / "model.safetensors").is_file()
    assert (runs / "sums" / "after_6_steps" / "config.json").is_file()
    assert (runs / "compare.html").is_file()
    evaluated = [json.loads(line) for line in (runs / "sums" / "eval.jsonl").read_text().splitlines()]
    assert len(evaluated) == 8 and all(len(line["rewards"]) == 4 for line in evaluated)
    assert "held_out: 8 of 8 prompts" in printed
