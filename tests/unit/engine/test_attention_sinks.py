"""Attention with sinks: what is made of a kernel that knows none, against the softmax itself in float64."""

import torch

from megatron_rl.engine.attention import WithSinks

ROWS, HEADS, WIDTH = 7, 3, 4


def kernel(query, key, value):
    """Causal attention and the log of the softmax's sum, as kernels return it."""
    scores = torch.einsum("rhd,khd->hrk", query, key).masked_fill(torch.ones(ROWS, ROWS).triu(1).bool(), -torch.inf)
    return torch.einsum("hrk,khd->rhd", scores.softmax(-1), value), scores.logsumexp(-1), None


def kernel_gradients(grad, query, key, value, out, lse, state):
    """As kernels compute them: probabilities from the log of the sum, and of the result its product with `grad`."""
    scores = torch.einsum("rhd,khd->hrk", query, key).masked_fill(torch.ones(ROWS, ROWS).triu(1).bool(), -torch.inf)
    chances = (scores - lse[..., None]).exp()
    along = torch.einsum("rhd,khd->hrk", grad, value) - (grad * out).sum(-1).T[..., None]
    scores_grad = chances * along
    return (
        torch.einsum("hrk,khd->rhd", scores_grad, key),
        torch.einsum("hrk,rhd->khd", scores_grad, query),
        torch.einsum("hrk,rhd->khd", chances, grad),
    )


def test_scaled_result_and_larger_sum_give_a_kernel_the_gradient_of_sinks_too():
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(ROWS, HEADS, WIDTH, generator=generator) for _ in range(4)]
    sinks = torch.tensor([-30.0, 0.5, 3.0])
    weight = draw.pop()
    known = [x.double().requires_grad_() for x in (*draw, sinks)]
    query, key, value, lost = known
    scores = torch.einsum("rhd,khd->hrk", query, key).masked_fill(torch.ones(ROWS, ROWS).triu(1).bool(), -torch.inf)
    scores = torch.cat([scores, lost[:, None, None].expand(-1, ROWS, 1)], dim=-1).softmax(-1)[..., :-1]
    expected = torch.einsum("hrk,khd->rhd", scores, value)
    ours = [x.clone().requires_grad_() for x in (*draw, sinks)]
    out = WithSinks.apply(*ours, kernel, kernel_gradients)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    gradients = torch.autograd.grad((out * weight).sum(), ours)
    for found, exact in zip(gradients, torch.autograd.grad((expected * weight).sum(), known), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    assert gradients[-1].abs().max() > 0.05
