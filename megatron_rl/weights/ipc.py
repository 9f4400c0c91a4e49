"""Publish to servers on the trainer's hosts through flat buckets in shared memory.

If servers run on several nodes, each bucket is broadcast to the first rank of every node, which puts a copy into shared
memory. The handles of the copies go back to rank 0, because only rank 0 talks to the servers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.api import WeightReceiver
from megatron_rl.parallel import Axis
from megatron_rl.weights.checksums import ExpectedChecksums
from megatron_rl.weights.publish import Tensors, WeightPublisher, as_planned, plan_buckets
from megatron_rl.weights.shared_bucket import REMEDY, SharedBucket
from megatron_rl.weights.update_group import TensorSpec, bytes_of, described, unpack_bucket


@dataclass(frozen=True)
class NodesOfServers:
    """The servers and first ranks of all nodes, for runs that start servers on several nodes.

    Only the first rank of each node uses it.
    """

    first_ranks: Axis
    urls: Sequence[Sequence[str]]
    """For each node, the URLs of its servers."""
    device: torch.device
    """Device on which this rank makes its buckets."""


class IPCPublisher(WeightPublisher):
    """Publishes through shared memory: fills a bucket while the servers read the previous one.

    Each bucket gets new memory, which is released once all servers have read it. If `nodes` is given, the first rank of
    each node makes a copy of each bucket. All ranks must then publish `HFExport.stream_in_step`, which keeps them at
    the same tensor.
    """

    def __init__(
        self,
        receiver: WeightReceiver | None,
        *,
        bucket_bytes: int,
        timeout_s: float = 120.0,
        nodes: NodesOfServers | None = None,
    ) -> None:
        super().__init__(receiver, timeout_s=timeout_s)
        self.bucket_bytes, self.nodes = bucket_bytes, nodes
        self._handle_forms: dict[str, str | None] = {}
        self._left: list[Path] = []
        """Bucket files that servers still had open. The next publication deletes them, in case a server is dead."""

    def close(self) -> None:
        while self._left:
            self._left.pop().unlink(missing_ok=True)

    def _deliver(self, specs: list[TensorSpec], tensors: Tensors, version: int, checksums: ExpectedChecksums) -> None:
        self.close()
        buckets: list[SharedBucket] = []
        filled = self._filled(plan_buckets(specs, self.bucket_bytes), tensors, buckets)
        try:
            known = [url for urls in self.nodes.urls for url in urls] if self.nodes is not None else []
            self._handle_forms = self.receiver.shared_memory_forms(known)
            elsewhere = [server for server, form in self._handle_forms.items() if form is None]
            self._lose({server: f"is on another host. {REMEDY}" for server in elsewhere})
            self._send_all(filled, lambda shipment: self._show(*shipment), self._collect, checksums)
        finally:
            for _ in filled:  # the stream is a collective: exhaust it even after a failure
                pass
            if self.nodes is not None:
                dist.broadcast_object_list([{}], group_src=0, group=self.nodes.first_ranks.group)  # says: all is read
            # Before the servers resume, so that a GPU shared with the trainer has the memory free for their caches.
            self._give_back_all_but(0, buckets)
            self._resume()

    @property
    def _ranks_exchange_more(self) -> bool:
        return self.nodes is not None

    def _follow(self, specs: list[TensorSpec], tensors: Tensors) -> None:
        """Serve one node: copy each bucket into its shared memory, and send the handles of the copies to rank 0.

        Runs on the first rank of each node other than rank 0's.
        """
        if self.nodes is None:
            return
        self.close()
        buckets: list[SharedBucket] = []
        plan, stream, asked = plan_buckets(specs, self.bucket_bytes), iter(tensors), [{}]
        group, own = self.nodes.first_ranks.group, self.nodes.urls[self.nodes.first_ranks.rank]
        for planned in plan:
            for _ in planned:
                next(stream)
            dist.broadcast_object_list(asked, group_src=0, group=group)
            self._give_back_all_but(1, buckets)  # rank 0's order implies that they are read, as in `_filled`
            buckets.append(bucket := SharedBucket(max(map(bytes_of, plan)), self.nodes.device))
            dist.broadcast(bucket.flat[: bytes_of(planned)], group_src=0, group=group)
            handles = {server: _handles(bucket, planned, *asked[0][server]) for server in own if server in asked[0]}
            dist.gather_object(handles, None, group_dst=0, group=group)
        dist.broadcast_object_list(asked, group_src=0, group=group)
        self._give_back_all_but(0, buckets)

    def _give_back_all_but(self, count: int, buckets: list[SharedBucket]) -> None:
        while len(buckets) > count:
            if (file := buckets.pop(0).close()) is not None:
                self._left.append(file)

    def _filled(
        self, plan: list[list[TensorSpec]], tensors: Tensors, buckets: list[SharedBucket]
    ) -> Iterator[tuple[list[TensorSpec], SharedBucket, dict[str, Any]]]:
        """Yield, for each bucket of the plan, its specs, the filled bucket, and the handles for servers on other nodes.

        The handles, {server URL: handle}, are those of the copies on the servers' nodes. buckets: list that holds each
        bucket until it is released. It never holds more than two.
        """
        planned = as_planned(itertools.chain.from_iterable(plan), tensors)
        for specs in plan:
            first = next(planned)
            # `_send_all` has one bucket in flight, so all servers have answered for the earlier ones. These are
            # released, not reused: a server answers once its copy is enqueued, and its GPU may still be copying. The
            # mapped memory stays valid until the server releases it, which torch delays until its copies are done.
            self._give_back_all_but(1, buckets)
            buckets.append(bucket := SharedBucket(max(map(bytes_of, plan)), first.device))
            parts = unpack_bucket(bucket.flat[: bytes_of(specs)], specs)
            for part, tensor in zip(parts, itertools.chain([first], planned), strict=False):
                part.copy_(tensor)
            yield specs, bucket, {} if self.nodes is None else self._copy_to(self.nodes, bucket, specs)
        next(planned, None)  # raises if further tensors follow

    def _copy_to(self, nodes: NodesOfServers, bucket: SharedBucket, specs: list[TensorSpec]) -> dict[str, Any]:
        """Send a bucket to the first ranks of the other nodes. Return {server URL: handle} for the servers there."""
        group, by_node = nodes.first_ranks.group, [{}] * nodes.first_ranks.size
        asked = {
            server: (self._handle_forms.get(server), ranks) for server, ranks in self.receiver.server_ranks.items()
        }
        dist.broadcast_object_list([asked], group_src=0, group=group)
        dist.broadcast(bucket.flat[: bytes_of(specs)], group_src=0, group=group)
        dist.gather_object({}, by_node, group_dst=0, group=group)
        return {server: told for handles in by_node for server, told in handles.items()}

    def _show(
        self, specs: list[TensorSpec], bucket: SharedBucket, elsewhere: dict[str, Any]
    ) -> dict[str, Future[None]]:
        """Send every server the handle of the bucket on its node. elsewhere: the handles for servers on other nodes.

        Return {server URL: future of the server's answer}.
        """
        told = {
            server: elsewhere.get(server) or _handles(bucket, specs, self._handle_forms[server], ranks)
            for server, ranks in self.receiver.server_ranks.items()
        }
        return self.receiver.load_shared(**described(specs), buckets=told, version=self.last.version)


def _handles(bucket: SharedBucket, specs: list[TensorSpec], form: str | None, ranks: int) -> Any:
    # One handle per reader, made only now: on a GPU it carries an event, so that the reader's stream waits for the
    # copies enqueued before it.
    return [bucket.pickled(specs) for _ in range(ranks)] if form == "pickle" else bucket.handle()
