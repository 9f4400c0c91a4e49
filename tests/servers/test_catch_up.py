"""Servers that come late are brought to the current weights by a peer or from a folder, and publications go first."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import load_config
from megatron_rl.run.device_sharing import DeviceSharing
from megatron_rl.run.rollouts import Rollouts
from megatron_rl.weights.publish import DiskPublisher, GroupPublisher
from tests.kit.client_calls import (
    ask,
    finish,
    load,
    lose,
    post,
    publish_checked,
    wait_until_serving,
)
from tests.kit.in_process import specs_of
from tests.kit.reference import reference_greedy
from tests.kit.scripted_server import EMBEDDED, never, overloaded
from tests.kit.waiting import LATE_S, until, wait_until

pytestmark = pytest.mark.usefixtures("quick_looks")

COUNT = "configs/count_grpo.yaml"
SUMS = {"w": "of the current weights"}


# -- two embedded servers


@pytest.mark.parametrize("source", ["peer", "folder"])
def test_restarted_server_serves_the_current_weights_before_the_next_publication(
    embedded_servers, connect, tiny_model, other_tiny_model, weights, tmp_path, source
):
    engine = connect(embedded_servers, seed=1)
    if source == "peer":
        publisher = GroupPublisher(engine, bucket_bytes=100_000, backend="gloo", timeout_s=LATE_S)
        restarted = embedded_servers[:1]
    else:  # where all were restarted, no peer is left
        publisher = DiskPublisher(engine, folder=tmp_path, model_folder=str(other_tiny_model), timeout_s=LATE_S)
        restarted = embedded_servers
    engine.select_servers()
    publisher.publish(specs_of(weights), iter(weights.items()), 1)
    for url in restarted:  # what a restart leaves: other weights under another name
        assert post(url, "/update_weights_from_disk", {"model_path": str(tiny_model), "weight_version": "none"}).ok
    for url in restarted:
        lose(engine, url)
    wait_until_serving(engine, 2)
    expected = reference_greedy(other_tiny_model, [1], 16)
    for url in restarted:
        sampling = {"temperature": 0, "max_new_tokens": 16}
        answer = post(url, "/generate", {"input_ids": [1], "sampling_params": sampling}).json()
        assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (expected, "1")
    publisher.close()
    engine.update_weights(tiny_model, 2)


def test_peer_gives_nothing_but_the_version_that_was_asked_for(embedded_servers):
    taker, peer = embedded_servers
    body = {"peer_url": peer, "peer_version": "41", "weight_version": "unconfirmed"}
    refused = post(taker, "/update_weights_from_peer", body)
    assert refused.status_code == 400 and "this server has" in refused.text


# -- scripted ones: what meets what


@pytest.fixture
def late(scripted, connect):
    """(client, server that serves version 1, server that was restarted since): catching up is about to begin."""

    def make(info=EMBEDDED, **options):
        late, steady = scripted(info=info), scripted(info=info)
        for server in (late, steady):
            server.keep_name()
            server.answers["/weights_checker"] = lambda _: {"ranks": [{"checksums": SUMS}]}
        engine = connect([late.url, steady.url])
        publish_checked(engine, 1)
        for endpoint, answer in options.items():
            late.answers[f"/{endpoint}"] = answer
        late.calls.clear()
        late.weight_version = "none"
        late.script.append(overloaded)
        ask(engine, rid="a"), ask(engine, rid="b")
        return engine, steady, late

    return make


def test_name_of_the_version_is_given_only_to_proved_weights(late):
    engine, steady, late_server = late()
    wait_until_serving(engine, 2)
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
    wait_until(lambda: late_server.controls().count("/weights_checker") >= 2, "it is not tried again")
    assert late_server.url not in engine.serving
    assert "/update_weight_version" not in late_server.controls()
    assert "holds other weights than its peers: w" in engine.service.client.fleet.members.troubles()


def test_publication_does_not_wait_for_a_transfer_and_is_not_disturbed_by_it(late):
    engine, _, late_server = late(update_weights_from_peer=never)  # a publication that waits for it ends the test
    wait_until(lambda: "/update_weights_from_peer" in late_server.controls())
    publish_checked(engine, 2)
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
    clients = []

    async def slowly(_):
        # The publication has begun, and waits for this.
        await until(lambda: clients and not clients[0].service.client.fleet.members.may_catch_up)
        return {"success": True}

    engine, _, late_server = late(update_weight_version=slowly)
    clients.append(engine)
    wait_until(lambda: "/update_weight_version" in late_server.controls())
    publish_checked(engine, 2)
    controls = late_server.controls()
    first = controls.index("/update_weight_version")
    # A server told to go on in the middle of a publication would generate with a part of the weights.
    assert controls[first + 1 : first + 3] == ["/continue_generation", "/pause_generation"]
    assert len(engine.serving) == 2


def test_server_that_answers_again_in_a_publication_waits_until_it_is_over(late):
    engine, _, late_server = late()
    wait_until_serving(engine, 2)
    engine.drop(late_server.url, "its weights are wrong")
    engine.select_servers()
    late_server.calls.clear()
    engine.pause()
    engine.begin_weight_update(2)
    late_server.wait_for_looks()  # it answers meanwhile, and its peer has a part of version 2
    assert "/update_weights_from_peer" not in late_server.controls()
    load(engine, 2)
    finish(engine, 2, is_checked=True)
    wait_until_serving(engine, 2)
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
        publish_checked(receiver, version)


def test_late_server_waits_for_the_next_publication_and_keeps_no_rank_from_its_work(late, tmp_path):
    client, steady, late_server = late(info={"device": "cpu", "dtype": "float32"})  # SGLang's
    config = load_config(COUNT, [f"run.folder={tmp_path}"])
    rank, engine = SimpleNamespace(is_main=True, control=None, any=bool), CountingEngine()
    processes, devices = (
        SimpleNamespace(supervisor=None, process=client, on_main=client, nodes=None),
        DeviceSharing(config, rank, None, None, None),
    )
    rollouts = Rollouts(config, rank, processes, devices, engine, is_ending=lambda: False)
    wait_until(lambda: client.serving == [steady.url])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine.failing = late_server.url
        rollouts.publish()
        assert engine.gathered == 1 and client.serving == [steady.url]
        engine.failing = ""
        late_server.wait_for_looks()  # it answers, and nobody can help it
        assert client.serving == [steady.url]
        rollouts.publish()
    finally:
        dist.destroy_process_group()
    assert engine.gathered == 2 and len(client.serving) == 2
    assert not any(tmp_path.iterdir()), "no folder of the whole model is written"
