"""A run's steps as events: servers that decode, a gate that admits by staleness, and a trainer that waits for groups.

The loop is that of train.py: wait for a step's groups, update, pause the servers and publish, go on. A group is on one
server. A publication puts replies under way back; they go on after their tokens were read again, unless the cache is
kept. A group that is too old for its step is sampled again, and waited for where it would be too old once more, as the
executor does, whose gate admits here as well. Nothing here knows a GPU: seconds are given. benchmarks/bench_async.py
compares it with the real loop, and `week.py` adds faults.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from megatron_rl.rollout.staleness import AdmissionGate


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work to simulate. Times are seconds.

    work = Workload(servers=2, slots=64, token_s=lambda replies, tokens: 0.01, read_s=1e-5, prompt_tokens=100,
                    groups=itertools.cycle([[200, 300]]), groups_per_step=32, groups_at_once=64, max_staleness=1,
                    update_s=4.0, publish_s=0.5)
    simulate(work, steps=10, first=3).step_s
    """

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
    drops_stale: bool = True
    """Groups with a token older than that are sampled again."""
    update_s: float
    publish_s: float
    """The servers stand still."""
    max_cache_age: int = 0
    """Publications that the keys of replies under way outlive; they are read again after one more."""


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


@dataclass(kw_only=True, eq=False)
class Group:
    lengths: list[int]
    requeues: int = 0
    asked_at: int = 0
    """The version when its replies were asked for."""
    oldest: int | None = None
    """The version of the first token."""
    left: int = 0
    """Replies to come."""


class Server:
    """Counts tokens: a reply that starts at count c with n tokens to come is done at count c + n."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.now = self.count = self.stall_s = self.token_s = 0.0
        self.tokens = 0.0
        """Of all running replies, with their prompts."""
        self.generated = 0.0
        self.busy_s = self.slot_s = 0.0
        self.ends_at = float("inf")
        """When the next reply is done."""
        self.slowness = 1.0
        """By which a token takes longer than it should."""
        self.cache_age = 0
        self.running: list[tuple[float, int, Group, int, int]] = []
        """(count at the end, number, group, length, tokens that it came with), a heap."""
        self.queue: deque[tuple[int, Group, int, int]] = deque()
        """(number, group, length, tokens that it comes with)."""

    @property
    def load(self) -> int:
        return len(self.running) + len(self.queue)

    def advance(self, now: float) -> None:
        past, self.now = now - self.now, now
        if not self.running:
            return
        # What is to be read is read first, and everything else in the batch waits for it.
        self.busy_s += past
        self.slot_s += past * len(self.running)
        decoding = max(0.0, past - self.stall_s)
        self.stall_s = max(0.0, self.stall_s - past)
        self.count += decoding / self.token_s
        self.tokens += decoding / self.token_s * len(self.running)
        self.generated += decoding / self.token_s * len(self.running)

    def finish(self) -> Group:
        """Take out the reply that is done now; return its group."""
        self.count, _, group, length, _ = heapq.heappop(self.running)
        self.tokens -= length + self.work.prompt_tokens
        return group

    def fill(self, version: int) -> None:
        """Start what waits while there are slots, and look at the batch anew."""
        while self.queue and len(self.running) < self.work.slots:
            number, group, length, begun = self.queue.popleft()
            heapq.heappush(self.running, (self.count + length - begun, number, group, length, begun))
            group.oldest = version if group.oldest is None else group.oldest
            self.tokens += self.work.prompt_tokens + begun
            self.stall_s += self.work.read_s * (self.work.prompt_tokens + begun)
        self.ends_at = float("inf")
        if self.running:
            # A token's time grows evenly with the keys it reads: its mean until the next end is that of the middle.
            count, left = len(self.running), self.running[0][0] - self.count
            self.token_s = self.slowness * self.work.token_s(count, self.tokens / count + left / 2)
            self.ends_at = self.now + self.stall_s + left * self.token_s

    def interrupt(self) -> None:
        """New weights: all running replies are read again, also what was being read, unless the cache is kept."""
        if self.cache_age < self.work.max_cache_age:  # as Fleet.pause decides it
            self.cache_age += 1
        else:
            self.cache_age, self.stall_s = 0, self.work.read_s * self.tokens
        if self.running:
            self.ends_at = self.now + self.stall_s + (self.running[0][0] - self.count) * self.token_s


class Run:
    """The state between two events; `step` goes on by a step of the trainer."""

    def __init__(self, work: Workload) -> None:
        self.work, self.now, self.version = work, 0.0, 0
        self.servers = [Server(work) for _ in range(work.servers)]
        self.gate = AdmissionGate(work.groups_at_once, work.max_staleness)
        self.with_servers: dict[Group, None] = {}
        """In the order in which they were asked for."""
        self.again: deque[Group] = deque()
        """Groups that were too old, which start before others."""
        self.done: list[Group] = []
        """Complete groups that are not trained yet."""
        self.numbers = itertools.count()

    def admit(self) -> None:
        """Ask for as many groups as staleness and concurrency allow."""
        while self.gate.capacity(self.version) > 0:
            self.gate.start()
            group = self.again.popleft() if self.again else Group(lengths=next(self.work.groups))
            group.asked_at, group.oldest, group.left = self.version, None, len(group.lengths)
            self.with_servers[group] = None
            self.place(group, [(length, 0) for length in group.lengths])

    def place(self, group: Group, replies: list[tuple[int, int]]) -> None:
        """Send replies, each with its length and the tokens that there are of it, to the server with the fewest."""
        server = min(self.serving(), key=attrgetter("load"))
        server.advance(self.now)
        server.queue.extend((next(self.numbers), group, length, begun) for length, begun in replies)
        server.fill(self.version)

    def serving(self) -> list[Server]:
        return self.servers

    def go_on(self, until: float, *, to_a_group: bool = False) -> bool:
        """Let the servers work until a time, or until a group is complete, which is True."""
        while (server := min(self.servers, key=attrgetter("ends_at"))).ends_at <= until:
            self.now = server.ends_at
            server.advance(self.now)
            group = server.finish()
            server.fill(self.version)
            group.left -= 1
            if group.left == 0:
                del self.with_servers[group]
                self.done.append(group)
                self.gate.finish(accepted=True)
                self.admit()
                if to_a_group:
                    return True
        self.now = until
        for server in self.servers:
            server.advance(until)
        return False

    def step(self) -> tuple[float, int]:
        """Return how long the trainer waited, and the step's tokens."""
        work, began = self.work, self.now
        self.gate.begin_step(work.groups_per_step, self.version, waiting=len(self.done))
        while True:
            self._requeue_stale()
            self.admit()
            if len(self.done) >= work.groups_per_step and not self._is_due():
                break
            self.go_on(float("inf"), to_a_group=True)
        waited = self.now - began
        # As the executor takes them: what was sampled again first, then what is closest to being too old.
        self.done.sort(key=lambda group: (-group.requeues, group.oldest))
        taken, self.done = self.done[: work.groups_per_step], self.done[work.groups_per_step :]
        self.train(taken)
        self.publish()
        return waited, sum(sum(group.lengths) for group in taken)

    def train(self, taken: list[Group]) -> None:
        self.go_on(self.now + self.work.update_s)

    def publish(self) -> None:
        self.now += self.publish_s()
        self.version += 1
        for server in self.servers:
            server.now = self.now  # and not `advance`: it stood still, which is no work
            server.interrupt()

    def publish_s(self) -> float:
        return self.work.publish_s

    def _requeue_stale(self) -> None:
        oldest = self.version - self.work.max_staleness
        stale = [group for group in self.done if self.work.drops_stale and (group.oldest or 0) < oldest]
        for group in stale:
            self.done.remove(group)
            self.gate.take_back()
            group.requeues += 1
        self.again.extend(stale)

    def _is_due(self) -> bool:
        """Is a group with servers that was too old before, and would be for any later step?"""
        oldest = self.version + 1 - self.work.max_staleness
        return any(group.requeues and group.asked_at < oldest for group in self.with_servers)


def simulate(work: Workload, *, steps: int, first: int = 0) -> Outcome:
    """Return the means of `steps` steps after the `first` ones, in which the pipeline fills."""
    run = Run(work)
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


def _used(run: Run) -> tuple[float, float]:
    for server in run.servers:
        server.advance(run.now)
    return sum(server.busy_s for server in run.servers), sum(server.slot_s for server in run.servers)
