"""Checksums of the weights that are being published, taken in the same way as the servers that will hold them do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_rl.api import ChecksumForm
from megatron_rl.ops import word_sums
from megatron_rl.weights.sglang_checksums import SGLangChecksums
from megatron_rl.weights.update_group import digest


class ExpectedChecksums:
    """The checksums that every server must report once it holds the tensors that passed through `watch`.

    For example:

        form = ChecksumForm(kind="embedded", dtype=None)
        expected = ExpectedChecksums([form])
        send(expected.watch(tensors))
        wrong = differences(expected.of(form), held.checksums, complete=True)
    """

    def __init__(self, forms: Iterable[ChecksumForm]) -> None:
        self.forms = set(forms)
        self._sums: dict[tuple[str, ChecksumForm], tuple[Tensor, int]] = {}
        self._sglang = {form: SGLangChecksums(form) for form in self.forms if form.kind != "embedded"}

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the tensors on. On a GPU nothing is waited for: the sums are read in `of`."""
        for name, tensor in tensors:
            # Before the tensor goes on: its receiver may send it from where it lies, and then forget it.
            for form in self.forms:
                # A server that keeps another dtype rounds as it loads, and its checksums are of what it keeps.
                self._add(name, tensor if form.dtype is None else tensor.to(getattr(torch, form.dtype)), form)
            yield name, tensor

    def _add(self, name: str, tensor: Tensor, form: ChecksumForm) -> None:
        if form.kind == "embedded":
            self._sums[name, form] = (word_sums(tensor), tensor.nbytes)
        else:
            self._sglang[form].add(name, tensor)

    def of(self, form: ChecksumForm) -> dict[str, str]:
        """Tensor -> checksum in one form, under the names that its servers use."""
        if form.kind == "embedded":
            return {name: digest(*sums) for (name, own), sums in self._sums.items() if own == form}
        return self._sglang[form].of()


def differences(expected: dict[str, str], held: dict[str, str], *, complete: bool) -> list[str]:
    """Return the tensors that a server holds otherwise than they were sent.

    complete: every tensor must be on both sides. SGLang stores some (experts, in one tensor) under other names; what
    only one side has cannot be compared there.
    """
    names = expected.keys() | held.keys() if complete else expected.keys() & held.keys()
    return sorted(name for name in names if expected.get(name) != held.get(name))
