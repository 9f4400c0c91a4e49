"""Encode a tensor's changes since its last version losslessly. Both trainer and servers import this file.

Numbers are treated as integers of their bits, so NaNs, signed zeros and overflow need no special case. The places of
changed numbers are coded as a bitmap or as the gaps between them. The changes themselves are coded as the new integers
or as differences from the old ones. Gaps and differences are mostly small, so they are written as variable-length
integers with seven bits per byte. The coding with the fewest bytes is chosen. If even that is not smaller than all the
new numbers, changed or not, all of them are sent instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32}
"""{bytes per number: integer dtype of this size}."""
LONGEST = 5
"""Maximum bytes of a variable-length integer. It holds 32 bits and a sign, at seven bits per byte."""
PLACES = ("none", "all", "gaps", "bitmap")
VALUES = ("whole", "added")


@dataclass(frozen=True)
class Change:
    """Encoded change of a run of `count` consecutive numbers, some of which may be unchanged.

    `place_bytes` and `value_bytes` are `[n]` uint8 on the CPU, each with its own n.

    change = encode(bits_of(new), bits_of(old))
    places, values = decode(change, torch.int16)  # of bfloat16
    put(old, places, values, is_added=change.values == "added")  # now old has the bits of new
    """

    count: int
    places: str
    values: str
    place_bytes: Tensor
    value_bytes: Tensor

    @property
    def nbytes(self) -> int:
        return self.place_bytes.numel() + self.value_bytes.numel()


NOTHING = torch.empty(0, dtype=torch.uint8)


def bits_of(tensor: Tensor) -> Tensor:
    """Return a flat view of a tensor's bits: as int16 if its numbers have two bytes, as int32 if they have four."""
    return tensor.view(-1).view(INTEGERS[tensor.itemsize])


@torch.no_grad()
def encode(new: Tensor, old: Tensor | None) -> Change:
    """Encode the change from `old` to `new`, both `[n]` int16 or int32 on the CPU.

    old: if None, all numbers of `new` are encoded.
    """
    count = new.numel()
    whole = Change(count, "all", "whole", NOTHING, new.contiguous().view(torch.uint8))
    if old is None:
        return whole
    if torch.equal(new, old):
        return Change(count, "none", "whole", NOTHING, NOTHING)
    is_changed = new != old
    if is_changed.all():
        kind, place_size, places, after, before = "all", 0, NOTHING, new, old
    else:
        places = is_changed.nonzero().view(-1)
        after, before = new[places], old[places]
        gaps = torch.diff(places, prepend=places.new_tensor([-1])) - 1
        # Compute sizes first, so that only the shortest coding is written.
        options = ("gaps", int(_sizes(gaps).sum())), ("bitmap", (count + 7) // 8)
        kind, place_size = min(options, key=lambda option: option[1])
    # The difference may wrap around in the integers' own width. The addition in `put` wraps back to the same bits.
    added = (after - before).to(torch.int64)
    added = added << 1 ^ added >> 63  # 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
    added_size = int(_sizes(added).sum())
    is_added = added_size < after.numel() * new.itemsize
    if place_size + min(added_size, after.numel() * new.itemsize) >= whole.nbytes:
        return whole
    values = _write(added) if is_added else after.contiguous().view(torch.uint8)
    if kind == "gaps":
        places = _write(gaps)
    elif kind == "bitmap":
        places = torch.from_numpy(np.packbits(is_changed.numpy()))
    return Change(count, kind, "added" if is_added else "whole", places, values)


@torch.no_grad()
def decode(change: Change, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the indices of the changed numbers, `[k]` int64, and their new values or differences, `[k]` of `dtype`.

    dtype: int16 or int32, as in `bits_of`. Raises ValueError if the bytes are not a valid encoding.
    """
    count = change.count
    if change.places not in PLACES or change.values not in VALUES:
        raise ValueError(f"delta: places {change.places!r}, values {change.values!r}: no such coding")
    if change.places == "bitmap":
        if change.place_bytes.numel() != (count + 7) // 8:
            raise ValueError(f"delta: a bitmap of {change.place_bytes.numel()} bytes for {count} numbers")
        is_changed = np.unpackbits(change.place_bytes.numpy(), count=count)
        places = torch.from_numpy(is_changed).nonzero().view(-1)
    elif change.places == "gaps":
        places = (_read(change.place_bytes) + 1).cumsum(0) - 1
        # Gaps are never negative, so places increase strictly and the last is the largest.
        if len(places) and places[-1] >= count:
            raise ValueError(f"delta: place {places[-1]} in {count} numbers")
    else:
        places = torch.arange(count if change.places == "all" else 0)
    if change.values == "whole":
        if change.value_bytes.numel() % dtype.itemsize:
            raise ValueError(f"delta: {change.value_bytes.numel()} bytes of {dtype}")
        values = change.value_bytes.clone().view(dtype)  # a copy, because a slice of a body may be unaligned
    else:
        coded = _read(change.value_bytes)
        values = (coded >> 1 ^ -(coded & 1)).to(dtype)
    if len(values) != len(places):
        raise ValueError(f"delta: {len(values)} values for {len(places)} places")
    return places, values


@torch.no_grad()
def put(part: Tensor, places: Tensor, values: Tensor, *, is_added: bool) -> None:
    """Apply a decoded change to `part`, a run of a tensor's numbers `[n]`, in place.

    All three tensors must be on the same device. is_added: True if `values` are differences, False if they are the new
    numbers.
    """
    bits = bits_of(part)
    bits[places] = bits[places] + values if is_added else values


def _sizes(numbers: Tensor) -> Tensor:
    """Return each number's encoded size in bytes. The numbers must not be negative."""
    sizes = torch.ones_like(numbers)
    for length in range(1, LONGEST):
        sizes += numbers >= 1 << 7 * length
    return sizes


def _write(numbers: Tensor) -> Tensor:
    """Encode non-negative numbers with seven bits per byte, the low bits first, and return the bytes (uint8).

    The top bit is 0 in the last byte of a number, and 1 in its other bytes.
    """
    ends = _sizes(numbers).cumsum(0)
    written = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8)
    places = torch.cat([ends.new_zeros(1), ends])[:-1]
    # One pass per byte position, over the numbers that have bytes left.
    while len(numbers):
        is_longer = numbers > 127
        written[places] = (numbers & 127 | is_longer.to(torch.int64) << 7).to(torch.uint8)
        numbers, places = numbers[is_longer] >> 7, places[is_longer] + 1
    return written


def _read(data: Tensor) -> Tensor:
    ends = (data < 128).nonzero().view(-1) + 1
    starts = torch.cat([ends.new_zeros(1), ends])[:-1]
    sizes = ends - starts
    if (len(ends) and ends[-1] or 0) != len(data) or (len(sizes) and sizes.max() > LONGEST):
        raise ValueError(f"delta: {len(data)} bytes that are no numbers of seven bits a byte")
    # The checks above keep every index below within `data`, even for malicious input.
    numbers = data[starts].to(torch.int64) & 127
    for position in range(1, LONGEST):
        longer = (sizes > position).nonzero().view(-1)
        numbers[longer] |= (data[starts[longer] + position].to(torch.int64) & 127) << 7 * position
    return numbers


@dataclass(frozen=True)
class Run:
    """The change of a contiguous run of a tensor's numbers.

    name, dtype, shape: those of the whole tensor, as it is sent. start: index of the run's first number in the
    flattened tensor.
    """

    name: str
    dtype: str
    shape: torch.Size
    start: int
    change: Change


def pack(runs: list[Run], version: int) -> bytes:
    """Pack runs into a request body. version: policy version of the new weights.

    The body is the length of the JSON header (8 bytes, little-endian), the header, and the bytes of the changes.
    """
    rows, parts = [], []
    for run in runs:
        change, sizes = run.change, (run.change.place_bytes.numel(), run.change.value_bytes.numel())
        rows.append([run.name, run.dtype, run.shape, run.start, change.count, change.places, change.values, *sizes])
        parts += [change.place_bytes.numpy().data, change.value_bytes.numpy().data]
    header = json.dumps({"weight_version": str(version), "runs": rows}).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def unpack(body: bytes) -> tuple[list[Run], str]:
    """Return the runs and the version in a body made by `pack`. Raises ValueError if the body is invalid."""
    start = 8 + int.from_bytes(body[:8], "little")
    try:
        header = json.loads(body[8:start])
        rows, version = header["runs"], header["weight_version"]
        if not isinstance(version, str):
            raise ValueError(f"weight_version = {version!r}")
        runs, data = [], torch.frombuffer(bytearray(body), dtype=torch.uint8)  # a copy: torch wants writable memory
        for row in rows:
            name, dtype, shape, first, count, places, values, *sizes = row
            numbers = (*shape, first, count, *sizes)
            if len(sizes) != 2 or not all(type(n) is int and n >= 0 for n in numbers) or start + sum(sizes) > len(body):
                raise ValueError(f"run {row!r} in a body of {len(body)} bytes")
            middle, end = start + sizes[0], start + sum(sizes)
            change = Change(count, places, values, data[start:middle], data[middle:end])
            runs.append(Run(str(name), str(dtype), torch.Size(shape), first, change))
            start = end
    except (ValueError, KeyError, TypeError) as error:  # a JSONDecodeError is a ValueError
        raise ValueError(f"delta: not a packed body: {type(error).__name__}: {error}") from None
    return runs, version
