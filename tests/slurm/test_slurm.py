"""The batch scripts on a real Slurm, as its users start them.

`make test` has one job that trains and is cancelled, one that a notice queues again and whose ranks are stand-ins, and
what no run is needed for; the jobs that differ in their nodes, their servers or in how they end are thorough.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cluster import ENDED, POLL_S, ROOT, Cluster

from megatron_rl.cli import main
from megatron_rl.launch.slurm import port_of
from megatron_rl.life.stop_signal import EXIT_STOPPED
from tests.kit.waiting import LATE_S
from tests.kit.waiting import wait_until as wait_for

pytestmark = pytest.mark.slow

GRPO, SFT = "scripts/train_grpo.sh", "scripts/train_sft.sh"
COUNT = "configs/count_grpo.yaml"
SMALL = (
    *("batch.prompts_per_step=8", "generation.n_samples=4", "data.evaluation=", "warm_start.updates=0"),
    *("run.checkpoint_every_steps=2", "run.save_at_end=false", "rollout.server_count=1"),
)
ONE_NODE = ("--nodes=1", "--oversubscribe")
"""Of both, the command line's wins over the script's: --exclusive."""


def small(folder: Path, *settings: str) -> tuple[str, ...]:
    return (COUNT, f"run.folder={folder}", *SMALL, *settings)


def lines(folder: Path) -> list[dict]:
    log = folder / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines() if line] if log.is_file() else []


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in lines(folder) if line["kind"] == "step"]


def wait_until(holds: Callable[[], object], what: Callable[[], str]) -> None:
    """Wait for what takes a job several new interpreters, one after the other."""
    wait_for(holds, what, limit_s=LATE_S, poll_s=POLL_S)


def wait_for_job(cluster: Cluster, job: str, name: str, holds: Callable[[], object]) -> None:
    """Wait until `holds()`; AssertionError shows the log of a job that has ended before."""
    what = lambda: f"{cluster.state(job)}: {cluster.told(name)}"  # noqa: E731
    wait_until(lambda: holds() or cluster.state(job) in ENDED, what)
    assert holds(), what()


def wait_for_step(cluster: Cluster, job: str, folder: Path, step: int) -> None:
    wait_for_job(cluster, job, folder.name, lambda: step in steps(folder))


def processes_of(folder: Path, module: str = "megatron_rl") -> list[psutil.Process]:
    """The run's processes, by its folder on the command line or, for the rollout process, among its open files."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if module in line and (str(folder) in line or any(str(folder) in f.path for f in process.open_files())):
                found.append(process)
        except psutil.Error:
            pass
    return found


def resumed_after(cluster: Cluster, name: str) -> list[int]:
    return [int(step) for step in re.findall(r"resumed after step (\d+)", cluster.told(name))]


# -- one job that trains to the end, with its servers killed on the way -----------------------------------------------


@pytest.fixture(scope="module")
def trained(cluster, tmp_path_factory):
    """A job that has trained to its end, its run's folder, and its servers, which were killed meanwhile."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    settings = (f"run.folder={folder}", f"warm_start.folder={folder}-warm", "batch.prompts_per_step=16", "run.steps=45")
    job = cluster.sbatch(folder.name, "--nodes", "2", GRPO, COUNT, *settings)
    wait_for_step(cluster, job, folder, 5)
    killed = processes_of(folder, "megatron_rl.tools.embedded_server.server")
    for server in killed:
        server.kill()
    cluster.wait_for_state(job, folder.name, "COMPLETED")
    return job, folder, killed


@pytest.mark.thorough
def test_sbatch_on_two_nodes_trains_into_the_band(cluster, trained):
    job, folder, _ = trained
    assert cluster.state(job) == "COMPLETED"
    rewards = [line["reward/mean"] for line in lines(folder) if line["kind"] == "step"]
    assert len(rewards) == 45
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    assert last >= first + 0.25 and last >= 0.6, (first, last)


@pytest.mark.thorough
def test_killed_servers_come_back_and_training_goes_on_with_them(trained):
    _, folder, killed = trained
    logs = sorted(folder.glob("servers/*/supervisor.log"))
    assert len(killed) == len(logs) == 2
    for log in logs:
        assert "was killed by SIGKILL; restart 1 of 3" in log.read_text()
    assert steps(folder) == list(range(45)), "no step was lost or repeated"


@pytest.mark.thorough
def test_the_first_node_serves_and_each_rank_and_server_has_its_log(cluster, trained):
    job, folder, _ = trained
    assert {log.parent.name for log in folder.glob("servers/*/server-0.log")} == {"n1-0", "n1-1"}
    said = cluster.told("trained")
    assert "--nodelist=n2 " in next(line for line in said.splitlines() if "megatron_rl.train " in line)
    assert "step 45/45" in said, "the job's log has what the first rank says"
    assert (folder / "ranks" / "rank-0.log").stat().st_size > 0
    assert cluster.accounted_state(job) == "COMPLETED"


@pytest.mark.thorough
def test_a_job_that_has_ended_leaves_no_process(trained):
    assert processes_of(trained[1]) == []


@pytest.mark.thorough
def test_servers_that_take_turns_with_the_ranks_are_on_every_node(cluster, tmp_path):
    folder = tmp_path / "turns"
    turns = ("rollout.colocated=true", "rollout.publication=ipc", "rollout.server_count=2", "run.steps=2")
    job = cluster.sbatch(folder.name, "--nodes=2", GRPO, *small(folder, *turns))
    cluster.wait_for_state(job, folder.name, "COMPLETED")
    assert steps(folder) == [0, 1] and "2 ranks" in cluster.told(folder.name)
    logs = [(folder / "servers" / f"node-{number}" / "server-0.log").read_text() for number in (0, 1)]
    assert all("embedded_server.server" in log for log in logs)
    assert not (folder / "registry").exists() and processes_of(folder) == []


# -- jobs that are ended from outside ----------------------------------------------------------------------------------


def stopped_after(folder: Path) -> list[int]:
    found = re.findall(r"stopped after step (\d+) on SIG", (folder / "ranks" / "rank-0.log").read_text())
    return [int(step) for step in found]


def endless(folder: Path) -> tuple[str, ...]:
    """A run whose checkpoints are those of notices alone."""
    return small(folder, "run.steps=100000", "run.checkpoint_every_steps=100000")


def stops_of(cluster: Cluster, job: str, folder: Path, restarts: int) -> list[int]:
    wait_for_job(cluster, job, folder.name, lambda: cluster.about(job)["Restarts"] == str(restarts))
    return stopped_after(folder)


@pytest.fixture(scope="module")
def noticed(cluster, tmp_path_factory):
    """A job that was queued again on a notice, and a file of the commands of its ranks. The second one ends at once."""
    folder = tmp_path_factory.mktemp("noticed")
    starts, rank = folder / "starts", folder / "apptainer"
    rank.write_text(
        f"#!/bin/bash\ntrap 'kill $!; exit {EXIT_STOPPED}' USR1\necho \"$@\" >>{starts}\n"
        f"(( $(wc -l <{starts}) == 2 )) && exit 0\nsleep 300 & wait\n"
    )
    rank.chmod(0o755)
    container = {"CONTAINER": "image.sif", "CONTAINER_RUNTIME": "apptainer"}
    container["PATH"] = f"{folder}:{cluster.environment['PATH']}"
    settings = (f"run.folder={folder}/run", "run.checkpoint_every_steps=100000")
    job = cluster.sbatch(folder.name, "--nodes=1", SFT, "configs/count_sft.yaml", *settings, **container)
    wait_for_job(cluster, job, folder.name, lambda: starts.exists() and starts.read_text())
    cluster("scancel", "--batch", "--signal=USR1", job)  # as Slurm does on the script's --signal
    wait_for_job(cluster, job, folder.name, lambda: cluster.about(job)["Restarts"] == "1")
    return job, folder.name, starts


def test_job_is_queued_again_where_its_ranks_stop_on_a_notice(cluster, noticed):
    _, name, starts = noticed
    assert cluster.told(name).count("is queued again") == 1 and len(starts.read_text().splitlines()) == 1


# -- until it is started again: what no run is needed for, on the nodes with GPUs, and a job that is cancelled ---------


@pytest.mark.parametrize(("script", "alike"), [("train_ppo.sh", GRPO), ("train_preferences.sh", SFT)])
def test_the_other_scripts_ask_for_the_same_and_run_what_runs_above(script, alike):
    """So that no job of theirs is needed: they differ in their comments and in the job's name."""

    def parts(path):
        text = (ROOT / path).read_text()
        asked = [line for line in text.splitlines() if line.startswith("#SBATCH ") and "--job-name=" not in line]
        return asked, [line for line in text.splitlines() if line and not line.startswith("#")]

    asked, run = parts(f"scripts/{script}")
    assert asked == parts(alike)[0] and run == parts(SFT)[1] == ["set -euo pipefail", f'exec bash {GRPO} "$@"']


def test_a_server_over_two_nodes_starts_again_as_a_whole_where_one_of_them_loses_its_part(cluster, tmp_path):
    # In place of the servers: the second node's ends once both are there, and only the first time.
    starts, part = tmp_path / "starts", tmp_path / "apptainer"
    part.write_text(
        f'#!/bin/bash\necho "$SLURM_PROCID $SLURMD_NODENAME" >>{starts}\nuntil (( $(wc -l <{starts}) % 2 == 0 ))\n'
        f"do sleep 0.1; done\n(( SLURM_PROCID && $(wc -l <{starts}) == 2 )) && exit 3\nexec sleep 300\n"
    )
    part.chmod(0o755)
    container = {"CONTAINER": "image.sif", "CONTAINER_RUNTIME": "apptainer"}
    container["PATH"] = f"{tmp_path}:{cluster.environment['PATH']}"
    settings = small(tmp_path / "wide", "rollout.backend=sglang", "rollout.server_args=[--tp,4]")
    gpus = ("--partition=gpu", "--nodes=2", "--gpus-per-node=2")
    job = cluster.sbatch("wide", *gpus, "scripts/serve_rollouts.sh", *settings, **container)
    wait_for_job(cluster, job, "wide", lambda: starts.exists() and len(starts.read_text().split()) == 8)
    assert sorted(starts.read_text().splitlines()) == ["0 n3", "0 n3", "1 n4", "1 n4"]
    assert re.search(r"server n3-0 ended with exit code \S+ and starts again in", cluster.told("wide"))
    cluster("scancel", job)


SHOW_PLACE = """
import os
from pathlib import Path
import subprocess, sys
from megatron_rl.launch.placement import nodes_of_job, place, ranks_of_step
from megatron_rl.launch.slurm import srun
if "SLURM_STEP_ID" in os.environ and "MASTER_PORT" in os.environ:
    print(os.environ["SLURMD_NODENAME"], *ranks_of_step(os.environ).values())
else:
    (nodes,) = nodes_of_job(os.environ)
    placement = place(nodes, nodes, servers=1, ranks=None, gpus_per_server=1)
    hosts = Path(sys.argv[1])
    hosts.write_text("".join(f"{host}\\n" * count for host, count in placement.ranks.items()))
    step = srun(nodes, placement.ranks, cpus_per_task=1)
    more = {"SLURM_HOSTFILE": str(hosts), "MASTER_PORT": "1"}
    subprocess.run([*step, sys.executable, __file__], env=os.environ | more, check=True)
"""


def test_ranks_take_every_gpu_that_servers_leave_also_on_the_node_that_they_share(cluster, tmp_path):
    (tmp_path / "place.py").write_text(SHOW_PLACE)
    wrap = f"--wrap={sys.executable} {tmp_path}/place.py {tmp_path}/hosts"
    job = cluster.sbatch("placed", "--partition=gpu", "--nodes=2", "--exclusive", wrap)
    cluster.wait_for_state(job, "placed", "COMPLETED")
    # Node, then RANK, LOCAL_RANK (which is the GPU), WORLD_SIZE and LOCAL_WORLD_SIZE: a server has GPU 0 of n3.
    expected = ["n3 0 1 3 1", "n4 1 0 3 2", "n4 2 1 3 2"]
    assert sorted(cluster.told("placed").splitlines()) == expected, cluster.told("placed")


def test_slurm_takes_the_command_that_a_plan_prints(cluster, capsys):
    main(["plan", COUNT, "--nodes=2", "--gpus-per-node=2", "parallel.tensor=2", "--json"])
    command = json.loads(capsys.readouterr().out)["command"]
    assert command[0] == "sbatch"
    answer = cluster(*command[:1], "--test-only", *command[1:], SBATCH_PARTITION="gpu")
    assert re.search(r"to start at .* on nodes n\[3-4\] in partition gpu", answer), answer


# -- the same job again ------------------------------------------------------------------------------------------------


def test_cancelled_job_leaves_no_process_and_a_checkpoint(cluster, tmp_path):
    folder = tmp_path / "cancelled"
    job = cluster.sbatch(folder.name, GRPO, *endless(folder))
    wait_for_step(cluster, job, folder, 1)
    cluster("scancel", job)
    cluster.wait_for_state(job, folder.name, "CANCELLED")
    wait_until(lambda: not processes_of(folder), lambda: str(processes_of(folder)))
    (stopped,) = stopped_after(folder)
    assert stopped >= 2 and (folder / "checkpoints" / f"step-{stopped}").is_dir()
    assert steps(folder) == list(range(stopped))


def test_job_that_was_queued_again_goes_on_by_itself(cluster, noticed):
    job, name, starts = noticed
    cluster.wait_for_state(job, name, "COMPLETED")
    assert cluster.told(name).count("is queued again") == 1 and cluster.about(job)["Restarts"] == "1"
    first, second = starts.read_text().splitlines()
    assert first == second and "megatron_rl.train" in first and first.endswith("--resume auto")


@pytest.mark.thorough
def test_notified_job_saves_and_goes_on_by_itself(cluster, tmp_path):
    folder = tmp_path / "notified"
    job = cluster.sbatch(folder.name, GRPO, *endless(folder))
    wait_for_step(cluster, job, folder, 1)
    cluster("scancel", "--batch", "--signal=USR1", job)
    (stopped,) = stops_of(cluster, job, folder, restarts=1)
    wait_for_step(cluster, job, folder, stopped + 1)
    told = cluster.told(folder.name)
    assert told.count("is queued again") == 1 and "on SIGUSR1" in told
    assert resumed_after(cluster, folder.name) == [stopped] and stopped >= 2
    done = steps(folder)
    assert done == list(range(len(done))), "no step was lost or repeated"
    cluster("scancel", job)
    cluster.wait_for_state(job, folder.name, "CANCELLED")
    wait_until(lambda: not processes_of(folder), lambda: str(processes_of(folder)))


@pytest.mark.thorough
def test_preempted_job_goes_on_by_itself_and_then_on_two_ranks_of_a_heterogeneous_job(cluster, tmp_path):
    folder = tmp_path / "preempted"
    job = cluster.sbatch(folder.name, GRPO, *endless(folder))
    wait_for_step(cluster, job, folder, 1)
    urgent = cluster.sbatch("urgent", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true")
    cluster.wait_for_state(urgent, "urgent", "COMPLETED")
    (first,) = stops_of(cluster, job, folder, restarts=1)
    wait_for_step(cluster, job, folder, first + 1)
    assert "is queued again" in cluster.told(folder.name)
    cluster("scancel", job)
    cluster.wait_for_state(job, folder.name, "CANCELLED")
    wait_until(lambda: not processes_of(folder), lambda: str(processes_of(folder)))
    _, stopped = stopped_after(folder)

    more = ("parallel.tensor=2", "--ranks=2", f"run.steps={stopped + 2}")
    components = ("--nodes=1", ":", "--nodes=1", "--exclusive")
    again = cluster.sbatch("again", *components, GRPO, *small(folder, *more))
    cluster.wait_for_state(again, "again", "COMPLETED")
    assert "2 ranks" in cluster.told("again") and (folder / "ranks" / "rank-1.log").is_file()
    assert resumed_after(cluster, "again") == [stopped]
    assert steps(folder) == list(range(stopped + 2))


# -- several jobs ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_two_seeds_of_an_array_train_at_once_and_do_not_meet(cluster, tmp_path):
    folder = tmp_path / "seeds"
    job = cluster.sbatch("seed-%a", "--array=3-4", "--nodelist=n1", *ONE_NODE, GRPO, *small(folder, "run.steps=4"))
    for task in (3, 4):
        cluster.wait_for_state(f"{job}_{task}", f"seed-{task}", "COMPLETED")
        assert f"seed: {task}" in (folder / f"seed-{task}" / "config.yaml").read_text()
        assert steps(folder / f"seed-{task}") == list(range(4))
    told = [cluster.about(f"{job}_{task}") for task in (3, 4)]
    assert told[0]["NodeList"] == told[1]["NodeList"], "on the same node"
    assert max(one["StartTime"] for one in told) < min(one["EndTime"] for one in told), "at the same time"
    assert port_of(told[0]["JobId"]) != port_of(told[1]["JobId"])
    samples = [(folder / f"seed-{task}" / "samples.jsonl").read_text() for task in (3, 4)]
    assert samples[0] != samples[1]


@pytest.fixture
def apptainer(tmp_path):
    """A folder for PATH with an `apptainer` that writes down its arguments and runs the command without a container."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "apptainer").write_text(
        f'#!/bin/bash\necho "$@" >>{tmp_path}/apptainer.txt\n'
        'while [[ $1 != image.sif ]]; do shift; done\nshift\nexec "$@"\n'
    )
    (folder / "python3").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    for file in folder.iterdir():
        file.chmod(0o755)
    return folder


@pytest.mark.thorough
def test_answers_train_two_nodes_without_a_server_and_the_job_is_queued_again_on_a_notice(cluster, tmp_path):
    folder = tmp_path / "answers"
    settings = (f"run.folder={folder}", "run.steps=100000", "run.checkpoint_every_steps=100000", "data.evaluation=")
    job = cluster.sbatch(folder.name, "--nodes=2", SFT, "configs/count_sft.yaml", *settings)
    wait_for_step(cluster, job, folder, 0)
    cluster("scancel", "--batch", "--signal=USR1", job)
    wait_for_job(cluster, job, folder.name, lambda: "is queued again" in cluster.told(folder.name))
    cluster("scancel", job)
    (stopped,) = stopped_after(folder)
    assert steps(folder) == list(range(stopped)) and (folder / "checkpoints" / f"step-{stopped}").is_dir()
    assert {path.name for path in (folder / "ranks").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert not (folder / "servers").exists() and "--resume auto" in cluster.told(folder.name)


@pytest.mark.thorough
def test_trainer_in_a_container_joins_the_servers_of_another_job_on_gpus_of_their_own(cluster, tmp_path, apptainer):
    folder = tmp_path / "joined"
    settings = small(folder, "run.steps=2", "rollout.server_count=2", "rollout.backend=embedded")
    gpus = ("--partition=gpu", "--nodes=1", "--gpus-per-node=2")
    serving = cluster.sbatch("servers", *gpus, "scripts/serve_rollouts.sh", *settings)
    container = {"CONTAINER": "image.sif", "CONTAINER_RUNTIME": "apptainer", "CONTAINER_MOUNTS": str(tmp_path)}
    path = f"{apptainer}:{cluster.environment['PATH']}"
    job = cluster.sbatch("joined", *ONE_NODE, GRPO, *settings, "--servers=0", PATH=path, **container)
    wait_for_step(cluster, job, folder, 0)
    servers = processes_of(folder, "megatron_rl.tools.embedded_server.server")
    assert sorted(server.environ()["CUDA_VISIBLE_DEVICES"] for server in servers) == ["0", "1"]
    cluster.wait_for_state(job, "joined", "COMPLETED")
    assert steps(folder) == [0, 1]
    (asked,) = (tmp_path / "apptainer.txt").read_text().splitlines()
    assert asked.startswith(f"exec --bind {ROOT} --bind {tmp_path} --pwd {ROOT} image.sif python3 -m megatron_rl.train")
    assert cluster.state(serving) == "RUNNING", "servers outlive a trainer that they do not belong to"
    cluster("scancel", serving)
    wait_until(lambda: not processes_of(folder), lambda: str(processes_of(folder)))


# -- what is wrong or uneven -------------------------------------------------------------------------------------------


def test_wrong_option_fails_with_its_message_in_the_log_and_a_state_that_says_so(cluster, tmp_path):
    folder = tmp_path / "wrong"
    job = cluster.sbatch("wrong", GRPO, *small(folder, "optimizer.lrr=1"))
    cluster.wait_for_state(job, "wrong", "FAILED")
    about = cluster.about(job)
    assert about["ExitCode"] == "1:0"
    assert "did you mean optimizer.lr" in cluster.told("wrong") and not folder.exists(), "before anything was started"
    assert cluster.accounted_state(job) == "FAILED"


def test_ranks_that_do_not_fit_are_refused_with_what_to_ask_for(cluster, tmp_path):
    components = ("--nodes=1", ":", "--nodes=1", "--ntasks=1")
    job = cluster.sbatch("many", *components, GRPO, *small(tmp_path / "many", "--ranks=2", "parallel.tensor=2"))
    cluster.wait_for_state(job, "many", "FAILED")
    assert "--ranks 2: the nodes n2 have 1 CPUs for ranks" in cluster.told("many")
    assert "--exclusive" in cluster.told("many")
