"""A training server in processes of its own, and a client of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.kit.runs import ROOT, environment, family
from tests.kit.waiting import wait_until

RANK, ALPHA = 4, 8.0
"""Of the server's adapters."""


@contextlib.contextmanager
def serving(
    folder: Path, model: Path, *arguments: str, port: int = 0, ranks: int = 1
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the server's URL and the process that started it. Its files are in `folder`, those of its run in `run`."""
    ready, log = folder / "url", folder / "log"
    ready.unlink(missing_ok=True)
    config = folder / "config.yaml"
    sections = {
        "model": {"path": str(model)},
        "lora": {"rank": RANK, "alpha": ALPHA},
        "rollout": {"backend": "embedded"},
        "batch": {"tokens_per_microbatch": 64},
        "run": {"folder": str(folder / "run"), "threads_per_rank": 1},
    }
    config.write_text(yaml.safe_dump(sections))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "megatron_rl.training_server", str(config), "--port", str(port)]
    command += ["--model-name", "tiny", "--ready-file", str(ready), *arguments]
    with log.open("ab") as output:
        started = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=output)
    try:
        wait_until(lambda: ready.exists() or started.poll() is not None, log.read_text)
        assert ready.exists(), log.read_text()
        yield ready.read_text(), started
    finally:
        for process in family(started.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        started.wait()
