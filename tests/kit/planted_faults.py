"""Faults of a kind that a first run on a cluster meets, each planted into the code that a rehearsal runs."""

import functools

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLP

from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.engine import schedule
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.output_head import Head

FAULTS = {}
KEPT = []


def fault(plant):
    FAULTS[plant.__name__] = plant
    return plant


def before(cls, name, act):
    """Let `act(*arguments)` run before a method."""
    method = getattr(cls, name)

    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        act(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(cls, name, wrapped)


def loss_of(change):
    """Pass the log-probs through `change` on their way into the loss."""
    call = PolicyLoss.__call__
    PolicyLoss.__call__ = lambda self, logprobs, entropy, rows: call(self, change(logprobs), entropy, rows)


def own_weight(scale):
    """A tensor of the loss's rows that was made somewhere else."""
    loss_of(lambda logprobs: logprobs * scale(len(logprobs)))


# -- a tensor in the wrong place


@fault
def a_mask_left_on_the_host(rank):
    own_weight(lambda rows: torch.ones(rows))


@fault
def a_mask_on_another_gpu(rank):
    own_weight(lambda rows: torch.ones(rows, device=torch.device("cuda", 7 - rank % 8)))


@fault
def positions_left_on_the_host(rank):
    own_rows = schedule.own_rows

    def left(*args, **kwargs):
        ids, packed = own_rows(*args, **kwargs)
        packed.positions = torch.arange(len(packed.positions))
        return ids, packed

    schedule.own_rows = left


# -- the host waits


@fault
def a_number_read_in_the_loss(rank):
    loss_of(lambda logprobs: logprobs * (1.0 if logprobs.sum().item() else 2.0))


@fault
def a_branch_on_a_tensor(rank):
    loss_of(lambda logprobs: logprobs if logprobs.detach().abs().max() > 0 else -logprobs)


@fault
def rows_chosen_by_a_mask(rank):
    before(Head, "logprob_loss", lambda self, loss, hidden, rows, *_: rows["labels"][rows["labels"] >= 0])


@fault
def places_looked_up_on_the_device(rank):
    before(Head, "logprob_loss", lambda self, loss, hidden, rows, *_: rows["labels"].nonzero())


@fault
def the_device_waited_for(rank):
    before(Head, "logprob_loss", lambda *_: torch.cuda.synchronize())


@fault
def logprobs_copied_to_the_host(rank):
    before(Head, "logprob_loss", lambda self, loss, hidden, *_: hidden[0].detach().cpu())


@fault
def a_column_copied_from_pageable_memory(rank):
    before(Head, "logprob_loss", lambda self, loss, hidden, *_: torch.ones(64).to(hidden.device))


# -- memory


@fault
def logits_in_float32(rank):
    def all_logits(self, loss, hidden, *_):
        KEPT.append(torch.nn.functional.linear(hidden.detach(), self.weight().detach()).float())

    before(Head, "logprob_loss", all_logits)


@fault
def activations_kept_from_one_microbatch_to_the_next(rank):
    before(MLP, "forward", lambda self, hidden, *_, **__: KEPT.append(hidden.detach().float()))


@fault
def weights_kept_twice(rank):
    before(MegatronEngine, "train_batch", lambda self, *_: KEPT.extend(p.detach().float() for p in self.parameters()))


# -- streams in no order


@fault
def collectives_that_nobody_waits_for(rank):
    c10d._CoalescingManager.wait = lambda self: None


# -- ranks that do not fit together


@fault
def a_collective_missing_on_one_stage(rank):
    if rank >= 4:  # the second of two stages
        before(MegatronEngine, "train_batch", lambda self, *_: dist.barrier(self.groups.pipeline.group))


@fault
def another_shape_between_stages(rank):
    shapes = schedule.KnownShapes._communicate_shapes

    def longer(self, *args):
        return [shape and [shape[0] + 8, *shape[1:]] for shape in shapes(self, *args)]

    schedule.KnownShapes._communicate_shapes = longer


@fault
def another_dtype_on_one_rank(rank):
    dtype = torch.float32 if rank == 0 else torch.bfloat16

    def reduce(self, *_):
        dist.all_reduce(torch.ones(4, dtype=dtype, device=self.device), group=self.groups.pipeline.group)

    before(MegatronEngine, "train_batch", reduce)


@fault
def two_collectives_in_another_order(rank):
    def both(self, *_):
        group, numbers = {"group": self.groups.pipeline.group}, torch.ones(4, device=self.device)
        calls = [lambda: dist.all_reduce(numbers, **group), lambda: dist.broadcast(numbers, group_src=0, **group)]
        for call in calls if rank else calls[::-1]:
            call()

    before(MegatronEngine, "train_batch", both)


@fault
def a_gather_in_the_wrong_group(rank):
    def gather(self, *_):
        group = self.groups.pipeline.group if rank == 0 else parallel_state.get_model_parallel_group()
        out = [torch.empty(4, device=self.device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(out, torch.ones(4, device=self.device), group=group)

    before(MegatronEngine, "train_batch", gather)


@fault
def a_broadcast_from_another_rank(rank):
    def send(self, *_):
        source = 0 if rank == 0 else 1
        dist.broadcast(torch.ones(4, device=self.device), group=self.groups.pipeline.group, group_src=source)

    before(MegatronEngine, "train_batch", send)


@fault
def a_microbatch_more_on_one_stage(rank):
    run = schedule.run

    def longer(chunks, microbatches, *args, **kwargs):
        return run(chunks, microbatches + microbatches[:1] if rank >= 4 else microbatches, *args, **kwargs)

    schedule.run = longer
