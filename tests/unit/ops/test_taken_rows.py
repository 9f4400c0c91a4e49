"""Rows that are taken several times get their gradient in float32 and in one order, whoever takes them."""

import pytest
import torch

from megatron_rl.ops.taken_rows import TakenRows

PROMPT_AND_REPLIES = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5])
"""Three rows of a prompt, which itself and two replies attend to."""


def test_sixteen_replies_to_a_prompt_are_not_rounded_away_one_by_one():
    values = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.zeros(17, dtype=torch.int64)
    grad = torch.ones(17, 3, dtype=torch.bfloat16)
    grad[0] = 256.0  # in bfloat16 256 + 1 is 256
    TakenRows.of(rows).of_values(values).backward(grad)
    assert values.grad.tolist() == [[272.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("rows", [PROMPT_AND_REPLIES, torch.tensor([5, 3, 1, 0, 2, 4]), torch.tensor([4])])
def test_values_and_gradients_are_those_of_index_select(rows):
    taken = TakenRows.of(rows)
    values = torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(taken.of_values(values), values.index_select(0, rows))
    assert torch.autograd.gradcheck(taken.of_values, values)


def test_no_two_numbers_are_added_to_one_place_of_the_gradient():
    taken = TakenRows.of(PROMPT_AND_REPLIES)
    assert [len(places) // len(rows) for rows, places in taken.back] == [1, 3]
    for rows, places in taken.back:
        assert len(rows.unique()) == len(rows) and len(places.unique()) == len(places)
    assert taken.back[1][1].view(3, 3).tolist() == [[0, 3, 7], [1, 4, 8], [2, 5, 9]], "in rising order"
