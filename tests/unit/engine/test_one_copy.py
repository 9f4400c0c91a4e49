"""What a device reads of a microbatch arrives in one copy, whole, and without anybody waiting for it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.batch import packing
from megatron_rl.engine.one_copy import cut, one_copy, pack
from megatron_rl.types import TrajectoryBatch


class CountCopies(TorchDispatchMode):
    """Counts the operators that bring something from the host to the meta device."""

    copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        tensors = [part for part in torch.utils._pytree.tree_leaves(args) if isinstance(part, torch.Tensor)]
        came = isinstance(result, torch.Tensor) and result.is_meta and any(not part.is_meta for part in tensors)
        self.copies += came
        return result


def columns():
    return {
        "mask": torch.tensor([True, False, True]),
        "none": torch.zeros(0, dtype=torch.int64),
        "ids": torch.arange(5),
        "bounds": torch.tensor([0, 3], dtype=torch.int32),
        "probabilities": torch.rand(7, 3),
        "nothing": None,
        "sums": [torch.rand(1, dtype=torch.float64), torch.tensor(4)],
        "rows": 3,
    }


def test_mixed_tensors_survive_one_buffer():
    tensors = [part for part in torch.utils._pytree.tree_leaves(columns()) if isinstance(part, torch.Tensor)]
    buffer = pack(tensors)
    for found, given in zip(cut(buffer, tensors), tensors, strict=True):
        assert found.dtype == given.dtype and torch.equal(found, given) and found.data_ptr() % 16 == 0
        assert found.untyped_storage().data_ptr() == buffer.data_ptr()


def test_the_host_keeps_its_tensors_and_a_device_gets_them_in_one_copy():
    given = columns()
    assert one_copy(given, torch.device("cpu")) is given
    with CountCopies() as counted:
        there = one_copy(given, torch.device("meta"))
    assert counted.copies == 1
    assert there["nothing"] is None and there["rows"] == 3 and there["ids"].is_meta
    assert there["probabilities"].shape == (7, 3) and there["sums"][0].dtype == torch.float64
    assert one_copy({"rows": 3}, torch.device("meta")) == {"rows": 3}


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("share", [False, True])
def test_a_microbatch_costs_one_copy_of_its_rows_bounds_and_indices(share, context):
    from megatron_rl import platform

    platform.prepare()
    from megatron_rl.engine.packed_rows import own_rows
    from megatron_rl.parallel import Axis

    prompt, lengths = torch.arange(9), (12, 14, 10)
    tokens = torch.cat([torch.cat([prompt, torch.arange(n - 9)]) for n in lengths])
    batch = TrajectoryBatch(
        {"input_ids": tokens, "loss_mask": torch.ones(len(tokens), dtype=torch.bool)},
        {"group": torch.zeros(3, dtype=torch.int64)},
        torch.tensor([0, *lengths]).cumsum(0),
    )
    microbatch = packing.to_microbatch(batch, [0, 1, 2], share_prompts=share)
    with CountCopies() as counted:
        ids, packed = own_rows(microbatch, Axis(None, context, 0), multiple_of=4, device=torch.device("meta"))
    assert counted.copies == 1
    assert ids.is_meta and packed.reads.is_meta and packed.keys.rows.is_meta
