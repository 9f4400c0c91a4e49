"""One server over several nodes: the step that a Slurm job starts for it, and what each of its nodes does."""

import os
import threading

import pytest

from megatron_rl.launch import slurm
from megatron_rl.launch.server_registry import registered_urls
from megatron_rl.tools.embedded_server import serve_command
from tests.kit.waiting import wait_until

JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "16(x3)"}
SHAPE = "rollout.server_args=[--tp,16,--dp-size,4,--enable-dp-attention]"
SCONTROL = """#!/bin/bash
if [[ $2 = hostnames ]]; then printf 'n1\\nn2\\nn3\\n'; else echo "NodeName=$3 NodeAddr=10.0.0.${3#n} Port=1"; fi
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """job(setting, ...): three nodes of 8 GPUs, on which srun writes its command down and waits to be ended."""
    commands = {"scontrol": SCONTROL, "srun": f'#!/bin/bash\necho "$@" >>{tmp_path}/steps\nexec sleep infinity\n'}
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm, "FIRST_RESTART_S", 0.0)
    made = []

    def make(*settings):
        words = ["configs/count_grpo.yaml", f"run.folder={tmp_path}/run", "rollout.backend=sglang", *settings]
        made.append(slurm.job_of(slurm.parser().parse_args(words), JOB | {"SLURM_GPUS_ON_NODE": "8"}))
        return made[-1]

    yield make
    for server in (server for one in made for server in one.servers):
        server.process.kill()
        server.process.wait()


def steps(tmp_path, count):
    """Return the steps that were started, once they are so many."""
    lines = lambda: (tmp_path / "steps").read_text().splitlines()  # noqa: E731
    wait_until(lambda: (tmp_path / "steps").exists() and len(lines()) >= count)
    return lines()


def test_a_server_that_no_node_holds_is_one_step_on_two_whose_parts_start_and_die_together(job, tmp_path):
    one = job("rollout.server_count=1", SHAPE)
    assert one.placement.ranks == {"n3": 8}
    one._start_server(0, one.placement.servers[0])
    (step,) = steps(tmp_path, 1)
    where, what = step.split(" env ")
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n1,n2", "--ntasks-per-node=1"} <= set(where.split())
    assert {"--gpus-per-node=8", "--kill-on-bad-exit=1", "--label"} <= set(where.split())
    assert what.startswith("CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 ") and " --host 10.0.0.1 " in what
    meeting = f"--nnodes 2 --dist-init-addr 10.0.0.1:{slurm.server_port_of('77', 0)}"
    assert what.endswith(f"--tp 16 --dp-size 4 --enable-dp-attention {meeting}")
    one.servers[0].process.kill()
    one.servers[0].process.wait()
    assert one._keep_servers() and one._keep_servers()
    assert steps(tmp_path, 2)[1] == step, "started again as a whole"


def test_a_server_of_one_node_is_the_step_that_it_was(job, tmp_path):
    one = job("rollout.server_count=1", "rollout.server_args=[--tp,4]")
    one._start_server(0, one.placement.servers[0])
    (step,) = steps(tmp_path, 1)
    assert "--nodes=1 --ntasks=1 --nodelist=n1 " in step and step.endswith(" --tp 4")
    assert not any(word in step for word in ("--nnodes", "--dist-init-addr", "--kill-on-bad-exit", "--label"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rollout.server_args=[--tp,9]"], "9 GPUs of a server .* / 2 nodes = 4.5 on each"),
        (["rollout.server_args=[--tp,16,--node-rank,1]"], "--node-rank 1: is set for each server by the job; leave it"),
        (["rollout.server_args=[--tp,2,--quantization,fp8]"], "--quantization fp8: quantizes"),
    ],
)
def test_servers_that_could_not_be_are_refused_before_a_step(job, tmp_path, settings, message):
    with pytest.raises(ValueError, match=f"rollout.server_args: {message}"):
        job(*settings)
    assert not (tmp_path / "steps").exists()


class Standing:
    """In the supervisor's place: it is up for a moment, tells what is registered meanwhile, and dies."""

    backend, urls, all_answer = "sglang", ["http://10.0.0.1:5"], True
    made: list["Standing"] = []

    def __init__(self, config, model, folder, *, host, on_death, **options):
        self.config, self.folder, self.host, self._die = config, folder, host, on_death
        self.registered = None
        Standing.made.append(self)

    def __enter__(self):
        def look():
            self.registered = registered_urls(self.folder.parent / "registry", "r")
            self._die("its process died")

        threading.Timer(0.3, look).start()

    def __exit__(self, *_):
        pass


def serve(tmp_path, monkeypatch, *words):
    monkeypatch.setattr(serve_command, "Supervisor", Standing)
    monkeypatch.setattr(serve_command.signal, "signal", lambda *_: None)
    told = ["m", "--host", "10.0.0.1", "--register", f"{tmp_path}/registry", "--run", "r", "--tp", "16"]
    with pytest.raises(SystemExit) as ended:
        serve_command.main([*told, "--log-folder", str(tmp_path), *words])
    return Standing.made.pop() if Standing.made else None, str(ended.value)


@pytest.mark.parametrize("node", [0, 1])
def test_the_head_alone_is_registered_and_no_node_starts_its_part_again(tmp_path, monkeypatch, node):
    monkeypatch.setenv("SLURM_PROCID", str(node))
    (tmp_path / "registry").mkdir()
    server, end = serve(tmp_path, monkeypatch, "--nnodes", "2", "--dist-init-addr", "10.0.0.1:12000")
    assert server.registered == ([Standing.urls[0]] if node == 0 else []) and server.config.server_restarts == 0
    assert server.config.server_args[-6:] == [
        *("--nnodes", "2", "--dist-init-addr", "10.0.0.1:12000"),
        *("--node-rank", str(node)),
    ]
    assert server.host == ("10.0.0.1" if node == 0 else "127.0.0.1"), "it cannot listen on the head's address"
    assert server.folder == tmp_path / f"node-{node}" and end == "megatron-rl serve: its process died"


def test_a_node_that_does_not_know_which_it_is_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert "--node-rank (not given): must be in [0, --nnodes = 2)" in serve(tmp_path, monkeypatch, "--nnodes", "2")[1]
    server, end = serve(tmp_path, monkeypatch, "--nnodes", "2", "--node-rank", "2")
    assert server is None and "--node-rank 2: must be in [0, --nnodes = 2)" in end
