"""Checksums of the weights that are being published, taken in the same way as the servers that will hold them do.

Compared are: with the embedded server every tensor; with real SGLang on a CPU (0.5.21 and later, one rank) every tensor
that it keeps under its HF name or as rows of one (q, k and v; gate and up), which leaves out the experts of mixtures.
SGLang on a GPU hashes with a kernel of its own, and with several ranks each hashes its part: there the version alone is
compared, and the publisher says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_rl.api import ChecksumForm
from megatron_rl.ops import word_sums
from megatron_rl.update_group import digest

# What SGLang keeps in one tensor: its name there, and the HF parts in their order in it.
FUSED_BY_SGLANG = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class ExpectedChecksums:
    """What every server must answer once it holds the tensors that passed through `watch`."""

    def __init__(self, forms: Iterable[ChecksumForm]) -> None:
        self.forms = set(forms)
        self._sums: dict[tuple[str, ChecksumForm], tuple[Tensor, int]] = {}
        self._hashes: dict[tuple[str, ChecksumForm], str] = {}
        self._parts: dict[tuple[str, ChecksumForm], dict[str, Tensor]] = {}
        """Of tensors that SGLang fuses, until the last part is there."""

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the tensors on. On a GPU nothing is waited for: the sums are read in `of`."""
        for name, tensor in tensors:
            for form in self.forms:
                self._add(name, tensor if form.dtype is None else tensor.to(getattr(torch, form.dtype)), form)
            yield name, tensor

    def _add(self, name: str, tensor: Tensor, form: ChecksumForm) -> None:
        if form.kind == "embedded":
            self._sums[name, form] = (word_sums(tensor), tensor.nbytes)
            return
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        for whole, parts in FUSED_BY_SGLANG.items():
            if last in parts:
                key = f"{parent}.{whole}.{leaf}", form
                found = self._parts.setdefault(key, {})
                found[last] = tensor
                if len(found) == len(parts):
                    self._hashes[key] = _sglang_checksum([found[part] for part in parts])
                    del self._parts[key]
                return
        self._hashes[name, form] = _sglang_checksum([tensor])

    def of(self, form: ChecksumForm) -> dict[str, str]:
        """Tensor -> checksum in one form, under the names that its servers use."""
        if form.kind == "embedded":
            return {name: digest(*sums) for (name, own), sums in self._sums.items() if own == form}
        return {name: found for (name, own), found in self._hashes.items() if own == form}


def _sglang_checksum(parts: list[Tensor]) -> str:
    """The checksum of rows one above the other: the first eight bytes of SHA-256 (SGLang 0.5.21, `tensor_hash`)."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def differences(expected: dict[str, str], held: dict[str, str], *, complete: bool) -> list[str]:
    """Return the tensors that a server holds otherwise than they were sent.

    complete: every tensor must be on both sides. SGLang stores some (experts, in one tensor) under other names; what
    only one side has cannot be compared there.
    """
    names = expected.keys() | held.keys() if complete else expected.keys() & held.keys()
    return sorted(name for name in names if expected.get(name) != held.get(name))
