"""Who runs where in a Slurm job, and the commands that start it there."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.launch.placement import Nodes, ServerPlace, counts, nodes_of_job, place, ranks_of_step
from megatron_rl.launch.slurm import Container, job_of, overrides_of_task, parser, port_of, server_port_of, srun

COUNT = Path("configs/count_grpo.yaml")


def nodes(count, gpus=0, cpus=16, first=1):
    return Nodes(hosts=[f"n{number}" for number in range(first, first + count)], cpus=cpus, gpus=gpus)


def placed(own, servers, ranks=None, gpus_per_server=1, nodes_per_server=0):
    shape = {"gpus_per_server": gpus_per_server, "nodes_per_server": nodes_per_server}
    placement = place(own, own, servers=servers, ranks=ranks, **shape)
    return [("+".join(server.hosts), list(server.gpus)) for server in placement.servers], placement.ranks


def test_counts_by_node():
    assert counts("2(x3),1") == [2, 2, 2, 1] and counts("8") == [8] and counts("72(x12)") == [72] * 12


def test_servers_take_the_first_gpus_and_ranks_all_that_are_left():
    assert placed(nodes(2, gpus=4), 3, gpus_per_server=2) == (
        [("n1", [0, 1]), ("n1", [2, 3]), ("n2", [0, 1])],
        {"n2": 2},
    )
    assert placed(nodes(2, gpus=2), 1) == ([("n1", [0])], {"n1": 1, "n2": 2})
    assert placed(nodes(1, gpus=4), 1, ranks=2) == ([("n1", [0])], {"n1": 2})
    assert placed(nodes(2, gpus=4), 0) == ([], {"n1": 4, "n2": 4})
    assert placed(nodes(2, gpus=4), 8, ranks=0)[1] == {}


def test_a_server_that_no_node_holds_takes_whole_groups_of_nodes_and_ranks_what_is_left():
    assert placed(nodes(5, gpus=8), 2, gpus_per_server=16) == (
        [("n1+n2", list(range(8))), ("n3+n4", list(range(8)))],
        {"n5": 8},
    )
    assert placed(nodes(4, gpus=8), 1, gpus_per_server=12) == (
        [("n1+n2", list(range(6)))],
        {"n1": 2, "n2": 2, "n3": 8, "n4": 8},
    )
    # --nnodes may ask for more of them than are needed: two servers share the nodes then.
    assert placed(nodes(2, gpus=8), 2, ranks=0, gpus_per_server=8, nodes_per_server=2)[0] == [
        ("n1+n2", [0, 1, 2, 3]),
        ("n1+n2", [4, 5, 6, 7]),
    ]
    with pytest.raises(ValueError, match="--servers 2: 3 nodes of 8 GPUs hold 1 servers of 16"):
        placed(nodes(3, gpus=8), 2, gpus_per_server=16)


@pytest.mark.parametrize(
    ("gpus", "on", "message"),
    [
        (9, 0, r"9 GPUs of a server .* / 2 nodes = 4.5 on each: must be a whole number of the 8 of a node; correct"),
        (16, 1, r"16 GPUs of a server .* / 1 nodes = 16 on each: must be .* the 8 of a node"),
    ],
)
def test_a_shape_that_fits_no_node_is_refused_with_the_arithmetic(gpus, on, message):
    with pytest.raises(ValueError, match=message):
        placed(nodes(4, gpus=8), 1, gpus_per_server=gpus, nodes_per_server=on)


def test_without_gpus_the_last_node_trains_and_one_node_does_both():
    assert placed(nodes(2), 2) == ([("n1", []), ("n1", [])], {"n2": 1})
    assert placed(nodes(4), 2) == ([("n1", []), ("n2", [])], {"n3": 1, "n4": 1})
    assert placed(nodes(4), 1, ranks=6) == ([("n1", [])], {"n2": 2, "n3": 2, "n4": 2})
    assert placed(nodes(1), 1, ranks=2) == ([("n1", [])], {"n1": 2})
    assert placed(nodes(2), 2, ranks=0) == ([("n1", []), ("n2", [])], {})


def test_components_of_a_heterogeneous_job_serve_and_train():
    placement = place(nodes(1), nodes(2, first=2), servers=3, ranks=None, gpus_per_server=1)
    assert placement.servers == [ServerPlace(hosts=("n1",))] * 3 and placement.ranks == {"n2": 1, "n3": 1}


@pytest.mark.parametrize(
    "own, servers, ranks, message",
    [
        (nodes(2, gpus=4), 9, None, "--servers 9: 2 nodes of 4 GPUs hold 8 servers"),
        (nodes(2, gpus=4), 8, None, "--ranks 0: the nodes n1, n2 have 0 GPUs"),
        (nodes(2, gpus=4), 4, 5, "--ranks 5: .* 4 GPUs for ranks beside 4 servers. .* --gpus-per-node"),
        (nodes(2, cpus=1), 1, 2, "--ranks 2: .* 1 CPUs for ranks .* --cpus-per-task"),
        (nodes(1), 0, 0, "--ranks 0"),
    ],
)
def test_what_does_not_fit_is_refused(own, servers, ranks, message):
    with pytest.raises(ValueError, match=message):
        placed(own, servers, ranks)


def test_a_list_of_nodes_that_scontrol_cannot_read_is_named(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
    with pytest.raises(ValueError, match=r"SLURM_JOB_NODELIST = 'n\[1-2\]'.*Unable to contact slurm controller"):
        nodes_of_job(job)


def test_outside_a_job_the_message_names_sbatch():
    with pytest.raises(ValueError, match="start this with sbatch"):
        nodes_of_job({})
    with pytest.raises(ValueError, match="must have two components"):
        nodes_of_job({"SLURM_JOB_ID": "1", "SLURM_HET_SIZE": "3"})


@pytest.mark.parametrize(
    ("config", "setting"),
    [("configs/count_dpo.yaml", "preference.loss = 'dpo'"), ("configs/count_sft.yaml", "supervised.answer = 'answer'")],
)
def test_servers_for_training_on_data_are_refused(config, setting):
    args = parser().parse_args([config, "--servers=2"])
    with pytest.raises(ValueError, match=f"--servers 2: {setting} trains on data alone and needs none; leave it out"):
        job_of(args, {})


def shared_job(tmp_path, monkeypatch, *words, count=2, gpus="8"):
    """A job of so many nodes whose servers share the ranks' GPUs."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\nfor n in $(seq {count}); do echo n$n; done\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"n[1-{count}]", "SLURM_JOB_CPUS_PER_NODE": f"64(x{count})"}
    turns = ["rollout.colocated=true", "rollout.publication=ipc", f"run.folder={tmp_path}"]
    args = parser().parse_intermixed_args([str(COUNT), *turns, *words])
    return job_of(args, job | ({"SLURM_GPUS_ON_NODE": gpus} if gpus else {}))


def test_servers_that_share_gpus_are_started_by_ranks_on_all_gpus_of_all_nodes(tmp_path, monkeypatch):
    job = shared_job(tmp_path, monkeypatch, "rollout.server_count=4", "rollout.server_args=[--tp,4]")
    assert (job.placement.servers, job.placement.ranks) == ([], {"n1": 8, "n2": 8})
    started = []
    monkeypatch.setattr(job, "_popen", lambda step, command, *_: started.append((step, command)))
    monkeypatch.setattr("megatron_rl.launch.slurm.address", lambda host: host)
    job._start_trainer()
    (step, command) = started[0]
    assert "--ntasks=16" in step and "--cpu-bind=none" in step
    assert not any("registry" in word for word in command) and command[-1] == "rollout.server_args=[--tp,4]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rollout.server_count=3",), "server_count = 3: .* each of 2 nodes of 8 GPUs starts as many, of --tp.1. GPUs"),
        (("rollout.server_count=4", "rollout.server_args=[--tp,8]"), "server_count = 4: .*, so none is on several"),
        (("rollout.server_count=2", "rollout.server_args=[--tp,16]"), "server_count = 2: .*, so none is on several"),
        (("rollout.server_count=2", "rollout.devices=[0,1]"), "rollout.devices = .*: must be left out with 2 nodes"),
        (("rollout.server_count=2", "rollout.publication=group"), "publication = 'group': NCCL takes a GPU once"),
        (("--servers=2",), "--servers 2: with rollout.colocated = true the first rank of each node starts"),
    ],
)
def test_servers_that_cannot_share_the_gpus_of_several_nodes_are_refused(words, message, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=message):
        shared_job(tmp_path, monkeypatch, *words)


def test_rank_of_a_step_takes_the_gpu_behind_those_of_servers():
    step = {"SLURM_STEP_ID": "1", "MASTER_PORT": "20001", "SLURM_STEP_TASKS_PER_NODE": "3,8", "SLURM_GPUS_ON_NODE": "8"}
    first = {"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "11"}
    expected = {"RANK": "2", "LOCAL_RANK": "7", "WORLD_SIZE": "11", "LOCAL_WORLD_SIZE": "3"}
    assert ranks_of_step(step | first) == expected
    second = first | {"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    assert ranks_of_step(step | second) == expected | {"RANK": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    assert ranks_of_step(step | second | {"RANK": "0"}) == {}, "torchrun inside a step has set them"
    assert ranks_of_step({"SLURM_JOB_ID": "1"}) == {}, "plain python in a job"


def test_a_step_shares_its_nodes_and_names_them():
    even = srun(nodes(2, gpus=4), {"n1": 2, "n2": 2}, cpus_per_task=8)
    assert even[:4] == ["srun", "--overlap", "--nodes=2", "--ntasks=4"]
    assert {"--nodelist=n1,n2", "--ntasks-per-node=2", "--gpus-per-node=4", "--cpus-per-task=8"} <= set(even)
    assert "--distribution=arbitrary" in srun(nodes(2, gpus=4), {"n1": 1, "n2": 2}, cpus_per_task=8)


def test_container_of_either_kind():
    here = str(Path.cwd())
    pyxis = Container(image="a.sqsh", runtime="pyxis", mounts=["/data"])
    assert pyxis.command(["-m", "x"], has_gpus=True) == ["python3", "-m", "x"]
    mounts = f"--container-mounts={here}:{here},/data:/data"
    assert pyxis.srun_options() == ["--container-image=a.sqsh", mounts, f"--container-workdir={here}"]
    apptainer = Container(image="a.sif", runtime="apptainer", mounts=["/data"])
    assert apptainer.srun_options() == []
    where = ["--bind", here, "--bind", "/data", "--pwd", here, "a.sif", "python3", "-m", "x"]
    assert apptainer.command(["-m", "x"], has_gpus=True) == ["apptainer", "exec", "--nv", *where]
    assert apptainer.command(["-m", "x"], has_gpus=False) == ["apptainer", "exec", *where]


@pytest.mark.parametrize(
    "server_args, gpus",
    [
        ([], 1),
        (["--tp", "4"], 4),
        (["--x", "1", "--tp-size=2"], 2),
        (["--tp-size-of-x", "4"], 1),
        (["--tp", "4", "--pp-size", "2"], 8),
        (["--tp", "8", "--dp-size", "4", "--enable-dp-attention"], 8),
        (["--tp", "8", "--attn-dp-size", "4"], 8),
        (["--tp", "2", "--dp-size", "4", "--attn-dp-size", "1"], 8),
        (["--tp", "2", "--dp-size", "4"], 8),
    ],
)
def test_gpus_of_a_server(server_args, gpus):
    assert RolloutConfig(server_args=server_args).gpus_per_server == gpus


@pytest.mark.parametrize(
    ("server_args", "publication", "message"),
    [
        (
            ["--tp", "2", "--pp-size", "2"],
            "group",
            "--pp-size 2: SGLang numbers .*; take --tp-size alone, or .*=disk",
        ),
        (["--dp-size=2"], "ipc", "--dp-size 2: SGLang numbers .*; take --attn-dp-size .* or set .*=disk"),
        (["--tp", "8", "--dp-size", "3", "--enable-dp-attention"], "group", "8 ranks, and 8 / 3 is no whole number"),
        (["--tp", "8", "--attn-dp-size", "3"], "group", "--attn-dp-size 3: DP attention .* 8 / 3 is no whole number"),
        (["--tp", "8", "--attn-dp-size", "4", "--dp", "2"], "disk", "--attn-dp-size 4 with --dp-size 2: .*; leave"),
        (["--attn-dp-size", "0"], "group", "--attn-dp-size 0: must be a number of at least 1"),
        (["--tp", "16", "--nnodes", "2"], "ipc", "--nnodes 2: one host shares the memory of ipc; set .*=group"),
        (
            ["--tp", "16", "--nnodes", "2"],
            "delta",
            "--nnodes 2: delta has been tried .* one host only; set .*=group",
        ),
        (["--quantization", "fp8"], "disk", "--quantization fp8: quantizes .*; leave it out"),
        (["--tp", "8", "--dp-size", "4", "--enable-dp-attention"], "group", ""),
        (["--tp", "8", "--attn-dp-size", "4"], "group", ""),
        (["--tp", "2", "--pp-size", "2"], "disk", ""),
        (["--quantization=unquant"], "group", ""),
    ],
)
def test_servers_that_could_not_be_sent_weights_are_refused_by_their_arguments(server_args, publication, message):
    config = RolloutConfig(server_args=server_args, publication=publication)
    if not message:
        config.check_servers()
        return
    with pytest.raises(ValueError, match=f"rollout.server_args: .*{message}"):
        config.check_servers()


def test_task_of_an_array_has_a_seed_or_a_line_of_the_sweep_and_a_folder(tmp_path):
    sweep = tmp_path / "sweep.txt"
    sweep.write_text("optimizer.lr=1e-5\noptimizer.lr=1e-6 'data.train_args={split: train}'\n")
    args = argparse.Namespace(config=COUNT, overrides=["run.folder=runs/x"], sweep=None)
    assert overrides_of_task({}, args) == []
    assert overrides_of_task({"SLURM_ARRAY_TASK_ID": "4"}, args) == ["run.seed=4", "run.folder=runs/x/seed-4"]
    args.sweep = sweep
    expected = ["optimizer.lr=1e-6", "data.train_args={split: train}", "run.folder=runs/x/sweep-1"]
    assert overrides_of_task({"SLURM_ARRAY_TASK_ID": "1"}, args) == expected
    with pytest.raises(ValueError, match="2 lines and none of number 2; correct --array"):
        overrides_of_task({"SLURM_ARRAY_TASK_ID": "2"}, args)
    with pytest.raises(ValueError, match="sbatch --array"):
        overrides_of_task({}, args)


def test_jobs_have_ports_of_their_own_below_those_of_linux():
    ports = {port_of(str(job)) for job in range(100_000, 104_000)}
    assert len(ports) == 4_000 and 1024 < min(ports) and max(ports) < 32_768
    meeting = {server_port_of(str(job), number) for job in range(100_000, 100_400) for number in range(100)}
    assert len(meeting) == 499 and max(meeting) + 16 <= min(ports), "SGLang takes the ports behind it"
