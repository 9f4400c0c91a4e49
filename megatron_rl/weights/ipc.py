"""Publication to servers on the trainer's host: flat buckets in memory that both sides map, and nothing on a wire."""

from __future__ import annotations

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
    """Fills two shared buckets by turns: one while the servers read the other. Both are given back at the end."""

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
            self._left += [file for bucket in buckets if (file := bucket.close()) is not None]
            self._resume()

    def _filled(
        self, plan: list[list[TensorSpec]], tensors: Tensors, buckets: list[SharedBucket]
    ) -> Iterator[tuple[list[TensorSpec], SharedBucket]]:
        """Yield each bucket of the plan, in one of two that are added to `buckets`."""
        size, stream = max(sum(spec.nbytes for spec in specs) for specs in plan), iter(tensors)
        for number, specs in enumerate(plan):
            first = _planned(stream, specs[0])
            if len(buckets) < min(2, len(plan)):
                buckets.append(SharedBucket(size, first.device))
            # No server reads it any more: `_send_all` has one bucket on its way, while the next is made ready.
            bucket = buckets[number % 2]
            parts = unpack_bucket(bucket.flat[: sum(spec.nbytes for spec in specs)], specs)
            parts[0].copy_(first)
            for spec, part in zip(specs[1:], parts[1:], strict=True):
                part.copy_(_planned(stream, spec))
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
