"""A publication by one sender and by one for each pipeline stage, over links that network namespaces model.

    sudo python benchmarks/bench_senders.py          # the namespaces need root and iproute2

Four hosts of two trainer ranks each (pipeline 4, expert 2) and two of servers are namespaces of this machine, joined
by a bridge. A trainer's host sends and receives at `--mbit`, a server's at eight times as much, as one with a link for
each of its GPUs. What runs in them is the real thing: Megatron-Core's shards of a mixture of experts, their gathers,
groups over gloo, and checksums that are compared. `one sender` has all weights come to rank 0; `by stage` is what a run
does. They take turns in every round, and medians are over rounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frame

sys.path[:0] = [str(frame.ROOT / "tests" / "megatron"), str(frame.ROOT)]

TRAINERS, RANKS_OF_HOST, SERVERS, PORT = 8, 2, 2, 29777
HOSTS = TRAINERS // RANKS_OF_HOST + SERVERS
NEW_NETWORK = 0x40000000
SERVER_LINKS = 8
"""Links of a server's host, for one of a trainer's."""


def address(host: int) -> str:
    return f"10.99.0.{host + 1}"


def host_of(rank: int) -> int:
    return rank // RANKS_OF_HOST if rank < TRAINERS else TRAINERS // RANKS_OF_HOST + rank - TRAINERS


@contextlib.contextmanager
def cluster(mbit: int) -> Iterator[list[str]]:
    """Make the hosts' namespaces and their links; yield their names."""
    switch, *hosts = names = [f"mrl{os.getpid()}-{number}" for number in range(1 + HOSTS)]

    def ip(*words: object) -> None:
        subprocess.run(["ip", *map(str, words)], check=True)

    def limit(space: str, link: str, rate: int) -> None:
        words = ["dev", link, "root", "tbf", "rate", f"{rate}mbit", "burst", "1mb", "latency", "100ms"]
        subprocess.run(["ip", "netns", "exec", space, "tc", "qdisc", "add", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts):
            far, rate = f"to{number}", mbit * (1 if number < TRAINERS // RANKS_OF_HOST else SERVER_LINKS)
            ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", far, "netns", switch)
            ip("-n", switch, "link", "set", far, "master", "bridge", "up")
            ip("-n", host, "addr", "add", f"{address(number)}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            limit(host, "eth0", rate)
            limit(switch, far, rate)
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def enter(space: str) -> None:
    """Move this process to a namespace."""
    with open(f"/run/netns/{space}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {space}")


def publish_in_turns(spaces: list[str], folder: Path, repeats: int, bucket_bytes: int) -> Any:
    """Publish as one rank of the trainer, or receive as one of the servers; rank 0 returns seconds by way."""
    import torch.distributed as dist
    from stage_servers import Servers, serve

    from megatron_rl.config import ParallelConfig
    from megatron_rl.weights.publish import GroupPublisher
    from tests.kit.models import make_engine

    rank = int(os.environ["RANK"])
    enter(spaces[host_of(rank)])
    os.environ |= {"MASTER_ADDR": address(0), "WORLD_SIZE": str(TRAINERS), "GLOO_SOCKET_IFNAME": "eth0"}
    store = dist.TCPStore(address(0), PORT, is_master=rank == 0, wait_for_workers=False)
    if rank >= TRAINERS:
        serve(store, rank - TRAINERS, None)
        return None
    engine = make_engine(folder, ParallelConfig(pipeline=TRAINERS // RANKS_OF_HOST, expert=2))
    engine.config.bucket_bytes = bucket_bytes
    servers = (
        Servers(store, SERVERS, host=address(TRAINERS // RANKS_OF_HOST), address=address(0)) if rank == 0 else None
    )
    alone = GroupPublisher(servers, bucket_bytes=bucket_bytes, backend="gloo")
    seconds: dict[str, list[float]] = {"one sender": [], "by stage": []}
    for number in range(repeats + 1):
        export = engine.export()
        alone.publish(export.specs, (pair for pair in export.stream_in_step() if pair[1] is not None), 7)
        engine.update_weights(servers, 7)
        for way, publisher in zip(seconds, (alone, engine.publisher), strict=True):
            if rank == 0:
                assert publisher.last.verified == SERVERS * len(export.specs)
                seconds[way] += [publisher.last.seconds] if number else []  # groups are formed in the first round
    alone.close()
    engine.publisher.close()
    if servers is not None:
        servers.end()
    return seconds, sum(spec.nbytes for spec in engine.export().specs)


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--mbit", type=int, default=400, help="of a trainer's host")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--hidden", type=int, default=256, help="size of the model, all of which grows with it")
    parser.add_argument("--bucket-mib", type=int, default=4)
    args = frame.arguments(parser, argv, repeats=1, hidden=64, bucket_mib=1)
    if os.geteuid() or not shutil.which("tc"):
        print("network namespaces need root and iproute2; nothing was measured")
        return
    from tests.kit.models import make_model
    from tests.kit.ranks import run_ranks

    sizes = {"hidden_size": args.hidden, "moe_intermediate_size": args.hidden, "num_hidden_layers": 8}
    with tempfile.TemporaryDirectory() as name, cluster(args.mbit) as spaces:
        machine = frame.Machine()
        make_model("qwen3_moe", Path(name), **sizes, num_experts=8, mlp_only_layers=[])
        arguments = (spaces, Path(name), args.repeats, args.bucket_mib << 20)
        (seconds, nbytes), *_ = run_ranks(TRAINERS + SERVERS, publish_in_turns, *arguments, timeout_s=600)
    print(f"{nbytes / 1e6:.1f} MB, pipeline 4, expert 2, {SERVERS} servers, links of {args.mbit} Mb/s; {machine}\n")
    print("| way | s (range) | MB/s |\n|---|---|---|")
    for way, taken in seconds.items():
        middle = statistics.median(taken)
        print(f"| {way} | {middle:.2f} ({min(taken):.2f}-{max(taken):.2f}) | {nbytes / middle / 1e6:.0f} |")
    ratio = statistics.median(one / each for one, each in zip(*seconds.values(), strict=True))
    print(f"\none sender takes {ratio:.1f} times as long (median over rounds)")


if __name__ == "__main__":
    frame.run(main)
