"""Lets SGLang start on a machine without CUDA.

Python imports a module of this name at the start of every process that has this folder on PYTHONPATH. Only SGLang
servers on hosts without CUDA are started with this folder on PYTHONPATH.

Each hook runs just before the module that needs it is imported. HOOKS names the first SGLang version that no longer
needs a hook; from that version on, the hook is skipped.

SGLang's imports create millions of long-lived objects. Python's garbage collector would spend a third of the start on
scanning them, so it runs less often here. The imports also take ten seconds of CPU time. SGLang has at least three
processes. Because of CUDA it spawns them, so each process would repeat the imports. Here the processes are forked from
the first one instead.
"""

import gc
import importlib.abc
import multiprocessing
import sys
from collections.abc import Callable


class BeforeImport(importlib.abc.MetaPathFinder):
    """Runs each hook once, just before Python searches for the hook's module. Finds no module itself."""

    def __init__(self, hooks: dict[str, tuple[Callable[[], None], str | None]]) -> None:
        self.hooks = hooks

    def find_spec(self, name, path=None, target=None):
        hook, unneeded_from = self.hooks.pop(name, (None, None))  # out first: the hook itself may import the module
        if hook is not None and not (unneeded_from and is_at_least(unneeded_from)):
            hook()
        return None


def is_at_least(version: str) -> bool:
    from importlib import metadata

    from packaging.version import Version

    return Version(metadata.version("sglang")) >= Version(version)


def define_torchvision_operators() -> None:
    """Define the operators `torchvision::nms` and `qnms`, unless torch is built for CUDA.

    The PyPI wheel of torchvision is a CUDA build. It requires these operators, but registers them only with a torch
    that is built for CUDA.
    """
    import torch

    if torch.version.cuda:  # torchvision's own load then, with a device or without
        return
    # The library must outlive this function, or its operators vanish.
    define_torchvision_operators.library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        define_torchvision_operators.library.define(
            f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


def replace_cudart() -> None:
    """Replace the CUDA runtime, with which SGLang registers a host buffer in order to return routed experts."""
    import torch

    class Cudart:
        """Stand-in for the CUDA runtime. It registers nothing, because no device reads the host's memory."""

        def cudaHostRegister(self, pointer, size, flags):
            return 0

        def cudaHostUnregister(self, pointer):
            return 0

        def cudaGetErrorString(self, status):
            return str(status)

    torch.cuda.cudart = Cudart


def replace_synchronize() -> None:
    """Make `torch.cuda.synchronize` do nothing.

    SGLang waits for its device when it takes checksums of weights or releases memory. If torch is built for CUDA, it
    waits for a CUDA device, which this host lacks.
    """
    import torch

    torch.cuda.synchronize = lambda device=None: None


def leave_memory_unpinned() -> None:
    """Ignore requests for pinned memory, which SGLang uses for adapters and which requires CUDA."""
    if "--enable-lora" not in sys.argv:
        return
    import torch

    def unpinned(make):
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    torch.Tensor.pin_memory = lambda tensor, device=None: tensor
    for name in ("tensor", "empty", "zeros", "ones"):
        setattr(torch, name, unpinned(getattr(torch, name)))


def let_configs_be_registered_twice() -> None:
    """Let SGLang register configs that transformers 5.19 already has."""
    from transformers import AutoConfig

    register = AutoConfig.register
    AutoConfig.register = lambda model_type, config, exist_ok=False: register(model_type, config, exist_ok=True)


def keep_to_latent_attention() -> None:
    """Make DeepSeek's models use latent attention (MLA) for prompts, too.

    Otherwise they process prompts with whole keys that are not in the KV cache, but SGLang's `torch_native` attention
    takes its keys from the cache.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def fork_processes() -> None:
    """Make SGLang fork its processes instead of spawning them, so that they start in a fraction of a second."""
    set_start_method = multiprocessing.set_start_method

    def set_fork(method, force=False):
        gc.freeze()  # so that a collection in a forked process copies no page of what was imported
        set_start_method("fork", force)

    multiprocessing.set_start_method = set_fork


HOOKS: dict[str, tuple[Callable[[], None], str | None]] = {
    "torchvision": (define_torchvision_operators, None),
    "sglang.srt.configs": (let_configs_be_registered_twice, "0.5.23"),
    "sglang.srt.entrypoints.engine": (fork_processes, None),
    "sglang.srt.lora.lora_manager": (leave_memory_unpinned, None),
    "sglang.srt.managers.scheduler_components.weight_updater": (replace_synchronize, None),
    "sglang.srt.mem_cache.pool_host.common": (replace_cudart, None),
    "sglang.srt.models.deepseek_v2": (keep_to_latent_attention, None),
    "sglang.srt.utils.weight_checker": (replace_synchronize, "0.5.23"),
}
"""Module name -> (hook that makes the module work on a CPU, first SGLang version that does not need the hook).

None: 0.5.23 still needs the hook.
"""

gc.set_threshold(100_000, 10, 10)
sys.meta_path.insert(0, BeforeImport(dict(HOOKS)))
