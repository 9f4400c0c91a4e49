"""packed_logprobs over gloo ranks that hold uneven slices of the vocabulary, against one process."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig
from megatron_rl.engine.draft_head import soft_cross_entropy
from megatron_rl.engine.output_head import Head
from megatron_rl.ops import Cut, PpoOptions, VocabShard, head, packed_logprobs
from megatron_rl.parallel import Axis
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_model
from tests.kit.operators import lm_head_ppo_loss
from tests.kit.ranks import run_ranks
from tests.unit.logit_cases import rows


def on_rank(bounds):
    dist.init_process_group("gloo")
    start, stop = bounds[dist.get_rank() : dist.get_rank() + 2]
    logits, labels = rows()
    x = logits[:, start:stop].clone().requires_grad_()
    shard = VocabShard(start, min(stop, 1000), 1000, dist.group.WORLD)
    results = packed_logprobs(x, labels, temperature=0.7, return_entropy=True, shard=shard)
    torch.autograd.backward(results, [torch.arange(6.0), torch.ones(6)])
    return [tensor.detach().numpy() for tensor in (*results, x.grad)]


# two ranks, and four of which one holds a single column and the last one only padding
@pytest.mark.parametrize("bounds", [(0, 400, 1000), (0, 1, 600, 1000, 1010)])
def test_every_rank_gets_the_same_bits(bounds):
    logits, labels = rows()
    x = logits.clone().requires_grad_()
    whole = packed_logprobs(x, labels, temperature=0.7, return_entropy=True)
    torch.autograd.backward(whole, [torch.arange(6.0), torch.ones(6)])
    ranks = run_ranks(len(bounds) - 1, on_rank, bounds)
    for logprobs, entropy, _ in ranks:
        assert logprobs.tobytes() == ranks[0][0].tobytes() and entropy.tobytes() == ranks[0][1].tobytes()
        torch.testing.assert_close(torch.tensor(logprobs), whole[0].detach(), rtol=0, atol=2e-6)
        torch.testing.assert_close(torch.tensor(entropy), whole[1].detach(), rtol=0, atol=2e-6)
    gradient = torch.cat([torch.tensor(rank[2]) for rank in ranks], 1)
    torch.testing.assert_close(gradient[:, :1000], x.grad, rtol=1e-5, atol=1e-6)


HEAD_OPTIONS = {
    "by token": PpoOptions(behavior="mask", behavior_high=1.2, entropy_coefficient=0.01),
    "by sequence": PpoOptions(sequence_ratio=True, clip_low=0.05, clip_high=0.1),
}


def head_loss(shard, options):
    """(loss, statistics, gradient of hidden from these columns, gradient of these rows of the weight)."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (11, 33))
    labels = torch.randint(0, 33, (11,), generator=generator)
    labels[::4] = -100
    proximal, behavior, advantages = torch.randn(3, 11, generator=generator, dtype=torch.float64)
    h, w = hidden.requires_grad_(), weight[shard.start : shard.stop].clone().requires_grad_()
    given = (labels, proximal - 3, behavior - 3, advantages, HEAD_OPTIONS[options])
    loss, sums = lm_head_ppo_loss(h, w, *given, shard=shard, cu_seqlens=torch.tensor([0, 5, 11]), rows_per_chunk=4)
    loss.backward()
    return [tensor.detach().numpy() for tensor in (loss, torch.stack(list(sums.values())), h.grad, w.grad)]


def head_loss_on_rank(bounds, options):
    dist.init_process_group("gloo")
    start, stop = bounds[dist.get_rank() : dist.get_rank() + 2]
    return head_loss(VocabShard(start, stop, 33, dist.group.WORLD), options)


@pytest.mark.parametrize("options", HEAD_OPTIONS)
def test_loss_of_the_head_over_vocabulary_ranks_is_that_of_one(options):
    loss, sums, by_hidden, by_weight = head_loss(VocabShard(0, 33, 33), options)
    ranks = run_ranks(2, head_loss_on_rank, (0, 12, 33), options)
    assert ranks[0][0].tobytes() == ranks[1][0].tobytes() and ranks[0][1].tobytes() == ranks[1][1].tobytes()
    np.testing.assert_allclose(ranks[0][0], loss, rtol=1e-12)
    np.testing.assert_allclose(ranks[0][1], sums, rtol=1e-12)
    np.testing.assert_allclose(ranks[0][2] + ranks[1][2], by_hidden, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(np.concatenate([rank[3] for rank in ranks]), by_weight, rtol=1e-10, atol=1e-13)


def profiled_step(folder):
    engine = make_engine(folder, LAYOUTS["1"][1]).train()
    loss = LogprobLoss(PolicyLoss(AlgorithmConfig()), temperature=0.7, by_row=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.train_batch(make_batch(), loss, lambda data: data["loss_mask"].count_nonzero())
    return {event.key for event in profile.key_averages()}


@pytest.mark.slow
def test_a_training_step_runs_the_operators_and_no_eager_softmax(tmp_path):
    make_model("llama", tmp_path)
    ran = run_ranks(1, profiled_step, tmp_path)[0]
    names = ("packed_labels", "logprob_partials", "logprob_finish", "logprob_grad_", "ppo_loss")
    assert {f"megatron_rl::{name}" for name in names} <= ran
    assert not {name for name in ran if "log_softmax" in name or "cross_entropy" in name}


def chunked(chunk_bytes):
    """Return the results of the functions on whole logits. The last rank has fewer columns, and a row of padding."""
    head.CHUNK_BYTES = chunk_bytes
    dist.init_process_group("gloo")
    rank, vocab, rows = dist.get_rank(), 97, 11
    generator = torch.Generator().manual_seed(0)
    weight, states, taught = (torch.randn(n, 8, generator=generator) for n in (vocab + 1, rows, rows))
    shard = VocabShard(49 * rank, min(49 * rank + 49, vocab), vocab, dist.group.WORLD)
    own = weight[49 * rank : 49 * rank + 49]
    of_head = Head(None, lambda: own, shard, Axis(dist.group.WORLD, 1, 0))
    packed = SimpleNamespace(predicting=None, trained=torch.arange(rows))
    kept = of_head.kept(states, torch.arange(rows), packed, Cut(top_p=0.8, width=50), 1.0)
    top = of_head.top(states, 5, 1.0)
    sums, gradient = soft_cross_entropy(states, taught, own, shard)
    return head.rows_of_chunk(4 * 49), [*vars(kept).values(), *vars(top).values(), sums, gradient]


def test_ranks_with_different_amounts_of_padding_compute_equal_chunks():
    (whole, expected), _ = run_ranks(2, chunked, head.CHUNK_BYTES)
    # Columns without padding would be 2 rows on one rank and 3 on the other.
    for size, found in run_ranks(2, chunked, 16 * 49 * 3 - 1):
        assert size == 2 and whole > 11
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other)
