"""Simulates a run's steps as events: servers decode, a gate admits groups by staleness, the trainer waits for groups.

The loop is that of train.py: wait for a step's groups, update, pause the servers, publish, repeat. All replies of a
group are on one server. A publication interrupts running replies. When they resume, their tokens are first prefilled
again, unless the KV cache is kept. Groups are admitted by the executor's AdmissionGate. As in the executor, a stale
group is sampled again. A step waits for such a group if it would otherwise become stale once more.

All times are inputs; nothing here depends on a GPU. benchmarks/bench_async.py compares the simulation with the real
loop, and `week.py` adds faults.
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
    """The workload to simulate. Times are in seconds.

    For example:

        work = Workload(servers=2, slots=64, token_s=lambda replies, tokens: 0.01, read_s=1e-5, prompt_tokens=100,
                        groups=itertools.cycle([[200, 300]]), groups_per_step=32, groups_at_once=64, max_staleness=1,
                        update_s=4.0, publish_s=0.5)
        simulate(work, steps=10, first=3).step_s
    """

    servers: int
    slots: int
    """Maximum number of replies that a server decodes at the same time; others wait in its queue."""
    token_s: Callable[[float, float], float]
    """Function of (number of replies in the batch, mean number of tokens per reply so far) that returns the time to
    decode one token of each reply."""
    read_s: float
    """Time to prefill one token, either of a prompt or of a reply that resumes after an interruption."""
    prompt_tokens: float
    groups: Iterator[list[int]]
    """Endless iterator over groups; each item has the lengths of the group's replies."""
    groups_per_step: int
    groups_at_once: int
    """Maximum number of groups that have requests at servers at the same time."""
    max_staleness: int
    drops_stale: bool = True
    """Whether a group is sampled again if one of its tokens is older than max_staleness."""
    update_s: float
    publish_s: float
    """Duration of a publication, during which the servers are paused."""
    max_cache_age: int = 0
    """For this many publications in a row, running replies keep their KV cache. At the next one, servers prefill these
    replies again."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results averaged over the measured steps. `busy` and `slots` are also averaged over all servers."""

    step_s: float
    wait_s: float
    """Time that the trainer waits for groups."""
    tokens: float
    busy: float
    """Share of time that a server spends decoding or prefilling."""
    slots: float
    """Share of slots that hold a reply, averaged over time."""


@dataclass(kw_only=True, eq=False)
class Group:
    lengths: list[int]
    requeues: int = 0
    asked_at: int = 0
    """Policy version when the group's replies were requested."""
    oldest: int | None = None
    """Policy version with which the group's first token was sampled."""
    left: int = 0
    """Number of unfinished replies."""


class Server:
    """A simulated server.

    `count` is the number of decoding steps so far, each of which adds one token to every running reply. A reply that
    starts at count c with n tokens left is done at count c + n.
    """

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.now = self.count = self.stall_s = self.token_s = 0.0
        self.tokens = 0.0
        """Tokens of all running replies, including their prompts."""
        self.generated = 0.0
        self.busy_s = self.slot_s = 0.0
        self.ends_at = float("inf")
        """Time at which the next reply is done."""
        self.slowness = 1.0
        """Factor that multiplies the time of a token."""
        self.cache_age = 0
        self.running: list[tuple[float, int, Group, int, int]] = []
        """A heap of running replies: (`count` at the reply's end, serial number, group, length, tokens that the reply
        already had when it was sent to this server)."""
        self.queue: deque[tuple[int, Group, int, int]] = deque()
        """Waiting replies: (serial number, group, length, tokens that the reply already had when it was sent here)."""

    @property
    def load(self) -> int:
        return len(self.running) + len(self.queue)

    def advance(self, now: float) -> None:
        past, self.now = now - self.now, now
        if not self.running:
            return
        # Prefill comes first, and all decoding in the batch waits for it.
        self.busy_s += past
        self.slot_s += past * len(self.running)
        decoding = max(0.0, past - self.stall_s)
        self.stall_s = max(0.0, self.stall_s - past)
        self.count += decoding / self.token_s
        self.tokens += decoding / self.token_s * len(self.running)
        self.generated += decoding / self.token_s * len(self.running)

    def finish(self) -> Group:
        """Remove the reply that is done now; return its group."""
        self.count, _, group, length, _ = heapq.heappop(self.running)
        self.tokens -= length + self.work.prompt_tokens
        return group

    def fill(self, version: int) -> None:
        """Start queued replies while slots are free, and recompute the end of the reply that ends next."""
        while self.queue and len(self.running) < self.work.slots:
            number, group, length, begun = self.queue.popleft()
            heapq.heappush(self.running, (self.count + length - begun, number, group, length, begun))
            group.oldest = version if group.oldest is None else group.oldest
            self.tokens += self.work.prompt_tokens + begun
            self.stall_s += self.work.read_s * (self.work.prompt_tokens + begun)
        self.ends_at = float("inf")
        if self.running:
            # A token's time is linear in the keys it reads, so its mean until the next end is its time halfway there.
            count, left = len(self.running), self.running[0][0] - self.count
            self.token_s = self.slowness * self.work.token_s(count, self.tokens / count + left / 2)
            self.ends_at = self.now + self.stall_s + left * self.token_s

    def interrupt(self) -> None:
        """Apply new weights. Unless the KV cache is kept, all running replies are prefilled again from the start."""
        if self.cache_age < self.work.max_cache_age:  # as Fleet.pause decides it
            self.cache_age += 1
        else:
            self.cache_age, self.stall_s = 0, self.work.read_s * self.tokens
        if self.running:
            self.ends_at = self.now + self.stall_s + (self.running[0][0] - self.count) * self.token_s


class Run:
    """The state of a simulated run between two events. `step` advances it by one step of the trainer."""

    def __init__(self, work: Workload) -> None:
        self.work, self.now, self.version = work, 0.0, 0
        self.servers = [Server(work) for _ in range(work.servers)]
        self.gate = AdmissionGate(work.groups_at_once, work.max_staleness)
        self.with_servers: dict[Group, None] = {}
        """Groups that have replies at servers, in the order of their requests. The dict serves as an ordered set."""
        self.again: deque[Group] = deque()
        """Groups that were too stale. They are started again before new groups."""
        self.done: list[Group] = []
        """Complete groups that have not been trained on."""
        self.numbers = itertools.count()

    def admit(self) -> None:
        """Request as many groups as staleness and concurrency allow."""
        while self.gate.capacity(self.version) > 0:
            self.gate.start()
            group = self.again.popleft() if self.again else Group(lengths=next(self.work.groups))
            group.asked_at, group.oldest, group.left = self.version, None, len(group.lengths)
            self.with_servers[group] = None
            self.place(group, [(length, 0) for length in group.lengths])

    def place(self, group: Group, replies: list[tuple[int, int]]) -> None:
        """Send a group's replies to the least loaded server. replies: (length, tokens generated so far) of each."""
        server = min(self.serving(), key=attrgetter("load"))
        server.advance(self.now)
        server.queue.extend((next(self.numbers), group, length, begun) for length, begun in replies)
        server.fill(self.version)

    def serving(self) -> list[Server]:
        return self.servers

    def go_on(self, until: float, *, to_a_group: bool = False) -> bool:
        """Let the servers work until time `until`.

        to_a_group: if a group is complete before `until`, stop at once and return True. In all other cases return
        False.
        """
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
        """Simulate one step; return the seconds that the trainer waited, and the reply tokens of the step's groups."""
        work, began = self.work, self.now
        self.gate.begin_step(work.groups_per_step, self.version, waiting=len(self.done))
        while True:
            self._requeue_stale()
            self.admit()
            if len(self.done) >= work.groups_per_step and not self._is_due():
                break
            self.go_on(float("inf"), to_a_group=True)
        waited = self.now - began
        # The executor's order: resampled groups first, then those closest to being too stale.
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
            server.now = self.now  # not `advance`: the server was paused and did no work
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
        """Return whether a resampled group is still unfinished and would be too stale for any later step."""
        oldest = self.version + 1 - self.work.max_staleness
        return any(group.requeues and group.asked_at < oldest for group in self.with_servers)


def simulate(work: Workload, *, steps: int, first: int = 0) -> Outcome:
    """Return the means over `steps` steps. The `first` steps before these fill the pipeline and are not measured."""
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
