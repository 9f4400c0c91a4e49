"""Products, attention and SiLU in a fixed order: the same bits for any number of rows and threads."""

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.ops import fixed_order


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 5, 3), (7, 130, 67), (65, 9, 64), (129, 131, 576)])
def test_a_row_of_a_product_has_the_same_bits_alone_and_among_others(rows, columns, depth, threads):
    x, weight, bias = drawn(rows, depth), drawn(columns, depth, seed=1), drawn(columns, seed=2)
    whole = fixed_order.linear(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert (whole - expected).abs().max() < 1e-6 * depth
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(fixed_order.linear(x[row], weight, bias), whole[row])
    for column in {0, columns // 2, columns - 1}:
        assert torch.equal(fixed_order.linear(x, weight[column : column + 1])[:, 0] + bias[column], whole[:, column])
    assert torch.equal(fixed_order.linear(x[:, None], weight, bias)[:, 0], whole)


@pytest.mark.parametrize(("width", "value_width"), [(16, 16), (20, 7)])
def test_a_query_attends_with_the_same_bits_whatever_is_packed_beside_it(width, value_width, threads):
    queries, keys = [9, 1, 17, 0, 3], [9, 40, 33, 0, 3]
    heads, kv_heads = 4, 2
    q, k = drawn(sum(queries), heads, width), drawn(sum(keys), kv_heads, width, seed=1)
    v = drawn(sum(keys), kv_heads, value_width, seed=2)
    bounds = [torch.tensor([0, *counts]).cumsum(0) for counts in (queries, keys)]
    whole = fixed_order.attention(q, k, v, *bounds, 0.3)
    ends = [bound.tolist() for bound in bounds]
    for sequence, count in enumerate(queries):
        (first, after), (start, stop) = (end[sequence : sequence + 2] for end in ends)
        among = stop - start
        parts = (q[first:after], k[start:stop], v[start:stop])
        mask = torch.ones(count, among, dtype=torch.bool).tril(among - count)
        expected = F.scaled_dot_product_attention(
            *(part.double().transpose(0, 1) for part in parts), mask, scale=0.3, enable_gqa=True
        ).transpose(0, 1)
        assert torch.allclose(whole[first:after].double(), expected, rtol=0, atol=1e-6)
        for query in range(count):  # as a server decodes: one query, and keys that lie in a cache of another shape
            own = among - count + query + 1
            caches = [part[start : start + own].transpose(0, 1).contiguous().transpose(0, 1) for part in (k, v)]
            alone = (torch.tensor([0, 1]), torch.tensor([0, own]))
            found = fixed_order.attention(q[first + query : first + query + 1], *caches, *alone, 0.3)
            assert torch.equal(found[0], whole[first + query])


@pytest.mark.parametrize("columns", [1, 16, 53])
def test_silu_has_the_same_bits_in_every_row_and_place(columns, threads):
    x = torch.cat([drawn(5, columns) * 10, torch.tensor([[0.0], [-1e4], [1e4]]).expand(3, columns)])
    whole = fixed_order.silu(torch.cat([x, x], 1)[:, :columns])  # with a stride, as a half of a product has
    assert (whole - F.silu(x.double())).abs().max() < 2e-6
    for place in range(columns):
        assert torch.equal(fixed_order.silu(x[:, place : place + 1])[:, 0], whole[:, place])
    x.requires_grad_()
    fixed_order.silu(x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(F.silu(x).sum(), x)[0])


def test_nan_and_infinity_are_kept():
    x = torch.tensor([[float("nan"), float("inf"), 1.0]])
    assert fixed_order.silu(x)[0].isnan().tolist() == [True, False, False]
    assert fixed_order.linear(x, torch.eye(3)).isnan().all()


def test_wrong_tensors_are_refused_by_name():
    bounds = torch.tensor([0, 2])
    with pytest.raises(RuntimeError, match="x must be float32"):
        fixed_order.linear(drawn(2, 3).double(), drawn(4, 3))
    with pytest.raises(RuntimeError, match=r"weight has shape \[4, 2\]: x has 3 columns"):
        fixed_order.linear(drawn(2, 3), drawn(4, 2))
    with pytest.raises(RuntimeError, match="2 queries and 1 keys: a query has its own key"):
        fixed_order.attention(drawn(2, 2, 4), drawn(1, 2, 4), drawn(1, 2, 4), bounds, torch.tensor([0, 1]), 1.0)
    with pytest.raises(RuntimeError, match=r"key and value have shapes \[2, 2, 4\] and \[2, 1, 4\]"):
        fixed_order.attention(drawn(2, 2, 4), drawn(2, 2, 4), drawn(2, 1, 4), bounds, bounds, 1.0)
