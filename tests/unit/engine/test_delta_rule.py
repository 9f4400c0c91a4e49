"""The gated delta rule in chunks against its recurrence, a row at a time in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.engine.delta_rule import Chunks, causal_convolution, gated_delta_rule

KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, KERNEL = 2, 4, 6, 5, 4


def packed(trees):
    """Segments `(rows, one that it goes on from)` of several trees: number modulo those before it, the first's none."""
    segments, count = [], 0
    for tree in trees:
        first = len(segments)
        for number, (rows, from_one) in enumerate(tree):
            parent = first + from_one % number if number else -1
            segments.append([count, rows, parent, sum(segments[parent][1::2]) if number else 0])
            count += rows
    return torch.tensor(segments)


def sequences(segments):
    """The rows of each segment's sequence, from its first token on."""
    found = []
    for first, rows, parent, _ in segments.tolist():
        found.append([*(found[parent] if parent >= 0 else ()), *range(first, first + rows)])
    return found


def inputs(rows, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)

    decay = -torch.nn.functional.softplus(2 * draw(VALUE_HEADS))
    query, key, value = draw(KEY_HEADS, KEY_WIDTH), draw(KEY_HEADS, KEY_WIDTH), draw(VALUE_HEADS, VALUE_WIDTH)
    return [x.requires_grad_() for x in (query, key, value, decay.detach(), draw(VALUE_HEADS).sigmoid().detach())]


def recurrence(query, key, value, log_decay, beta, segments):
    """S = exp(log_decay) S; S = S + beta (v - S k) k^T; the result is S q, each sequence from S = 0."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=1) for x in (query * KEY_WIDTH**-0.5, key))
    out = {}
    for rows in sequences(segments):
        state = query.new_zeros(VALUE_HEADS, VALUE_WIDTH, KEY_WIDTH)
        for row in rows:
            state = state * log_decay[row].exp()[:, None, None]
            missed = value[row] - torch.einsum("hvk,hk->hv", state, key[row])
            state = state + torch.einsum("hv,hk->hvk", beta[row, :, None] * missed, key[row])
            out[row] = torch.einsum("hvk,hk->hv", state, query[row])
    return torch.stack([out[row] for row in range(len(query))])


LENGTHS = st.integers(1, 11)
TREES = st.lists(st.lists(st.tuples(LENGTHS, st.integers(0, 9)), min_size=1, max_size=5), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(TREES, st.sampled_from([1, 4, 64]), st.integers(0, 1000))
def test_chunks_give_what_the_recurrence_gives_and_forks_take_the_state_along(trees, size, seed):
    segments = packed(trees)
    args = inputs(int(segments[:, 1].sum()), seed)
    weight = torch.randn(len(args[0]), VALUE_HEADS, VALUE_WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    expected = recurrence(*args, segments)
    gradients = torch.autograd.grad((expected * weight).sum(), args)
    plain = [x.detach().float().requires_grad_() for x in args]
    out = gated_delta_rule(*plain, Chunks.of(segments, size))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    for found, known in zip(torch.autograd.grad((out * weight.float()).sum(), plain), gradients, strict=True):
        assert (found.double() - known).norm() <= 1e-5 * known.norm() + 1e-6


@settings(max_examples=25, deadline=None)
@given(TREES, st.integers(0, 1000))
def test_the_convolution_sees_its_sequence_alone(trees, seed):
    segments = packed(trees)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(int(segments[:, 1].sum()), 3, generator=generator)
    weight = torch.randn(3, KERNEL, generator=generator)
    out = causal_convolution(x, weight, Chunks.of(segments))
    for (_, own, _, _), rows in zip(segments.tolist(), sequences(segments), strict=True):
        alone = torch.nn.functional.conv1d(x[rows].T[None], weight[:, None], padding=KERNEL - 1, groups=3)
        torch.testing.assert_close(out[rows[-own:]], alone[0, :, : len(rows)].T[-own:], rtol=1e-6, atol=1e-6)


def test_strong_decay_neither_overflows_nor_leaves_a_gradient_without_number():
    segments = packed([[(200, 0), (70, 0), (3, 0)]])
    query, key, value, _, beta = inputs(273, 0)
    decay = torch.full((273, VALUE_HEADS), -30.0, dtype=torch.float64)
    args = [x.detach().float().requires_grad_() for x in (query, key, value, decay, beta)]
    out = gated_delta_rule(*args, Chunks.of(segments))
    torch.testing.assert_close(out.double(), recurrence(query, key, value, decay, beta, segments), rtol=0, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), args))


def test_the_worked_example_of_a_prompt_and_two_replies():
    chunks = Chunks.of(torch.tensor([[0, 2, -1, 0], [2, 2, 0, 2], [4, 1, 0, 2]]))
    assert chunks.size == 2 and chunks.before.tolist() == [5, 0, 1, 2, 1, 5]
    assert chunks.rows.tolist() == [0, 1, 2, 3, 4, 5] and chunks.places.tolist() == [0, 1, 2, 3, 4]
    assert [(None if p is None else p.tolist(), active) for p, active in chunks.levels] == [(None, [1]), ([0, 0], [2])]


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_chunks_are_no_longer_than_the_longest_segment(rows):
    assert Chunks.of(torch.tensor([[0, rows, -1, 0]])).size == min(64, rows)
