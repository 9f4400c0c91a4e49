"""What engines of Transformer Engine's and of megatron.core's own layers do, for test_transformer_engine.py.

Imported by a process in which Transformer Engine is loaded already, with fake kernels.
"""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import MTP, SFT, head_of, train
from gathered import as_hf_tensors, record_gradients
from megatron.core.tensor_parallel import layers
from test_gradients import user_loss, user_weight
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_engine.pytorch import DotProductAttention, GroupedLinear, Linear

from megatron_rl import platform
from megatron_rl.engine import attention, packed_rows
from megatron_rl.engine.layers import RMSNorm
from megatron_rl.tools.rehearsal.te_kernels import NAMESPACE
from megatron_rl.weights.reshard import rules_of
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_groups, share_of
from tests.kit.ranks import run_each

MARKS = {"tensor_model_parallel": False, "sequence_parallel": False, "allreduce": True}
"""Megatron's marks on parameters and what their absence means."""

SHORT = (3, 5, 4)
"""The lengths of a batch whose tokens are few."""


class Launches(TorchDispatchMode):
    """Counts the calls of Transformer Engine's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name.partition("::")[2]] += func.namespace in (NAMESPACE, "te_moe")
        return func(*args, **(kwargs or {}))


def take(impl: str, accumulates: bool = False) -> None:
    """Let engines made from now on have layers of `transformer_engine` or `local` ones."""
    platform.uses_transformer_engine = lambda given: impl == "transformer_engine"
    platform.has_gradient_accumulation_kernel = lambda: accumulates
    layers._grad_accum_fusion_available = accumulates


def updated(folder: Path, layout: str, impl: str, accumulates: bool = False) -> dict[str, Any]:
    """Load, compute log-probabilities, update once; return what was seen on the way.

    accumulates: weight gradients are added up by the layers' kernels, as where apex is installed too.
    """
    take(impl, accumulates)
    engine = make_engine(folder, LAYOUTS[layout][1], tokens_per_microbatch=32)
    loaded = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    recorded = record_gradients(engine)
    with Launches() as launches:
        logprobs = engine.eval().forward(make_batch())
        stats = engine.train().train_batch(share_of(make_batch(), engine), user_loss, user_weight)
    chunk = engine.chunks[0]
    return {
        "loaded": loaded,
        "logprobs": logprobs,
        "stats": stats,
        "gradients": as_hf_tensors(engine, recorded[0]),
        "weights": {name: tensor.clone() for name, tensor in engine.hf_tensors()},
        "marks": {
            (*rule.hf, rule.expert): {name: getattr(parameter, name, default) for name, default in MARKS.items()}
            for parameter, rule in rules_of(chunk, engine.arch)
            if isinstance(parameter, torch.nn.Parameter)
        },
        "own_norms": sum(isinstance(module, RMSNorm) for module in chunk.modules()),
        "parameters": {name: (tuple(p.shape), p.dtype) for name, p in chunk.named_parameters()},
        "fused": [
            module.fuse_wgrad_accumulation for module in chunk.modules() if isinstance(module, Linear | GroupedLinear)
        ],
        "launches": launches.counts,
        "optimizer": [type(part.optimizer).__name__ for part in engine.optimizer.chained_optimizers],
    }


def attended(folder: Path, layout: str, kernel: str) -> dict[str, Any]:
    """Update once with a kernel of `model.flash_attention` over packed rows, as on CUDA, or with SDPA ("torch")."""
    take("local")
    windows, attend = set(), DotProductAttention.forward

    def recorded_attention(self, *args: Any, **options: Any) -> torch.Tensor:
        windows.add(options["window_size"])
        return attend(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DotProductAttention, "forward", recorded_attention)
        patch.setattr(platform, "use_flash_attention", lambda given: None)
        for module in (packed_rows, attention):
            patch.setattr(module, "has_varlen_kernel", lambda device, dtype: kernel == "TE")
        engine = make_engine(folder, LAYOUTS[layout][1], flash_attention=kernel)
        recorded = record_gradients(engine)
        stats = engine.train().train_batch(share_of(make_groups(), engine), user_loss, user_weight)
    return {"stats": stats, "gradients": as_hf_tensors(engine, recorded[0]), "windows": windows}


def resumed(
    folder: Path, checkpoints: Path, impls: tuple[str, str], kinds: tuple[bool, bool]
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Train and save, train on; the weights of that engine, and of one that took the checkpoint and trained on.

    Of few tokens, as kernels that Triton interprets take their time.

    impls, kinds: the layers of either engine, and whether its optimizer is distributed.
    """
    engines = []
    for impl, is_distributed in zip(impls, kinds, strict=True):
        take(impl)
        engines.append(make_engine(folder, LAYOUTS["1"][1], weight_decay=0.1, distributed=is_distributed).train())
    first, second = engines
    first.train_batch(make_batch(0, SHORT), user_loss, user_weight)
    first.save(checkpoints, with_optimizer=True)
    second.load(checkpoints, with_optimizer=True)
    for engine in engines:
        engine.train_batch(make_batch(1, SHORT), user_loss, user_weight)
    steps = [group.get("step") for part in second.optimizer.chained_optimizers for group in part.param_groups]
    return *({name: tensor.clone() for name, tensor in engine.hf_tensors()} for engine in engines), steps


def drafted(folder: Path, layout: str, impl: str, checkpoint: Path) -> dict[str, Any]:
    """Train a multi-token-prediction layer; a checkpoint that local layers have written, or write it."""
    take(impl)
    found = train(folder, layout, MTP, lambda: make_batch(0, SHORT), updates=1)
    engine = make_engine(folder, LAYOUTS[layout][1], draft=MTP)
    if impl == "local":
        engine.train().train_batch(share_of(make_batch(0, SHORT), engine), SFT)
        engine.save(checkpoint, with_optimizer=True)
    else:
        engine.load(checkpoint, with_optimizer=True)
    engine.train().train_batch(share_of(make_batch(1, SHORT), engine), SFT)
    fused = sum(isinstance(module, Linear | GroupedLinear) for module in engine.draft.layer.modules())
    return found | {"continued": head_of(engine), "fused": fused}


def run_all(size: int, cases: dict[Any, tuple], output: Path) -> None:
    """Run the cases in one world of `size` ranks; write what each rank found, by case."""
    output.write_bytes(pickle.dumps(run_each(size, run, cases)))


def run(function: str, *arguments: Any) -> Any:
    return globals()[function](*arguments)
