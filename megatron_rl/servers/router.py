"""SGLang's router (sglang-router 0.3), which stands in front of the servers and picks one for each request.

The router forwards no control calls and does not know versions. It even sends requests to a restarted server that has
no weights. Therefore this client tells it the set of servers after every change of this set.
"""

from __future__ import annotations

import asyncio

from megatron_rl.api import RequestRefused
from megatron_rl.servers.client import ServerClient
from megatron_rl.servers.reply_check import as_object, member
from megatron_rl.servers.server_http import ServerError

POLL_S = 0.05


class Router:
    """One router, controlled through `client`. The same client also sends requests to it, as to a server."""

    def __init__(self, client: ServerClient) -> None:
        self.client = client
        self._changing = asyncio.Lock()

    async def serve_with(self, urls: list[str], *, timeout_s: float) -> None:
        """Set the router's servers and wait until it lists exactly these. Raises ServerError after `timeout_s`.

        If a server is removed, all requests in flight are sent again, because it is unknown which of them it has.
        """
        async with self._changing:  # two concurrent changes would remove each other's servers
            deadline = asyncio.get_running_loop().time() + timeout_s
            known = await self._workers(timeout_s)
            left_out = known.keys() - set(urls)
            try:
                for url in left_out:  # before adding others: wrong servers must get no more requests
                    await self._call("DELETE", f"/workers/{known[url]}", None, timeout_s)
                for url in [url for url in urls if url not in known]:
                    await self._call("POST", "/workers", {"url": url}, timeout_s)
                while (known := await self._workers(timeout_s)).keys() != set(urls):
                    if asyncio.get_running_loop().time() > deadline:
                        raise ServerError(
                            f"rollout.router = {self.client.url!r}: its servers are {sorted(known)} after "
                            f"{timeout_s:g} s, {sorted(urls)} were named; can it reach them?"
                        )
                    await asyncio.sleep(POLL_S)
            finally:  # even after a failure half way, when some may be out
                if left_out:
                    self.client.abandon_calls()

    async def _workers(self, timeout_s: float) -> dict[str, str]:
        """Return {URL: the router's worker id} of the servers that the router lists."""
        try:
            answer = await self.client.call_json("GET", "/workers", timeout_s=timeout_s)
            workers = [as_object("a worker", worker) for worker in member(answer, "workers", list)]
            return {member(worker, "url", str).rstrip("/"): member(worker, "id", str) for worker in workers}
        except ValueError as error:  # includes RequestRefused
            raise ServerError(
                f"rollout.router = {self.client.url!r}: /workers answered nothing that it is known for ({error!r}); "
                f"is this sglang-router 0.3?"
            ) from error

    async def _call(self, method: str, endpoint: str, body: dict[str, str] | None, timeout_s: float) -> None:
        try:
            await self.client.call(method, endpoint, body, timeout_s=timeout_s)
        except RequestRefused as error:
            raise ServerError(f"rollout.router = {self.client.url!r}: {error}") from error
