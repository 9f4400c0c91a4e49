"""packed_gae against the loop, on the CPU and as the CUDA kernel's source on the CPU."""

import pytest
import torch
from torch.library import opcheck

from megatron_rl import ops
from megatron_rl.ops.library import ops as library
from tests.kit import operators as reference


def case(lengths, dtype=torch.float32, seed=0, trained=0.7):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    rewards, values = torch.randn(2, total, generator=generator, dtype=dtype)
    mask = torch.rand(total, generator=generator) < trained
    bootstrap = torch.randn(len(lengths), generator=generator, dtype=dtype)
    return rewards, values, mask, torch.tensor([0, *lengths]).cumsum(0), bootstrap


# none, one token, an empty one, all masked, tools' answers between turns, more than a tile of the kernel
LENGTHS = [(), (1,), (0, 5, 0, 3), (1024, 1025, 7), (2500,)]


@pytest.mark.parametrize("trained", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_equals_the_loop_with_masks_and_bootstrap(lengths, trained):
    *tensors, bootstrap = case(lengths, torch.float64, trained=trained)
    for after in (None, bootstrap):
        options = {"discount": 0.97, "trace_decay": 0.9, "bootstrap": after}
        for mine, right in zip(
            ops.packed_gae(*tensors, **options), reference.packed_gae(*tensors, **options), strict=True
        ):
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


def test_numbers_that_are_none_stay_in_their_sequence():
    rewards, values, mask, bounds, bootstrap = case((7, 6, 5), trained=1.0)
    rewards[10], bootstrap[2] = float("nan"), float("inf")
    for found in ops.packed_gae(rewards, values, mask, bounds, discount=0.9, trace_decay=0.8, bootstrap=bootstrap):
        assert found[:7].isfinite().all() and found[7:11].isnan().all() and found[11:13].isfinite().all()
        assert found[13:].isinf().all()


def test_discounted_returns_by_hand():
    rewards, mask = torch.tensor([1.0, 5.0, 2.0, 4.0]), torch.tensor([True, False, True, True])
    returns = ops.packed_discounted_returns(rewards, mask, torch.tensor([0, 3, 4]), discount=0.5)
    assert returns.tolist() == [2.0, 0.0, 2.0, 4.0]


@pytest.mark.slow
def test_obeys_torchs_rules_and_names_bad_input():
    tensors = case((3, 4))
    opcheck(library.packed_gae.default, (*tensors, 0.9, 0.8))
    rewards, values, mask, _, bootstrap = tensors
    decay = {"discount": 1.0, "trace_decay": 1.0}
    for bounds in ([0, 5, 3, 7], [1, 7], [0, 6]):
        with pytest.raises(RuntimeError, match=r"cu_seqlens\[\d\] is"):
            ops.packed_gae(rewards, values, mask, torch.tensor(bounds), **decay)
    with pytest.raises(ValueError, match=r"rewards has shape \(6,\)"):
        ops.packed_gae(rewards[1:], values, mask, tensors[3], **decay)
    with pytest.raises(ValueError, match=r"bootstrap has shape \(1,\)"):
        ops.packed_gae(rewards, values, mask, tensors[3], bootstrap=bootstrap[1:], **decay)
