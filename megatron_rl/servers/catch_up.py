"""Brings a server that came late to the weights that the others serve, between publications and without the trainer.

They come from a peer that serves them, which goes on serving (embedded servers), or from the folder of the last
publication. The server is given the version's name only after it has proved that it holds what the peers were confirmed
to hold: whoever goes by the name never takes a half-loaded server for a whole one.

A publication that begins meanwhile wins: it cancels this and waits for it to end. What cannot be taken back from a
server is not cancelled but waited for, so that no command of this arrives in the middle of the publication.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.api import ChecksumForm
from megatron_rl.config import RolloutConfig
from megatron_rl.servers.client import ServerClient
from megatron_rl.servers.server_http import CommandRefused, ServerError

UNCONFIRMED = "unconfirmed"
"""The name of weights until they are proved. No policy version has this name."""
NAMED_TENSORS = 3


@dataclass(frozen=True)
class Current:
    """The weights that servers hold since the last publication, as the client knows that published it."""

    version: str
    checksums: dict[ChecksumForm, dict[str, str]]
    """Of every form that a server was confirmed in."""
    folder: str | None
    """The folder of these weights, for a publication over a disk."""


def source_for(server: ServerClient, serving: Sequence[ServerClient], current: Current) -> ServerClient | str | None:
    """Return the peer or the folder to take the weights from; None where only a publication helps.

    A server that says its checksums needs a confirmed one's to compare them with.
    """
    form = server.info.checksum_form if server.info else None
    if form is not None and form not in current.checksums:
        return None
    peers = [peer for peer in serving if peer.info is not None and peer.info.checksum_form == form]
    if form is not None and form.kind == "embedded" and peers:
        return min(peers, key=lambda peer: len(peer.calls))
    return current.folder


async def catch_up(server: ServerClient, source: ServerClient | str, current: Current, config: RolloutConfig) -> None:
    """Load, prove and name the weights, and let the server go on; ServerError where that fails.

    The server gets no requests meanwhile; what others had asked of it is aborted.
    """
    assert server.info is not None
    timeout_s, load_timeout_s = config.control_timeout_s, config.start_timeout_s
    # What follows may be cancelled between two steps, and within one only where the server itself gives it up then.
    await _to_the_end(_clear(server, timeout_s))
    if isinstance(source, str):  # SGLang goes on with it whether anyone waits or not
        body = {"model_path": source, "weight_version": UNCONFIRMED, "flush_cache": False}
        await _to_the_end(server.command("/update_weights_from_disk", body, timeout_s=load_timeout_s))
    else:  # an embedded server, which stops loading where the caller hangs up
        body = {"peer_url": source.url, "peer_version": current.version, "weight_version": UNCONFIRMED}
        await server.command("/update_weights_from_peer", body, timeout_s=load_timeout_s)
    form = server.info.checksum_form
    if form is not None:
        held = await server.held_weights(form=form, timeout_s=load_timeout_s)
        checksums = current.checksums[form]
        names = sorted(n for n in checksums.keys() | held.checksums.keys() if checksums.get(n) != held.checksums.get(n))
        if names:
            more = f" and {len(names) - NAMED_TENSORS} more" if len(names) > NAMED_TENSORS else ""
            raise ServerError(  # it stays paused, with a name that no policy version has
                f"{server.url}: took version {current.version} and holds other weights than its peers: "
                f"{', '.join(names[:NAMED_TENSORS])}{more}"
            )
    await _to_the_end(_let_go_on(server, current.version, timeout_s))


async def _clear(server: ServerClient, timeout_s: float) -> None:
    """Nothing runs, nothing is cached, and no session of a publication that it was dropped from is open."""
    await server.pause("abort", flush=True, timeout_s=timeout_s)
    if server.info is not None and server.info.has_sessions:
        with contextlib.suppress(CommandRefused):  # none is open, as a rule
            await server.command("/end_weight_update", {}, timeout_s=timeout_s)


async def _let_go_on(server: ServerClient, version: str, timeout_s: float) -> None:
    # Named before it goes on: a token sampled in between would bear a name that no version has.
    body = {"new_version": version, "abort_all_requests": False}
    await server.command("/update_weight_version", body, timeout_s=timeout_s)
    await server.command("/continue_generation", {}, timeout_s=timeout_s)
    await server.check_health(timeout_s=timeout_s)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`; where this is cancelled, only once the work is over."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:  # the publication that wants this ended waits as well, and then finds no one at it
        with contextlib.suppress(ServerError):
            await task
        raise
