"""A checkpoint's writer reads copies, and its fork costs training nothing."""

import io
import os
import resource
import time

import torch

from megatron_rl.engine.host_memory import SharedCopies, left_out_of_forks


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
        time.sleep(60)
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
