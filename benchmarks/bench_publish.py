"""Publishing the weights of SmolLM2-135M from the trainer to embedded servers on this machine, beside a bare broadcast.

    python benchmarks/bench_publish.py              # one and two servers
    python benchmarks/bench_publish.py --servers 1 --repeats 5

The ways take turns in every round, and medians are over rounds. `bare broadcast` sends the same bytes in as many pieces
as there are buckets to as many processes that do nothing else, over the same kind of group and with nothing gathered,
loaded or checked. `publication` is the whole of it: from the shards in Megatron-Core's layout to the servers' word that
every tensor arrived. `without checksums` has neither side take any. `a tensor at a time` is a bucket, that is a request
and a broadcast, for each tensor. `one after the other` fills a bucket only once the last one has arrived. `ipc` shows
the servers buckets in shared memory. `disk` writes safetensors, fsynced, and has the servers load them. Extra memory is
what the trainer allocates beyond what it had, in a round of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import frame
import torch
import torch.distributed as dist

from megatron_rl.config import EngineConfig, ModelConfig, RolloutConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.launch.ports import free_port
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers.server_process import KEEP_FREED_MEMORY
from megatron_rl.weights.ipc import IPCPublisher
from megatron_rl.weights.publish import DiskPublisher, GroupPublisher, Publication, plan_buckets
from megatron_rl.weights.update_group import join_update_group

MODEL = Path(__file__).parents[1] / "models" / "smollm2-135m-instruct"
# A server that never takes a checksum, to measure what taking them costs.
UNCHECKED = (
    "from megatron_rl.tools.embedded_server import server, transformer; "
    "transformer.checksum = lambda tensor: ''; transformer.Decoder.checksums = lambda self: {}; server.main()"
)


class Unchecked(RemoteSGLangEngine):
    """A client that has nothing to compare checksums with."""

    def checksum_forms(self):
        return dict.fromkeys(self.service.checksum_forms())


class OneAfterTheOther(GroupPublisher):
    """Waits for a bucket before it fills the next."""

    def _ship(self, number, pieces):
        shipment = super()._ship(number, pieces)
        super()._complete(shipment)
        return shipment

    def _complete(self, shipment):
        pass


@contextmanager
def servers(count: int, model: Path, folder: Path, *, checked: bool) -> Iterator[list[str]]:
    """Start embedded servers; yield their URLs."""
    started, environment = [], os.environ | KEEP_FREED_MEMORY | {"OMP_NUM_THREADS": "1"}
    for number in range(count):
        ready = folder / f"{'checked' if checked else 'unchecked'}-{number}-of-{count}.url"
        start = ["-m", "megatron_rl.tools.embedded_server.server"] if checked else ["-c", UNCHECKED]
        options = [str(model), "--port", "0", "--ready-file", str(ready), "--load-format", "dummy"]
        options += ["--token-file", str(folder / "token")]
        command = [sys.executable, *start, *options, "--parent-pid", str(os.getpid())]
        started.append((subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL), ready))
    try:
        while not all(ready.exists() for _, ready in started):
            time.sleep(0.1)
        yield [ready.read_text() for _, ready in started]
    finally:
        for process, _ in started:
            process.terminate()
        for process, _ in started:
            process.wait()


@contextmanager
def bare_broadcast(receivers: int, sizes: list[int]) -> Iterator[Callable[[], float]]:
    """Fork processes that receive pieces of these sizes; yield a function that sends them all and returns seconds."""
    port, pids = free_port("127.0.0.1"), []
    where = {"address": "127.0.0.1", "port": port, "world_size": 1 + receivers, "name": f"bare-{port}"}
    for rank in range(1, 1 + receivers):
        pid = os.fork()
        if pid == 0:
            group = join_update_group(rank=rank, **where)
            piece = torch.empty(max(sizes), dtype=torch.uint8)
            while True:
                for size in sizes:
                    dist.broadcast(piece[:size], group=group, group_src=0)
                dist.barrier(group)
        pids.append(pid)
    group = join_update_group(rank=0, **where)
    piece = torch.ones(max(sizes), dtype=torch.uint8)

    def send() -> float:
        started = time.perf_counter()
        for size in sizes:
            dist.broadcast(piece[:size], group=group, group_src=0)
        dist.barrier(group)
        return time.perf_counter() - started

    try:
        yield send
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`; `hblkhd` and `uordblks` are the bytes in use."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def bytes_in_use() -> int:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Heap
    heap = mallinfo()
    return heap.hblkhd + heap.uordblks


def rise_of_memory(act: Callable[[], None]) -> int:
    """Most bytes that this process has allocated while `act` runs beyond those from before. Memory that was freed and
    kept for later counts only once it is used again."""
    before = most = bytes_in_use()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, bytes_in_use())

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    done.set()
    watcher.join()
    return most - before


def row(name: str, nbytes: int, seconds: list[float], bare: float, *rest: str) -> str:
    middle = statistics.median(seconds)
    spread = f"{min(seconds):.3f}-{max(seconds):.3f}"
    return (
        f"| {name} | {middle:.3f} ({spread}) | {nbytes / middle / 1e9:.2f} | {bare / middle:.0%} | {' | '.join(rest)} |"
    )


def measure(engine: MegatronEngine, model: Path, count: int, repeats: int, bucket_bytes: int, folder: Path) -> None:
    specs = engine.export().specs
    buckets = [sum(spec.nbytes for spec in bucket) for bucket in plan_buckets(specs, bucket_bytes)]
    nbytes = sum(buckets)
    config = RolloutConfig(token_file=str(folder / "token"))
    with (
        servers(count, model, folder, checked=True) as checked,
        servers(count, model, folder, checked=False) as unchecked,
        bare_broadcast(count, buckets) as bare,
    ):
        client, careless = RemoteSGLangEngine(config), Unchecked(config)
        client.initialize(checked)
        careless.initialize(unchecked)
        group = {"bucket_bytes": bucket_bytes, "backend": "gloo"}
        ways = {
            "publication": GroupPublisher(client, **group),
            "without checksums": GroupPublisher(careless, **group),
            "one after the other": OneAfterTheOther(client, **group),
            "a tensor at a time": GroupPublisher(client, bucket_bytes=1, backend="gloo"),
            "ipc": IPCPublisher(client, bucket_bytes=bucket_bytes),
            "disk": DiskPublisher(client, folder=folder / "published", model_folder=str(model)),
        }
        taken: dict[str, list[Publication]] = {name: [] for name in ways}
        rises: dict[str, int] = {}
        broadcasts: list[float] = []
        for name, publisher in ways.items():  # groups are formed, memory is touched for the first time
            publish = functools.partial(publisher.publish, specs)
            bare()
            publish(engine.hf_tensors(), 0)
            rises[name] = rise_of_memory(lambda publish=publish: publish(engine.hf_tensors(), 0))
        for number in range(1, repeats + 1):
            broadcasts.append(bare())
            for name, publisher in ways.items():
                publisher.publish(specs, engine.hf_tensors(), number)
                taken[name].append(publisher.last)
        bare_s = statistics.median(broadcasts)
        print(
            f"\n{count} server(s): {nbytes / 1e6:.1f} MB, {len(specs)} tensors, {len(buckets)} buckets of at most "
            f"{bucket_bytes / 2**20:.0f} MiB, {repeats} rounds\n"
        )
        print("| way | s (range) | GB/s | of bare | servers stood still, s | extra MiB (buckets) | verified |")
        print("|---|---|---|---|---|---|---|")
        print(row("bare broadcast", nbytes, broadcasts, bare_s, "", "", ""))
        for name, publications in taken.items():
            still = statistics.median(publication.paused_s for publication in publications)
            rise = f"{rises[name] / 2**20:.0f} ({rises[name] / bucket_bytes:.1f})"
            verified = f"{publications[-1].verified} of {count * len(specs)}"
            print(row(name, nbytes, [p.seconds for p in publications], bare_s, f"{still:.3f}", rise, verified))
        pairs = zip(taken["publication"], taken["without checksums"], strict=True)
        costs = [with_.seconds / without.seconds - 1 for with_, without in pairs]
        print(f"\nchecksums add {statistics.median(costs):.1%} to a publication (median over rounds)")
        for publisher in ways.values():
            publisher.close()
        client.destroy()
        careless.destroy()


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=11, help="rounds")
    parser.add_argument("--bucket-mib", type=int, default=EngineConfig.bucket_bytes // 2**20)
    args = frame.arguments(parser, argv, servers=[1], repeats=1, bucket_mib=1)
    with frame.model_of(args, MODEL) as model:
        compare(model, args)


def compare(model: Path, args: argparse.Namespace) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    machine = frame.Machine()
    engine = MegatronEngine(EngineConfig(model=ModelConfig(path=str(model))), trainable=False)
    engine.initialize()
    print(f"{model.name} float32, {machine.cores}, torch {torch.__version__}, gloo over the loopback, {machine.state}")
    with tempfile.TemporaryDirectory() as folder:
        for count in args.servers:
            measure(engine, model, count, args.repeats, args.bucket_mib * 2**20, Path(folder))
    engine.destroy()


if __name__ == "__main__":
    frame.run(main)
