"""The distributed optimizer is saved and loaded by each rank's own part, in a form that every layout reads."""

import itertools

import pytest
import torch
from test_checkpoint import DISTRIBUTED, GENTLE, resume_and_save, train, uninterrupted, weights_of
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.engine import checkpoint
from megatron_rl.engine.optimizer_shards import blocks
from tests.kit.models import LAYOUTS, make_engine, make_model
from tests.kit.ranks import run_ranks


# One axis and several, with axes of 1; every range of each.
@pytest.mark.parametrize("shape", [(7,), (4, 3), (3, 1), (1, 5), (2, 3, 4)])
def test_blocks_cover_each_range_in_its_order_and_are_few(shape):
    whole = torch.arange(torch.tensor(shape).prod())
    for start, stop in itertools.combinations(range(len(whole) + 1), 2):
        found = list(blocks(shape, start, stop))
        parts = [whole.view(shape)[tuple(slice(o, o + n) for o, n in zip(*block, strict=True))] for block in found]
        assert torch.equal(torch.cat([part.flatten() for part in parts]), whole[start:stop])
        assert len(found) <= 2 * len(shape) - 1


class Allocated(TorchDispatchMode):
    """Counts the bytes of new storages on the host."""

    def __init__(self):
        super().__init__()
        self.bytes, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ in ("empty", "zeros", "cat", "_to_copy", "clone", "empty_like", "zeros_like"):
            count = result.nbytes if result.device.type == "cpu" else 0
            self.bytes, self.largest = self.bytes + count, max(self.largest, count)
        return result


def host_bytes(folder):
    """Bytes that the plan of a checkpoint allocates on this rank, and that its share of the optimizer has."""
    engine = make_engine(folder, LAYOUTS["dp2"][1], **DISTRIBUTED)
    train(engine)
    with Allocated() as allocated:
        checkpoint.training_state(engine)
    return allocated.bytes, 12 * sum(parameter.numel() for parameter in engine.parameters())


@pytest.mark.slow
def test_a_distributed_optimizer_is_not_gathered_on_every_host_for_a_checkpoint(tmp_path):
    make_model("llama", tmp_path)
    for allocated, whole in run_ranks(2, host_bytes, tmp_path):
        assert allocated < whole / 100, "random states and the like"


def save_as_upstream_does(folder, target):
    """Save two updates in the form of before: gathered, by `fully_reshardable`."""
    engine = make_engine(folder, LAYOUTS["dp2"][1], **DISTRIBUTED)
    train(engine)
    own = checkpoint.training_state

    def gathered(engine):
        state, _ = own(engine)
        metadata = checkpoint._metadata(engine.groups) | {"distrib_optim_sharding_type": "fully_reshardable"}
        models = checkpoint.model_state(engine.chunks, engine.groups)
        return models | state | {"optimizer": engine.optimizer.sharded_state_dict(models, metadata=metadata)}, []

    checkpoint.training_state = gathered
    engine.save(target, with_optimizer=True)
    checkpoint.training_state = own
    return weights_of(engine)


@pytest.mark.thorough
def test_a_checkpoint_with_gathered_states_of_before_still_loads(tmp_path):
    folder, target = tmp_path / "model", tmp_path / "checkpoint"
    make_model("llama", folder)
    expected = run_ranks(1, uninterrupted, folder, 2)[0]
    saved = run_ranks(2, save_as_upstream_does, folder, target)[0]
    for number, (layout, options) in enumerate([("tp2", DISTRIBUTED), ("dp2", GENTLE)]):
        way = (folder, layout, target, tmp_path / str(number), options, False)
        loaded, trained = run_ranks(2, resume_and_save, *way)[0]
        for name, tensor in expected[1].items():
            assert torch.equal(loaded[name], saved[name])
            torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-6, msg=name)
