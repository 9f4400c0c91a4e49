"""packed_logprobs over gloo ranks that hold uneven slices of the vocabulary, against one process."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import LAYOUTS, make_batch, make_engine, make_model

from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig
from megatron_rl.ops import packed_logprobs
from tests.unit.logit_cases import rows


def on_rank(bounds):
    dist.init_process_group("gloo")
    start, stop = bounds[dist.get_rank() : dist.get_rank() + 2]
    logits, labels = rows()
    x = logits[:, start:stop].clone().requires_grad_()
    split = {"vocab_start": start, "vocab_size": 1000, "tp_group": dist.group.WORLD}
    results = packed_logprobs(x, labels, temperature=0.7, return_entropy=True, **split)
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


def profiled_step(folder):
    engine = make_engine(folder, LAYOUTS["1"][1]).train()
    loss = LogprobLoss(PolicyLoss(AlgorithmConfig()), temperature=0.7)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.train_batch(make_batch(), loss, lambda data: data["loss_mask"].count_nonzero())
    return {event.key for event in profile.key_averages()}


def test_a_training_step_runs_the_operators_and_no_eager_softmax(tmp_path):
    make_model("llama", tmp_path)
    ran = run_ranks(1, profiled_step, tmp_path)[0]
    names = ("logprob_partials", "logprob_finish", "logprob_grad_", "ppo_loss")
    assert {f"megatron_rl::{name}" for name in names} <= ran
    assert not {name for name in ran if "log_softmax" in name or "cross_entropy" in name}
