"""Moves a model's tensors from device to host memory and back, so that several models can share one device.

Storages are emptied and refilled in place. Therefore all views of them stay valid: parameters in DDP's buffer, buckets,
and the distributed optimizer's shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from megatron_rl import platform
from megatron_rl.engine import host_memory
from megatron_rl.engine.host_memory import ALIGNMENT

Engine = Any  # a MegatronEngine, whose module imports this one


class HostCopy:
    """Host memory for the content of some of a model's storages while they are off the device. It is reused."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.hosts: dict[int, Tensor] = {}
        """Maps each storage object's address to the part of `memory` with the storage's content."""
        self.kept: list[UntypedStorage] = []
        self.dropped: list[tuple[UntypedStorage, int]] = []

    @property
    def is_out(self) -> bool:
        return bool(self.kept or self.dropped)

    @torch.no_grad()
    def take(self, kept: Iterable[Tensor], dropped: Iterable[Tensor], device: torch.device) -> None:
        """Copy the storages of `kept` to the host and empty them. Empty the storages of `dropped` without a copy."""
        # Many tensors may be views of one storage. _cdata is the address of its object, which resizing keeps.
        keep = {s._cdata: s for s in (t.untyped_storage() for t in kept if t.device == device) if s.nbytes()}
        drop = {s._cdata: s for s in (t.untyped_storage() for t in dropped) if s.nbytes() and s._cdata not in keep}
        self.hosts = self._rooms({key: storage.nbytes() for key, storage in keep.items()})
        for key, storage in keep.items():
            self.hosts[key].copy_(_bytes_of(storage), non_blocking=True)
        self.kept = list(keep.values())
        self.dropped = [(storage, storage.nbytes()) for storage in drop.values()]
        torch.cuda.synchronize()  # wait for the copies before freeing their sources
        for storage in [*keep.values(), *drop.values()]:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def _rooms(self, sizes: dict[int, int]) -> dict[int, Tensor]:
        """Return a part of the host memory for each storage. sizes: the storages' sizes in bytes.

        The host memory is enlarged if it is too small.
        """
        ends = list(itertools.accumulate(math.ceil(size / ALIGNMENT) * ALIGNMENT for size in sizes.values()))
        if ends and ends[-1] > len(self.memory):
            self.hosts = {}
            torch.cuda.synchronize()  # copies out of the old memory, which `give_back` only started
            self.memory = torch.empty(0, dtype=torch.uint8)  # free the old memory first: both may not fit
            self.memory = host_memory.page_locked(ends[-1], has_gpu=platform.has_cuda())
        places = zip(sizes.items(), [0, *ends][: len(sizes)], strict=True)
        return {key: self.memory[start : start + size] for (key, size), start in places}

    @torch.no_grad()
    def give_back(self) -> None:
        """Refill the storages. Those that were emptied without a copy get zeros."""
        for storage in self.kept:
            host = self.hosts[storage._cdata]
            storage.resize_(len(host))
            _bytes_of(storage).copy_(host, non_blocking=True)  # on the stream that will use it; the host memory is kept
        for storage, size in self.dropped:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        self.kept, self.dropped = [], []


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_of(engine: Engine) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return three lists of an engine's tensors: weights, main parameters with optimizer states, gradient buffers."""
    weights = [parameter.data for parameter in engine.parameters()]
    if engine.optimizer is None:
        return weights, [], []
    states: list[Tensor] = []
    if engine.draft is not None:
        of_draft, states = engine.draft.movable()
        weights = weights + of_draft
    for part in engine.optimizer.chained_optimizers:
        if part.optimizer is not None:  # this rank has no parameters of this kind
            states += [parameter.data for group in part.optimizer.param_groups for parameter in group["params"]]
            values: Iterable[Any] = (value for state in part.optimizer.state.values() for value in state.values())
            states += [value for value in values if torch.is_tensor(value)]
    # An optimizer without main parameters of its own has the weights instead.
    of_weights = {weight.untyped_storage()._cdata for weight in weights}
    states = [state for state in states if state.untyped_storage()._cdata not in of_weights]
    buffers = [buffer for chunk in engine.wrapped for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    return weights, states, [buffer.grad_data for buffer in buffers]


class SharedDevice:
    """One device shared by several engines. The active engine is on the device, and the others are in host memory.

        device = SharedDevice()
        policy = MegatronEngine(config, groups=groups, shared_device=device)
        reference = MegatronEngine(config, groups=groups, trainable=False, shared_device=device)
        policy.forward(batch)  # sends the reference out and brings the policy in

    one_at_a_time: False allows several engines on the device together.
    make_room: called before an engine moves in, to make the rollout servers on this device free memory. Its argument
      says whether the optimizer's states move in too.
    """

    def __init__(self, *, one_at_a_time: bool = True, make_room: Callable[[bool], None] | None = None) -> None:
        self.one_at_a_time, self.make_room = one_at_a_time, make_room
        self.engines: list[Engine] = []

    def take(self, engine: Engine, *, with_states: bool = True) -> None:
        """Move the other engines out, then move `engine` in.

        with_states: False to leave the optimizer's states of `engine` out.
        """
        if self.make_room is not None:
            self.make_room(with_states)
        if self.one_at_a_time:
            self.leave(engine)
        if engine not in self.engines:
            self.engines.append(engine)
        engine.onload(with_states=with_states)

    def leave(self, remaining: Engine | None = None) -> None:
        """Move all engines out except `remaining`. Collective: every rank calls it."""
        for engine in self.engines:
            if engine is not remaining:
                engine.offload()

    def leave_but_weights(self, of_engine: Engine) -> None:
        """Move everything out except the weights of `of_engine`. Collective: every rank calls it."""
        self.leave(of_engine)
        of_engine.offload(keeps_weights=True)
