"""The process group that carries new weights from the trainer (rank 0) to the rollout servers, the byte layout of a
bucket, and the checksum of a tensor. Trainer and servers both import this file, so the two ends cannot disagree.

Compatible with SGLang's `init_custom_process_group` and `flattened_bucket` (0.5.23): a real SGLang server may join too.
"""

import contextlib
import hashlib
import math
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_rl.ops.checksum import word_sums

LOOK_S = 0.1
"""Seconds after which rank 0 asks again whether it waits in vain."""
_environment = threading.Lock()
"""A server may be joining two groups at a time, in two threads."""
CONNECT_S = 30.0
"""For gloo's connections between ranks that have all come to the store just before."""


def join_update_group(
    *,
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str = "gloo",
    timeout_s: float = 120,
    listener: socket.socket | None = None,
    is_hopeless: Callable[[], bool] = lambda: False,
) -> dist.ProcessGroup:
    """Join the group `name`; blocks until all `world_size` ranks have joined, or raises after `timeout_s`.

    Rank 0 hosts the TCP store at `address:port`, and at no other address of its host. Works with or without a default
    process group and never becomes it. `timeout_s` is also the deadline of every later collective of the group.

    listener: rank 0's, which listens at `address:port` already and is taken over; None to open it here.
    is_hopeless(): asked on rank 0; True where a rank will not come. TimeoutError then, at once and for all ranks.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"update group {name}: rank = {rank} must lie in [0, world_size = {world_size})")
    if name in c10d._world.pg_names.values():
        raise ValueError(f"update group {name}: this process is in a group of that name already; leave that one first")
    timeout = timedelta(seconds=timeout_s)
    # The store of torch's tcp:// rendezvous, made directly: under torchrun, rendezvous() would look for the store of
    # torchrun's agent (TORCHELASTIC_USE_AGENT_STORE) and rank 0 would host none.
    if rank == 0:
        # Left to itself the store would listen on every address of the host.
        descriptor = (listener or socket.create_server((address, port))).detach()
        store = _hosted_store(descriptor, address, port, world_size, timeout, is_hopeless)
    else:
        store = dist.TCPStore(address, port, world_size, False, timeout=timeout, multi_tenant=True)
    is_gloo = backend == "gloo"
    # A rank that dies from here on holds up gloo, which connects now, and not NCCL, which connects as it sends.
    connecting = min(timeout, timedelta(seconds=CONNECT_S)) if is_gloo and rank == 0 else timeout
    # As SGLang's init_custom_process_group does, prefix and all. `[]`: the group is no part of a default group.
    place = world_size, rank, [], dist.Backend(backend), dist.PrefixStore(name, store)
    with contextlib.nullcontext() if is_gloo else _without_watchdog():
        group, _ = c10d._new_process_group_helper(*place, group_name=name, timeout=connecting)
    if is_gloo:
        group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
    # The helper leaves this to its caller: collectives look up `group_src` here.
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def _hosted_store(
    listener: int, address: str, port: int, world_size: int, timeout: timedelta, is_hopeless: Callable[[], bool]
) -> dist.TCPStore:
    """Return rank 0's store once all ranks have come to it."""
    # A thread, as nothing interrupts a store that waits.
    with ThreadPoolExecutor(1, thread_name_prefix="weight-store") as thread:
        made = thread.submit(
            dist.TCPStore,
            *(address, port, world_size, True),
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=listener,
        )
        while not wait([made], LOOK_S).done:
            if is_hopeless():
                # Counted as the ranks that will not come, these end its waiting, and with it that of those that came.
                for _ in range(world_size):
                    dist.TCPStore(address, port, world_size, False, timeout=timeout)
                made.result()
                del made  # the store closes here, and not where somebody lets go of the error with these frames
                raise TimeoutError(f"update group at {address}:{port}: a rank will not come.")
        return made.result()


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make NCCL's groups in this block without torch's watchdog, which reads the variable as a group is made.

    It ends the process where a collective fails or is late, and a server may die. Who waits gets the error instead.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            os.environ.pop(name)
            os.environ |= {} if before is None else {name: before}


def leave_update_group(group: dist.ProcessGroup) -> None:
    """Leave and forget the group. Local: the other ranks need not call it, but their next collective would fail.

    What is on the wire is given up.
    """
    if dist.get_backend(group) == "gloo":
        dist.destroy_process_group(group)
    else:  # NCCL's way to destroy waits for kernels, which never end where a peer has died
        c10d._abort_process_group(group)


@dataclass(frozen=True)
class TensorSpec:
    """The name, dtype and shape of one tensor of a bucket, as a receiver must know them.

    For example:

        specs = [TensorSpec("model.norm.weight", torch.bfloat16, (2048,)), ...]
        flat = torch.empty(sum(spec.nbytes for spec in specs), dtype=torch.uint8)
        norm, *others = unpack_bucket(flat, specs)  # views: what is written to them is in the bucket
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def unpack_bucket(flat: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Views into `flat` (uint8), one per spec, in order: to fill a bucket with, or to read it.

    Every offset must be a multiple of its tensor's item size, because the bytes are viewed in place.
    """
    offsets = _check_offsets([(spec.name, spec.dtype, spec.nbytes) for spec in specs])
    if flat.dtype != torch.uint8 or flat.numel() != offsets[-1]:
        raise ValueError(
            f"bucket: {flat.numel()} items of {flat.dtype}, but its {len(specs)} tensors need {offsets[-1]} bytes of "
            "uint8. Sender and receiver must list the same names, dtypes and shapes in the same order."
        )
    return [
        flat[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)
        for start, spec in zip(offsets[:-1], specs, strict=True)
    ]


def _check_offsets(parts: Iterable[tuple[str, torch.dtype, int]]) -> list[int]:
    offsets = [0]
    for name, dtype, nbytes in parts:
        if offsets[-1] % dtype.itemsize:
            raise ValueError(
                f"bucket: {name} ({dtype}) starts at byte {offsets[-1]}, which must be a multiple of {dtype.itemsize}. "
                "Order the tensors by falling item size, or give each dtype its own bucket."
            )
        offsets.append(offsets[-1] + nbytes)
    return offsets


def digest(sums: Tensor, nbytes: int) -> str:
    """The checksum (hex) of a tensor of `nbytes` bytes with these `word_sums`, on the CPU."""
    # A tensor with a few zeros more may have the same sums, so its length is hashed with them.
    return hashlib.sha256(nbytes.to_bytes(8, "little") + sums.numpy().tobytes()).hexdigest()


def checksum(tensor: Tensor) -> str:
    """The checksum (hex) of a tensor's bytes, row-major, in its own dtype."""
    return digest(word_sums([tensor]).cpu(), tensor.nbytes)
