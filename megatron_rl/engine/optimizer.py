"""Megatron's optimizer and learning-rate schedule from our options."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config import OptimizerConfig


class CheckedOptimizer(ChainedOptimizer):
    """Megatron's optimizers of one model, whose step can be left out once the gradient's norm is known.

    `ChainedOptimizer.step` of megatron.core 0.16 to 0.19 prepares the gradients, calls `get_grad_norm`, clips, and
    calls `step_with_ready_grads`, the first to change weights, moments and step counts. Upstream looks for gradients
    that are no number in float16 only.
    """

    def step_if(self, is_sound: Callable[[float], bool]) -> tuple[bool, float]:
        """Apply the gradients, unless `is_sound` is False of their norm; return whether they were, and the norm."""
        self._is_sound = is_sound
        applied = bool(self.step()[0])
        return applied, self._norm

    def get_grad_norm(self) -> float:
        self._norm = float(super().get_grad_norm() or 0.0)
        return self._norm

    def step_with_ready_grads(self) -> bool:
        # is_sound asks all ranks, and upstream calls this on all, also where a rank has no parameter of a kind.
        return self._is_sound(self._norm) and super().step_with_ready_grads()


def build_optimizer(config: OptimizerConfig, chunks: list, dtype: torch.dtype) -> CheckedOptimizer:
    """Return Megatron's AdamW over DDP-wrapped model chunks."""
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
    )
    built = get_megatron_optimizer(options, chunks, use_gloo_process_groups=False)  # parallel.start makes none
    optimizer = CheckedOptimizer(built.chained_optimizers)
    for part in optimizer.chained_optimizers:
        # Megatron takes apex's or Transformer Engine's Adam where there is CUDA, and torch's unfused one elsewhere.
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW) and not torch.cuda.is_available():
            for group in part.optimizer.param_groups:
                group["fused"] = True
    return optimizer


def build_scheduler(config: OptimizerConfig, optimizer, total_updates: int) -> OptimizerParamScheduler:
    """Return the schedule; its unit is one update."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_updates,
        lr_decay_steps=max(total_updates, config.warmup_updates + 1),  # upstream asserts that it is past the warm-up
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
