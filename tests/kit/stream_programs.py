"""Small programs of a rehearsed device's streams. Each has one fault, between the lines `# one` and `# other`.

Mended, it waits where it must. The faults of the last ones are in this package, or in megatron.core.
"""

from concurrent.futures import Future

import torch
import torch.distributed as dist

from megatron_rl.engine import offload
from megatron_rl.weights import senders
from megatron_rl.weights.publish import GroupPublisher
from megatron_rl.weights.update_group import TensorSpec

PROGRAMS = {}
ELSEWHERE = {
    "a_bucket_is_filled_while_it_is_sent": [
        ("megatron_rl/weights/senders.py", "dist.broadcast(piece"),
        ("megatron_rl/weights/publish.py", "parts[0].copy_(first)"),
    ],
    "page_locked_memory_is_freed_while_it_is_copied": [
        ("megatron_rl/engine/offload.py", "self.memory = torch.empty(0, dtype=torch.uint8)  # free"),
        ("megatron_rl/engine/offload.py", "_bytes_of(storage).copy_(host"),
    ],
    "an_optimizer_steps_on_the_gpu_before_its_gradients_are_there": [
        ("megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py", "fp32_param.grad = grad.to("),
        ("megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py", "self.gpu_optimizer.step(closure)"),
    ],
}
"""The file and the text of both lines, if they are in this package or in megatron.core."""


def program(run):
    PROGRAMS[run.__name__] = run
    return run


def ones(count=64):
    return torch.ones(count, device="cuda")


def current():
    return torch.cuda.current_stream()


@program
def a_gathered_bucket_is_used_at_once(is_mended):
    bucket, own = ones(), ones(32)
    work = dist.all_gather_into_tensor(bucket, own, async_op=True)  # one
    if is_mended:
        work.wait()
    bucket.sum()  # other


@program
def a_side_stream_reads_what_is_not_written_yet(is_mended):
    side, bucket = torch.cuda.Stream(), ones()
    bucket.zero_()  # one
    if is_mended:
        side.wait_stream(current())
    with torch.cuda.stream(side):
        bucket.sum()  # other
    current().wait_stream(side)


@program
def a_tensor_is_freed_while_a_side_stream_reads_it(is_mended):
    side, kept, bucket = torch.cuda.Stream(), ones(), ones()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        kept.add_(bucket)  # one
    if is_mended:
        bucket.record_stream(side)
    del bucket  # other
    current().wait_stream(side)


@program
def the_host_reads_what_is_not_copied_yet(is_mended):
    host = torch.empty(64, pin_memory=True)
    host.copy_(ones(), non_blocking=True)  # one
    if is_mended:
        current().synchronize()
    host.sum()  # other


@program
def the_host_lists_what_is_not_copied_yet(is_mended):
    there = ones()
    host = there.to("cpu", non_blocking=True)  # one
    if is_mended:
        current().record_event().synchronize()
    host.tolist()  # other


@program
def the_host_overwrites_what_is_not_copied_yet(is_mended):
    host = torch.ones(64, pin_memory=True)
    there = host.to("cuda", non_blocking=True)  # one
    if is_mended:
        torch.cuda.synchronize()
    host.fill_(2.0)  # other
    there.sum()


@program
def an_event_is_recorded_too_early(is_mended):
    side, event, bucket = torch.cuda.Stream(), torch.cuda.Event(), ones()
    side.wait_stream(current())
    if not is_mended:
        event.record(side)
    with torch.cuda.stream(side):
        bucket.fill_(2.0)  # one
    if is_mended:
        event.record(side)
    event.wait()
    bucket.sum()  # other
    current().wait_stream(side)


@program
def an_event_is_never_recorded(is_mended):
    side, event, bucket = torch.cuda.Stream(), torch.cuda.Event(), ones()
    bucket.fill_(2.0)  # one
    if is_mended:
        event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        bucket.add_(1.0)  # other
    current().wait_stream(side)


@program
def a_bucket_is_overwritten_while_it_is_sent(is_mended):
    bucket = ones()
    work = dist.isend(bucket, 1)  # one
    if is_mended:
        work.wait()
    bucket[:8].zero_()  # other


@program
def a_message_is_read_before_it_is_there(is_mended):
    bucket = ones()
    (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, bucket, 1)])  # one
    if is_mended:
        work.wait()
    bucket.sum()  # other


@program
def an_emptied_storage_is_still_gathered(is_mended):
    bucket, own = ones(), ones(32)
    work = dist.all_gather_into_tensor(bucket, own, async_op=True)  # one
    if is_mended:
        work.wait()
    bucket.untyped_storage().resize_(0)  # other


@program
def a_copy_to_the_host_does_not_wait_for_another_stream(is_mended):
    side, bucket = torch.cuda.Stream(), ones()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        bucket.zero_()  # one
    if is_mended:
        current().wait_stream(side)
    bucket.cpu()  # other
    current().wait_stream(side)


@program
def neighbours_in_one_bucket_are_no_fault(is_mended):
    """A bucket is reduced while the next one's gradients are written, in the same storage."""
    buffer = ones()
    work = dist.all_reduce(buffer[:32], async_op=True)  # one
    if is_mended:
        buffer[32:].fill_(2.0)
    else:
        buffer[31:].fill_(2.0)  # other
    work.wait()


# -- faults elsewhere


class Servers:
    """A WeightReceiver whose servers answer at once and have no checksums."""

    server_ranks = {"one": 1}
    membership = 0
    checksum_forms = held_weights = dict

    def __getattr__(self, name):
        return lambda *_, **__: None

    def load_bucket(self, **_):
        loaded = Future()
        loaded.set_result(None)
        return {"one": loaded}


class Publisher(GroupPublisher):
    """Sends to ranks that do not exist."""

    def _join(self):
        self._names, self.sender.group, self.sender._is_connected = ["one"], dist.new_group([0, 1]), True


@program
def a_bucket_is_filled_while_it_is_sent(is_mended):
    settle = senders.Sender.settle
    if not is_mended:
        senders.Sender.settle = lambda self: self.on_wire.clear() is None
    try:
        tensors = {f"norm.{number}": ones() for number in range(12)}
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        Publisher(Servers(), bucket_bytes=2 * specs[0].nbytes, backend="nccl").publish(specs, tensors.items(), 1)
    finally:
        senders.Sender.settle = settle


@program
def page_locked_memory_is_freed_while_it_is_copied(is_mended):
    offload._bytes_of = lambda storage: torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    moved, small, large = offload.HostCopy(), ones(), ones(4096)
    device, synchronize = small.device, torch.cuda.synchronize
    moved.take([small], [], device)
    moved.give_back()
    if not is_mended:
        torch.cuda.synchronize = lambda: None
    try:
        moved.take([small, large], [], device)
    finally:
        torch.cuda.synchronize = synchronize


@program
def an_optimizer_steps_on_the_gpu_before_its_gradients_are_there(is_mended):
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    register = torch.optim.Optimizer.register_step_pre_hook
    if not is_mended:  # as without the fix in megatron_rl/platform/upstream.py
        torch.optim.Optimizer.register_step_pre_hook = lambda self, hook: None
    try:
        parameters = [torch.nn.Parameter(ones().bfloat16()) for _ in range(4)]
        options = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.AdamW, "lr": 1.0}
        optimizer = HybridDeviceOptimizer(
            parameters, offload_fraction=0.5, param_update_in_fp32=True, overlap_cpu_optimizer_d2h_h2d=True, **options
        )
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.optim.Optimizer.register_step_pre_hook = register
