"""Publishes the trainer's weights to the rollout servers, which stand still until each has proved that it holds them.

The stream of tensors comes from `HFExport`, what the servers say from a WeightReceiver; HTTP lives behind that. A
server that fails, on the way or by its checksums, is dropped, and the others get the version all the same.

    trainer ranks   gather 0 |       | gather 1 | gather 2 |        |                   |
    rank 0                   | pause | send 0   | send 1   | send 2 | compare checksums | resume
    servers         generate | stop  | load 0   | load 1   | load 2 | take checksums    | generate, version N

A server that cannot be reached, is late, or holds other bits is dropped at the end of its column, and never resumed
with weights that nobody knows. Two transports are here: buckets over a process group (NCCL or gloo), the next one being
gathered while one is on the wire, so that two buckets and two tensors are all the extra memory (on a GPU also a bucket
of small tensors, until their checksums are taken); or a HF folder on a disk that the servers share. ipc.py has memory
that both sides map, delta.py the changes alone.
"""

from __future__ import annotations

import abc
import concurrent.futures
import itertools
import logging
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.api import ChecksumForm, HeldWeights, NoServerLeft, WeightReceiver
from megatron_rl.weights.checksums import ExpectedChecksums, differences
from megatron_rl.weights.hf_files import write_hf_folder
from megatron_rl.weights.update_group import (
    LOOK_S,
    TensorSpec,
    join_update_group,
    leave_update_group,
    unpack_bucket,
)

logger = logging.getLogger(__name__)

FLAT_BELOW_BYTES = 256 * 1024
"""Tensors of this size on average are broadcast from where they lie. Smaller ones are copied into one flat tensor: on a
processor a broadcast costs 0.1 ms before its first byte, and each byte is copied once more at either end."""
AFTERMATH_S = 5.0
"""Time for servers to notice that a group broke."""
SUMMED_BYTES = 1 << 26
"""Of tensors that are kept on a GPU until their checksums are taken in one launch, by a transport that does not keep
them anyway."""
NAMED_TENSORS = 3
"""Tensors of a mismatch that are named in the message."""

Tensors = Iterable[tuple[str, Tensor]]
Shipment = TypeVar("Shipment")
Sent = TypeVar("Sent")


@dataclass
class Publication:
    """The time and bytes of one publication."""

    version: int
    nbytes: int = 0
    seconds: float = 0.0
    paused_s: float = 0.0
    """Time that the servers stood still."""
    verified: int = 0
    """Tensors whose checksums were compared, summed over servers."""
    parts: list[tuple[str, str, float, float]] = field(default_factory=list)
    """Its parts, as (row, name, begin, end) on the monotonic clock: a trace shows them."""
    sent_bytes: int | None = None
    """Bytes on the wire, summed over servers, where they are not all bytes of the weights (delta)."""


class WeightPublisher(abc.ABC):
    """The part that all transports share: which servers are paused, failed, or hold which weights.

    All ranks have one; receiver is None on all but rank 0.

        publisher = make_publisher(receiver, config.actor, backend="nccl")  # engine/model_engine.py
        publisher.publish(specs, engine.hf_tensors(), version=7)  # specs: names, dtypes and shapes of the tensors
        publisher.last.seconds, publisher.last.verified
    """

    def __init__(self, receiver: WeightReceiver | None, *, timeout_s: float = 120.0) -> None:
        self.receiver, self.timeout_s = receiver, timeout_s
        self.last: Publication | None = None
        self._lost: dict[str, str] = {}
        self._paused_at: float | None = None
        self._known: set[str] = set()

    def publish(self, specs: list[TensorSpec], tensors: Tensors, version: int) -> None:
        """Bring the servers to these weights, listed in `specs`. All trainer ranks call it and so exhaust the stream.

        Servers are paused meanwhile and always resumed. NoServerLeft where not one holds the version then.
        """
        if self.receiver is None:
            for _ in tensors:  # the stream is a collective
                pass
            return
        self._lost, self._paused_at = {}, None
        self.last = Publication(version, nbytes=sum(spec.nbytes for spec in specs))
        started = time.perf_counter()
        checksums = ExpectedChecksums(self._forms())
        self._deliver(specs, checksums.watch(tensors, self._summed(specs)), version, checksums)
        self.last.seconds = time.perf_counter() - started

    def _summed(self, specs: list[TensorSpec]) -> list[list[TensorSpec]]:
        """Cut the stream into runs whose checksums are taken together."""
        return plan_buckets(specs, SUMMED_BYTES)

    @abc.abstractmethod
    def _deliver(
        self, specs: list[TensorSpec], tensors: Tensors, version: int, checksums: ExpectedChecksums
    ) -> None: ...

    def close(self) -> None:  # noqa: B027
        """Give back what is kept from one publication to the next. Rank 0 alone may have something."""

    # -- servers

    def _forms(self) -> list[ChecksumForm]:
        """Return how checksums have to be taken, and warn once of each server that cannot be asked for any."""
        forms = self.receiver.checksum_forms()
        for server in forms.keys() - self._known:
            if forms[server] is None:
                logger.warning("%s: its checksums cannot be taken here too, so its weights are not verified", server)
        self._known |= forms.keys()
        return [form for form in forms.values() if form is not None]

    def _lose(self, reasons: dict[str, str]) -> None:
        """Drop servers; NoServerLeft once that was the last."""
        for server, reason in reasons.items():
            logger.error("weight publication %d: %s is dropped: %s", self.last.version, server, reason)
            self.receiver.drop(server, reason)
        self._lost |= reasons
        if not self.receiver.server_ranks:
            raise NoServerLeft(
                f"weight publication {self.last.version}: no rollout server is left. "
                + " ".join(f"{server}: {reason}" for server, reason in self._lost.items())
            )

    def _collect(self, futures: dict[str, Future[Any]]) -> dict[str, Any]:
        """Return every server's answer; drop those that give none in time."""
        concurrent.futures.wait(futures.values(), timeout=self.timeout_s)
        self._lose(_failures(futures) | self._unfinished(futures))
        return {server: future.result() for server, future in futures.items() if server in self.receiver.server_ranks}

    def _unfinished(self, futures: dict[str, Future[Any]]) -> dict[str, str]:
        late = {server: f"did not finish within {self.timeout_s:g} s" for server, f in futures.items() if not f.done()}
        for server in late:
            futures[server].cancel()
        return late

    def _confirm(self, checksums: ExpectedChecksums) -> None:
        """Compare what the servers hold with what was sent; drop those that hold something else."""
        began = time.monotonic()
        forms = self.receiver.checksum_forms()
        answers: dict[str, HeldWeights] = self._collect(self.receiver.held_weights())
        sent = {form: checksums.of(form) for form in checksums.forms}
        wrong = {}
        for server, held in answers.items():
            form = forms[server]
            if held.version not in (None, str(self.last.version)):
                wrong[server] = f"has weight version {held.version}, {self.last.version} was sent"
            elif form is not None:
                names = differences(sent[form], held.checksums, complete=form.kind == "embedded")
                self.last.verified += len(sent[form].keys() & held.checksums.keys())
                if names:
                    more = f" and {len(names) - NAMED_TENSORS} more" if len(names) > NAMED_TENSORS else ""
                    wrong[server] = f"holds other weights than were sent: {', '.join(names[:NAMED_TENSORS])}{more}"
        self._note("publication", "verify", began)
        self._lose(wrong)

    def _send_all(
        self,
        shipments: Iterator[Shipment],
        send: Callable[[Shipment], Sent],
        complete: Callable[[Sent], object],
        checksums: ExpectedChecksums,
    ) -> None:
        """Pause the servers and send all, each shipment made ready while one is on its way; compare checksums."""
        shipments = self._noting_gathers(shipments)
        shipment, version = next(shipments), self.last.version  # made ready while the servers still generate
        self._pause()
        self.receiver.begin_weight_update(version)
        try:
            number, began = 0, time.monotonic()
            in_flight = send(shipment)
            for shipment in shipments:
                complete(in_flight)
                self._note("publication", f"bucket {number}", began)
                number, began = number + 1, time.monotonic()
                in_flight = send(shipment)
            complete(in_flight)
            self._note("publication", f"bucket {number}", began)
        finally:
            if self.receiver.server_ranks:
                self.receiver.end_weight_update(version)
        # Not finished before the checksums agree: `resume` after an update that was not ends what servers generate.
        self._confirm(checksums)
        self.receiver.finish_update(version)

    def _noting_gathers(self, shipments: Iterator[Shipment]) -> Iterator[Shipment]:
        began, number = time.monotonic(), 0
        for shipment in shipments:
            self._note("gathering", f"bucket {number}", began)
            yield shipment
            began, number = time.monotonic(), number + 1

    def _note(self, row: str, name: str, began: float) -> None:
        self.last.parts.append((row, name, began, time.monotonic()))

    def _pause(self) -> None:
        self._paused_at, began = time.perf_counter(), time.monotonic()
        self.receiver.pause()
        self._note("publication", "pause", began)

    def _resume(self) -> None:
        began = time.monotonic()
        if self.receiver.server_ranks:
            self.receiver.resume()
        self._note("publication", "resume", began)
        if self._paused_at is not None:
            self.last.paused_s = time.perf_counter() - self._paused_at


# -- a process group


@dataclass
class _Shipment:
    """A bucket on the wire."""

    specs: list[TensorSpec]
    pieces: list[Tensor]
    loads: dict[str, Future[None]]
    deadline: float


class GroupPublisher(WeightPublisher):
    """Sends buckets by broadcast from rank 0, with one HTTP request for each.

    The group lasts from one publication to the next. When a member dies it is broken for all: those that remain form
    a new one and are sent the bucket again.
    """

    def __init__(
        self, receiver: WeightReceiver | None, *, bucket_bytes: int, backend: str, timeout_s: float = 120.0
    ) -> None:
        super().__init__(receiver, timeout_s=timeout_s)
        self.bucket_bytes, self.backend = bucket_bytes, backend
        self.group: dist.ProcessGroup | None = None
        self._on_wire: list[dist.Work] = []
        """The broadcasts under way, kept nowhere else: gloo aborts the process, or hangs, where one outlives its group,
        as it would in the frames of a traceback."""
        self._membership, self._is_connected = -1, False

    def close(self) -> None:
        if self.group is not None:
            concurrent.futures.wait(self._leave().values(), timeout=self.timeout_s)

    def _summed(self, specs: list[TensorSpec]) -> list[list[TensorSpec]]:
        return plan_buckets(specs, self.bucket_bytes)  # a bucket's tensors are sent from where they lie

    def _deliver(self, specs: list[TensorSpec], tensors: Tensors, version: int, checksums: ExpectedChecksums) -> None:
        filled = fill_buckets(plan_buckets(specs, self.bucket_bytes), tensors)
        try:
            self._join()
            self._send_all(filled, lambda shipment: self._ship(*shipment), self._complete, checksums)
        finally:
            if self._on_wire:  # an error came between, and what the servers will have of it is unknown
                self._leave()
            for _ in tensors:  # the other ranks wait for the rest of the stream, whatever happened here
                pass
            self._resume()

    def _ship(self, specs: list[TensorSpec], pieces: Iterable[Tensor]) -> _Shipment:
        """Send a bucket, whose pieces are gathered meanwhile."""
        self._join()
        deadline = time.monotonic() + self.timeout_s
        # Asked first: a server takes part in the broadcast once it has this request, and not before.
        loads = self.receiver.load_bucket(
            names=[spec.name for spec in specs],
            dtypes=[str(spec.dtype).removeprefix("torch.") for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            group=self.group_name,
            version=self.last.version,
            flattened=is_flat(specs),
        )
        sent: list[Tensor] = []
        is_sent = True
        for piece in pieces:
            sent.append(piece)
            is_sent = is_sent and self._send(piece, loads, deadline)
        return _Shipment(specs, sent, loads, deadline)

    def _send(self, piece: Tensor, loads: dict[str, Future[None]], deadline: float) -> bool:
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
        while not concurrent.futures.wait([sending], LOOK_S).done:
            if _failures(loads) or time.monotonic() > deadline:
                return False
        if error := sending.exception():
            logger.warning("weight publication: a broadcast was not sent: %s", str(error))
            return False
        self._is_connected = True
        self._on_wire.append(sending.result())
        return True

    def _complete(self, shipment: _Shipment) -> None:
        """Wait until every server has the bucket, without those that never will."""
        broken_before = False
        while not self._arrived(shipment):
            refused = _failures(shipment.loads)
            self._leave()  # whoever still waits in the broadcast sees it break
            concurrent.futures.wait(shipment.loads.values(), timeout=AFTERMATH_S)
            # One that refuses never joins the broadcast, and one that died breaks it: the others are not to blame.
            blamed = self.receiver.unreachable() or refused or self._unfinished(shipment.loads)
            if not blamed and broken_before:
                blamed = dict.fromkeys(self.receiver.server_ranks, "the broadcast to it broke twice")
            broken_before = True
            self._lose(blamed)
            shipment = self._ship(shipment.specs, shipment.pieces)

    def _arrived(self, shipment: _Shipment) -> bool:
        """Wait for all answers and the broadcasts; False as soon as a server fails or the deadline has passed."""
        left_s = shipment.deadline - time.monotonic()
        loads = concurrent.futures.wait(
            shipment.loads.values(), timeout=left_s, return_when=concurrent.futures.FIRST_EXCEPTION
        )
        if loads.not_done or any(load.exception() for load in loads.done):
            return False
        try:
            for broadcast in self._on_wire:  # over, as every server has answered: this asks how it went
                broadcast.wait()
        except RuntimeError as error:
            logger.warning("weight publication: a broadcast broke: %s", str(error))
            return False
        self._on_wire = []
        return True

    def _join(self) -> None:
        """Form a group with the servers there are, if it is not theirs already; those that do not join are dropped."""
        while self.group is None or self._membership != self.receiver.membership:
            if self.group is not None:
                self._leave()
            self._lose(self.receiver.unreachable())  # nobody waits for a server that is known to be gone
            # A name of its own: servers that outlive a killed run still hold that run's group.
            self.group_name = f"megatron_rl_weights_{uuid.uuid4().hex[:8]}"
            self._membership = self.receiver.membership
            address = self.receiver.trainer_address()
            listener = socket.create_server((address, 0))  # before its port is told: nobody else can take it then
            port = listener.getsockname()[1]
            joins = self.receiver.join_weight_group(
                address=address, port=port, name=self.group_name, backend=self.backend
            )
            try:
                self.group = join_update_group(
                    address=address,
                    port=port,
                    rank=0,
                    world_size=1 + sum(self.receiver.server_ranks.values()),
                    name=self.group_name,
                    backend=self.backend,
                    timeout_s=self.timeout_s,
                    listener=listener,
                    is_hopeless=lambda joins=joins: bool(_failures(joins)),
                )
                self._is_connected = self.backend == "gloo"
                self._collect(joins)
            except (RuntimeError, TimeoutError) as error:  # torch's DistNetworkError is a RuntimeError
                if self.group is not None or not self.receiver.server_ranks:
                    raise
                logger.warning("weight publication: the group was not formed: %s", error)
                blamed = self.receiver.unreachable() or _failures(joins) or self._unfinished(joins)
                if not blamed:
                    raise
                self._lose(blamed)

    def _leave(self) -> dict[str, Future[None]]:
        """Leave the group, here and on the servers; a broken one is left as well."""
        left: list[Any] = [self.group, self._on_wire]
        self.group, self._on_wire = None, []
        leave_update_group(left[0])
        # gloo lets go of a group only when what is on the wire has arrived, and a dead peer never takes it. A list is
        # cleared from its end: the broadcasts go before their group.
        threading.Thread(target=left.clear, daemon=True).start()
        return self.receiver.leave_weight_group(name=self.group_name)


def plan_buckets(specs: list[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Cut the stream into runs of one dtype of at most `bucket_bytes` (a larger tensor is a bucket of its own)."""
    buckets: list[list[TensorSpec]] = []
    size = 0
    # Of one dtype, so that every tensor of a flat bucket begins at a multiple of its item size.
    for spec in specs:
        if not buckets or size + spec.nbytes > bucket_bytes or spec.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(spec)
        size += spec.nbytes
    return buckets


def is_flat(bucket: list[TensorSpec]) -> bool:
    """Return True if a bucket is sent as one flat tensor; otherwise each tensor has a broadcast of its own."""
    return len(bucket) > 1 and sum(spec.nbytes for spec in bucket) < FLAT_BELOW_BYTES * len(bucket)


def fill_buckets(
    buckets: list[list[TensorSpec]], tensors: Tensors
) -> Iterator[tuple[list[TensorSpec], Iterable[Tensor]]]:
    """Yield each bucket with what is to be sent: its tensors, or all their bytes as one tensor, `[n]` uint8.

    Tensors are taken from the stream as they are asked for, all but the first of a bucket; all have to be asked for
    before the next bucket is. Flat buckets are filled in two buffers by turns, one while the other is sent. ValueError
    where a tensor is not the one that the plan lists.
    """
    size = max((sum(spec.nbytes for spec in bucket) for bucket in buckets if is_flat(bucket)), default=0)
    stream = iter(tensors)
    buffers: list[Tensor] = []
    for number, bucket in enumerate(buckets):
        if not is_flat(bucket):
            planned = (_planned(stream, spec).contiguous() for spec in bucket)
            yield bucket, itertools.chain([next(planned)], planned)
            continue
        first = _planned(stream, bucket[0])
        while len(buffers) < 2:  # made here, as the first tensor tells the device
            buffers.append(torch.empty(size, dtype=torch.uint8, device=first.device))
        flat = buffers[number % 2][: sum(spec.nbytes for spec in bucket)]
        parts = unpack_bucket(flat, bucket)
        parts[0].copy_(first)
        for spec, part in zip(bucket[1:], parts[1:], strict=True):
            part.copy_(_planned(stream, spec))
        yield bucket, [flat]
    for name, tensor in stream:
        raise ValueError(f"weight publication: {name}, {tensor.dtype} came after all that was planned.")


def _planned(stream: Iterator[tuple[str, Tensor]], spec: TensorSpec) -> Tensor:
    """The next tensor of the stream, which must be the one that was planned."""
    name, tensor = next(stream, (None, None))
    if tensor is None or (name, tensor.dtype, tuple(tensor.shape)) != (spec.name, spec.dtype, spec.shape):
        found = "nothing" if tensor is None else f"{name}, {tensor.dtype}, {tuple(tensor.shape)}"
        raise ValueError(f"weight publication: {spec.name}, {spec.dtype}, {spec.shape} was planned, and {found} came.")
    return tensor.detach()


def _failures(futures: dict[str, Future[Any]]) -> dict[str, str]:
    """Return the servers that failed so far, with the reasons."""
    done = {server: future for server, future in futures.items() if future.done() and not future.cancelled()}
    return {server: str(future.exception()) for server, future in done.items() if future.exception() is not None}


# -- a disk


class DiskPublisher(WeightPublisher):
    """Writes a HF folder and has the servers load it: they stand still for the loading only.

    folder: on a disk that the servers read too; the last version stays in it.
    """

    def __init__(
        self, receiver: WeightReceiver | None, *, folder: Path, model_folder: str, timeout_s: float = 600.0
    ) -> None:
        super().__init__(receiver, timeout_s=timeout_s)
        self.folder, self.model_folder = folder.absolute(), model_folder

    def _deliver(self, specs: list[TensorSpec], tensors: Tensors, version: int, checksums: ExpectedChecksums) -> None:
        target = self._written(tensors, specs[0].dtype, version)  # while the servers still generate
        self._pause()
        try:
            began = time.monotonic()
            self._collect(self.receiver.load_folder(target, version))
            self._note("publication", "load folder", began)
            self._confirm(checksums)
            self.receiver.finish_update(version)
        finally:
            self._resume()
        # The disk holds two versions at most: the one before goes once no server reads it any more.
        for other in self.folder.glob("version-*"):
            if other != target:
                shutil.rmtree(other)

    def _written(self, tensors: Tensors, dtype: torch.dtype, version: int) -> Path:
        target = self.folder / f"version-{version}"
        write_hf_folder(target, tensors, model_folder=self.model_folder, dtype=dtype)
        return target
