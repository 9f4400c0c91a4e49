"""The process group that sends new weights to the rollout servers, a bucket's byte layout, and a tensor's checksum.

Trainer and servers both import this file, so the two ends cannot disagree. Group and bucket are compatible with
SGLang's `init_custom_process_group` and `flattened_bucket` (0.5.23), so a real SGLang server may join too.
"""

import contextlib
import hashlib
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_rl.ops.checksum import word_sums

LOOK_S = 0.1
"""Seconds between two calls of `is_hopeless` while rank 0 waits."""
_environment = threading.Lock()
"""Held while os.environ is changed, because a server may join two groups at the same time, in two threads."""
CONNECT_S = 30.0
"""Timeout in seconds for gloo to connect the ranks, once all of them have reached the store."""
WIRE_THREADS = 4
"""Number of gloo's threads for each network interface. Each thread handles one broadcast. With gloo's default of two
threads the wire is idle between tensors, because a broadcast first waits for its receivers."""


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
    """Join the process group `name`. Blocks until all `world_size` ranks have joined, and raises after `timeout_s`.

    Rank 0, the trainer, hosts the TCP store, which listens only on `address:port`. A default process group is not
    needed and is never replaced. `timeout_s` also applies to every later collective of the group.

    listener: on rank 0, a socket that already listens at `address:port` and that this function takes over. If None, the
    function opens one.
    is_hopeless: polled on rank 0. Once it returns True, rank 0 raises TimeoutError and the other ranks stop waiting.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"update group {name}: rank = {rank} must lie in [0, world_size = {world_size})")
    if name in c10d._world.pg_names.values():
        raise ValueError(f"update group {name}: this process is in a group of that name already; leave that one first")
    timeout = timedelta(seconds=timeout_s)
    # Same store as torch's tcp:// rendezvous, but created directly. Under torchrun, rendezvous() would use the agent's
    # store (TORCHELASTIC_USE_AGENT_STORE), and rank 0 would host none.
    if rank == 0:
        # By default the store would listen on every address of the host.
        descriptor = (listener or socket.create_server((address, port))).detach()
        store = _hosted_store(descriptor, address, port, world_size, timeout, is_hopeless)
    else:
        store = dist.TCPStore(address, port, world_size, False, timeout=timeout, multi_tenant=True)
    is_gloo = backend == "gloo"
    # If a rank dies from here on, gloo blocks, because it connects now. NCCL connects on first use.
    connecting = min(timeout, timedelta(seconds=CONNECT_S)) if is_gloo and rank == 0 else timeout
    # Same as SGLang's init_custom_process_group, including the prefix. `[]`: not a subgroup of the default group.
    own = GLOO if is_gloo else backend
    place = world_size, rank, [], dist.Backend(own), dist.PrefixStore(name, store)
    with contextlib.nullcontext() if is_gloo else _without_watchdog():
        group, _ = c10d._new_process_group_helper(*place, group_name=name, timeout=connecting)
    if is_gloo:
        group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
    # The helper leaves this to its caller. Collectives look up `group_src` here.
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def _gloo(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Create the same gloo group as torch does, but with WIRE_THREADS threads per network interface.

    Other ranks of the group need not have as many threads.
    """
    gloo = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
    options._timeout, options._threads = timeout, WIRE_THREADS * len(options._devices)
    return gloo(store, rank, world_size, options)


GLOO = "weight_update_gloo"
"""Name of the backend under which torch knows `_gloo`. torch's own backend "gloo" accepts no options for a group."""
dist.Backend.register_backend(GLOO, _gloo, devices=["cpu", "cuda"])


def _hosted_store(
    listener: int, address: str, port: int, world_size: int, timeout: timedelta, is_hopeless: Callable[[], bool]
) -> dist.TCPStore:
    """Create rank 0's store and return it once all ranks have connected to it.

    Raises TimeoutError if `is_hopeless` returns True. listener: file descriptor of the listening socket.
    """
    # In a thread, because a waiting store cannot be interrupted.
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
                # These connections count as the missing ranks. So the store, and the ranks that came, stop waiting.
                for _ in range(world_size):
                    dist.TCPStore(address, port, world_size, False, timeout=timeout)
                made.result()
                del made  # close the store now, not when the error's traceback is released
                raise TimeoutError(f"update group at {address}:{port}: a rank will not come.")
        return made.result()


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Keep torch's watchdog from ending the process for NCCL groups that are created in this block.

    The watchdog would end the process if a server dies. Now the caller that waits for the collective gets the error
    instead. torch reads the environment variable when a group is created.
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
    """Leave and destroy the group. Broadcasts in flight are abandoned.

    Not collective: other ranks need not call it, but their next collective in the group fails.
    """
    if dist.get_backend(group) == GLOO:
        dist.destroy_process_group(group)
    else:  # destroying would wait for NCCL kernels, which never end if a peer died
        c10d._abort_process_group(group)


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that is published.

    specs = [TensorSpec("model.norm.weight", torch.bfloat16, (2048,)), ...]
    flat = torch.empty(bytes_of(specs), dtype=torch.uint8)
    norm, *others = unpack_bucket(flat, specs)  # views: what is written to them is in the bucket
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def bytes_of(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def described(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Return the names, dtypes and shapes of a bucket's tensors as fields of the request that announces the bucket."""
    return {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype_name for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def unpack_bucket(flat: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Return the tensors of a bucket as views into its bytes, one per spec, in the same order.

    flat: the bucket, `[n]` uint8. Raises ValueError if it is not exactly as large as the tensors together, or if a
    tensor would not begin at a multiple of its item size.
    """
    offsets = [0]
    for spec in specs:
        if offsets[-1] % spec.dtype.itemsize:
            raise ValueError(
                f"bucket: {spec.name} ({spec.dtype}) starts at byte {offsets[-1]}, which must be a multiple of "
                f"{spec.dtype.itemsize}. Order the tensors by falling item size, or give each dtype its own bucket."
            )
        offsets.append(offsets[-1] + spec.nbytes)
    if flat.dtype != torch.uint8 or flat.numel() != offsets[-1]:
        raise ValueError(
            f"bucket: {flat.numel()} items of {flat.dtype}, but its {len(specs)} tensors need {offsets[-1]} bytes of "
            "uint8. Sender and receiver must list the same names, dtypes and shapes in the same order."
        )
    return [
        flat[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)
        for start, spec in zip(offsets[:-1], specs, strict=True)
    ]


def digest(sums: Tensor, nbytes: int) -> str:
    """Return the checksum, in hex, of a tensor of `nbytes` bytes. sums: the tensor's `word_sums`, on the CPU."""
    # Trailing zeros may leave the sums unchanged, so the length is hashed too.
    return hashlib.sha256(nbytes.to_bytes(8, "little") + sums.numpy().tobytes()).hexdigest()


def checksum(tensor: Tensor) -> str:
    """Return the checksum, in hex, of a tensor's bytes in row-major order."""
    return digest(word_sums([tensor]).cpu(), tensor.nbytes)
