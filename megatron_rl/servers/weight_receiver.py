"""The rollout servers as the weight publisher sees them: a WeightReceiver over HTTP. RolloutService is one."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_rl.api import SGLANG_DELTA_LOADER, SGLANG_ROUND_LOADER, ChecksumForm, HeldWeights
from megatron_rl.config import RolloutConfig
from megatron_rl.launch.ports import address_towards
from megatron_rl.servers.client import ADAPTERS, ServerClient
from megatron_rl.servers.event_loop import in_own_thread
from megatron_rl.servers.pool import Fleet
from megatron_rl.servers.server_http import CommandRefused
from megatron_rl.servers.sglang_draft import for_models_of, is_of_draft, load_folder_into

SIGN_OF_LIFE_S = 5.0


class ServerWeights(abc.ABC):
    """Base class that implements WeightReceiver (api.py) for the participating servers of `_fleet`.

    Those calls of WeightReceiver that wait are coroutines here, which run on the fleet's event loop. The other methods
    may be called from any thread.
    """

    config: RolloutConfig

    @property
    @abc.abstractmethod
    def _fleet(self) -> Fleet: ...

    @property
    def membership(self) -> int:
        return self._fleet.members.number

    @property
    def server_ranks(self) -> dict[str, int]:
        return {server.url: server.info.ranks for server in self._fleet.members.publishing if server.info is not None}

    async def drop(self, server: str, reason: str) -> None:
        members = self._fleet.members
        for client in [client for client in members.publishing if client.url == server]:
            members.drop(client, reason)

    async def pause(self) -> None:
        """Stop generation in the way that rollout.interruption says. Requests in flight continue after `resume`."""
        await self._fleet.pause()

    async def resume(self) -> None:
        await self._fleet.resume()

    def trainer_address(self) -> str:
        """Return the address at which the servers reach this host: that of the interface towards the first server."""
        return address_towards(str(urlsplit(self._fleet.members.publishing[0].url).hostname))

    async def unreachable(self) -> dict[str, str]:
        members = self._fleet.members
        asked = list(members.publishing)  # a copy, because the list may change meanwhile
        signs = (members.patiently(lambda s=s: s.give_sign_of_life(timeout_s=SIGN_OF_LIFE_S)) for s in asked)
        ends = await asyncio.gather(*signs, return_exceptions=True)
        return {s.url: str(end) for s, end in zip(asked, ends, strict=True) if isinstance(end, BaseException)}

    def join_weight_group(self, *, address: str, port: int, name: str, backend: str) -> dict[str, Future[None]]:
        self._fleet.check_publishable()
        # The trainer is rank 0. All servers must agree on the ranks, or the group never completes.
        ranks = self.server_ranks
        offsets = dict(zip(ranks, itertools.accumulate(ranks.values(), initial=1), strict=False))

        async def join(server: ServerClient) -> None:
            body = {
                "master_address": address,
                "master_port": port,
                "rank_offset": offsets[server.url],
                "world_size": 1 + sum(ranks.values()),
                "group_name": name,
                "backend": backend,
            }
            await server.command("/init_weights_update_group", body, timeout_s=self.config.start_timeout_s)

        return self._ask(join)

    def leave_weight_group(self, *, name: str) -> dict[str, Future[None]]:
        return self._ask(lambda server: self._command(server, "/destroy_weights_update_group", {"group_name": name}))

    async def begin_weight_update(self, version: int) -> None:
        """Open a weight-update session on servers that support sessions (SGLang 0.5.21 and later)."""
        self._fleet.begin_update()

        async def open_session(server: ServerClient) -> None:
            if server.info is None or not server.info.has_sessions:
                return
            try:
                await self._command(server, "/begin_weight_update", {})
            except CommandRefused:  # a trainer that was killed left its session open
                await self._command(server, "/end_weight_update", {})
                await self._command(server, "/begin_weight_update", {})

        await self._fleet.on_all(open_session)

    async def end_weight_update(self, version: int) -> None:
        async def close_session(server: ServerClient) -> None:
            if server.info is not None and server.info.has_sessions:
                await self._command(server, "/end_weight_update", {})

        await self._fleet.on_all(close_session)

    def load_bucket(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group: str,
        version: int,
        flattened: bool = True,
    ) -> dict[str, Future[None]]:
        bucket = {"names": names, "dtypes": dtypes, "shapes": shapes, "group": group, "flattened": flattened}
        return self.load_round([bucket], version, "")

    def load_round(self, buckets: list[dict[str, Any]], version: int, pickled: str) -> dict[str, Future[None]]:
        # The version is sent with each bucket, because servers without sessions have no other place for it. pause() has
        # flushed the cache; a flush that fails here kills servers up to 0.5.21.
        update = {"weight_version": str(version), "flush_cache": False}
        parts = [
            {key: bucket[key] for key in ("names", "dtypes", "shapes")}
            | {"group_name": bucket["group"], "load_format": "flattened_bucket" if bucket["flattened"] else None}
            for bucket in buckets
        ]
        has_head = any(is_of_draft(part["names"]) for part in parts)

        async def load(server: ServerClient) -> None:
            timeout_s, info = self.config.start_timeout_s, server.info
            # SGLang calls the loader for each model that it holds, and a round is received only once.
            if len(parts) > 1 and not has_head and info is not None and SGLANG_ROUND_LOADER in info.weight_loaders:
                body = {"load_format": SGLANG_ROUND_LOADER, "serialized_named_tensors": [pickled] * info.ranks}
                body |= {"selector": "target"} if info.has_draft else {}
                await server.command("/update_weights_from_tensor", body | update, timeout_s=timeout_s)
                return
            takes_several = len(parts) > 1 and info is not None and info.is_embedded
            for body in [{"parts": parts}] if takes_several else parts:
                body = for_models_of(server, body)
                await server.command("/update_weights_from_distributed", body | update, timeout_s=timeout_s)

        return self._ask(load)

    async def shared_memory_forms(self, at_hand: Sequence[str] = ()) -> dict[str, str | None]:
        servers = self._fleet.members.publishing
        form = {s.url: "handle" if s.info is not None and s.info.is_embedded else "pickle" for s in servers}
        # Resolving a host name may take seconds, so it must not block the loop.
        is_here = await in_own_thread(
            lambda: {url: url in at_hand or is_on_this_host(url) for url in form}, name="addresses"
        )
        return {url: form[url] if is_here[url] else None for url in form}

    def load_shared(
        self, *, names: list[str], dtypes: list[str], shapes: list[list[int]], buckets: dict[str, Any], version: int
    ) -> dict[str, Future[None]]:
        update = {"load_format": "flattened_bucket", "weight_version": str(version), "flush_cache": False}

        async def load(server: ServerClient) -> None:
            told = buckets[server.url]
            if isinstance(told, list):  # SGLang: a pickle for each of its ranks, including names and shapes
                body = for_models_of(server, update | {"serialized_named_tensors": told, "names": names})
                del body["names"]
            else:
                body = update | {"shared_memory": told, "names": names, "dtypes": dtypes, "shapes": shapes}
            await server.command("/update_weights_from_tensor", body, timeout_s=self.config.start_timeout_s)

        return self._ask(load)

    def change_forms(self) -> dict[str, str | None]:
        def form(server: ServerClient) -> str | None:
            if server.info is None or server.info.is_embedded:
                return "body"
            return "pickle" if SGLANG_DELTA_LOADER in server.info.weight_loaders else None

        return {server.url: form(server) for server in self._fleet.members.publishing}

    def load_changes(self, bodies: dict[str, bytes | list[str]], version: int) -> dict[str, Future[None]]:
        async def load(server: ServerClient) -> None:
            endpoint, body, timeout_s = "/update_weights_from_delta", bodies[server.url], self.config.start_timeout_s
            if isinstance(body, list):  # SGLang
                update = {"load_format": SGLANG_DELTA_LOADER, "weight_version": str(version), "flush_cache": False}
                endpoint, body = "/update_weights_from_tensor", update | {"serialized_named_tensors": body}
            await server.command(endpoint, body, timeout_s=timeout_s)

        return self._ask(load)

    def load_folder(self, path: str | Path, version: int) -> dict[str, Future[None]]:
        self._fleet.begin_update(folder=str(path))
        return self._ask(lambda server: self._load_folder(server, path, version))

    def load_adapters(self, path: str | Path, version: int) -> dict[str, Future[None]]:
        self._fleet.begin_update()
        timeout_s = self.config.start_timeout_s

        async def load(server: ServerClient) -> None:
            with contextlib.suppress(CommandRefused):  # no adapter is loaded yet
                await server.command("/unload_lora_adapter", {"lora_name": ADAPTERS}, timeout_s=timeout_s)
            body = {"lora_name": ADAPTERS, "lora_path": str(path)}
            await server.command("/load_lora_adapter", body, timeout_s=timeout_s)
            named = {"new_version": str(version), "abort_all_requests": False}
            await server.command("/update_weight_version", named, timeout_s=timeout_s)

        return self._ask(load)

    def checksum_forms(self) -> dict[str, ChecksumForm | None]:
        servers = self._fleet.members.publishing
        return {server.url: server.info.checksum_form if server.info else None for server in servers}

    def held_weights(self) -> dict[str, Future[HeldWeights]]:
        async def held(server: ServerClient) -> HeldWeights:
            form = server.info.checksum_form if server.info is not None else None
            answer = await server.held_weights(form=form, timeout_s=self.config.start_timeout_s)
            self._fleet.note_held(server, answer)
            return answer

        return self._ask(held)

    async def update_from_disk(self, path: str | Path, version: int) -> None:
        """Have all servers load a HF folder, which they must be able to read. They are paused while they load.

        version: policy version of the weights in the folder.
        """
        fleet = self._fleet
        was_open = fleet.open.is_set()
        if was_open:  # otherwise the caller has paused them and resumes them
            await fleet.pause()
        try:
            fleet.begin_update(folder=str(path))
            await fleet.on_all(lambda server: self._load_folder(server, path, version))
            self.finish_update(version)
        finally:
            if was_open:
                await fleet.resume()

    def finish_update(self, version: int) -> None:
        self._fleet.finish_update(version)
        self.set_version(version)  # before `resume` admits a reply of that version

    @abc.abstractmethod
    def set_version(self, version: int) -> None: ...

    async def _command(self, server: ServerClient, endpoint: str, body: dict[str, Any]) -> None:
        await server.command(endpoint, body, timeout_s=self.config.control_timeout_s)

    async def _load_folder(self, server: ServerClient, path: str | Path, version: int) -> None:
        await load_folder_into(server, path, str(version), timeout_s=self.config.start_timeout_s)

    def _ask(self, act: Callable[[ServerClient], Any]) -> dict[str, Future[Any]]:
        return {server.url: self._start(act(server)) for server in self._fleet.members.publishing}

    @abc.abstractmethod
    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine on the fleet's event loop. Callable from any thread."""


def is_on_this_host(url: str) -> bool:
    """Return True if a URL's address belongs to this host."""
    with contextlib.suppress(socket.gaierror):
        for family, *_, address in socket.getaddrinfo(urlsplit(url).hostname, None, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address[0], 0))  # allowed only for this host's own addresses
                return True
    return False
