"""Rows of logits that have gone wrong somewhere before, and their float64 results; for every device."""

import torch

from tests.kit import operators as reference

# 1 column, below and at a 16-byte piece, an odd width, one past a tile in float32 and in 16 bits, GPT-2's vocabulary.
WIDTHS = (1, 2, 7, 8, 31, 8193, 16385, 50257)

KINDS = {
    "normal": lambda x: x * 4,
    "flat": lambda x: x * 0.1,
    "wide": lambda x: x * 10,
    "offset 1000": lambda x: x + 1000,
    "offset -100": lambda x: x * 4 - 100,
    "equal": lambda x: torch.full_like(x, 3.0),
    "peaked": lambda x: x.index_fill(1, torch.tensor([x.shape[1] // 2]), 70.0),
    "masked": lambda x: (x * 4).masked_fill(x > 1.5, float("-inf")),
}


def rows(kind="normal", width=1000, dtype=torch.float32, count=6, seed=0):
    """`[count, width]` logits in dtype and labels: the first column, the last, -100, random ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = KINDS[kind](torch.randn(count, width, generator=generator)).to(dtype)
    if kind == "masked":
        logits[:, width // 2] = 1.0  # no row is all -inf
    labels = torch.randint(0, width, (count,), generator=generator)
    labels[:3] = torch.tensor([0, width - 1, -100])[: min(3, count)]
    if kind == "masked":
        labels = labels.where(logits[torch.arange(count), labels.clamp_min(0)].isfinite(), labels.clamp_max(-100))
    return logits, labels


def exact(logits, labels, temperature=1.0, grad_logprobs=None, grad_entropy=None):
    """(log-probs, entropy, gradient) in float64 of the logits as they are stored."""
    x = logits.double().cpu().requires_grad_()
    heat = temperature.double().cpu()[:, None] if isinstance(temperature, torch.Tensor) else temperature
    logprobs, entropy = reference.logprobs_entropy(x, labels.cpu(), heat)
    total = torch.zeros((), dtype=torch.float64)
    for value, gradient in ((logprobs, grad_logprobs), (entropy, grad_entropy)):
        if gradient is not None:
            total = total + (value * gradient.double().cpu()).sum()
    gradient = torch.autograd.grad(total, x)[0] if total.requires_grad else torch.zeros_like(x)
    return logprobs.detach(), entropy.detach(), gradient


def assert_rounded(found, true, dtype, atol=1e-6):
    """Equal to the exact value rounded to dtype, within one unit in the last place."""
    torch.testing.assert_close(found.double().cpu(), true, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=atol)
