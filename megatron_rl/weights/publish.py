"""Publishes the trainer's weights to the rollout servers over a process group, in flat buckets.

Rank 0 of the group is global rank 0 of the trainer; HTTP lives behind the WeightReceiver. Peak extra memory is one
bucket.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Iterable
from concurrent.futures import Future

import torch.distributed as dist
from torch import Tensor

from megatron_rl.api import WeightReceiver
from megatron_rl.update_group import join_update_group, leave_update_group, pack_bucket

logger = logging.getLogger(__name__)


class WeightPublisher:
    """Owns the trainer's end of the weight group. On ranks other than global rank 0 the receiver is None."""

    def __init__(
        self, receiver: WeightReceiver | None, *, bucket_bytes: int, backend: str, timeout_s: float = 300.0
    ) -> None:
        self.receiver, self.bucket_bytes, self.backend, self.timeout_s = receiver, bucket_bytes, backend, timeout_s
        self.group: dist.ProcessGroup | None = None
        self.group_name = ""
        self._membership = -1
        self._broken: list[dist.ProcessGroup] = []
        """Groups that lost a server. Their destructors would wait for broadcasts that nobody ends."""

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> bool:
        """Send all tensors as `version` to servers that are paused meanwhile. True where all that take part have them.

        False where a server was dropped meanwhile: the others stay paused with undefined weights until the next
        publish. RuntimeError where all servers refuse; they are resumed then. False on ranks without a receiver.
        """
        stream = iter(tensors)
        try:
            return self.receiver is not None and self._publish(stream, version)
        finally:
            for _ in stream:  # the stream is a collective
                pass

    def _publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> bool:
        receiver = self.receiver
        membership = receiver.membership
        try:
            receiver.pause()
            membership = receiver.membership  # servers whose death was not noticed before are out by now
            if self.group is None or self._membership != membership:
                self._connect()
            receiver.begin_weight_update(version)
            try:
                for bucket in _buckets(tensors, self.bucket_bytes):
                    self._send(bucket, version)
            finally:
                receiver.end_weight_update(version)
            receiver.resume()
        except RuntimeError as error:
            if self.group is not None:
                self._broken.append(self.group)
                self._leave()
            if receiver.membership == membership:
                receiver.resume()
                raise
            logger.warning("publication of version %d is repeated with the servers that are left: %s", version, error)
            return False
        return True

    def close(self) -> None:
        if self.group is not None:
            self._leave()

    def _leave(self) -> None:
        group, self.group = self.group, None
        leave_update_group(group)
        try:
            self.receiver.leave_weight_group(name=self.group_name)
        except RuntimeError as error:  # nobody is left to forget it
            logger.info("%s", error)

    def _connect(self) -> None:
        if self.group is not None:
            self._leave()
        self._membership = self.receiver.membership
        # A name of its own: servers that outlive a killed run still hold that run's group.
        self.group_name = f"megatron_rl_weights_{uuid.uuid4().hex[:8]}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        address = self.receiver.trainer_address()
        joined = self.receiver.join_weight_group(address=address, port=port, name=self.group_name, backend=self.backend)
        self.group = join_update_group(
            address=address,
            port=port,
            rank=0,
            world_size=1 + self.receiver.server_count,
            name=self.group_name,
            backend=self.backend,
            timeout_s=self.timeout_s,
        )
        joined.result(timeout=self.timeout_s)

    def _send(self, bucket: list[tuple[str, Tensor]], version: int) -> None:
        accepted = self.receiver.load_bucket(
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[list(tensor.shape) for _, tensor in bucket],
            group=self.group_name,
            version=version,
        )
        flat = pack_bucket([tensor for _, tensor in bucket])
        sent = dist.broadcast(flat, group=self.group, group_src=0, async_op=True)
        self._wait(sent, accepted)

    def _wait(self, sent: dist.Work, accepted: Future) -> None:
        """Wait for the servers' word first.

        One that refuses never joins the broadcast, which would hang until its deadline.
        """
        accepted.result(timeout=self.timeout_s)
        sent.wait()


def _buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterable[list[tuple[str, Tensor]]]:
    """Cut the stream into runs of one dtype of at most `bucket_bytes` (a larger tensor is a bucket of its own)."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and (size + tensor.nbytes > bucket_bytes or tensor.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
