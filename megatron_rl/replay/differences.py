"""Compares two records of one step in the order in which the step computed them, and names the first difference."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rl.replay.records import StepRecord
from megatron_rl.run.step_records import LOGPROBS
from megatron_rl.types import TrajectoryBatch

PASSES = ("values", "teacher_logprobs", "ref_logprobs", "proximal_logprobs", "cold_logprobs", "entropies")
"""Columns that are computed by forward passes before the updates, in that order. All other columns follow from them."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """The comparison of one kind of value: the number of values, how many of them differ, and the first that does."""

    kind: str
    count: int
    unit: str
    differing: int = 0
    first: str = ""
    largest: float = 0.0
    """Largest difference between recorded and replayed values, measured as the tolerance is."""

    def __str__(self) -> str:
        if not self.count:
            return f"{self.kind}: there are none"
        if not self.differing:
            found = f"differ by at most {self.largest:.1e}" if self.largest else "equal to the bit"
            return f"{self.kind}: {self.count:,} {self.unit}, {found}"
        return f"{self.kind}: {self.differing:,} of {self.count:,} {self.unit} differ; the first: {self.first}"


def compare(recorded: StepRecord, replayed: StepRecord, *, tolerance: float) -> Iterator[Compared]:
    """Yield the comparison of each kind of value, in the order in which a step computes them.

    tolerance: largest relative difference that counts as equal. 0 demands equal bits, and only then checksums are
    compared. The difference between two values of a token or a sequence is divided by 1 or by the value's size,
    whichever is larger. Gradients and changed weights are compared by the norm of each tensor, relative to the norm of
    the whole model's.
    """
    assert recorded.computed is not None and recorded.trained is not None and recorded.update is not None
    assert replayed.computed is not None and replayed.trained is not None
    mine, theirs = recorded.computed, replayed.computed
    pairs = [(model, a, b) for model, a in mine["tensors"].items() if (b := theirs["tensors"].get(model)) is not None]
    if tolerance == 0:
        for model, a, b in pairs:
            yield _tensors(f"weights of the {model} before the step", a["before"], b["before"], operator.eq, forward)
    rows = recorded.trained
    for name in [name for name in rows.sequences if name in replayed.trained.sequences]:
        values = rows.sequences[name], replayed.trained.sequences[name]
        yield _values(f"{name} of trajectories", *values, tolerance, _sequence_namer(rows))
    columns = [name for name in rows.tokens if name in replayed.trained.tokens and name != LOGPROBS]
    for name in sorted(columns, key=lambda name: (PASSES.index(name) if name in PASSES else len(PASSES), name)):
        values = rows.tokens[name], replayed.trained.tokens[name]
        yield _values(f"{name} of tokens", *values, tolerance, _token_namer(recorded))
    update_of_token = rows.spread(recorded.update)
    for model, updates in mine["updates"].items():
        watched = [(a, b) for name, a, b in pairs if name == model]
        for number, (a, b) in enumerate(zip(updates, theirs["updates"].get(model, []), strict=False)):
            where = f"update {number} of the {model}"
            if model == "policy" and LOGPROBS in rows.tokens and LOGPROBS in replayed.trained.tokens:
                mask = update_of_token == number
                values = [it.where(mask, 0.0) for it in (rows.tokens[LOGPROBS], replayed.trained.tokens[LOGPROBS])]
                found = _values(f"{where}: log-probs of tokens", *values, tolerance, _token_namer(recorded))
                yield dataclasses.replace(found, count=int(mask.sum()))
            sums = [{"loss": it["loss"], "weight": it["weight"]} | it["sums"] for it in (a, b)]
            yield _numbers(f"{where}: loss and its sums", *sums, tolerance, tokens=a["weight"])
            ends = [{name: it[name] for name in ("grad_norm", "lr", "applied")} for it in (a, b)]
            for kind, order in (("gradients", backward), ("after", forward)):
                if kind == "after":
                    yield _numbers(f"{where}: gradient norm, learning rate, applied", *ends, tolerance)
                for entries in watched:
                    pair = entries[0][kind][number], entries[1][kind][number]
                    name = "gradients" if kind == "gradients" else "weights after it"
                    yield _tensors(f"{where}: {name}", *pair, _same_norm(pair[0], tolerance), order)


def compare_rewards(record: StepRecord, rewards: Tensor, *, tolerance: float) -> Compared:
    """Compare newly computed rewards `[B]` of the consumed trajectories with the recorded ones."""
    values = record.consumed.sequences["rewards"], rewards
    return _values("rewards of trajectories, computed again", *values, tolerance, _sequence_namer(record.consumed))


def compare_logprobs(record: StepRecord, column: Tensor, *, count: int, tolerance: float) -> Compared:
    """Compare newly computed log-probs `[N]` with the recorded ones. count: number of tokens that were computed."""
    assert record.trained is not None
    values = record.trained.tokens[LOGPROBS], column
    found = _values("log-probs of tokens in the first update", *values, tolerance, _token_namer(record))
    return dataclasses.replace(found, count=count)


def forward(name: str) -> tuple[int, int, str]:
    """Return a sort key that puts tensor names in the order of the forward pass: embeddings, layers, norm and head."""
    layer = _LAYER.search(name)
    return (1, int(layer[1]), name) if layer else (0 if "embed" in name else 2, 0, name)


def backward(name: str) -> tuple[int, int, str]:
    """Return a sort key that puts tensor names in the order of the backward pass."""
    part, layer, _ = forward(name)
    return -part, -layer, name


Same = Callable[[Any, Any], bool]
"""Type of functions that return True if two records' entries for a tensor count as equal."""


def _same_norm(a: dict[str, Any], tolerance: float) -> Same:
    if tolerance == 0:
        return operator.eq
    whole = sum(norm * norm for norm, _ in a.values()) ** 0.5 or 1.0
    return lambda mine, theirs: abs(mine[0] - theirs[0]) / whole <= tolerance


def _tensors(kind: str, a: dict[str, Any], b: dict[str, Any], same: Same, order: Callable[[str], Any]) -> Compared:
    names = sorted(dict.fromkeys([*a, *b]), key=order)
    wrong = [name for name in names if name not in a or name not in b or not same(a[name], b[name])]
    first = wrong[0] if wrong else ""
    text = f"{first}, {_shown(a.get(first))} in the record and {_shown(b.get(first))} in the replay" if first else ""
    return Compared(kind=kind, count=len(names), unit="tensors", differing=len(wrong), first=text)


def _shown(entry: Any) -> str:
    if entry is None:
        return "missing"
    return f"checksum {entry[:8]}" if isinstance(entry, str) else f"norm {entry[0]:.9g} (checksum {entry[1][:8]})"


def _values(kind: str, a: Tensor, b: Tensor, tolerance: float, name: Callable[[int], str]) -> Compared:
    if a.shape != b.shape:
        return Compared(
            kind=kind, count=len(a), unit="values", differing=len(a), first=f"{len(a)} in the record, {len(b)} replayed"
        )
    before, now = a.double(), b.double()
    distance = (before - now).abs() / before.abs().clamp_min(1.0)
    is_equal = (before == now) | (before.isnan() & now.isnan())
    distance = distance.where(~is_equal, 0.0)
    wrong = ~is_equal if tolerance == 0 else ~(distance <= tolerance)
    wrong = wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong
    places, largest = wrong.nonzero()[:, 0], float(distance.nan_to_num(torch.inf).max()) if distance.numel() else 0.0
    first = ""
    if len(places):
        row = int(places[0])
        first = f"{name(row)}, {_value(a[row])} in the record and {_value(b[row])} in the replay"
    return Compared(kind=kind, count=len(a), unit="values", differing=len(places), first=first, largest=largest)


def _value(value: Tensor) -> str:
    return f"{float(value):.9g}" if value.dim() == 0 else str(value.tolist())


def _numbers(kind: str, a: dict[str, float], b: dict[str, float], tolerance: float, *, tokens: float = 1.0) -> Compared:
    """Compare the numbers that have the same name.

    tokens: all numbers except `loss` are sums over this many tokens. Their difference is divided by it if their size is
    smaller.
    """
    names = dict.fromkeys([*a, *b])
    distances = {name: _relative(a.get(name), b.get(name), 1.0 if name == "loss" else tokens) for name in names}
    wrong = [name for name, distance in distances.items() if not distance <= tolerance]
    first = f"{wrong[0]}, {a.get(wrong[0])!r} in the record and {b.get(wrong[0])!r} in the replay" if wrong else ""
    largest = max(distances.values(), default=0.0)
    return Compared(kind=kind, count=len(names), unit="numbers", differing=len(wrong), first=first, largest=largest)


def _relative(a: float | None, b: float | None, scale: float = 1.0) -> float:
    if a == b or (a != a and b != b):
        return 0.0
    if a is None or b is None:
        return float("inf")
    return abs(a - b) / max(scale, 1.0, abs(a))


def _sequence_namer(batch: TrajectoryBatch) -> Callable[[int], str]:
    def name(row: int) -> str:
        of = {key: int(batch.sequences[key][row]) for key in ("group", "prompt", "sample") if key in batch.sequences}
        return f"trajectory {row} ({', '.join(f'{key} {number}' for key, number in of.items())})"

    return name


def _token_namer(record: StepRecord) -> Callable[[int], str]:
    rows = record.trained
    assert rows is not None
    sequence = _sequence_namer(rows)

    def name(token: int) -> str:
        row = int(rows.sequence_ids[token])
        return f"token {token - int(rows.cu_seqlens[row])} of {sequence(row)}"

    return name
