"""Evenness with which rollout ranks fill the servers that they share, by the rule that picks one for a group.

    python benchmarks/bench_spread.py --write

Simulated and seeded: `--ranks` ranks keep `--groups` groups of `--samples` replies under way on `--servers` servers.
A reply's length is log-normal about its prompt's, which is log-normal too. A server's token takes longer with each
reply in its batch. A server dies every `--death-s` seconds, what it had begins anew elsewhere, and it comes back when
the next one dies. All rules have the same groups. "ring" is that of servers/generate.py, called as it is
there. "fewest" is it without the ring: the first of a list that all ranks have. "two choices" picks two servers at
random and takes the one with fewer requests of all ranks, as they were up to 5 s ago. "known" has the requests of all
ranks at every moment.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import frame

from megatron_rl.servers.generate import least_busy

NEWS_S = 5.0
"""Age of the load that ranks hear of each other's: a server is asked as often by the patrol."""
FIRST_TOKEN_S, REPLY_S = 10e-3, 0.25e-3
"""A token takes a server the first, and the second more for each reply in its batch."""
MEAN_TOKENS, OF_PROMPTS, OF_REPLIES = 1000, 0.8, 0.4
"""Log-normal lengths: the mean, and the standard deviations of logarithms."""


@dataclass(eq=False)
class Seen:
    """A server as one rank knows it; its name and calls are what `least_busy` looks at."""

    url: str
    number: int
    calls: set[int] = field(default_factory=set)


@dataclass
class Server:
    """Counts tokens: a reply that begins at count c and has n tokens is done at count c + n."""

    count: float = 0.0
    now: float = 0.0
    replies: list[tuple[float, int]] = field(default_factory=list)
    """(count at the end, number), a heap."""
    stamp: int = 0
    is_up: bool = True

    @property
    def token_s(self) -> float:
        return FIRST_TOKEN_S + REPLY_S * len(self.replies)

    def advance(self, now: float) -> None:
        if self.replies:
            self.count += (now - self.now) / self.token_s
        self.now = now

    @property
    def ends_at(self) -> float:
        return self.now + max(0.0, self.replies[0][0] - self.count) * self.token_s


Rule = Callable[["Cluster", int], int]


class Cluster:
    """Ranks and servers as events. `run(rule)` gives what the table shows."""

    def __init__(self, args, rule: Rule) -> None:
        self.args, self.rule, self.now = args, rule, 0.0
        self.servers = [Server() for _ in range(args.servers)]
        self.seen = [
            [Seen(f"http://node-{number:03d}:30000", number) for number in range(args.servers)]
            for _ in range(args.ranks)
        ]
        self.news, self.heard_s = [0] * args.servers, -NEWS_S
        self.chance = random.Random(1)
        self.numbers, self.events = itertools.count(), []
        self.replies: dict[int, tuple[int, int, float]] = {}
        """Number -> (rank, group, when it was asked for)."""
        self.left: dict[tuple[int, int], int] = {}
        self.homes: dict[tuple[int, int], int] = {}
        self.begun = [0] * args.ranks
        self.waits: list[float] = []
        self.idle_s = self.most_s = self.fewest_s = 0.0

    def loads(self) -> list[int]:
        return [len(server.replies) for server in self.servers]

    def serving(self, rank: int) -> list[Seen]:
        return [seen for seen in self.seen[rank] if self.servers[seen.number].is_up]

    def lengths(self, rank: int, group: int) -> list[int]:
        """The same whatever the rule."""
        chance = random.Random(f"{rank} {group}")
        middle = chance.gauss(math.log(MEAN_TOKENS) - (OF_PROMPTS**2 + OF_REPLIES**2) / 2, OF_PROMPTS)
        return [max(1, round(chance.lognormvariate(middle, OF_REPLIES))) for _ in range(self.args.samples)]

    def ask(self, rank: int, group: int) -> None:
        """Send all replies of a group that are missing to one server."""
        number = self.homes[rank, group] = self.rule(self, rank)
        server = self.servers[number]
        server.advance(self.now)
        for tokens in self.lengths(rank, group)[-self.left[rank, group] :]:
            reply = next(self.numbers)
            self.replies[reply] = rank, group, self.now
            heapq.heappush(server.replies, (server.count + tokens, reply))
            self.seen[rank][number].calls.add(reply)
        self.expect(number)

    def expect(self, number: int) -> None:
        server = self.servers[number]
        server.stamp += 1
        if server.replies:
            heapq.heappush(self.events, (server.ends_at, number, server.stamp))

    def begin_group(self, rank: int) -> None:
        group, self.begun[rank] = self.begun[rank], self.begun[rank] + 1
        self.left[rank, group] = self.args.samples
        self.ask(rank, group)

    def end_reply(self, number: int) -> None:
        server = self.servers[number]
        server.advance(self.now)
        server.count, reply = heapq.heappop(server.replies)
        self.expect(number)
        rank, group, asked_s = self.replies.pop(reply)
        self.seen[rank][number].calls.remove(reply)
        self.waits.append(self.now - asked_s)
        self.left[rank, group] -= 1
        if self.left[rank, group] == 0:
            self.begin_group(rank)

    def die(self, number: int) -> None:
        server = self.servers[number]
        server.is_up, lost, server.replies = False, server.replies, []
        self.expect(number)
        for _, reply in lost:
            self.seen[self.replies.pop(reply)[0]][number].calls.remove(reply)
        for key in [key for key, home in self.homes.items() if home == number and self.left[key]]:
            self.ask(*key)

    def change(self, number: int) -> None:
        """Servers die one after the other, each for as long as it takes until the next one does."""
        self.servers[number - 1].is_up = True
        self.die(number)
        heapq.heappush(self.events, (self.now + self.args.death_s, ~((number + 1) % self.args.servers), 0))

    def run(self) -> None:
        for _ in range(self.args.groups):  # in turns, as ranks begin at one time
            for rank in range(self.args.ranks):
                self.begin_group(rank)
        heapq.heappush(self.events, (self.args.death_s, ~0, 0))
        while self.events[0][0] < self.args.seconds:
            at, number, stamp = heapq.heappop(self.events)
            if number >= 0 and stamp != self.servers[number].stamp:
                continue
            loads = [len(server.replies) for server in self.servers if server.is_up]
            self.idle_s += (at - self.now) * loads.count(0) / len(loads)
            self.most_s += (at - self.now) * max(loads)
            self.fewest_s += (at - self.now) * min(loads)
            if at - self.heard_s >= NEWS_S:
                self.news, self.heard_s = self.loads(), at
            self.now = at
            if number >= 0:
                self.end_reply(number)
            else:
                self.change(~number)


def ring(cluster: Cluster, rank: int) -> int:
    return least_busy(cluster.serving(rank), rank=rank, ranks=cluster.args.ranks).number


def fewest(cluster: Cluster, rank: int) -> int:
    return min(cluster.serving(rank), key=lambda seen: len(seen.calls)).number


def two_choices(cluster: Cluster, rank: int) -> int:
    return min(cluster.chance.sample(cluster.serving(rank), 2), key=lambda seen: cluster.news[seen.number]).number


def known(cluster: Cluster, rank: int) -> int:
    return min(cluster.serving(rank), key=lambda seen: len(cluster.servers[seen.number].replies)).number


RULES = {"fewest": fewest, "two choices": two_choices, "ring": ring, "known": known}


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--groups", type=int, default=8, help="of each rank, at a time")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--death-s", type=float, default=60.0)
    args = frame.arguments(parser, argv, ranks=8, servers=8, groups=2, samples=2, seconds=60.0)
    print(f"{args.ranks} ranks x {args.groups} groups x {args.samples} replies on {args.servers} servers, simulated")
    print("\n| rule | servers idle | replies of the fullest, the emptiest | replies/s | p50 s | p99 s |")
    print("|---|---|---|---|---|---|")
    for name, rule in RULES.items():
        cluster = Cluster(args, rule)
        cluster.run()
        waits, seconds = sorted(cluster.waits), cluster.now
        p50, p99 = (waits[int(share * len(waits))] for share in (0.5, 0.99))
        print(
            f"| {name} | {cluster.idle_s / seconds:.1%} | {cluster.most_s / seconds:.1f}, "
            f"{cluster.fewest_s / seconds:.1f} | {len(waits) / seconds:.1f} | {p50:.1f} | {p99:.1f} |"
        )


if __name__ == "__main__":
    frame.run(main)
