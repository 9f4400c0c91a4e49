"""A checkpoint's writer reads copies, and its fork costs training nothing."""

import io
import mmap
import os
import resource
import signal

import torch

from megatron_rl import platform
from megatron_rl.engine.host_memory import LEAST_BYTES, SharedCopies, left_out_of_forks, page_locked
from megatron_rl.engine.offload import HostCopy


def test_copies_keep_what_was_and_are_written_without_their_neighbours():
    tensors = [torch.arange(5.0), torch.empty(0, 3), torch.arange(6).view(2, 3), torch.ones(3, dtype=torch.bfloat16)]
    shared = SharedCopies()
    copies, expected = shared.of(tensors), [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, expected, strict=True))
    buffer = io.BytesIO()
    torch.save(copies[2], buffer)
    assert copies[2].untyped_storage().nbytes() == 6 * 8 and len(buffer.getvalue()) < 4096
    memory = shared.memory
    shared.of([torch.ones(4)])
    assert shared.memory is memory, "used again"


def faults_of_writing(tensor: torch.Tensor) -> int:
    """Page faults of writing to a tensor while a forked child lives."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensor.add_(1.0)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_writing_to_what_was_left_out_of_a_fork_copies_no_page():
    tensor = torch.zeros(8 * 1024 * 1024)  # 32 MB, 8,192 pages
    usual = faults_of_writing(tensor)
    with left_out_of_forks([tensor, torch.zeros(3)]):
        assert faults_of_writing(tensor) < usual / 10
    assert faults_of_writing(tensor) > usual / 2, "the next fork has it again"


def test_a_small_tensor_is_in_the_fork():
    small = torch.ones(LEAST_BYTES // 8).numpy()
    with left_out_of_forks([torch.from_numpy(small)]):
        pid = os.fork()
        if pid == 0:
            os._exit(int(small[len(small) // 2] != 1.0))
        assert os.waitpid(pid, 0)[1] == 0, "memory that is left out cannot be read"


class Cudart:
    """CUDA's runtime, as far as it locks pages."""

    def __init__(self):
        self.locked = {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802  CUDA's name
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802  CUDA's name
        del self.locked[address]
        return 0


def test_a_model_off_its_device_took_up_to_twice_its_size(monkeypatch):
    """torch rounds each piece of page-locked memory up to a power of two."""
    cudart = Cudart()
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    tensors = [torch.randn(2**16 + 1 + n) for n in range(5)]
    before, copy = [tensor.clone() for tensor in tensors], HostCopy()
    nbytes = sum(tensor.nbytes for tensor in tensors)
    for _ in range(2):  # the same memory again
        copy.take(tensors, [], torch.device("cpu"))
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        (locked,) = cudart.locked.values()
        assert nbytes <= locked <= nbytes + 5 * 64 + mmap.PAGESIZE
        copy.give_back()
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    more = [*tensors, torch.ones(2**16)]
    copy.take(more, [], torch.device("cpu"))
    assert len(cudart.locked) == 1 and sum(cudart.locked.values()) >= sum(tensor.nbytes for tensor in before) + 2**18
    copy.give_back()
    del copy
    assert not cudart.locked


def test_more_host_memory_than_there_is_can_be_mapped_for_a_rehearsal():
    memory = page_locked(1 << 40, has_gpu=False)
    memory[-1] = 3
    assert memory.numel() == 1 << 40 and memory[-2:].tolist() == [0, 3]
