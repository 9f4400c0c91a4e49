"""Servers whose weights or shape decide whether, and as how many ranks, they can be sent new weights."""

import pytest

from megatron_rl.api import RequestRefused
from megatron_rl.launch.server_registry import Registration, registered
from tests.kit.client_calls import ask, update
from tests.kit.waiting import LIMIT_S, wait_until


@pytest.mark.parametrize("info", [{"quantization": "fp8"}, {"torchao_config": "fp8wo"}])
def test_weights_are_not_published_into_quantized_ones(scripted, connect, info):
    (held,) = info.values()
    good, quantized = scripted(info={"quantization": "unquant"}), scripted(info=info)
    engine = connect([good.url, quantized.url])
    with pytest.raises(RequestRefused, match=f"{quantized.url}: quantization = '{held}': .* without quantization, on"):
        update(engine)
    for server in (good, quantized):
        assert "/update_weights_from_distributed" not in server.controls()
    assert ask(connect(quantized.url), max_new_tokens=2).output_len == 2, "it may answer, as for an evaluation"


def test_the_models_config_says_it_where_the_server_does_not(scripted, connect, tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "compressed-tensors"}}')
    server = scripted()
    server.model_path = str(tmp_path)
    with pytest.raises(RequestRefused, match=f"{server.url}: quantization = 'compressed-tensors'"):
        update(connect(server.url))


def test_quantized_server_that_comes_late_is_left_out_and_named(scripted, connect, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("megatron_rl.servers.pool.REGISTRY_EVERY_S", 0.05)
    first, late = scripted(), scripted(info={"quantization": "fp8"})
    entries = [Registration(url=server.url, run="r") for server in (first, late)]
    with (
        registered(tmp_path, entries[0], is_well=lambda: True),
        registered(tmp_path, entries[1], is_well=lambda: True),
    ):
        engine = connect(first.url, run_name="r", registry=str(tmp_path))
        wait_until(lambda: f"left out: {late.url}: quantization = 'fp8'" in caplog.text)
        update(engine)
        assert list(engine.server_ranks) == [first.url] and late.controls() == []


@pytest.mark.parametrize(
    "how",
    [
        {"dp_size": 4, "enable_dp_attention": True},
        {"attn_dp_size": 4, "enable_dp_attention": True},
        {"attn_dp_size": 4},
    ],
)
def test_dp_attention_divides_the_ranks_of_a_group_and_adds_none(scripted, connect, how):
    attention = {"tp_size": 8} | how
    servers = [scripted(info=attention), scripted(info={"tp_size": 2})]
    engine = connect([server.url for server in servers])
    assert list(engine.server_ranks.values()) == [8, 2]
    for joined in engine.join_weight_group(address="10.0.0.1", port=5, name="g", backend="nccl").values():
        joined.result(LIMIT_S)
    bodies = [server.body_of("/init_weights_update_group") for server in servers]
    assert [(body["rank_offset"], body["world_size"]) for body in bodies] == [(1, 11), (9, 11)]
    assert engine.checksum_forms()[servers[0].url] is None, "what its ranks keep is not that of tensor parallelism"
    update(engine)


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ({"dp_size": 2}, "--dp-size 2: SGLang numbers .*; take --attn-dp-size .* or .*publication=disk"),
        ({"tp_size": 2, "pp_size": 2}, "--pp-size 2: SGLang numbers .*; take --tp-size alone, or .*publication=disk"),
    ],
)
def test_shape_whose_ranks_would_meet_in_a_group_is_refused_and_loads_from_a_disk(scripted, connect, shape, remedy):
    server = scripted(info=shape)
    with pytest.raises(RequestRefused, match=f"{server.url}: {remedy}"):
        update(connect(server.url))
    assert "/begin_weight_update" not in server.controls()
    connect(server.url, publication="disk").update_weights("/weights", 3)
    assert server.body_of("/update_weights_from_disk")["model_path"] == "/weights"
