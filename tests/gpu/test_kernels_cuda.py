"""Each kernel against the CPU operator of the same name, in the words of csrc/schemas.h."""

import pytest
import torch

from megatron_rl.ops.library import ops
from megatron_rl.ops.ppo import PPO_SUMS
from tests.kit import operators as reference
from tests.unit.logit_cases import KINDS, rows
from tests.unit.ops.test_gae_operator import LENGTHS
from tests.unit.ops.test_gae_operator import case as gae_case
from tests.unit.ops.test_ppo_loss import CU_SEQLENS, OPTIONS, wild_case
from tests.unit.ops.test_ppo_loss import case as ppo_case

pytestmark = pytest.mark.gpu
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def on(device, arguments):
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in arguments]


def logprobs_by(device, logits, labels, columns, start=0, temperatures=None):
    logits, labels, temperatures = on(device, (logits, labels, temperatures))
    partials = ops.logprob_partials(logits, labels, 0.7, temperatures, start, columns)
    only = ops.logprob_partials(logits, labels, 0.7, temperatures, start, columns, with_entropy=False)
    assert only[:, labels >= 0, 2].isnan().all()
    same = [part[:, :, [0, 1, 3]].nan_to_num(1e30) for part in (only, partials)]
    assert torch.equal(*same), "a log-probability is the same bits with entropy and without"
    folded = ops.logprob_fold(partials, labels, 0.7, temperatures)
    vocabulary = start + columns
    results = ops.logprob_finish(logits, partials, labels, 0.7, temperatures, start, columns, vocabulary, False)
    logprobs, entropy, peak, log_sum = results
    once = ops.logprob_finish(logits, folded, labels, 0.7, temperatures, start, columns, vocabulary, False)
    for other, mine in zip(once, results, strict=True):
        torch.testing.assert_close(other, mine, rtol=1e-6, atol=1e-6, equal_nan=True)
    generator = torch.Generator().manual_seed(1)
    by_logprob, by_entropy = torch.randn(2, len(labels), generator=generator).to(device).unbind()
    saved = (labels, peak, log_sum, entropy)
    rest = (0.7, temperatures, start, columns)
    gradients = [
        ops.logprob_grad(logits, *saved, by_logprob, None, *rest),
        ops.logprob_grad(logits, *saved, by_logprob, by_entropy, *rest),
    ]
    if logits.dtype == torch.float32:
        narrow = [torch.empty_like(logits, dtype=to) for to in SIXTEEN_BITS]
        for grad in narrow:
            ops.logprob_grad_into(grad, logits, *saved, by_logprob, by_entropy, *rest)
        assert all(torch.equal(grad.nan_to_num(), gradients[1].to(grad.dtype).nan_to_num()) for grad in narrow)
    overwritten = logits.clone()
    ops.logprob_grad_(overwritten, *saved, by_logprob, by_entropy, *rest)
    assert torch.equal(overwritten.nan_to_num(), gradients[1].nan_to_num())
    return [tensor.cpu() for tensor in (logprobs, entropy, peak, *gradients)]


def assert_agree(*arguments, **options):
    found, right = logprobs_by("cuda", *arguments, **options), logprobs_by("cpu", *arguments, **options)
    for mine, true in zip(found, right, strict=True):
        tolerance = max(torch.finfo(mine.dtype).eps, 2e-6)
        torch.testing.assert_close(mine, true, rtol=tolerance, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# a piece of 16 bytes and less, several tiles with an aligned and an unaligned tail
@pytest.mark.parametrize("width", [1, 7, 8, 1000, 16392, 20001])
def test_log_prob_kernels_equal_the_cpu_operator(width, dtype):
    assert_agree(*rows("normal", width, dtype, count=4), width)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "normal"])
def test_log_prob_kernels_on_difficult_rows(kind):
    logits, labels = rows(kind, 100)
    if kind == "masked":
        logits[3, 50], logits[4], logits[5, 3] = float("nan"), float("-inf"), float("inf")
    assert_agree(logits, labels, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_prob_kernels_on_whole_tiles_with_infinities_nan_and_products_that_overflow(dtype):
    logits, labels = rows("normal", 40000, dtype, count=7)
    logits[0, ::3] = float("-inf")
    logits[1, 100], logits[1, 200] = 3e38, -3e38  # times log2(e) / 0.7 both are infinite
    logits[2, 777] = float("nan")
    logits[3, :20000] = float("-inf")
    logits[4, 5] = float("inf")
    logits[5, :16384] = float("nan")
    logits[6] = 1000.0
    labels[1], labels[3] = 100, 30000
    assert_agree(logits, labels, 40000)


def test_a_tensor_on_another_device_is_refused_by_name():
    """torch sends a call to the highest device among its tensors, and does not ask where the others are."""
    numbers, bounds = torch.zeros(3, device="cuda"), torch.tensor([0, 3], device="cuda")
    with pytest.raises(RuntimeError, match="mask is on the CPU and values on CUDA device 0: .*mask.to.values.device"):
        ops.packed_gae(numbers, numbers, torch.ones(3).bool(), bounds, None, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="cu_seqlens is on the CPU and input_ids on CUDA device 0"):
        ops.packed_labels(bounds, bounds.cpu(), None)


# Rows that are aligned and that are not; a part of a warp's columns, a warp's, and a warp's with some of the next's.
@pytest.mark.parametrize("padding", [8, 7])
@pytest.mark.parametrize("width", [64, 1024, 1027])
def test_log_prob_kernels_with_padding_a_shard_and_a_temperature_for_each_row(width, padding):
    logits, labels = rows(width=width)
    padded = torch.nn.functional.pad(logits, (0, padding), value=float("nan"))
    assert_agree(padded, labels + 7, width, start=7, temperatures=torch.rand(6) + 0.5)


# Fewer columns than 16 bytes hold, one tile of two warps and two tiles of five; rows that begin at every place.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [3, 2560, 20000])
def test_log_prob_kernels_give_a_row_the_same_bits_alone_and_unaligned(width, dtype):
    logits, labels = rows(width=width, dtype=dtype, count=9)
    logits[3, ::2] = float("-inf")
    whole = logprobs_by("cuda", logits, labels, width)
    for past, stride in ((0, width + 1 + width % 2), (1, width + 8 + width % 2)):
        store = torch.full((9, stride), float("nan"), dtype=dtype, device="cuda")
        other = store[:, past : past + width]
        other.copy_(logits)
        for a, b in zip(whole, logprobs_by("cuda", other, labels, width), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
    alone = logprobs_by("cuda", logits[1:2], labels[1:2], width)
    assert all(torch.equal(a[1:2], b) for a, b in zip(whole[:3], alone[:3], strict=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_policy_loss_kernel_equals_the_operator(options):
    logprobs, proximal, behavior, advantages, mask, ref, entropy, weights = ppo_case(torch.float32)
    behavior[5] = float("-inf")
    bounds = CU_SEQLENS if options.by_sequence else None
    arguments = (logprobs, proximal, behavior, advantages, mask, ref, entropy, weights, bounds, options.packed(0.5))
    found, again = (ops.ppo_loss(*on("cuda", arguments)) for _ in range(2))
    for mine, twice, right in zip(found, again, ops.ppo_loss(*arguments), strict=True):
        torch.testing.assert_close(mine.cpu(), right, rtol=2e-5, atol=1e-5)
        assert torch.equal(mine, twice)  # the count of finished blocks began anew


def test_policy_loss_kernel_without_tokens_gives_zeros():
    nothing = torch.empty(0)
    for bounds, options in ((None, OPTIONS["ppo"]), (torch.tensor([0]), OPTIONS["gspo"])):
        arguments = (nothing, None, None, nothing, nothing.bool(), None, None, None, bounds, options.packed(1.0))
        loss, sums, *_ = ops.ppo_loss(*on("cuda", arguments))
        assert loss == 0 and torch.equal(sums.cpu(), torch.zeros(len(PPO_SUMS), dtype=torch.float64))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_policy_loss_kernel_bounds_the_same_tokens(options):
    *rows, bounds = wild_case(torch.float32)
    logs, own, proximal, behavior, ref, entropy = (row[::29].contiguous() for row in rows)  # each sequence is a block
    bounds = bounds[: len(own) + 1] if options.by_sequence else None
    advantages, mask = logs[:, 3].contiguous(), torch.ones(len(own)).bool()
    columns = (own, proximal, behavior, advantages, mask, ref, entropy, None, bounds, options.packed(1.0))
    found = [tensor.cpu() for tensor in ops.ppo_loss(*on("cuda", columns))]
    sums, right = (dict(zip(PPO_SUMS, results[1], strict=True)) for results in (found, ops.ppo_loss(*columns)))
    assert sums["bounded_tokens"] == right["bounded_tokens"] > 0 and sums["not_finite"] == right["not_finite"] == 0
    assert all(tensor.isfinite().all() for tensor in found)


SPLITS = {
    "pieces of one sequence by the hundred": (70000,),
    "more sequences than threads, many of them empty": (1,) * 300 + (0,) * 60 + (1500,),
    "ends before, at and behind a tile's": (1023, 1, 1024, 0, 0, 1025, 256, 255, 257),
    "nothing but empty ones": (0, 0, 0),
}


@pytest.mark.parametrize("trained", [0.01, 0.7])
@pytest.mark.parametrize("lengths", [*LENGTHS, *SPLITS.values()], ids=[*map(str, LENGTHS), *SPLITS])
def test_advantage_kernel_equals_the_operator_and_repeats(lengths, trained):
    arguments = (*gae_case(lengths, trained=trained), 0.97, 0.9)
    found, again = (ops.packed_gae(*on("cuda", arguments)) for _ in range(2))
    for mine, twice, right in zip(found, again, ops.packed_gae(*arguments), strict=True):
        torch.testing.assert_close(mine.cpu(), right, rtol=1e-6, atol=1e-6)
        assert torch.equal(mine, twice)


@pytest.mark.parametrize("discount", [0.97, 0.0])
def test_advantage_kernel_keeps_numbers_that_are_none_in_their_sequence(discount):
    rewards, values, mask, bounds, bootstrap = gae_case((700, 600, 1500), trained=1.0)
    rewards[1000], values[2000], bootstrap[2] = float("nan"), float("inf"), float("nan")
    for mine in ops.packed_gae(*on("cuda", (rewards, values, mask, bounds, bootstrap, discount, 0.9))):
        assert mine[:700].isfinite().all() and mine[1001:1300].isfinite().all() and mine[1000].isnan()
        assert not mine[2000].isfinite()


@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS)
def test_policy_loss_kernel_by_sequence_equals_the_operator_on_any_split(lengths):
    generator, count = torch.Generator().manual_seed(0), sum(lengths)
    own, *noise = torch.randn(4, count, generator=generator)
    mask, bounds = torch.rand(count, generator=generator) < 0.7, torch.tensor([0, *lengths]).cumsum(0)
    columns = (own, own + 0.1 * noise[0], own + 0.2 * noise[1], noise[2], mask, None, None, None, bounds)
    arguments = (*columns, OPTIONS["gspo, clamped sequence weight"].packed(0.5))
    found, again = (ops.ppo_loss(*on("cuda", arguments)) for _ in range(2))
    # of the statistics: a sequence's ratio is rounded once, and its deviation from 1 added for each token
    limits = (1e-5, 1e-5 + 3e-7 * count, 1e-5, 1e-5)
    for mine, twice, right, limit in zip(found, again, ops.ppo_loss(*arguments), limits, strict=True):
        torch.testing.assert_close(mine.cpu(), right, rtol=2e-5, atol=limit)
        assert torch.equal(mine, twice)


# none, an empty sequence between others, one of one token, more than a block of the kernel
@pytest.mark.parametrize("lengths", [(), (3, 0, 1, 4), (300, 1, 20)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_labels_kernel_equals_the_reference(lengths, masked):
    generator = torch.Generator().manual_seed(0)
    total, cu_seqlens = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(0, 99, (total,), generator=generator)
    mask = torch.rand(total, generator=generator) < 0.5 if masked else None
    arguments = (ids, cu_seqlens, mask)
    for mine, right in zip(ops.packed_labels(*on("cuda", arguments)), reference.packed_labels(*arguments), strict=True):
        assert torch.equal(mine.cpu(), right)


def test_a_row_past_four_thousand_million_logits_is_found_where_all_others_are_masked():
    count, stride, width = 66000, 65536, 1000  # and more rows than a grid is high
    logits = torch.empty(count, stride, dtype=torch.bfloat16, device="cuda")[:, :width]  # one row is written and read
    logits[-1] = rows(width=width, dtype=torch.bfloat16, count=1)[0][0].cuda()
    labels = torch.full((count,), -100).index_fill(0, torch.tensor([count - 1]), 5)
    found = ops.logprob_partials(logits, labels.cuda(), 1.0, None, 0, width)[:, -1]
    right = ops.logprob_partials(logits[-1:].cpu(), labels[-1:], 1.0, None, 0, width)[:, 0]
    torch.testing.assert_close(found.cpu(), right, rtol=1e-5, atol=1e-5)
