"""Records allocations and frees on a rehearsed device by code line and part, and finds the peak.

`mark` may assign a storage to a part long after the allocation, but the part then counts from the allocation on. For
example, a tensor that autograd keeps counts as an activation from the forward pass on. So parts, peak and timeline are
computed after the rank has finished.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

PARTS = ("weights", "gradients", "optimizer", "activations", "head", "exchange", "other")
"""What a storage is used for. weights, gradients, optimizer: permanent. activations: what autograd keeps for the
backward pass, including recomputation checkpoints. head: logits and tensors computed from them. exchange: buffers of
collectives and of a publication. other: temporary tensors."""
KEPT_PARTS = PARTS[:4]
HEAD = (
    "megatron_rl/ops/head.py",
    "megatron_rl/ops/library.py",
    "megatron_rl/ops/logprobs.py",
    "megatron_rl/ops/ppo.py",
)
HEAD += ("megatron_rl/engine/output_head.py",)
EXCHANGE = ("megatron_rl/weights/",)
BLOCK_BYTES = 512
"""torch's caching allocator rounds every allocation up to a multiple of this size."""
MOST_POINTS = 2_000
"""Maximum number of points of the timeline."""


class DeviceMemory:
    """A record of when each storage of the device was allocated and freed. Time is the number of kernels launched."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self.kernels = 0
        """Kernels launched so far."""
        self._numbers: dict[int, tuple[weakref.ref, int]] = {}
        """{address of a live storage: (reference, storage number)}."""
        self._lines: list[str] = []
        """Entry n is the code line that allocated storage n."""
        self._parts: list[str] = []
        """Entry n is the part, one of PARTS, to which storage n is assigned."""
        self._sizes: list[int] = []
        """Entry n is the current size of storage n in bytes."""
        self._events = array("q")
        """Four entries per event: storage number, bytes allocated (negative if freed), kernels launched so far, phase
        number."""
        self._phases: dict[str, int] = {"start": 0}
        self._phase = 0

    def enter(self, phase: str) -> None:
        """Assign all following events to this phase."""
        self._phase = self._phases.setdefault(phase, len(self._phases))

    def note(self, tensor: Tensor, find_line: Callable[[], str]) -> bool:
        """Record a tensor's storage and return True if the storage is new; else return False.

        find_line: function that returns the allocating code line.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._numbers:
            return False
        number, line = len(self._lines), find_line()
        self._numbers[key] = weakref.ref(storage, lambda _: self._free(key)), number
        self._lines.append(line)
        self._parts.append("head" if line.startswith(HEAD) else "exchange" if line.startswith(EXCHANGE) else "other")
        self._sizes.append(0)
        self._set(number, storage.nbytes())
        return True

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Record a storage's new size. Ignore storages that are not recorded here."""
        if found := self._numbers.get(storage._cdata):
            self._set(found[1], nbytes)

    def mark(self, part: str, tensors: Iterable[Any]) -> None:
        """Assign the storages of these tensors to a part. Storages that are not recorded here are ignored."""
        for tensor in tensors:
            found = self._numbers.get(tensor.untyped_storage()._cdata) if isinstance(tensor, Tensor) else None
            # Weights, gradients and optimizer always win. Other parts only replace `other` and `exchange`, so the
            # head's storages stay the head's even if autograd keeps them.
            if found and (part in KEPT_PARTS[:3] or self._parts[found[1]] in ("other", "exchange")):
                self._parts[found[1]] = part

    def _set(self, number: int, nbytes: int) -> None:
        rounded = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        change = rounded - self._sizes[number]
        self._sizes[number] = rounded
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._events.extend((number, change, self.kernels, self._phase))

    def _free(self, key: int) -> None:
        _, number = self._numbers.pop(key)
        self._set(number, 0)

    # Results

    def report(self) -> dict[str, Any]:
        """Return the peak (its phase, code line, and bytes by line and part), each phase's peak, and the timeline."""
        names, changes = list(self._phases), self._events[1::4]
        totals = list(itertools.accumulate(changes))
        phase_peaks: Counter[str] = Counter()
        for total, phase in zip(totals, self._events[3::4], strict=True):
            phase_peaks[names[phase]] = max(phase_peaks[names[phase]], total)
        peak_at = totals.index(self.peak_bytes) if totals else -1
        until_peak = self._events[: 4 * (peak_at + 1)]
        by_line: Counter[str] = Counter()
        by_part = dict.fromkeys(PARTS, 0)
        for number, change in zip(until_peak[::4], until_peak[1::4], strict=True):
            by_line[self._lines[number]] += change
            by_part[self._parts[number]] += change
        return {
            "peak_bytes": self.peak_bytes,
            "peak_phase": names[until_peak[-1]] if totals else "",
            "peak_line": self._lines[until_peak[-4]] if totals else "",
            "peak_by_line": +by_line,
            "peak_by_part": by_part,
            "extra_bytes": self.peak_bytes - sum(by_part[part] for part in KEPT_PARTS),
            "phase_peaks": phase_peaks,
            "timeline": {"parts": PARTS, "points": self._points(totals, names)},
        }

    def _points(self, totals: list[int], names: list[str]) -> list[list[Any]]:
        """Return the timeline's points: [kernels launched, phase, bytes of each of PARTS].

        The timeline is divided into time spans. Each yields two points: the moments of its highest and its lowest
        total.
        """
        span = max(1, -(-2 * len(totals) // MOST_POINTS))
        chosen = set()
        for start in range(0, len(totals), span):
            part = totals[start : start + span]
            chosen |= {start + part.index(max(part)), start + part.index(min(part))}
        points, now = [], dict.fromkeys(PARTS, 0)
        events = self._events
        for at, number in enumerate(events[::4]):
            now[self._parts[number]] += events[4 * at + 1]
            if at in chosen:
                points.append([events[4 * at + 2], names[events[4 * at + 3]], *now.values()])
        return points


class NotedBackwards:
    """Wraps torch's autograd engine. When a backward pass begins, marks the graph's memory as activations."""

    def __init__(self, engine: Any, memory: DeviceMemory) -> None:
        self.engine, self.memory = engine, memory

    def run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        self.memory.mark("activations", kept_by(tensors))
        return self.engine.run_backward(tensors, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


_saved_names: dict[type, list[str]] = {}


def kept_by(tensors: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors that the autograd graph of these tensors keeps for the backward pass."""
    waiting = [tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor)]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        names = _saved_names.get(type(node))
        if names is None:
            names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
            _saved_names[type(node)] = names
        with contextlib.suppress(RuntimeError):  # a saved tensor was overwritten: backward will raise that itself
            for name in names:
                yield from (leaf for leaf in tree_leaves(getattr(node, name)) if isinstance(leaf, Tensor))
