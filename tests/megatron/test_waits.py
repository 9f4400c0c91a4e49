"""What would make the host wait for a GPU: shapes that stages ask for, masks and counts that the device alone knows."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention.varlen as torch_varlen
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl import platform
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig
from megatron_rl.engine import attention, context, schedule
from tests.kit.models import LAYOUTS, SIZES, make_batch, make_engine, make_groups, make_model, share_of
from tests.kit.ranks import run_ranks


def shapes_of_hops(folder, layout):
    """Return (what the stages asked for, the shapes they knew, the loss) of an update of unequal microbatches."""
    asked, known = [], []
    ask, know = schedule.P2PCommunicator._communicate_shapes, schedule.KnownShapes._communicate_shapes

    def both(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        found = know(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        told = ask(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        known.extend(shape for shape in found if shape)
        asked.extend(shape for shape in told if any(shape))
        return found

    engine = make_engine(folder, LAYOUTS[layout][1], tokens_per_microbatch=25).train()
    prepare, prepared = schedule.own_rows, []
    schedule.own_rows = lambda microbatch, *args, **options: (
        prepared.append(id(microbatch)) or prepare(microbatch, *args, **options)
    )
    loss = LogprobLoss(PolicyLoss(AlgorithmConfig()), by_row=True)
    batch = share_of(make_batch(lengths=(5, 24, 7, 12, 3, 14)), engine)
    schedule.KnownShapes._communicate_shapes = both
    before = engine.eval_batch(batch, loss).loss
    schedule.KnownShapes._communicate_shapes = know
    schedule.P2PCommunicator._communicate_shapes = None  # nobody asks from here on
    assert engine.eval_batch(batch, loss).loss == before
    schedule.P2PCommunicator._communicate_shapes = ask
    schedule.KnownShapes._communicate_shapes = both
    prepared.clear()
    stats = engine.train_batch(batch, loss)
    assert len(prepared) == len(set(prepared)), "chunks of one stage share what is brought to the device"
    return asked, known, before, stats.loss


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "pp2_vpp2", pytest.param("cp2_tp2_pp2", marks=pytest.mark.thorough)])
def test_stages_know_the_shapes_that_upstream_asks_for_at_each_hop(layout, tmp_path):
    make_model("qwen3_tied_one_kv_head", tmp_path)
    for asked, known, before, loss in run_ranks(LAYOUTS[layout][0], shapes_of_hops, tmp_path, layout):
        assert len(asked) >= 3 and len({tuple(shape) for shape in asked}) > 1
        assert known == asked and before == pytest.approx(loss, rel=1e-5)


def test_the_division_by_the_weight_does_not_read_it(monkeypatch):
    given, factors = [], []
    monkeypatch.setattr(schedule, "finalize_model_grads", lambda *args, **options: given.append((args, options)))
    monkeypatch.setattr(schedule.dist, "all_reduce", lambda *args, **options: None)
    groups = SimpleNamespace(pipeline=SimpleNamespace(size=1), data_context=SimpleNamespace(group=None))
    chunk = SimpleNamespace(scale_gradients=factors.append)
    finalize = schedule.divide_by_weight(groups)
    finalize([chunk], torch.empty((), dtype=torch.int32, device="meta"), force_all_reduce=False)  # has no value to read
    assert factors.pop().is_meta and given == [(([chunk], None), {"force_all_reduce": False})]
    for weight, factor in ((0, 1.0), (4, 0.25)):
        finalize([chunk], torch.tensor(weight, dtype=torch.int32))
        assert float(factors.pop()) == factor


@pytest.mark.parametrize("is_new", [True, False])
def test_keys_are_not_repeated_where_torch_takes_fewer_of_them(is_new, monkeypatch):
    seen = []

    def new(query, key, value, *bounds, scale, window_size, enable_gqa=False):
        seen.append((key.shape[1], enable_gqa))
        return query.clone()

    def old(query, key, value, *bounds, scale, window_size):
        return new(query, key, value, *bounds, scale=scale, window_size=window_size)

    monkeypatch.setattr(torch_varlen, "varlen_attn", new if is_new else old)
    module = attention.PackedAttention(SimpleNamespace(kv_channels=16), 1)
    packed = SimpleNamespace(query_cu=None, key_cu=None, longest_query=5, longest_key=5)
    module._varlen_kernel(torch.randn(5, 8, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16), packed)
    assert seen == [(2, True) if is_new else (8, False)]


@pytest.mark.parametrize("width, expected", [(16, set()), (12, {"constant_pad_nd", "slice_backward"})])
def test_values_as_wide_as_keys_are_neither_padded_nor_cut(width, expected, monkeypatch):
    monkeypatch.setattr(torch_varlen, "varlen_attn", lambda query, key, value, *_, **__: value.clone())
    module = attention.PackedAttention(SimpleNamespace(kv_channels=16), 1)
    packed = SimpleNamespace(query_cu=None, key_cu=None, longest_query=5, longest_key=5)
    query, key, value = (torch.randn(5, 2, size, requires_grad=True) for size in (16, 16, width))
    with Seen() as seen:
        out = module._varlen_kernel(query, key, value, packed)
        out.sum().backward()
    assert out.shape == value.shape and torch.equal(out, value) and torch.equal(value.grad, torch.ones_like(value))
    assert {"constant_pad_nd", "slice_backward"} & set(seen.names) == expected


class Seen(TorchDispatchMode):
    """Keeps the names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def embedded(folder, layout):
    """Return rows of the embedding, its gradient, what the whole table gives for both, and the operations."""
    engine = make_engine(folder, LAYOUTS[layout][1])
    module, group = engine.chunks[0].embedding.word_embeddings, engine.groups.tensor.group
    parts = [torch.empty_like(module.weight) for _ in range(2)]
    dist.all_gather(parts, module.weight.detach(), group=group)
    whole = torch.cat(parts).requires_grad_()
    ids = torch.randint(0, engine.arch.vocab, (1, 24), generator=torch.Generator().manual_seed(0))
    slopes = torch.randn(24, 1, whole.shape[1], generator=torch.Generator().manual_seed(1))
    is_cut, size = engine.tf_config.sequence_parallel, 24 // group.size()
    own = slice(group.rank() * size, (group.rank() + 1) * size) if is_cut else slice(None)
    with Seen() as seen:
        rows = module(ids)
        rows = rows if is_cut else rows.transpose(0, 1)
        rows.backward(slopes[own])
    expected = torch.nn.functional.embedding(ids, whole).transpose(0, 1)
    expected.backward(slopes)
    part = whole.grad[module.vocab_start_index : module.vocab_end_index]
    return rows.detach(), expected.detach()[own], module.weight.main_grad, part[: len(module.weight)], seen.names


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp"])
def test_the_embedding_finds_its_rows_without_an_index_by_a_mask(layout, tmp_path):
    make_model("qwen3", tmp_path)
    for rows, expected, gradient, part, names in run_ranks(2, embedded, tmp_path, layout):
        assert torch.equal(rows, expected) and torch.equal(gradient, part) and float(gradient.abs().sum()) > 0
        assert not {"index_put_", "index_put", "nonzero", "_index_put_impl_"} & set(names), names


@pytest.mark.skipif(platform.has_cuda(), reason="needs a machine without CUDA")
def test_flash_attention_3_is_torchs_kernel_where_it_is_asked_for_and_installed(monkeypatch):
    asked = []
    platform.use_flash_attention("torch")
    with pytest.raises(ValueError, match="model.flash_attention = 'FA3': there is no CUDA device; install flash_attn"):
        platform.use_flash_attention("FA3")
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    with pytest.raises(ValueError, match="No module named 'flash_attn_interface'; install flash_attn_interface"):
        platform.use_flash_attention("FA3")
    with pytest.raises(
        ValueError, match=r"= 'TE': the package transformer_engine is not installed; install transformer_engine\["
    ):
        platform.use_flash_attention("TE")
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", asked.append)
    platform.use_flash_attention("FA3")
    assert asked == ["FA3"]


class Calls(Seen):
    """The operations of this rank in their order, and among them the starts and waits of what it gathers."""

    def noted(self, name):
        collective = getattr(dist, name)

        def start(*args, **options):
            self.names.append("start")
            work = collective(*args, **options)
            return SimpleNamespace(wait=lambda: (self.names.append("wait"), work.wait()))

        return start


def work_under_way(folder, operation):
    """Return how many times the operation is called while each gather, and then each sum of gradients, is under way."""
    engine, seen = make_engine(folder, LAYOUTS["cp2"][1]).train(), Calls()
    noted = {name: seen.noted(name) for name in ("all_gather_into_tensor", "reduce_scatter_tensor")}
    context.dist = SimpleNamespace(**vars(dist) | noted)
    with seen:
        engine.train_batch(make_groups(), LogprobLoss(PolicyLoss(AlgorithmConfig())))
    counts = []
    for name in seen.names:
        if name == "start":
            counts.append(0)
            under_way = True
        elif name == "wait":
            assert under_way
            under_way = False
        elif name == operation and counts and under_way:
            counts[-1] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "family,operation,forward,backward",
    # Two matrices of the queries, and two gradients of each; the three products of a rotation, and two gradients.
    [("deepseek_v3", "mm", 2, 4), ("qwen3", "mul", 2, 2)],
)
def test_keys_are_on_their_way_while_queries_are_computed(family, operation, forward, backward, tmp_path):
    make_model(family, tmp_path)
    for counts in run_ranks(2, work_under_way, tmp_path, operation):
        layers = SIZES["num_hidden_layers"]
        assert len(counts) % (2 * layers) == 0 and len(counts)
        # A microbatch's layers, one after the other, and back.
        assert counts == ([forward] * layers + [backward] * layers) * (len(counts) // (2 * layers))
