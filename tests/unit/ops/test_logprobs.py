"""ops.logprobs against float64 references."""

import pytest
import torch

from megatron_rl import ops
from tests.kit import operators as reference


def case(rows=7, vocab=33, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(dtype)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[1::3] = -100
    return logits, labels


# 1 row, 1 column, an odd vocabulary, bf16 logits; temperature as sampled.
@pytest.mark.parametrize("rows,vocab,dtype", [(7, 33, torch.float32), (1, 1, torch.float32), (5, 1000, torch.bfloat16)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_entropy_and_gradient_equal_float64(rows, vocab, dtype, temperature):
    logits, labels = case(rows, vocab, dtype)
    ours = logits.clone().requires_grad_()
    truth = logits.double().requires_grad_()
    weights = torch.arange(1.0, rows + 1)
    for x, function in ((ours, ops.gather_logprobs_entropy), (truth, reference.logprobs_entropy)):
        logprobs, entropy = function(x, labels, temperature=temperature)
        ((logprobs + 0.3 * entropy) * weights.to(logprobs.dtype)).sum().backward()
        results = (logprobs.detach(), entropy.detach(), x.grad)
        if x is ours:
            found = results
    for mine, exact in zip(found, results, strict=True):
        tolerance = 1e-5 if mine.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance)


def test_ignored_rows_give_zero_and_no_gradient():
    logits, labels = case()
    logits[1] = float("nan")  # row 1 is ignored
    logits.requires_grad_()
    logprobs, entropy = ops.gather_logprobs_entropy(logits, labels)
    assert logprobs[1] == 0 and entropy[1] == 0
    assert torch.isfinite(logprobs[labels >= 0]).all()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 9999.0]])
    logprobs, entropy = ops.gather_logprobs_entropy(logits, torch.tensor([2]))
    torch.testing.assert_close(logprobs, torch.tensor([-1.0 - torch.tensor(-1.0).exp().log1p().item()]))
    assert 0 < entropy < 1


# one chunk, several, and more chunks than rows divide evenly
@pytest.mark.parametrize("rows_per_chunk", [1024, 2, 3])
def test_head_in_chunks_equals_full_logits(rows_per_chunk):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=generator), torch.randn(17, 8, generator=generator)
    labels = torch.tensor([3, -100, 16, 0, -100, 5, 5, 2, -100])
    grads = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            shard = ops.VocabShard(0, 17, 17)
            logprobs, entropy = ops.lm_head_logprobs(
                h, w, labels, shard=shard, temperature=0.7, rows_per_chunk=rows_per_chunk
            )
        else:
            logprobs, entropy = reference.logprobs_entropy(h @ w.T, labels, temperature=0.7)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        grads.append((logprobs.detach(), entropy.detach(), h.grad, w.grad))
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


def test_head_without_trained_rows_keeps_the_graph():
    hidden = torch.randn(3, 4, requires_grad=True)
    logprobs, _ = ops.lm_head_logprobs(hidden, torch.randn(5, 4), torch.full((3,), -100), shard=ops.VocabShard(0, 5, 5))
    logprobs.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros(3, 4))


def test_batch_dimension_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"\[T\] labels.*squeeze"):
        ops.gather_logprobs(torch.zeros(1, 3, 5), torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("shard", [ops.VocabShard(-1, 3, 4), ops.VocabShard(0, 5, 10)])
def test_columns_that_cannot_be_are_refused(shard):
    with pytest.raises(ValueError, match="shard = columns .* starts below 0, or lacks the group"):
        ops.gather_logprobs(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), shard=shard)


def test_logits_keep_their_columns_through_elementwise_operations():
    shard = ops.VocabShard(0, 4, 8)
    logits = ops.VocabParallelLogits.wrap(torch.randn(3, 4), shard)
    assert (logits / 0.7).shard is shard and logits[:2].shard is shard and logits.float().shard is shard
    assert type(logits.sum(-1)) is torch.Tensor
    for normalise in (torch.softmax, torch.nn.functional.log_softmax, torch.logsumexp):
        with pytest.raises(ValueError, match="columns 0 to 4 of 8"):
            normalise(logits, -1)


def test_a_softmax_over_split_columns_is_refused_however_the_logits_are_given():
    logits = ops.VocabParallelLogits.wrap(torch.randn(3, 4), ops.VocabShard(0, 4, 8))
    joined, cut = torch.cat([logits, logits]), logits.split(2)[1]
    for given in ({"input": logits}, {"input": joined}, {"input": cut}):
        with pytest.raises(ValueError, match="columns 0 to 4 of 8"):
            torch.softmax(**given, dim=-1)
    assert type(torch.cat([logits, logits], dim=-1)) is torch.Tensor


def test_softmax_of_whole_logits_is_allowed():
    logits = ops.VocabParallelLogits.wrap(torch.randn(3, 4), ops.VocabShard(0, 4, 4))
    torch.testing.assert_close(logits.softmax(-1).as_subclass(torch.Tensor).sum(-1), torch.ones(3))
