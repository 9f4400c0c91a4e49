"""Records what a rehearsed rank does: its device's memory, kernels, copies, syncs and FLOPs, and its collectives.

Each entry has the step's phase and a code line: the innermost line of this package or of megatron.core on the stack.
During torch's own backward pass, this is the line that called backward.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron_rl.tools.rehearsal.device_memory import DeviceMemory
from megatron_rl.tools.rehearsal.known_numbers import forget, known, on_device
from megatron_rl.tools.rehearsal.operations import operation, tensors_in
from megatron_rl.tools.rehearsal.stream_order import Clock, StreamOrder
from megatron_rl.tools.rehearsal.te_kernels import LAUNCHES

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OURS, UPSTREAM = PACKAGE + os.sep, os.sep + os.path.join("megatron", "core") + os.sep
ELSEWHERE = "elsewhere"
NOT_SHOWN = (os.path.dirname(os.path.abspath(__file__)), os.path.join(PACKAGE, "platform"))


@dataclass
class Collective:
    """One call of torch.distributed on this rank. sizes: number of elements of each input and output tensor."""

    phase: str
    kind: str
    group: int
    """Index of the call's process group in Ledger.groups."""
    dtype: str
    sizes: tuple[int, ...]
    peer: int
    """Global rank of a broadcast's source, or of the other end of a send or receive; -1 for other calls."""
    nbytes: int
    """Bytes of the whole gathered or reduced tensor; for a send or receive, bytes of the message."""
    on_device: bool
    is_async: bool
    """True if the call does not block the following computation."""
    line: str


@dataclass
class Phase:
    """Counts of one phase of the step."""

    kernels: int = 0
    flops: Counter[str] = field(default_factory=Counter)
    """{operator: FLOPs}."""
    syncs: Counter[str] = field(default_factory=Counter)
    """{kind of sync and code line: count}."""
    in_microbatches: Counter[str] = field(default_factory=Counter)
    """Those `syncs` that occur from the packing of the first microbatch to the end of the last microbatch's backward
    pass."""
    microbatches: int = 0
    copies: Counter[str] = field(default_factory=Counter)
    copied_bytes: Counter[str] = field(default_factory=Counter)
    copies_in_microbatches: Counter[str] = field(default_factory=Counter)
    """{direction of the copy: count}."""


class Ledger:
    """The record of everything that a rank does on its device. FakeCuda and the stand-ins fill it."""

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = defaultdict(Phase)
        self.phase = "start"
        self.collectives: list[Collective] = []
        self.groups: list[tuple[str, list[int]]] = []
        """(description, ranks) of each process group that a collective has used."""
        self.buckets: list[int] = []
        """Bytes of each bucket of the publication. Each bucket is one request to every server."""
        self.made_groups: Counter[str] = Counter()
        """{backend: number of groups created}."""
        self.checkpoint_bytes = 0.0
        """Bytes of a checkpoint that this rank writes."""
        self.peers: dict[str, set[int]] = defaultdict(set)
        """{backend: all ranks that share a process group with this rank, itself included}."""
        self.reduces_by = dist.ReduceOp.SUM
        """Operation of the current all-reduce."""
        self.layers = ""
        """Implementation of the model's layers: transformer_engine or local."""
        self.assumed: Counter[str] = Counter()
        self.is_in_microbatch = False
        self._is_compiled = False
        self.memory = DeviceMemory()
        self.host_memory = DeviceMemory()
        """Memory of large host tensors."""
        self.order = StreamOrder(self.line)
        self._pinned: weakref.WeakSet = weakref.WeakSet()
        self._group_numbers: dict[str, int] = {}
        self._lines: dict[tuple[int, int], str] = {}
        """{(address of a code object, instruction in it): text of its code line}."""
        self._codes: dict[int, CodeType] = {}
        """Keeps the code objects of `_lines` alive, so that their addresses are not reused."""

    # Phase and code line

    def enter(self, phase: str) -> None:
        """Assign all following entries to `phase`. PhaseTimers call this, with '' between two phases."""
        self.phase = phase or "between phases"
        self.memory.enter(self.phase)
        self.host_memory.enter(self.phase)

    def line(self) -> str:
        """Return the innermost current code line of this package or of megatron.core."""
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            key = id(code), frame.f_lasti  # not the code itself: hashing it would hash all its instructions
            text = self._lines.get(key)
            if text is None:
                self._codes[id(code)] = code
                text = self._lines[key] = shown(code.co_filename, frame.f_lineno)
            if text:
                return text
            frame = frame.f_back
        return ELSEWHERE

    # The device

    def note_kernel(self, func, args, kwargs, made: Any) -> None:
        """Record an operation's kernel launches, its FLOPs, and the memory of its results."""
        if self._is_compiled:
            return
        op = operation(func)
        self.order.note(op, args, kwargs, made)
        is_new = False
        for tensor in tensors_in(made):
            if on_device(tensor):
                is_new |= self.memory.note(tensor, self.line) and tensor.numel() > 0
            elif isinstance(tensor, FakeTensor):
                self.note_on_host(tensor)
        if not (op.launches and (is_new or any(map(on_device, op.writes(args, kwargs))))):
            return
        phase = self.phases[self.phase]
        self._count_launches(LAUNCHES[func](*args, **kwargs) if func in LAUNCHES else 1)
        if "cu_seq_q" in op.arguments:
            phase.flops["attention"] += _attention_flops(func, args)
        elif count := flop_registry.get(func._overloadpacket):
            # For matrix products, torch's formulas take only the matrices, not the options of newer overloads.
            is_product = op.name.endswith("mm")
            given = [arg for arg in args if isinstance(arg, Tensor)] if is_product else args
            phase.flops[op.name] += count(*given, **({} if is_product else kwargs), out_val=made)

    def note_launch(self, given: Iterable[Tensor]) -> None:
        """Record the launch of a kernel that is not a torch operator. given: all tensors that it reads or writes."""
        self._count_launches(1)
        given = list(filter(on_device, given))
        self.order.launch("a kernel of Triton", given, given)
        for tensor in given:
            if tensor.is_floating_point():  # a kernel writes no counts or masks that were known before it
                forget(tensor)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that a GPU run compiles. Each call counts as one kernel that allocates only its results."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_compiled or not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
                return function(*args, **kwargs)
            self._is_compiled = True
            try:
                made = function(*args, **kwargs)
            finally:
                self._is_compiled = False
            given, results = (list(filter(on_device, tree_leaves(tree))) for tree in ((args, kwargs), made))
            self.order.launch(function.__name__, given, results)
            for tensor in results:
                self.memory.note(tensor, self.line)
            self._count_launches(1)
            return made

        return run

    def _count_launches(self, count: int) -> None:
        self.phases[self.phase].kernels += count
        self.memory.kernels += count

    def note_sync(self, what: str, until: Clock | None = None) -> None:
        """Count an event at which the host waits for the device.

        until: clock of the operations that the host waits for; None for all operations of the current stream.
        """
        self.order.host_waits(until)
        where = f"{what} at {self.line()}"
        self.phases[self.phase].syncs[where] += 1
        if self.is_in_microbatch:
            self.phases[self.phase].in_microbatches[where] += 1

    def note_copy(self, direction: str, host: Tensor, *, is_blocking: bool) -> None:
        """Count a copy between host and device. host: the host tensor. A blocking copy also counts as a sync."""
        if host.numel() == 0:
            return
        if self.is_pinned(host):
            self.order.copy(host, is_write=direction == "to host")
        kind = f"{direction}, {'pinned' if self.is_pinned(host) else 'pageable'}, at {self.line()}"
        phase = self.phases[self.phase]
        phase.copies[kind] += 1
        phase.copied_bytes[kind] += host.numel() * host.element_size()
        if self.is_in_microbatch:
            phase.copies_in_microbatches[direction] += 1
        if is_blocking:
            self.note_sync(f"a blocking copy {direction}")

    def note_on_host(self, tensor: Tensor) -> None:
        """Record the memory of a large host tensor, unless the rehearsal itself created it."""
        if (line := self.line()) != ELSEWHERE:
            self.host_memory.note(tensor, lambda: line)

    def mark(self, part: str, tensors: Iterable[Any]) -> None:
        """Assign tensors, whether on the device or on the host, to a part (see device_memory.PARTS)."""
        tensors = list(tensors)
        self.memory.mark(part, tensors)
        self.host_memory.mark(part, tensors)

    def note_pinned(self, tensor: Tensor) -> None:
        self._pinned.add(tensor.untyped_storage())

    def is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        if isinstance(tensor, FakeTensor) or storage in self._pinned:
            return storage in self._pinned
        return any(storage.data_ptr() in span for span in self.order.page_locked)

    def note_assumed(self, what: str) -> None:
        """Count a value that the rehearsal had to assume. what: the value's description."""
        self.assumed[what] += 1

    # Other ranks

    def group_number(self, group: dist.ProcessGroup) -> int:
        name = group.group_name
        if name not in self._group_numbers:
            self._group_numbers[name] = len(self.groups)
            ranks = dist.get_process_group_ranks(group)
            self.groups.append((group.group_desc, list(ranks)))
        return self._group_numbers[name]

    def note_group(self, group: dist.ProcessGroup, backend: str) -> None:
        """Count a process group when it is created, whether or not this rank is a member."""
        self.made_groups[backend] += 1
        if isinstance(group, dist.ProcessGroup):
            self.peers[backend] |= set(dist.get_process_group_ranks(group))

    def collective(self, func, args, kwargs) -> Any:
        """Record a call of torch.distributed, and return results as if every peer had this rank's data."""
        given = dict(zip(operation(func).arguments, args, strict=False)) | kwargs
        kind = func._schema.name.removeprefix("c10d::").strip("_")
        group = dist.ProcessGroup.unbox(given["process_group"])
        number = self.group_number(group)
        ranks = self.groups[number][1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        by_role = {
            role: [leaf for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Tensor)]
            for role, name in _ROLES.get(kind, {}).items()
        }
        outs, ins = by_role.get("out", tensors), by_role.get("in", tensors)
        self.memory.mark("exchange", tensors)
        peer = given.get("dst", given.get("src", given.get("root_rank", -1)))
        is_async = bool(given.get("async_op", "async_op" in operation(func).arguments))  # left out if it is the default
        end = self._order_collective(kind, group, ins, outs, peer, is_async or kind in ("send", "recv"))
        nbytes = max(sum(t.numel() * t.element_size() for t in side) for side in (outs, ins)) if tensors else 0
        self.collectives.append(
            Collective(
                phase=self.phase,
                kind=kind,
                group=number,
                dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                sizes=tuple(t.numel() for t in tensors),
                peer=ranks[peer] if isinstance(peer, int) and 0 <= peer < len(ranks) else -1,
                nbytes=nbytes,
                on_device=any(map(on_device, tensors)),
                is_async=is_async,
                line=self.line(),
            )
        )
        values = [known(t) for t in ins]
        if kind == "allreduce" and isinstance(ins[0], FakeTensor):
            for value in values:
                if value is not None and self.reduces_by == dist.ReduceOp.SUM:
                    value.mul_(len(ranks))
        elif "allgather" in kind and all(value is not None for value in values):
            for out, value in zip(outs, values if "coalesced" in kind else values[:1] * len(outs), strict=True):
                _fill(out, value, len(ranks) if out.numel() > value.numel() else 1)
        elif kind not in ("allreduce", "broadcast", "send", "barrier", "monitored_barrier", "allreduce_coalesced"):
            for out in outs:
                forget(out)
        returns = len(func._schema.returns)
        work = PythonCallbackWork(lambda _: self.order.wait(end)).boxed()
        return None if returns == 0 else work if returns == 1 else (args[0], work)

    def _order_collective(
        self, kind: str, group: dist.ProcessGroup, ins: list[Tensor], outs: list[Tensor], peer: Any, is_async: bool
    ) -> Clock:
        """Record in `order` which tensors a collective reads and writes. Return the clock of its end."""
        number = self.group_number(group)
        name = f"group {number} ({self.groups[number][0].lower()})"
        if kind in ("send", "recv"):
            name += f" with its rank {peer}"
        if kind not in _ROLES:
            is_read = kind == "send" or (kind == "broadcast" and peer == group.rank())
            ins, outs = (ins, []) if is_read else ([], outs)
        here, there = ([list(filter(wanted, part)) for part in (ins, outs)] for wanted in (_on_host, on_device))
        self.order.on_host(kind, *here)
        end = self.order.communicate(name, kind, *there, is_async=is_async)
        if kind == "barrier" and there[1]:
            self.order.host_waits()
        return end


def _on_host(tensor: Tensor) -> bool:
    return not on_device(tensor)


_ROLES = {
    "allgather": {"out": "output_tensors", "in": "input_tensors"},
    "allgather_base": {"out": "output_tensor", "in": "input_tensor"},
    "allgather_into_tensor_coalesced": {"out": "outputs", "in": "inputs"},
    "reduce_scatter": {"out": "output_tensors", "in": "input_tensors"},
    "reduce_scatter_base": {"out": "output_tensor", "in": "input_tensor"},
    "reduce_scatter_tensor_coalesced": {"out": "outputs", "in": "inputs"},
    "alltoall_base": {"out": "output", "in": "input"},
    "alltoall": {"out": "output_tensors", "in": "input_tensors"},
    "gather": {"out": "output_tensors", "in": "input_tensors"},
    "scatter": {"out": "output_tensors", "in": "input_tensors"},
}


def _fill(out: Tensor, value: Tensor, times: int) -> None:
    whole = value.reshape(-1).repeat(times).view(out.shape).to(out.dtype)
    if isinstance(out, FakeTensor):
        out.known = whole
    else:
        out.copy_(whole)


def _attention_flops(func, args) -> int:
    """Return the FLOPs of attention over packed rows. As in torch's FLOP counter, masked products count, too."""
    given = dict(zip(operation(func).arguments, args, strict=False))
    queries, keys = known(given["cu_seq_q"]), known(given["cu_seq_k"])
    if queries is None or keys is None:
        return 0
    pairs = int((queries.diff().long() * keys.diff()).sum())
    width, of_values = given["query"].shape[2], given["value"].shape[2]
    products = 3 * width + 2 * of_values if "backward" in func._schema.name else width + of_values
    return 2 * pairs * given["query"].shape[1] * products


def shown(filename: str, line: int) -> str:
    """Return a code line as reports show it, or '' if it is neither in this package nor in megatron.core."""
    if filename.startswith(NOT_SHOWN):
        return ""
    if filename.startswith(OURS):
        return f"megatron_rl/{filename[len(OURS) :]}:{line}"
    before, found, after = filename.rpartition(UPSTREAM)
    return f"megatron/core/{after}:{line}" if found else ""
