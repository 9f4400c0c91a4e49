"""What the publisher does on a GPU is what it does on a CPU: checksums and buckets."""

import json
import subprocess
import sys

import pytest
import torch

from megatron_rl.ops import CHECKSUM_COLUMNS
from megatron_rl.weights.publish import fill_buckets, plan_buckets
from megatron_rl.weights.sglang_checksums import gpu_hash_sum
from megatron_rl.weights.shared_bucket import SharedBucket
from megatron_rl.weights.update_group import checksum
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


READ_A_BUCKET = """
import json, sys, torch
from megatron_rl.weights.shared_bucket import open_bucket
print(int(open_bucket(json.loads(sys.argv[1]), 1000).to(torch.int64).sum()))
"""


def test_another_process_reads_a_bucket_on_the_gpu():
    bucket = SharedBucket(2000, torch.device("cuda"))
    for value in (1, 3):  # the second time, in the same memory
        bucket.flat.fill_(value)
        torch.cuda.synchronize()
        command = [sys.executable, "-c", READ_A_BUCKET, json.dumps(bucket.handle())]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
        assert int(done.stdout) == 1000 * value
    assert bucket.close() is None


def test_sglangs_hash_is_the_same_on_the_gpu():
    data = torch.randint(0, 256, (4 * 8192 * 3 + 5,), dtype=torch.uint8)
    assert gpu_hash_sum([data.cuda()]).cpu() == gpu_hash_sum([data])
