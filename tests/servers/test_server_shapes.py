"""Servers whose weights or shape decide whether, and as how many ranks, they can be sent new weights."""

import pytest

from megatron_rl.api import RequestRefused
from megatron_rl.launch.server_registry import Lease, Registration
from tests.servers.test_client import ask, update
from tests.servers.test_membership import eventually


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
    registered = [Registration(url=server.url, run="r") for server in (first, late)]
    with Lease(tmp_path, registered[0], is_well=lambda: True), Lease(tmp_path, registered[1], is_well=lambda: True):
        engine = connect(first.url, run_name="r", registry=str(tmp_path))
        assert eventually(lambda: f"left out: {late.url}: quantization = 'fp8'" in caplog.text)
        update(engine)
        assert list(engine.server_ranks) == [first.url] and late.controls() == []
