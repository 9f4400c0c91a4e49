"""What a rank learns of its GPU before CUDA starts: variables that libraries read, and the cores that are near it."""

import os
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.launch import own_gpu

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"
VARIABLES = ("NCCL_CUMEM_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node of two sockets with two GPUs each: node(capability). The process is rank 2 of it, and has 6 of 8 cores."""
    for number in range(2):
        folder = tmp_path / "sys/devices/system/node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{2 * number}-{2 * number + 1},{4 + 2 * number}-{5 + 2 * number}\n")
    for number in range(4):
        device = tmp_path / "sys/bus/pci/devices" / f"0000:{number}b:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{number // 2}\n")
    monkeypatch.setattr(own_gpu, "SYSFS", tmp_path / "sys")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 6, 9})
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: bound.append((process, cores)))
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)

    def describe(capability: float):
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "00000000:${{1#--id=}}B:00.0, {capability}"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return bound

    return describe


def test_a_rank_ran_on_the_other_sockets_cores(node, monkeypatch):
    bound = node(9.0)
    assert own_gpu.stay_near() == {2, 3, 6} and bound == [(0, {2, 3, 6})]  # node 1 has 2, 3, 6 and 7
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,0")  # the third of these
    assert own_gpu.stay_near() == {0, 1}
    (own_gpu.SYSFS / "bus/pci/devices/0000:0b:00.0/numa_node").write_text("-1\n")
    assert own_gpu.stay_near() == set() and len(bound) == 2


def test_a_host_without_gpus_is_left_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = dict(os.environ)
    own_gpu.set_variables(load_config(DEMO, []))
    assert os.environ == environment and own_gpu.stay_near() == set()


# As upstream's own program demands it: with tensors or contexts split, before Blackwell.
@pytest.mark.parametrize(
    ("capability", "setting", "connections"),
    [
        (9.0, "parallel.tensor=2", "1"),
        (9.0, "parallel.context=2", "1"),
        (9.0, "parallel.pipeline=2", None),
        (10.0, "parallel.tensor=2", None),
    ],
)
def test_launch_left_out_what_megatron_and_sglang_want_of_nccl_and_cuda(node, capability, setting, connections):
    node(capability)
    own_gpu.set_variables(load_config(DEMO, [setting]))
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections and os.environ["NCCL_CUMEM_ENABLE"] == "0"


def test_what_the_user_has_set_stays(node, monkeypatch):
    node(9.0)
    for name in VARIABLES:
        monkeypatch.setenv(name, "8")
    own_gpu.set_variables(load_config(DEMO, ["parallel.tensor=2"]))
    assert [os.environ[name] for name in VARIABLES] == ["8", "8"]
