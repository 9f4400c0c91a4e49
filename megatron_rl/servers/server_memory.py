"""Tracks which parts of its memory each server holds, if servers share their devices with the trainer."""

from __future__ import annotations

from megatron_rl.servers.client import ServerClient

ALL_MEMORY = frozenset({"weights", "kv_cache", "cuda_graph"})
"""SGLang's tags of the parts that a server holds when it starts. Servers without CUDA graphs ignore that tag."""


class ServerMemory:
    """The memory parts that each of one client's servers holds.

    They are tracked because SGLang crashes if it is asked to allocate a part that it holds, or to release a part that
    it lacks.
    """

    def __init__(self) -> None:
        self.wanted = ALL_MEMORY
        self._held: dict[str, tuple[int, frozenset[str]]] = {}
        """{URL: (number of the server's current instance, parts that it holds)}."""

    @property
    def is_whole(self) -> bool:
        return self.wanted == ALL_MEMORY

    async def bring(self, server: ServerClient, start: int, *, timeout_s: float) -> None:
        """Make a server hold exactly the parts in `wanted`.

        If the server must release parts, it is paused and its requests are aborted first.

        start: number that changes with each restart of the server.
        """
        # Removed until all succeeded: a server that fails is dropped and killed, and its next start holds all parts.
        known, held = self._held.pop(server.url, (start, ALL_MEMORY))
        if known != start:
            held = ALL_MEMORY
        if surplus := held - self.wanted:
            # SGLang's scheduler crashes on an assertion if anything still runs.
            await server.pause("abort", flush=True, timeout_s=timeout_s)
            await server.command("/release_memory_occupation", {"tags": sorted(surplus)}, timeout_s=timeout_s)
        if missing := self.wanted - held:
            await server.command("/resume_memory_occupation", {"tags": sorted(missing)}, timeout_s=timeout_s)
        self._held[server.url] = start, self.wanted
