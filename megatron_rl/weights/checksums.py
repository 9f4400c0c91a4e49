"""Checksums of the weights that are being published, taken in the same way as the servers that will hold them do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_rl.api import ChecksumForm
from megatron_rl.ops import count_of_word_sums, word_sums
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
        self._sums: dict[ChecksumForm, list[tuple[dict[str, int], Tensor]]] = {form: [] for form in self.forms}
        """Of tensors that were added together: their names, with their bytes, and what `word_sums` gave."""
        self._sglang = {form: SGLangChecksums(form) for form in self.forms if form.kind != "embedded"}

    def watch(
        self, tensors: Iterable[tuple[str, Tensor]], buckets: Iterable[Sequence[object]] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass the tensors on, and take their checksums behind the receiver's back: while it sends them.

        The receiver may not write to a tensor before it has asked for the next. buckets: those of each are added
        together on a GPU, once its last one has passed, and kept until then; a tensor of no bucket is added by itself.
        """
        stream = iter(tensors)
        for bucket in buckets if self.forms else ():
            waiting: list[tuple[str, Tensor]] = []
            for place, (name, tensor) in enumerate(itertools.islice(stream, len(bucket)), 1):
                yield name, tensor  # whose broadcast is under way when the stream goes on
                waiting.append((name, tensor))
                if place == len(bucket) or tensor.device.type == "cpu":
                    self.add(waiting)
                    waiting = []
        for name, tensor in stream:
            yield name, tensor
            self.add([(name, tensor)])

    def add(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Take the checksums of tensors on one device. On a GPU nothing is waited for: the sums are read in `of`."""
        for form in self.forms:
            dtype = None if form.dtype is None else getattr(torch, form.dtype)
            if all(dtype in (None, tensor.dtype) for _, tensor in tensors):
                self._add(tensors, form)
            else:
                # A server that keeps another dtype rounds as it loads, and its checksums are of what it keeps.
                for name, tensor in tensors:
                    self._add([(name, tensor.to(dtype))], form)

    def _add(self, tensors: Sequence[tuple[str, Tensor]], form: ChecksumForm) -> None:
        if form.kind == "embedded":
            sizes = {name: tensor.nbytes for name, tensor in tensors}
            self._sums[form].append((sizes, word_sums([tensor for _, tensor in tensors])))
        else:
            self._sglang[form].add(tensors)

    def of(self, form: ChecksumForm) -> dict[str, str]:
        """Tensor -> checksum in one form, under the names that its servers use."""
        if form.kind != "embedded":
            return self._sglang[form].of()
        found = {}
        for sizes, sums in self._sums[form]:
            parts = sums.cpu().split([count_of_word_sums(nbytes) for nbytes in sizes.values()])
            found |= {name: digest(part, nbytes) for (name, nbytes), part in zip(sizes.items(), parts, strict=True)}
        return found


def differences(expected: dict[str, str], held: dict[str, str], *, complete: bool) -> list[str]:
    """Return the tensors that a server holds otherwise than they were sent.

    complete: every tensor must be on both sides. SGLang stores some in other ways; what only one side has cannot be
    compared there.
    """
    names = expected.keys() | held.keys() if complete else expected.keys() & held.keys()
    return sorted(name for name in names if expected.get(name) != held.get(name))
