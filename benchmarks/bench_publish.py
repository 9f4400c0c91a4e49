"""Publishing the weights of SmolLM2-135M from the trainer to embedded servers on this machine, beside a bare broadcast.

    python benchmarks/bench_publish.py              # one and two servers
    python benchmarks/bench_publish.py --servers 1 --repeats 5

The ways take turns in every round, and medians are over rounds. `bare broadcast` sends the same bytes in as many pieces
as there are buckets to as many processes that do nothing else, over the same kind of group and with nothing gathered,
loaded or checked. `publication` is the whole of it: from the shards in Megatron-Core's layout to the servers' word that
every tensor arrived. `without checksums` has neither side take any. `a tensor at a time` is a bucket, that is a request
and a broadcast, for each tensor. `one after the other` fills a bucket only once the last one has arrived. `disk` writes
safetensors, fsynced, and has the servers load them. Extra memory is how far the trainer's resident memory rises.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rollout_server import commit, cpu_name

from megatron_rl.config import EngineConfig, ModelConfig, RolloutConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.rollout.sglang import RemoteSGLangEngine
from megatron_rl.serving.supervisor import KEEP_FREED_MEMORY, free_port
from megatron_rl.update_group import join_update_group
from megatron_rl.weights.publish import DiskPublisher, GroupPublisher, Publication, plan_buckets

MODEL = Path(__file__).parents[1] / "models" / "smollm2-135m-instruct"
# A server that never takes a checksum, to measure what taking them costs.
UNCHECKED = (
    "from megatron_rl.serving import model, server; "
    "model.Decoder.take_checksum = lambda self, name: None; model.Decoder.checksums = lambda self: {}; server.main()"
)


class Unchecked(RemoteSGLangEngine):
    """A client that has nothing to compare checksums with."""

    def checksum_forms(self):
        return dict.fromkeys(super().checksum_forms())


class OneAfterTheOther(GroupPublisher):
    """Waits for a bucket before it fills the next."""

    def _ship(self, specs, flat):
        shipment = super()._ship(specs, flat)
        self._complete(shipment)
        return shipment


@contextmanager
def servers(count: int, folder: Path, *, checked: bool) -> Iterator[list[str]]:
    """Start embedded servers; yield their URLs."""
    started, environment = [], os.environ | KEEP_FREED_MEMORY | {"OMP_NUM_THREADS": "1"}
    for number in range(count):
        ready = folder / f"{'checked' if checked else 'unchecked'}-{number}.url"
        start = ["-m", "megatron_rl.serving.server"] if checked else ["-c", UNCHECKED]
        options = [str(MODEL), "--port", "0", "--ready-file", str(ready), "--load-format", "dummy"]
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


def rise_of_memory(act: Callable[[], None]) -> int:
    """Bytes by which this process's resident memory rises above where it was while `act` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = resident("VmRSS")
    act()
    return resident("VmHWM") - before


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:"))) * 1024


def row(name: str, nbytes: int, seconds: list[float], bare: float, *rest: str) -> str:
    middle = statistics.median(seconds)
    spread = f"{min(seconds):.3f}-{max(seconds):.3f}"
    return (
        f"| {name} | {middle:.3f} ({spread}) | {nbytes / middle / 1e9:.2f} | {bare / middle:.0%} | {' | '.join(rest)} |"
    )


def measure(engine: MegatronEngine, count: int, repeats: int, bucket_bytes: int, folder: Path) -> None:
    specs = engine.export().specs
    buckets = [sum(spec.nbytes for spec in bucket) for bucket in plan_buckets(specs, bucket_bytes)]
    nbytes = sum(buckets)
    config = RolloutConfig()
    with (
        servers(count, folder, checked=True) as checked,
        servers(count, folder, checked=False) as unchecked,
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
            "disk": DiskPublisher(client, folder=folder / "published", model_folder=str(MODEL)),
        }
        taken: dict[str, list[Publication]] = {name: [] for name in ways}
        rises: dict[str, int] = {}
        broadcasts: list[float] = []
        for number in range(repeats + 1):
            broadcasts.append(bare())
            for name, publisher in ways.items():
                publish = lambda publisher=publisher, number=number: publisher.publish(  # noqa: E731
                    specs, engine.hf_tensors(), number
                )
                rises[name] = rise_of_memory(publish)
                taken[name].append(publisher.last)
        bare_s = statistics.median(broadcasts[1:])  # in the first round groups are formed and memory is touched first
        print(
            f"\n{count} server(s): {nbytes / 1e6:.1f} MB, {len(specs)} tensors, {len(buckets)} buckets of at most "
            f"{bucket_bytes / 2**20:.0f} MiB, {repeats} rounds\n"
        )
        print("| way | s (range) | GB/s | of bare | servers stood still, s | extra MiB (buckets) | verified |")
        print("|---|---|---|---|---|---|---|")
        print(row("bare broadcast", nbytes, broadcasts[1:], bare_s, "", "", ""))
        for name, publications in taken.items():
            still = statistics.median(publication.paused_s for publication in publications[1:])
            rise = f"{rises[name] / 2**20:.0f} ({rises[name] / max(buckets):.1f})"
            verified = f"{publications[-1].verified} of {count * len(specs)}"
            print(row(name, nbytes, [p.seconds for p in publications[1:]], bare_s, f"{still:.3f}", rise, verified))
        pairs = zip(taken["publication"][1:], taken["without checksums"][1:], strict=True)
        costs = [with_.seconds / without.seconds - 1 for with_, without in pairs]
        print(f"\nchecksums add {statistics.median(costs):.1%} to a publication (median over rounds)")
        for publisher in ways.values():
            publisher.close()
        client.destroy()
        careless.destroy()


def main() -> None:
    parser = argparse.ArgumentParser("bench_publish", description="Weight publication beside a bare broadcast.")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=11, help="rounds after the first, which is not counted")
    parser.add_argument("--bucket-mib", type=int, default=EngineConfig.bucket_bytes // 2**20)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    engine = MegatronEngine(EngineConfig(model=ModelConfig(path=str(MODEL))), trainable=False)
    engine.initialize()
    print(
        f"SmolLM2-135M float32, {os.cpu_count()} cores of {cpu_name()}, torch {torch.__version__}, gloo over the "
        f"loopback, commit {commit()}, load before {load:.1f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for count in args.servers:
            measure(engine, count, args.repeats, args.bucket_mib * 2**20, Path(folder))
    engine.destroy()


if __name__ == "__main__":
    main()
