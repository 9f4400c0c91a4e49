"""The tables of operators that read logits: log-probabilities, a vocabulary in shards, the output layer with loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from device_clock import COST, COST_LEGEND, DeviceClock
from operator_peers import (
    ENTROPY_BACKWARD,
    FORWARD,
    LOGP,
    MODES,
    POLICY,
    POLICY_OPTIONS,
    POLICY_SEQUENCE,
    Given,
    Peer,
)
from suite_bars import HEADS, LOGPROBS
from suite_report import Budget, Report, each_case, guarded
from torch import Tensor

from megatron_rl.ops import VocabShard, lm_head_logprobs
from megatron_rl.ops.head import rows_of_chunk
from megatron_rl.ops.library import ops
from tests.kit import operators as reference

VOCABULARIES = (151936, 128256, 32000)
SAMPLED_ROWS = 32
"""Rows whose results are compared with float64."""


@dataclass(frozen=True)
class Logits:
    """One block of rows of the log-prob table."""

    rows: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    masked: float = 0.0
    slow_peers: bool = False

    def __str__(self) -> str:
        return f"T={self.rows} V={self.vocab} {str(self.dtype)[6:]} masked {self.masked:.0%}"


def logits_cases() -> list[Logits]:
    f32 = torch.float32
    main = [Logits(rows, vocab, slow_peers=rows == 16384) for rows in (16384, 4096) for vocab in VOCABULARIES]
    masked = [Logits(16384, vocab, masked=0.5) for vocab in VOCABULARIES]
    small = [Logits(rows, vocab) for vocab in VOCABULARIES for rows in (1, 64, 512)]
    wide = [Logits(rows, vocab, f32) for rows in (16384, 4096) for vocab in VOCABULARIES]
    long = [Logits(rows, vocab) for rows in (32768, 65536) for vocab in VOCABULARIES]
    rest = [Logits(rows, vocab, f32) for rows in (32768, 65536) for vocab in VOCABULARIES]
    return main + masked + small + wide + long + rest


def make_logits(case: Logits, device: str) -> tuple[Tensor, Given]:
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(case.rows, case.vocab, dtype=case.dtype, device=device).normal_(0, 3, generator=generator)
    labels = torch.randint(0, case.vocab, (case.rows,), generator=generator, device=device)
    labels[torch.rand(case.rows, generator=generator, device=device) < case.masked] = -100
    noise = torch.randn(4, case.rows, generator=generator, device=device)
    advantages = noise[3].clone()
    if case.rows % POLICY_SEQUENCE == 0:
        advantages = advantages.view(-1, POLICY_SEQUENCE)[:, :1].repeat(1, POLICY_SEQUENCE).flatten()
    near = logits.gather(1, labels.clamp_min(0)[:, None])[:, 0].float() - logits[0].float().logsumexp(-1)
    return logits, Given(labels, noise[0], noise[1], near + 0.1 * noise[2], advantages)


def without_last_rows(given: Given) -> Given:
    """The last row of every sequence has no label: Liger's layout leaves it out."""
    labels = given.labels.clone().view(-1, POLICY_SEQUENCE)
    labels[:, -1] = -100
    return Given(labels.flatten(), given.by_logprob, given.by_entropy, given.proximal, given.advantages)


def minimal_bytes(case: Logits, trained: int, mode: str) -> int:
    """Each trained row read once forward, read and written once backward; the others' zeros written backward."""
    row = case.vocab * case.dtype.itemsize
    backward = 0 if mode in FORWARD else 2 * trained * row + (case.rows - trained) * row
    return trained * row + backward


def true_rows(logits: Tensor, given: Given, mode: str, sample: Tensor, peer: Peer) -> tuple[Tensor, ...]:
    """(log-probs, entropy, gradient) of the sampled rows in float64; the gradient is 0-dim where the mode has none."""
    x, labels = logits[sample].double().requires_grad_(), given.labels[sample]
    logprobs, entropy = reference.logprobs_entropy(x, labels)
    if mode in FORWARD:
        return logprobs.detach(), entropy.detach(), torch.zeros((), device=x.device)
    if mode == POLICY:
        columns = (given.proximal[sample].double(), None, given.advantages[sample].double())
        loss = reference.ppo_loss(logprobs, *columns, labels >= 0, POLICY_OPTIONS)
    else:
        upstream = torch.ones_like(logprobs) if peer.unit_gradient else given.by_logprob[sample].double()
        loss = peer.sign * (logprobs * upstream).sum()
        if mode == ENTROPY_BACKWARD:
            loss = loss + (entropy * given.by_entropy[sample].double()).sum()
    return logprobs.detach(), entropy.detach(), torch.autograd.grad(loss, x)[0]


def measure_peer(clock: DeviceClock, peer: Peer, mode: str, source: Tensor, given: Given) -> dict[str, Any]:
    """Errors, repeatability, time and memory of one call."""
    call = peer.calls[mode]
    restores = mode in peer.overwrites
    logits = source.clone() if restores else source
    # not the last row, which Liger's layout leaves out; not one without a label, which not every peer makes 0
    count = max(1, len(source) - 1)
    sample = torch.arange(0, count, max(1, count // SAMPLED_ROWS), device=source.device)
    sample = sample[given.labels[sample] >= 0]

    def prepare() -> None:
        if restores:
            logits.copy_(source)

    def results() -> list[Tensor | None]:
        prepare()
        logprobs, *others = call(logits, given)
        return [
            None if x is None else x[sample].detach().double()
            for x in (None if logprobs is None else peer.sign * logprobs, *others)
        ]

    found, again, true = results(), results(), true_rows(source, given, mode, sample, peer)
    measured: dict[str, Any] = {}
    for name, mine, right in zip(("logp", "entropy", "grad"), found, true, strict=True):
        measured[f"err {name}"] = None if mine is None else float((mine - right).abs().max())
    measured["repeats alike"] = all(a is None or torch.equal(a, b) for a, b in zip(found, again, strict=True))
    return measured | clock.cost(lambda: call(logits, given), prepare)


def logprob_table(clock: DeviceClock, report: Report, budget: Budget, peers: list[Peer], cases: list[Logits]) -> None:
    columns = ("T", "V", "logits", "masked", "what", "peer", *COST, "GB/s", "of copy", "of read")
    report.table(
        LOGPROBS,
        f"{COST_LEGEND} GB/s: least bytes over time; each trained row read once forward, read and written once "
        "backward. of copy, of read: of the ceilings above. err: largest difference from float64 in sampled rows, "
        "whose bits are also compared between two runs. Peers with (1) know the upstream gradient 1 only. What "
        "overwrites its logits got them back outside the clock.",
        (*columns, "err logp", "err entropy", "err grad", "repeats alike", "error"),
    )
    ceilings = report.facts["ceilings"]

    def measure(case: Logits) -> None:
        source, given = make_logits(case, clock.device)
        able = [peer for peer in peers if peer.least_rows <= case.rows and (case.slow_peers or not peer.is_slow)]
        modes = MODES if case.rows % POLICY_SEQUENCE == 0 else [mode for mode in MODES if mode != POLICY]
        for mode, peer in [(mode, peer) for mode in modes for peer in able if mode in peer.calls]:
            if budget.is_spent():
                report.skip(f"{case}, {mode}, {peer.name}")
                continue
            own = without_last_rows(given) if mode == POLICY else given
            measured = guarded(measure_peer, clock, peer, mode, source, own)
            if measured["us"]:
                rate = minimal_bytes(case, int((own.labels >= 0).sum()), mode) / measured["us"] / 1e3
                measured |= {"GB/s": rate} | {f"of {name}": rate / ceiling for name, ceiling in ceilings.items()}
            names = {"what": mode, "peer": peer.name + (" (1)" if peer.unit_gradient and mode != LOGP else "")}
            report.row(T=case.rows, V=case.vocab, logits=str(case.dtype)[6:], masked=case.masked, **names, **measured)

    each_case(report, budget, cases, measure)


@dataclass(frozen=True)
class Shard:
    rows: int
    vocab: int
    ranks: int

    def __str__(self) -> str:
        return f"T={self.rows} V={self.vocab}/{self.ranks}"


def shard_cases() -> list[Shard]:
    return [Shard(rows, vocab, ranks) for rows in (16384, 4096) for vocab in VOCABULARIES for ranks in (8, 1, 2, 4)]


def shard_calls(case: Shard, logits: Tensor, given: Given) -> tuple[dict[str, tuple], float, int]:
    """What the last rank runs: {name: (call, what to do before it, passes over the shard)}; all's error; its bytes."""
    labels, width = given.labels, case.vocab // case.ranks
    start, size = (case.ranks - 1) * width, width * case.ranks
    own = logits[:, start:size].contiguous()
    saved = own.clone()

    def partials(shard: Tensor, start: int) -> Tensor:
        return ops.logprob_fold(ops.logprob_partials(shard, labels, 1.0, None, start, width), labels, 1.0, None)

    gathered = torch.cat([partials(logits[:, at : at + width], at) for at in range(0, size, width)])

    def combine() -> tuple[Tensor, ...]:
        return ops.logprob_finish(own, gathered, labels, 1.0, None, start, width, size, False)

    logprobs, entropy, peak, log_sum = combine()
    sample = torch.arange(0, case.rows, max(1, case.rows // SAMPLED_ROWS), device=labels.device)
    true = reference.logprobs_entropy(logits[sample, :size].double(), labels[sample])[0]
    rest = (peak, log_sum, entropy, given.by_logprob, given.by_entropy, 1.0, None, start, width)
    calls: dict[str, tuple] = {
        "partials of the shard": (lambda: partials(own, start), None, 1),
        "combine": (combine, None, 0),
        "backward in place": (lambda: ops.logprob_grad_(own, labels, *rest), lambda: own.copy_(saved), 2),
    }
    return calls, float((logprobs[sample].double() - true).abs().max()), own.nbytes


def shard_table(clock: DeviceClock, report: Report, budget: Budget, cases: list[Shard]) -> None:
    report.table(
        "Vocabulary split over tensor-parallel ranks, bfloat16",
        f"One rank's shard alone, and the combination of all ranks' partials: no NCCL time. {COST_LEGEND} GB/s: the "
        "shard read once forward, read and written once backward. err: of the combined log-probs of sampled rows, from "
        "float64.",
        ("T", "V", "ranks", "what", *COST, "GB/s", "of copy", "err", "error"),
    )

    def measure(case: Shard) -> None:
        calls, error, size = shard_calls(case, *make_logits(Logits(case.rows, case.vocab), clock.device))
        for what, (call, prepare, passes) in calls.items():
            measured = guarded(clock.cost, call, prepare)
            if measured["us"] and passes:
                rate = passes * size / measured["us"] / 1e3
                measured |= {"GB/s": rate, "of copy": rate / report.facts["ceilings"]["copy"]}
            report.row(T=case.rows, V=case.vocab, ranks=case.ranks, what=what, err=error, **measured)

    each_case(report, budget, cases, measure)


@dataclass(frozen=True)
class Head:
    rows: int
    vocab: int
    hidden: int = 4096

    def __str__(self) -> str:
        return f"T={self.rows} V={self.vocab} H={self.hidden}"


def head_cases() -> list[Head]:
    return [Head(rows, vocab) for vocab in (128256, 151936, 32000) for rows in (4096, 8192, 16384)]


def make_head(case: Head, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.empty(case.rows, case.hidden, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    weight = torch.empty(case.vocab, case.hidden, dtype=torch.bfloat16, device=device)
    weight.normal_(0, 2 * case.hidden**-0.5, generator=generator)
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # Megatron's buffer, which is there in any case
    return hidden, weight, torch.randint(0, case.vocab, (case.rows,), generator=generator, device=device)


def three_products(hidden: Tensor, weight: Tensor, chunk: int) -> Callable[[], None]:
    """The matrix products of a training head and nothing else; the logits' gradient is any random matrix."""
    gradient = torch.empty(chunk, len(weight), dtype=hidden.dtype, device=hidden.device).normal_()
    logits = torch.empty_like(gradient)
    by_weight = torch.empty_like(weight)

    def call() -> None:
        for h in hidden.split(chunk):
            torch.mm(h, weight.T, out=logits[: len(h)])
            torch.mm(gradient[: len(h)], weight)
            torch.mm(gradient[: len(h)].T, h, out=by_weight)

    return call


def measure_head(clock: DeviceClock, peer: Peer, hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Any]:
    head, ones = peer.head, torch.ones(len(hidden), device=hidden.device)
    assert head is not None
    sample = torch.arange(0, len(hidden), max(1, len(hidden) // SAMPLED_ROWS), device=hidden.device)

    def error() -> float:
        found, columns = head(hidden, weight, labels, ones)[1][sample].double(), weight.double()
        x = (hidden[sample].double() @ columns.T).requires_grad_()
        true = torch.autograd.grad(-reference.logprobs_entropy(x, labels[sample])[0].sum(), x)[0] @ columns
        return float((found - true).norm() / true.norm())

    return {"err": error()} | clock.cost(lambda: head(hidden, weight, labels, ones))


def head_table(clock: DeviceClock, report: Report, budget: Budget, peers: list[Peer], cases: list[Head]) -> None:
    report.table(
        HEADS,
        f"{COST_LEGEND} The floor is three bare matrix products by cuBLAS in bfloat16 (one for the pass without "
        "gradient), the faster of whole and in chunks of 4096 rows. TFLOP/s: 6 T H V, without gradient 2 T H V. over "
        "floor: time over the floor's. ours: the policy loss at ratio 1 and advantage 1 with all statistics; its "
        "gradient is that of the cross-entropy, which the peers have; the weight's is added to a buffer, as the engine "
        "does. err: relative, gradient of sampled rows of hidden from float64. chunks: extra memory but for two "
        "tensors of hidden's size, in float32 logits of one chunk.",
        ("T", "V", "H", "what", *COST, "TFLOP/s", "over floor", "chunks", "err", "error"),
    )

    def measure(case: Head) -> None:
        hidden, weight, labels = make_head(case, clock.device)

        def line(what: str, products: int, floor: float, measured: dict[str, Any]) -> None:
            if measured["us"]:
                flops = 2 * products * case.rows * case.vocab * case.hidden
                measured |= {"TFLOP/s": flops / measured["us"] / 1e6, "over floor": measured["us"] / floor}
            if what == "ours" and measured["us"]:
                chunk = 4 * case.vocab * min(case.rows, rows_of_chunk(case.vocab))
                measured["chunks"] = (measured["extra_mb"] * 1e6 - 2 * hidden.nbytes) / chunk
            report.row(T=case.rows, V=case.vocab, H=case.hidden, what=what, **measured)

        chunks = sorted({min(4096, case.rows), case.rows})
        three = min(
            (clock.cost(three_products(hidden, weight, chunk)) for chunk in chunks), key=lambda cost: cost["us"]
        )
        line("three products", 3, three["us"], three)
        for peer in [peer for peer in peers if peer.head is not None]:
            if budget.is_spent():
                report.skip(f"{case}, {peer.name}")
                continue
            line(peer.name, 3, three["us"], guarded(lambda: measure_head(clock, peer, hidden, weight, labels)))  # noqa: B023
        one = clock.cost(lambda: torch.mm(hidden, weight.T))
        line("one product", 1, one["us"], one)
        no_gradient = guarded(measure_head_logprobs, clock, hidden, weight, labels)
        line("ours, log-probs only", 1, one["us"], no_gradient)

    each_case(report, budget, cases, measure)


def measure_head_logprobs(clock: DeviceClock, hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Any]:
    shard = VocabShard(0, len(weight), len(weight))

    def call() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return lm_head_logprobs(hidden, weight, labels, shard=shard)

    return clock.cost(call)
