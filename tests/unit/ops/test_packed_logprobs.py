"""packed_logprobs on the CPU: against float64, bit for bit where it promises that, and with bad input."""

import pytest
import torch
from torch.library import opcheck

from megatron_rl.ops import VocabShard, lm_head_logprobs, packed_logprobs
from megatron_rl.ops.library import ops
from tests.kit import operators as reference
from tests.unit.logit_cases import KINDS, WIDTHS, assert_rounded, exact, rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def forward_backward(logits, labels, grad_logprobs, grad_entropy, **options):
    x = logits.clone().requires_grad_()
    logprobs, entropy = packed_logprobs(x * 1, labels, return_entropy=True, **options)
    torch.autograd.backward((logprobs, entropy), (grad_logprobs, grad_entropy))
    return logprobs.detach(), entropy.detach(), x.grad


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradient_equal_float64(kind, dtype, inplace):
    logits, labels = rows(kind, 1000, dtype)
    gradients = (torch.randn(6), torch.randn(6))
    found = forward_backward(logits, labels, *gradients, inplace_backward=inplace)
    true = exact(logits, labels, 1.0, *gradients)
    limit = 5e-6 * max(1.0, float(logits.double().masked_fill(logits.isinf(), 0.0).abs().max()) / 64)
    for mine, right in zip(found[:2], true[:2], strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-6, atol=limit)
    assert_rounded(found[2], true[2], dtype, atol=5e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_without_entropy_are_the_same_bits(kind, dtype):
    logits, labels = rows(kind, 1100, dtype)
    both = forward_backward(logits, labels, torch.ones(6), torch.zeros(6))
    x = logits.clone().requires_grad_()
    logprobs = packed_logprobs(x, labels)
    logprobs.sum().backward()
    assert torch.equal(logprobs, both[0]) and torch.equal(x.grad, both[2])
    hidden, weight = (torch.randn(n, 8) for n in (3, 33))
    for chunk in (2, 3):
        given = {"shard": VocabShard(0, 33, 33), "rows_per_chunk": chunk}
        found, none = lm_head_logprobs(hidden, weight, torch.arange(3), **given, with_entropy=False)
        assert torch.equal(found, lm_head_logprobs(hidden, weight, torch.arange(3), **given)[0]) and none.isnan().all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width_and_a_strided_unaligned_row(width, dtype):
    logits, labels = rows("normal", width, dtype)
    store = torch.full((6, width + 5), float("nan"), dtype=dtype)
    store[:, 3 : 3 + width] = logits
    gradients = (torch.randn(6), torch.randn(6))
    plain = forward_backward(logits, labels, *gradients)
    x = store[:, 3 : 3 + width].requires_grad_()
    logprobs, entropy = packed_logprobs(x, labels, return_entropy=True)
    gradient = torch.autograd.grad((logprobs, entropy), x, gradients)[0]
    for mine, other in zip((logprobs, entropy, gradient), plain, strict=True):
        assert torch.equal(mine, other)
    for mine, right in zip(plain, exact(logits, labels, 1.0, *gradients), strict=True):
        assert_rounded(mine, right, mine.dtype, atol=5e-6)


@pytest.mark.parametrize("temperature", [0.01, 0.7, 100.0, torch.tensor([0.01, 0.5, 1.0, 2.0, 100.0, 1.0])], ids=str)
def test_temperature_for_all_rows_or_each(temperature):
    logits, labels = rows()
    found = forward_backward(logits, labels, torch.ones(6), torch.ones(6), temperature=temperature)
    for mine, right in zip(found, exact(logits, labels, temperature, torch.ones(6), torch.ones(6)), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=2e-6, atol=1e-4 if mine.ndim == 2 else 2e-5)


def test_gradient_in_double_equals_finite_differences():
    logits, labels = rows(width=7, dtype=torch.float64)
    labels = labels.clamp_max(5)
    x = logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: packed_logprobs(x, labels, temperature=0.7, return_entropy=True, shard=VocabShard(0, 6, 6)), (x,)
    )


def test_padded_columns_are_never_read_and_get_gradient_zero():
    logits, labels = rows(width=40)
    labels[labels >= 33] = 5
    dirty = logits.clone()
    dirty[:, 33:] = float("nan")
    found = forward_backward(dirty, labels, torch.ones(6), torch.ones(6), shard=VocabShard(0, 33, 33))
    true = exact(logits[:, :33], labels, 1.0, torch.ones(6), torch.ones(6))
    torch.testing.assert_close(found[0].double(), true[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[2][:, :33].double(), true[2], rtol=1e-6, atol=1e-6)
    assert (found[2][:, 33:] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_a_distribution_is_nan_and_no_other_is(bad):
    logits, labels = rows()
    clean = forward_backward(logits, labels, torch.ones(6), torch.ones(6))
    logits[3, 700] = bad
    logits[4] = float("-inf")
    found = forward_backward(logits, labels, torch.ones(6), torch.ones(6))
    for mine, other in zip(found, clean, strict=True):
        assert mine[3:5].isnan().flatten(1).any(1).all() if mine.ndim == 2 else mine[3:5].isnan().all()
        assert torch.equal(mine[[0, 1, 2, 5]], other[[0, 1, 2, 5]])


def test_ignored_rows_are_not_read():
    logits, labels = rows()
    logits[2] = float("nan")
    found = forward_backward(logits, labels, torch.ones(6), torch.ones(6))
    assert all((mine[2] == 0).all() for mine in found)
    assert all(mine.isfinite().all() for mine in found)


@pytest.mark.parametrize("count", [0, 1])
def test_no_row_and_one_row(count):
    logits, labels = rows(count=count)
    found = forward_backward(logits, labels, torch.ones(count), torch.ones(count))
    assert [tuple(mine.shape) for mine in found] == [(count,), (count,), (count, 1000)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_repeat_and_do_not_depend_on_the_other_rows_or_threads(dtype):
    logits, labels = rows(width=20001, dtype=dtype, count=9)
    gradients = torch.randn(2, 9)
    whole = forward_backward(logits, labels, *gradients)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    again = forward_backward(logits, labels, *gradients)
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    for i in range(9):
        alone = forward_backward(logits[i : i + 1], labels[i : i + 1], *gradients[:, i : i + 1])
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.parametrize("bounds", [(0, 500, 1000), (0, 1, 999, 1000), (0, 250, 500, 750, 1000)])
def test_slices_of_the_vocabulary_equal_the_whole(bounds):
    """What tensor-parallel ranks compute, without ranks: uneven slices, one column, all through the same operators."""
    logits, labels = rows()
    gradients = (torch.randn(6), torch.randn(6))
    whole = forward_backward(logits, labels, *gradients, temperature=0.7)
    slices = [(a, logits[:, a:b].contiguous()) for a, b in zip(bounds, bounds[1:], strict=False)]
    partials = torch.cat(
        [
            ops.logprob_fold(ops.logprob_partials(x, labels, 0.7, None, a, x.shape[1]), labels, 0.7, None)
            for a, x in slices
        ]
    )
    parts = []
    for a, x in slices:
        x.requires_grad_()
        results = ops.logprob_finish(x, partials, labels, 0.7, None, a, x.shape[1], 1000, False)
        parts.append(torch.autograd.grad(results[:2], x, gradients)[0])
        for mine, right in zip(results[:2], whole, strict=False):
            torch.testing.assert_close(mine, right, rtol=0, atol=2e-6)
    torch.testing.assert_close(torch.cat(parts, 1), whole[2], rtol=1e-5, atol=1e-6)


def test_gradient_in_place_replaces_the_logits_once():
    logits, labels = rows()
    x = logits.clone().requires_grad_()
    y = x * 1
    logprobs = packed_logprobs(y, labels, inplace_backward=True)
    logprobs.sum().backward(retain_graph=True)
    assert torch.equal(y.detach(), x.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_in_16_bits_is_the_float32_gradient_rounded(dtype):
    logits, labels = rows(width=20001, count=4)
    logits, labels[3] = torch.nn.functional.pad(logits, (0, 3)), -100
    partials = ops.logprob_partials(logits, labels, 0.7, None, 0, 20001)
    _, entropy, peak, log_sum = ops.logprob_finish(logits, partials, labels, 0.7, None, 0, 20001, 20001, False)
    slopes = torch.tensor([1.0, -2.0, 3e5, 1.0])  # float16 has subnormal numbers of the first, infinities of the third
    rest = (labels, peak, log_sum, entropy, slopes, torch.ones(4), 0.7, None, 0, 20001)
    found = torch.empty_like(logits, dtype=dtype)
    ops.logprob_grad_into(found, logits, *rest)
    assert torch.equal(found, ops.logprob_grad(logits, *rest).to(dtype))
    with pytest.raises(RuntimeError, match="for bfloat16 logits: their gradient has their dtype"):
        ops.logprob_grad_into(found.half(), logits.bfloat16(), *rest)
    with pytest.raises(
        RuntimeError, match=r"out has shape \[3, 20004\]: a gradient of logits has theirs, \[4, 20004\]"
    ):
        ops.logprob_grad_into(found[:3], logits, *rest)


@pytest.mark.slow
def test_operators_obey_torchs_rules_and_compile_without_a_break():
    logits, labels = rows(width=20)
    x = logits.requires_grad_()
    partials = ops.logprob_partials(logits.detach(), labels, 0.7, None, 0, 20)
    opcheck(ops.logprob_partials.default, (logits.detach(), labels, 0.7, None, 0, 20))
    opcheck(ops.logprob_fold.default, (partials, labels, 0.7, None))
    opcheck(ops.logprob_finish.default, (x, partials, labels, 0.7, None, 0, 20, 20, False))
    _, entropy, peak, log_sum = ops.logprob_finish(logits.detach(), partials, labels, 0.7, None, 0, 20, 20, False)
    rest = (labels, peak, log_sum, entropy, torch.ones(6), None, 0.7, None, 0, 20)
    opcheck(ops.logprob_grad.default, (logits.detach(), *rest))
    opcheck(ops.logprob_grad_into.default, (torch.empty_like(logits).bfloat16(), logits.detach(), *rest))
    opcheck(ops.logprob_grad_.default, (logits.detach().clone(), *rest))

    def loss(x):
        logprobs, entropy = packed_logprobs(x * 2, labels, return_entropy=True, inplace_backward=True)
        return (logprobs + 0.1 * entropy).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], torch.autograd.grad(loss(x), x)[0])


def test_bad_input_is_named():
    logits, labels = rows(width=20)
    cases = [
        ((logits, labels.int()), {}, "labels has dtype torch.int32"),
        ((logits[None], labels), {}, r"labels has shape \(6,\)"),
        ((logits, labels[:5]), {}, r"labels has shape \(5,\)"),
        ((logits.to(torch.int32), labels), {}, "logits has dtype"),
        ((logits.T.contiguous().T, labels), {}, "logits has column stride 6"),
        ((logits, labels + 20), {}, r"labels\[0\] is 20"),
        ((logits, labels), {"temperature": 0.0}, "temperature is 0.0"),
        ((logits, labels), {"temperature": torch.ones(5)}, r"temperature is torch.float32 \(5,\)"),
        ((logits.requires_grad_(), labels), {"inplace_backward": True}, "is a leaf"),
    ]
    for arguments, options, message in cases:
        with pytest.raises((ValueError, RuntimeError), match=message):
            packed_logprobs(*arguments, **options)


def test_reference_ignores_columns_of_probability_zero():
    entropy = reference.logprobs_entropy(torch.tensor([[0.0, 0.0, float("-inf")]]), torch.tensor([0]))[1]
    torch.testing.assert_close(entropy, torch.tensor([2.0]).log())
