"""Which servers get requests, and which take part in the next publication of weights.

A server serves until a call to it fails. Then it is lost, and looked at until it answers as before, with the weights it
had. One that answers with other weights was started anew, and one that failed in a publication is dropped whatever it
answers: these two serve again once they were caught up, or took part in a publication, whichever comes first.
Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from megatron_rl.rollout.server_client import RequestRefused, ServerClient, ServerError

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 0.05
LONGEST_LOOK_S = 5.0
LOOK_EVERY_S = 0.5
LOOK_TIMEOUT_S = 10.0
PATROL_EVERY_S = 5.0
MUSTER_POLL_S = 0.05


@dataclass(eq=False)
class Member:
    """One server and what is known about it."""

    server: ServerClient
    weights: str | None = None
    """Name of the weights it must have to serve again; None where its own word for them is not enough."""
    failures: int = 0
    """Calls that failed since one last went well."""
    answers: bool = True
    """It has answered since it was lost, but with other weights."""
    away_since: float = 0.0
    """On the monotonic clock: when it was lost, or found where it is new."""
    dropped_in: int = -1
    """The publication that it failed."""
    trouble: str = ""
    is_catching_up: bool = False
    watcher: asyncio.Task[None] | None = field(default=None, repr=False)


class Membership:
    """The servers of one client. `serving` get requests; `publishing` take part in control calls."""

    def __init__(
        self,
        servers: list[ServerClient],
        *,
        catch_up: Callable[[ServerClient], Awaitable[str | None]],
        on_drop: Callable[[str, str], None] | None = None,
        looks_at_weights: bool = False,
    ) -> None:
        """`catch_up` brings a server to the current weights and returns their name; None where it has no way to.

        `looks_at_weights`: no call fails where a server is started anew, so each is asked what it has now and then.
        `on_drop(url, reason)` is told of servers that failed a publication.
        """
        self._members = {server: Member(server) for server in servers}
        self.serving = list(servers)
        self.publishing = list(servers)
        self.number = 0
        """Counts changes: a weight group made under another number no longer fits."""
        self._catch_up, self._on_drop = catch_up, on_drop
        self._looks_at_weights = looks_at_weights
        self._may_catch_up = True
        self.changed = asyncio.Event()
        """Set whenever `serving` may have changed."""
        self._is_suspicious = asyncio.Event()
        self._publications = 0
        self._patrol: asyncio.Task[None] | None = None
        self._some_serve = asyncio.Event()
        self._some_serve.set()

    def begin(self, patience_s: float) -> None:
        """The servers have answered `probe`, and serve with the weights that they named.

        From now on one that gives no sign of life for `patience_s` is lost, and what it was generating with it.
        """
        for server, member in self._members.items():
            member.weights = server.info.weight_version if server.info else None
        self._patrol = asyncio.get_running_loop().create_task(self._go_round(patience_s))

    def add(self, server: ServerClient) -> None:
        """A server that is new: it takes part in publications once it answers, and serves once it has weights."""
        member = Member(server, answers=False, trouble="is new", away_since=time.monotonic())
        self._members[server] = member
        self._watch(member)

    def forget(self, server: ServerClient) -> None:
        """A server that is gone for good. What it was generating moves to others."""
        self.lose(server, "is gone")
        self._stop_watching(self._members.pop(server))
        if server in self.publishing:
            self.publishing.remove(server)
            self.number += 1
        server.abandon_calls()

    @property
    def needs_weights(self) -> bool:
        """True where no server serves and one that could lacks the weights. From any thread."""
        return not self.serving and any(member.answers for member in list(self._members.values()))

    def away_for(self, at_most_s: float) -> list[ServerClient]:
        """The servers that have not served for so long at most. From any thread."""
        since = time.monotonic() - at_most_s
        members = list(self._members.values())
        return [m.server for m in members if m.server not in self.serving and m.away_since >= since]

    def troubles(self) -> str:
        """Say what is the matter with the servers that do not serve."""
        return "; ".join(m.trouble for s, m in self._members.items() if s not in self.serving)

    async def wait_for_one(self, timeout_s: float) -> None:
        """Return once a server serves; ServerError where none does for `timeout_s`."""
        try:
            await asyncio.wait_for(self._some_serve.wait(), timeout_s)
        except TimeoutError:
            raise ServerError(f"no rollout server is left, and none came back: {self.troubles()}") from None

    def praise(self, server: ServerClient) -> None:
        """A reply of it was good."""
        self._members[server].failures = 0

    def lose(self, server: ServerClient, trouble: str) -> None:
        """Send it nothing more until it answers as before."""
        member = self._members[server]
        member.trouble = trouble
        if server not in self.serving:
            return
        self.serving.remove(server)
        self.changed.set()
        self.number += 1
        member.failures += 1
        member.answers, member.away_since = False, time.monotonic()
        self._watch(member)
        if not self.serving:
            self._some_serve.clear()

    def drop(self, server: ServerClient, trouble: str) -> None:
        """Leave it out, and what it was generating to others, until it takes part in a later publication."""
        logger.warning("%s is left out: %s", server.url, trouble)
        member = self._members[server]
        self.lose(server, trouble)
        member.weights, member.trouble, member.answers = None, trouble, False
        member.dropped_in = self._publications
        self._watch(member)
        if server in self.publishing:
            self.publishing.remove(server)
            self.number += 1
        server.abandon_calls()
        if self._on_drop is not None:
            self._on_drop(server.url, trouble)

    async def muster(self, timeout_s: float, *, check: Callable[[], None] = lambda: None) -> None:
        """Settle who takes part in the next publication: all that answer, at least one.

        ServerError where none answers for `timeout_s`. What `check` raises ends the waiting.
        """
        await self.stop_catching_up()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not (present := self._present()):
            if asyncio.get_running_loop().time() > deadline:
                raise ServerError(f"no rollout server answered for {timeout_s:g} s: {self.troubles()}")
            check()
            await asyncio.sleep(MUSTER_POLL_S)
        for server in present:  # in the middle of a publication a server may name weights that it has half of
            self._stop_watching(self._members[server])
        if present != self.publishing:
            self.number += 1
        self.publishing = present

    async def stop_catching_up(self) -> None:
        """Let no server catch up until `settle` or `allow_catching_up`; those that are at it have stopped by then."""
        self._may_catch_up = False
        for member in [member for member in self._members.values() if member.is_catching_up]:
            if member.watcher is not None:
                member.watcher.cancel()
                await asyncio.wait([member.watcher])
            if member.server not in self.serving:
                self._watch(member)

    def allow_catching_up(self) -> None:
        self._may_catch_up = True

    @property
    def is_publishing(self) -> bool:
        """From `muster` to the end of the publication."""
        return not self._may_catch_up

    def _present(self) -> list[ServerClient]:
        present = [server for server, member in self._members.items() if server in self.serving or member.answers]
        # What failed this publication once may fail it again; but where nobody else is left, it must do.
        return [s for s in present if self._members[s].dropped_in < self._publications] or present

    def settle(self, servers: list[ServerClient], weights: str) -> None:
        """A publication is over: `servers` have `weights` and serve, others wait for the next one."""
        for server, member in self._members.items():
            if server in servers:
                self._stop_watching(member)
                member.weights, member.answers = weights, True
            else:
                member.weights = None
                if server in self.serving:
                    self.lose(server, "left out of a publication")
        self._publications += 1
        self._may_catch_up = True
        self.serving = list(servers)
        self.changed.set()
        if servers:
            self._some_serve.set()

    def close(self) -> None:
        if self._patrol is not None:
            self._patrol.cancel()
        for member in self._members.values():
            self._stop_watching(member)

    async def _go_round(self, patience_s: float) -> None:
        """A server that hangs fails no call, so each is asked something that takes it no time."""

        async def visit(server: ServerClient) -> None:
            try:
                weights = await server.give_sign_of_life(timeout_s=patience_s)
            except ServerError as error:
                self.lose(server, str(error))
                server.abandon_calls()
            else:
                expected = self._members[server].weights if server in self._members else None
                if self._looks_at_weights and not self.is_publishing and None not in (weights, expected):
                    if weights != expected:
                        self.lose(server, f"has weights {weights!r}, and was published {expected!r}")

        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_suspicious.wait(), min(PATROL_EVERY_S, patience_s))
            self._is_suspicious.clear()
            await asyncio.gather(*(visit(server) for server in self.serving))

    def suspect(self) -> None:
        """Something failed, and nobody knows at which server: look at all of them now."""
        self._is_suspicious.set()

    def _watch(self, member: Member) -> None:
        self._stop_watching(member)
        member.watcher = asyncio.get_running_loop().create_task(self._look_after(member))

    def _stop_watching(self, member: Member) -> None:
        if member.watcher is not None:
            member.watcher.cancel()
            member.watcher = None

    async def _look_after(self, member: Member) -> None:
        # One that is well whenever it is asked, and fails every reply, is asked ever more rarely.
        await asyncio.sleep(min(LONGEST_LOOK_S, FIRST_LOOK_S * 2 ** max(0, member.failures - 1)))
        server = member.server
        while True:
            try:
                info = await server.probe(timeout_s=LOOK_TIMEOUT_S)
                if member.weights is not None and info.weight_version == member.weights:
                    await server.check_health(timeout_s=LOOK_TIMEOUT_S)
                    break
                member.answers = True
                if self._may_catch_up and await self._has_caught_up(member):
                    break
            except (ServerError, RequestRefused) as error:
                member.trouble, member.answers = str(error), False
            await asyncio.sleep(LOOK_EVERY_S)
        member.watcher = None
        self.serving.append(server)
        self.changed.set()
        self._some_serve.set()

    async def _has_caught_up(self, member: Member) -> bool:
        """Bring it to the current weights where there is a way; one that fails is tried ever more rarely."""
        member.is_catching_up = True
        try:
            weights = await self._catch_up(member.server)
        except ServerError as error:
            member.trouble, member.failures = f"catching up: {error}", member.failures + 1
            logger.warning("%s did not catch up: %s", member.server.url, error)
            await asyncio.sleep(min(LONGEST_LOOK_S, FIRST_LOOK_S * 2**member.failures))
            return False
        finally:
            member.is_catching_up = False
        if weights is None:
            return False
        member.weights = weights
        if member.server not in self.publishing:
            self.publishing.append(member.server)
            self.number += 1
        return True
