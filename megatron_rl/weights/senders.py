"""The trainer ranks that send weights: a sender's process group with the servers, and the heads of pipeline stages."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_rl.parallel import Axis
from megatron_rl.weights.update_group import LOOK_S, TensorSpec, join_update_group, leave_update_group

logger = logging.getLogger(__name__)

ANSWERED = ("listen", "settle", "sums")
"""Orders from rank 0 that the other senders answer."""


@dataclass(frozen=True)
class StageHeads:
    """The senders of a pipelined model: the first rank of each stage."""

    heads: Axis | None
    """Axis of all stage heads. Its group uses gloo, so that orders never wait for a GPU kernel. None on other ranks."""
    specs: Sequence[list[TensorSpec]]
    """For each stage, the specs of its HF tensors in the order of the stream."""
    own_stage: int
    address_towards: Callable[[str], str]
    """Function from a host's name to the address at which that host reaches this rank's host."""

    @property
    def own_specs(self) -> list[TensorSpec]:
        return self.specs[self.own_stage]


class Sender:
    """Rank 0 of a process group. It sends weights to the other ranks, which are the servers."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        self.backend, self.timeout_s = backend, timeout_s
        self.group: dist.ProcessGroup | None = None
        self.on_wire: list[dist.Work] = []
        """Broadcasts in flight. Keep no other reference to them, not even in a traceback: gloo aborts the process, or
        hangs, if a broadcast outlives its group."""
        self._is_connected = False
        self._is_whole = True  # all pieces of the last round were put on the wire

    def join(self, listener: socket.socket, name: str, world_size: int, is_hopeless: Callable[[], bool]) -> None:
        """Form the group `name`, whose store listens on `listener`. Raises TimeoutError once `is_hopeless()` is True.

        world_size: number of ranks in the group, including this one.
        """
        address, port = listener.getsockname()
        place = {"address": address, "port": port, "rank": 0, "world_size": world_size, "listener": listener}
        options = {"backend": self.backend, "timeout_s": self.timeout_s, "is_hopeless": is_hopeless}
        self.group = join_update_group(name=name, **place, **options)
        self._is_connected = self.backend == "gloo"

    def send_all(self, pieces: Iterable[Tensor], is_hopeless: Callable[[], bool]) -> None:
        """Start a broadcast of each piece as it is yielded. All pieces are consumed, even if the group is broken.

        is_hopeless: no further broadcast is started once this function returns True.
        """
        is_sent = True
        for piece in pieces:
            is_sent = is_sent and self.group is not None and self._send(piece, is_hopeless)
        self._is_whole = is_sent

    def _send(self, piece: Tensor, is_hopeless: Callable[[], bool]) -> bool:
        """Start a broadcast and return True. Return False if the group is broken, or once `is_hopeless()` is True."""
        sending: Future[dist.Work] = Future()
        group = self.group

        def send() -> None:
            try:
                sending.set_result(dist.broadcast(piece, group=group, group_src=0, async_op=True))
            except RuntimeError as error:
                sending.set_exception(error)

        if self._is_connected:
            send()
        else:  # NCCL connects in a group's first broadcast, which blocks until all servers take part
            threading.Thread(target=send, daemon=True).start()
        while not wait([sending], LOOK_S).done:
            if is_hopeless():
                return False
        if error := sending.exception():
            logger.warning("weight publication: a broadcast was not sent: %s", str(error))
            return False
        self._is_connected = True
        self.on_wire.append(sending.result())
        return True

    def settle(self) -> bool:
        """Wait for all broadcasts in flight. Return True if every piece of the last `send_all` was sent and arrived."""
        try:
            for broadcast in self.on_wire:
                broadcast.wait()
        except RuntimeError as error:
            logger.warning("weight publication: a broadcast broke: %s", str(error))
            return False
        self.on_wire = []
        return self._is_whole

    def leave(self) -> None:
        """Leave the group, which may be broken. Does nothing if this rank is in no group."""
        if self.group is None:
            return
        left: list[Any] = [self.group, self.on_wire]
        self.group, self.on_wire = None, []
        leave_update_group(left[0])
        # In a thread: gloo releases a group only after its broadcasts have arrived, which a dead peer prevents. A list
        # is cleared from its end, so the broadcasts are released before their group.
        threading.Thread(target=left.clear, daemon=True).start()
