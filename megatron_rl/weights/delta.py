"""Publish over slow links: send each server only the changes to the weights it holds, over HTTP.

Rank 0 keeps a copy of the last published weights, called the base, in host memory. A server whose checksums match the
base exactly is sent changes (delta_code.py). Any other server is sent whole tensors. All checksums are compared
afterwards, as in the other transports. Embedded servers can apply changes. An SGLang server can apply them if it was
started with our loader (sglang_loaders.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.api import SGLANG_DELTA_LOADER, ChecksumForm, HeldWeights, WeightReceiver
from megatron_rl.weights.checksums import ExpectedChecksums, differences
from megatron_rl.weights.delta_code import Run, bits_of, encode, pack
from megatron_rl.weights.publish import Tensors, WeightPublisher, as_planned
from megatron_rl.weights.sglang_loaders import pickled_parts
from megatron_rl.weights.update_group import TensorSpec

RUN_NUMBERS = 1 << 22
"""Maximum count of numbers in a run. Each tensor is encoded as one or more runs of consecutive numbers."""

Parcel = list[tuple[Run, Tensor]]
"""What is sent at a time: encoded runs of changes. Each run comes with its new numbers as integers of their bits, for
servers that need whole tensors."""


class DeltaPublisher(WeightPublisher):
    """Publishes changes in parcels, and encodes each parcel while the previous one is sent.

    A parcel has at most `parcel_bytes`, unless a single run is larger.
    """

    def __init__(
        self, receiver: WeightReceiver | None, *, parcel_bytes: int = 1 << 26, timeout_s: float = 600.0
    ) -> None:
        super().__init__(receiver, timeout_s=timeout_s)
        self.parcel_bytes = parcel_bytes
        self._base: dict[str, Tensor] = {}
        """{name: the tensor as last published, flat, as integers of its bits}. The next changes are relative to it."""
        self._base_checksums: dict[ChecksumForm, dict[str, str]] = {}

    def _deliver(self, specs: list[TensorSpec], tensors: Tensors, version: int, checksums: ExpectedChecksums) -> None:
        self.last.sent_bytes = 0
        # Created before anything can fail, so that `finally` can exhaust it. A generator runs only from its first
        # next(), when the holders are known.
        holders: set[str] = set()
        parcels = self._parcels(specs, tensors, holders)
        try:
            self._refuse_others()
            holders |= self._holders({spec.dtype_name for spec in specs})
            self._send_all(parcels, lambda parcel: self._send(parcel, holders), self._collect, checksums)
        finally:
            for _ in parcels:  # the stream is a collective, and all of it becomes the base
                pass
            # Also after a failure: next time, checksums reveal which servers do not hold this base.
            self._base_checksums = {form: checksums.of(form) for form in checksums.forms}
            self._resume()

    def _refuse_others(self) -> None:
        """Drop servers that cannot apply changes, or whose checksums cannot be compared with the base."""
        forms, change_forms = self.receiver.checksum_forms(), self.receiver.change_forms()
        reason = (
            f"rollout.publication = delta: an SGLang applies changes that says its checksums and was started with "
            f"--custom-weight-loader {SGLANG_DELTA_LOADER}; start it so, or set rollout.publication=group."
        )
        others = [server for server, form in forms.items() if form is None or change_forms[server] is None]
        self._lose(dict.fromkeys(others, reason))

    def _holders(self, dtypes: set[str]) -> set[str]:
        """Return the servers that hold exactly the base, in the dtype in which tensors are sent.

        dtypes: the set of dtypes of all tensors to send.
        """
        forms = self.receiver.checksum_forms()
        answers: dict[str, HeldWeights] = self._collect(self.receiver.held_weights())
        holders = set()
        for server, held in answers.items():
            form = forms[server]
            base = self._base_checksums.get(form) if form is not None else None
            if base and (form.dtype is None or dtypes == {form.dtype}):
                if not differences(base, held.checksums, complete=form.kind == "embedded"):
                    holders.add(server)
        return holders

    def _parcels(self, specs: list[TensorSpec], tensors: Tensors, holders: set[str]) -> Iterator[Parcel]:
        """Yield the parcels of a publication, at least one, and make the new tensors the base.

        holders: the servers that hold the old base. The caller fills this set before the first next().
        """
        all_hold = holders.issuperset(self.receiver.server_ranks)
        parcel: Parcel = []
        size = 0
        for spec, tensor in zip(specs, as_planned(specs, tensors), strict=True):
            new, old = bits_of(tensor.to("cpu", copy=True).contiguous()), self._base.get(spec.name)
            for start in range(0, new.numel(), RUN_NUMBERS):
                part = new[start : start + RUN_NUMBERS]
                change = encode(part, None if old is None else old[start : start + RUN_NUMBERS])
                if all_hold and change.places == "none":
                    continue
                # Servers without the base are sent the numbers themselves, so the larger body determines the size.
                run_bytes = change.nbytes if all_hold else part.nbytes
                if parcel and size + run_bytes > self.parcel_bytes:
                    yield parcel
                    parcel, size = [], 0
                parcel.append((Run(spec.name, spec.dtype_name, torch.Size(spec.shape), start, change), part))
                size += run_bytes
            self._base[spec.name] = new
        yield parcel  # even if nothing changed: an empty parcel carries the new version

    def _send(self, parcel: Parcel, holders: set[str]) -> dict[str, Future[None]]:
        servers, version = list(self.receiver.server_ranks), self.last.version
        changes = whole = b""
        if not holders.isdisjoint(servers):
            changes = pack([run for run, _ in parcel if run.change.places != "none"], version)
        if not holders.issuperset(servers):
            whole = pack([replace(run, change=encode(new, None)) for run, new in parcel], version)
        forms = self.receiver.change_forms()
        bodies: dict[str, bytes | list[str]] = {}
        for server, ranks in self.receiver.server_ranks.items():
            body = changes if server in holders else whole
            parts = pickled_parts(body, ranks) if forms[server] == "pickle" else [body]
            self.last.sent_bytes += sum(map(len, parts))
            bodies[server] = parts if forms[server] == "pickle" else body
        return self.receiver.load_changes(bodies, version)
