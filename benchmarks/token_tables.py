"""The tables of operators on one number a token: the policy loss and advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from device_clock import COST, COST_LEGEND, DeviceClock
from suite_bars import GAE, LOSSES, OUR_LOSS
from suite_report import Budget, Report, each_case, guarded
from torch import Tensor

from megatron_rl.ops import PpoOptions, packed_gae, ppo_loss
from tests.kit import operators as reference

PER_TOKEN = PpoOptions(behavior="mask", behavior_high=5.0, kl_coefficient=0.1)
PER_SEQUENCE = PpoOptions(sequence_ratio=True, clip_low=0.003, clip_high=0.004)
DISCOUNTS = {"discount": 0.99, "trace_decay": 0.95}
COLUMNS = ("T", "sequences", "what", *COST, "host us", "replayed us", "err", "repeats alike", "error")
LEGEND = f"{COST_LEGEND} host us: of one call while nothing waits. replayed us: as a CUDA graph."


@dataclass(frozen=True)
class Tokens:
    rows: int
    sequences: int

    def __str__(self) -> str:
        return f"T={self.rows} in {self.sequences} sequences"


def token_cases() -> list[Tokens]:
    return [Tokens(rows, sequences) for rows in (32768, 4096, 16384, 65536) for sequences in (64, 1, 512)]


@dataclass(frozen=True)
class Columns:
    """`[T]` float32 of one case, and its sequences' bounds."""

    logprobs: Tensor
    proximal: Tensor
    behavior: Tensor
    advantages: Tensor
    mask: Tensor
    ref: Tensor
    cu_seqlens: Tensor

    def loss(self, function: Callable, options: PpoOptions, own: Tensor) -> Any:
        given = (self.proximal, self.behavior, self.advantages, self.mask)
        return function(own, *given, options, ref_logprobs=self.ref, cu_seqlens=self.cu_seqlens)

    def gradient(self, function: Callable, options: PpoOptions) -> Tensor:
        own = self.logprobs.detach().requires_grad_()
        loss = self.loss(function, options, own)
        return torch.autograd.grad(loss[0] if isinstance(loss, tuple) else loss, own)[0]

    def double(self) -> Columns:
        columns = vars(self).values()
        return Columns(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in columns))


def make_columns(case: Tokens, device: str) -> Columns:
    generator = torch.Generator(device).manual_seed(0)
    noise = torch.randn(5, case.rows, generator=generator, device=device)
    own = -noise[0].abs() - 0.1
    mask = torch.rand(case.rows, generator=generator, device=device) < 0.7
    cu_seqlens = torch.arange(0, case.rows + 1, case.rows // case.sequences, device=device)
    return Columns(own, own + 0.1 * noise[1], own + 0.1 * noise[2], noise[3], mask, own + 0.1 * noise[4], cu_seqlens)


def measure_call(clock: DeviceClock, call: Callable[[], Tensor], true: Tensor, replays: bool) -> dict[str, Any]:
    first, second = call(), call()
    found: dict[str, Any] = {"err": float((first.double() - true).abs().max())}
    found |= {"repeats alike": torch.equal(first, second), "host us": clock.host_us(call)}
    return found | clock.cost(call) | ({"replayed us": clock.replay_us(call)} if replays else {})


def loss_calls(columns: Columns, options: PpoOptions) -> dict[str, tuple[Callable[[], Tensor], str, bool]]:
    """{name: (call, what its error is of, whether it is replayed as a graph)}"""
    calls: dict[str, tuple[Callable[[], Tensor], str, bool]] = {
        OUR_LOSS: (lambda: columns.loss(ppo_loss, options, columns.logprobs)[0], "loss", True),
        "ours, through autograd": (lambda: columns.gradient(ppo_loss, options), "gradient", False),
    }
    if not options.by_sequence:
        compiled = torch.compile(reference.ppo_loss, dynamic=True)
        calls["torch eager"] = (lambda: columns.gradient(reference.ppo_loss, options), "gradient", False)
        calls["torch.compile"] = (lambda: columns.gradient(compiled, options), "gradient", False)
    return calls


def loss_table(clock: DeviceClock, report: Report, budget: Budget, cases: list[Tokens]) -> None:
    report.table(
        LOSSES,
        f"{LEGEND} decoupled: clipped, behaviour weight masked at 5, KL k3; by sequence: GSPO. Ours has 19 statistics "
        "in every call, eager and compiled have none. err: of the gradient (of the loss in the rows without autograd, "
        "relative), largest difference from float64.",
        (*COLUMNS[:2], "loss", *COLUMNS[2:]),
    )

    def measure(case: Tokens) -> None:
        columns = make_columns(case, clock.device)
        exact = columns.double()
        for name, options in {"decoupled": PER_TOKEN, "by sequence": PER_SEQUENCE}.items():
            if options == PER_TOKEN and case.sequences != 64:
                continue  # it does not see the sequences
            loss = exact.loss(reference.ppo_loss, options, exact.logprobs)
            true = {"loss": loss, "gradient": exact.gradient(reference.ppo_loss, options)}
            for what, (call, of, replays) in loss_calls(columns, options).items():
                if not report.wants(what):
                    continue
                if budget.is_spent():
                    report.skip(f"{case}, {name}, {what}")
                    continue
                measured = guarded(measure_call, clock, call, true[of], replays)
                if of == "loss" and measured["us"]:
                    measured["err"] /= abs(float(loss))
                report.row(T=case.rows, sequences=case.sequences, loss=name, what=what, **measured)

    each_case(report, budget, cases, measure)


def padded_gae(rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float, trace_decay: float) -> Tensor:
    """Advantages by a loop over time on `[B, L]` tensors, carried through masked tokens, as eager trainers write it."""
    advantages = torch.zeros_like(values)
    carried = following = torch.zeros(len(values), device=values.device)
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + discount * following - values[:, t]
        carried = torch.where(mask[:, t], delta + discount * trace_decay * carried, carried)
        following = torch.where(mask[:, t], values[:, t], following)
        advantages[:, t] = carried
    return advantages.masked_fill(~mask, 0.0)


def gae_calls(columns: Columns, sequences: int) -> dict[str, tuple[Callable[[], Tensor], bool]]:
    rows = (columns.advantages, columns.logprobs, columns.mask)  # any rewards and values
    padded = [tensor.view(sequences, -1) for tensor in rows]
    calls = {"ours": (lambda: packed_gae(*rows, columns.cu_seqlens, **DISCOUNTS)[0], True)}
    if padded[0].shape[1] <= 1024:  # more steps would take seconds
        calls["torch eager, a loop over time"] = (lambda: padded_gae(*padded, **DISCOUNTS).flatten(), False)
    return calls


def gae_table(clock: DeviceClock, report: Report, budget: Budget, cases: list[Tokens]) -> None:
    report.table(
        GAE,
        f"{LEGEND} The loop over time runs on padded rows, here without any padding. err: largest difference of the "
        "advantages from float64.",
        COLUMNS,
    )

    def measure(case: Tokens) -> None:
        columns = make_columns(case, clock.device)
        on_host = [tensor.cpu() for tensor in (columns.advantages.double(), columns.logprobs.double(), columns.mask)]
        true = packed_gae(*on_host, columns.cu_seqlens.cpu(), **DISCOUNTS)[0].to(clock.device)
        for what, (call, replays) in gae_calls(columns, case.sequences).items():
            if not report.wants(what):
                continue
            if budget.is_spent():
                report.skip(f"{case}, {what}")
                continue
            measured = guarded(measure_call, clock, call, true, replays)
            report.row(T=case.rows, sequences=case.sequences, what=what, **measured)

    each_case(report, budget, cases, measure)
