"""Servers given by URL serve one run after another, also after one that was killed."""

import os
import signal
import subprocess
import time

import pytest
from training_runs import COUNT, ROOT, command, environment, steps_of, train

from megatron_rl.config import RolloutConfig
from megatron_rl.serving.supervisor import Supervisor

pytestmark = pytest.mark.slow


def test_servers_survive_a_killed_run_and_serve_the_next(tmp_path):
    model = ROOT / "configs" / "models" / "count_tiny"
    config = RolloutConfig(backend="embedded", server_count=2)
    with Supervisor(config, model, tmp_path / "servers", dummy_weights=True) as servers:
        arguments = (COUNT, f"rollout.servers=[{','.join(servers.urls)}]", f"rollout.token_file={servers.token_file}")
        arguments += ("warm_start.updates=0", "data.evaluation=")
        first = subprocess.Popen(
            command(*arguments, "run.steps=100000", f"run.folder={tmp_path}/first"), cwd=ROOT, env=environment()
        )
        deadline = time.monotonic() + 60
        metrics = tmp_path / "first" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        for name in ("second", "third"):
            train(*arguments, "run.steps=2", f"run.folder={tmp_path}/{name}")
            assert [step["policy/version"] for step in steps_of(tmp_path / name)] == [1, 2]
