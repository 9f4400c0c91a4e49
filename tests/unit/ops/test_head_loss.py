"""The head's loss and packed_labels against their plain definitions."""

import weakref

import pytest
import torch
from torch.library import opcheck
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl import ops
from megatron_rl.ops import PpoOptions
from megatron_rl.ops.library import ops as library
from tests.kit import operators as reference
from tests.kit.largest_tensor import LargestTensor
from tests.kit.operators import lm_head_ppo_loss

SHARD = ops.VocabShard(0, 33, 33)


# one chunk, and several with a rest; a loss by token and one by sequence
@pytest.mark.parametrize("rows_per_chunk", [100, 4])
@pytest.mark.parametrize(
    "options",
    [
        PpoOptions(behavior="mask", behavior_high=1.2, kl_coefficient=0.1, entropy_coefficient=0.01),
        PpoOptions(sequence_ratio=True, clip_low=0.05, clip_high=0.1),
    ],
    ids=["by token", "by sequence"],
)
def test_loss_and_gradients_equal_those_through_whole_logits(options, rows_per_chunk):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (11, 33))
    labels = torch.randint(0, 33, (11,), generator=generator)
    labels[::4] = -100
    cu_seqlens, mask = torch.tensor([0, 5, 5, 11]), labels >= 0
    exact = reference.logprobs_entropy(hidden @ weight.T, labels, 0.7)[0]
    noise = torch.randn(4, 11, generator=generator, dtype=torch.float64)
    proximal, behavior, ref = (exact + 0.2 * noise[i] for i in range(3))
    advantages, results = noise[3], []
    for fused in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        more = {"ref_logprobs": ref, "cu_seqlens": cu_seqlens, "normalizer": 3.0}
        given = (proximal, behavior, advantages)
        if fused:
            more |= {"shard": SHARD, "temperature": 0.7, "rows_per_chunk": rows_per_chunk}
            loss, sums = lm_head_ppo_loss(h, w, labels, *given, options, **more)
            assert sums["tokens"] == mask.sum()
        else:
            logprobs, entropy = reference.logprobs_entropy(h @ w.T, labels, 0.7)
            loss = reference.ppo_loss(logprobs, *given, mask, options, entropy=entropy, **more)
        (2 * loss).backward()
        results.append((loss.detach(), h.grad, w.grad))
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)


def test_any_loss_by_row_runs_in_chunks():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 8, generator=generator), torch.randn(33, 8, generator=generator)
    labels = torch.tensor([3, -100, 5, 7, 32, 0])
    rows, wanted = torch.tensor([0, 0, 6, 2, 2, 1]), torch.arange(6.0)
    taken = ops.TakenRows.of(rows[labels >= 0])
    results = []
    for fused in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if fused:

            def loss(logprobs, entropy, places):
                return ((logprobs + wanted[places]) ** 2).sum(), {"entropy": entropy.sum()}

            total, sums = ops.lm_head_loss(h, w, labels, loss, shard=SHARD, rows=taken, rows_per_chunk=2)
            entropy = sums["entropy"]
        else:
            logprobs, entropies = reference.logprobs_entropy(h[rows] @ w.T, labels)
            total, entropy = ((logprobs + wanted) ** 2)[labels >= 0].sum(), entropies.sum().double()
        total.backward()
        results.append((total.detach(), entropy.detach(), h.grad, w.grad))
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_memory_does_not_grow_with_the_rows():
    """The largest tensor alive while the loss is formed is one chunk's logits, or the weight's gradient."""
    hidden, weight = torch.randn(400, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    labels, zeros, shard = torch.arange(400), torch.zeros(400), ops.VocabShard(0, 1000, 1000)
    with LargestTensor() as largest:
        given = (labels, None, None, zeros + 1, PpoOptions())
        lm_head_ppo_loss(hidden, weight, *given, shard=shard, rows_per_chunk=20)[0].backward()
    assert largest.nbytes == 20 * 1000 * 4


def test_one_chunk_of_logits_is_alive_at_a_time():
    """Tensors of a chunk's size that are alive together, forward and backward, in the two sweeps of a head."""
    chunk, alive, most = 20 * 1000 * 4, {}, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            result = func(*args, **(kwargs or {}))
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() == chunk:
                    storage = tensor.untyped_storage()
                    alive[storage._cdata] = weakref.ref(storage, lambda _, key=storage._cdata: alive.pop(key, None))
            most = max(most, len(alive))
            return result

    hidden, weight = torch.randn(400, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    labels, shard = torch.arange(400), ops.VocabShard(0, 1000, 1000)
    given = {"shard": shard, "rows_per_chunk": 20}
    with Watch():
        lm_head_ppo_loss(hidden, weight, labels, None, None, torch.ones(400), PpoOptions(), **given)[0].backward()
        ops.lm_head_logprobs(hidden, weight, labels, **given)[0].sum().backward()
    assert most == 1


# By token: logits, and the gradients of hidden and of the weight. By sequence the logits are formed a second time, but
# where one chunk is all there is. A frozen weight has no gradient.
@pytest.mark.parametrize(
    ("by_sequence", "rows_per_chunk", "is_frozen", "products"),
    [
        (False, 4, False, 3 * 3),
        (True, 4, False, 3 * 4),
        (True, 12, False, 3),
        (False, 4, True, 3 * 2),
        (True, 4, True, 3 * 3),
    ],
)
def test_a_loss_by_sequence_takes_two_sweeps(by_sequence, rows_per_chunk, is_frozen, products):
    count = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal count
            count += func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
            return func(*args, **(kwargs or {}))

    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(33, 8, requires_grad=not is_frozen)
    options, more = PpoOptions(sequence_ratio=by_sequence), {"shard": SHARD, "cu_seqlens": torch.tensor([0, 5, 12])}
    given = (hidden, weight, torch.arange(12), None, None, torch.ones(12), options)
    with Watch():
        lm_head_ppo_loss(*given, **more, rows_per_chunk=rows_per_chunk)[0].backward()
    assert count == products and (weight.grad is None) == is_frozen


# exact: the sum itself; rounded: main gradients of 16 bits, to which the float32 sum over chunks is added once
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")], ids=str)
@pytest.mark.parametrize("by_loss", [True, False], ids=["loss", "logprobs"])
def test_the_gradient_of_the_weight_is_added_to_main_grad(by_loss, dtypes):
    dtype, main_dtype = (getattr(torch, name) for name in dtypes)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).to(dtype) for n in (11, 40))  # 7 columns of padding
    labels = torch.randint(0, 33, (11,), generator=generator)
    before = torch.randn(40, 8, generator=generator).to(main_dtype)

    def gradients(main_grad, is_tied=False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        given = (h, w.detach() if is_tied else w, labels)
        more = {"shard": SHARD, "rows_per_chunk": 4, "main_grad": main_grad}
        if by_loss:
            loss, _ = ops.lm_head_loss(*given, lambda logprobs, entropy, _: ((logprobs**2 + entropy).sum(), {}), **more)
        else:
            logprobs, entropy = ops.lm_head_logprobs(*given, **more)
            loss = (logprobs**2 + entropy).sum()
        loss.backward()
        return h.grad, w.grad

    of_hidden, of_weight = gradients(None)
    for is_tied in (False, True):
        main_grad = before.clone()
        found, placeholder = gradients(main_grad, is_tied)
        assert (placeholder is None) == is_tied
        assert torch.equal(found, of_hidden)
        tolerance = 1e-5 if dtypes == ("float32", "float32") else 0.03
        torch.testing.assert_close(
            main_grad.float(), before.float() + of_weight.float(), rtol=tolerance, atol=tolerance
        )
        assert torch.equal(main_grad[33:], before[33:])


def test_a_loss_whose_gradient_is_in_main_grad_cannot_be_scaled_any_more():
    hidden, weight = torch.randn(3, 8).requires_grad_(), torch.randn(33, 8)
    of_all = {"shard": SHARD, "main_grad": torch.zeros(33, 8)}
    loss, _ = ops.lm_head_loss(hidden, weight, torch.arange(3), lambda logprobs, *_: (logprobs.sum(), {}), **of_all)
    with pytest.raises(RuntimeError, match="main_grad"):
        (2 * loss).backward()


@pytest.mark.thorough
def test_a_loss_by_sequence_compiles_without_a_break():
    hidden, weight = torch.randn(6, 8).requires_grad_(), torch.randn(33, 8).requires_grad_()
    labels, kept = torch.tensor([3, -100, 5, 7, 32, 0]), torch.tensor([0, 2, 3, 4, 5])
    before, advantages = torch.randn(2, 6)

    def loss(h, w):
        more = {"shard": SHARD, "kept": kept, "rows_per_chunk": 2, "cu_seqlens": torch.tensor([0, 3, 6])}
        options = PpoOptions(sequence_ratio=True)
        return lm_head_ppo_loss(h, w, labels, before - 4, None, advantages, options, **more)[0]

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for mine, right in zip(
        torch.autograd.grad(compiled(hidden, weight), (hidden, weight)),
        torch.autograd.grad(loss(hidden, weight), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, right)


def test_no_trained_row_gives_zero_loss_and_gradient():
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
    labels, zeros = torch.full((3,), -100), torch.zeros(3)
    loss, _ = lm_head_ppo_loss(hidden, weight, labels, zeros, zeros, zeros, PpoOptions(), shard=SHARD)
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


# none, an empty sequence between others, one of one token, a long one
@pytest.mark.parametrize("lengths", [(), (3, 0, 1, 4), (300, 1, 20)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_labels_are_shifted_inside_each_sequence(lengths, masked):
    generator = torch.Generator().manual_seed(0)
    total, cu_seqlens = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(0, 99, (total,), generator=generator)
    mask = torch.rand(total, generator=generator) < 0.5 if masked else None
    expected = reference.packed_labels(ids, cu_seqlens, mask)
    for mine, right in zip(ops.packed_labels(ids, cu_seqlens, mask), expected, strict=True):
        assert torch.equal(mine, right)


def test_labels_obey_torchs_rules():
    for mask in (None, torch.arange(8) % 2 == 0):
        opcheck(library.packed_labels.default, (torch.arange(8), torch.tensor([0, 3, 3, 4, 8]), mask))


def test_labels_name_bad_input():
    ids = torch.arange(5)
    with pytest.raises(RuntimeError, match=r"cu_seqlens\[2\] is 5"):
        ops.packed_labels(ids, torch.tensor([0, 6, 5]))
    with pytest.raises(ValueError, match="loss_mask is torch.int64"):
        ops.packed_labels(ids, torch.tensor([0, 5]), ids)
    with pytest.raises(ValueError, match="input_ids is torch.int32"):
        ops.packed_labels(ids.int(), torch.tensor([0, 5]))
