"""SGLang's router (sglang-router 0.3) in front of the servers: it picks one for each request.

It forwards no control calls, knows nothing of versions, and goes on sending requests to a server that was restarted and
has no weights. So it is told which servers there are whenever that changes, before the first request that counts on it;
and a reply with a token of an older version than the request's is refused, for no server that may serve gives one.
"""

from __future__ import annotations

import asyncio

from megatron_rl.api import RequestRefused
from megatron_rl.servers.client import ServerClient
from megatron_rl.servers.reply_check import as_object, member
from megatron_rl.servers.server_http import ServerError

POLL_S = 0.05


class Router:
    """Calls one router. All coroutines run on the loop of its client's session."""

    def __init__(self, client: ServerClient) -> None:
        self.client = client
        """Takes requests as a server does."""
        self._changing = asyncio.Lock()

    async def serve_with(self, urls: list[str], *, timeout_s: float) -> None:
        """Make these its servers, and wait until it has them; ServerError where it does not.

        Where others were, every request under way is asked again: the router alone knows whose they were to answer.
        """
        async with self._changing:  # two changes at once would take each other's servers out
            deadline = asyncio.get_running_loop().time() + timeout_s
            known = await self._workers(timeout_s)
            left_out = known.keys() - set(urls)
            try:
                for url in left_out:  # before others come in: what is wrong must get no more requests
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
            finally:  # also where it failed half way: some may be out
                if left_out:
                    self.client.abandon_calls()

    async def _workers(self, timeout_s: float) -> dict[str, str]:
        """URL -> its id."""
        try:
            answer = await self.client.call_json("GET", "/workers", timeout_s=timeout_s)
            workers = [as_object("a worker", worker) for worker in member(answer, "workers", list)]
            return {member(worker, "url", str).rstrip("/"): member(worker, "id", str) for worker in workers}
        except ValueError as error:  # RequestRefused too
            raise ServerError(
                f"rollout.router = {self.client.url!r}: /workers answered nothing that it is known for ({error!r}); "
                f"is this sglang-router 0.3?"
            ) from error

    async def _call(self, method: str, endpoint: str, body: dict[str, str] | None, timeout_s: float) -> None:
        try:
            await self.client.call(method, endpoint, body, timeout_s=timeout_s)
        except RequestRefused as error:
            raise ServerError(f"rollout.router = {self.client.url!r}: {error}") from error
