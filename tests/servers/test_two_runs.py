"""Servers given by URL serve the run after one that was killed. After one that ended, those of end_to_end do."""

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.servers.supervisor import Supervisor
from tests.kit.forks import has_ended
from tests.kit.runs import COUNT, ROOT, run_until_killed, served_by, steps_of, train_forked
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.thorough  # test_kills.py kills and resumes beside one server
def test_servers_survive_a_killed_run_and_serve_the_next(tmp_path):
    model, output = ROOT / "configs" / "models" / "count_tiny", tmp_path / "output.txt"
    config = RolloutConfig(backend="embedded", server_count=2)
    with Supervisor(config, model, tmp_path / "servers", dummy_weights=True) as servers:
        settings = (*served_by(servers), "warm_start.updates=0", "data.evaluation=", "batch.prompts_per_step=4")
        first = (*settings, "run.steps=100000", f"run.folder={tmp_path}/first")
        with run_until_killed(first, output) as pid:
            metrics = tmp_path / "first" / "metrics.jsonl"
            has_begun = lambda: metrics.exists() and metrics.read_text().count("\n") >= 2  # noqa: E731
            wait_until(lambda: has_ended(pid) or has_begun(), output.read_text)
            assert not has_ended(pid), output.read_text()
        train_forked(COUNT, *settings, "run.steps=2", f"run.folder={tmp_path}/second")
        assert [step["policy/version"] for step in steps_of(tmp_path / "second")] == [1, 2]
