"""The reverse KL from a teacher, with its gradient, against its definition in float64."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl import ops
from megatron_rl.ops.head import CHUNKS_OF_TERM

VOCAB, HIDDEN, TEMPERATURE = 33, 8, 0.7
SHARD = ops.VocabShard(0, VOCAB, VOCAB)


def log_softmax(logits):
    return (logits / TEMPERATURE).log_softmax(-1)


def divergence(p, q, top=0):
    """Sum of p (log p - log q) of log-probabilities, `[n]`; with `top`, all but q's most likely tokens are one."""
    if top:
        chosen = q.topk(top).indices
        others = torch.ones_like(q, dtype=torch.bool).scatter(1, chosen, False)
        p, q = (
            torch.cat([it.gather(1, chosen), it.masked_fill(~others, -torch.inf).logsumexp(1)[:, None]], 1)
            for it in (p, q)
        )
    return (p.exp() * (p - q)).sum(1)


def make(count, seed=0):
    """(hidden, weight) of a student and of a wider teacher, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return drawn(count, HIDDEN), drawn(VOCAB, HIDDEN), drawn(count, 2 * HIDDEN), drawn(VOCAB, 2 * HIDDEN)


def teacher_of(hidden, weight, top):
    return ops.top_tokens(hidden @ weight.T, top, SHARD, TEMPERATURE) if top else ops.TeacherStates(hidden, weight)


# one chunk, and several with a rest; the whole vocabulary, the one most likely token, and all but one
@pytest.mark.parametrize("rows_per_chunk", [100, 4])
@pytest.mark.parametrize("top", [0, 1, 5, VOCAB - 1])
def test_loss_and_gradient_are_those_of_float64_autograd(top, rows_per_chunk):
    """Of two teachers, rows that none has read, rows that are not trained, weights by row, and another loss beside."""
    hidden, weight, wide, of_teacher = make(11)
    labels = torch.arange(11).masked_fill(torch.arange(11) % 4 == 3, -100)
    row_weights, order = torch.linspace(0.5, 1.5, 11), [5, 2, 8, 1, 0, 4, 9]  # row 6 has no teacher, 10 neither
    place = torch.full((11,), -1, dtype=torch.int32)
    place[order] = torch.arange(7, dtype=torch.int32)
    other = torch.randn(VOCAB, 2 * HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    teachers = [teacher_of(wide[order[:4]], of_teacher, top), teacher_of(wide[order[4:]], other, top)]
    targets = ops.TeacherTargets(teachers, SHARD, TEMPERATURE, coefficient=0.3)
    rows = TensorDict({"labels": labels, "teacher_place": place, "row_weights": row_weights})
    results = []
    for is_own in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if is_own:
            options = {"shard": SHARD, "temperature": TEMPERATURE, "rows_per_chunk": rows_per_chunk}
            loss, sums = ops.lm_head_loss(
                *(h, w, labels, lambda logprobs, *_: (-logprobs.sum(), {})),
                **options,
                term=targets.of(rows, h.device),
            )
            total = sums["teacher_kl"]
        else:
            logits = log_softmax(h @ w.T)
            theirs = torch.cat([wide[order[:4]] @ of_teacher.T, wide[order[4:]] @ other.T])
            kl = divergence(logits[order], log_softmax(theirs), top)
            trained = (labels >= 0).nonzero()[:, 0]
            own = logits[trained, labels[trained]]
            loss, total = -own.sum() + 0.3 * (kl * row_weights[order]).sum(), kl.sum().detach()
        loss.backward()
        results.append((loss.detach(), total, h.grad, w.grad))
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, VOCAB - 1), st.floats(0.01, 8.0))
def test_of_the_most_likely_tokens_it_is_no_more_than_of_all(seed, top, scale):
    """Putting outcomes together takes from a divergence, which is never below 0; of the teacher itself it is 0."""
    hidden, weight, wide, of_teacher = make(6, seed)
    place, places = torch.arange(6, dtype=torch.int32), torch.arange(6)
    rows = TensorDict({"labels": places, "teacher_place": place})

    def total(logits, count):
        teacher = teacher_of(wide * scale, of_teacher, count)
        term = ops.TeacherTargets([teacher], SHARD, TEMPERATURE).of(rows, logits.device)
        return float(term(logits, places)[0])

    student = hidden @ weight.T
    assert -1e-12 <= total(student, top) <= total(student, 0) + 1e-9
    assert abs(total(wide * scale @ of_teacher.T, top)) < 1e-9


def test_a_sure_teacher_is_no_infinity():
    """Log-probabilities of what it leaves to others are far below those that exp of float32 has a number for."""
    logits, places = torch.zeros(1, VOCAB), torch.zeros(1, dtype=torch.int64)
    sure = torch.zeros(1, VOCAB)
    sure[0, 3] = 300.0
    teacher = ops.top_tokens(sure, 1, SHARD, 1.0)
    rows = TensorDict({"labels": places, "teacher_place": places.int()})
    loss, _, gradient = ops.TeacherTargets([teacher], SHARD, 1.0).of(rows, logits.device)(logits, places)
    p = torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    q = torch.zeros(1, VOCAB, dtype=torch.float64)
    q[0, 3] = 300.0
    right = divergence(p.log(), q.log_softmax(-1), 1)
    torch.testing.assert_close(loss, right.sum(), rtol=1e-6, atol=0)
    assert gradient.isfinite().all() and gradient[0, 3] < 0 < gradient[0, 4]


@pytest.mark.parametrize("top", [0, 7])
def test_memory_does_not_grow_with_the_rows(top):
    """Of tensors as large as a chunk's logits the logits are alive, and no more than CHUNKS_OF_TERM beside them."""
    size, alive, most, largest = 20 * 1000 * 4, {}, 0, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most, largest
            result = func(*args, **(kwargs or {}))
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()).nbytes() >= size:
                    largest = max(largest, storage.nbytes())
                    alive[storage._cdata] = weakref.ref(storage, lambda _, key=storage._cdata: alive.pop(key, None))
            most = max(most, len(alive))
            return result

    hidden, weight = torch.randn(400, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    wide, of_teacher, places = torch.randn(400, 8), torch.randn(1000, 8), torch.arange(400)
    shard = ops.VocabShard(0, 1000, 1000)
    teacher = ops.top_tokens(wide @ of_teacher.T, top, shard, 1.0) if top else ops.TeacherStates(wide, of_teacher)
    rows = TensorDict({"labels": places, "teacher_place": places.int()})
    term = ops.TeacherTargets([teacher], shard, 1.0).of(rows, hidden.device)
    with Watch():
        loss = ops.lm_head_loss(
            *(hidden, weight, places, lambda logprobs, *_: (-logprobs.sum(), {})),
            **{"shard": shard, "rows_per_chunk": 20, "term": term},
        )[0]
        loss.backward()
    assert 2 <= most <= 1 + CHUNKS_OF_TERM and largest <= 20 * 1001 * 4
