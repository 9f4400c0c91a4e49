"""Stand-ins for torch.cuda, process groups and a model's files during a rehearsal.

They are installed for the lifetime of a process, which must not be used for anything else.
"""

from __future__ import annotations

import collections
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
from megatron_rl.tools.rehearsal.stream_order import StreamOrder
from megatron_rl.tools.rehearsal.stream_stand_ins import streams_of


class _Runtime:
    """The part of the CUDA runtime that pins host memory."""

    def __init__(self, order: StreamOrder) -> None:
        self.order = order

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.order.page_locked.append(range(address, address + nbytes))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.order.page_locked = [span for span in self.order.page_locked if span.start != address]
        return 0


def stand_in_for_device(ledger: Ledger, *, memory_bytes: int) -> None:
    """Replace the functions of torch.cuda that need a driver.

    The index of the current device is read from LOCAL_RANK, which may be set later. memory_bytes: memory of the device.
    """
    cuda = torch.cuda

    class Properties:
        name, major, minor, multi_processor_count, total_memory = "rehearsed", 9, 0, 132, memory_bytes
        uuid, warp_size, L2_cache_size = "rehearsed", 32, 50 << 20

    def ignore() -> Callable[..., None]:  # a new object each time: torch.compile rejects the same one under two names
        return lambda *_, **__: None

    def synchronize(*_: object) -> None:
        ledger.order.host_waits_for_all()
        ledger.note_sync("the device waited for")

    runtime = _Runtime(ledger.order)
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
        "synchronize": synchronize,
        "default_generators": collections.defaultdict(lambda: torch.default_generator),
        "_lazy_call": lambda function, **_: function(),
        "_exchange_device": lambda index: index,  # for torch.cuda.device, which packages enter around kernels
        "_maybe_exchange_device": lambda index: index,
    }
    answers |= streams_of(ledger.order, ledger.note_sync)
    ignored = ["set_device", "_lazy_init", "empty_cache", "manual_seed", "manual_seed_all", "set_rng_state"]
    answers |= {name: ignore() for name in [*ignored, "reset_peak_memory_stats", "ipc_collect"]}
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.random.get_rng_state, cuda.random.set_rng_state = answers["get_rng_state"], ignore()
    cuda.nvtx.range_push, cuda.nvtx.range_pop = ignore(), ignore()
    torch.Tensor.cuda = lambda self, *_, **__: self.to(torch.device("cuda", cuda.current_device()))  # type: ignore[method-assign]
    make = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Create a tensor like torch.tensor, but read device values one by one with recorded reads.

        torch.tensor also reads them one by one, but FakeTensors would not notice its reads.
        """
        if isinstance(data, list | tuple):
            data = tree_map(lambda item: item.item() if isinstance(item, FakeTensor) else item, data)
        return make(data, *args, **kwargs)

    torch.tensor = tensor  # type: ignore[assignment]
    # One copy to the host instead of one read per element.
    FakeTensor.tolist = lambda self: self.cpu().tolist()  # type: ignore[method-assign]
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") creates on the host, then copies
    torch.autograd.Variable._execution_engine = NotedBackwards(torch.autograd.Variable._execution_engine, ledger.memory)
    # torch asks its CUDA library, which is missing, for cuDNN's version before it chooses an attention kernel.
    torch.backends.cuda.enable_cudnn_sdp(False)
    os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
    torch.autograd.set_multithreading_enabled(False)  # run backward in this thread, whose code lines are known
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    resize = torch.UntypedStorage.resize_

    def noted_resize(self: torch.UntypedStorage, size: int) -> Any:
        ledger.order.resize(self)
        ledger.memory.resize(self, size)
        return resize(self, size)

    torch.UntypedStorage.resize_ = noted_resize  # type: ignore[method-assign]
    address = torch.UntypedStorage.data_ptr

    def data_ptr(self: torch.UntypedStorage) -> int:
        """Return an address that differs between storages: Transformer Engine's attention compares addresses."""
        return self._cdata if self.device.type == "meta" else address(self)

    torch.UntypedStorage.data_ptr = data_ptr  # type: ignore[method-assign]


def _apply(self: torch.nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """Replace nn.Module._apply, which Module.to and others use.

    torch's version swaps a parameter's data in place, which FakeTensors do not support.
    """
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
    """Make this process rank `rank` of a world without other processes. The ledger records the groups created here."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    torch._C._accelerator_setDeviceIndex(local_rank)  # the device that "cuda" without an index means
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
    """The exchange of Python objects between ranks. Installs itself in torch.distributed.

    A rank receives what previously rehearsed ranks sent (`heard`). If the sender was not rehearsed before, it is
    assumed to send the same as this rank.
    """

    def __init__(self, ledger: Ledger, heard: list[dict[Any, Any]]) -> None:
        self.ledger, self.heard = ledger, heard
        self.said: dict[Any, Any] = {}
        """Objects that this rank sent: {((ranks of the group, call number in the group), this rank): object}."""
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
            self.said[call, source] = copy.deepcopy(objects)  # the caller may modify them later
        else:
            objects[:] = self._hear(call, source, objects)


class NoWeights:
    """A replacement for HFFolder and RandomWeights. All weights are zeros: a single element, expanded to each shape."""

    def __init__(self, *args: Any, **_: object) -> None:
        (self.shapes,) = (argument for argument in args if isinstance(argument, dict))
        self.file_of: dict[str, str] = {}
        """Empty, because the model folder has no tensors in addition to those that the model needs."""

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = list(self.shapes[name])
        shape[dim] = stop - start
        return torch.zeros((), dtype=torch.bfloat16).expand(shape)
