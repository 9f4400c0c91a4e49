"""Rollout servers without processes or HTTP: a WeightReceiver whose servers are dicts, and a publisher that hands them
its buckets directly. A server has one fault at most: it refuses, corrupts or never answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from megatron_rl.api import ChecksumForm, HeldWeights
from megatron_rl.weights.publish import GroupPublisher, _Shipment, is_flat
from megatron_rl.weights.update_group import TensorSpec, checksum, unpack_bucket


def done(result=None, error: str | None = None) -> Future:
    future: Future = Future()
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(RuntimeError(error))
    return future


class InProcessServers:
    """Each server is a dict of the tensors that it holds."""

    def __init__(self, *names: str) -> None:
        self.held: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        self.versions = dict.fromkeys(names, "none")
        self.faults: dict[tuple[str, str], str] = {}
        """(server, call) -> the message that the call fails with."""
        self.corrupt: dict[str, Callable[[str, Tensor], Tensor]] = {}
        """Server -> what it makes of each tensor that it is sent."""
        self.dropped: dict[str, str] = {}
        self.calls: list[str] = []
        self.version: int | None = None

    @property
    def membership(self):
        return len(self.dropped)

    @property
    def server_ranks(self):
        return {name: 1 for name in self.held if name not in self.dropped}

    def drop(self, server, reason):
        self.dropped[server] = reason

    def unreachable(self):
        return {}

    def _tell(self, call):
        self.calls.append(call)
        self.dropped |= {name: self.faults[name, call] for name in self.server_ranks if (name, call) in self.faults}

    def pause(self):
        self._tell("pause")

    def resume(self):
        self._tell("resume")

    def begin_weight_update(self, version):
        self._tell("begin")

    def end_weight_update(self, version):
        self._tell("end")

    def take(self, specs: list[TensorSpec], pieces: list[Tensor], version: int) -> dict[str, Future]:
        self.calls.append("load")
        answers = {}
        for name in self.server_ranks:
            error = self.faults.get((name, "load"))
            answers[name] = done(error=error)
            if error is None:
                for spec, tensor in zip(specs, tensors_of(specs, pieces), strict=True):
                    self.held[name][spec.name] = self.corrupt.get(name, lambda _, t: t)(spec.name, tensor.clone())
                self.versions[name] = str(version)
        return answers

    def checksum_forms(self):
        return dict.fromkeys(self.server_ranks, ChecksumForm("embedded", None))

    def held_weights(self):
        sums = {server: {n: checksum(t) for n, t in self.held[server].items()} for server in self.server_ranks}
        return {server: done(HeldWeights(self.versions[server], held)) for server, held in sums.items()}

    def finish_update(self, version):
        self.version = version


class InProcessPublisher(GroupPublisher):
    """Hands its buckets to InProcessServers."""

    def __init__(self, servers: InProcessServers, *, bucket_bytes: int, timeout_s: float = 2.0) -> None:
        super().__init__(servers, bucket_bytes=bucket_bytes, backend="none", timeout_s=timeout_s)

    def _join(self):
        pass

    def _leave(self):
        pass

    def _ship(self, number, pieces):
        self._shipped = list(pieces)
        self.sender.send_all([], lambda: False)
        loads = self.receiver.take(self._parts[0][number], self._shipped, self.last.version)
        return _Shipment(number, loads, deadline=time.monotonic() + self.timeout_s)


def tensors_of(specs: list[TensorSpec], pieces: list[Tensor]) -> list[Tensor]:
    """The tensors of a bucket on its way: themselves, or views of all their bytes."""
    return unpack_bucket(pieces[0], specs) if is_flat(specs) else pieces


def specs_of(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def some_tensors(count: int = 6, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {f"layer.{i}.weight": torch.randn(10 + i, 7).to(dtype) for i in range(count)}
