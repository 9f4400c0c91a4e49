"""Brings a server that lacks the current weights up to date, between publications and without the trainer.

An embedded server gets the weights from a peer, which continues to serve meanwhile. Other servers load the folder of
the last publication. If the server reports checksums, they are compared with those of the publication. Only then the
server's weights get the name of the version.

A publication that begins meanwhile cancels the catch-up and waits for its end. Commands that a server cannot undo are
awaited instead of cancelled, so that none of them arrives in the middle of the publication.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.api import ChecksumForm
from megatron_rl.config import RolloutConfig
from megatron_rl.servers.client import ServerClient
from megatron_rl.servers.server_http import CommandRefused, ServerError
from megatron_rl.servers.sglang_draft import load_folder_into

logger = logging.getLogger(__name__)

UNCONFIRMED = "unconfirmed"
"""Name of a server's weights until they are verified. It is not a valid policy version."""
NAMED_TENSORS = 3


@dataclass(frozen=True)
class Current:
    """The weights that servers hold since the last publication, as known to the client that published them."""

    version: str
    checksums: dict[ChecksumForm, dict[str, str]]
    """{checksum form: {tensor name: checksum}} for each form that a server uses, as confirmed by the publication."""
    folder: str | None
    """Folder from which the servers loaded these weights. None if they came in another way."""


def source_for(server: ServerClient, serving: Sequence[ServerClient], current: Current) -> ServerClient | str | None:
    """Return the peer or folder from which the server can take the current weights.

    Return None if there is none, so that the server must wait for a publication. serving: the servers that serve now.
    """
    form = server.info.checksum_form if server.info else None
    if form is not None and form not in current.checksums:  # its checksums could not be compared
        return None
    peers = [peer for peer in serving if peer.info is not None and peer.info.checksum_form == form]
    if form is not None and form.kind == "embedded" and peers:
        return min(peers, key=lambda peer: len(peer.calls))
    return current.folder


async def catch_up(server: ServerClient, source: ServerClient | str, current: Current, config: RolloutConfig) -> None:
    """Have the server load the current weights, verify and name them, and resume it. Raises ServerError on failure.

    source: result of `source_for`.
    """
    assert server.info is not None
    timeout_s, load_timeout_s = config.control_timeout_s, config.start_timeout_s
    await _to_the_end(_clear(server, timeout_s))
    if isinstance(source, str):  # SGLang continues loading even if nobody waits
        await _to_the_end(load_folder_into(server, source, UNCONFIRMED, timeout_s=load_timeout_s))
    else:  # an embedded server stops loading if the caller disconnects
        body = {"peer_url": source.url, "peer_version": current.version, "weight_version": UNCONFIRMED}
        await server.command("/update_weights_from_peer", body, timeout_s=load_timeout_s)
    form = server.info.checksum_form
    if form is not None:
        held = await server.held_weights(form=form, timeout_s=load_timeout_s)
        checksums = current.checksums[form]
        names = sorted(n for n in checksums.keys() | held.checksums.keys() if checksums.get(n) != held.checksums.get(n))
        if names:
            more = f" and {len(names) - NAMED_TENSORS} more" if len(names) > NAMED_TENSORS else ""
            raise ServerError(  # it stays paused, under a name that is no policy version
                f"{server.url}: took version {current.version} and holds other weights than its peers: "
                f"{', '.join(names[:NAMED_TENSORS])}{more}"
            )
    await _to_the_end(_let_go_on(server, current.version, timeout_s))


async def _clear(server: ServerClient, timeout_s: float) -> None:
    """Abort all requests, flush the cache, and close the weight-update session that a failed publication left open."""
    await server.pause("abort", flush=True, timeout_s=timeout_s)
    if server.info is not None and server.info.has_sessions:
        with contextlib.suppress(CommandRefused):  # usually none is open
            await server.command("/end_weight_update", {}, timeout_s=timeout_s)


async def _let_go_on(server: ServerClient, version: str, timeout_s: float) -> None:
    # Set the name before it resumes, because tokens sampled in between would carry the name `unconfirmed`.
    body = {"new_version": version, "abort_all_requests": False}
    await server.command("/update_weight_version", body, timeout_s=timeout_s)
    await server.command("/continue_generation", {}, timeout_s=timeout_s)
    await server.check_health(timeout_s=timeout_s)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`. If the caller is cancelled meanwhile, wait until `work` has finished before the cancellation."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:  # the cancelling publication waits for the end of `work`, too
        try:
            await task
        except Exception as error:  # whatever it is, it must not take the place of the cancellation
            logger.info("a catch-up that was cancelled has failed", exc_info=error)
        raise
