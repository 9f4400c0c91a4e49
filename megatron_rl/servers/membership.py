"""Tracks which servers receive requests, and which take part in the next publication of weights.

    from         to            when
    SERVING      LOST          a call failed, the server does not respond or generates nothing, or a reply was bad
    SERVING      LOST          it failed a publication, or its replies cannot be trusted: it is dropped
    LOST         SERVING       it generates as before, with the weights that it had
    LOST         BEHIND        it answers, but was restarted or dropped
    BEHIND       LOST          it no longer answers
    BEHIND       CATCHING_UP   another server, or the disk, has the current weights for it
    CATCHING_UP  SERVING       it has these weights and generates
    CATCHING_UP  BEHIND        catching up failed, or a publication begins
    any          SERVING       a publication in which it took part ended
    SERVING      LOST          a publication ended without it

A server whose replies cannot be trusted catches up only after a restart. Everything here runs on one event loop. A
server does not become LOST because the loop itself stalls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from megatron_rl.api import RequestRefused
from megatron_rl.life.beat import Beat
from megatron_rl.servers.client import ServerClient
from megatron_rl.servers.reply_check import VERSION
from megatron_rl.servers.server_http import ServerError

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_LOOK_S = 0.05
LONGEST_LOOK_S = 5.0
LOOK_EVERY_S = 0.5
LOOK_TIMEOUT_S = 10.0
PATROL_EVERY_S = 5.0
SELECT_POLL_S = 0.05
BAD_REPLIES = 4
"""A server is dropped when its `Member.bad_replies` reaches this value."""
JUDGED_REPLIES, LEAST_REPLIES = 64, 16
"""JUDGED_REPLIES: number of a server's newest replies that are examined for missing log-probabilities. LEAST_REPLIES:
number of replies that must have arrived before the server can be dropped for them."""
LAG_SHARE = 0.1
"""A failed query is repeated if this event loop stalled during it for more than this fraction of `patience_s`."""
MOST_STATES = 256
"""Maximum number of servers that `states` describes."""
VISITS = 10
"""Maximum number of retries after stalls of the event loop. It lets a dead server be found even if the loop stalls
again and again."""


class ServerState(Enum):
    """State of a server. The table above lists the transitions."""

    SERVING = "serving"
    LOST = "lost"
    """The server receives no requests. It is probed until it answers."""
    BEHIND = "behind"
    """The server answers, takes part in the next publication, and serves after that."""
    CATCHING_UP = "catching up"
    """The server receives the current weights between two publications."""


@dataclass(eq=False)
class Member:
    """One server and what is known about it."""

    server: ServerClient
    state: ServerState = ServerState.SERVING
    weights: str | None = None
    """Name of the weights with which the server may serve. None if it must receive weights first."""
    failures: int = 0
    bad_replies: int = 0
    """Number of bad replies minus number of later good ones, but never below 0."""
    unknown_logprobs: deque[bool] = field(default_factory=lambda: deque(maxlen=JUDGED_REPLIES), repr=False)
    """For each of the server's newest replies: True if the reply lacked a log-probability."""
    distrusted: str | None = None
    """Instance ID of the server process whose replies cannot be trusted; '' if the server reports no ID.

    None if the replies can be trusted.
    """
    is_restarted: bool = False
    """True if the server was restarted since it received its weights."""
    is_published: bool = False
    """True if the server has received weights by a publication or by catching up."""
    silent_since: float | None = None
    """Monotonic time since which all checks found that the server generates nothing. None if it generates."""
    dropped_in: int = -1
    """Number of the last publication in which the server failed, or -1 if it failed in none."""
    trouble: str = ""
    watcher: asyncio.Task[None] | None = field(default=None, repr=False)


class Membership:
    """The servers of one client.

    Those in `serving` receive requests. Those in `publishing` take part in publications and other control calls.
    """

    def __init__(
        self,
        servers: list[ServerClient],
        *,
        catch_up: Callable[[ServerClient], Awaitable[str | None]],
        publication: str = "group",
        on_drop: Callable[[str, str], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Take over the servers as SERVING ones.

        catch_up: function that brings a server to the current weights and returns the name of these weights, or None
        if no source has them.
        publication: value of rollout.publication. A LOST server that needs weights, but cannot receive them in this
        way, stays LOST.
        on_drop: see ClientOptions. on_failure: see Fleet.
        """
        self._members = {server: Member(server) for server in servers}
        self.serving = list(servers)
        self.publishing = list(servers)
        self.number = 0
        """Number of changes of `publishing` so far. A weight-update group created at another number is obsolete."""
        self._catch_up, self._publication, self._on_drop = catch_up, publication, on_drop
        self._on_failure = on_failure or logger.error
        self.may_catch_up = True
        """Whether servers may catch up.

        False from `select_servers` to the end of the publication, and while servers have lent their memory.
        """
        self._patience_s = math.inf
        self.follows = False
        """True if another client publishes. This client may learn of a publication later than the servers."""
        self._beat = Beat(asyncio.get_running_loop())
        self.changed = asyncio.Event()
        """Set whenever `serving` may have changed."""
        self._is_suspicious = asyncio.Event()
        self._publications = 0
        self._patrol: asyncio.Task[None] | None = None
        self._some_serve = asyncio.Event()
        self._some_serve.set()

    def begin(self, patience_s: float) -> None:
        """Start to watch the servers, all of which must have answered `probe`.

        patience_s: seconds after which a server that does not answer or generate becomes LOST.
        """
        for server, member in self._members.items():
            member.weights = server.info.weight_version if server.info else None
        self._patience_s = patience_s
        self._beat.begin()
        self._patrol = self.lasting(self._go_round(), "the patrol of rollout servers")

    def lasting(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Start a permanent task and return it. If it raises, `on_failure` is called. what: description of the task."""

        def look(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._on_failure(f"{what} has ended: {type(error).__name__}: {error}")
                logger.error("%s has ended", what, exc_info=error)

        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(look)
        return task

    def add(self, server: ServerClient) -> None:
        """Add a new server. It takes part in publications once it answers, and serves once it has weights."""
        self._members[server] = Member(server, ServerState.LOST, trouble="is new")
        self._watch(self._members[server])

    def _move(self, member: Member, state: ServerState) -> None:
        was_serving, member.state = member.state is ServerState.SERVING, state
        if was_serving == (state is ServerState.SERVING):
            return
        self.serving = [server for server, other in self._members.items() if other.state is ServerState.SERVING]
        self.changed.set()
        if self.serving:
            self._some_serve.set()
        else:
            self._some_serve.clear()

    def forget(self, server: ServerClient) -> None:
        """Remove a server permanently. Its requests are retried on other servers."""
        self.lose(server, "is gone")  # before it is removed: `lose` ignores non-members
        if (member := self._members.pop(server, None)) is not None:
            self._stop_watching(member)
        if server in self.publishing:
            self.publishing.remove(server)
            self.number += 1
        server.abandon_calls()

    @property
    def needs_weights(self) -> bool:
        """True if no server serves, and at least one answers but lacks the weights. Callable from any thread."""
        answering = (ServerState.BEHIND, ServerState.CATCHING_UP)
        # A copy, here and below, because the loop's thread may add a server meanwhile.
        return not self.serving and any(member.state in answering for member in list(self._members.values()))

    def troubles(self) -> str:
        return "; ".join(m.trouble for m in self._members.values() if m.state is not ServerState.SERVING)

    def states(self) -> list[dict[str, Any]]:
        """Describe each server for the run's status: its state, number of calls in flight, weights and trouble."""
        return [
            {
                "url": member.server.url,
                "state": member.state.value,
                "calls": len(member.server.calls),
                "weights": member.weights,
                "failures": member.failures,
                "trouble": "" if member.state is ServerState.SERVING else member.trouble,
            }
            for member in list(self._members.values())[:MOST_STATES]
        ]

    async def wait_for_one(self, timeout_s: float) -> None:
        """Wait until a server serves. Raises ServerError after `timeout_s`."""
        try:
            await asyncio.wait_for(self._some_serve.wait(), timeout_s)
        except TimeoutError:
            raise ServerError(f"no rollout server is left, and none has recovered: {self.troubles()}") from None

    def weights_of(self, server: ServerClient) -> str | None:
        """Return the name of the server's weights as far as known, or None."""
        return member.weights if (member := self._members.get(server)) is not None else None

    def is_published(self, server: ServerClient) -> bool:
        return (member := self._members.get(server)) is not None and member.is_published

    def record_success(self, server: ServerClient) -> None:
        if (member := self._members.get(server)) is not None:
            member.failures, member.silent_since = 0, None
            member.unknown_logprobs.append(False)
            member.bad_replies = max(0, member.bad_replies - 1)

    def record_unknown_logprob(self, server: ServerClient, trouble: str) -> None:
        """Note a reply that lacked a log-probability. Drop the server if half of its newest replies lacked one."""
        member = self._members.get(server)
        if member is None or member.state is not ServerState.SERVING:
            return
        newest = member.unknown_logprobs
        newest.append(True)
        if len(newest) < LEAST_REPLIES or 2 * sum(newest) < len(newest):
            return
        reason = f"{sum(newest)} of its last {len(newest)} replies lack the log-probability of a token ({trouble})"
        newest.clear()
        if len(self.serving) == 1:  # then the policy is the likely cause
            self._on_failure(
                f"rollout: {server.url}, the only server left: {reason}. A policy that has become nearly certain "
                f"causes this, as do infinite weights: look at policy/entropy, and at the learning rate."
            )
            return
        self._drop_until_restart(member, reason)

    def distrust(self, server: ServerClient, trouble: str) -> None:
        """Note a bad reply of a server. It becomes LOST, and is dropped if its `bad_replies` reaches BAD_REPLIES."""
        member = self._members.get(server)
        if member is None or member.state is not ServerState.SERVING:
            return
        member.bad_replies += 1
        if member.bad_replies < BAD_REPLIES:
            self.lose(server, trouble)
            return
        member.bad_replies = 0
        self._drop_until_restart(member, f"{BAD_REPLIES} of its replies could not be used: {trouble}")

    def _drop_until_restart(self, member: Member, trouble: str) -> None:
        member.distrusted = (member.server.info.start if member.server.info else None) or ""
        self.drop(member.server, trouble)
        member.dropped_in = -1  # it failed no publication

    def lose(self, server: ServerClient, trouble: str) -> None:
        """Make a server LOST, so that it gets no more requests until it generates as before."""
        member = self._members.get(server)
        if member is None:  # removed permanently
            return
        member.trouble = trouble
        if member.state is not ServerState.SERVING:  # all its calls fail; only the first starts a watch and counts
            return
        member.failures += 1
        self._move(member, ServerState.LOST)
        self._watch(member)

    def drop(self, server: ServerClient, trouble: str) -> None:
        """Exclude a server until it has received weights again. Its requests are retried on other servers."""
        member = self._members.get(server)
        if member is None:
            return
        logger.warning("%s is left out: %s", server.url, trouble)
        self.lose(server, trouble)
        member.weights, member.trouble = None, trouble
        member.dropped_in = self._publications
        self._move(member, ServerState.LOST)
        self._watch(member)  # restart: the old watch may be about to return it with its previous weights
        if server in self.publishing:
            self.publishing.remove(server)
            self.number += 1
        server.abandon_calls()
        if self._on_drop is not None:  # last: the supervisor kills the server then, and nothing depends on it any more
            self._on_drop(server.url, trouble)

    async def select_servers(self, timeout_s: float, *, check: Callable[[], None] = lambda: None) -> None:
        """Select the servers of the next publication: all servers that answer.

        Raises ServerError if none answers within `timeout_s`. check: function that is called again and again while none
        answers. An exception that it raises ends the wait.
        """
        await self.stop_catching_up()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not (present := self._present()):
            if asyncio.get_running_loop().time() > deadline:
                raise ServerError(f"no rollout server answered for {timeout_s:g} s: {self.troubles()}")
            check()
            await asyncio.sleep(SELECT_POLL_S)
        for server in present:  # during a publication a server may name weights that it has only in part
            self._stop_watching(self._members[server])
        if set(present) != set(self.publishing):
            self.number += 1
            self.publishing = present

    async def stop_catching_up(self) -> None:
        """Forbid catching up. Cancel the servers that are catching up now, and wait until they have stopped."""
        self.may_catch_up = False  # first: no other may begin during the wait below
        for member in [member for member in self._members.values() if member.state is ServerState.CATCHING_UP]:
            if member.watcher is not None:
                member.watcher.cancel()
                await asyncio.wait([member.watcher])
            if member.state is not ServerState.SERVING:  # otherwise it finished before the cancellation
                self._watch(member)

    def _present(self) -> list[ServerClient]:
        present = [server for server, member in self._members.items() if member.state is not ServerState.LOST]
        # A server that failed this publication is used only if no other is left.
        return [s for s in present if self._members[s].dropped_in < self._publications] or present

    def mark_published(self, servers: list[ServerClient], weights: str) -> None:
        """End a publication: `servers` have the weights named `weights` and serve. The others do not serve any more."""
        for server, member in self._members.items():
            if server in servers:
                self._stop_watching(member)
                member.weights, member.is_published = weights, True
                member.bad_replies, member.distrusted, member.silent_since = 0, None, None
                member.unknown_logprobs.clear()
                member.is_restarted = False
                self._move(member, ServerState.SERVING)
            else:
                member.weights = None  # its weights are outdated: it must not return by their name
                if member.state is ServerState.SERVING:
                    self.lose(server, "left out of a publication")
        self._publications += 1
        self.may_catch_up = True

    def close(self) -> None:
        self._beat.end()
        if self._patrol is not None:
            self._patrol.cancel()
        for member in self._members.values():
            self._stop_watching(member)

    async def _go_round(self) -> None:
        """Ping all serving servers periodically, because calls to a hanging server do not fail."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_suspicious.wait(), min(PATROL_EVERY_S, self._patience_s))
            is_suspect = self._is_suspicious.is_set()
            self._is_suspicious.clear()
            visited = list(self.serving)
            visits = (self._visit(server, is_suspect) for server in visited)
            ends = await asyncio.gather(*visits, return_exceptions=True)
            for server, end in zip(visited, ends, strict=True):
                if isinstance(end, Exception):  # a bug of ours: one failed visit must not end the others
                    logger.error("the visit to %s failed", server.url, exc_info=end)

    async def _visit(self, server: ServerClient, is_suspect: bool) -> None:
        # Weight names are comparable only if no publication was in progress at any time between question and answer.
        published, publications = self.weights_of(server), self._publications
        may_compare = self.may_catch_up
        try:
            weights = await self.patiently(lambda: server.give_sign_of_life(timeout_s=self._patience_s))
        except ServerError as error:
            self.lose(server, str(error))
            server.abandon_calls()
            return
        may_compare = may_compare and self.may_catch_up and publications == self._publications
        if may_compare and None not in (weights, published) and weights != published:
            # The other client, which publishes, has updated it. `mark_published` will tell this client.
            is_ahead = VERSION.fullmatch(str(weights)) and VERSION.fullmatch(str(published))
            if not (self.follows and is_ahead and int(str(weights)) > int(str(published))):
                self.lose(server, f"has weights {weights!r}, and was published {published!r}")
                return
        if (member := self._members.get(server)) is None:
            return
        quiet_s = time.monotonic() - max(server.last_reply_s, server.busy_since)
        is_suspect = is_suspect or member.silent_since is not None
        # A paused server generates nothing. An idle one is not checked, as the check makes SGLang generate a token.
        if self.may_catch_up and (is_suspect or (server.calls and quiet_s >= self._patience_s)):
            with contextlib.suppress(ServerError, RequestRefused):
                await self._check_generation(member, timeout_s=self._patience_s)
        else:
            member.silent_since = None

    async def _check_generation(self, member: Member, *, timeout_s: float) -> None:
        """Raise ServerError or RequestRefused if the server does not generate within `timeout_s`.

        If all checks have failed for `patience_s`, the server also becomes LOST.
        """
        try:
            await self.patiently(lambda: member.server.check_generation(timeout_s=timeout_s))
        except (ServerError, RequestRefused) as error:
            # Be patient, because another client may have paused it.
            member.silent_since = member.silent_since or time.monotonic()
            if time.monotonic() - member.silent_since >= self._patience_s:
                self.lose(member.server, f"generates nothing: {error}")
                member.server.abandon_calls()
            raise
        member.silent_since = None

    async def patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `ask()`. Call it again if it fails while this event loop stalls.

        Such a stall looks like a failure of the server.
        """
        for _ in range(VISITS):
            lag = self._beat.lag_s
            try:
                return await ask()
            except ServerError:
                if self._beat.lag_s - lag <= LAG_SHARE * self._patience_s:
                    raise
        return await ask()

    def suspect(self) -> None:
        """Have all serving servers checked now, because one of them has failed and it is unknown which."""
        self._is_suspicious.set()

    def _watch(self, member: Member) -> None:
        self._stop_watching(member)

        async def watch() -> None:
            while member.state is not ServerState.SERVING:
                try:
                    await self._look_after(member)
                except Exception as error:  # a bug of ours must not end the watch
                    member.failures, member.trouble = member.failures + 1, f"{type(error).__name__}: {error}"
                    logger.error("the watch over %s begins again", member.server.url, exc_info=error)
                    # The error may have taken the place of a cancellation.
                    if (task := asyncio.current_task()) is not None and task.cancelling():
                        raise asyncio.CancelledError from error

        member.watcher = asyncio.get_running_loop().create_task(watch())

    def _stop_watching(self, member: Member) -> None:
        if member.watcher is not None:
            member.watcher.cancel()
            member.watcher = None

    async def _look_after(self, member: Member) -> None:
        # A server that passes every probe but fails every reply is probed less and less often.
        await asyncio.sleep(min(LONGEST_LOOK_S, FIRST_LOOK_S * 2 ** min(16, max(0, member.failures - 1))))
        server = member.server
        while True:
            try:
                info = await server.probe(timeout_s=LOOK_TIMEOUT_S)
                if member.distrusted is not None and member.distrusted != (info.start or ""):
                    member.distrusted = None  # it was restarted and may be healthy
                # If another client publishes, the server may have caught up; its name alone then shows that.
                is_as_before = self.follows or not member.is_published or server.has_same_start
                if member.weights is not None and info.weight_version == member.weights and is_as_before:
                    await self._check_generation(member, timeout_s=LOOK_TIMEOUT_S)
                    if member.weights == info.weight_version:  # otherwise a publication has overtaken it
                        if self.follows:
                            server.forget_start()
                        break
                if why := info.refusal(self._publication):
                    if member.trouble != (why := f"{server.url}: {why}"):
                        logger.warning("left out: %s", why)
                    raise ServerError(why)
                if member.weights is not None and not member.is_restarted:
                    # The process in the weight group is another one.
                    member.is_restarted, self.number = True, self.number + 1
                self._move(member, ServerState.BEHIND)
                if self.may_catch_up and member.distrusted is None and await self._has_caught_up(member):
                    break
            except (ServerError, RequestRefused) as error:
                member.trouble = str(error)
                self._move(member, ServerState.LOST)
            await asyncio.sleep(LOOK_EVERY_S)
        # No await between the last check and this line: a publication could begin and end in between.
        member.watcher, member.silent_since = None, None
        self._move(member, ServerState.SERVING)

    async def _has_caught_up(self, member: Member) -> bool:
        """Try to bring the server to the current weights, and return True on success.

        If it fails again and again, the wait after each failure becomes longer.
        """
        self._move(member, ServerState.CATCHING_UP)
        try:
            weights = await self._catch_up(member.server)
        except ServerError as error:
            member.trouble, member.failures = f"catching up: {error}", member.failures + 1
            logger.warning("%s did not catch up: %s", member.server.url, error)
            await asyncio.sleep(min(LONGEST_LOOK_S, FIRST_LOOK_S * 2 ** min(16, member.failures)))
            return False
        finally:
            if member.state is ServerState.CATCHING_UP:  # not dropped meanwhile
                self._move(member, ServerState.BEHIND)
        if weights is None:
            return False
        member.weights, member.is_published, member.is_restarted = weights, True, False
        if member.server not in self.publishing:  # it was dropped or is new, so the weight group lacks it
            self.publishing.append(member.server)
            self.number += 1
        return True
