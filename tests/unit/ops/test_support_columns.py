"""Log-probabilities over supports: the head against a masked dense softmax, and what a run of them adds up to."""

import pytest
import torch

from megatron_rl import ops
from megatron_rl.ops import PpoOptions
from megatron_rl.support import NO_TOKEN
from tests.kit import operators as reference
from tests.kit.largest_tensor import LargestTensor
from tests.kit.operators import lm_head_ppo_loss

VOCAB, ROWS, WIDTH = 33, 12, 6
SHARD = ops.VocabShard(0, VOCAB, VOCAB)


def rows_with_supports(dtype=torch.float64):
    """Return hidden, weight with padding, labels of which some are missing, and supports of which some are whole."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).to(dtype) for n in (ROWS, VOCAB + 7))
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    support = torch.full((ROWS, WIDTH), NO_TOKEN, dtype=torch.int32)
    for row in range(ROWS):
        others = [token for token in torch.randperm(VOCAB, generator=generator).tolist() if token != labels[row]]
        chosen = [int(labels[row]), *sorted(others[: row % WIDTH])]  # of one token up to all places
        support[row, : len(chosen)] = torch.tensor(chosen)
    support[3::5] = NO_TOKEN
    # Rows over the whole vocabulary, with the tokens whose logits are changed: three, of which one may be the label.
    support[3::5, 1:4] = torch.stack([labels[3::5], (labels[3::5] + 5) % VOCAB, (labels[3::5] + 11) % VOCAB], 1).int()
    support[8, 1] = NO_TOKEN
    labels[::4] = -100
    return hidden, weight, labels, support


def adjustments_of(support, size):
    """Return random adjustments of supports, of which some change nothing. None if size is 0."""
    if not size:
        return None
    generator = torch.Generator().manual_seed(2)
    found = torch.randn(*support.shape, size, generator=generator)
    if size == 3:
        found[:, :, 1] = found[:, :, 1].abs().clamp(0.2, 1.8)
        found[:, ::3, 1] = 0.0
    found[::4] = 0.0
    return found.masked_fill((support < 0)[:, :, None], 0.0)


def through_whole_logits(hidden, weight, labels, support, temperature, adjustment=None):
    return reference.logprobs_entropy(hidden @ weight[:VOCAB].T, labels, temperature, support, adjustment)


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("rows_per_chunk", [100, 4, 1])
def test_the_head_equals_a_masked_softmax_with_its_gradient(rows_per_chunk, size):
    hidden, weight, labels, support = rows_with_supports()
    adjustment = adjustments_of(support, size)
    slopes = torch.randn(2, ROWS, dtype=torch.float64)
    results = []
    for by_head in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if by_head:
            more = {"shard": SHARD, "temperature": 0.7, "rows_per_chunk": rows_per_chunk, "support": support}
            logprobs, entropy = ops.lm_head_logprobs(h, w, labels, **more, adjustment=adjustment)
        else:
            logprobs, entropy = through_whole_logits(h, w, labels, support, 0.7, adjustment)
        (logprobs * slopes[0] + entropy * slopes[1]).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), h.grad, w.grad))
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)
    assert results[0][0][labels == support[:, 0]].ne(0).any()
    unchanged = through_whole_logits(hidden, weight, labels, support, 0.7)[0]
    assert (results[0][0] - unchanged).abs().max() > 0.1 or not size


@pytest.mark.parametrize(("rows_per_chunk", "size"), [(100, 0), (4, 0), (4, 3)])
@pytest.mark.parametrize(
    "options",
    [
        PpoOptions(behavior="mask", behavior_high=1.2, kl_coefficient=0.1, entropy_coefficient=0.01),
        PpoOptions(sequence_ratio=True, clip_low=0.05, clip_high=0.1),
    ],
    ids=["by token", "by sequence"],
)
def test_loss_kl_and_entropy_are_over_the_supports(options, rows_per_chunk, size):
    hidden, weight, labels, support = rows_with_supports()
    adjustment = adjustments_of(support, size)
    cu_seqlens, mask = torch.tensor([0, 5, 5, ROWS]), labels >= 0
    exact = through_whole_logits(hidden, weight, labels, support, 0.7, adjustment)[0]
    noise = torch.randn(4, ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given, results = (*(exact + 0.2 * noise[i] for i in range(2)), noise[3]), []
    more = {"ref_logprobs": exact + 0.2 * noise[2], "cu_seqlens": cu_seqlens, "normalizer": 3.0}
    for by_head in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if by_head:
            of_head = {"shard": SHARD, "temperature": 0.7, "rows_per_chunk": rows_per_chunk, "support": support}
            of_head |= {"adjustment": adjustment}
            loss, _ = lm_head_ppo_loss(h, w, labels, *given, options, **more, **of_head)
        else:
            logprobs, entropy = through_whole_logits(h, w, labels, support, 0.7, adjustment)
            loss = reference.ppo_loss(logprobs, *given, mask, options, entropy=entropy, **more)
        loss.backward()
        results.append((loss.detach(), h.grad, w.grad))
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sixteen_bit_weights_give_the_float64_result_as_near_as_a_whole_row_does(dtype):
    hidden, weight, labels, support = (
        part.to(dtype) if part.is_floating_point() else part for part in rows_with_supports()
    )
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for size in (0, 3):
        more = {"support": support, "adjustment": adjustments_of(support, size)}
        found = ops.lm_head_logprobs(hidden, weight, labels, shard=SHARD, **more)
        right = through_whole_logits(hidden.double(), weight.double(), labels, support, 1.0, more["adjustment"])
        for mine, exact in zip(found, right, strict=True):
            torch.testing.assert_close(mine, exact.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows_per_chunk", [100, 4])
def test_changed_logits_of_sixteen_bit_weights_are_not_rounded(rows_per_chunk):
    hidden, weight, labels, support = rows_with_supports()
    # Small integers: 16-bit logits are exact, and only changes by fractions could be rounded.
    hidden, weight = (part.round().to(torch.bfloat16) for part in (hidden, weight))
    adjustment = adjustments_of(support, 3)
    slopes = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(3))
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        h, w = (part.to(dtype, copy=True).requires_grad_() for part in (hidden, weight))
        more = {"shard": SHARD, "support": support, "adjustment": adjustment, "rows_per_chunk": rows_per_chunk}
        logprobs, entropy = ops.lm_head_logprobs(h, w, labels, temperature=0.7, **more)
        loss = (logprobs * slopes[0] + entropy * slopes[1]).sum()
        loss.backward()
        options, own, advantages = PpoOptions(entropy_coefficient=0.1), logprobs.detach(), slopes[1]
        by_loss = lm_head_ppo_loss(h, w, labels, own, own, advantages, options, temperature=0.7, **more)[0]
        results.append([part.double() for part in (logprobs, entropy, by_loss, h.grad, w.grad)])
    for mine, exact in list(zip(*results, strict=True))[:3]:
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
    for mine, exact in list(zip(*results, strict=True))[3:]:  # whose own dtype is 16-bit
        assert (mine - exact).norm() < 0.01 * exact.norm()


def test_an_unchanged_policy_has_ratios_of_one_in_any_microbatch():
    hidden, weight, labels, support = rows_with_supports(torch.float32)
    whole = ops.lm_head_logprobs(hidden, weight, labels, shard=SHARD, support=support)[0]
    parts = [
        ops.lm_head_logprobs(hidden[a:b], weight, labels[a:b], shard=SHARD, support=support[a:b], rows_per_chunk=2)[0]
        for a, b in ((0, 5), (5, ROWS))
    ]
    ratios = (whole - torch.cat(parts)).exp()
    torch.testing.assert_close(ratios, torch.ones(ROWS), rtol=0, atol=1e-6)
    # Wider supports of the same tokens are the same numbers, bit by bit.
    wider = torch.nn.functional.pad(support, (0, 9), value=NO_TOKEN)
    assert torch.equal(whole, ops.lm_head_logprobs(hidden, weight, labels, shard=SHARD, support=wider)[0])


def test_logits_outside_a_support_change_nothing_and_get_no_gradient():
    weight = torch.randn(VOCAB, 8, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(1, 8, dtype=torch.float64)
    labels, support = torch.tensor([4]), torch.tensor([[4, 7, 20, NO_TOKEN]], dtype=torch.int32)
    logprobs, entropy = ops.lm_head_logprobs(hidden, weight, labels, shard=SHARD, support=support)
    (logprobs + entropy).sum().backward()
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[[4, 7, 20]] = False
    assert weight.grad[~outside].ne(0).all() and weight.grad[outside].eq(0).all()
    with torch.no_grad():
        weight[outside] = 100.0
    assert torch.equal(logprobs, ops.lm_head_logprobs(hidden, weight, labels, shard=SHARD, support=support)[0])


def test_memory_is_one_chunk_of_logits_as_without_supports():
    hidden, weight = torch.randn(400, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    labels, shard = torch.arange(400), ops.VocabShard(0, 1000, 1000)
    support = torch.stack([labels, labels + 1], dim=1).int()
    given = (labels, None, None, torch.ones(400), PpoOptions())
    options = {"shard": shard, "rows_per_chunk": 20, "support": support, "adjustment": torch.ones(400, 2, 3)}
    with LargestTensor() as largest:
        lm_head_ppo_loss(hidden, weight, *given, **options)[0].backward()
        ops.lm_head_logprobs(hidden, weight, labels, **options)[0].sum().backward()
    assert largest.nbytes == 20 * 1000 * 4
