"""Which parts of its memory each server holds, where servers share their devices with the trainer."""

from __future__ import annotations

from megatron_rl.servers.client import ServerClient

ALL_MEMORY = frozenset({"weights", "kv_cache"})
"""The parts that a server needs to generate, and has when it starts."""


class ServerMemory:
    """Of the servers of one client. SGLang dies of being asked for what it has, or to release what it lacks."""

    def __init__(self) -> None:
        self.wanted = ALL_MEMORY
        self._held: dict[str, tuple[int, frozenset[str]]] = {}
        """By URL: which start of the server it was, and what that one holds."""

    @property
    def is_whole(self) -> bool:
        return self.wanted == ALL_MEMORY

    async def bring(self, server: ServerClient, start: int, *, timeout_s: float) -> None:
        """Have a server hold what is wanted; ServerError where it does not manage, and holds nobody knows what.

        start: differs from one start of the server to the next. A server that releases memory is paused first, and what
        it was generating ends.
        """
        # Out until all went well: after a failure the server is dropped and killed, and its next start holds all.
        known, held = self._held.pop(server.url, (start, ALL_MEMORY))
        if known != start:
            held = ALL_MEMORY
        if surplus := held - self.wanted:
            # An assertion ends SGLang's scheduler where anything still runs.
            await server.pause("abort", flush=True, timeout_s=timeout_s)
            await server.command("/release_memory_occupation", {"tags": sorted(surplus)}, timeout_s=timeout_s)
        if missing := self.wanted - held:
            await server.command("/resume_memory_occupation", {"tags": sorted(missing)}, timeout_s=timeout_s)
        self._held[server.url] = start, self.wanted
