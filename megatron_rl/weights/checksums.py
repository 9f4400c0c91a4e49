"""Compute checksums of published weights in every form that the receiving servers use."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_rl.api import ChecksumForm
from megatron_rl.ops import count_of_word_sums, word_sums
from megatron_rl.weights.sglang_checksums import SGLangChecksums
from megatron_rl.weights.update_group import digest

CACHED_BYTES = 1 << 23
"""Maximum bytes of CPU tensors whose checksum is computed just before they are sent. They are then still in the CPU's
cache when they are sent. A larger tensor's checksum is computed while the tensor is sent, because it takes longer."""


class ExpectedChecksums:
    """The checksums that servers must report after they have received the tensors that passed through `watch`.

    form = ChecksumForm(kind="embedded", dtype=None)
    expected = ExpectedChecksums([form])
    send(expected.watch(tensors))
    wrong = differences(expected.of(form), held.checksums, complete=True)
    """

    def __init__(self, forms: Iterable[ChecksumForm]) -> None:
        self.forms = set(forms)
        self._sums: dict[ChecksumForm, list[tuple[dict[str, int], Tensor]]] = {form: [] for form in self.forms}
        """For each form, one entry per batch of tensors: {tensor name: size in bytes}, and the batch's `word_sums`."""
        self._sglang = {form: SGLangChecksums(form) for form in self.forms if form.kind != "embedded"}

    def watch(
        self, tensors: Iterable[tuple[str, Tensor]], buckets: Iterable[Sequence[object]] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors unchanged, and compute their checksums before or while the consumer sends them.

        The consumer must not write to a tensor before it asks for the next one.

        buckets: the tensors divided into runs of consecutive ones; only the length of each run is used. The checksums
        of GPU tensors in one run are computed together, so these tensors are kept in memory until the run's last one
        was sent. All other tensors are handled one at a time.
        """
        stream = iter(tensors)
        for bucket in buckets if self.forms else ():
            waiting: list[tuple[str, Tensor]] = []
            for place, (name, tensor) in enumerate(itertools.islice(stream, len(bucket)), 1):
                is_cpu = tensor.device.type == "cpu"
                if is_cpu and tensor.nbytes <= CACHED_BYTES:
                    self.add([(name, tensor)])
                    yield name, tensor
                    continue
                yield name, tensor  # its broadcast has started when the loop resumes
                waiting.append((name, tensor))
                if is_cpu or place == len(bucket):
                    self.add(waiting)
                    waiting = []
        for name, tensor in stream:
            yield name, tensor
            self.add([(name, tensor)])

    def add(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Compute the checksums of tensors that are on the same device. Does not wait for a GPU; `of` does."""
        for form in self.forms:
            dtype = None if form.dtype is None else getattr(torch, form.dtype)
            if all(dtype in (None, tensor.dtype) for _, tensor in tensors):
                self._add(tensors, form)
            else:
                # A server that keeps another dtype rounds while loading, and takes checksums of the rounded weights.
                for name, tensor in tensors:
                    self._add([(name, tensor.to(dtype))], form)

    def _add(self, tensors: Sequence[tuple[str, Tensor]], form: ChecksumForm) -> None:
        if form.kind == "embedded":
            sizes = {name: tensor.nbytes for name, tensor in tensors}
            self._sums[form].append((sizes, word_sums([tensor for _, tensor in tensors])))
        else:
            self._sglang[form].add(tensors)

    def of(self, form: ChecksumForm) -> dict[str, str]:
        """Return {tensor name: checksum}, with the names and checksums that servers of this form report."""
        if form.kind != "embedded":
            return self._sglang[form].of()
        found = {}
        for sizes, sums in self._sums[form]:
            parts = sums.cpu().split([count_of_word_sums(nbytes) for nbytes in sizes.values()])
            found |= {name: digest(part, nbytes) for (name, nbytes), part in zip(sizes.items(), parts, strict=True)}
        return found


def differences(expected: dict[str, str], held: dict[str, str], *, complete: bool) -> list[str]:
    """Return the sorted names of tensors whose checksums differ between trainer (`expected`) and server (`held`).

    complete: True to count a tensor that only one side lists as different. False to ignore such tensors. An SGLang
    server needs False, because it stores some tensors in another form than they are sent.
    """
    names = expected.keys() | held.keys() if complete else expected.keys() & held.keys()
    return sorted(name for name in names if expected.get(name) != held.get(name))
