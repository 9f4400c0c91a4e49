"""The CUDA kernels without a device: their source runs on the CPU (csrc/emulation), and compiles without spills."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from megatron_rl.ops.library import ops
from tests.unit.logit_cases import KINDS, rows

CSRC = Path(__file__).parents[3] / "csrc"
build = runpy.run_path(str(CSRC / "build.py"))


@pytest.fixture(scope="module")
def kernels():
    torch.ops.load_library(build["build_emulated"]())
    return torch.ops.megatron_rl_emulated


def logprobs_by(library, logits, labels, columns, start=0, temperatures=None):
    partials = library.logprob_partials(logits, labels, 0.7, temperatures, start, columns)
    folded = library.logprob_fold(partials, labels, 0.7, temperatures)
    vocabulary = start + columns
    results = library.logprob_finish(logits, partials, labels, 0.7, temperatures, start, columns, vocabulary, False)
    logprobs, entropy, peak, log_sum = results
    once = library.logprob_finish(logits, folded, labels, 0.7, temperatures, start, columns, vocabulary, False)
    for other, mine in zip(once, results, strict=True):
        torch.testing.assert_close(other, mine, rtol=1e-6, atol=1e-6, equal_nan=True)
    generator = torch.Generator().manual_seed(1)
    by_logprob, by_entropy = torch.randn(2, len(labels), generator=generator).unbind()
    saved = (labels, peak, log_sum, entropy)
    rest = (0.7, temperatures, start, columns)
    gradients = [
        library.logprob_grad(logits, *saved, by_logprob, None, *rest),
        library.logprob_grad(logits, *saved, by_logprob, by_entropy, *rest),
    ]
    overwritten = logits.clone()
    library.logprob_grad_(overwritten, *saved, by_logprob, by_entropy, *rest)
    assert torch.equal(overwritten.nan_to_num(), gradients[1].nan_to_num())
    return [logprobs, entropy, peak, *gradients]


def assert_agree(kernels, *arguments, **options):
    found, right = logprobs_by(kernels, *arguments, **options), logprobs_by(ops, *arguments, **options)
    for mine, true in zip(found, right, strict=True):
        tolerance = max(torch.finfo(mine.dtype).eps, 2e-6)
        torch.testing.assert_close(mine, true, rtol=tolerance, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# a piece of 16 bytes and less, several tiles with an aligned and an unaligned tail
@pytest.mark.parametrize("width", [1, 7, 8, 1000, 16392, 20001])
def test_log_prob_kernels_equal_the_cpu_operator(kernels, width, dtype):
    assert_agree(kernels, *rows("normal", width, dtype, count=4), width)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "normal"])
def test_log_prob_kernels_on_difficult_rows(kernels, kind):
    logits, labels = rows(kind, 100)
    if kind == "masked":
        logits[3, 50], logits[4], logits[5, 3] = float("nan"), float("-inf"), float("inf")
    assert_agree(kernels, logits, labels, 100)


def test_log_prob_kernels_with_padding_a_shard_and_a_temperature_for_each_row(kernels):
    logits, labels = rows(width=64)
    padded = torch.nn.functional.pad(logits, (0, 8), value=float("nan"))
    assert_agree(kernels, padded, labels + 7, 64, start=7, temperatures=torch.rand(6) + 0.5)


def test_log_prob_kernels_give_a_row_the_same_bits_alone_and_unaligned(kernels):
    logits, labels = rows(width=20000, dtype=torch.bfloat16, count=3)
    whole = logprobs_by(kernels, logits, labels, 20000)
    store = torch.zeros(3, 20003, dtype=torch.bfloat16)
    store[:, 1:20001] = logits
    for other in (store[:, 1:20001],):
        for a, b in zip(whole, logprobs_by(kernels, other, labels, 20000), strict=True):
            assert torch.equal(a, b)
    alone = logprobs_by(kernels, logits[1:2], labels[1:2], 20000)
    assert all(torch.equal(a[1:2], b) for a, b in zip(whole[:3], alone[:3], strict=True))


@pytest.mark.slow
@pytest.mark.skipif(build["nvcc"]() is None, reason="needs nvcc")
def test_no_kernel_spills_or_takes_more_registers_than_recorded():
    recorded, found = json.loads((CSRC / "resources.json").read_text()), build["resources"]()
    grown = {
        f"{architecture} {kernel}": (registers, recorded.get(architecture, {}).get(kernel))
        for architecture, kernels in found.items()
        for kernel, registers in kernels.items()
        if registers > recorded.get(architecture, {}).get(kernel, 0)
    }
    assert not grown, "registers found and recorded; python csrc/build.py --record-resources records them anew"
