"""How ranks meet."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from megatron_rl import parallel
from megatron_rl.config import ParallelConfig, load_config
from tests.kit.ranks import run_ranks


def listening_addresses():
    """Of this rank's process, behind a barrier: all stores are up."""
    groups = parallel.start(ParallelConfig(), seed=1)
    dist.barrier(group=groups.control)
    found = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    port = int(os.environ["MASTER_PORT"])
    dist.barrier(group=groups.control)
    return [address.ip for address in found if address.port == port]


def test_the_store_of_ranks_on_one_host_is_open_to_that_host_alone():
    first, second = run_ranks(2, listening_addresses)
    assert first == ["127.0.0.1"] and second == []


def meeting_where_another_listens(host):
    os.environ["MASTER_ADDR"] = host
    with socket.create_server((host, 0)) as other:
        port = os.environ["MASTER_PORT"] = str(other.getsockname()[1])
        with pytest.raises(RuntimeError, match=rf"MASTER_PORT = {port}: another process on {host} listens there"):
            parallel.start(ParallelConfig(), seed=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"], ids=["this host", "any"])
def test_a_port_that_another_process_has_is_named(host):
    run_ranks(1, meeting_where_another_listens, host)


def test_a_gpu_that_two_ranks_have_is_refused_with_both_named():
    store = dist.HashStore()
    for rank, gpu in enumerate(("GPU-1a", "GPU-2b")):
        parallel.check_own_gpu(store, rank, gpu)
    with pytest.raises(ValueError, match="rank 2: its GPU GPU-1a is rank 0's too, and NCCL takes a GPU once; start"):
        parallel.check_own_gpu(store, 2, "GPU-1a")


def groups_of_two_layouts(world_size, timeout_s):
    """Of rank 0 of a world of torch's fake backend: each group's (backend, ranks, timeout, is it lazy?)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made, real = [], dist.new_group

    def new_group(ranks=None, timeout=None, backend=None, **_):
        ranks = list(range(world_size)) if ranks is None else ranks
        if 0 not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        made.append((backend, len(ranks), timeout, os.environ.get("TORCH_GLOO_LAZY_INIT")))
        return real(ranks, timeout=timeout, backend="fake", use_local_synchronization=True)

    os.environ["WORLD_SIZE"] = str(world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    dist.new_group = new_group
    policy = parallel.start(ParallelConfig(tensor=8, pipeline=4), seed=1, timeout_s=timeout_s)
    critic = parallel.start(ParallelConfig(tensor=4), seed=1, timeout_s=timeout_s, control=policy.control)
    assert critic.control is policy.control and critic.tensor.size == 4
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ  # servers that rank 0 starts inherit nothing of it
    return made


def test_rank_0_of_1024_opened_1292_connections_over_gloo_for_each_layout():
    (made,) = run_ranks(1, groups_of_two_layouts, 1024, 600.0)
    # One group of all for both layouts; and gloo connects only the ranks of it that meet.
    assert [(ranks, lazy) for backend, ranks, _, lazy in made if backend == "gloo"] == [(1024, "1")]
    (few,) = run_ranks(1, groups_of_two_layouts, 64, 600.0)
    assert [(ranks, lazy) for backend, ranks, _, lazy in few if backend == "gloo"] == [(64, None)]


def test_a_rollout_of_more_than_half_an_hour_ended_the_run():
    config = load_config(Path(__file__).parents[2] / "configs" / "demo.yaml", ["run.phase_timeout_s=7200"])
    (made,) = run_ranks(1, groups_of_two_layouts, 64, config.collective_timeout_s)
    timeouts = {timeout for *_, timeout, _ in made}
    assert timeouts and None not in timeouts, "a timeout of torch's own"
    assert min(timeouts) >= timedelta(seconds=7200 + config.run.grace_s)  # the hang watch says first who is late


def policies_of_listeners():
    """Return the scheduling policies that gloo's listening threads have on this rank, and that of its main thread."""
    parallel.start(ParallelConfig(), seed=1)
    tasks = Path("/proc/self/task").glob("*")
    found = {os.sched_getscheduler(int(t.name)) for t in tasks if (t / "comm").read_text() == "gloo_tcp_loop\n"}
    return found, os.sched_getscheduler(0)


def test_gloos_listeners_displace_nobody():
    assert run_ranks(2, policies_of_listeners) == [({os.SCHED_BATCH}, os.SCHED_OTHER)] * 2
