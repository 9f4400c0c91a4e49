"""What is remembered of an operation is what torch's FakeTensorMode says of it, each time."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from megatron_rl.tools.rehearsal.result_shapes import ResultShapes

aten = torch.ops.aten


@pytest.fixture
def results():
    return ResultShapes()


def made(results, *shape, dtype=torch.float32, device="cuda"):
    with results.fake:
        return torch.empty(*shape, dtype=dtype, device=device)


def form(tensor: Tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.untyped_storage().nbytes()


CALLS = {
    # each with a second one that differs in what a careless key would leave out: a type, a stride, a dtype, a place
    "a whole number and a fraction": [
        (aten.add.Tensor, lambda x: (x, 1), torch.int64),
        (aten.add.Tensor, lambda x: (x, 1.0), torch.int64),
        (aten.add.Tensor, lambda x: (x, True), torch.int64),
    ],
    "rows and columns": [
        (aten.relu.default, lambda x: (x,), torch.float32),
        (aten.relu.default, lambda x: (x.t(),), torch.float32),
        (aten.mm.default, lambda x: (x, x.t()), torch.float32),
        (aten.mm.default, lambda x: (x.t(), x), torch.float32),
    ],
    "dtypes": [
        (aten.sum.dim_IntList, lambda x: (x, [0]), torch.bfloat16),
        (aten.sum.dim_IntList, lambda x: (x, [0]), torch.bool),
        (aten.sum.dim_IntList, lambda x: (x, [1]), torch.bool),
    ],
    "lists, and a missing index": [
        (aten.cat.default, lambda x: ([x, x],), torch.float32),
        (aten.cat.default, lambda x: ([x, x], 1), torch.float32),
        (aten.index.Tensor, lambda x: (x, [None, torch.tensor([0, 2])]), torch.float32),
        (aten.index.Tensor, lambda x: (x, [torch.tensor([0, 2])]), torch.float32),
    ],
    "several results": [(aten.topk.default, lambda x: (x, 2), torch.float32)],
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_gives_the_second_time_what_fake_tensors_give(case, results):
    for _ in range(2):
        for func, arguments, dtype in CALLS[case]:
            args = arguments(made(results, 4, 3, dtype=dtype))
            found = results.run(func, args, {})
            with results.fake:
                expected = func(*args)
            pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
            for one, other in pairs:
                assert form(one) == form(other)
        assert len(results._made) == len(CALLS[case]), "one entry for each call, also after the second round"


def test_a_view_shares_its_storage_and_an_operation_in_place_returns_its_argument(results):
    x = made(results, 4, 6)
    for _ in range(2):
        view = results.view(aten.select.int, (x, 0, 1), {})
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata and view.storage_offset() == 6
        halves = results.view(aten.split.Tensor, (x, 3, 1), {})
        assert [half.storage_offset() for half in halves] == [0, 3] and halves[0].device == x.device
        assert results.run(aten.add_.Tensor, (x, x), {}) is x
        assert results.run(aten._foreach_add_.Scalar, ([x, x], 1.0), {}) is None
        copy = results.run(aten.clone.default, (x,), {})
        assert copy.untyped_storage()._cdata != x.untyped_storage()._cdata


def test_devices_that_do_not_meet_and_unknown_shapes_are_errors_each_time(results):
    x, other = made(results, 4, 6), made(results, 4, 6, device="cpu")
    for _ in range(2):
        assert results.run(aten.add.Tensor, (x, x), {}).device == x.device
        with pytest.raises(RuntimeError, match="devices"):
            results.run(aten.add.Tensor, (x, other), {})
        with pytest.raises(RuntimeError, match="devices"):
            results.run(aten.add_.Tensor, (x, torch.ones(4, 6)), {})
        with pytest.raises(DynamicOutputShapeException):
            results.run(aten.nonzero.default, (x,), {})
