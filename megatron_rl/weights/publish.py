"""Publish the trainer's weights to the rollout servers, and verify by checksum that they arrived.

`HFExport` supplies the stream of tensors. A WeightReceiver talks HTTP to the servers, which are paused until they have
been verified.

    trainer ranks   gather 0 |       | gather 1 | gather 2 |        |                   |
    rank 0                   | pause | send 0   | send 1   | send 2 | compare checksums | resume
    servers         generate | stop  | load 0   | load 1   | load 2 | take checksums    | generate, version N

A server that is unreachable or late, or whose weights have other checksums, is dropped at the end of the column of the
table in which this is found. So no server is ever resumed with unknown weights. The other servers still get the
version.

`GroupPublisher` broadcasts buckets over a process group (NCCL or gloo) and gathers the next bucket while one is on the
wire. It needs additional memory for two buckets and two tensors. On a GPU it also keeps a bucket of small tensors until
their checksums are computed. `DiskPublisher` writes a HF folder to a disk that the servers share. The other transports
are ipc.py, which uses shared memory, and delta.py, which sends only the changes.
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
from megatron_rl.weights.draft_files import PREFIX, write_draft_tensors
from megatron_rl.weights.hf_files import write_hf_folder
from megatron_rl.weights.peft_config import PEFT_PREFIX
from megatron_rl.weights.senders import ANSWERED, Sender, StageHeads
from megatron_rl.weights.sglang_loaders import pickled_round
from megatron_rl.weights.update_group import TensorSpec, bytes_of, described, unpack_bucket

logger = logging.getLogger(__name__)

FLAT_BELOW_BYTES = 256 * 1024
"""If a bucket's tensors have on average fewer bytes than this, they are copied into one flat tensor for a single
broadcast. The tensors of other buckets are broadcast one by one, without a copy. On a CPU each broadcast has 0.1 ms of
latency."""
AFTERMATH_S = 5.0
"""Maximum seconds that rank 0 waits for the servers' answers after it left a broken group."""
SUMMED_BYTES = 1 << 26
"""Maximum bytes of tensors that a transport without buckets keeps on a GPU to compute their checksums in one launch."""
NAMED_TENSORS = 3
"""Maximum number of mismatching tensors named in an error message."""

Tensors = Iterable[tuple[str, Tensor]]
Shipment = TypeVar("Shipment")
Sent = TypeVar("Sent")


@dataclass
class Publication:
    """Measurements of one publication: its duration, bytes and checks."""

    version: int
    nbytes: int = 0
    seconds: float = 0.0
    paused_s: float = 0.0
    verified: int = 0
    """Number of tensors whose checksums were compared, summed over servers."""
    parts: list[tuple[str, str, float, float]] = field(default_factory=list)
    """Phases of the publication, for the trace: (row, name, begin, end), in seconds of the monotonic clock."""
    sent_bytes: int | None = None
    """Bytes on the wire, summed over servers. Only the delta transport sets it; the others send all weights."""


class WeightPublisher(abc.ABC):
    """Base class of the transports: drops servers that fail, and compares checksums.

    Every rank has a publisher; its `receiver` is None on all ranks but 0. Rank 0 publishes the whole stream of weights,
    unless `is_by_stage` is True: then the head (first rank) of each pipeline stage publishes the weights of its stage.

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
        """Send the weights to the servers. Collective: every rank calls it and exhausts its stream.

        Servers are paused during the update. Those that are not dropped are always resumed. Raises NoServerLeft if no
        server holds the version afterwards.

        specs: names, dtypes and shapes of all tensors, in the order of the stream. tensors: the stream of weights.
        version: policy version of these weights.
        """
        stream, has_failed = iter(tensors), True
        try:
            if self.receiver is None:
                self._follow(specs, stream)
            else:
                self._lost, self._paused_at = {}, None
                self.last = Publication(version, nbytes=bytes_of(specs))
                started = time.perf_counter()
                checksums = ExpectedChecksums(self._forms())
                self._deliver(specs, checksums.watch(stream, self._summed(specs)), version, checksums)
                self.last.seconds = time.perf_counter() - started
            has_failed = False
        finally:
            if not (has_failed and self._ranks_exchange_more):
                for _ in stream:  # the stream is a collective: exhaust it even after a failure
                    pass

    @property
    def _ranks_exchange_more(self) -> bool:
        """True if publishing ranks communicate with each other beyond the collectives of the stream.

        After a failure, a rank must then not exhaust the stream, because it and the other ranks would hang.
        """
        return False

    def _follow(self, specs: list[TensorSpec], tensors: Tensors) -> None:  # noqa: B027
        """Do what a rank other than 0 must do in a publication, except for exhausting the stream."""

    def _summed(self, specs: list[TensorSpec]) -> list[list[TensorSpec]]:
        """Divide the specs into runs of consecutive tensors whose checksums are computed together."""
        return plan_buckets(specs, SUMMED_BYTES)

    @abc.abstractmethod
    def _deliver(
        self, specs: list[TensorSpec], tensors: Tensors, version: int, checksums: ExpectedChecksums
    ) -> None: ...

    def close(self) -> None:  # noqa: B027
        """Release what the publisher keeps between publications, such as groups or files."""

    # -- servers

    def _forms(self) -> list[ChecksumForm]:
        """Return the servers' checksum forms. Warn once about each server whose checksums cannot be computed here."""
        forms = self.receiver.checksum_forms()
        for server in forms.keys() - self._known:
            if forms[server] is None:
                logger.warning("%s: its checksums cannot be taken here too, so its weights are not verified", server)
        self._known |= forms.keys()
        return [form for form in forms.values() if form is not None]

    def _lose(self, reasons: dict[str, str]) -> None:
        """Drop servers. Raises NoServerLeft if no server remains. reasons: {server to drop: why}."""
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
        """Wait for every server's answer, and drop servers that fail or exceed the timeout.

        futures: {server: future of its answer}. Return {server: answer} of the remaining servers.
        """
        concurrent.futures.wait(futures.values(), timeout=self.timeout_s)
        self._lose(_failures(futures) | self._unfinished(futures))
        return {server: future.result() for server, future in futures.items() if server in self.receiver.server_ranks}

    def _unfinished(self, futures: dict[str, Future[Any]]) -> dict[str, str]:
        late = {server: f"did not finish within {self.timeout_s:g} s" for server, f in futures.items() if not f.done()}
        for server in late:
            futures[server].cancel()
        return late

    def _confirm(self, checksums: ExpectedChecksums) -> None:
        """Compare the servers' checksums with those of the sent tensors. Drop servers whose checksums differ."""
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
        return {form: checksums.of(form) for form in checksums.forms}

    def _send_all(
        self,
        shipments: Iterator[Shipment],
        send: Callable[[Shipment], Sent],
        complete: Callable[[Sent], object],
        checksums: ExpectedChecksums,
    ) -> None:
        """Pause the servers, send all shipments, and compare checksums. The caller resumes the servers.

        The next shipment is prepared while one is sent. send: starts to send a shipment. complete: waits until what
        `send` has returned has arrived.
        """
        shipments = self._noting_gathers(shipments)
        shipment, version = next(shipments), self.last.version  # prepared while the servers still generate
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
        # Only once the checksums agree: `resume` after an unfinished update makes the servers end their generations.
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
    """A round that is being sent: one bucket from each sender."""

    number: int
    loads: dict[str, Future[None]]
    deadline: float


class GroupPublisher(WeightPublisher):
    """Publishes by broadcasts. Each sender shares a process group with all servers. Only rank 0 talks HTTP to them.

    Without `stages`, rank 0 is the only sender. With `stages`, the head of each pipeline stage is a sender, and every
    rank publishes `HFExport.stream_of_stage`. A round is one bucket from each sender. Servers that can receive several
    buckets at once get those of a round in parallel, from different hosts. Other servers get them one by one.

        heads of stages    0: bucket 0 | bucket 1 | ...        rank 0 tells them `send`, and `settle` once every server
                           1: bucket 0 | bucket 1 |            has answered; on a failure `leave`, `join` and `send`
        servers                 round 0 | round 1  | ...       again, in new groups of the remaining members

    The groups are kept between publications. If a member dies, all groups are abandoned and new ones are formed.
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
        self._names: list[str] = []  # of the senders' groups, in stage order
        self._parts: list[list[list[TensorSpec]]] = []  # each sender's buckets
        self._shipped: list[Tensor] = []  # this sender's pieces of the last round, in case they must be sent again

    def close(self) -> None:
        if self.sender.group is not None and self.receiver is not None:
            concurrent.futures.wait(self._leave_servers(), timeout=self.timeout_s)
        self.sender.leave()

    def _summed(self, specs: list[TensorSpec]) -> list[list[TensorSpec]]:
        own = specs if self.stages is None else self.stages.own_specs
        return plan_buckets(own, self.bucket_bytes)  # a bucket's tensors are kept until they are sent

    def _deliver(self, specs: list[TensorSpec], tensors: Tensors, version: int, checksums: ExpectedChecksums) -> None:
        of_stages = [specs] if self.stages is None else self.stages.specs
        self._parts = [plan_buckets(of_stage, self.bucket_bytes) for of_stage in of_stages]
        try:
            self._tell("begin", checksums.forms)
            self._join()
            self._send_all(self._rounds(tensors), lambda one: self._ship(*one), self._complete, checksums)
        finally:
            if self.sender.on_wire:  # after an error it is unknown what the servers received
                self._leave()
            self._tell("end")
            self._shipped = []
            self._resume()

    # -- orders of rank 0 to the other senders

    def _tell(self, order: str, *details: Any) -> list[Any]:
        """Send an order from rank 0 to the other senders. If the order is in ANSWERED, return their answers."""
        if self.stages is None:
            return []
        group = self.stages.heads.group
        dist.broadcast_object_list([(order, *details)], group_src=0, group=group)
        answers: list[Any] = [None] * len(self.stages.specs)
        if order in ANSWERED:
            dist.gather_object(None, answers, group_dst=0, group=group)
        return answers[1:]

    def _follow(self, specs: list[TensorSpec], tensors: Tensors) -> None:
        """Execute rank 0's orders until the order `end`. Runs on the senders other than rank 0."""
        if self.stages is None or self.stages.heads is None:
            return
        heads, sender, number = self.stages.heads, self.sender, -1
        order = ""
        while order != "end":
            told: list[Any] = [None]
            dist.broadcast_object_list(told, group_src=0, group=heads.group)
            order, *details = told[0]
            answer: Any = None
            if order == "begin":
                checksums, buckets = ExpectedChecksums(details[0]), self._summed(specs)
                filled = fill_buckets(buckets, checksums.watch(tensors, buckets))
                ahead = next(filled, None)  # gathered while the servers still generate
            elif order == "listen":
                listener = socket.create_server((self.stages.address_towards(details[0]), 0))
                answer = listener.getsockname()
            elif order == "join":
                self._names, world_size = details
                try:
                    sender.join(listener, self._names[heads.rank], world_size, self._is_hopeless)
                except (RuntimeError, TimeoutError) as error:  # the servers report it to rank 0
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
        self._shipped = []

    def _keeping(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        for piece in pieces:
            self._shipped.append(piece)
            yield piece

    def _is_hopeless(self) -> bool:
        """Return True if rank 0 has abandoned the groups.

        A sender must ask for this while it waits for a server, because it receives no orders then.
        """
        return bool(c10d._get_default_store().check([self._names[0]]))

    def _sums(self, checksums: ExpectedChecksums) -> dict[ChecksumForm, dict[str, str]]:
        sums = super()._sums(checksums)
        for of_sender in self._tell("sums"):
            for form, own in of_sender.items():
                sums[form] |= own
        return sums

    # -- a round

    def _rounds(self, tensors: Tensors) -> Iterator[tuple[int, Iterable[Tensor]]]:
        """Yield, for each round, its number and the tensors that this rank sends. Iterating over these gathers them."""
        filled = fill_buckets(self._parts[0], tensors)
        for number in range(max(map(len, self._parts))):
            yield number, next(filled, (None, ()))[1]
        next(filled, None)  # raises if the stream has unplanned tensors

    def _ship(self, number: int, pieces: Iterable[Tensor]) -> _Shipment:
        """Start to send a round. pieces: the tensors that this rank sends, which are gathered as they are sent."""
        self._join()
        deadline = time.monotonic() + self.timeout_s
        self._tell("send", number)
        parts = [
            described(specs) | {"group": name, "flattened": is_flat(specs)}
            for name, own in zip(self._names, self._parts, strict=True)
            for specs in own[number : number + 1]
        ]
        version = self.last.version
        if len(parts) == 1:
            loads = self.receiver.load_bucket(**parts[0], version=version)
        else:
            loads = self.receiver.load_round(parts, version, pickled_round(parts))
        self._shipped = []
        is_hopeless = lambda: bool(_failures(loads)) or time.monotonic() > deadline  # noqa: E731
        self.sender.send_all(self._keeping(pieces), is_hopeless)
        return _Shipment(number, loads, deadline)

    def _complete(self, shipment: _Shipment) -> None:
        """Wait until every server has received the round.

        If some servers fail, drop them and send the round to the others again.
        """
        broken_before = False
        while not self._arrived(shipment):
            refused = _failures(shipment.loads)
            self._leave()  # breaks the broadcast for servers still waiting in it
            concurrent.futures.wait(shipment.loads.values(), timeout=AFTERMATH_S)
            # A server that refused or died makes the broadcast fail for the others too: do not blame those.
            blamed = self.receiver.unreachable() or refused or self._unfinished(shipment.loads)
            if not blamed and broken_before:
                blamed = dict.fromkeys(self.receiver.server_ranks, "the broadcast to it broke twice")
            broken_before = True
            self._lose(blamed)
            shipment = self._ship(shipment.number, list(self._shipped))

    def _arrived(self, shipment: _Shipment) -> bool:
        """Wait for all answers and broadcasts of a round, and return True.

        Return False at the first failure, or at the deadline.
        """
        left_s = shipment.deadline - time.monotonic()
        loads = concurrent.futures.wait(
            shipment.loads.values(), timeout=left_s, return_when=concurrent.futures.FIRST_EXCEPTION
        )
        if loads.not_done or any(load.exception() for load in loads.done):
            return False
        # All servers have answered, so the broadcasts have ended. Settling tells whether they succeeded.
        return all([*self._tell("settle"), self.sender.settle()])

    # -- the groups

    def _join(self) -> None:
        """Form groups with the current servers, unless these groups exist already. Drop servers that do not join."""
        while self.sender.group is None or self._membership != self.receiver.membership:
            if self.sender.group is not None:
                self._leave()
            self._lose(self.receiver.unreachable())  # do not wait for these
            # Unique names: servers that outlive a killed run still hold that run's groups.
            run = f"megatron_rl_weights_{uuid.uuid4().hex[:8]}"
            count = 1 if self.stages is None else len(self.stages.specs)
            self._names = [f"{run}_{number}" for number in range(count)]
            self._membership = self.receiver.membership
            world_size = 1 + sum(self.receiver.server_ranks.values())
            # Listen before announcing the port, so that no other process can take it.
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
                        if _failures(joins):  # the other members would wait in vain
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
        """Make rank 0, the other senders and the servers leave the groups, which may be broken."""
        if self.stages is not None:
            c10d._get_default_store().set(self._names[0], "given up")
        self.sender.leave()
        self._tell("leave")
        self._leave_servers()

    def _leave_servers(self) -> list[Future[None]]:
        return [one for name in self._names for one in self.receiver.leave_weight_group(name=name).values()]


def plan_buckets(specs: list[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Divide the tensors of a stream into buckets, each of one dtype and at most `bucket_bytes` bytes.

    A larger tensor gets a bucket of its own. No bucket has tensors of both the policy and a draft head, because SGLang
    loads each bucket into one model.
    """
    buckets: list[list[TensorSpec]] = []
    size = 0

    # One dtype per bucket, so that every tensor of a flat bucket begins at a multiple of its item size.
    def kind(spec: TensorSpec) -> tuple[torch.dtype, bool]:
        return spec.dtype, spec.name.startswith(PREFIX)

    for spec in specs:
        if not buckets or size + spec.nbytes > bucket_bytes or kind(spec) != kind(buckets[-1][0]):
            buckets.append([])
            size = 0
        buckets[-1].append(spec)
        size += spec.nbytes
    return buckets


def is_flat(bucket: list[TensorSpec]) -> bool:
    """Return True if a bucket is sent as one flat tensor, False if each tensor has a separate broadcast."""
    return len(bucket) > 1 and bytes_of(bucket) < FLAT_BELOW_BYTES * len(bucket)


def fill_buckets(
    buckets: list[list[TensorSpec]], tensors: Tensors
) -> Iterator[tuple[list[TensorSpec], Iterable[Tensor]]]:
    """Yield each bucket and what to send for it: its tensors, or if `is_flat`, a single one `[n]` uint8 of their bytes.

    For a bucket that is not flat, the first tensor is read from the stream at once and the others lazily. The caller
    must consume all of them before it asks for the next bucket. Flat buckets alternate between two buffers, so one is
    filled while the other is sent. Raises ValueError if the stream does not have the tensors of the buckets, in order.
    """
    size = max((bytes_of(bucket) for bucket in buckets if is_flat(bucket)), default=0)
    planned = as_planned(itertools.chain.from_iterable(buckets), tensors)
    buffers: list[Tensor] = []
    for number, bucket in enumerate(buckets):
        first = next(planned)
        if not is_flat(bucket):
            rest = itertools.islice(planned, len(bucket) - 1)
            yield bucket, (tensor.contiguous() for tensor in itertools.chain([first], rest))
            continue
        while len(buffers) < 2:  # allocated here, because the first tensor determines the device
            buffers.append(torch.empty(size, dtype=torch.uint8, device=first.device))
        flat = buffers[number % 2][: bytes_of(bucket)]
        parts = unpack_bucket(flat, bucket)
        parts[0].copy_(first)
        for part in parts[1:]:
            part.copy_(next(planned))
        yield bucket, [flat]
    next(planned, None)  # raises if further tensors follow


def as_planned(specs: Iterable[TensorSpec], tensors: Tensors) -> Iterator[Tensor]:
    """Yield the tensors of a stream. Raises ValueError if they are not those of `specs`, in the same order."""
    stream = iter(tensors)
    for spec in specs:
        yield _planned(stream, spec)  # no variable of this generator keeps the tensor
    for name, tensor in stream:
        raise ValueError(f"weight publication: {name}, {tensor.dtype} came after the last planned tensor.")


def _planned(stream: Iterator[tuple[str, Tensor]], spec: TensorSpec) -> Tensor:
    name, tensor = next(stream, (None, None))
    if tensor is None or (name, tensor.dtype, tuple(tensor.shape)) != (spec.name, spec.dtype, spec.shape):
        found = "nothing" if tensor is None else f"{name}, {tensor.dtype}, {tuple(tensor.shape)}"
        raise ValueError(f"weight publication: {spec.name}, {spec.dtype}, {spec.shape} was planned, but {found} came.")
    return tensor.detach()


def _failures(futures: dict[str, Future[Any]]) -> dict[str, str]:
    """Return {server: reason} for the servers whose calls have failed so far."""
    done = {server: future for server, future in futures.items() if future.done() and not future.cancelled()}
    return {server: str(future.exception()) for server, future in done.items() if future.exception() is not None}


# -- a disk


class DiskPublisher(WeightPublisher):
    """Publishes through a disk: writes a HF folder and has the servers load it. They are paused only while they load.

    folder: folder in which each version gets a subfolder. Servers must be able to read it. Only the last version is
    kept.
    model_folder: the model's folder, whose other files are copied into each version.
    carried: function that yields (name, tensor) of further tensors, which are written unchanged into each version.
    """

    def __init__(
        self,
        receiver: WeightReceiver | None,
        *,
        folder: Path,
        model_folder: str,
        carried: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(receiver, timeout_s=timeout_s)
        self.folder, self.model_folder, self.carried = folder.absolute(), model_folder, carried

    def _deliver(self, specs: list[TensorSpec], tensors: Tensors, version: int, checksums: ExpectedChecksums) -> None:
        target = self.folder / f"version-{version}"
        self._write(target, tensors, specs[0].dtype)  # while the servers still generate
        self._pause()
        try:
            began = time.monotonic()
            self._collect(self._load(target, version))
            self._note("publication", "load folder", began)
            self._confirm(checksums)
            self.receiver.finish_update(version)
        finally:
            self._resume()
        # The disk holds two versions at most: the previous one is deleted once no server reads it.
        for other in self.folder.glob("version-*"):
            if other != target:
                shutil.rmtree(other)

    def _load(self, target: Path, version: int) -> dict[str, Future[None]]:
        return self.receiver.load_folder(target, version)

    def _write(self, target: Path, tensors: Tensors, dtype: torch.dtype) -> None:
        draft: dict[str, Tensor] = {}

        def of_policy() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                if name.startswith(PREFIX):
                    draft[name.removeprefix(PREFIX)] = tensor.to("cpu", dtype, copy=True)
                else:
                    yield name, tensor

        write_hf_folder(target, of_policy(), model_folder=self.model_folder, dtype=dtype, carried=self.carried())
        if draft:
            write_draft_tensors(target, draft)


class AdapterPublisher(DiskPublisher):
    """Publishes only the adapters: writes them to a folder in PEFT's format. Servers add them to the base weights.

    Checksums are written next to the adapters. Servers compare them with what they read, but an SGLang server does so
    only if the run started it.
    """

    def __init__(
        self, receiver: WeightReceiver | None, *, arch: Architecture, lora: LoraConfig, **options: Any
    ) -> None:
        """options: further arguments of DiskPublisher."""
        super().__init__(receiver, **options)
        self.arch, self.lora = arch, lora

    def _forms(self) -> list[ChecksumForm]:
        return []

    def _confirm(self, checksums: ExpectedChecksums) -> None:
        """Do nothing, because the servers' checksums cover only the base weights, which no publication changes."""

    def _load(self, target: Path, version: int) -> dict[str, Future[None]]:
        return self.receiver.load_adapters(target, version)

    def _write(self, target: Path, tensors: Tensors, dtype: torch.dtype) -> None:
        named = {name: tensor.cpu() for name, tensor in tensors}  # copied one by one, so none stays on the device
        write_peft_folder(target, named, self.arch, self.lora, self.model_folder)
        write_sums(target, {PEFT_PREFIX + name: sum_of(tensor) for name, tensor in named.items()})
