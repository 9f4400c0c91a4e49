"""packed_logprobs over gloo ranks that hold uneven slices of the vocabulary, against one process."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

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
