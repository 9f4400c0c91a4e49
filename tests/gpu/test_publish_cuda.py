"""What the publisher does on a GPU is what it does on a CPU: checksums and buckets."""

import pytest
import torch

from megatron_rl.ops import CHECKSUM_COLUMNS
from megatron_rl.update_group import checksum
from megatron_rl.weights.publish import fill_buckets, plan_buckets
from tests.servers.in_process import some_tensors, specs_of

pytestmark = pytest.mark.gpu
ROW = 8 * CHECKSUM_COLUMNS


# No whole row, whole rows, and a rest that fills no word; bfloat16 from an address that no word begins at.
@pytest.mark.parametrize("numbers", [0, 5, ROW // 2, 300 * ROW // 2 + 7])
def test_a_checksum_is_the_same_on_the_gpu(numbers):
    data = torch.randn(numbers + 1).bfloat16()
    assert checksum(data.cuda()) == checksum(data)
    assert checksum(data.cuda()[1:]) == checksum(data[1:])


def test_buckets_are_filled_where_the_weights_are():
    tensors = {name: tensor.cuda() for name, tensor in some_tensors().items()}
    for specs, (flat,) in fill_buckets(plan_buckets(specs_of(tensors), 1000), tensors.items()):
        assert flat.is_cuda
        sent = torch.cat([tensors[spec.name].view(-1) for spec in specs])
        assert torch.equal(flat.view(torch.float32), sent)
