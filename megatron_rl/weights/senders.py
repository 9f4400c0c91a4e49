"""The ranks that send weights: one's end of its group with the servers, and the heads of a pipeline's stages."""

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
"""Orders of rank 0 to the other senders that these answer."""


@dataclass(frozen=True)
class StageHeads:
    """The senders of a model in a pipeline: the first rank of each stage."""

    heads: Axis | None
    """None on other ranks. Its group is over gloo: orders wait for no kernel."""
    specs: Sequence[list[TensorSpec]]
    """Of each stage, in the order of its stream."""
    own_stage: int
    address_towards: Callable[[str], str]
    """The address of this rank's host as another host reaches it."""

    @property
    def own_specs(self) -> list[TensorSpec]:
        return self.specs[self.own_stage]


class Sender:
    """Rank 0 of a group whose other ranks are the servers'."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        self.backend, self.timeout_s = backend, timeout_s
        self.group: dist.ProcessGroup | None = None
        self.on_wire: list[dist.Work] = []
        """The broadcasts under way, kept nowhere else: gloo aborts the process, or hangs, where one outlives its group,
        as it would in the frames of a traceback."""
        self._is_connected = False
        self._is_whole = True
        """Whether all pieces of the last round were put on the wire."""

    def join(self, listener: socket.socket, name: str, world_size: int, is_hopeless: Callable[[], bool]) -> None:
        """Form the group, whose store listens there; TimeoutError once it is hopeless."""
        address, port = listener.getsockname()
        place = {"address": address, "port": port, "rank": 0, "world_size": world_size, "listener": listener}
        options = {"backend": self.backend, "timeout_s": self.timeout_s, "is_hopeless": is_hopeless}
        self.group = join_update_group(name=name, **place, **options)
        self._is_connected = self.backend == "gloo"

    def send_all(self, pieces: Iterable[Tensor], is_hopeless: Callable[[], bool]) -> None:
        """Put a broadcast of each on the wire, as it comes; all are asked for, whether the group is broken or not."""
        is_sent = True
        for piece in pieces:
            is_sent = is_sent and self.group is not None and self._send(piece, is_hopeless)
        self._is_whole = is_sent

    def _send(self, piece: Tensor, is_hopeless: Callable[[], bool]) -> bool:
        """Put a broadcast on the wire; False where the group is broken, or a server will not take part in it.

        NCCL connects within a group's first broadcast, which returns once all servers have come: another thread's.
        """
        sending: Future[dist.Work] = Future()
        group = self.group

        def send() -> None:
            try:
                sending.set_result(dist.broadcast(piece, group=group, group_src=0, async_op=True))
            except RuntimeError as error:
                sending.set_exception(error)

        if self._is_connected:
            send()
        else:
            threading.Thread(target=send, daemon=True).start()  # nothing interrupts it
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
        """Wait for what is on the wire, where all have it; False where that went wrong."""
        try:
            for broadcast in self.on_wire:
                broadcast.wait()
        except RuntimeError as error:
            logger.warning("weight publication: a broadcast broke: %s", str(error))
            return False
        self.on_wire = []
        return self._is_whole

    def leave(self) -> None:
        """Leave the group, which may be broken; nothing happens without one."""
        if self.group is None:
            return
        left: list[Any] = [self.group, self.on_wire]
        self.group, self.on_wire = None, []
        leave_update_group(left[0])
        # gloo lets go of a group only when what is on the wire has arrived, and a dead peer never takes it. A list is
        # cleared from its end: the broadcasts go before their group.
        threading.Thread(target=left.clear, daemon=True).start()
