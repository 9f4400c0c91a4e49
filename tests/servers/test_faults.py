"""Real embedded servers that are killed, or stand behind a proxy that spoils their answers: replies stay the same."""

import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.api import NoServerLeft
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.weights.publish import GroupPublisher
from megatron_rl.workflows import RLVRWorkflow
from tests.kit.client_calls import ask, wait_until_selected, wait_until_serving
from tests.kit.fault_proxy import FAULTS, FaultProxy
from tests.kit.in_process import specs_of
from tests.kit.pace import held_at
from tests.kit.reference import reference_greedy, used_tokens
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.servers import NEVER_LATE
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until

LONG = 200
"""Tokens of replies that are still under way after some polls, also where other tests want the machine."""
TEXTS = ("The quick", "lazy dog", "What is 12 +", "user assistant")
# With a place in a data set their samples are the same whenever they are asked for.
PROMPTS = [{"prompt": text, "epoch": 0, "prompt_index": number} for number, text in enumerate(TEXTS)]


@pytest.fixture
def proxies(embedded_servers):
    proxies = [FaultProxy(url) for url in embedded_servers]
    yield proxies
    for proxy in proxies:
        proxy.stop()


def roll_out(engine, max_new_tokens):
    gconfig = GenerationConfig(
        n_samples=2 if max_new_tokens == LONG else 4, max_new_tokens=max_new_tokens, ignore_eos=True
    )
    return engine.rollout_batch(PROMPTS, RLVRWorkflow(lambda **_: 0.0, gconfig, make_tokenizer()))


def assert_same(batch, calm):
    assert batch["input_ids"].tolist() == calm["input_ids"].tolist()
    torch.testing.assert_close(batch["logprobs"], calm["logprobs"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("fault", [*FAULTS, "all"])
def test_replies_do_not_depend_on_faults(proxies, embedded_servers, connect, fault):
    calm = roll_out(connect(embedded_servers, seed=7), max_new_tokens=8)
    # Every other answer is spoilt, two each where all kinds come.
    kinds = itertools.cycle(FAULTS if fault == "all" else [fault])
    for proxy in proxies:
        proxy.faults.extend(itertools.chain.from_iterable((next(kinds), None) for _ in range(5)))
    engine = connect([proxy.url for proxy in proxies], seed=7)
    assert_same(roll_out(engine, max_new_tokens=8), calm)
    met = [fault for proxy in proxies for fault in proxy.met]
    assert len(met) >= 5 and set(met) == (set(FAULTS) if fault == "all" else {fault})
    spoilt = sum(kind != "delay" for kind in met)
    assert engine.metrics()["rollout/request_retries"] == spoilt


class Killable:
    """Two embedded servers of a supervisor, and a client and a publisher for them."""

    def __init__(self, supervisor, connect):
        self.supervisor = supervisor
        self.engine = connect(supervisor.urls, seed=7, on_drop=supervisor.replace)
        self.publisher = GroupPublisher(self.engine, bucket_bytes=20_000, backend="gloo", timeout_s=LATE_S)

    def kill(self, number):
        os.kill(self.supervisor._servers[number].process.pid, signal.SIGKILL)

    def publish(self, weights, version, *, on_the_way=lambda number: None):
        """As the main loop does: again until a server is left that has it. `on_the_way` is told of each tensor."""

        def tensors():
            for number, pair in enumerate(weights.items()):
                on_the_way(number)
                yield pair

        with self.supervisor.publication():
            while True:
                self.engine.select_servers()
                try:
                    return self.publisher.publish(specs_of(weights), tensors(), version)
                except NoServerLeft:
                    pass


@pytest.fixture
def servers(tiny_model, tmp_path, connect, monkeypatch):
    monkeypatch.setattr("megatron_rl.servers.supervisor.FIRST_RESTART_S", 0.1)
    config = RolloutConfig(backend="embedded", server_count=2, token_file=TOKEN_FILE, **NEVER_LATE)
    with Supervisor(config, tiny_model, tmp_path, dummy_weights=True) as supervisor:
        servers = Killable(supervisor, connect)
        yield servers
        servers.publisher.close()


def test_killed_servers_lose_no_reply_and_come_back_with_the_current_weights(servers, tiny_model, other_tiny_model):
    engine, urls = servers.engine, servers.supervisor.urls
    old, new = (load_file(folder / "model.safetensors") for folder in (tiny_model, other_tiny_model))
    servers.publish(old, version=0)
    calm = roll_out(engine, max_new_tokens=LONG)
    calm_start = roll_out(engine, max_new_tokens=8)

    # In the middle of generation: the other server gives the same replies.
    with ThreadPoolExecutor(1) as pool:
        with held_at(LONG - 10):
            batch = pool.submit(roll_out, engine, LONG)
            wait_until(lambda: used_tokens(urls[0]) > 100)
            servers.kill(0)
        assert_same(batch.result(LIMIT_S), calm)
    assert engine.metrics()["rollout/server_failures"] > 0

    # It serves again without a publication, with the other's weights.
    wait_until_serving(engine, 2)
    assert_same(roll_out(engine, max_new_tokens=8), calm_start)

    # In the middle of a publication: the other one gets all of it, in a group of its own.
    servers.publish(new, version=1, on_the_way=lambda number: servers.kill(1) if number == 12 else None)
    assert servers.publisher.last.verified == len(new)
    expected = reference_greedy(other_tiny_model, [1], 16)
    wait_until_serving(engine, 2)
    for rid in ("a", "b"):  # one server each
        reply = ask(engine, rid=rid, max_new_tokens=16, greedy=True, ignore_eos=True)
        assert (reply.output_tokens, reply.output_versions) == (expected, [1] * 16)

    # Both of them, before a publication: it waits for one that is restarted.
    servers.kill(0)
    servers.kill(1)
    servers.publish(new, version=2)
    wait_until_selected(engine, 2)
    servers.publish(new, version=3)
    assert sorted(engine.serving) == sorted(urls)
    for rid in ("a", "b"):  # one server each
        reply = ask(engine, rid=rid, max_new_tokens=16, greedy=True, ignore_eos=True)
        assert (reply.output_tokens, reply.output_versions) == (expected, [3] * 16)
