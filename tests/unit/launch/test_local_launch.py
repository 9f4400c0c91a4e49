"""Where the processes of a run on one host are: ranks and servers never share a GPU unless they take turns."""

import sys

import pytest

from megatron_rl.cli import main
from megatron_rl.config import load_config
from megatron_rl.launch import local
from megatron_rl.launch.local import Places, arrange, gpus_of_host
from megatron_rl.run.rollouts import devices_by_server

COUNT, PAIRS, ANSWERS = "configs/count_grpo.yaml", "configs/count_dpo.yaml", "configs/count_sft.yaml"
BY_TURNS = ("rollout.colocated=true", "rollout.publication=ipc")


def places(gpus, *overrides, ranks=None, config=COUNT):
    return arrange(load_config(config, list(overrides)), [str(number) for number in range(gpus)], ranks)


@pytest.mark.parametrize(
    "overrides,ranks",
    [
        ((), 1),
        (("parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2"), 8),
        (("parallel.expert=3",), 3),
        (("parallel.tensor=2", "algo.advantage=gae", "critic.parallel.pipeline=3"), 6),
    ],
)
def test_without_gpus_one_replica_is_started(overrides, ranks):
    assert places(0, *overrides) == Places(ranks=ranks)


def test_ranks_get_the_gpus_that_servers_leave():
    assert places(8) == Places(ranks=6, rank_gpus=list("012345"), server_gpus=["6", "7"])
    assert places(8, "rollout.server_args=[--tp,3]", ranks=1) == Places(
        ranks=1, rank_gpus=["0"], server_gpus=list("234567")
    )
    assert places(4, "rollout.devices=[0,2]") == Places(ranks=2, rank_gpus=["1", "3"], server_gpus=["0", "2"])
    assert places(2, "rollout.servers=[http://elsewhere:1]") == Places(ranks=2, rank_gpus=["0", "1"])


@pytest.mark.slow
def test_training_on_data_has_every_gpu_for_its_ranks_and_starts_by_the_one_entry(monkeypatch):
    for config in (PAIRS, ANSWERS):
        assert places(0, config=config) == Places(ranks=1)
        assert places(4, "parallel.tensor=2", config=config) == Places(ranks=4, rank_gpus=list("0123"))
        with pytest.raises(ValueError, match="--ranks 5: this host has 4 GPUs, and each rank needs one; lower it"):
            places(4, config=config, ranks=5)
    started = []
    monkeypatch.setattr(local, "run", lambda places, arguments: started.append(arguments) or 0)
    for config in (PAIRS, ANSWERS, COUNT):
        with pytest.raises(SystemExit):
            main(["launch", "--ranks", "1", config, "run.steps=3"])
    assert started == [["megatron_rl.train", config, "run.steps=3"] for config in (PAIRS, ANSWERS, COUNT)]


def test_by_turns_both_get_all():
    assert places(2, *BY_TURNS) == Places(ranks=2, rank_gpus=["0", "1"], server_gpus=["0", "1"])
    config = load_config(COUNT, [*BY_TURNS, "rollout.devices=[4,5,6,7]", "rollout.server_args=[--tp=2]"])
    # Its own first; the first rank's, whose memory it opens, among the others.
    assert devices_by_server(config.rollout) == [["4", "5", "6", "7"], ["6", "7", "4", "5"]]
    assert devices_by_server(load_config(COUNT, ["rollout.devices=[4,5]"]).rollout) == [["4"], ["5"]]
    assert devices_by_server(load_config(COUNT, []).rollout) is None


@pytest.mark.parametrize(
    "gpus,overrides,ranks,words",
    [
        (2, (), None, r"has 2 GPUs. Servers take rollout.server_count\(2\) x --tp\(1\) = 2, and 1 are for the ranks"),
        (1, (), None, "= 2, and 1 are for the ranks; lower one of them, or set rollout.colocated=true"),
        (8, (), 7, "this host has 8 GPUs. .* = 2, and 7 are for the ranks"),
        (1, BY_TURNS, None, "this host has 1 GPUs. .* = 2, and also 1 are for the ranks; lower one of them"),
        (4, ("rollout.devices=[3,9]",), None, "rollout.devices = .*9 not among this host's 4 GPUs, 0, 1, 2, 3"),
        (5, ("parallel.tensor=2",), None, "which does not divide the world size 3"),
        (0, ("parallel.tensor=2",), 3, "which does not divide the world size 3"),
        (0, (), 0, "--ranks 0: must be at least 1"),
        (2, ("rollout.colocated=true",), None, "rollout.publication = 'group': NCCL takes a GPU once"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(gpus, overrides, ranks, words):
    with pytest.raises(ValueError, match=words):
        places(gpus, *overrides, ranks=ranks)


@pytest.mark.parametrize(
    "override,words",
    [
        ("rollout.servers=[http://a:1]", "needs servers that this run starts, and rollout.servers = .*; empty it"),
        ("rollout.registry=/tmp/r", "needs servers that this run starts, and rollout.registry = '/tmp/r'"),
        ("rollout.router=http://a:1", "and rollout.router = 'http://a:1'"),
        ("rollout.max_staleness=1", "rollout.max_staleness = 1 has both work at once; set it to 0"),
        ("rollout.publication=delta", "keep no weights that rollout.publication = delta could change; set it to ipc"),
    ],
)
def test_turns_need_servers_of_the_run_and_synchronous_steps(override, words):
    load_config(COUNT, [override])
    with pytest.raises(ValueError, match=f"rollout.colocated = True: .*{words}"):
        load_config(COUNT, ["rollout.colocated=true", override])


def test_devices_are_as_many_as_the_servers_need():
    with pytest.raises(ValueError, match=r"rollout.devices = \['1'\]: must name rollout.server_count\(2\) x --tp\(1\)"):
        load_config(COUNT, ["rollout.devices=[1]"])


def test_gpus_are_those_that_this_process_may_use(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8a,")
    assert gpus_of_host() == ["3", "GPU-8a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_of_host() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_of_host() == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0\necho 1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpus_of_host() == ["0", "1"]


def test_ranks_are_told_their_places_and_servers_their_gpus(monkeypatch, tmp_path, capfd):
    """The command that a rank gets is replaced by one that prints; everything else is the real launcher."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7,8")
    printer = tmp_path / "print"
    printer.write_text('#!/bin/sh\necho "rank $RANK of $WORLD_SIZE sees $CUDA_VISIBLE_DEVICES: $*"\n')
    printer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(printer))
    monkeypatch.setattr(local.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main(["launch", COUNT, "run.steps=3", "--resume", "auto"])
    assert ended.value.code == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert [line.split(":")[0] for line in lines] == [f"rank {rank} of 2 sees 5,6" for rank in range(2)]
    arguments = f"-m megatron_rl.train {COUNT} run.steps=3 --resume auto rollout.devices=[7,8] --exit-with "
    assert all(arguments in line for line in lines)


def test_a_wrong_option_starts_nothing(monkeypatch):
    monkeypatch.setattr(local.subprocess, "Popen", None)
    with pytest.raises(SystemExit, match="launch: optimizer.lrr = 1: unknown key; did you mean optimizer.lr"):
        main(["launch", COUNT, "optimizer.lrr=1"])
