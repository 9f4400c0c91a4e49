"""Fixes for bugs of megatron.core, applied after import. Each has a test in tests/megatron that fails without it.

The bugs also occur on GPUs, most of them only if neither Transformer Engine nor apex is installed.
"""

from __future__ import annotations

import io
import os
import pickle
import queue
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from megatron_rl.platform.plain_checkpoints import read_as_data


def no_jit_fuser(module: ModuleType) -> None:
    """Disable `jit_fuser` without CUDA: it would compile small functions with inductor at every start."""
    if not torch.cuda.is_available():
        module.disable_jit_fuser()


def router_without_transformer_engine(module: ModuleType) -> None:
    """Define `te_general_gemm` for the MoE router, which otherwise raises NameError without Transformer Engine."""
    vars(module).setdefault("te_general_gemm", None)


def latent_attention_without_transformer_engine(module: ModuleType) -> None:
    """Set HAVE_TE to False if Transformer Engine's classes are stand-ins, with which isinstance() raises TypeError."""
    if not isinstance(module.TELinear, type):
        module.HAVE_TE = False


def distributed_adam_resume(module: ModuleType) -> None:
    """Fix two errors in loading the distributed optimizer's state with torch's Adam.

    The `fully_reshardable` format raises KeyError for the `step` of a parameter. After a load, all parameters share one
    `step` tensor, so that one update counts once per parameter in Adam's bias correction.
    """
    cls = module.DistributedOptimizer
    set_states, load = cls._set_main_param_and_optimizer_states, cls.load_state_dict

    def set_states_with_step(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            # Versions that also keep it in the checkpoint use that value.
            tensors.setdefault("step", state["step"])
        return set_states(self, model_param, tensors)

    def load_with_own_steps(self, state_dict):
        with torch.no_grad():
            load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    cls._set_main_param_and_optimizer_states, cls.load_state_dict = set_states_with_step, load_with_own_steps


def uneven_parts_over_gloo(module: ModuleType) -> None:
    """Make all-to-all work over gloo with parts of different sizes, as experts that are split over tensor ranks need.

    gloo itself supports only equal parts.
    """
    if torch.cuda.is_available():
        return
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_parts(input_: Tensor, group, output_split_sizes=None, *args, **kwargs) -> Tensor:
        if output_split_sizes is None:
            return gather(input_, group, None, *args, **kwargs)
        # Pad to the longest part, because gloo needs equal parts. The padding is cut off below.
        padded = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def scatter_parts(input_: Tensor, group, input_split_sizes=None, *args, **kwargs) -> Tensor:
        if input_split_sizes is None:
            return scatter(input_, group, None, *args, **kwargs)
        total = input_.clone()
        # All-reduce and keep this rank's part: more bytes than a reduce-scatter, but the same numbers.
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather_parts, scatter_parts


def embedding_without_a_mask_as_index(module: ModuleType) -> None:
    """Replace the indexing by a mask in the vocab-parallel embedding, for which the host would wait for the GPU."""

    def forward(self, input_: Tensor) -> Tensor:
        ids, is_elsewhere = input_, None
        if self.tp_group.size() > 1:
            is_elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            ids = (input_ - self.vocab_start_index).masked_fill(is_elsewhere, 0)
        rows = self.weight[ids] if self.deterministic_mode else F.embedding(ids, self.weight)  # [1, R, H]
        if is_elsewhere is not None:
            rows = rows.masked_fill(is_elsewhere[..., None], 0.0)
        if self.reduce_scatter_embeddings:
            return module.reduce_scatter_to_sequence_parallel_region(
                rows.transpose(0, 1).contiguous(), group=self.tp_group
            )
        return module.reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)

    module.VocabParallelEmbedding.forward = forward


class _ResultsFile:
    """A queue from forked writers to their parent, in an unnamed append-only file that no other process can open."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(buffering=0)
        self.read_bytes = 0

    def put(self, item: Any) -> None:
        self.file.write(pickle.dumps(item))

    def get_nowait(self) -> Any:
        # pread, because the forked writers share the file position.
        data = os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size - self.read_bytes, self.read_bytes)
        if not data:
            raise queue.Empty
        stream = io.BytesIO(data)  # may hold the items of several writers
        item = pickle.load(stream)
        self.read_bytes += stream.tell()
        return item


def checkpoint_results_without_a_server(module: ModuleType) -> None:
    """Replace the queue through which checkpoint writers report results.

    Megatron spawns a process to serve it, which runs the main script again and outlives the save. Its start takes
    seconds, or never ends if the script has no `__main__` guard.
    """
    module._get_write_results_queue = module.get_write_results_queue = lambda *_, **__: _ResultsFile()


def storages_pickled_by_torchs_name(module: ModuleType) -> None:
    """Make pickled tensors name torch's loading function, which Megatron replaces from 0.17 on and SGLang requires."""
    if function := vars(module).get("safe_load_from_bytes"):
        function.__module__, function.__qualname__ = "torch.storage", "_load_from_bytes"


def steps_on_the_gpu_after_its_gradients(module: ModuleType) -> None:
    """Make a partly offloaded optimizer's part on the GPU wait for its gradients.

    With overlap_cpu_optimizer_d2h_h2d, Megatron converts the gradients on another stream, and its step does not wait
    for that stream.
    """
    cls = module.HybridDeviceOptimizer
    make_parts = cls._init_sub_optimizers

    def make_parts_that_wait(self) -> None:
        make_parts(self)
        if self.gpu_optimizer is not None:
            wait = lambda *_: torch.cuda.current_stream().wait_stream(self._d2h_stream)  # noqa: E731
            self.gpu_optimizer.register_step_pre_hook(wait)

    cls._init_sub_optimizers = make_parts_that_wait


FIXES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.transformer.multi_latent_attention": latent_attention_without_transformer_engine,
    "megatron.core.jit": no_jit_fuser,
    "megatron.core.safe_globals": storages_pickled_by_torchs_name,
    "megatron.core.transformer.moe.moe_utils": router_without_transformer_engine,
    "megatron.core.optimizer.distrib_optimizer": distributed_adam_resume,
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": steps_on_the_gpu_after_its_gradients,
    "megatron.core.tensor_parallel.layers": embedding_without_a_mask_as_index,
    "megatron.core.tensor_parallel.mappings": uneven_parts_over_gloo,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": checkpoint_results_without_a_server,
    "megatron.core.dist_checkpointing.strategies.torch": read_as_data,
}
UNNEEDED_FROM = {
    "megatron.core.transformer.multi_latent_attention": "0.17.0",
    "megatron.core.transformer.moe.moe_utils": "0.17.0",
}
"""Maps a module of megatron.core to the version from which on its fix is not needed. 0.19.2 needs all other fixes."""


def fixes_of(version: str) -> dict[str, Callable[[ModuleType], None]]:
    return {
        module: mend
        for module, mend in FIXES.items()
        if module not in UNNEEDED_FROM or Version(version) < Version(UNNEEDED_FROM[module])
    }
