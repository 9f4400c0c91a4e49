"""The protocol buffers of the client: one request is decoded, two responses are encoded.

These are the messages of `tinker_public.proto` in tinker 0.38, by field number. Their large fields are bytes that hold
whole tensors, so a decoder in Python costs little, and the server needs neither the client's package nor protobuf.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FLOAT32, INT64, INT32 = 1, 2, 3
"""Numbers that stand for dtypes in the messages."""
DTYPES = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32}
NO_LOGPROB = float("nan")
MOST_DIMENSIONS = 2
MOST_CELLS = 2**26
"""Maximum number of cells of one tensor. A sparse tensor's empty cells count as well."""


@dataclass
class Datum:
    """One sequence to train on. Row t of each input describes the prediction after token t.

    tokens: `[T]` int64, the tokens that the model reads. inputs: tensors by name, int64 or float32, such as
    `target_tokens` `[T]`.
    """

    tokens: Tensor
    inputs: dict[str, Tensor]


@dataclass
class ForwardBackward:
    """A request to compute a loss and, unless `forward_only`, its gradient."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss: str
    options: dict[str, float | str]
    forward_only: bool


# -- decoding


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Decode the request for a forward or backward pass.

    Raises ValueError if the body is no such message, or has parts that this server does not support.
    """
    request = ForwardBackward("", 0, [], "", {}, False)
    for number, value in fields(memoryview(body)):
        if number == 1:
            request.model_id = text(value)
        elif number == 2:
            request.seq_id = integer(value)
        elif number == 3:
            request.data.append(read_datum(value, len(request.data)))
        elif number == 4:
            request.loss = text(value)
        elif number == 5:  # the second map, number 7, has the same numbers and also texts
            name, content = read_entry(value)
            request.options.setdefault(name, double(content))
        elif number == 6:
            request.forward_only = bool(integer(value))
        elif number == 7:
            name, content = read_entry(value)
            for kind, option in fields(content):
                request.options[name] = double(option) if kind == 1 else text(option)
    return request


def read_datum(message: memoryview, number: int) -> Datum:
    tokens: list[Tensor] = []
    inputs = {}
    for field, value in fields(message):
        if field == 1:
            for kind, chunk in fields(value):
                if kind != 1:
                    rule = "has an image or sound; send encoded_text chunks alone"
                    raise ValueError(f"data[{number}].model_input: {rule}.")
                tokens += [array(content, INT32).long() for place, content in fields(chunk) if place == 1]
        elif field == 2:
            name, content = read_entry(value)
            inputs[name] = read_tensor(content, f"data[{number}].loss_fn_inputs[{name!r}]")
    return Datum(torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64), inputs)


def read_tensor(message: memoryview, key: str) -> Tensor:
    """Decode a tensor, which may be dense or in compressed sparse rows. key: its name for error messages.

    Empty cells of a sparse tensor become 0.
    """
    dense, sparse, dtype, shape = memoryview(b""), None, 0, []
    for number, value in fields(message):
        if number == 1:
            dense = value
        elif number == 2:
            sparse = dict(fields(value))
        elif number == 3:
            dtype = integer(value)
        elif number == 4:
            shape += list(varints(value)) if isinstance(value, memoryview) else [value]
    if dtype not in DTYPES:
        raise ValueError(f"{key}: has dtype number {dtype}; send float32 or int64.")
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{key}: has {len(shape)} dimensions; send [T], or [T, K] for several targets of a token.")
    if math.prod(shape) > MOST_CELLS:
        raise ValueError(f"{key}: has shape {shape}; send at most {MOST_CELLS:,} cells.")
    if sparse is None:
        found = array(dense, dtype)
        if shape and math.prod(shape) != len(found):
            raise ValueError(f"{key}: has shape {shape} and {len(found)} numbers; send as many as the shape says.")
        return found.view(shape) if shape else found
    parts = {1: dtype, 2: INT64, 3: INT64}
    values, rows, columns = (array(sparse.get(n, memoryview(b"")), kind) for n, kind in parts.items())
    return dense_matrix(key, rows, columns, values, shape)


def dense_matrix(key: str, rows: Tensor, columns: Tensor, values: Tensor, shape: list[int]) -> Tensor:
    """Convert compressed sparse rows to a dense matrix. Raises ValueError if they do not describe one.

    rows: index in `values` at which each row begins, and last the number of values. key: the tensor's name for error
    messages. torch's own sparse tensors are not used, because they print a warning that they are in beta.
    """
    counts = rows.diff()
    fits = len(shape) == 2 and len(rows) == shape[0] + 1 and rows[0] == 0 and bool((counts >= 0).all())
    if fits and rows[-1] == len(columns) == len(values):
        cells = torch.repeat_interleave(torch.arange(shape[0]), counts) * shape[1] + columns
        is_inside = bool(((columns >= 0) & (columns < shape[1])).all())
        if is_inside and bool((cells.diff() > 0).all()):
            return torch.zeros(math.prod(shape), dtype=values.dtype).index_put((cells,), values).view(shape)
    way_out = "send where each row begins, and in each row distinct columns in their order"
    raise ValueError(f"{key}: is no sparse matrix of shape {shape}; {way_out}.")


def array(content: memoryview, dtype: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=DTYPES[dtype]).copy())


def read_entry(message: memoryview) -> tuple[str, Any]:
    """Decode one entry of a map, and return its key and its undecoded value."""
    entry = dict(fields(message))
    return text(entry.get(1, memoryview(b""))), entry.get(2, memoryview(b""))


def fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) for each field of a message.

    A value is an int if the wire type is VARINT. Otherwise it is the field's undecoded bytes.
    """
    if not isinstance(message, memoryview):
        raise ValueError("the body is no message of tinker_public.proto: a message was expected, and a number came.")
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        kind = key & 7
        if kind == VARINT:
            value, at = varint(message, at)
            yield key >> 3, value
            continue
        if kind == BYTES:
            size, at = varint(message, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"the body is no message of tinker_public.proto: it has a field of wire type {kind}.")
        if at + size > len(message):
            raise ValueError("the body is no whole message of tinker_public.proto: it was cut off; send it again.")
        yield key >> 3, message[at : at + size]
        at += size


def varint(message: memoryview, at: int) -> tuple[int, int]:
    """Decode the number at offset `at`. Return it and the offset after it."""
    number = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        number, shift, at = number | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return number, at
    raise ValueError("the body is no whole message of tinker_public.proto: it was cut off; send it again.")


def varints(message: memoryview) -> Iterator[int]:
    at = 0
    while at < len(message):
        number, at = varint(message, at)
        yield number


def integer(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError("the body is no message of tinker_public.proto: a number was expected.")
    return value


def text(value: Any) -> str:
    if not isinstance(value, memoryview):
        raise ValueError("the body is no message of tinker_public.proto: a text was expected, and a number came.")
    return bytes(value).decode(errors="replace")


def double(value: Any) -> float:
    if not isinstance(value, memoryview) or len(value) not in (0, 8):
        raise ValueError("the body is no message of tinker_public.proto: a double was expected.")
    return float(struct.unpack("<d", value)[0]) if len(value) else 0.0


# -- encoding


def encoded(number: int, value: int | float | str | bytes) -> bytes:
    """Encode one field."""
    if isinstance(value, float):
        return _varint(number << 3 | FIXED64) + struct.pack("<d", value)
    if isinstance(value, int):
        return _varint(number << 3 | VARINT) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | BYTES) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def forward_backward_response(outputs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Encode the result of a pass.

    outputs: each datum's log-probabilities of its targets, float32. metrics: further numbers by name.
    """
    offsets = np.cumsum([0, *(4 * output.numel() for output in outputs)], dtype=np.int64)
    widths = {tuple(output.shape[1:]) for output in outputs}
    assert len(widths) <= 1, f"targets of {widths} columns in one request"
    column = encoded(1, b"".join(output.contiguous().numpy().tobytes() for output in outputs))
    column += encoded(2, offsets.tobytes()) + encoded(3, FLOAT32)
    column += b"".join(encoded(4, size) for width in widths for size in width)
    record = encoded(1, "ArrayRecord") + encoded(2, encoded(1, "logprobs") + encoded(2, column))
    response = encoded(1, "ArrayRecord") + encoded(2, record + encoded(3, len(outputs)))
    numbers = (encoded(1, name) + encoded(2, float(value)) for name, value in metrics.items())
    return response + b"".join(encoded(3, number) for number in numbers)


@dataclass
class Reply:
    """A sampled sequence. logprobs: one for each of `ids`. is_cut_off: the sequence ended at its maximum length."""

    ids: list[int]
    logprobs: list[float]
    is_cut_off: bool


Top = list[list[tuple[int, float]] | None]
"""For each position, the most likely tokens as (id, log-probability), or None if the server reports none."""


@dataclass
class Sampled:
    """The answer to a sampling request.

    prompt: log-probability of each prompt token; None for tokens without one. cached: number of prompt tokens whose
    keys and values the server reused. top: the most likely tokens at each position of the prompt. tops: the same for
    each reply.
    """

    replies: Sequence[Reply]
    prompt: Sequence[float | None] | None = None
    cached: int = 0
    top: Top | None = None
    tops: Sequence[Top] | None = None


def sample_response(sampled: Sampled) -> bytes:
    response, tops = b"", sampled.tops
    for number, reply in enumerate(sampled.replies):
        sequence = encoded(1, int(reply.is_cut_off)) + encoded(2, np.asarray(reply.ids, dtype=np.int32).tobytes())
        sequence += encoded(3, np.asarray(reply.logprobs, dtype=np.float32).tobytes())
        response += encoded(1, sequence + (encoded(4, _top(tops[number])) if tops else b""))
    if sampled.prompt is not None:
        numbers = [NO_LOGPROB if one is None else one for one in sampled.prompt]
        response += encoded(2, np.asarray(numbers, dtype=np.float32).tobytes())
    return response + (encoded(3, _top(sampled.top)) if sampled.top else b"") + encoded(4, sampled.cached)


EMPTY = (0, -99999.0)
"""Token id and log-probability that fill empty places, so that all positions have equally many. The client recognizes
them."""


def _top(top: Top) -> bytes:
    width = max((len(row or ()) for row in top), default=0)
    rows = [[*(row or ()), *[EMPTY] * (width - len(row or ()))] for row in top]
    ids = np.asarray([[token for token, _ in row] for row in rows], dtype=np.int32)
    logprobs = np.asarray([[logprob for _, logprob in row] for row in rows], dtype=np.float32)
    return encoded(1, ids.tobytes()) + encoded(2, logprobs.tobytes()) + encoded(3, width) + encoded(4, len(top))
