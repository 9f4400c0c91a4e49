"""Simulates a run over days: the loop of `simulation.py` with failures, stragglers and random durations.

When a server dies, its running replies are lost. With rollout.interruption=abort, a reply resumes on another server
from the tokens it had at the last publication, because the client received those. Otherwise it starts again. When the
trainer dies, all servers end, and the run resumes from its newest checkpoint. Finished groups are in the journal and
survive; unfinished groups start again.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from megatron_rl.tools.plan import chances as drawn
from megatron_rl.tools.plan.chances import Chances
from megatron_rl.tools.plan.simulation import Group, Run, Server, Workload

Replies = list[tuple[int, int]]
"""Replies of one group: (length, tokens that the client has received) of each."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings, in addition to the `Workload`, that determine a run's faults and their cost.

    For example:

        job = Job(server_gpus=4, trainer_gpus=32, interruption="abort", checkpoint_every=25, checkpoint_s=5.0)
        Days(work, job, Chances(seed=0)).run(7 * 86_400).groups_per_s
    """

    server_gpus: int
    """Number of GPUs of each server."""
    trainer_gpus: int
    interruption: str
    checkpoint_every: int
    """Number of steps between two checkpoints; 0 if none are written."""
    checkpoint_s: float
    """Seconds that the trainer pauses for a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The results of a simulated period. Shares are between 0 and 1."""

    groups_per_s: float
    """Groups trained per second, not counting training that was lost because the trainer died."""
    server_deaths: int
    trainer_deaths: int
    lost_tokens: float
    """Share of generated tokens that were lost because a server or the trainer died."""
    stale_tokens: float
    """Share of generated tokens in groups that became too stale and were sampled again."""
    lost_time: float
    """Share of time in which the trainer was down, repeated lost steps, or worked on a step that was then lost."""
    wait: float
    """Share of time that the trainer waited for replies."""


class TrainerDied(Exception):
    """Raised when the trainer dies during a step. The argument is the restart time in seconds."""


class Days(Run):
    """A simulated run with faults."""

    def __init__(self, work: Workload, job: Job, chances: Chances) -> None:
        super().__init__(work)
        self.job = job
        self._of_updates, self._of_publications = chances.of("updates"), chances.of("publications")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        """A heap of (time, serial number, action): faults and recoveries, which happen independently of the loop."""
        self._down: dict[Server, float] = {}
        """{server that is down: time at which its restart is complete}."""
        self._published = dict.fromkeys(self.servers, 0.0)
        """{server: the server's `count` at the last publication}."""
        self._homeless: dict[Group, Replies] = {}
        """{group: those of its replies that wait because no server is up}."""
        self._checkpoint, self._newest = 0, 0
        """Policy version of the newest checkpoint, and the highest version ever reached."""
        self._since: list[Group] = []
        """Groups trained after the newest checkpoint."""
        self._deaths: Counter[str] = Counter()
        self._lost = self._stale = self._waited_s = self._lost_s = 0.0
        gpus = work.servers * job.server_gpus
        by_server = drawn.GPU_FAILURES_PER_S * gpus + drawn.SERVER_CRASHES_PER_S * work.servers
        by_trainer = drawn.GPU_FAILURES_PER_S * job.trainer_gpus
        self._again_and_again(by_server, chances.of("server deaths"), self._server_dies)
        self._again_and_again(by_trainer, chances.of("trainer deaths"), self._trainer_dies)
        self._again_and_again(drawn.SLOW_SERVERS_PER_S * gpus, chances.of("stragglers"), self._server_slows_down)

    def run(self, seconds: float) -> Record:
        while self.now < seconds:
            began, newest = self.now, self._newest
            try:
                self._waited_s += self.step()[0]
                self._save()
            except TrainerDied as death:
                self._resume(death.args[0])
            if self.version <= newest:  # no progress: this version was reached before
                self._lost_s += self.now - began
        generated = sum(server.generated for server in self.servers)
        return Record(
            groups_per_s=self.version * self.work.groups_per_step / self.now,
            server_deaths=self._deaths["server"],
            trainer_deaths=self._deaths["trainer"],
            lost_tokens=self._lost / generated,
            stale_tokens=self._stale / generated,
            lost_time=self._lost_s / self.now,
            wait=self._waited_s / self.now,
        )

    # The loop's methods that faults change

    def place(self, group: Group, replies: Replies) -> None:
        if self.serving():
            super().place(group, replies)
        else:
            self._homeless[group] = replies

    def serving(self) -> list[Server]:
        return [server for server in self.servers if server not in self._down]

    def go_on(self, until: float, *, to_a_group: bool = False) -> bool:
        while True:
            due = max(self.now, min(until, self._events[0][0]))  # events due during a publication happen after it
            if super().go_on(due, to_a_group=to_a_group):
                return True
            if self._events[0][0] > self.now:
                return False
            heapq.heappop(self._events)[2]()

    def train(self, taken: list[Group]) -> None:
        self._since += taken
        slower = 1 + self._of_updates.expovariate(1 / drawn.UPDATE_SLOWNESS)
        self.go_on(self.now + self.work.update_s * slower)

    def publish_s(self) -> float:
        return self.work.publish_s * self._of_publications.lognormvariate(0, drawn.PUBLICATION_SPREAD)

    def publish(self) -> None:
        super().publish()
        self._newest = max(self._newest, self.version)
        self._published = {server: server.count for server in self.servers}
        for server in [server for server, back in self._down.items() if back <= self.now]:
            self._serve_again(server)

    def _serve_again(self, server: Server) -> None:
        del self._down[server]
        homeless, self._homeless = self._homeless, {}
        for group, replies in homeless.items():
            self.place(group, replies)

    def _save(self) -> None:
        if self.job.checkpoint_every and self.version % self.job.checkpoint_every == 0:
            self.go_on(self.now + self.job.checkpoint_s)
            self._checkpoint, self._since = self.version, []

    def _requeue_stale(self) -> None:
        before = len(self.again)
        super()._requeue_stale()
        self._stale += sum(sum(group.lengths) for group in list(self.again)[before:])

    # Faults

    def _again_and_again(self, per_s: float, chance: Random, what: Callable[[Random], None]) -> None:
        """Schedule an event repeatedly, without end, as a Poisson process of rate `per_s`."""

        def expect() -> None:
            self._at(self.now + chance.expovariate(per_s), happen)

        def happen() -> None:
            expect()  # first, because the event may raise
            what(chance)

        expect()

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self.numbers), what))

    def _server_dies(self, chance: Random) -> None:
        self._deaths["server"] += 1
        server, restart_s = chance.choice(self.servers), log_normal(chance, *drawn.SERVER_RESTART_S)
        self._down[server] = self.now + restart_s
        for group, replies in self._lose(server).items():
            self.place(group, replies)

        def alone() -> None:
            if not self.serving():  # no server is left, so the trainer publishes once more during its step
                self._serve_again(server)

        self._at(self._down[server] + self.work.publish_s, alone)

    def _lose(self, server: Server) -> dict[Group, Replies]:
        """Remove all replies from a server; return them by group."""
        replies: dict[Group, Replies] = {}
        for end, _, group, length, begun in server.running:
            kept = begun
            if self.job.interruption == "abort":
                kept = max(begun, round(length - (end - self._published[server])))
            self._lost += length - (end - server.count) - kept
            replies.setdefault(group, []).append((length, kept))
        for _, group, length, begun in server.queue:
            replies.setdefault(group, []).append((length, begun))
        server.running.clear()
        server.queue.clear()
        server.tokens = server.stall_s = 0.0
        server.fill(self.version)
        return replies

    def _server_slows_down(self, chance: Random) -> None:
        server = chance.choice(self.servers)

        def becomes(slowness: float) -> None:
            server.advance(self.now)
            server.slowness = slowness
            server.fill(self.version)

        becomes(chance.uniform(*drawn.SLOWNESS))
        self._at(self.now + log_normal(chance, *drawn.SLOW_FOR_S), lambda: becomes(1.0))

    def _trainer_dies(self, chance: Random) -> None:
        self._deaths["trainer"] += 1
        raise TrainerDied(log_normal(chance, *drawn.TRAINER_RESTART_S))

    def _resume(self, restart_s: float) -> None:
        """Resume from the newest checkpoint. Groups finished since then are kept; unfinished groups start again."""
        missing = Counter(
            {group: sum(length - kept for length, kept in left) for group, left in self._homeless.items()}
        )
        for server in self.servers:
            missing.update({group: sum(n - kept for n, kept in left) for group, left in self._lose(server).items()})
        for group in self.with_servers:
            self._lost += sum(group.lengths) - missing[group]  # tokens that the client had received are lost, too
            self.gate.finish(accepted=False)
        self.again.extendleft(reversed(self.with_servers))
        self.with_servers.clear()
        self._homeless.clear()
        self._down.clear()
        self.version, self.done, self._since = self._checkpoint, self._since + self.done, []
        self.now += restart_s
        for server in self.servers:
            server.now = self.now


def log_normal(chance: Random, median: float, spread: float) -> float:
    return chance.lognormvariate(math.log(median), spread)
