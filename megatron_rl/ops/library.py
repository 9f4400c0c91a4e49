"""Loads the compiled operators of csrc/, and registers the log-probability operators' shapes and gradients with torch.

`_C_cpu` defines them and implements them for CPU tensors; `_C_cuda`, if built, implements them for CUDA tensors. A
tensor on a device without an implementation raises torch's NotImplementedError: there is no fallback.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import torch
from torch import Tensor

PACKAGE = Path(__file__).resolve().parents[1]
BUILD_SCRIPT = PACKAGE.parent / "csrc" / "build.py"
WAY_OUT = "run `python csrc/build.py` in the source tree (it needs a C++20 compiler such as g++; `make` does it too)"


def load() -> None:
    path = PACKAGE / "_C_cpu.so"
    if not path.exists():
        raise RuntimeError(f"{path} does not exist: the operators are compiled once after installation; {WAY_OUT}.")
    for library in [path, *cuda_library()]:
        check_current(library)
        torch.ops.load_library(library)


def cuda_library() -> list[Path]:
    """Return a list with the path of `_C_cuda.so`.

    The list is empty if the file does not exist or this torch has no CUDA.
    """
    path = PACKAGE / "_C_cuda.so"
    return [path] if path.exists() and torch.version.cuda is not None else []


def check_cuda() -> None:
    """Raise RuntimeError if the operators were built without CUDA, because they would refuse every GPU tensor."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("megatron_rl::logprob_partials", "CUDA"):
        raise RuntimeError(
            f"{PACKAGE / '_C_cuda.so'}: is not there, and this process computes on a GPU; put the nvcc of "
            f"CUDA {torch.version.cuda} on PATH, or its folder in CUDA_HOME, and {WAY_OUT}."
        )


def check_current(library: Path) -> None:
    """Raise RuntimeError if the library was not built from the present sources in csrc/."""
    if not BUILD_SCRIPT.exists():
        return  # an installed package has no sources to compare with
    found, wanted = built_from(library).get("sources"), runpy.run_path(str(BUILD_SCRIPT))["sources_hash"]()
    if found != wanted:
        raise RuntimeError(
            f"{library} was built from other sources ({found}) than those in csrc/ ({wanted}): a stale operator would "
            f"compute something else than the code says; {WAY_OUT}."
        )


def built_from(library: Path) -> dict[str, object]:
    record = library.with_suffix(".json")
    return json.loads(record.read_text()) if record.exists() else {}


load()  # the library defines the operators, so it must be loaded first
ops = torch.ops.megatron_rl


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def tiles(columns: int, dtype: torch.dtype) -> int:
    """Return the number of tiles per row in `logprob_partials`. csrc/math/logprob.h computes it by the same rule."""
    tile = 32768 // dtype.itemsize
    return (columns + tile - 1) // tile if columns > tile else 1


# Fakes give torch.compile the shapes and dtypes that it needs to trace without computing.


@torch.library.register_fake("megatron_rl::logprob_partials")
def _(logits, labels, temperature, temperatures, vocab_start, columns, with_entropy=True):
    return logits.new_empty((tiles(columns, logits.dtype), logits.shape[0], 4), dtype=accumulator(logits.dtype))


@torch.library.register_fake("megatron_rl::logprob_fold")
def _(partials, labels, temperature, temperatures):
    return partials.new_empty((1, *partials.shape[1:]))


@torch.library.register_fake("megatron_rl::logprob_finish")
def _(logits, partials, labels, temperature, temperatures, vocab_start, columns, vocab_size, inplace_backward):
    return tuple(partials.new_empty(partials.shape[1]) for _ in range(4))


@torch.library.register_fake("megatron_rl::logprob_grad")
def _(logits, labels, peak, log_sum, entropy, grad_logprobs, grad_entropy, temperature, temperatures, start, columns):
    return logits.new_empty(logits.shape)


for name in ("logprob_grad_into", "logprob_grad_"):  # they write into an argument and return nothing
    torch.library.register_fake(f"megatron_rl::{name}", lambda *_: None)


def save_for_logprob_grad(ctx, inputs, output) -> None:
    logits, _, labels, temperature, temperatures, vocab_start, columns, _, inplace_backward = inputs
    _, entropy, peak, log_sum = output
    ctx.set_materialize_grads(False)  # an entropy that no loss uses then costs nothing
    ctx.mark_non_differentiable(peak, log_sum)
    ctx.save_for_backward(logits, labels, peak, log_sum, entropy, temperatures)
    ctx.rest = (temperature, vocab_start, columns, inplace_backward)


def logprob_backward(ctx, grad_logprobs, grad_entropy, _peak, _log_sum):
    if grad_logprobs is None and grad_entropy is None:
        return (None,) * 9  # one for each input of logprob_finish
    logits, labels, peak, log_sum, entropy, temperatures = ctx.saved_tensors
    temperature, vocab_start, columns, inplace = ctx.rest
    arguments = (
        *(logits, labels, peak, log_sum, entropy, dense(grad_logprobs), dense(grad_entropy)),
        *(temperature, temperatures, vocab_start, columns),
    )
    # A compiled graph cannot express that a saved tensor changes, and it plans its own memory.
    if inplace and not torch.compiler.is_compiling():
        overwrite_with_gradient(*arguments)
        return logits, *(None,) * 8
    return ops.logprob_grad(*arguments), *(None,) * 8


def overwrite_with_gradient(logits: Tensor, *rest) -> None:
    """Call `logprob_grad_` and mark the logits as changed, so that torch refuses to use them as logits again."""
    ops.logprob_grad_(logits, *rest)
    torch.autograd.graph.increment_version(logits)


def dense(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous()


torch.library.register_autograd("megatron_rl::logprob_finish", logprob_backward, setup_context=save_for_logprob_grad)
