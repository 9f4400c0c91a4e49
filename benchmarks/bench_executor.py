"""What the rollout process sustains, in requests per second, and what it costs the trainer: a step's slow-down.

    python benchmarks/bench_executor.py

A null server in a process of its own answers every request at once with the same tokens. Each of trainer and rollout
process has a core of its own. First rows: the rollout process with the real executor, client, journal and workflow (8
samples a prompt, tokenised and decoded, a reward function for each) as fast as it goes, for replies of 32 tokens and of
32,768, in requests per second and per second of its CPU time. The server is on the trainer's core meanwhile.

Next: the memory that a whole reply takes which waits for others, by what the process grows with many of them. Then many
requests whose replies are cut off together, as by an abort, each at half of 32,768 tokens. The lag is for how long an
event of a random moment in that time waits for the client's loop, in CPU time of the loop's thread.

Last: one training step of a real engine with and without `--rates` requests per second beside it, in turns; the
slow-down is the median over pairs, of time and of the trainer's CPU time. The server is on the rollout process's core
then, and that process's share of it stands beside it.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import frame
import orjson
import psutil
import uvloop

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "configs/models/count_tiny"
SAMPLES, REPLY_TOKENS, LONG = 8, 32, 32_768


class NullServer(asyncio.Protocol):
    """HTTP/1.1 with nothing behind it: one prepared answer per path.

    After /hold requests wait, until /release?within=SECONDS gives all of them half of a reply.
    """

    held: list[asyncio.Transport] | None = None

    def __init__(self, answers: dict[bytes, bytes], half: bytes) -> None:
        self.answers, self.half, self.other, self.buffer = answers, half, response(b"{}"), b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            if len(self.buffer) < end + 4 + size:
                return
            self.buffer = self.buffer[end + 4 + size :]
            path = head.split(b" ", 2)[1]
            if path == b"/hold":
                NullServer.held = []
            if path.startswith(b"/release"):
                held, NullServer.held = NullServer.held, None
                pause_s, loop = float(path.rpartition(b"=")[2]) / len(held), asyncio.get_running_loop()
                for number, transport in enumerate(held):
                    loop.call_later(number * pause_s, transport.write, self.half)
            if path == b"/generate" and NullServer.held is not None:
                NullServer.held.append(self.transport)
            elif path == b"/held":
                self.transport.write(response(b"%d" % len(NullServer.held)))
            else:
                self.transport.write(self.answers.get(path, self.other))


def reply(count: int, finish: dict[str, object]) -> bytes:
    """As SGLang's JSON: log-probabilities are float32, and words have four characters."""
    rng = random.Random(count)
    logprobs = array.array("f", (-rng.expovariate(1.0) for _ in range(count)))
    tokens = [2 + number % 40 for number in range(count)]
    meta = {"finish_reason": finish, "completion_tokens": count, "weight_version": "0"}
    meta |= {"weight_versions": [{"version": "0", "start": 0, "end": count}]}
    meta |= {"output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]}
    return response(orjson.dumps({"text": "abc " * count, "output_ids": tokens, "meta_info": meta}))


def response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def serve(tokens: int) -> None:
    info = {"version": "0.5.23", "tp_size": 1, "dp_size": 1, "context_length": 100_000, "vocab_size": 48}
    whole = reply(tokens, {"type": "length", "length": tokens})
    answers = {b"/generate": whole, b"/server_info": response(orjson.dumps(info))}
    half = reply(tokens // 2, {"type": "abort", "message": "Aborted"})
    server = await asyncio.get_running_loop().create_server(lambda: NullServer(answers, half), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


class Rollout:
    """The rollout process of a trainer, on core `core`, with a null server behind it."""

    def __init__(self, port: int, folder: Path, core: int, tokens: int) -> None:
        from megatron_rl.config import load_config
        from megatron_rl.data.prompts import load_prompts
        from megatron_rl.data.tokens import load_tokenizer
        from megatron_rl.rollout.process import RolloutProcess
        from megatron_rl.rollout.resume_state import ResumePoint
        from megatron_rl.rollout.rollout_rank import Beginning

        overrides = [f"model.path={MODEL}", f"run.folder={folder}", f"generation.n_samples={SAMPLES}"]
        overrides += [f"generation.max_new_tokens={tokens}", "rollout.max_concurrent_episodes=32"]
        config = load_config(ROOT / "configs/count_grpo.yaml", overrides)
        self.process = RolloutProcess(folder / "rollout.log", on_death=print)
        self.pid = self.process.process.pid
        os.sched_setaffinity(self.pid, {core})  # before it has threads
        prompts = load_prompts(config.data.train, config.data.train_args, key="data.train")
        point = ResumePoint(rank=0, ranks=1, run_attempt=1, fingerprint="", resumed=None)
        here = {"prompts": prompts, "held_out": prompts[:1], "sys_path": sys.path}
        self.process.begin(Beginning(config=config, tokenizer=load_tokenizer(str(MODEL)), resume_point=point, **here))
        self.process.connect([f"http://127.0.0.1:{port}"])

    def send(self, requests: int) -> None:
        from megatron_rl.rollout.rollout_rank import RolloutRank

        assert len(self.process.rpc.start(RolloutRank.prepare_batch, requests // SAMPLES).result()) == requests

    def cpu_s(self) -> float:
        used = psutil.Process(self.pid).cpu_times()
        return used.user + used.system


@contextlib.contextmanager
def null_server(tokens: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(tokens)], stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        yield server, int(server.stdout.readline())
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def rollout_process(port: int, core: int, tokens: int) -> Iterator[Rollout]:
    with tempfile.TemporaryDirectory() as folder:
        rollout = Rollout(port, Path(folder), core, tokens)
        try:
            yield rollout
        finally:
            rollout.process.close()


def throughput(rollout: Rollout, rounds: int, requests: int) -> tuple[float, float]:
    """Requests per second of time, and per second of its CPU time: medians over rounds of so many."""
    rates = []
    for _ in range(rounds + 1):
        begin, begin_cpu = time.perf_counter(), rollout.cpu_s()
        rollout.send(requests)
        rates.append((requests / (time.perf_counter() - begin), requests / (rollout.cpu_s() - begin_cpu)))
    return statistics.median(rate for rate, _ in rates[1:]), statistics.median(rate for _, rate in rates[1:])


async def held_bytes(port: int, count: int, tokens: int) -> float:
    """Return what a client's process grows by with each reply that it holds."""
    async with sampling_client(port) as client:
        held = [await ask(client, number, tokens) for number in range(8)]
        before = psutil.Process().memory_info().rss
        held += [await ask(client, number, tokens) for number in range(count)]
        return (psutil.Process().memory_info().rss - before) / count


async def burst(port: int, requests: int, tokens: int, within_s: float) -> tuple[float, float, float]:
    """Have so many replies cut off at half of their tokens within some time.

    Returns the seconds until all are read, the loop's lag that 1 % of moments exceed, and its longest.
    """
    import aiohttp

    url, loop = f"http://127.0.0.1:{port}", asyncio.get_running_loop()
    gaps: list[float] = []

    async def beat() -> None:
        # In the time that the loop's thread computes: what others on the machine take is not the client's.
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            gaps.append(time.thread_time() - began)

    async with sampling_client(port) as client, aiohttp.ClientSession() as session:
        await (await session.post(f"{url}/hold")).read()
        asked = [asyncio.create_task(ask(client, number, tokens // 2)) for number in range(requests)]
        while int(await (await session.get(f"{url}/held")).read()) < requests:
            await asyncio.sleep(0.1)
        beating, began = asyncio.create_task(beat()), loop.time()
        await (await session.post(f"{url}/release?within={within_s}")).read()
        await asyncio.gather(*asked)
        seconds = loop.time() - began
        beating.cancel()
    return seconds, exceeded(gaps, 0.01), max(gaps)


@contextlib.asynccontextmanager
async def sampling_client(port: int):
    from megatron_rl.config import RolloutConfig
    from megatron_rl.servers.generate import SamplingClient

    client = SamplingClient(RolloutConfig())
    await client.connect([f"http://127.0.0.1:{port}"])
    yield client
    await client.close()


def ask(client, number: int, tokens: int):
    from megatron_rl.config import GenerationConfig
    from megatron_rl.types import LLMRequest

    options = GenerationConfig(max_new_tokens=tokens)
    return client.agenerate(LLMRequest(rid=str(number), input_ids=[2, 3, 4], gconfig=options))


def exceeded(gaps: list[float], share: float) -> float:
    """Return the lag that so large a share of moments exceeds: a gap of L has lags from L down to 0."""
    low, high = 0.0, max(gaps)
    for _ in range(50):
        middle = (low + high) / 2
        above = sum(max(gap - middle, 0.0) for gap in gaps) / sum(gaps)
        low, high = (middle, high) if above > share else (low, middle)
    return low


def make_step(trained_tokens: int):
    """Return a function that takes one training step of a real engine."""
    import torch

    from megatron_rl import parallel
    from megatron_rl.algo.loss import PolicyLoss
    from megatron_rl.api import LogprobLoss
    from megatron_rl.config import AlgorithmConfig, EngineConfig, ModelConfig, ParallelConfig
    from megatron_rl.engine.megatron_engine import MegatronEngine
    from megatron_rl.types import FinetuneSpec, TrajectoryBatch

    groups = parallel.start(ParallelConfig(), seed=1)
    config = EngineConfig(model=ModelConfig(path=str(MODEL), init="random"), tokens_per_microbatch=trained_tokens)
    engine = MegatronEngine(config, groups=groups)
    engine.initialize(None, FinetuneSpec(total_updates=10**6))
    length, count = 64, trained_tokens // 64
    ids = torch.arange(trained_tokens) % 46 + 2
    mask = torch.arange(trained_tokens) % length >= 16
    tokens = {"input_ids": ids, "loss_mask": mask, "versions": torch.zeros_like(ids)}
    tokens |= {key: torch.full((len(ids),), -3.5) for key in ("logprobs", "proximal_logprobs")}
    tokens["advantages"] = torch.ones(len(ids))
    batch = TrajectoryBatch(tokens, {"group": torch.arange(count)}, torch.arange(0, len(ids) + 1, length))
    loss = LogprobLoss(PolicyLoss(AlgorithmConfig()))
    return lambda: engine.train_batch(batch, loss)


def slow_down(rollout: Rollout, step, rate: float, pairs: int, watched_s: float) -> tuple[float, float, float, float]:
    """Compare steps alone with steps beside `rate` requests/s.

    Returns the median seconds of one alone, by how much the others are slower and take more of this process's CPU time,
    and the rollout process's share of its core.
    """
    is_on, stop = threading.Event(), threading.Event()

    def send() -> None:
        while not stop.is_set():
            if is_on.wait(0.1):
                begin = time.monotonic()
                rollout.send(SAMPLES)
                time.sleep(max(0.0, SAMPLES / rate - (time.monotonic() - begin)))

    sender = threading.Thread(target=send)
    sender.start()
    alone, slower, dearer = [], [], []
    for number in range(pairs + 1):
        seconds, cpu_s = {}, {}
        for beside in (False, True) if number % 2 else (True, False):
            (is_on.set if beside else is_on.clear)()
            time.sleep(0.1)
            begin, begin_cpu = time.perf_counter(), time.process_time()
            for _ in range(3):
                step()
            seconds[beside], cpu_s[beside] = (time.perf_counter() - begin) / 3, time.process_time() - begin_cpu
        alone.append(seconds[False])
        slower.append(seconds[True] / seconds[False])
        dearer.append(cpu_s[True] / cpu_s[False])
    is_on.set()
    begin, begin_cpu = time.perf_counter(), rollout.cpu_s()
    time.sleep(watched_s)
    cores = (rollout.cpu_s() - begin_cpu) / (time.perf_counter() - begin)
    stop.set()
    sender.join()
    return statistics.median(alone[1:]), statistics.median(slower[1:]) - 1, statistics.median(dearer[1:]) - 1, cores


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="*", default=[100.0], help="requests/s beside the step")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = frame.arguments(parser, argv, rounds=1, pairs=1)
    trained_tokens, watched_s = (256, 0.2) if args.quick else (16_384, 5.0)
    lengths = {REPLY_TOKENS: 64, 256: 16} if args.quick else {REPLY_TOKENS: 4096, LONG: 256}
    if args.serve:
        return uvloop.run(serve(args.serve))
    machine, (own_core, other_core) = frame.Machine(), sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {own_core})
    os.environ["OMP_NUM_THREADS"] = "1"
    print(machine)
    for tokens, requests in lengths.items():
        with null_server(tokens) as (server, port), rollout_process(port, other_core, tokens) as rollout:
            per_s, per_cpu_s = throughput(rollout, args.rounds, requests)
            print(f"{SAMPLES} samples a prompt, {tokens} tokens a reply, a null server: ", end="")
            print(f"{per_s:.1f} requests/s, {per_cpu_s:.1f} per second of CPU time", flush=True)
    tokens, requests = max(lengths), 16 if args.quick else 1024
    with null_server(tokens) as (server, port):
        os.sched_setaffinity(server.pid, {other_core})
        size = uvloop.run(held_bytes(port, requests // 4, tokens))
        print(f"a reply of {tokens} tokens that is held takes {size / 1e6:.2f} MB", flush=True)
        for within_s in (0.0, 1.0):
            seconds, lag, longest = uvloop.run(burst(port, requests, tokens, within_s))
            print(
                f"{requests} replies cut off at {tokens // 2} tokens within {within_s:g} s: read in {seconds:.1f} s, ",
                end="",
            )
            print(f"lag {lag * 1000:.0f} ms but for 1 % of the time, {longest * 1000:.0f} ms at worst", flush=True)
    if args.rates:
        with null_server(REPLY_TOKENS) as (server, port), rollout_process(port, other_core, REPLY_TOKENS) as rollout:
            os.sched_setaffinity(server.pid, {other_core})
            step = make_step(trained_tokens)
            for rate in args.rates:
                seconds, slower, dearer, cores = slow_down(rollout, step, rate, args.pairs, watched_s)
                print(f"a step of {seconds * 1000:.0f} ms beside {rate:.0f} requests/s: {slower:+.1%}, ", end="")
                print(f"{dearer:+.1%} of its CPU time, ", end="")
                print(f"which take {cores:.1%} of the other core", flush=True)


if __name__ == "__main__":
    frame.run(main)
