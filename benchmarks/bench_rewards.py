"""Rewards per second: the reward service's worker processes beside a pool of threads.

    python benchmarks/bench_rewards.py

One event loop, as a rollout process has it, asks for the rewards of `--replies` replies of 32 tokens, 256 at a time:
`last_number` of 100 characters, of 10,000 characters, and a function that computes for a millisecond. By the service
with each number of workers, and by asyncio.to_thread. Seconds of CPU are those of the loop's own process, per reward:
what is left of it is for requests. Medians over rounds, after one that warms up. Last: programs run by the code reward.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import frame
import uvloop

from megatron_rl.config.import_path import resolve
from megatron_rl.rewards.reward_service import RewardService

AT_ONCE = 256
LAST_NUMBER = "megatron_rl.rewards:last_number"
CASES = [
    ("last_number, 100 characters", LAST_NUMBER, {"completions": "it is 42. " * 10, "answer": "42"}),
    ("last_number, 10,000 characters", LAST_NUMBER, {"completions": "it is 42. " * 1000, "answer": "42"}),
    ("1 ms of computing", "bench_rewards:compute", {"completions": "42"}),
]
PROGRAM = {"completions": "print(int(input()) + 1)", "tests": [{"input": "1", "output": "2"}]}


def compute(seconds: float = 1e-3, **_: Any) -> float:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(100))
    return 1.0


async def rate(score: Callable[[dict[str, Any]], Awaitable[Any]], data: dict[str, Any], replies: int, rounds: int):
    """Return rewards per second, and this process's microseconds of CPU for one: medians."""
    arguments = {"prompt": "What is 40 + 2?", "prompt_ids": list(range(32)), "completion_ids": list(range(32)), **data}
    slots, measured = asyncio.Semaphore(AT_ONCE), []

    async def one() -> None:
        async with slots:
            await score(arguments)

    for _ in range(rounds + 1):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one() for _ in range(replies)))
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
        measured.append((replies / seconds, cpu_s / replies * 1e6))
    return tuple(statistics.median(column) for column in zip(*measured[1:], strict=True))


def line(case: str, how: str, measured: tuple[float, ...]) -> None:
    print(f"{case:<32} {how:<22} {measured[0]:>10.0f} {measured[1]:>12.0f}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--replies", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    args = frame.arguments(parser, argv, replies=16, rounds=1, workers=[1])
    print(frame.Machine())
    print(f"{'':<32} {'':<22} {'rewards/s':>10} {'own CPU us':>12}")
    for case, path, data in CASES:
        function = resolve(path, key="reward", kind="reward", import_from=None)
        in_a_thread = lambda arguments, function=function: asyncio.to_thread(function, **arguments)  # noqa: E731
        line(case, "threads", uvloop.run(rate(in_a_thread, data, args.replies, args.rounds)))
        for workers in args.workers:
            measured = served(path, data, workers, args.replies, args.rounds)
            line(case, f"service, {workers} worker(s)", measured)
    path = "megatron_rl.rewards.code:program_output"
    line("code, one test", f"service, {max(args.workers)} worker(s)", served(path, PROGRAM, max(args.workers), 64, 1))


def served(path: str, data: dict[str, Any], workers: int, replies: int, rounds: int) -> tuple[float, ...]:
    service = RewardService([("reward", path, {})], workers=workers)
    try:
        return uvloop.run(rate(lambda arguments: service.call(arguments, 60.0), data, replies, rounds))
    finally:
        service.close()


if __name__ == "__main__":
    frame.run(main)
