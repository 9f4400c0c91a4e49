"""Changes instead of weights: who is sent what, what the servers hold afterwards, and what they refuse."""

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.api import ChecksumForm, NoServerLeft
from megatron_rl.servers.server_http import CommandRefused
from megatron_rl.weights import delta
from megatron_rl.weights.delta import DeltaPublisher
from megatron_rl.weights.delta_code import NOTHING, Change, Run, bits_of, encode, pack
from tests.kit.client_calls import PROMPT, greedy, wait_until_selected
from tests.kit.in_process import specs_of
from tests.kit.reference import BUCKET_BYTES, reference_greedy
from tests.kit.waiting import LATE_S, LIMIT_S


@pytest.fixture
def servers(embedded_servers, put_back):
    put_back(embedded_servers)
    return embedded_servers


def test_changes_alone_are_sent_to_those_who_hold_the_rest(servers, connect, weights, tiny_model, monkeypatch):
    monkeypatch.setattr(delta, "RUN_NUMBERS", 5000)  # tensors of several runs
    engine = connect(servers)
    publisher = DeltaPublisher(engine, parcel_bytes=BUCKET_BYTES, timeout_s=LATE_S)
    nbytes = sum(tensor.nbytes for tensor in weights.values())

    def publish(version):
        publisher.publish(specs_of(weights), weights.items(), version)
        assert publisher.last.verified == 2 * len(weights) and engine.serving == servers
        return publisher.last.sent_bytes

    old = {name: tensor.clone() for name, tensor in weights.items()}
    assert 2 * nbytes < publish(3) < 2.1 * nbytes, "they hold something else yet"
    for tensor in weights.values():
        tensor.view(-1)[::100] += 0.001  # a place in one byte, a value in at most four
    small = publish(4)
    assert 2 * nbytes / 4 / 100 * 2 < small < 2 * nbytes / 4 / 100 * 5 + 40_000
    assert publish(5) < 2 * 100, "nothing changed but the version"
    assert greedy(engine).output_versions == [5] * 12
    # One of them is started anew, or was given other weights by somebody.
    connect(servers[0]).update_weights(tiny_model, 5)
    weights = old
    assert nbytes + small / 2 < publish(6) < 1.05 * nbytes + small / 2


def test_servers_have_what_a_folder_would_have_given_them(servers, connect, weights, tiny_model, other_tiny_model):
    engine = connect(servers)
    publisher = DeltaPublisher(engine, parcel_bytes=BUCKET_BYTES, timeout_s=LATE_S)
    first = load_file(tiny_model / "model.safetensors")
    publisher.publish(specs_of(first), first.items(), 1)
    publisher.publish(specs_of(weights), weights.items(), 2)
    assert publisher.last.verified == 2 * len(weights)
    assert greedy(engine).output_tokens == reference_greedy(other_tiny_model, PROMPT, 12)


def test_servers_of_another_dtype_are_sent_whole_tensors(servers, connect, weights):
    engine = connect(servers)  # they hold float32
    publisher = DeltaPublisher(engine, parcel_bytes=BUCKET_BYTES, timeout_s=LATE_S)
    weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    for version in (1, 2):
        publisher.publish(specs_of(weights), weights.items(), version)
        assert publisher.last.verified == 2 * len(weights)
        assert publisher.last.sent_bytes > 2 * publisher.last.nbytes


def test_a_base_is_kept_of_what_no_server_took(servers, connect, weights, monkeypatch):
    """Or the next changes would be those since other weights."""
    engine = connect(servers)
    publisher = DeltaPublisher(engine, parcel_bytes=BUCKET_BYTES, timeout_s=LATE_S)
    publisher.publish(specs_of(weights), weights.items(), 1)
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    with monkeypatch.context() as patch:
        sglang = dict.fromkeys(servers, ChecksumForm("sglang_cpu", "float32"))
        patch.setattr(engine, "checksum_forms", lambda: sglang)
        patch.setattr(engine, "change_forms", lambda: dict.fromkeys(servers))  # as of one without the loader
        with pytest.raises(NoServerLeft, match="started with --custom-weight-loader .*set rollout.publication=group"):
            publisher.publish(specs_of(changed), changed.items(), 2)
    wait_until_selected(engine, 2)
    publisher.publish(specs_of(changed), changed.items(), 3)
    assert publisher.last.verified == 2 * len(weights) and publisher.last.sent_bytes > 2 * publisher.last.nbytes


def test_changes_that_do_not_fit_change_nothing(servers, connect, weights):
    url, name = servers[0], "model.norm.weight"
    engine = connect(url)
    old = bits_of(weights[name])
    good = Run(name, "float32", old.shape, 0, encode(old, None))

    def refusal(body):
        with pytest.raises(CommandRefused) as refused:
            engine.load_changes({url: body}, 1)[url].result(LIMIT_S)
        return str(refused.value)

    assert "must run between begin_weight_update" in refusal(pack([good], 1))
    (held,) = engine.held_weights().values()
    engine.pause()
    engine.begin_weight_update(1)
    one = Change(
        old.numel(), "gaps", "added", torch.tensor([3], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)
    )
    for bad, message in (
        (Run("model.nose.weight", "float32", good.shape, 0, good.change), "the model has no such tensor"),
        (Run(name, "float32", good.shape, 1, good.change), "numbers 1 to 65 were sent; the model has 64 numbers"),
        (Run(name, "bfloat16", good.shape, 0, one), "a change of bfloat16 cannot be applied to torch.float32"),
        (Run(name, "int8", good.shape, 0, good.change), "a change of int8 cannot be applied"),
        (Run(name, "float32", good.shape, 0, Change(64, "all", "whole", NOTHING, NOTHING)), "0 values for 64 places"),
    ):
        assert message in refusal(pack([good, bad], 1))
    assert "not a packed body" in refusal(b"rubbish")
    engine.end_weight_update(1)
    (still,) = engine.held_weights().values()
    assert still.result(LIMIT_S) == held.result(LIMIT_S)
