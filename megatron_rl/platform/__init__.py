"""The one package that checks whether CUDA is available. Call `prepare()` before the first import of megatron.core.

With CUDA, `prepare` only installs fixes of Megatron bugs. Without CUDA, megatron.core also gets CPU stand-ins and runs
over gloo, with its source files unmodified.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from importlib import metadata

import torch
import torch.nn.attention

from megatron_rl.platform import cpu, imports, upstream

_kept: list[torch.library.Library] = []
"""Libraries whose operators stay registered as long as they are referenced."""

_why_set_aside = ""
"""The reason why the installed Transformer Engine is treated as absent; '' if it is not."""

logger = logging.getLogger(__name__)


def prepare(*, may_use_transformer_engine: bool = True) -> None:
    """Make megatron.core importable and correct on this machine. Further calls change nothing.

    may_use_transformer_engine: if False, an installed Transformer Engine is treated as absent, unless it is already
    imported.
    """
    for message in (
        ".*(Apex is|Transformer Engine and Apex are) not installed.*",  # the fallback to torch is expected here
        "absl.logging is not installed",
        "full scope is deprecated",  # Megatron's own default triggers it
        "invalid escape sequence",  # in Megatron's docstrings
        "Please use DTensor instead",  # Megatron's checkpoints are built on torch's ShardedTensor
        "`load_state_dict` is deprecated",
        ".* is experimental and still under active development",
        "Could not determine rank from torch.distributed",  # of one process
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in ("models.gpt.gpt_model", "dist_checkpointing.strategies.torch"):
        logging.getLogger(f"megatron.core.{name}").addFilter(_is_no_deprecation)
    if not has_cuda():  # a CUDA toolkit without a GPU is no reason to warn
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if may_use_transformer_engine:
        set_aside_broken_transformer_engine()
    else:
        leave_out_transformer_engine()
    fixes = upstream.fixes_of(metadata.version("megatron-core"))
    if has_cuda():
        imports.install(after_import=fixes)
    elif imports.install(after_import=fixes, rewrite=cpu.rewrite_code, surroundings=cpu.surround):
        cpu.stand_in_for_cuda()
        cpu.keep_freed_memory()
        if cpu.has_slow_matrix_products():
            _kept.append(cpu.use_onednn_for_matrix_products())


def set_aside_broken_transformer_engine() -> None:
    """Treat an installed Transformer Engine as absent if it does not load, and log the reason.

    It may need other versions of CUDA's libraries than torch has. megatron.core would then fail at import.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # besides OSError, its own checks of versions raise what they like
        fault = f"{type(error).__name__}: {error}".splitlines()[0]
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        _set_aside(f"does not load ({fault}; see docs/gpu.md)")
        if os.environ.get("RANK", "0") == "0":
            logger.warning(
                "Transformer Engine is installed but does not load (%s); Megatron-Core's local layers are used. "
                "docs/gpu.md names versions that load together.",
                fault,
            )


def leave_out_transformer_engine() -> None:
    """Treat Transformer Engine as absent, unless it is already imported."""
    if "transformer_engine" not in sys.modules and importlib.util.find_spec("transformer_engine") is not None:
        _set_aside("was left out, because this process began with model.transformer_impl=local")


def _set_aside(why: str) -> None:
    global _why_set_aside
    _why_set_aside = why
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # imports of it raise ImportError


def _is_no_deprecation(record: logging.LogRecord) -> bool:
    """Return False for deprecation warnings, which Megatron would otherwise log at the start of every run."""
    return "is deprecated" not in str(record.msg).lower()


def has_cuda() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """Return the device of this process: its GPU if CUDA is available, otherwise the CPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_cuda() else torch.device("cpu")


def backend() -> str:
    return "nccl" if has_cuda() else "gloo"


def has_gradient_accumulation_kernel() -> bool:
    """Return True if megatron.core can accumulate weight gradients with apex's fused kernel."""
    return has_cuda() and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def uses_transformer_engine(transformer_impl: str) -> bool:
    """Return True if `model.transformer_impl` selects Transformer Engine's layers. Does not import the package.

    Raises ValueError if Transformer Engine is required but unavailable.
    """
    if transformer_impl == "local" or (transformer_impl == "auto" and not has_cuda()):
        return False
    is_installed = importlib.util.find_spec("transformer_engine") is not None
    if transformer_impl == "transformer_engine" and not (has_cuda() and is_installed):
        missing = _without_transformer_engine() if has_cuda() else "there is no CUDA device"
        raise ValueError(
            f"model.transformer_impl = 'transformer_engine': {missing}; install transformer_engine[pytorch] on a "
            f"machine with CUDA, or set model.transformer_impl=local (auto takes what is there)."
        )
    return is_installed


def _without_transformer_engine() -> str:
    if _why_set_aside:
        return f"the installed transformer_engine {_why_set_aside}"
    return "the package transformer_engine is not installed"


def check_shared_keys(kernel: str) -> None:
    """Raise ValueError if this machine does not support the kernel that `model.shared_keys` names."""
    if kernel == "flex" and not has_cuda():
        raise ValueError(
            "model.shared_keys = 'flex': there is no CUDA device, and FlexAttention has no gradient elsewhere; set "
            "model.shared_keys=copied."
        )


def check_delta_kernel(kernel: str, dtype: str, *, is_elsewhere: bool = False) -> None:
    """Raise ValueError if this machine or `model.dtype` does not support the kernels of `model.delta_kernel`.

    is_elsewhere: True if other machines will train. Only the dtype is then checked.
    """
    if kernel == "torch":
        return
    fault, remedy = "", "install fla-core (megatron-rl[fla]) on a machine with CUDA"
    if not (is_elsewhere or has_cuda()):
        fault = "there is no CUDA device, and its Triton kernels run on no other"
    elif not is_elsewhere and importlib.util.find_spec("fla") is None:
        fault = "No module named 'fla'"
    elif dtype == "float32":
        fault, remedy = "model.dtype = float32, whose products its kernels round to TF32", "set model.dtype=bfloat16"
    if fault:
        raise ValueError(f"model.delta_kernel = {kernel!r}: {fault}; {remedy}, or set model.delta_kernel=torch.")


def use_flash_attention(kernel: str) -> None:
    """Make torch compute attention with the kernel of `model.flash_attention`. Raises ValueError if it is unavailable.

    For Transformer Engine's kernel, this only checks that the package is installed.
    """
    if kernel == "torch":
        return
    fault, package = "there is no CUDA device", "flash_attn_interface (FlashAttention's folder `hopper`)"
    if kernel == "TE":
        package = "transformer_engine[pytorch]"
        if has_cuda() and importlib.util.find_spec("transformer_engine") is not None:
            return
        fault = _without_transformer_engine() if has_cuda() else fault
    elif has_cuda():
        try:
            torch.nn.attention.activate_flash_attention_impl(kernel)
            return
        except (ImportError, RuntimeError, ValueError) as error:
            fault = str(error)
    raise ValueError(
        f"model.flash_attention = {kernel!r}: {fault}; install {package} on a machine with CUDA, or set "
        f"model.flash_attention=torch."
    )
