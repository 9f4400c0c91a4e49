"""What the publisher does on a GPU is what it does on a CPU: checksums and buckets."""

import json

import pytest
import torch

from megatron_rl.api import ChecksumForm
from megatron_rl.ops import CHECKSUM_COLUMNS, tile_hashes, word_sums
from megatron_rl.weights import checksums, sglang_checksums
from megatron_rl.weights.publish import fill_buckets, plan_buckets
from megatron_rl.weights.shared_bucket import SharedBucket
from megatron_rl.weights.update_group import checksum
from tests.kit.in_process import some_tensors, specs_of
from tests.kit.interpreters import run_python

pytestmark = pytest.mark.gpu
ROW, TILE = 8 * CHECKSUM_COLUMNS, 4 * 8192


def some_bytes(count, seed=0):
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# No whole row, whole rows, and a rest that fills no word; bfloat16 from an address that no word begins at.
@pytest.mark.parametrize("numbers", [0, 5, ROW // 2, 300 * ROW // 2 + 7])
def test_a_checksum_is_the_same_on_the_gpu(numbers):
    data = torch.randn(numbers + 1).bfloat16()
    assert checksum(data.cuda()) == checksum(data)
    assert checksum(data.cuda()[1:]) == checksum(data[1:])


@pytest.mark.parametrize("begin", range(9))
def test_sums_are_the_same_wherever_a_tensor_begins_and_ends(begin):
    data = some_bytes(6 * ROW + 40)
    for end in (begin, begin + 3, 2 * ROW - 1, 5 * ROW + begin, 5 * ROW + 30 + begin):
        assert torch.equal(word_sums([data.cuda()[begin:end]]).cpu(), word_sums([data[begin:end]]))


def test_all_tensors_of_a_bucket_are_summed_by_one_operator():
    sizes = [0, 1, 15, 16, ROW - 1, ROW, ROW + 1, 9 * ROW, 0, 5 * ROW + 100] + [8 * n for n in range(270)] + [0]
    tensors = [some_bytes(size, seed=size) for size in sizes]
    right, on_gpu = word_sums(tensors), [tensor.cuda() for tensor in tensors]
    for _ in range(3):  # blocks come in another order each time
        assert torch.equal(word_sums(on_gpu).cpu(), right)
    flat = torch.cat(tensors)  # tensors of a flat bucket begin anywhere
    assert torch.equal(word_sums(flat.cuda().split(sizes)).cpu(), right)


# A block reads four rows at a time.
@pytest.mark.parametrize(
    "rows",
    [(6 * 132) * 4, (6 * 132) * 8 + 5, (6 * 132) * 32 + 5],
    ids=["short blocks", "blocks of two rounds", "long blocks"],
)
def test_sums_are_the_same_however_many_rows_a_block_has(rows):
    data = torch.arange(rows * CHECKSUM_COLUMNS + 3).mul_(0x9E3779B97F4A7C15 - (1 << 64))
    assert torch.equal(word_sums([data.cuda()]).cpu(), word_sums([data]))


# A tile is 32 KB: a part of one, whole ones, tiles of two and three parts, parts that begin between words, none.
PARTS = [[5], [TILE], [2 * TILE + 6], [0], [TILE, TILE], [TILE + 16, 48, TILE], [101, 7, 2 * TILE, 0, 33], [3, TILE]]


def test_sglangs_hashes_are_the_same_on_the_gpu():
    tensors = [[some_bytes(size, seed=i + k) for k, size in enumerate(sizes)] for i, sizes in enumerate(PARTS)]
    tensors += [[some_bytes(4 * n, seed=n)] for n in range(200)]
    tensors += [[some_bytes(TILE + 21)[begin:]] for begin in (1, 2, 4, 8)]
    right = tile_hashes(tensors)
    on_gpu = [[part.cuda() for part in parts] for parts in tensors[:-4]]
    on_gpu += [[some_bytes(TILE + 21).cuda()[begin:]] for begin in (1, 2, 4, 8)]
    for _ in range(3):
        assert torch.equal(tile_hashes(on_gpu).cpu(), right)


# Slices of whole tiles, of several parts, which begin anywhere, and the last one with what fills no tile.
@pytest.mark.parametrize("cuts", [[TILE], [2 * TILE, 3 * TILE], [TILE, 4 * TILE, 5 * TILE]])
def test_hashes_of_slices_add_up_to_those_of_the_tensor_on_the_gpu(cuts):
    whole = some_bytes(5 * TILE + 1001)
    slices = [list(part.split(TILE + 52)) for part in torch.tensor_split(whole, cuts)]
    places = [(begin, len(whole)) for begin in (0, *cuts)]
    on_gpu = tile_hashes([[part.cuda() for part in parts] for parts in slices], places)
    assert torch.equal(on_gpu.cpu(), tile_hashes(slices, places)) and int(on_gpu.sum()) == int(tile_hashes([[whole]]))
    with pytest.raises(RuntimeError, match="bytes 32768 to 32769 of 99999: a slice is of whole tiles of 32768"):
        tile_hashes([[whole[:1].cuda()]], [(TILE, 99999)])


def test_what_is_summed_is_on_one_device():
    with pytest.raises(RuntimeError, match=r"another of the tensors is on the CPU and tensors\[0\] on CUDA device 0"):
        word_sums([torch.zeros(3).cuda(), torch.zeros(3)])
    with pytest.raises(RuntimeError, match="counts add up to 3 for 2 parts"):
        torch.ops.megatron_rl.tile_hashes([torch.zeros(3).cuda()] * 2, [1, 2], [0, 0], [12, 12])


@pytest.mark.parametrize("form", [ChecksumForm("embedded", None, 1, None), ChecksumForm("sglang_gpu", None, 2, 2)])
def test_a_bucket_of_a_publication_is_summed_at_once_and_as_on_the_cpu(form, monkeypatch):
    attention = "model.layers.{}.self_attn.{}_proj.weight"
    names = [attention.format(layer, part) for layer in range(3) for part in "qkvo"]
    tensors = {name: torch.randn(8, 64).bfloat16() for name in names} | {"model.norm.weight": torch.randn(64)}
    buckets, calls = plan_buckets(specs_of(tensors), 6 * 1024), []
    for name in ("word_sums", "tile_hashes"):
        module = checksums if name == "word_sums" else sglang_checksums
        take = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda given, *places, take=take: calls.append(len(given)) or take(given, *places)
        )
    found = []
    for device in ("cpu", "cuda"):
        calls.clear()
        expected = checksums.ExpectedChecksums([form])
        stream = ((name, tensor.to(device)) for name, tensor in tensors.items())
        assert [name for name, _ in expected.watch(stream, buckets)] == list(tensors)
        found.append(expected.of(form))
    assert found[0] == found[1] and len(buckets) == len(calls) == 3, calls


def test_buckets_are_filled_where_the_weights_are():
    tensors = {name: tensor.cuda() for name, tensor in some_tensors().items()}
    for specs, (sent,) in fill_buckets(plan_buckets(specs_of(tensors), 1000), tensors.items()):
        assert sent.is_cuda  # one tensor alone is sent from where it lies
        right = torch.cat([tensors[spec.name].view(-1) for spec in specs])
        assert torch.equal(sent.view(-1).view(torch.float32), right)


READ_A_BUCKET = """
import json, sys, torch
from megatron_rl.weights.shared_bucket import open_bucket
print(int(open_bucket(json.loads(sys.argv[1]), 1000).to(torch.int64).sum()))
"""


@pytest.mark.parametrize("segments", [False, True])
def test_another_process_reads_a_bucket_on_the_gpu(segments):
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{segments}")
    try:
        other_process_reads_a_bucket()
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def other_process_reads_a_bucket():
    bucket = SharedBucket(2000, torch.device("cuda"))
    for value in (1, 3):  # the second time, in the same memory
        bucket.flat.fill_(value)
        torch.cuda.synchronize()
        done = run_python(READ_A_BUCKET, json.dumps(bucket.handle()))
        assert done.returncode == 0 and int(done.stdout) == 1000 * value, done.stderr
    assert bucket.close() is None
