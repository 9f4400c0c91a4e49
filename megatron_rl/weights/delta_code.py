"""The changes of a tensor since its last version, coded so that they are decoded to the same bits.

Both ends import this file. Numbers are taken as integers of their bits: NaNs, zeros of either sign and overflows are
integers like others. The places of those that changed are a bitmap or the gaps between them, their values what was
added to the old integers, or the new ones; numbers that are mostly small, such as gaps, take seven bits a byte. Of all
ways the one with the fewest bytes is taken, and where none is shorter, the new values alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32}
"""By the bytes of a number."""
LONGEST = 5
"""Bytes of the longest number of seven bits a byte: 32 bits, and the sign."""
PLACES = ("none", "all", "gaps", "bitmap")
VALUES = ("whole", "added")


@dataclass(frozen=True)
class Change:
    """The change of a run of numbers, as bytes (`[n]` uint8 on the CPU) and how to read them.

    For example:

        change = encode(bits_of(new), bits_of(old))
        places, values = decode(change, torch.int16)  # of bfloat16
        put(old, places, values, is_added=change.values == "added")  # now old has the bits of new
    """

    count: int
    """Numbers in the run, changed or not."""
    places: str
    values: str
    place_bytes: Tensor
    value_bytes: Tensor

    @property
    def nbytes(self) -> int:
        return self.place_bytes.numel() + self.value_bytes.numel()


NOTHING = torch.empty(0, dtype=torch.uint8)


def bits_of(tensor: Tensor) -> Tensor:
    """The numbers' bits as integers, flat: a view."""
    return tensor.view(-1).view(INTEGERS[tensor.itemsize])


@torch.no_grad()
def encode(new: Tensor, old: Tensor | None) -> Change:
    """Code how `old` becomes `new`, both `[n]` int16 or int32 on the CPU; without `old`, all of `new`."""
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
        # Sizes are counted first, and only what is the shortest is written.
        options = ("gaps", int(_sizes(gaps).sum())), ("bitmap", (count + 7) // 8)
        kind, place_size = min(options, key=lambda option: option[1])
    # In the integers' own width, where it may wrap around: so does adding it in `put`, back to the same bits.
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
    """Return the places that change, `[k]` int64, and their values or what is added to them, `[k]` of `dtype`.

    dtype: int16 or int32. ValueError where the bytes are not those of such a change.
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
        # Gaps are never negative, so the last place is the largest, and no place is named twice.
        if len(places) and places[-1] >= count:
            raise ValueError(f"delta: place {places[-1]} in {count} numbers")
    else:
        places = torch.arange(count if change.places == "all" else 0)
    if change.values == "whole":
        if change.value_bytes.numel() % dtype.itemsize:
            raise ValueError(f"delta: {change.value_bytes.numel()} bytes of {dtype}")
        values = change.value_bytes.clone().view(dtype)  # a copy, as a part of a body may begin at an odd byte
    else:
        coded = _read(change.value_bytes)
        values = (coded >> 1 ^ -(coded & 1)).to(dtype)
    if len(values) != len(places):
        raise ValueError(f"delta: {len(values)} values for {len(places)} places")
    return places, values


@torch.no_grad()
def put(part: Tensor, places: Tensor, values: Tensor, *, is_added: bool) -> None:
    """Change the decoded places of a part of a tensor, `[n]`, in place, on whatever device all three are."""
    bits = bits_of(part)
    bits[places] = bits[places] + values if is_added else values


def _sizes(numbers: Tensor) -> Tensor:
    """Bytes of each number, from 0 up."""
    sizes = torch.ones_like(numbers)
    for length in range(1, LONGEST):
        sizes += numbers >= 1 << 7 * length
    return sizes


def _write(numbers: Tensor) -> Tensor:
    """Seven bits a byte, the lowest first; the highest bit says that another follows."""
    ends = _sizes(numbers).cumsum(0)
    written = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8)
    places = torch.cat([ends.new_zeros(1), ends])[:-1]
    # One pass for each byte of the longest number, over those that are not written out yet.
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
    # The checks above make every index below one of `data`, whatever a body of the network holds.
    numbers = data[starts].to(torch.int64) & 127
    for position in range(1, LONGEST):
        longer = (sizes > position).nonzero().view(-1)
        numbers[longer] |= (data[starts[longer] + position].to(torch.int64) & 127) << 7 * position
    return numbers


@dataclass(frozen=True)
class Run:
    """A change of the numbers from `start` on of a tensor of a shape, row-major, that is sent as `dtype`."""

    name: str
    dtype: str
    shape: torch.Size
    start: int
    change: Change


def pack(runs: list[Run], version: int) -> bytes:
    """The body of a request: the length of a JSON header in eight bytes, the header, the bytes of the changes."""
    rows, parts = [], []
    for run in runs:
        change, sizes = run.change, (run.change.place_bytes.numel(), run.change.value_bytes.numel())
        rows.append([run.name, run.dtype, run.shape, run.start, change.count, change.places, change.values, *sizes])
        parts += [change.place_bytes.numpy().data, change.value_bytes.numpy().data]
    header = json.dumps({"weight_version": str(version), "runs": rows}).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def unpack(body: bytes) -> tuple[list[Run], str]:
    """Return the runs and the version of a packed body; ValueError says where it is none."""
    start = 8 + int.from_bytes(body[:8], "little")
    try:
        header = json.loads(body[8:start])
        rows, version = header["runs"], header["weight_version"]
        if not isinstance(version, str):
            raise ValueError(f"weight_version = {version!r}")
        runs, data = [], torch.frombuffer(bytearray(body), dtype=torch.uint8)  # a copy: torch wants what can be written
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
