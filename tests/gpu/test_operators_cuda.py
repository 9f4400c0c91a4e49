"""The CUDA kernels against float64 and against the CPU operators, on the rows that have gone wrong elsewhere."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl import ops
from megatron_rl.ops import PpoOptions, packed_gae, packed_labels, packed_logprobs, ppo_loss
from tests.kit import operators as reference
from tests.kit.operators import lm_head_ppo_loss
from tests.unit.logit_cases import KINDS, WIDTHS, assert_rounded, exact, rows
from tests.unit.ops.test_gae_operator import LENGTHS
from tests.unit.ops.test_gae_operator import case as gae_case
from tests.unit.ops.test_ppo_loss import CU_SEQLENS, OPTIONS
from tests.unit.ops.test_ppo_loss import case as ppo_case

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def forward_backward(logits, labels, grad_logprobs, grad_entropy, **options):
    x = logits.cuda().requires_grad_()
    results = packed_logprobs(x * 1, labels.cuda(), return_entropy=True, **options)
    torch.autograd.backward(results, (grad_logprobs.cuda(), grad_entropy.cuda()))
    return [tensor.detach() for tensor in (*results, x.grad)]


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
        torch.testing.assert_close(mine.double().cpu(), right, rtol=1e-6, atol=limit)
    assert_rounded(found[2], true[2], dtype, atol=1e-6)


@pytest.mark.parametrize("width", (*WIDTHS, 128256, 151936, 262144))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width_repeats_and_a_row_alone_or_unaligned_has_the_same_bits(width, dtype):
    logits, labels = rows("normal", width, dtype, count=5)
    gradients = torch.randn(2, 5)
    found = forward_backward(logits, labels, *gradients)
    for mine, right in zip(found, exact(logits, labels, 1.0, *gradients), strict=True):
        assert_rounded(mine, right, mine.dtype, atol=5e-6)
    again = forward_backward(logits, labels, *gradients)
    alone = forward_backward(logits[1:2], labels[1:2], *gradients[:, 1:2])
    store = torch.full((5, width + 5), float("nan"), dtype=dtype, device="cuda")
    store[:, 3 : 3 + width] = logits.cuda()
    x = store[:, 3 : 3 + width].requires_grad_()
    results = packed_logprobs(x, labels.cuda(), return_entropy=True)
    unaligned = (*results, torch.autograd.grad(results, x, list(gradients.cuda()))[0])
    for mine, second, one, other in zip(found, again, alone, unaligned, strict=True):
        assert torch.equal(mine, second) and torch.equal(mine[1:2], one) and torch.equal(mine, other.detach())


@pytest.mark.parametrize("count,width", [(16500, 131072), (33000, 131072)])
def test_more_than_two_and_four_thousand_million_logits(count, width):
    logits = torch.zeros(count, width, dtype=torch.bfloat16, device="cuda")
    logits[-1, -1] = 20.0
    labels = torch.full((count,), width - 1, device="cuda")
    logprobs = packed_logprobs(logits, labels)
    true = exact(logits[-1:], labels[-1:])[0]
    torch.testing.assert_close(logprobs[-1:].double().cpu(), true, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(float(logprobs[0]), -float(torch.tensor(float(width)).log()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_policy_loss_equals_the_cpu(options):
    results = []
    for device in ("cpu", "cuda"):
        columns = (tensor.to(device) for tensor in ppo_case(torch.float32))
        logprobs, proximal, behavior, advantages, mask, ref, entropy, weights = columns
        own, h = logprobs.requires_grad_(), entropy.requires_grad_()
        more = {"ref_logprobs": ref, "entropy": h, "row_weights": weights, "cu_seqlens": CU_SEQLENS.to(device)}
        loss, sums = ppo_loss(own, proximal, behavior, advantages, mask, options, **more)
        slopes = torch.autograd.grad(loss, (own, h), allow_unused=True, materialize_grads=True)
        results.append([t.detach().cpu() for t in (loss, *slopes, torch.stack(list(sums.values())))])
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("behavior", ["mask", "clamp"])
def test_infinite_and_unknown_weights_are_as_on_the_cpu(behavior, by_sequence):
    """One of each in the first sequence, of three pieces, and one that is NaN in the other, of six."""
    options = PpoOptions(behavior=behavior, behavior_by_sequence=by_sequence, behavior_low=0.9, behavior_high=1.1)
    results = []
    for device in ("cpu", "cuda"):
        logprobs, proximal, sampler, advantages, mask, *_ = (tensor.to(device) for tensor in ppo_case(torch.float32))
        for place, value in ((10, "inf"), (300, "-inf"), (1000, "nan")):
            mask[place], sampler[place] = True, float(value)
        own = logprobs.requires_grad_()
        bounds = CU_SEQLENS.to(device)
        loss, sums = ppo_loss(own, proximal, sampler, advantages, mask, options, cu_seqlens=bounds)
        slopes = torch.autograd.grad(loss, own)[0]
        results.append([t.detach().cpu() for t in (loss, slopes, torch.stack(list(sums.values())))])
        assert sums["not_finite"] == 3 and not slopes[1000] and slopes.isfinite().all()
        assert bool(slopes[:700].any()) != by_sequence and slopes[701:].any()
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_advantages_and_labels_equal_the_cpu(lengths):
    rewards, values, mask, cu_seqlens, bootstrap = gae_case(lengths)
    ids = torch.arange(len(values))
    results = []
    for device in ("cpu", "cuda"):
        rows = [t.to(device) for t in (rewards, values, mask, cu_seqlens)]
        both = packed_gae(*rows, discount=0.97, trace_decay=0.9, bootstrap=bootstrap.to(device))
        results.append([t.cpu() for t in (*both, *packed_labels(ids.to(device), rows[3], rows[2]))])
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)


def test_the_whole_step_replays_as_a_graph():
    logits, labels = rows(width=5000, dtype=torch.bfloat16)
    x, y, zeros = logits.cuda(), labels.cuda(), torch.zeros(6, device="cuda")
    mask, advantages = y >= 0, torch.randn(6, device="cuda")

    def step():
        own = x.detach().requires_grad_()
        logprobs, entropy = packed_logprobs(own, y, return_entropy=True)
        loss, _ = ppo_loss(
            logprobs, None, zeros, advantages, mask, PpoOptions(entropy_coefficient=0.1), entropy=entropy
        )
        return loss.detach(), torch.autograd.grad(loss, own)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = [tensor.clone() for tensor in step()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


class RowsOfLogits(TorchDispatchMode):
    """Finds for each dtype the most rows of the tensors that are made with so many columns, of hidden size 64."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.rows = columns, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (self.columns,) and len(tensor) != 64:
                self.rows[tensor.dtype] = max(self.rows.get(tensor.dtype, 0), len(tensor))
        return result


# Three chunks of 40 rows, of four parts each and the last of two, and one of all; a loss by token and by sequence.
@pytest.mark.parametrize("rows_per_chunk", [16, 100])
@pytest.mark.parametrize(
    "options", [PpoOptions(), PpoOptions(sequence_ratio=True, entropy_coefficient=0.1)], ids=["by token", "by sequence"]
)
def test_head_in_chunks_equals_whole_logits_in_bfloat16(options, rows_per_chunk):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (50, 1000))
    labels = torch.randint(0, 1000, (50,), generator=generator)
    labels[::5] = -100
    zeros, advantages = torch.zeros(50), torch.randn(50, generator=generator)
    true_h, true_w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprobs, entropy = reference.logprobs_entropy(true_h @ true_w.T, labels)
    mask, bounds = labels >= 0, torch.tensor([0, 17, 50])
    given = (None, zeros.double(), advantages.double(), mask, options)
    true = reference.ppo_loss(logprobs, *given, entropy=entropy, cu_seqlens=bounds)
    true.backward()
    h, w = hidden.cuda().requires_grad_(), weight.cuda().requires_grad_()
    shard = ops.VocabShard(0, 1000, 1000)
    given, more = (zeros.cuda(), advantages.cuda(), options), {"shard": shard, "rows_per_chunk": rows_per_chunk}
    with RowsOfLogits(1000) as most:
        loss, _ = lm_head_ppo_loss(h, w, labels.cuda(), None, *given, **more, cu_seqlens=bounds.cuda())
        if options.by_sequence:
            most.rows.clear()  # its first sweep keeps the logits of a whole chunk, or all for the second
        loss.backward()
    part = 40 if options.by_sequence and rows_per_chunk == 100 else -(-rows_per_chunk // 4)
    assert most.rows == {torch.bfloat16: min(rows_per_chunk, 40), torch.float32: part}
    for mine, right in ((h.grad, true_h.grad), (w.grad, true_w.grad)):
        error = (mine.double().cpu() - right).norm() / right.norm()
        assert error < 1e-2
    torch.testing.assert_close(float(loss), float(true), rtol=1e-3, atol=1e-3)


def test_what_cuda_does_not_have_is_named():
    logits, labels = rows()
    with pytest.raises(RuntimeError, match="logits has dtype"):
        packed_logprobs(logits.double().cuda(), labels.cuda())
    with pytest.raises(ValueError, match="labels is on cpu"):
        packed_logprobs(logits.cuda(), labels)
