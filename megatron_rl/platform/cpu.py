"""CPU stand-ins for CUDA in megatron.core: constants replaced in its code, and a few replaced torch functions.

Streams and events become no-ops, and the CPU random generator replaces CUDA's. tests/megatron trains with these
stand-ins on real Megatron-Core over gloo. Every megatron.core version up to 0.19.2 needs them. Versions
from 0.18 on also need the stand-in for triton.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

import torch

CONSTANTS = {
    "cuda": "cpu",  # `device="cuda"` literals, torch.autocast("cuda"), custom_fwd(device_type=)
    # dtype tests by tensor.type() in the optimizers and in gradient clipping
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
NAMES = {"is_cuda": "is_cpu"}  # the MoE dispatcher converts split sizes to ints only "if tensor.is_cuda"


def rewrite_code(code: CodeType) -> CodeType:
    """Return the code object, and the functions nested in it, with the replacements of CONSTANTS and NAMES."""
    # co_names holds globals and attributes. Arguments and locals with these names keep them.
    return code.replace(
        co_consts=tuple(_swap(c) for c in code.co_consts), co_names=tuple(NAMES.get(n, n) for n in code.co_names)
    )


def _swap(constant):
    if isinstance(constant, str):
        return CONSTANTS.get(constant, constant)
    if isinstance(constant, tuple | frozenset):
        return type(constant)(_swap(c) for c in constant)
    if isinstance(constant, CodeType):
        return rewrite_code(constant)
    return constant


class _Triton(ModuleType):
    """Stand-in for triton, in which any attribute is a decorator that returns its function unchanged."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> _Triton:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Triton(name)

    def __call__(self, function=None, *args, **kwargs):
        return function if callable(function) else lambda kernel: kernel


@contextlib.contextmanager
def stand_in_for_triton(module_name: str) -> Iterator[None]:
    """Provide a stand-in for triton for a module of megatron.core >= 0.18 that always imports it.

    It is removed afterwards, because torch._inductor must not find it.
    """
    has_triton = "triton" in sys.modules or importlib.util.find_spec("triton") is not None
    if has_triton or not module_name.endswith(".paged_stash"):
        yield
        return
    names = ("triton", "triton.language")
    sys.modules.update({name: _Triton(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


LOGGERS = ("wandb", "torch.utils.tensorboard")
"""Optional loggers whose import takes each rank a second. This package does not use them."""


@contextlib.contextmanager
def surround(module_name: str) -> Iterator[None]:
    """Provide the stand-in for triton and skip unneeded imports while a module of megatron.core is executed."""
    with stand_in_for_triton(module_name), contextlib.ExitStack() as undo:
        if module_name.endswith(".moe.router"):  # it decorates a function; inductor is a third of the import time
            undo.callback(setattr, torch, "compile", torch.compile)
            torch.compile = lambda function: function
        if module_name.endswith((".core.timers", ".dynamic_engine")):
            for name in LOGGERS:
                if name not in sys.modules:
                    undo.callback(sys.modules.pop, name, None)
                    sys.modules[name] = None  # type: ignore[assignment]  # so that its import fails
        yield


class _Stream:
    """Stand-in for a CUDA stream, for a device that runs everything in order."""

    def __init__(self, *args, **kwargs) -> None: ...

    def wait_stream(self, *args, **kwargs) -> None: ...

    # Operations already run in order, so there is nothing to wait for.
    wait_event = synchronize = record = wait = wait_stream

    def record_event(self, event=None):
        return event or _Event()


class _Event(_Stream):
    """Stand-in for a CUDA event. torch.compile's tracing tells streams from events by their classes."""


SMALLEST_PRODUCT = 1 << 22
"""Number of multiply-adds below which the overhead of calling oneDNN exceeds its gain."""


def has_slow_matrix_products() -> bool:
    """Return True on an AMD processor with AVX-512.

    MKL computes torch's float32 products, and it uses AVX-512 only on Intel's processors.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if not (cpuinfo.is_file() and torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    text = cpuinfo.read_text()
    return "AuthenticAMD" in text and "avx512f" in text


def use_onednn_for_matrix_products() -> torch.library.Library:
    """Send large float32 products (`aten::mm`) to oneDNN for as long as the caller keeps the returned library.

    benchmarks/matrix_products.py prints the speedup.
    """
    linear = torch.ops.mkldnn._linear_pointwise.default
    plain = torch.ops.aten.mm.out

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype is torch.float32 and a.shape[0] * a.shape[1] * b.shape[1] >= SMALLEST_PRODUCT:
            return linear(a, b.t(), None, "none", [], "")
        # Use the out variant: aten::mm now dispatches to this function.
        return plain(a, b, out=a.new_empty(a.shape[0], b.shape[1]))

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl("mm", mm, "CPU")
    return library


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Numbers of two parameters of glibc's `mallopt`."""


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations. Otherwise every training step would wait for page faults.

    The process stays as large as in its largest step.
    """
    libc = ctypes.CDLL(None)
    try:
        mallopt = libc.mallopt
    except AttributeError:  # the C library is not glibc
        return
    # Both are needed: by default large blocks are mapped one by one and returned whatever the threshold.
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)


GLOO_LISTENER = "gloo_tcp_loop"
"""Name of gloo's threads that receive data from other ranks."""


def let_gloo_listeners_wait() -> None:
    """Keep gloo's listening threads from preempting threads that are sending on the same connection.

    A listener that finds the connection locked retries until its time slice ends, while the sender may be waiting for
    the same core. As SCHED_BATCH, it does not preempt others when it wakes. Does nothing on systems other than Linux.
    """
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended, or the host forbids changing its policy
            if (task / "comm").read_text().rstrip() == GLOO_LISTENER:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _ignore(*args, **kwargs) -> None: ...


def stand_in_for_cuda() -> None:
    """Replace the torch.cuda functions that megatron.core calls unconditionally.

    `torch.tensor` is not replaced: transformers would load models with uninitialized buffers.
    """
    cuda, default_stream = torch.cuda, _Stream()
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_init"):
        # Each gets its own function: torch.compile refuses two patched functions that are the same object.
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed)) and None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.default_generators = collections.defaultdict(lambda: torch.default_generator)
    cuda._lazy_call = lambda function, **kwargs: function()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: default_stream
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _ignore
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = _ignore
