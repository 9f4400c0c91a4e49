"""Deltas give back every bit, whatever the numbers and however they changed, and are as short as they can be."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.weights.delta_code import INTEGERS, Change, Run, bits_of, decode, encode, pack, put, unpack
from tests.kit.examples import max_examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def changes(draw):
    """(old, new) integers: any bits, of which none, few, many or all change, by little or by anything."""
    integers = draw(st.sampled_from([torch.int16, torch.int32]))
    low, high = torch.iinfo(integers).min, torch.iinfo(integers).max
    numbers = st.integers(low, high)
    old = torch.tensor(draw(st.lists(numbers, max_size=300)), dtype=integers)
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    share = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    step = draw(st.sampled_from([1, 60, 9000, high]))
    added = torch.randint(-step, step, old.shape, generator=generator).to(integers)
    is_changed = torch.rand(old.shape, generator=generator) < share
    return old, torch.where(is_changed, old + added, old)


def after(old, change):
    bits = old.clone()
    put(bits, *decode(change, bits.dtype), is_added=change.values == "added")
    return bits


@pytest.mark.slow
@settings(max_examples=max_examples(70, 200), deadline=None)
@given(changes())
@example((torch.tensor([-(2**31)], dtype=torch.int32), torch.tensor([2**31 - 1], dtype=torch.int32)))
def test_any_change_is_decoded_to_the_same_bits(pair):
    old, new = pair
    change = encode(new, old)
    assert torch.equal(after(old, change), new)
    assert change.nbytes <= new.nbytes
    assert torch.equal(after(torch.zeros_like(new), encode(new, None)), new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_payloads_signs_of_zero_and_infinities_survive(dtype):
    bits = INTEGERS[dtype.itemsize]
    info = torch.iinfo(bits)
    quiet = bits_of(torch.tensor([float("nan")]).to(dtype))
    old = torch.cat([bits_of(torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1.0]).to(dtype)), quiet, quiet - 1])
    new = torch.cat([old[1:], torch.tensor([info.min], dtype=bits)])  # each becomes the next one
    for coded in (encode(new, old), encode(new, None), encode(old, old)):
        assert torch.equal(after(old, coded), old if coded.places == "none" else new)
    assert torch.isnan(old.view(dtype)).sum() == 2


def test_the_shortest_way_is_taken():
    old = torch.arange(80_000, dtype=torch.int32)

    def size(new):
        change = encode(new, old)
        return change.places, change.values, change.nbytes

    assert size(old) == ("none", "whole", 0)
    one = old.clone()
    one[300] += 1
    assert size(one) == ("gaps", "added", 2 + 1)  # 300 takes two times seven bits
    half = old + (old % 2)
    assert size(half) == ("bitmap", "added", 10_000 + 40_000)
    assert size(old + 63) == ("all", "added", 80_000)
    assert size(old + 64) == ("all", "added", 160_000)
    assert size(old ^ -(2**31)) == ("all", "whole", 320_000)
    far = old.clone()
    far[:100] ^= -(2**31)  # five bytes coded, four as they are
    assert size(far) == ("gaps", "whole", 100 + 400)
    assert encode(old[:0], old[:0]).nbytes == 0


@pytest.mark.parametrize(
    ("places", "values", "place_bytes", "value_bytes", "message"),
    [
        ("some", "whole", [], [], "no such coding"),
        ("bitmap", "whole", [255], [], "a bitmap of 1 bytes for 10 numbers"),
        ("gaps", "added", [10], [1], "place 10 in 10 numbers"),
        ("gaps", "added", [1], [1, 1], "2 values for 1 places"),
        ("all", "whole", [], [0] * 19, "19 bytes of torch.int16"),
        ("all", "added", [], [128], "1 bytes that are no numbers"),
        ("gaps", "added", [200, 200, 200, 200, 200, 1], [1], "6 bytes that are no numbers"),
    ],
)
def test_bytes_that_are_no_change_are_refused(places, values, place_bytes, value_bytes, message):
    change = Change(10, places, values, *(torch.tensor(b, dtype=torch.uint8) for b in (place_bytes, value_bytes)))
    with pytest.raises(ValueError, match=message):
        decode(change, torch.int16)


def test_packed_bodies_are_unpacked_and_others_are_refused():
    old = torch.arange(100, dtype=torch.int16)
    runs = [
        Run("a", "bfloat16", torch.Size([107]), 7, encode(old + 3, old)),
        Run("b", "bfloat16", torch.Size([4, 25]), 0, encode(old, None)),
    ]
    body = pack(runs, 5)
    found, version = unpack(body)
    assert version == "5" and [(run.name, run.dtype, run.shape, run.start) for run in found] == [
        ("a", "bfloat16", (107,), 7),
        ("b", "bfloat16", (4, 25), 0),
    ]
    assert torch.equal(after(old, found[0].change), old + 3) and torch.equal(after(old + 1, found[1].change), old)
    assert unpack(pack([], 6)) == ([], "6")
    for wrong in (b"", body[:40], body[:-1], b"\xff" * 30, body[:8] + b"[" + body[9:], body.replace(b'"5"', b" 5 ")):
        with pytest.raises(ValueError, match="delta: not a packed body"):
            unpack(wrong)
