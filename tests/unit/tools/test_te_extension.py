"""The fake kernels in place of Transformer Engine's extension: results on the host, launches, and what is missing."""

import importlib.util
import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.tools.rehearsal import te_package
from megatron_rl.tools.rehearsal.te_extension import FUNCTIONS, NAME, Extension
from megatron_rl.tools.rehearsal.te_kernels import LAUNCHES, grouped_product_into_


def made(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def product(a, turns_a, b, turns_b, *, out=None, bias=None, grad=False, accumulate=False):
    """Call the function by position, as Transformer Engine does, without quantisation and GELU."""
    options = (None, None, bias, None, False, None, grad, None, 0, accumulate, False)
    return FUNCTIONS["generic_gemm"](a, turns_a, b, turns_b, out, *options, comm_overlap=None, alpha=1.0)


@pytest.mark.parametrize(
    "layout, a, b, expected",
    [
        ("TN", made(5, 3), made(2, 3), made(2, 3) @ made(5, 3).t()),
        ("NN", made(3, 5), made(2, 3), made(2, 3) @ made(3, 5)),
        ("NT", made(2, 5), made(2, 3), made(2, 3).t() @ made(2, 5)),
    ],
)
def test_products_are_in_the_order_of_cublas(layout, a, b, expected):
    given = a, layout[0] == "T", b, layout[1] == "T"
    out, of_bias, *_ = product(*given, grad=True)
    assert torch.equal(out, expected) and of_bias is None
    out, of_bias, *_ = product(*given, out=out, bias=made(3), grad=True, accumulate=True)
    assert torch.equal(out, 2 * expected) and torch.equal(of_bias, b.sum(0))


def test_dimensions_before_the_last_are_rows():
    out, *_ = product(made(5, 3), True, made(2, 1, 3), False, bias=made(5))
    assert torch.equal(out, (made(2, 3) @ made(5, 3).t() + made(5)).view(2, 1, 5))


def test_experts_without_rows_launch_no_product_and_get_zeros():
    weights, rows = [made(4, 3), made(4, 3), made(4, 3)], made(5, 3).split([2, 0, 3])
    out = torch.full((5, 4), torch.nan)
    options = (None, [2, 0, 3], [], None, True, [], False, [], 0, False, False, 0)
    FUNCTIONS["te_general_grouped_gemm"](weights, True, rows, False, [out], *options)
    assert torch.equal(out, made(5, 3) @ made(4, 3).t())
    gradients = [torch.full((4, 3), torch.nan) for _ in rows]
    given = gradients, out.split([2, 0, 3]), list(rows), True, False
    grouped_product_into_(*given, False)
    assert torch.equal(gradients[0], out[:2].t() @ made(5, 3)[:2]) and not gradients[1].any()
    assert [LAUNCHES[grouped_product_into_](*given, adds) for adds in (False, True)] == [3, 2]


def test_what_has_no_fake_kernel_is_named_when_it_is_called():
    extension = Extension(NAME, FUNCTIONS)
    with pytest.raises(NotImplementedError, match="transformer_engine_torch.split_quantize has no fake kernel"):
        extension.split_quantize(None)
    members = [extension.DType.kFloat32, extension.DType.kBFloat16, extension.CommOverlapType.RS]
    assert members[0] is extension.DType.kFloat32 and isinstance(members[0], extension.DType)
    assert all(a is not b for a, b in itertools.combinations(members, 2)) and members[0] != members[1]


def test_without_sources_an_error_says_how_to_get_them(monkeypatch, tmp_path):
    installed: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if name in installed else None)
    with pytest.raises(ValueError, match=r"^pydantic and triton: not installed.* -m pip install pydantic triton` "):
        te_package.sources()
    installed |= {"pydantic", "triton"}
    folder = tmp_path / "te"
    monkeypatch.setattr(te_package, "FOLDER", folder)
    with pytest.raises(ValueError, match=rf"^{folder} has no transformer_engine.*--target {folder} 'transformer-"):
        te_package.sources()
    (folder / "transformer_engine" / "pytorch").mkdir(parents=True)
    (folder / "transformer_engine" / "pytorch" / "__init__.py").touch()
    assert te_package.sources() == folder
