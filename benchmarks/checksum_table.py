"""The table of a publication's checksums: tensors of a bucket, summed on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from device_clock import COST, COST_LEGEND, DeviceClock
from suite_bars import CHECKSUMS
from suite_report import Budget, Report, each_case, guarded
from torch import Tensor

from megatron_rl.ops import tile_hashes, word_sums
from tests.kit import operators as reference

COMPARED_BYTES = 1 << 22
"""Of a bucket whose results are compared with the CPU's."""


@dataclass(frozen=True)
class Bucket:
    nbytes: int
    tensors: int

    def __str__(self) -> str:
        return f"{self.nbytes >> 20} MB in {self.tensors} tensors"


def bucket_cases() -> list[Bucket]:
    return [Bucket(1 << 30, 80), Bucket(1 << 30, 1), Bucket(1 << 26, 1)]


def ways() -> dict[tuple[str, str], Callable[[list[Tensor]], Any]]:
    """{(what, peer): a call}"""
    return {
        ("word sums", "ours"): word_sums,
        ("word sums", "torch eager"): lambda tensors: [reference.word_sums(tensor) for tensor in tensors],
        ("SGLang's hashes", "ours"): lambda tensors: tile_hashes([[tensor] for tensor in tensors]),
    }


def checksum_table(clock: DeviceClock, report: Report, budget: Budget, cases: list[Bucket]) -> None:
    report.table(
        CHECKSUMS,
        f"{COST_LEGEND} GB/s: bytes of the bucket over time. of read: of the ceiling above. equal: to the CPU's in "
        "every bit, for a part of the bucket.",
        ("bucket", "what", "peer", *COST, "GB/s", "of read", "equal", "error"),
    )

    def measure(case: Bucket) -> None:
        generator = torch.Generator(clock.device).manual_seed(0)
        words = torch.randint(-(2**62), 2**62, (case.nbytes // 8,), generator=generator, device=clock.device)
        tensors, part = list(words.tensor_split(case.tensors)), words[: COMPARED_BYTES // 8]
        for (what, peer), call in ways().items():
            if not report.wants(peer):
                continue
            if budget.is_spent():
                report.skip(f"{case}, {what}, {peer}")
                continue
            measured = guarded(clock.cost, lambda call=call: call(tensors))
            if measured["us"]:
                rate = case.nbytes / measured["us"] / 1e3
                measured |= {"GB/s": rate, "of read": rate / report.facts["ceilings"]["read"]}
                found, right = (call([given])[0] for given in (part, part.cpu()))
                measured["equal"] = torch.equal(found.cpu(), right)
            report.row(bucket=str(case), what=what, peer=peer, **measured)

    each_case(report, budget, cases, measure)
