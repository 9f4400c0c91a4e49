"""Publication to servers on the trainer's host: flat buckets in memory that both sides map, and nothing on a wire."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_rl.api import WeightReceiver
from megatron_rl.weights.checksums import ExpectedChecksums
from megatron_rl.weights.publish import Tensors, WeightPublisher, _planned, plan_buckets
from megatron_rl.weights.shared_bucket import REMEDY, SharedBucket
from megatron_rl.weights.update_group import TensorSpec, unpack_bucket


class IPCPublisher(WeightPublisher):
    """Fills a shared bucket while the servers read the one before. Each has memory of its own, given back once read."""

    def __init__(self, receiver: WeightReceiver | None, *, bucket_bytes: int, timeout_s: float = 120.0) -> None:
        super().__init__(receiver, timeout_s=timeout_s)
        self.bucket_bytes = bucket_bytes
        self._left: list[Path] = []
        """Files that servers which died had open. One that only hangs may still let go of its own."""

    def close(self) -> None:
        while self._left:
            self._left.pop().unlink(missing_ok=True)

    def _deliver(self, specs: list[TensorSpec], tensors: Tensors, version: int, checksums: ExpectedChecksums) -> None:
        self.close()
        buckets: list[SharedBucket] = []
        filled = self._filled(plan_buckets(specs, self.bucket_bytes), tensors, buckets)
        try:
            forms = self.receiver.shared_memory_forms()
            self._lose({server: f"is on another host. {REMEDY}" for server, form in forms.items() if form is None})
            self._send_all(filled, lambda shipment: self._show(*shipment, forms), self._collect, checksums)
        finally:
            for _ in filled:  # the other ranks wait for the rest of the stream, whatever happened here
                pass
            # Before the servers go on: a GPU that they share with the trainer has the memory back for their caches.
            for bucket in buckets:
                self._give_back(bucket)
            self._resume()

    def _give_back(self, bucket: SharedBucket) -> None:
        if (file := bucket.close()) is not None:
            self._left.append(file)

    def _filled(
        self, plan: list[list[TensorSpec]], tensors: Tensors, buckets: list[SharedBucket]
    ) -> Iterator[tuple[list[TensorSpec], SharedBucket]]:
        """Yield each bucket of the plan; `buckets` are those that are not given back, two at most."""
        size, stream = max(sum(spec.nbytes for spec in specs) for specs in plan), iter(tensors)
        for specs in plan:
            first = _planned(stream, specs[0])
            if len(buckets) == 2:  # all servers have answered for it: `_send_all` has one on its way at a time
                # Given back, not filled again: a server answers when its copy is asked for, which its GPU may still be
                # at. Whatever it maps stays as it is until it lets go, for which torch has it wait for its copies.
                self._give_back(buckets.pop(0))
            buckets.append(bucket := SharedBucket(size, first.device))
            planned = itertools.chain([first], (_planned(stream, spec) for spec in specs[1:]))
            parts = unpack_bucket(bucket.flat[: sum(spec.nbytes for spec in specs)], specs)
            for part, tensor in zip(parts, planned, strict=True):
                part.copy_(tensor)
            yield specs, bucket
        for name, tensor in stream:
            raise ValueError(f"weight publication: {name}, {tensor.dtype} came after all that was planned.")

    def _show(
        self, specs: list[TensorSpec], bucket: SharedBucket, forms: dict[str, str | None]
    ) -> dict[str, Future[None]]:
        """Tell every server where a bucket is."""
        told: dict[str, Any] = {}
        for server, ranks in self.receiver.server_ranks.items():
            # A handle for each reader, and made now, as it carries an event: on a GPU the reader's stream waits for
            # the copies that were asked for before it.
            is_pickled = forms[server] == "pickle"
            told[server] = [bucket.pickled(specs) for _ in range(ranks)] if is_pickled else bucket.handle()
        return self.receiver.load_shared(
            names=[spec.name for spec in specs],
            dtypes=[str(spec.dtype).removeprefix("torch.") for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            buckets=told,
            version=self.last.version,
        )
