"""The protocol buffers that clients send: what is read from whole ones, and that broken ones are refused in words."""

import random
import struct

import numpy as np
import pytest
import torch

from megatron_rl.training_server.wire import (
    FLOAT32,
    INT64,
    MOST_CELLS,
    Reply,
    Sampled,
    encoded,
    fields,
    forward_backward_response,
    read_forward_backward,
    sample_response,
)


def tensor(values, kind, shape):
    return encoded(1, np.asarray(values).tobytes()) + encoded(3, kind) + b"".join(encoded(4, size) for size in shape)


def request(weights=None, loss="dro"):
    tokens = encoded(1, encoded(1, encoded(1, np.asarray([5, 6, 7], dtype=np.int32).tobytes())))
    targets = tensor(np.asarray([6, 7, 8], dtype=np.int64), INT64, [3])
    weights = tensor(np.asarray([0.0, 1.0, 0.5], dtype=np.float32), FLOAT32, [3]) if weights is None else weights
    datum = tokens + b"".join(
        encoded(2, encoded(1, name) + encoded(2, content))
        for name, content in (("target_tokens", targets), ("weights", weights))
    )
    options = encoded(5, encoded(1, "beta") + encoded(2, 0.25)) if loss == "dro" else b""
    return encoded(1, "m") + encoded(2, 300) + encoded(3, datum) + encoded(4, loss) + options + encoded(6, 1)


def test_a_request_is_read_as_it_was_written():
    found = read_forward_backward(request())
    assert (found.model_id, found.seq_id, found.loss, found.options) == ("m", 300, "dro", {"beta": 0.25})
    assert found.forward_only
    (datum,) = found.data
    assert datum.tokens.tolist() == [5, 6, 7]
    assert datum.inputs["target_tokens"].tolist() == [6, 7, 8]
    assert datum.inputs["weights"].tolist() == [0.0, 1.0, 0.5]


def sparse(rows, columns, values=(2.0, 3.0)):
    """Return a matrix of three rows and two columns."""
    places = (np.asarray(one, dtype=np.int64).tobytes() for one in (rows, columns))
    cells = [np.asarray(values, dtype=np.float32).tobytes(), *places]
    content = b"".join(encoded(number, cell) for number, cell in enumerate(cells, 1))
    return encoded(2, content) + encoded(3, FLOAT32) + encoded(4, 3) + encoded(4, 2)


def test_a_sparse_matrix_is_read_with_zeros_in_its_empty_cells():
    found = read_forward_backward(request(sparse([0, 1, 1, 2], [1, 0]))).data[0].inputs["weights"]
    assert found.tolist() == [[0.0, 2.0], [0.0, 0.0], [3.0, 0.0]]


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([0, 1, 2], [1, 0]),  # of two rows
        ([1, 1, 1, 2], [1, 0]),
        ([0, 2, 1, 2], [1, 0]),
        ([0, 1, 1, 3], [1, 0]),
        ([0, 1, 1, 2], [1, 0, 0]),
        ([0, 1, 1, 2], [2, 0]),
        ([0, 1, 1, 2], [1, -1]),
        ([0, 2, 2, 2], [1, 1]),
        ([], []),
    ],
)
def test_a_sparse_matrix_that_cannot_be_is_refused(rows, columns):
    with pytest.raises(ValueError, match=r"is no sparse matrix of shape \[3, 2\]"):
        read_forward_backward(request(sparse(rows, columns)))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (tensor(np.zeros(3, dtype=np.float32), FLOAT32, [4]), r"\['weights'\]|has shape \[4\] and 3 numbers"),
        (tensor(np.zeros(3, dtype=np.float32), 9, [3]), "has dtype number 9"),
        (tensor(np.zeros(3, dtype=np.float32), FLOAT32, [1, 1, 3]), "has 3 dimensions"),
        (
            encoded(2, b"") + encoded(3, FLOAT32) + encoded(4, 2**20) + encoded(4, 2**20),
            f"at most {MOST_CELLS:,} cells",
        ),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        read_forward_backward(request(weights))


def test_no_bytes_make_it_fail_otherwise():
    generator, whole = random.Random(0), request()
    for _ in range(3000):
        body = bytearray(whole[: generator.randrange(len(whole) + 1)])
        for _ in range(generator.randrange(4)):
            if body:
                body[generator.randrange(len(body))] = generator.randrange(256)
        try:
            read_forward_backward(bytes(body))
        except ValueError:
            pass


def test_responses_have_the_tensors_as_bytes():
    found = dict(
        fields(memoryview(forward_backward_response([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], {"a:sum": 4.0})))
    )
    record = list(fields(found[2]))
    column = dict(fields(dict(fields(record[1][1]))[2]))
    assert np.frombuffer(column[1], dtype=np.float32).tolist() == [1.0, 2.0, 3.0]
    assert np.frombuffer(column[2], dtype=np.int64).tolist() == [0, 8, 12]
    assert dict(record)[3] == 2
    assert struct.unpack("<d", dict(fields(found[3]))[2]) == (4.0,)
    replies = [Reply([7, 8], [-0.5, -1.0], is_cut_off=True)]
    sampled = dict(fields(memoryview(sample_response(Sampled(replies, [None, -2.0], 3)))))
    sequence = dict(fields(sampled[1]))
    assert (sequence[1], np.frombuffer(sequence[2], dtype=np.int32).tolist()) == (1, [7, 8])
    assert np.isnan(np.frombuffer(sampled[2], dtype=np.float32)[0]) and sampled[4] == 3
