"""Servers that come late are brought to the current weights by a peer or from a folder, and publications go first."""

import asyncio
import json
import time
import urllib.request
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_rl.config import load_config
from megatron_rl.run.device_sharing import DeviceSharing
from megatron_rl.run.rollouts import Rollouts
from megatron_rl.weights.publish import DiskPublisher, GroupPublisher
from megatron_rl.weights.update_group import TensorSpec
from tests.kit.run_tokens import AUTHORIZED
from tests.servers.reference import reference_greedy
from tests.servers.test_membership import ask, eventually, load, overloaded

COUNT = "configs/count_grpo.yaml"
EMBEDDED = {"embedded": True, "dtype": "float32"}
SUMS = {"w": "of the current weights"}


def post(url, endpoint, body):
    headers = AUTHORIZED | {"Content-Type": "application/json"}
    request = urllib.request.Request(url + endpoint, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def specs_of(weights):
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]


# -- two embedded servers


@pytest.mark.parametrize("source", ["peer", "folder"])
def test_restarted_server_serves_the_current_weights_before_the_next_publication(
    embedded_servers, connect, tiny_model, other_tiny_model, tmp_path, source
):
    engine = connect(embedded_servers, seed=1)
    weights = load_file(other_tiny_model / "model.safetensors")
    if source == "peer":
        publisher = GroupPublisher(engine, bucket_bytes=100_000, backend="gloo", timeout_s=30)
        restarted = embedded_servers[:1]
    else:  # where all were restarted, no peer is left
        publisher = DiskPublisher(engine, folder=tmp_path, model_folder=str(other_tiny_model), timeout_s=30)
        restarted = embedded_servers
    engine.select_servers()
    publisher.publish(specs_of(weights), iter(weights.items()), 1)
    for url in restarted:  # what a restart leaves: other weights under another name
        post(url, "/update_weights_from_disk", {"model_path": str(tiny_model), "weight_version": "none"})
    members = engine._service.client.fleet.members
    for server in [server for server in members.serving if server.url in restarted]:
        engine._thread.loop.call_soon_threadsafe(members.lose, server, "restarted")
    assert eventually(lambda: len(engine.serving) < 2) and eventually(lambda: len(engine.serving) == 2)
    expected = reference_greedy(other_tiny_model, [1], 16)
    for url in restarted:
        answer = post(url, "/generate", {"input_ids": [1], "sampling_params": {"temperature": 0, "max_new_tokens": 16}})
        assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (expected, "1")
    publisher.close()
    engine.update_weights(tiny_model, 2)


def test_peer_gives_nothing_but_the_version_that_was_asked_for(embedded_servers):
    taker, peer = embedded_servers
    body = {"peer_url": peer, "peer_version": "41", "weight_version": "unconfirmed"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(taker, "/update_weights_from_peer", body)
    assert refused.value.code == 400 and "this server has" in refused.value.read().decode()


# -- scripted ones: what meets what


@pytest.fixture
def late(scripted, connect):
    """(client, server that serves version 1, server that was restarted since): catching up is about to begin."""

    def make(info=EMBEDDED, **options):
        late, steady = scripted(info=info), scripted(info=info)
        for server in (late, steady):
            keep_name(server)
            server.answers["/weights_checker"] = lambda _: {"ranks": [{"checksums": SUMS}]}
        engine = connect([late.url, steady.url])
        publish(engine, 1)
        for endpoint, answer in options.items():
            late.answers[f"/{endpoint}"] = answer
        late.calls.clear()
        late.weight_version = "none"
        late.script.append(overloaded)
        ask(engine, rid="a"), ask(engine, rid="b")
        return engine, steady, late

    return make


def keep_name(server):
    """Let a scripted server go by the version that it was given last."""

    def rename(body):
        server.weight_version = body.get("new_version") or body["weight_version"]
        return {"success": True}

    server.answers["/update_weight_version"] = server.answers["/update_weights_from_distributed"] = rename


def publish(engine, version):
    engine.select_servers()
    engine.pause()
    engine.begin_weight_update(version)
    load(engine, version)
    engine.end_weight_update(version)
    for held in engine.held_weights().values():
        held.result(10)
    engine.finish_update(version)
    engine.resume()


def slowly(seconds, begun=None):
    async def answer(body):
        if begun is not None:
            begun.append(time.monotonic())
        await asyncio.sleep(seconds)
        return {"success": True}

    return answer


def test_name_of_the_version_is_given_only_to_proved_weights(late):
    engine, steady, late_server = late()
    assert eventually(lambda: len(engine.serving) == 2)
    controls = late_server.controls()
    assert controls.index("/weights_checker") < controls.index("/update_weight_version")
    assert late_server.body_of("/update_weights_from_peer") == {
        "peer_url": steady.url,
        "peer_version": "1",
        "weight_version": "unconfirmed",
    }
    # It takes part in the next publication, in a group of its own.
    assert late_server.url in engine.server_ranks


def test_server_with_other_weights_than_its_peers_stays_out(late):
    wrong = {"ranks": [{"checksums": {"w": "of others"}}]}
    engine, _, late_server = late(weights_checker=lambda _: wrong)
    assert eventually(lambda: "/weights_checker" in late_server.controls())
    time.sleep(0.3)
    assert late_server.url not in engine.serving
    assert "/update_weight_version" not in late_server.controls()
    assert "holds other weights than its peers: w" in engine._service.client.fleet.members.troubles()


def test_publication_does_not_wait_for_a_transfer_and_is_not_disturbed_by_it(late):
    begun = []
    engine, _, late_server = late(update_weights_from_peer=slowly(60, begun))
    assert eventually(lambda: begun)
    started = time.monotonic()
    publish(engine, 2)
    assert time.monotonic() - started < 10
    assert sorted(engine.serving) == sorted(engine.server_ranks) and len(engine.serving) == 2
    controls = late_server.controls()
    # Behind the transfer that was given up come the publication's commands alone.
    assert controls[controls.index("/update_weights_from_peer") + 1 :] == [
        "/pause_generation",
        "/flush_cache",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/end_weight_update",
        "/weights_checker",
        "/continue_generation",
    ]


def test_publication_waits_for_a_server_that_is_just_let_go_on(late):
    begun = []
    engine, _, late_server = late(update_weight_version=slowly(0.5, begun))
    assert eventually(lambda: begun)
    publish(engine, 2)
    controls = late_server.controls()
    first = controls.index("/update_weight_version")
    # A server told to go on in the middle of a publication would generate with a part of the weights.
    assert controls[first + 1 : first + 3] == ["/continue_generation", "/pause_generation"]
    assert len(engine.serving) == 2


def test_server_that_answers_again_in_a_publication_waits_until_it_is_over(late):
    engine, _, late_server = late()
    assert eventually(lambda: len(engine.serving) == 2)
    engine.drop(late_server.url, "its weights are wrong")
    engine.select_servers()
    late_server.calls.clear()
    engine.pause()
    engine.begin_weight_update(2)
    time.sleep(0.7)  # it answers meanwhile, and its peer has a part of version 2
    assert "/update_weights_from_peer" not in late_server.controls()
    load(engine, 2)
    engine.end_weight_update(2)
    for held in engine.held_weights().values():
        held.result(10)
    engine.finish_update(2)
    engine.resume()
    assert eventually(lambda: len(engine.serving) == 2)
    assert late_server.body_of("/update_weights_from_peer")["peer_version"] == "2"


# -- servers that no peer can give weights


class CountingEngine:
    """A TrainEngine whose weights are those of scripted servers; counts how often its ranks had to gather them."""

    gathered = 0
    failing = ""
    """The URL of a server that fails the publications."""

    def get_version(self):
        return self.gathered + 1

    def hf_tensors(self):
        self.gathered += 1
        yield "w", torch.zeros(1)

    def update_weights(self, receiver, version):
        list(self.hf_tensors())
        if self.failing:
            receiver.drop(self.failing, "it was killed")
        publish(receiver, version)


def test_late_server_waits_for_the_next_publication_and_keeps_no_rank_from_its_work(late, tmp_path):
    client, steady, late_server = late(info={"device": "cpu", "dtype": "float32"})  # SGLang's
    config = load_config(COUNT, [f"run.folder={tmp_path}"])
    rank, engine = SimpleNamespace(is_main=True, control=None, any=bool), CountingEngine()
    processes, devices = (
        SimpleNamespace(supervisor=None, process=client, nodes=None),
        DeviceSharing(config, rank, None, None, None),
    )
    rollouts = Rollouts(config, rank, processes, devices, engine, is_ending=lambda: False)
    assert eventually(lambda: client.serving == [steady.url])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine.failing = late_server.url
        rollouts.publish()
        assert engine.gathered == 1 and client.serving == [steady.url]
        engine.failing = ""
        assert not eventually(lambda: len(client.serving) == 2, 0.7)  # it answers, and nobody can help it
        rollouts.publish()
    finally:
        dist.destroy_process_group()
    assert engine.gathered == 2 and len(client.serving) == 2
    assert not any(tmp_path.iterdir()), "no folder of the whole model is written"
