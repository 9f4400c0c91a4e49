"""How ranks meet."""

import os

import psutil
import torch.distributed as dist
from ranks import run_ranks

from megatron_rl import parallel
from megatron_rl.config import ParallelConfig


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
