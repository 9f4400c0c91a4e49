"""Servers and trainer that take turns on the same devices train as those with devices of their own, bit for bit."""

import hashlib
import os
import signal

import pytest
import requests

from megatron_rl.engine.offload import tensors_of
from megatron_rl.launch.run_token import token_in
from megatron_rl.run import rl_run
from megatron_rl.run.rollouts import Rollouts
from tests.kit.forks import check_end, start_ranks
from tests.kit.runs import evaluations_of, experiment, losses, steps_of
from tests.kit.waiting import LATE_S

pytestmark = pytest.mark.slow

# Two engines beside each other, evaluations and checkpoints between the steps: all that may want the devices.
SETTINGS = (
    *("rollout.backend=embedded", "rollout.server_count=1", "batch.prompts_per_step=8", "generation.n_samples=4"),
    *("warm_start.updates=4", "warm_start.check_every_updates=2", "warm_start.folder=", "algo.kl_coefficient=0.1"),
    *("warm_start.prompts_per_update=16", "data.evaluation_args.count=16"),
    *("run.steps=4", "run.evaluate_every_steps=2", "run.checkpoint_every_steps=2", "run.save_every_steps=3"),
)
BY_TURNS = ("rollout.colocated=true",)


def run(folder, *overrides, ranks=1, how=experiment, nodes=1):
    folder.mkdir()
    output = folder / "output.txt"
    check_end(start_ranks(ranks, how, (f"run.folder={folder}", *SETTINGS, *overrides), output, nodes=nodes), output)


def outcome(folder):
    """All that a run leaves and that depends on no clock."""
    scores = [line["accuracy"] for line in evaluations_of(folder)]
    weights = [(folder / name / "model.safetensors").read_bytes() for name in ("step-3", "final")]
    return losses(folder), scores, [hashlib.sha256(content).hexdigest() for content in weights]


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "apart"
    run(folder)
    return outcome(folder)


def watched(overrides):
    """A run that looks at every turn and checkpoint whether the other side is out, and kills its server in one turn."""
    looks, processes = [], []

    class Watched(Rollouts):
        def wait_for(self, pending):
            engines = self.devices.engines.engines
            assert len(engines) == 2, "policy and reference"
            there = sum(t.untyped_storage().nbytes() for engine in engines for part in tensors_of(engine) for t in part)
            assert there == 0, f"{there} bytes of the engines are there while servers generate"
            looks.append("servers")
            super().wait_for(pending)

    class Turned(rl_run.RLRun):
        def assert_the_server_has_nothing(self):
            (url,) = self.processes.supervisor.urls
            headers = {"Authorization": f"Bearer {token_in(self.processes.supervisor.token_file)}"}
            answer = requests.post(f"{url}/continue_generation", json={}, headers=headers, timeout=LATE_S)
            assert answer.status_code == 400 and "weights and kv_cache: released" in answer.text, answer.text

        def _start_checkpoint(self, step, **options):
            super()._start_checkpoint(step, **options)
            self.assert_the_server_has_nothing()
            looks.append("checkpoint")

        def compute_advantages(self, batch):
            (url,) = self.processes.supervisor.urls
            self.assert_the_server_has_nothing()
            looks.append("trainer")
            processes.append(self.processes.supervisor.starts[url])
            if len(processes) == 2:
                os.kill(processes[-1], signal.SIGKILL)
            super().compute_advantages(batch)

    rl_run.RLRun, rl_run.Rollouts = Turned, Watched
    experiment(overrides)
    assert looks.count("checkpoint") == 2
    assert looks.count("trainer") == 4 and looks.count("servers") >= 4 + 3, "steps, and evaluations"
    assert processes[0] == processes[1] != processes[2] == processes[3], "one restart, before the publication"


def test_turns_change_no_bit_of_a_run_even_where_the_server_dies_while_its_device_is_lent(apart, tmp_path):
    run(tmp_path / "run", *BY_TURNS, "rollout.publication=ipc", how=watched)
    assert outcome(tmp_path / "run") == apart
    assert all(step["time/device_sharing"] > 0 for step in steps_of(tmp_path / "run"))


@pytest.mark.thorough
def test_two_ranks_hand_the_devices_over_together(apart, tmp_path):
    run(tmp_path / "run", *BY_TURNS, "run.offload=true", ranks=2)
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 4 and steps[0]["reward/mean"] == apart[0][0][1], (
        "the same replies, from two replicas as from one"
    )


def on_a_node(overrides):
    """A rank that is all of its node: it starts one of the servers, which on the second node is killed in a step."""
    pids, proved = [], []

    class Turned(rl_run.RLRun):
        def compute_advantages(self, batch):
            (pid,) = self.processes.supervisor.starts.values()
            assert [len(urls) for urls in self.processes.urls] == [1, 1]
            pids.append(pid)
            if len(pids) == 2 and self.groups.rank == 1:
                os.kill(pid, signal.SIGKILL)
            super().compute_advantages(batch)

    class Proved(Rollouts):
        def publish(self):
            super().publish()
            if self.groups.is_main:
                proved.append(self.engine.publisher.last.verified / len(self.engine.export().specs))

    rl_run.RLRun, rl_run.Rollouts = Turned, Proved
    experiment(overrides)
    is_restarted = os.environ["RANK"] == "1"
    assert (pids[0] == pids[1]) and (pids[2] == pids[3]) and (pids[1] != pids[2]) == is_restarted, pids
    # The server that died is left out of one publication, as everywhere.
    assert not proved or (proved.count(1.0), {*proved}, proved[-1]) == (1, {1.0, 2.0}, 2.0), proved


@pytest.mark.thorough
def test_each_node_has_servers_of_its_own_which_a_rank_there_feeds_and_starts_again(apart, tmp_path):
    overrides = (*BY_TURNS, "rollout.publication=ipc", "rollout.server_count=2")
    run(tmp_path / "run", *overrides, ranks=2, nodes=2, how=on_a_node)
    steps, folder = steps_of(tmp_path / "run"), tmp_path / "run" / "servers"
    assert len(steps) == 4 and steps[0]["reward/mean"] == apart[0][0][1]
    logs = [(folder / f"node-{number}" / "server-0.log").read_text() for number in (0, 1)]
    assert [log.count("embedded_server.server") for log in logs] == [1, 2], "one start, and two"
