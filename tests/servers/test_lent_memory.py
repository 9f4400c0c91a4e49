"""Servers whose memory the trainer has for a while: it is really free, nothing reads it, and all of it comes back."""

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests

from megatron_rl.config import RolloutConfig
from megatron_rl.servers import supervisor as supervisor_module
from megatron_rl.servers.server_http import CommandRefused
from megatron_rl.servers.server_memory import ALL_MEMORY
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.weights.ipc import IPCPublisher
from tests.kit.client_calls import PROMPT, get, greedy, pid_of, post
from tests.kit.in_process import specs_of
from tests.kit.pace import held_at
from tests.kit.reference import BUCKET_BYTES, reference_greedy, used_tokens
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.servers import NEVER_LATE
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until

NOTHING, WEIGHTS = frozenset(), frozenset({"weights"})
MIB = 2**20


@pytest.fixture(scope="module")
def own_servers(tiny_model, tmp_path_factory):
    """Two servers of this module alone, which come back from every test with all their memory."""
    config = RolloutConfig(backend="embedded", server_count=2, token_file=TOKEN_FILE, **NEVER_LATE)
    with Supervisor(config, tiny_model, tmp_path_factory.mktemp("servers")) as supervisor:
        yield supervisor


def wait_for_a_reply(servers):
    """Until one is being generated."""
    wait_until(lambda: any(used_tokens(url) for url in servers.urls), "no reply begins", poll_s=0.0)


@pytest.mark.thorough
def test_released_memory_goes_back_to_the_system(tiny_model, tmp_path, from_command_lines):
    """In a process with the environment that a launcher gives it, by which it hands freed memory back."""
    folder = tmp_path / "wide"
    shutil.copytree(tiny_model, folder)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    wide = {"vocab_size": 16384, "hidden_size": 512, "num_key_value_heads": 4, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config | wide))
    embeddings, cache = 2 * 16384 * 512 * 4, 32 * 256 * 2 * 2 * 4 * 128 * 4
    with Supervisor(
        RolloutConfig(backend="embedded", token_file=TOKEN_FILE), folder, tmp_path, dummy_weights=True
    ) as supervisor:
        (url,) = supervisor.urls
        process = psutil.Process(pid_of(supervisor, url))
        sampling = {"max_new_tokens": 2, "ignore_eos": True}
        prompts = [[number, *range(200)] for number in range(32)]
        assert post(url, "/generate", {"input_ids": prompts, "sampling_params": sampling}).ok
        full = process.memory_info().rss
        assert post(url, "/release_memory_occupation", {"tags": ["kv_cache"]}).json() is None
        without_cache = process.memory_info().rss
        assert full - without_cache > 0.9 * cache > 50 * MIB
        assert post(url, "/release_memory_occupation").ok
        assert without_cache - process.memory_info().rss > 0.9 * embeddings > 50 * MIB
        assert post(url, "/resume_memory_occupation").ok
        assert post(url, "/generate", {"input_ids": prompts, "sampling_params": sampling}).ok


def test_a_server_without_memory_refuses_what_needs_it_by_name(own_servers, tiny_model):
    url = own_servers.urls[0]
    assert post(url, "/release_memory_occupation").ok and post(url, "/release_memory_occupation").ok
    generate = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    for path, body, parts in (
        ("/generate", generate, "weights and kv_cache"),
        ("/continue_generation", {}, "weights and kv_cache"),
        ("/weights_checker", {}, "weights"),
        ("/get_weights_by_name", {"name": "model.norm.weight"}, "weights"),
        ("/update_weights_from_disk", {"model_path": str(tiny_model)}, "weights"),
        ("/peer_tensor", {"name": "model.norm.weight", "peer_version": "released"}, "weights"),
    ):
        answer = post(url, path, body)
        assert answer.status_code == 400
        assert f"{parts}: released by /release_memory_occupation; call /resume_memory_occupation first" in answer.text
    assert requests.get(f"{url}/health_generate", timeout=LATE_S).ok, "it is well, and only has no memory"
    assert get(url, "/model_info")["weight_version"] == "released"
    assert post(url, "/resume_memory_occupation", {"tags": ["weights"]}).ok
    assert "kv_cache: released" in post(url, "/generate", generate).text
    assert post(url, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}).ok
    body = {"model_path": str(tiny_model), "weight_version": "7"}
    assert post(url, "/update_weights_from_disk", body).ok and post(url, "/generate", generate).ok
    answer = post(url, "/release_memory_occupation", {"tags": ["kv-cache"]})
    assert answer.status_code == 400 and "tags = ['kv-cache']: each must be one of weights, kv_cache" in answer.text


def test_requests_that_hold_keys_keep_the_memory(own_servers, connect):
    url = own_servers.urls[0]
    engine = connect(url, interruption="in_place", max_cache_age=1)
    with ThreadPoolExecutor(1) as pool:
        with held_at(64):
            reply = pool.submit(greedy, engine, 450)
            wait_for_a_reply(own_servers)
            engine.pause()
        answer = post(url, "/release_memory_occupation")
        assert answer.status_code == 400 and "1 running and 0 queued requests; pause with mode abort" in answer.text
        engine.resume()
        assert reply.result(LIMIT_S).output_len == 450


def test_a_reply_under_way_waits_for_the_servers_turn_and_ends_with_the_new_weights(
    own_servers, connect, weights, other_tiny_model
):
    engine, starts = connect(own_servers.urls), own_servers.starts
    publisher = IPCPublisher(engine, bucket_bytes=BUCKET_BYTES, timeout_s=LATE_S)
    with ThreadPoolExecutor(2) as pool:
        with held_at(64):
            under_way = pool.submit(greedy, engine, 450)
            wait_for_a_reply(own_servers)
            engine.set_memory(NOTHING, starts)
        on_its_way = pool.submit(post, own_servers.urls[0], "/generate", {"input_ids": PROMPT})
        wait_until(lambda: get(own_servers.urls[0], "/v1/loads")["loads"][0]["num_waiting_reqs"], "it did not come")
        engine.set_memory(WEIGHTS, starts)
        publisher.publish(specs_of(weights), weights.items(), 1)
        assert publisher.last.verified == 2 * len(weights) and not under_way.done()
        assert all("kv_cache: released" in post(url, "/continue_generation").text for url in own_servers.urls)
        assert not on_its_way.done(), "the publication does not let them go on"
        engine.set_memory(ALL_MEMORY, starts)
        reply = under_way.result(LIMIT_S)
        assert on_its_way.result(LIMIT_S).ok
    assert reply.output_len == 450 and reply.interruptions == 1 and reply.output_versions[-1] == 1
    assert greedy(engine).output_tokens == reference_greedy(other_tiny_model, PROMPT, 12)


def test_a_server_that_dies_while_its_device_is_lent_is_started_again_before_the_publication(
    own_servers, connect, weights, monkeypatch, caplog
):
    monkeypatch.setattr(supervisor_module, "FIRST_RESTART_S", 0.05)
    own_servers.lend_devices()
    engine = connect(own_servers.urls, on_drop=own_servers.replace)
    engine.set_memory(NOTHING, own_servers.starts)
    victim, first = own_servers.urls[1], own_servers.starts
    os.kill(pid_of(own_servers, victim), signal.SIGKILL)
    wait_until(lambda: "restart 1 of" in caplog.text, "its death is not seen")
    time.sleep(0.3)  # longer than before the first restart; on a slow machine it would come later
    assert own_servers.lacks_servers and own_servers.starts == first
    own_servers.start_missing([victim])
    again = own_servers.starts
    assert not own_servers.lacks_servers and again[victim] != first[victim]
    engine.set_memory(WEIGHTS, again)  # which the new one releases its cache for, and the old one gets
    assert all(post(url, "/continue_generation").text.count("kv_cache: released") for url in own_servers.urls)
    engine.select_servers()
    publisher = IPCPublisher(engine, bucket_bytes=BUCKET_BYTES, timeout_s=LATE_S)
    publisher.publish(specs_of(weights), weights.items(), 1)
    engine.set_memory(ALL_MEMORY, again)
    own_servers.take_devices_back()
    wait_until(lambda: sorted(engine.serving) == sorted(own_servers.urls), lambda: str(engine.serving))
    sums = [post(url, "/weights_checker").json()["per_engine_checksum"] for url in own_servers.urls]
    assert sums[0] == sums[1] and greedy(engine).output_versions == [1] * 12


def test_real_sglang_lends_its_memory_in_the_same_order(real_supervisor, connect, tiny_model, weights):
    """Without CUDA it frees nothing, but takes every call, and dies of one that asks for what it has."""
    engine, starts = connect(real_supervisor.urls), real_supervisor.starts
    publisher = IPCPublisher(engine, bucket_bytes=BUCKET_BYTES, timeout_s=LATE_S)
    for version in (3, 4):
        for parts in (NOTHING, WEIGHTS):
            engine.set_memory(parts, starts)
        publisher.publish(specs_of(weights), weights.items(), version)
        engine.set_memory(ALL_MEMORY, starts)
        assert greedy(engine).output_versions == [version] * 12
        engine.set_memory(WEIGHTS, starts)  # as for a checkpoint
        engine.set_memory(ALL_MEMORY, starts)
        assert greedy(engine).output_versions == [version] * 12
    engine.update_weights(tiny_model, 0)


def test_servers_that_cannot_lend_memory_end_the_run_with_their_words(scripted, connect):
    server = scripted(endpoints={"/server_info", "/model_info", "/health", "/pause_generation", "/flush_cache"})
    engine = connect(server.url)
    with pytest.raises(CommandRefused, match="/release_memory_occupation"):
        engine.set_memory(NOTHING, {server.url: 1})
