"""Policy and value losses. They take packed `[T]` tensors and return sums over trained rows, never averages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import nan

import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_rl.algo.aggregation import DEMONSTRATED, is_trained
from megatron_rl.algo.catalogue import find_loss
from megatron_rl.algo.correction import behavior_weight, is_left_out, log_weights
from megatron_rl.algo.registry import FusedLoss, TorchLoss
from megatron_rl.algo.torch_losses import LossRows
from megatron_rl.config import AlgorithmConfig, CorrectionConfig
from megatron_rl.config.import_path import described
from megatron_rl.config.users_code import call
from megatron_rl.ops import PpoOptions, ppo_loss

Sums = dict[str, Tensor]


def supervised(logprobs: Tensor, entropy: Tensor, rows: TensorDict) -> tuple[Tensor, Sums]:
    """Return the sum of -log p over the trained tokens: the loss for supervised training on answers."""
    return -logprobs.sum(), {"entropy": entropy.detach().sum()}


@dataclass(frozen=True)
class PolicyLoss:
    """The configured policy loss with its KL and entropy terms, as a LogprobLoss function.

    For example:

        loss = PolicyLoss(config.algo, config.correction)
        stats = engine.train_batch(share, LogprobLoss(loss, temperature=1.0, by_row=not loss.by_sequence))
    """

    options: AlgorithmConfig
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    has_gradient: set[bool] = field(default_factory=set, compare=False)
    """Whether the torch loss depended on the policy. The set collects the answers of all calls."""

    @cached_property
    def entry(self) -> FusedLoss | TorchLoss:  # cached, since every chunk of every microbatch reads it
        return find_loss(self.options.loss, self.options.loss_args)

    @cached_property
    def terms(self) -> PpoOptions:
        """The options of the operator.

        For a torch loss, the operator computes only the KL and entropy terms and the statistics.
        """
        options, correction = self.options, self.correction
        own = PpoOptions(mode="reinforce")  # for a torch loss: -A log p with A = 0 has no policy term
        if isinstance(self.entry, FusedLoss):
            contract = "it is called with the options of the section algo and returns PpoOptions"
            own = call(self.entry.function, [options], options.loss_args, key=self._key, contract=contract)
        is_unbiased = options.kl_estimator == "unbiased"
        return replace(
            own,
            behavior="off" if self.weighs_products else correction.weight,
            behavior_by_sequence=correction.weight != "off" and correction.level == "sequence",
            behavior_low=correction.low,
            behavior_high=correction.high,
            kl_estimator="k3" if is_unbiased else options.kl_estimator,
            kl_weighted=is_unbiased,
            kl_coefficient=options.kl_coefficient if options.kl_in == "loss" else 0.0,
            entropy_coefficient=options.entropy_coefficient,
        )

    @property
    def _key(self) -> str:
        return f"algo.loss = {self.options.loss!r}"

    @property
    def weighs_products(self) -> bool:
        """True if the behaviour weights are products over sequences, which the operator does not support.

        The weights are then multiplied into the advantages. That gives the same loss, because every loss scales with
        the size of the advantages.
        """
        return self.correction.weight != "off" and self.correction.level == "product"

    @property
    def by_sequence(self) -> bool:
        """True if a row's loss depends on other rows of its sequence."""
        return (
            self.terms.by_sequence
            or self.weighs_products
            or self.correction.leaves_out_sequences
            or (isinstance(self.entry, TorchLoss) and self.entry.by_sequence)
        )

    def __call__(self, logprobs: Tensor, entropy: Tensor, rows: TensorDict) -> tuple[Tensor, Sums]:
        """Return the loss summed over the trained rows, and the sums of its statistics.

        The columns of `rows` are:
        - `advantages`, `loss_mask`, and the behaviour policy's `logprobs`
        - `ref_logprobs` for a KL term
        - `cu_seqlens` if the loss is by sequence
        - `row_weights` for means over trajectories
        - `proximal_logprobs`, or `proximal_share`. The share is the proximal policy's position on the line from the
          behaviour policy (0) to the current one (1). Without both columns, as in the step's first update, the proximal
          policy is the current one.
        """

        def column(name: str) -> Tensor:
            return torch.as_tensor(rows[name], dtype=logprobs.dtype)  # float64 if the model is

        names, behavior, proximal = set(rows.keys()), column("logprobs"), None
        if self.correction.proximal == "behavior":
            proximal = behavior
        elif "proximal_logprobs" in names:
            proximal = column("proximal_logprobs")
        elif "proximal_share" in names:
            # In updates after the first, log p is assumed to move linearly between the two policies. That is impossible
            # from an infinite or NaN behaviour log-prob.
            own = logprobs.detach()
            proximal = torch.lerp(behavior, own, column("proximal_share")).where(behavior.isfinite(), own)
        trained, advantages = is_trained(rows), column("advantages")
        row_weights = column("row_weights") if "row_weights" in names else None
        bounds = rows["cu_seqlens"].long() if self.by_sequence else None
        is_torch, counted = isinstance(self.entry, TorchLoss), Sums()
        if is_torch or self.weighs_products or self.correction.leaves_out:
            before = logprobs.detach() if proximal is None else proximal
            seen = LossRows(
                logprobs=logprobs.masked_fill(~trained, 0.0),
                proximal_logprobs=before.masked_fill(~trained, 0.0),
                behavior_logprobs=behavior.masked_fill(~trained, 0.0),
                advantages=advantages.masked_fill(~trained, 0.0),
                trained=trained,
                cu_seqlens=bounds,
                marked=rows["marked"].bool() if "marked" in names else None,
                columns=_columns(rows, trained, logprobs.dtype) if is_torch else {},
            )
            weight, is_outside = behavior_weight(seen, self.correction)
            if self.correction.leaves_out:
                left_out = is_left_out(seen, self.correction)
                seen = replace(seen, advantages=seen.advantages.masked_fill(left_out, 0.0))
                counted["left_out_tokens"] = left_out.sum()
            if self.weighs_products:
                counted["behavior_weight"] = weight.masked_fill(~trained, 0.0).sum()
                counted["dropped_tokens"] = (is_outside & trained).sum()
            if self.correction.leaves_out or self.correction.weight != "off":
                seen, proximal, behavior = _without_unknown(seen, proximal, behavior)
            advantages = seen.advantages * weight if self.weighs_products else seen.advantages
        loss, sums = ppo_loss(
            logprobs,
            proximal,
            behavior,
            torch.zeros_like(advantages) if is_torch else advantages,
            trained,
            self.terms,
            ref_logprobs=column("ref_logprobs") if self.terms.kl_coefficient > 0 else None,
            entropy=entropy,
            row_weights=row_weights,
            cu_seqlens=bounds if self.terms.by_sequence else None,
        )
        if isinstance(self.entry, TorchLoss):
            own = self._in_torch(self.entry, seen, weight, row_weights)  # [T]
            loss, sums = loss + own.sum(), sums | {"not_finite": sums["not_finite"] + (~own.isfinite()).sum()}
        if self.options.positive_weight > 0:
            nll = -logprobs * column("positive_weights").masked_fill(~trained, 0.0)
            counted["positive_nll"] = nll.detach().sum()
            nll = nll if row_weights is None else nll * row_weights
            loss = loss + nll.masked_fill(~trained, 0.0).sum()  # rows that are not trained may hold NaN
        sums = sums | counted
        reported = {name: sums[name] for name in self._reported}
        if DEMONSTRATED not in names:
            return loss, reported
        imitated = (rows["labels"] >= 0) & ~trained
        nll = -logprobs.masked_fill(~imitated, 0.0)
        reported |= {"demonstrated_nll": nll.detach().sum(), "demonstrated_tokens": imitated.sum()}
        return loss + (nll * column(DEMONSTRATED)).sum(), reported

    def _in_torch(self, entry: TorchLoss, rows: LossRows, weight: Tensor, row_weights: Tensor | None) -> Tensor:
        """Return the policy term of a torch loss, `[T]`."""
        contract = f"the columns of its rows are {', '.join(rows.columns)}"
        given = rows, self.options
        loss = call(entry.function, given, self.options.loss_args, key=self._key, contract=contract)
        if not isinstance(loss, Tensor) or loss.shape != rows.trained.shape:
            found = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
            raise ValueError(
                f"{self._key}: {described(entry.function)} returned {found} for the T = "
                f"{len(rows.trained)} rows of a microbatch; must be [T], each row's own loss, which the engine sums "
                f"and divides."
            )
        if rows.logprobs.requires_grad:  # False in an evaluation
            self.has_gradient.add(loss.requires_grad)
        weight = weight.masked_fill(~rows.trained, 0.0)
        # A dropped row adds nothing, even if its loss is NaN or infinite.
        loss = loss.masked_fill(weight == 0, 0.0) * weight
        if row_weights is not None:
            loss = loss * row_weights.masked_fill(~rows.trained, 0.0)
        return loss

    @property
    def _reported(self) -> list[str]:
        """Names of the statistics that are meaningful with these options."""
        names = ["entropy", "tokens", "bounded_tokens", "not_finite"]
        names += [] if self.options.loss == "reinforce" else ["ratio_deviation", "approx_kl"]
        names += ["clipped_tokens"] if self.terms.mode in ("clip", "cispo") else []
        names += ["dual_clipped_tokens"] if self.terms.dual_clip > 0 else []
        names += ["left_out_tokens"] if self.correction.leaves_out else []
        names += ["positive_nll"] if self.options.positive_weight > 0 else []
        names += ["dropped_tokens", "behavior_weight"] if self.correction.weight != "off" else []
        return names + (["reference_kl"] if self.terms.kl_coefficient > 0 else [])


def _columns(rows: TensorDict, trained: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the `[T]` columns of the rows, 0 in untrained rows. Floats are cast to `dtype`, other types are kept."""
    found = {
        str(name): column
        for name, column in rows.items()
        if isinstance(column, Tensor) and column.shape == trained.shape
    }
    columns = {name: column.to(dtype) if column.is_floating_point() else column for name, column in found.items()}
    return {name: column.masked_fill(~trained, 0) for name, column in columns.items()}


def _without_unknown(
    rows: LossRows, proximal: Tensor | None, behavior: Tensor
) -> tuple[LossRows, Tensor | None, Tensor]:
    """Set the advantage to 0 and the ratio to 1 in rows whose behaviour weight is NaN, so that no NaN reaches the loss.

    Also returns the proximal and behaviour log-probs for the operator. The behaviour log-probs stay NaN in these rows,
    because the operator counts them.
    """
    unknown, own = log_weights(rows)[1], rows.logprobs.detach()
    rows = replace(
        rows,
        proximal_logprobs=own.where(unknown, rows.proximal_logprobs),
        behavior_logprobs=own.where(unknown, rows.behavior_logprobs),
        advantages=rows.advantages.masked_fill(unknown, 0.0),
    )
    return rows, None if proximal is None else own.where(unknown, proximal), behavior.masked_fill(unknown, nan)


def value_clip(values: Tensor, rows: TensorDict, *, clip: float) -> tuple[Tensor, Sums]:
    """Return the sum of max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2: PPO's clipped value loss.

    rows: `returns` is R, and `values` is old, the value before the step's first update. A value that has moved from old
    by more than `clip` gets no gradient to move further. clip = 0 disables the bound. The statistics are sums of R,
    R^2, R - v and (R - v)^2, which can be added over ranks; `explained_variance` is computed from them.
    """
    old_values, returns, loss_mask = rows["values"], rows["returns"], rows["labels"] >= 0
    errors = (returns - values).masked_fill(~loss_mask, 0.0)
    loss = errors.square()
    sums: Sums = {}
    if clip > 0:
        # clamp leaves a value within its bounds bitwise unchanged, so it is not counted as clipped.
        near = values.clamp(old_values - clip, old_values + clip)
        bounded = (returns - near).masked_fill(~loss_mask, 0.0).square()
        sums["clipped_values"] = (bounded > loss).sum()
        loss = torch.maximum(loss, bounded)
    known, errors = returns.masked_fill(~loss_mask, 0.0), errors.detach()
    return 0.5 * loss.sum(), sums | {
        "returns": known.sum(),
        "squared_returns": known.square().sum(),
        "errors": errors.sum(),
        "squared_errors": errors.square().sum(),
    }


def explained_variance(sums: Mapping[str, float], count: float) -> float:
    """Return 1 - Var(R - v) / Var(R) from `value_clip`'s sums over `count` tokens; 0 if all returns are equal."""
    variance = sums["squared_returns"] / count - (sums["returns"] / count) ** 2  # E[R^2] - E[R]^2
    residual = sums["squared_errors"] / count - (sums["errors"] / count) ** 2
    return 1.0 - residual / variance if variance > 1e-12 else 0.0
