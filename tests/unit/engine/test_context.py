"""Sums over ranks: what autograd and a user's loss may do with their result."""

import pytest
import torch

from megatron_rl.config import ParallelConfig
from megatron_rl.engine.context import sum_for_all
from megatron_rl.parallel import start
from tests.kit.ranks import run_ranks


def changed_in_place(context):
    groups = start(ParallelConfig(context=context), seed=1)
    own = torch.full((3,), groups.context.rank + 1.0, requires_grad=True)
    whole = sum_for_all(own * 2, groups.context)
    whole.div_(4)
    whole[1:].clamp_(max=1.0)
    whole.sum().backward()
    return whole.tolist(), own.grad.tolist()


@pytest.mark.parametrize("context", [1, 2])
def test_a_sum_may_be_changed_in_place_and_each_rank_keeps_its_own_gradient(context):
    for found in run_ranks(context, changed_in_place, context):
        assert found == (([0.5] * 3, [0.5] * 3) if context == 1 else ([1.5, 1.0, 1.0], [0.5, 0.0, 0.0]))
