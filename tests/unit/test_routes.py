"""Routes as servers tell them: read whole or refused by name, and never replayed with a gap or moved by a row."""

import base64

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl import routes
from megatron_rl.routes import NO_ROUTE, RouteForm, check_complete, experts_of, pack, shift_fault, weights_of

FORM = RouteForm(total_layers=3, layers=(0, 2), slots=2, experts=8, has_weights=False)
WEIGHED = RouteForm(total_layers=3, layers=(0, 2), slots=2, experts=8, has_weights=True)


def encoded(table):
    return base64.b64encode(np.asarray(table, dtype=np.int32).tobytes()).decode()


def random_routes(rows, form=FORM, seed=0):
    """`[rows, total layers, slots]`: different experts in each row's slots, and zeros in the dense layer."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(rows, form.total_layers, form.experts, generator=generator).topk(form.slots).indices.int()
    chosen[:, 1] = 0
    return chosen


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_map_is_read_for_the_layers_that_are_mixtures_and_takes_two_bytes_a_choice(rows):
    found = FORM.read(encoded(random_routes(rows)), rows)
    assert torch.equal(found, random_routes(rows)[:, [0, 2]].short())
    assert FORM.bytes_per_token * rows == found.nbytes and FORM.bytes_per_token == 8
    assert len(encoded(random_routes(rows))) <= rows * FORM.wire_bytes_per_token + 4


def test_a_map_with_weights_takes_four_bytes_a_choice_and_keeps_weights_to_a_quarter_of_a_millionth():
    weights = torch.rand(5, 3, 2)
    packed = pack(random_routes(5), weights)
    found = WEIGHED.read(encoded(packed), 5)
    assert torch.equal(experts_of(found), random_routes(5)[:, [0, 2]])
    torch.testing.assert_close(weights_of(found), weights[:, [0, 2]], rtol=0, atol=2.5e-7)
    assert found.nbytes == WEIGHED.bytes_per_token * 5


@given(st.integers(0, 1023), st.floats(0, 1))
def test_every_expert_and_weight_comes_back_and_is_never_taken_for_no_route(expert, weight):
    packed = pack(torch.tensor([expert]), torch.tensor([weight], dtype=torch.float64))
    assert packed.item() >= 0 and experts_of(packed).item() == expert
    assert abs(weights_of(packed).item() - weight) < 3e-7


TABLE = random_routes(4)


def changed(place, value):
    other = TABLE.clone()
    other[place] = value
    return encoded(other)


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        (FORM, encoded(TABLE[:3]), "holds 72 bytes, 3 rows of 3 layers x 2 slots x 4 bytes, for the 4 rows"),
        (FORM, encoded(torch.cat([TABLE, TABLE[:1]])), "holds 120 bytes, 5 rows"),
        (FORM, encoded(TABLE.flatten()[:-1]), "holds 92 bytes, 3.83333 rows"),
        (FORM, "", "holds 0 bytes, 0 rows"),
        (FORM, encoded(TABLE)[:-1], "is not base64"),
        (FORM, "?" + encoded(TABLE)[1:], "is not base64"),
        (FORM, changed((1, 2, 0), 8), "names expert 8: the model has 8, from 0"),
        (FORM, changed((1, 2, 0), -1), "names expert -1"),
        (FORM, changed((1, 2), 5), r"names an expert twice, \[5, 5\] in row 1 of layer 2"),
        (FORM, encoded(pack(TABLE, torch.full((4, 3, 2), 0.5))), "names expert"),
        (WEIGHED, encoded(TABLE), "holds no weights beside the experts"),
    ],
)
def test_a_map_that_the_rows_cannot_have_is_refused(form, text, message):
    with pytest.raises(ValueError, match=message):
        form.read(text, 4)


def column(*lengths):
    """Routes of sequences of these lengths, as workflows have them: the last row of each without one."""
    return torch.cat([routes.with_no_routes(random_routes(n - 1)[:, [0, 2]].short(), n) for n in lengths])


def check(found, mask, *lengths, form=FORM):
    check_complete(found, torch.tensor(mask), torch.tensor([0, *lengths]).cumsum(0), form)


def test_rows_behind_the_last_trained_token_need_no_route():
    found = column(4, 3)
    found[2] = NO_ROUTE
    check(found, [False, True, True, False, False, False, True], 4, 3)
    check(found[:0], [], form=FORM)


@pytest.mark.parametrize("place", [0, 1, 4, 5])
@pytest.mark.parametrize("slot", [slice(None), 0, (1, 1)])
def test_a_row_without_a_route_that_a_trained_token_depends_on_is_named(place, slot):
    found = column(4, 3)
    found[place][slot] = NO_ROUTE
    message = f"1 rows have no route .* the first is token {place % 4} of trajectory {place // 4}"
    with pytest.raises(ValueError, match=message):
        check(found, [False, True, True, False, False, False, True], 4, 3)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "no column 'routes'; a workflow that makes Trajectory itself passes LLMResponse.routes on"),
        (column(4, 3)[:, :1], r"routes have shape \(7, 1, 2\) of torch.int16; the model's are \[tokens, 2 layers"),
        (column(4, 3).int(), "of torch.int32; .* of torch.int16"),
    ],
)
def test_routes_of_another_form_or_none_are_refused(found, message):
    with pytest.raises(ValueError, match=message):
        check(found, [True] * 7, 4, 3)


@pytest.mark.parametrize(
    ("agreed", "where"),
    [
        ((900, 500, 500, 1000), ""),  # the row itself
        ((500, 900, 500, 1000), "row before in 90% of 1000 choices, and with the row itself in 50%"),
        ((500, 500, 900, 1000), "row after in 90%"),
        ((500, 590, 500, 1000), ""),  # within what chance and a router that has moved do
        ((1, 31, 0, 31), ""),  # too few to say
        ((0, 0, 0, 0), ""),
    ],
)
def test_a_map_that_agrees_better_with_a_neighbouring_row_is_called_shifted(agreed, where):
    fault = shift_fault(torch.tensor(agreed))
    assert where in fault and bool(where) == bool(fault)
