"""Stand-ins for torch.cuda, the process groups and a model's files during a rehearsal.

Installed once in a process, which is used for nothing else.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from megatron_rl.tools.rehearsal.device_ledger import Ledger
from megatron_rl.tools.rehearsal.device_memory import NotedBackwards


class _Stream:
    """A stream or event: nothing is ever under way."""

    device = torch.device("cuda")
    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, *_: object, **__: object) -> None: ...

    wait_event = record = wait = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0


class _Runtime:
    """CUDA's runtime, of which memory is pinned."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.ledger.page_locked.append(range(address, address + nbytes))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.ledger.page_locked = [span for span in self.ledger.page_locked if span.start != address]
        return 0


def stand_in_for_device(ledger: Ledger, *, memory_bytes: int) -> None:
    """Replace what of torch.cuda asks a driver. The device is that of LOCAL_RANK, which may be told later."""
    cuda = torch.cuda

    class Properties:
        name, major, minor, multi_processor_count, total_memory = "rehearsed", 9, 0, 132, memory_bytes
        uuid, warp_size, L2_cache_size = "rehearsed", 32, 50 << 20

    def waits(what: str) -> Callable[..., None]:
        return lambda *_, **__: ledger.note_sync(what)

    def ignore() -> Callable[..., None]:  # one object each: torch.compile refuses the same one under two names
        return lambda *_, **__: None

    _Stream.synchronize = waits("a stream waited for")  # type: ignore[attr-defined]
    stream, runtime = _Stream(), _Runtime(ledger)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 16,
        "current_device": lambda: int(os.environ.get("LOCAL_RANK", 0)),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: Properties,
        "get_device_name": lambda *_: Properties.name,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "mem_get_info": lambda *_, **__: (memory_bytes - ledger.memory.live_bytes, memory_bytes),
        "memory_allocated": lambda *_: ledger.memory.live_bytes,
        "max_memory_allocated": lambda *_: ledger.memory.peak_bytes,
        "memory_reserved": lambda *_: ledger.memory.live_bytes,
        "cudart": lambda: runtime,
        "is_current_stream_capturing": lambda: False,
        "synchronize": waits("the device waited for"),
        "default_generators": collections.defaultdict(lambda: torch.default_generator),
        "_lazy_call": lambda function, **_: function(),
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
    }
    ignored = ["set_device", "_lazy_init", "empty_cache", "manual_seed", "manual_seed_all", "set_rng_state"]
    answers |= {name: ignore() for name in [*ignored, "reset_peak_memory_stats", "ipc_collect"]}
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.random.get_rng_state, cuda.random.set_rng_state = answers["get_rng_state"], ignore()
    cuda.nvtx.range_push, cuda.nvtx.range_pop = ignore(), ignore()
    torch.Tensor.record_stream = ignore()  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self.to(torch.device("cuda", cuda.current_device()))  # type: ignore[method-assign]
    make = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Read numbers of the device one by one, as torch.tensor does, which fake tensors do not see."""
        if isinstance(data, list | tuple):
            data = tree_map(lambda item: item.item() if isinstance(item, FakeTensor) else item, data)
        return make(data, *args, **kwargs)

    torch.tensor = tensor  # type: ignore[assignment]
    # One copy to the host, and not a number at a time.
    FakeTensor.tolist = lambda self: self.cpu().tolist()  # type: ignore[method-assign]
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the host and copied
    torch.autograd.Variable._execution_engine = NotedBackwards(torch.autograd.Variable._execution_engine, ledger.memory)
    torch.autograd.set_multithreading_enabled(False)  # the backward runs in this thread, whose lines are known
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    resize = torch.UntypedStorage.resize_

    def noted_resize(self: torch.UntypedStorage, size: int) -> Any:
        ledger.memory.resize(self, size)
        return resize(self, size)

    torch.UntypedStorage.resize_ = noted_resize  # type: ignore[method-assign]


def _apply(self: torch.nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """Module.to and its like. torch's own swaps the insides of a parameter, which a tensor without memory refuses."""
    for child in self.children() if recurse else ():
        child._apply(change)
    with torch.no_grad():
        for tensors in (self._parameters, self._buffers):
            for name, tensor in tensors.items():
                if tensor is None or (changed := change(tensor)) is tensor:
                    continue
                if tensors is self._parameters:
                    changed = torch.nn.Parameter(changed, tensor.requires_grad)
                vars(changed).update({key: value for key, value in vars(tensor).items() if key not in vars(changed)})
                tensors[name] = changed
    return self


def stand_in_for_world(ledger: Ledger, *, rank: int, world_size: int, local_rank: int, local_world_size: int) -> None:
    """Make this process rank `rank` of a world without others; groups are noted as the code asks for them."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    torch._C._accelerator_setDeviceIndex(local_rank)  # what "cuda" without a number is
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    new_group, all_reduce = dist.new_group, dist.all_reduce

    def noted_group(ranks: Any = None, *args: Any, backend: Any = None, **kwargs: Any) -> Any:
        group = new_group(ranks, *args, backend="fake", **kwargs)
        ledger.note_group(group, str(backend or "nccl"))
        return group

    def noted_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        ledger.reduces_by = op
        return all_reduce(tensor, op, *args, **kwargs)

    dist.all_reduce = noted_reduce
    dist.new_group = c10d.new_group = torch.distributed.new_group = noted_group


class Objects:
    """Python objects that ranks tell each other. A rank hears what those said that were rehearsed before it."""

    def __init__(self, ledger: Ledger, heard: list[dict[Any, Any]]) -> None:
        self.ledger, self.heard = ledger, heard
        self.said: dict[Any, Any] = {}
        """By (ranks of the group, number of the call in it, this rank)."""
        self._calls: collections.Counter[tuple[int, ...]] = collections.Counter()
        dist.all_gather_object = self._all_gather
        dist.broadcast_object_list = self._broadcast

    def _call(self, group: Any) -> tuple[list[int], tuple[tuple[int, ...], int]]:
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        key = tuple(ranks)
        self._calls[key] += 1
        return ranks, (key, self._calls[key])

    def _hear(self, call: Any, rank: int, default: Any) -> Any:
        found = [heard[call, rank] for heard in self.heard if (call, rank) in heard]
        if not found:
            self.ledger.note_assumed(f"rank {rank} says what this one would, at {self.ledger.line()}")
        return found[0] if found else default

    def _all_gather(self, objects: list[Any], own: Any, group: Any = None) -> None:
        ranks, call = self._call(group)
        self.said[call, dist.get_rank()] = copy.deepcopy(own)
        for place, rank in enumerate(ranks):
            objects[place] = own if rank == dist.get_rank() else self._hear(call, rank, own)

    def _broadcast(
        self, objects: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: Any = None
    ) -> None:
        ranks, call = self._call(group)
        source = ranks[group_src] if group_src is not None else src or 0
        if device is not None and torch.device(device).type == "cuda":
            self.ledger.note_sync("objects sent by way of the device")
        if source == dist.get_rank():
            self.said[call, source] = copy.deepcopy(objects)  # which the caller may change
        else:
            objects[:] = self._hear(call, source, objects)


class NoWeights:
    """Takes the place of HFFolder and RandomWeights: tensors of the right shapes without memory, all zeros."""

    def __init__(self, *args: Any, **_: object) -> None:
        (self.shapes,) = (argument for argument in args if isinstance(argument, dict))
        self.file_of: dict[str, str] = {}
        """Empty: the folder holds no tensor that the model does not ask for."""

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = list(self.shapes[name])
        shape[dim] = stop - start
        return torch.zeros((), dtype=torch.bfloat16).expand(shape)
