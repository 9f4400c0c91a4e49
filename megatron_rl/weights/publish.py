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
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_rl.adapter_sums import sum_of, write_sums
from megatron_rl.api import ChecksumForm, HeldWeights, NoServerLeft, WeightReceiver
from megatron_rl.config import LoraConfig
from megatron_rl.weights.adapter_rules import write_peft_folder
from megatron_rl.weights.checksums import ExpectedChecksums, differences
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.hf_files import write_hf_folder
from megatron_rl.weights.peft_config import PEFT_PREFIX
from megatron_rl.weights.senders import ANSWERED, Sender, StageHeads
from megatron_rl.weights.sglang_loaders import pickled_round
from megatron_rl.weights.update_group import TensorSpec, unpack_bucket

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

    All ranks have one; receiver is None on all but rank 0. What is published is the whole stream of weights on rank 0,
    or where `is_by_stage` each stage's on its head.

        publisher = make_publisher(receiver, config.actor, backend="nccl")  # engine/model_engine.py
        publisher.publish(specs, engine.hf_tensors(), version=7)  # specs: names, dtypes and shapes of the tensors
        publisher.last.seconds, publisher.last.verified
    """

    is_by_stage = False

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
        sent, wrong = self._sums(checksums), {}
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

    def _sums(self, checksums: ExpectedChecksums) -> dict[ChecksumForm, dict[str, str]]:
        """Return the checksums of all that was sent."""
        return {form: checksums.of(form) for form in checksums.forms}

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


# -- process groups


@dataclass
class _Shipment:
    """A round on the wire: a bucket of each sender."""

    number: int
    loads: dict[str, Future[None]]
    deadline: float


class GroupPublisher(WeightPublisher):
    """Sends buckets by broadcast, each sender its own in a group with all servers; rank 0 alone talks to the servers.

    Without `stages` rank 0 is the only sender. With them the head of each pipeline stage is one, and what all ranks
    publish is `HFExport.stream_of_stage`: a round is a bucket of each sender, which travel at the same time, from
    different hosts, to servers that take them together, and one after the other to those that do not.

        heads of stages    0: bucket 0 | bucket 1 | ...        rank 0 tells them `send`, and `settle` once every server
                           1: bucket 0 | bucket 1 |            has answered; on a failure `leave`, `join` and `send`
        servers                 round 0 | round 1  | ...       again, in new groups of those that are left

    The groups last from one publication to the next. When a member dies all are given up: those that remain form new
    ones and are sent the round again.
    """

    def __init__(
        self,
        receiver: WeightReceiver | None,
        *,
        bucket_bytes: int,
        backend: str,
        timeout_s: float = 120.0,
        stages: StageHeads | None = None,
    ) -> None:
        super().__init__(receiver, timeout_s=timeout_s)
        self.bucket_bytes, self.stages = bucket_bytes, stages
        self.is_by_stage = stages is not None
        self.sender = Sender(backend, timeout_s)
        self._membership = -1
        self._names: list[str] = []
        """Of the senders' groups, in the order of their stages."""
        self._parts: list[list[list[TensorSpec]]] = []
        """The buckets of each sender."""
        self._shipped: list[Tensor] = []
        """This sender's pieces of the last round, which may have to be sent again."""

    def publish(self, specs: list[TensorSpec], tensors: Tensors, version: int) -> None:
        if self.receiver is None and self.stages is not None and self.stages.heads is not None:
            self._follow(tensors)
        else:
            super().publish(specs, tensors, version)

    def close(self) -> None:
        if self.sender.group is not None and self.receiver is not None:
            concurrent.futures.wait(self._leave_servers(), timeout=self.timeout_s)
        self.sender.leave()

    def _summed(self, specs: list[TensorSpec]) -> list[list[TensorSpec]]:
        own = specs if self.stages is None else self.stages.own_specs
        return plan_buckets(own, self.bucket_bytes)  # a bucket's tensors are sent from where they lie

    def _deliver(self, specs: list[TensorSpec], tensors: Tensors, version: int, checksums: ExpectedChecksums) -> None:
        of_stages = [specs] if self.stages is None else self.stages.specs
        self._parts = [plan_buckets(of_stage, self.bucket_bytes) for of_stage in of_stages]
        try:
            self._tell("begin", checksums.forms)
            self._join()
            self._send_all(self._rounds(tensors), lambda one: self._ship(*one), self._complete, checksums)
        finally:
            if self.sender.on_wire:  # an error came between, and what the servers will have of it is unknown
                self._leave()
            self._tell("end")
            self._shipped = []
            for _ in tensors:  # the other ranks wait for the rest of the stream, whatever happened here
                pass
            self._resume()

    # -- what rank 0 tells the other senders, and what they do

    def _tell(self, order: str, *details: Any) -> list[Any]:
        """Give the other senders an order, as rank 0; return their answers to one that is answered."""
        if self.stages is None:
            return []
        group = self.stages.heads.group
        dist.broadcast_object_list([(order, *details)], group_src=0, group=group)
        answers: list[Any] = [None] * len(self.stages.specs)
        if order in ANSWERED:
            dist.gather_object(None, answers, group_dst=0, group=group)
        return answers[1:]

    def _follow(self, tensors: Tensors) -> None:
        """Do what rank 0 tells this sender, and then exhaust the stream."""
        heads, sender = self.stages.heads, self.sender
        number, filled = -1, iter(())
        checksums = ExpectedChecksums([])
        while True:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, group_src=0, group=heads.group)
            order, *details = told[0]
            answer: Any = None
            if order == "begin":
                checksums = ExpectedChecksums(details[0])
                own = plan_buckets(self.stages.own_specs, self.bucket_bytes)
                tensors = checksums.watch(tensors, self._summed([]))
                filled = fill_buckets(own, tensors)
                ahead = next(filled, None)  # gathered while the servers still generate
            elif order == "listen":
                listener = socket.create_server((self.stages.address_towards(details[0]), 0))
                answer = listener.getsockname()
            elif order == "join":
                self._names, world_size = details
                try:
                    sender.join(listener, self._names[heads.rank], world_size, self._is_hopeless)
                except (RuntimeError, TimeoutError) as error:  # which rank 0 hears of from the servers
                    logger.warning("weight publication: a group was not formed: %s", error)
            elif order == "send":
                if details[0] > number:
                    number, pieces = details[0], () if ahead is None else ahead[1]
                    self._shipped = []
                    sender.send_all(self._keeping(pieces), self._is_hopeless)
                    ahead = next(filled, None)
                else:
                    sender.send_all(self._shipped, self._is_hopeless)
            elif order == "settle":
                answer = sender.settle()
            elif order == "leave":
                sender.leave()
            elif order == "sums":
                answer = {form: checksums.of(form) for form in checksums.forms}
            if order in ANSWERED:
                dist.gather_object(answer, None, group_dst=0, group=heads.group)
            if order == "end":
                break
        self._shipped = []
        for _ in tensors:
            pass

    def _keeping(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        for piece in pieces:
            self._shipped.append(piece)
            yield piece

    def _is_hopeless(self) -> bool:
        """True where rank 0 has given the groups up, which a sender that waits for a server cannot be told."""
        return bool(c10d._get_default_store().check([self._names[0]]))

    def _sums(self, checksums: ExpectedChecksums) -> dict[ChecksumForm, dict[str, str]]:
        sums = super()._sums(checksums)
        for of_sender in self._tell("sums"):
            for form, own in of_sender.items():
                sums[form] |= own
        return sums

    # -- a round

    def _rounds(self, tensors: Tensors) -> Iterator[tuple[int, Iterable[Tensor]]]:
        """Yield every round's number and this rank's pieces, which are gathered meanwhile."""
        filled = fill_buckets(self._parts[0], tensors)
        for number in range(max(map(len, self._parts))):
            yield number, next(filled, (None, ()))[1]
        next(filled, None)  # which says whether more came than was planned

    def _ship(self, number: int, pieces: Iterable[Tensor]) -> _Shipment:
        """Send a round, whose pieces are gathered meanwhile."""
        self._join()
        deadline = time.monotonic() + self.timeout_s
        self._tell("send", number)
        parts = [
            {
                "names": [spec.name for spec in specs],
                "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
                "group": name,
                "flattened": is_flat(specs),
            }
            for name, own in zip(self._names, self._parts, strict=True)
            for specs in own[number : number + 1]
        ]
        version, receiver = self.last.version, self.receiver
        if len(parts) == 1:
            loads = receiver.load_bucket(**parts[0], version=version)
        else:
            loads = receiver.load_round(parts, version, pickled_round(parts))
        self._shipped = []
        is_hopeless = lambda: bool(_failures(loads)) or time.monotonic() > deadline  # noqa: E731
        self.sender.send_all(self._keeping(pieces), is_hopeless)
        return _Shipment(number, loads, deadline)

    def _complete(self, shipment: _Shipment) -> None:
        """Wait until every server has the round, without those that never will."""
        broken_before = False
        while not self._arrived(shipment):
            refused = _failures(shipment.loads)
            self._leave()  # whoever still waits in a broadcast sees it break
            concurrent.futures.wait(shipment.loads.values(), timeout=AFTERMATH_S)
            # One that refuses never joins the broadcast, and one that died breaks it: the others are not to blame.
            blamed = self.receiver.unreachable() or refused or self._unfinished(shipment.loads)
            if not blamed and broken_before:
                blamed = dict.fromkeys(self.receiver.server_ranks, "the broadcast to it broke twice")
            broken_before = True
            self._lose(blamed)
            shipment = self._ship(shipment.number, list(self._shipped))

    def _arrived(self, shipment: _Shipment) -> bool:
        """Wait for all answers and the broadcasts; False as soon as a server fails or the deadline has passed."""
        left_s = shipment.deadline - time.monotonic()
        loads = concurrent.futures.wait(
            shipment.loads.values(), timeout=left_s, return_when=concurrent.futures.FIRST_EXCEPTION
        )
        if loads.not_done or any(load.exception() for load in loads.done):
            return False
        # Over, as every server has answered: this asks how it went.
        return all([*self._tell("settle"), self.sender.settle()])

    # -- the groups

    def _join(self) -> None:
        """Form groups with the servers there are, if these are not in them; those that do not join are dropped."""
        while self.sender.group is None or self._membership != self.receiver.membership:
            if self.sender.group is not None:
                self._leave()
            self._lose(self.receiver.unreachable())  # nobody waits for a server that is known to be gone
            # Names of their own: servers that outlive a killed run still hold that run's groups.
            run = f"megatron_rl_weights_{uuid.uuid4().hex[:8]}"
            count = 1 if self.stages is None else len(self.stages.specs)
            self._names = [f"{run}_{number}" for number in range(count)]
            self._membership = self.receiver.membership
            world_size = 1 + sum(self.receiver.server_ranks.values())
            # Before its port is told: nobody else can take it then.
            listener = socket.create_server((self.receiver.trainer_address(), 0))
            others = self._tell("listen", urlsplit(next(iter(self.receiver.server_ranks))).hostname)
            self._tell("join", self._names, world_size)
            joins: dict[str, Future[None]] = {}
            try:
                for number, (address, port) in enumerate([listener.getsockname(), *others]):
                    joins = self.receiver.join_weight_group(
                        address=address, port=port, name=self._names[number], backend=self.sender.backend
                    )
                    if number == 0:
                        is_hopeless = lambda joins=joins: bool(_failures(joins))  # noqa: E731
                        self.sender.join(listener, self._names[0], world_size, is_hopeless)
                    else:
                        concurrent.futures.wait(
                            joins.values(), self.timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION
                        )
                        if _failures(joins):  # the others wait for it in vain, and so does the sender
                            raise TimeoutError(f"update group {self._names[number]}: a server will not come")
                    self._collect(joins)
            except NoServerLeft:
                raise
            except (RuntimeError, TimeoutError) as error:  # torch's DistNetworkError is a RuntimeError
                logger.warning("weight publication: a group was not formed: %s", error)
                self._leave()
                blamed = self.receiver.unreachable() or _failures(joins) or self._unfinished(joins)
                if not blamed:
                    raise
                self._lose(blamed)

    def _leave(self) -> None:
        """Leave the groups, here, on the other senders and on the servers; broken ones are left as well."""
        if self.stages is not None:
            c10d._get_default_store().set(self._names[0], "given up")
        self.sender.leave()
        self._tell("leave")
        self._leave_servers()

    def _leave_servers(self) -> list[Future[None]]:
        return [one for name in self._names for one in self.receiver.leave_weight_group(name=name).values()]


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
            self._collect(self._load(target, version))
            self._note("publication", "load folder", began)
            self._confirm(checksums)
            self.receiver.finish_update(version)
        finally:
            self._resume()
        # The disk holds two versions at most: the one before goes once no server reads it any more.
        for other in self.folder.glob("version-*"):
            if other != target:
                shutil.rmtree(other)

    def _load(self, target: Path, version: int) -> dict[str, Future[None]]:
        return self.receiver.load_folder(target, version)

    def _written(self, tensors: Tensors, dtype: torch.dtype, version: int) -> Path:
        target = self.folder / f"version-{version}"
        write_hf_folder(target, tensors, model_folder=self.model_folder, dtype=dtype, carried=None)
        return target


class AdapterPublisher(DiskPublisher):
    """Writes the adapters alone, in PEFT's format. Servers compute them beside the model's weights, which they keep.

    Beside them are their sums, with which servers compare what they have read. SGLang does so where a run starts it.
    """

    def __init__(
        self,
        receiver: WeightReceiver | None,
        *,
        folder: Path,
        arch: Architecture,
        lora: LoraConfig,
        model_folder: str,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(receiver, folder=folder, model_folder=model_folder, timeout_s=timeout_s)
        self.arch, self.lora = arch, lora

    def _forms(self) -> list[ChecksumForm]:
        return []

    def _confirm(self, checksums: ExpectedChecksums) -> None:
        """Nothing: the servers' checksums are of the weights that no publication changes."""

    def _load(self, target: Path, version: int) -> dict[str, Future[None]]:
        return self.receiver.load_adapters(target, version)

    def _written(self, tensors: Tensors, dtype: torch.dtype, version: int) -> Path:
        target = self.folder / f"version-{version}"
        named = {name: tensor.cpu() for name, tensor in tensors}  # one by one, so that the device has none of them
        write_peft_folder(target, named, self.arch, self.lora, self.model_folder)
        write_sums(target, {PEFT_PREFIX + name: sum_of(tensor) for name, tensor in named.items()})
        return target
