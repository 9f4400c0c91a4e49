"""The publisher with servers in processes of their own: killed, stopped or sent wrong bytes in the middle of it."""

import os
import signal
import traceback
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from megatron_rl.api import NoServerLeft
from megatron_rl.config import RolloutConfig
from megatron_rl.servers import weight_receiver
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.weights import publish
from megatron_rl.weights.publish import DiskPublisher, GroupPublisher
from tests.kit.client_calls import PROMPT, greedy, pid_of
from tests.kit.in_process import specs_of, tensors_of
from tests.kit.mtp import assert_same_bytes, mtp_tensors
from tests.kit.reference import BUCKET_BYTES, reference_greedy
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.servers import NEVER_LATE
from tests.kit.waiting import LATE_S, SLOWNESS


@pytest.fixture
def own_servers(tiny_model, tmp_path):
    """Three embedded servers of this test alone, that nobody restarts."""
    config = RolloutConfig(backend="embedded", server_count=3, server_restarts=0, token_file=TOKEN_FILE, **NEVER_LATE)
    with Supervisor(config, tiny_model, tmp_path / "servers") as supervisor:
        yield supervisor


# With 0 a tensor goes from its own memory to the server's; with the usual limit these small ones go in flat buckets.
@pytest.mark.parametrize("end, flat_below", [(signal.SIGKILL, 0), (signal.SIGKILL, 1 << 18), (signal.SIGSTOP, 1 << 18)])
def test_a_server_that_dies_or_hangs_in_the_middle_costs_the_others_nothing(
    own_servers, connect, weights, other_tiny_model, end, flat_below, monkeypatch
):
    monkeypatch.setattr(publish, "FLAT_BELOW_BYTES", flat_below)
    monkeypatch.setattr(publish, "AFTERMATH_S", 1.0)
    monkeypatch.setattr(weight_receiver, "SIGN_OF_LIFE_S", SLOWNESS)
    engine = connect(own_servers.urls)
    # Where the others waited for the end of gloo's patience, a death would end the test.
    patience_s = LATE_S if end == signal.SIGKILL else 3 * SLOWNESS
    publisher = GroupPublisher(engine, bucket_bytes=BUCKET_BYTES, backend="gloo", timeout_s=patience_s)
    victim = own_servers.urls[1]

    def stream():
        for number, item in enumerate(weights.items()):
            if number == len(weights) // 2:
                os.kill(pid_of(own_servers, victim), end)
            yield item

    publisher.publish(specs_of(weights), stream(), 8)
    others = [url for url in own_servers.urls if url != victim]
    assert list(engine.server_ranks) == engine.serving == others
    assert publisher.last.verified == len(others) * len(weights)
    for _ in range(2):
        reply = greedy(engine)
        assert reply.output_tokens == reference_greedy(other_tiny_model, PROMPT, 12)
        assert reply.output_versions == [8] * 12
    publisher.publish(specs_of(weights), weights.items(), 9)  # in the group of those that are left
    assert greedy(engine).output_versions == [9] * 12
    publisher.close()
    if end == signal.SIGSTOP:
        with suppress(ProcessLookupError):  # the supervisor may have killed it as hung
            os.kill(pid_of(own_servers, victim), signal.SIGCONT)  # or it would not hear that it is to stop


def test_a_server_that_dies_as_it_is_asked_to_join_is_not_waited_for(own_servers, connect, weights, monkeypatch):
    engine = connect(own_servers.urls)
    publisher = GroupPublisher(engine, bucket_bytes=BUCKET_BYTES, backend="gloo", timeout_s=LATE_S)
    victim, ask = own_servers.urls[1], engine.join_weight_group

    def die_and_ask(**where):
        if victim in engine.server_ranks:
            os.kill(pid_of(own_servers, victim), signal.SIGKILL)
        return ask(**where)

    monkeypatch.setattr(engine, "join_weight_group", die_and_ask)
    # Where the others were kept in the group that it never came to, the test would end.
    publisher.publish(specs_of(weights), weights.items(), 8)
    assert engine.serving == [url for url in own_servers.urls if url != victim]
    assert greedy(engine).output_versions == [8] * 12
    publisher.close()


class Careless(GroupPublisher):
    """Changes one number of one tensor on its way to the wire."""

    def __init__(self, receiver, spoiled):
        super().__init__(receiver, bucket_bytes=BUCKET_BYTES, backend="gloo", timeout_s=LATE_S)
        self.spoiled = spoiled

    def _ship(self, number, pieces):
        pieces, specs = [piece.clone() for piece in pieces], self._parts[0][number]
        for spec, tensor in zip(specs, tensors_of(specs, pieces), strict=True):
            if spec.name == self.spoiled:
                tensor[0, 0] += 1.0
        return super()._ship(number, pieces)


@pytest.mark.parametrize("flat_below", [0, 1 << 18])
def test_wrong_bytes_on_the_way_are_named_and_no_server_serves_them(
    embedded_servers, connect, weights, tiny_model, flat_below, monkeypatch
):
    monkeypatch.setattr(publish, "FLAT_BELOW_BYTES", flat_below)
    engine = connect(embedded_servers)
    publisher = Careless(engine, "model.layers.1.mlp.up_proj.weight")
    try:
        with pytest.raises(NoServerLeft) as failed:
            publisher.publish(specs_of(weights), weights.items(), 4)
        for url in embedded_servers:
            assert f"{url}: holds other weights than were sent: model.layers.1.mlp.up_proj.weight" in str(failed.value)
        assert engine.serving == [] and engine.get_version() != 4
        # gloo aborts the process where a broadcast outlives its group, as one in this traceback would.
        frames = [frame for frame, _ in traceback.walk_tb(failed.tb)]
        local = [value for frame in frames for value in frame.f_locals.values()]
        local += [field for value in local if isinstance(value, publish._Shipment) for field in vars(value).values()]
        assert not publisher.sender.on_wire and not any(isinstance(value, dist.Work) for value in local)
    finally:
        publisher.close()
        restored = connect(embedded_servers)
        restored.resume()
        restored.update_weights(tiny_model, 0)


def test_a_folder_reaches_the_servers_with_the_same_checks(
    embedded_servers, connect, weights, tiny_model, other_tiny_model, tmp_path
):
    engine = connect(embedded_servers)
    further = {"mtp.fc.weight": torch.randn(3, 5).to(torch.float8_e4m3fn)}  # no server's model is made of it
    publisher = DiskPublisher(
        engine, folder=tmp_path / "published", model_folder=str(tiny_model), carried=further.items
    )
    for version in (5, 6):
        publisher.publish(specs_of(weights), weights.items(), version)
        assert_same_bytes(mtp_tensors(publisher.folder / f"version-{version}", further), further)
        assert [path.name for path in publisher.folder.iterdir()] == [f"version-{version}"]
        assert publisher.last.verified == 2 * len(weights) and publisher.last.paused_s < publisher.last.seconds
    reply = greedy(engine)
    assert reply.output_tokens == reference_greedy(other_tiny_model, PROMPT, 12)
    assert reply.output_versions == [6] * 12
    rotten = [(name, tensor + 1 if name == "model.norm.weight" else tensor) for name, tensor in weights.items()]
    sent = publisher.folder / "version-7"

    class Rotten(DiskPublisher):
        """Its disk gives back other bytes than were written."""

        def _write(self, target, tensors, dtype):
            super()._write(target, tensors, dtype)
            super()._write(target, rotten, dtype)

    with pytest.raises(NoServerLeft, match="holds other weights than were sent: model.norm.weight"):
        Rotten(engine, folder=sent.parent, model_folder=str(tiny_model)).publish(specs_of(weights), weights.items(), 7)
    restored = connect(embedded_servers)
    restored.resume()
    restored.update_weights(tiny_model, 0)


# Both kinds of buckets with wrong bytes are above.
@pytest.mark.parametrize("flat_below", [pytest.param(0, marks=pytest.mark.thorough), 1 << 18])
def test_real_sglang_is_checked_tensor_by_tensor(real_sglang, connect, weights, tiny_model, flat_below, monkeypatch):
    monkeypatch.setattr(publish, "FLAT_BELOW_BYTES", flat_below)
    engine = connect(real_sglang)
    publisher = GroupPublisher(engine, bucket_bytes=BUCKET_BYTES, backend="gloo", timeout_s=LATE_S)
    try:
        publisher.publish(specs_of(weights), weights.items(), 3)
        # SGLang keeps q, k and v in one tensor, and gate and up: two layers have 2 + 1 fewer each.
        assert publisher.last.verified == len(weights) - 2 * 3
        careless = Careless(engine, "model.layers.0.self_attn.k_proj.weight")
        with pytest.raises(NoServerLeft, match="other weights than were sent: model.layers.0.self_attn.qkv_proj"):
            careless.publish(specs_of(weights), weights.items(), 4)
        careless.close()
    finally:
        publisher.close()
        restored = connect(real_sglang)
        restored.resume()
        restored.update_weights(tiny_model, 0)
