"""Megatron's optimizer and learning-rate schedule, built from this package's options."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl import platform
from megatron_rl.config import EngineConfig, OptimizerConfig

BUFFERS = {"grad_reduce_in_fp32": (True, False), "bucket_size": None, "pad_buckets_for_high_nccl_busbw": (True, False)}
"""Fields of DistributedDataParallelConfig that `optimizer.megatron` may set, and their possible values. None allows any
number above 0."""
OFFLOAD = {"optimizer_offload_fraction": None} | dict.fromkeys(
    ("overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params"), (True, False)
)
DTYPES = {"main_params_dtype": ("float32", "float16")} | dict.fromkeys(
    ("exp_avg_dtype", "exp_avg_sq_dtype"), ("float32", "bfloat16", "float16")
)
"""Options for the dtypes of Adam's tensors, and their possible values. The gradients' dtype follows from
`grad_reduce_in_fp32`."""
FLAGS = dict.fromkeys(("use_precision_aware_optimizer", "optimizer_cpu_offload"), (True, False))
OFFERED: dict[str, tuple[Any, ...] | None] = BUFFERS | FLAGS | OFFLOAD | DTYPES


def check_passed_through(config: EngineConfig, *, is_elsewhere: bool = False) -> None:
    """Raise ValueError for the first field of `optimizer.megatron` that is unsupported or contradicts an option.

    is_elsewhere: True if other machines will train.
    """
    given = config.optimizer.megatron

    def refuse(key: str, rule: str) -> None:
        raise ValueError(f"optimizer.megatron.{key} = {given[key]!r}: {rule}.")

    for key, value in given.items():
        if key not in OFFERED:
            refuse(key, f"another option decides this, or it is none; take one of {', '.join(sorted(OFFERED))}")
        choices = OFFERED[key]
        if choices is not None and value not in choices:
            refuse(key, f"must be {' or '.join(map(str, choices))}")
        if choices is None and not (isinstance(value, int | float) and value > 0):
            refuse(key, "must be a number above 0; leave it out")
    if given.get("optimizer_offload_fraction", 1) > 1:
        refuse("optimizer_offload_fraction", "must be in (0, 1]")
    aware, offload = (given.get(flag, False) for flag in FLAGS)
    for key in given.keys() & DTYPES.keys():
        if not aware or offload:
            refuse(key, "needs use_precision_aware_optimizer, and no optimizer_cpu_offload, whose Adam keeps float32")
    if given.keys() & OFFLOAD.keys() and not offload:
        refuse(min(given.keys() & OFFLOAD.keys()), "says how to offload; set optimizer_cpu_offload=true too")
    if offload and not aware:
        refuse("optimizer_cpu_offload", "is a form of another option; set use_precision_aware_optimizer=true too")
    if aware and not (config.optimizer.distributed and config.model.dtype == "bfloat16"):
        refuse("use_precision_aware_optimizer", "needs optimizer.distributed=true and model.dtype=bfloat16; set them")
    # Megatron needs Transformer Engine even for the Adam on the host.
    if aware and not (is_elsewhere or platform.uses_transformer_engine("auto")):
        refuse("use_precision_aware_optimizer", "needs Transformer Engine 2.1 or later; install it, or leave this out")


class CheckedOptimizer(ChainedOptimizer):
    """Megatron's optimizers of one model, with a step that can still be skipped when the gradient norm is known.

    In megatron.core 0.16 to 0.19, `ChainedOptimizer.step` prepares the gradients, calls `get_grad_norm`, clips, and
    calls `step_with_ready_grads`. Only the last of these changes weights, moments and step counts.
    """

    def step_if(self, is_sound: Callable[[float], bool]) -> tuple[bool, float]:
        """Apply the gradients unless `is_sound(norm)` is False. Returns whether it has applied them, and the norm."""
        self._is_sound = is_sound
        return bool(self.step()[0]), self._norm

    def get_grad_norm(self) -> float:
        norm = super().get_grad_norm()  # a tensor with Transformer Engine 2.14; read it once
        self._norm = 0.0 if norm is None else float(norm)
        return self._norm

    def step_with_ready_grads(self) -> bool:
        # is_sound is a collective. Megatron calls this method on all ranks, even if a rank has no parameter of a kind.
        return self._is_sound(self._norm) and super().step_with_ready_grads()


def gradient_buffers(config: OptimizerConfig) -> DistributedDataParallelConfig:
    options: dict[str, Any] = {"grad_reduce_in_fp32": True}  # sums in bfloat16 would depend on the microbatch split
    return DistributedDataParallelConfig(
        use_distributed_optimizer=config.distributed,
        overlap_grad_reduce=config.overlap,
        overlap_param_gather=config.overlap,
        **options | {key: value for key, value in config.megatron.items() if key in BUFFERS},
    )


def complete_gradients(chunk: Any) -> None:
    """Give every rank all reduced gradients of a model chunk. Collective.

    The distributed optimizer alone would give each rank only the part that it updates.
    """
    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
        size, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
        for bucket in group.buckets if size > 1 else ():
            own = bucket.grad_data.chunk(size)[rank].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group.intra_distributed_optimizer_instance_group)


def build_optimizer(config: OptimizerConfig, chunks: list, dtype: torch.dtype) -> CheckedOptimizer:
    given = config.megatron
    dtypes = {key: getattr(torch, given[key]) for key in given.keys() & DTYPES.keys()}
    offload = {"optimizer_offload_fraction": 1.0} if given.get("optimizer_cpu_offload") else {}
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.distributed,
        overlap_param_gather=config.overlap,
        store_param_remainders=False,  # checkpoints hold complete main weights, which every kind of optimizer reads
        **offload | {key: value for key, value in given.items() if key not in BUFFERS} | dtypes,
    )
    built = get_megatron_optimizer(options, chunks, use_gloo_process_groups=False)  # parallel.start creates none
    if offload:
        gc.collect()  # Megatron builds it twice; free the first one's host copies, held by a reference cycle
    optimizer = CheckedOptimizer(built.chained_optimizers)
    for part in optimizer.chained_optimizers:
        # Megatron uses apex's or Transformer Engine's Adam with CUDA, and torch's unfused Adam otherwise.
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW) and not torch.cuda.is_available():
            for group in part.optimizer.param_groups:
                group["fused"] = True
    return optimizer


def build_scheduler(config: OptimizerConfig, optimizer, total_updates: int) -> OptimizerParamScheduler:
    """Return the learning-rate schedule, which counts in updates."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_updates,
        lr_decay_steps=max(total_updates, config.warmup_updates + 1),  # Megatron asserts that it exceeds the warmup
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
