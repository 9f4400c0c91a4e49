"""What would make the host wait for a GPU: shapes that stages ask for, masks and counts that the device alone knows."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from ranks import run_ranks
from tiny import LAYOUTS, make_batch, make_engine, make_model, share_of

from megatron_rl import platform
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig
from megatron_rl.engine import attention, schedule


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


@pytest.mark.parametrize("layout", ["pp2", "pp2_vpp2", pytest.param("cp2_tp2_pp2", marks=pytest.mark.slow)])
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


@pytest.mark.skipif(platform.has_cuda(), reason="needs a machine without CUDA")
def test_flash_attention_3_is_torchs_kernel_where_it_is_asked_for_and_installed(monkeypatch):
    asked = []
    platform.use_flash_attention("torch")
    with pytest.raises(ValueError, match="model.flash_attention = 'FA3': there is no CUDA device; install flash_attn"):
        platform.use_flash_attention("FA3")
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    with pytest.raises(ValueError, match="No module named 'flash_attn_interface'; install flash_attn_interface"):
        platform.use_flash_attention("FA3")
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", asked.append)
    platform.use_flash_attention("FA3")
    assert asked == ["FA3"]
