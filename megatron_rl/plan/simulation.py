"""A run's steps as events: servers that decode, a gate that admits by staleness, and a trainer that waits for groups.

The loop is that of train.py: wait for a step's groups, update, pause the servers and publish, go on. A publication puts
replies under way back; they go on after their tokens were read again. Nothing here knows a GPU: seconds are given.
benchmarks/bench_async.py compares it with the real loop.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is simulated. Times are seconds."""

    servers: int
    slots: int
    """Replies that a server decodes at a time; others wait in its queue."""
    token_s: Callable[[float, float], float]
    """(replies in the batch, mean tokens that each has) -> time for one token of each."""
    read_s: float
    """Of a token that is read and not generated: a prompt's, or a reply's after an interruption."""
    prompt_tokens: float
    groups: Iterator[list[int]]
    """The lengths of each group's replies, endlessly."""
    groups_per_step: int
    groups_at_once: int
    """With servers at most."""
    max_staleness: int
    update_s: float
    publish_s: float
    """The servers stand still."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Means over the measured steps, per step; busy and slots are shares of the time, over all servers."""

    step_s: float
    wait_s: float
    """The trainer waits for groups."""
    tokens: float
    busy: float
    """Of the time in which a server decodes or reads anything."""
    slots: float
    """Of the slots' time in which there is a reply in them."""


class _Server:
    """Counts tokens: a reply that starts at count c with n tokens to come is done at count c + n."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.now = self.count = self.stall_s = self.token_s = 0.0
        self.tokens = 0.0
        """Of all running replies, with their prompts."""
        self.busy_s = self.slot_s = 0.0
        self.running: list[tuple[float, int, int, int]] = []
        """(count at the end, number, group, length), a heap."""
        self.queue: deque[tuple[int, int, int]] = deque()
        """(number, group, length)."""

    @property
    def load(self) -> int:
        return len(self.running) + len(self.queue)

    @property
    def ends_at(self) -> float:
        """When the next reply is done."""
        if not self.running:
            return float("inf")
        return self.now + self.stall_s + (self.running[0][0] - self.count) * self.token_s

    def advance(self, now: float) -> None:
        past, self.now = now - self.now, now
        if not self.running:
            return
        self.busy_s += past
        self.slot_s += past * len(self.running)
        decoding = max(0.0, past - self.stall_s)
        self.stall_s = max(0.0, self.stall_s - past)
        self.count += decoding / self.token_s
        self.tokens += decoding / self.token_s * len(self.running)

    def finish(self) -> int:
        """Take out the reply that is done now; return its group."""
        self.count, _, group, length = heapq.heappop(self.running)
        self.tokens -= length + self.work.prompt_tokens
        return group

    def fill(self) -> None:
        """Start what waits while there are slots, and look at the batch anew."""
        while self.queue and len(self.running) < self.work.slots:
            number, group, length = self.queue.popleft()
            heapq.heappush(self.running, (self.count + length, number, group, length))
            self.tokens += self.work.prompt_tokens
            self.stall_s += self.work.read_s * self.work.prompt_tokens
        if self.running:
            count = len(self.running)
            halfway = self.tokens / count + (self.running[0][0] - self.count) / 2
            self.token_s = self.work.token_s(count, halfway)

    def interrupt(self) -> None:
        """All running replies are read again."""
        self.stall_s = self.work.read_s * self.tokens


class _Run:
    def __init__(self, work: Workload) -> None:
        self.work, self.now, self.version = work, 0.0, 0
        self.servers = [_Server(work) for _ in range(work.servers)]
        self.left: dict[int, int] = {}
        """Replies to come of each group that is with servers."""
        self.sizes: dict[int, int] = {}
        self.done: list[int] = []
        """Groups that are complete, by number: the older first."""
        self.started = 0
        self.numbers = itertools.count()

    def admit(self) -> None:
        work = self.work
        most = (work.max_staleness + self.version + 1) * work.groups_per_step
        while self.started < most and len(self.left) < work.groups_at_once:
            lengths = next(work.groups)
            self.left[self.started], self.sizes[self.started] = len(lengths), sum(lengths)
            for length in lengths:
                server = min(self.servers, key=lambda server: server.load)
                server.advance(self.now)
                server.queue.append((next(self.numbers), self.started, length))
                server.fill()
            self.started += 1

    def go_on(self, until: float, groups: int | None = None) -> None:
        """Let the servers work until a time, or until so many groups are done."""
        while groups is None or len(self.done) < groups:
            server = min(self.servers, key=lambda server: server.ends_at)
            if server.ends_at > until:
                break
            self.now = server.ends_at
            server.advance(self.now)
            group = server.finish()
            server.fill()
            self.left[group] -= 1
            if self.left[group] == 0:
                del self.left[group]
                heapq.heappush(self.done, group)
                self.admit()
        else:
            return
        self.now = until
        for server in self.servers:
            server.advance(until)

    def step(self) -> tuple[float, int]:
        """Return how long the trainer waited, and the step's tokens."""
        work, began = self.work, self.now
        self.admit()
        self.go_on(float("inf"), work.groups_per_step)
        waited = self.now - began
        tokens = sum(self.sizes.pop(heapq.heappop(self.done)) for _ in range(work.groups_per_step))
        self.go_on(self.now + work.update_s)
        self.now += work.publish_s
        self.version += 1
        for server in self.servers:
            server.now = self.now
            server.interrupt()
        return waited, tokens


def simulate(work: Workload, *, steps: int, first: int = 0) -> Outcome:
    """Return the means of `steps` steps after the `first` ones, in which the pipeline fills."""
    run = _Run(work)
    for _ in range(first):
        run.step()
    began, busy, slots = run.now, *_used(run)
    results = [run.step() for _ in range(steps)]
    took = run.now - began
    busy_after, slots_after = _used(run)
    return Outcome(
        step_s=took / steps,
        wait_s=sum(waited for waited, _ in results) / steps,
        tokens=sum(tokens for _, tokens in results) / steps,
        busy=(busy_after - busy) / took / work.servers,
        slots=(slots_after - slots) / took / work.servers / work.slots,
    )


def _used(run: _Run) -> tuple[float, float]:
    for server in run.servers:
        server.advance(run.now)
    return sum(server.busy_s for server in run.servers), sum(server.slot_s for server in run.servers)
