"""Lag of the event loop while many agents lead dialogues at once: the rollout process's loop is free for others.

    python benchmarks/bench_agents.py

`--agents` runs of an agent that asks three times, by the standard library's HTTP client, all of one episode and begun
at once, each in a process of its own. Replies come from an engine in this process that takes no time. A task sleeps for
a millisecond again and again: what it sleeps longer is the lag. Its 99th percentile is compared with `--limit-ms`. The
loop's own work in it, by its thread's CPU clock, stands beside it: the rest is other processes' doing.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import frame
import uvloop

from megatron_rl.agents import AgentWorkflow
from megatron_rl.api import Sampler
from megatron_rl.config import GenerationConfig
from megatron_rl.types import LLMRequest, LLMResponse

TURNS, TOKENS = 3, 16
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class AtOnce(Sampler):
    """An engine whose replies take no time."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.served = ids, 0

    def get_version(self) -> int:
        return 0

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        self.served += 1
        await asyncio.sleep(0)
        count = len(self.ids)
        return LLMResponse(
            input_tokens=req.input_ids,
            output_tokens=self.ids,
            output_logprobs=[-1.0] * count,
            output_versions=[0] * count,
            stop_reason="stop",
        )


async def lags(work: asyncio.Task[Any]) -> list[tuple[float, float]]:
    """Return the seconds by which sleeps of a millisecond were longer until the work was done, and the CPU in them."""
    found = []
    while not work.done():
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        await asyncio.sleep(0.001)
        found.append((time.perf_counter() - begin - 0.001, time.thread_time() - begin_cpu))
    return found


def p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[int(0.99 * len(ordered))]


async def measured(workflow: AgentWorkflow, engine: Sampler, prompt: dict[str, Any]) -> tuple[float, ...]:
    """Return the 99th percentiles of lag and own work, wall time and CPU of one episode, in seconds."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    work = asyncio.create_task(workflow.arun_episode(engine, prompt))
    lagged, own = zip(*await lags(work), strict=True)
    trajectories = await work
    assert trajectories is not None and all(one.sequence["turns"] == TURNS for one in trajectories)
    return p99(lagged), p99(own), time.perf_counter() - begin, time.process_time() - begin_cpu


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-ms", type=float, default=50.0)
    args = frame.arguments(parser, argv, agents=8, rounds=1, limit_ms=1000.0)
    sys.path.insert(0, str(frame.ROOT))  # for the agents' module, which their processes import
    from tests.kit.tokenizers import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    engine = AtOnce(tokenizer("It is 42, I think.")["input_ids"][:TOKENS])
    workflow = AgentWorkflow(
        lambda **_: 0.0,
        GenerationConfig(n_samples=args.agents, max_new_tokens=TOKENS),
        tokenizer,
        "tests.unit.trying_agents:asks",
        4096,
        agent_workers=args.agents,
    )
    prompt = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    print(f"{args.agents} agents of {TURNS} turns at once, {frame.Machine()}")

    async def rounds() -> list[tuple[float, ...]]:
        return [await measured(workflow, engine, prompt) for _ in range(args.rounds + 1)][1:]

    lag, own, wall, cpu = (statistics.median(column) for column in zip(*uvloop.run(rounds()), strict=True))
    workflow.workers.close()
    ratio, own_ms = lag * 1e3 / args.limit_ms, own * 1e3
    print(
        f"event loop: lag p99 {lag * 1e3:.1f} ms / {args.limit_ms:g} ms = {ratio:.2f}; its own work p99 {own_ms:.1f} ms"
    )
    print(f"{wall:.2f} s in all, {cpu / args.agents * 1e3:.1f} ms of this process's CPU for an agent")
    if lag * 1e3 > args.limit_ms:
        raise SystemExit("over the limit")


if __name__ == "__main__":
    frame.run(main)
