"""A training server that is killed again and again while clients of two models train, sample and save."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import requests
import torch

from tests.kit.models import make_model
from tests.kit.tinker_clients import (
    adapters_in,
    client_of,
    logprobs_in,
    quiet_clients,
    saved,
    some_data,
    types,
)
from tests.kit.training_servers import MortalServer, forking_server
from tests.kit.waiting import LIMIT_S, SLOWNESS, wait_until

pytestmark = pytest.mark.thorough
PROMPT = [1, 2, 3, 4, 5]
SEEDS = (1, 2)


@pytest.fixture(scope="module")
def start():
    with forking_server() as start:  # before the clients' threads begin
        yield start


@pytest.fixture(scope="module", autouse=True)
def clients(start):
    with quiet_clients():
        yield


@dataclass
class Life:
    """What a client got: results in the order of its calls, the number of its steps, and its weights in the end."""

    results: list = field(default_factory=list)
    steps: int = 0
    model: str = ""
    weights: str = ""


def live(life, client, seed, is_over):
    """Train a model until `is_over(steps)`, with several requests in flight, and sample and save now and then."""
    model = client.create_lora_training_client("tiny", rank=2, seed=seed).result()
    life.model, prompt = model.model_id, types.ModelInput.from_ints(PROMPT)
    while not is_over(life.steps):
        step, data = life.steps, some_data("cross_entropy", seed=1000 * seed + life.steps)[0]
        passes = [model.forward_backward(data, "cross_entropy")]
        if step % 3 == 0:
            passes.append(model.forward_backward(some_data("ppo", seed=step)[0], "ppo"))
        if step % 4 == 1:
            passes.append(model.forward(data, "cross_entropy"))
        taken = model.optim_step(types.AdamParams(learning_rate=1e-2))
        kept = model.save_state(f"state-{step}") if step % 5 == 2 else None
        for one in passes:
            output = one.result()
            life.results.append((output.metrics["loss:sum"], logprobs_in(output).tolist()))
        life.results.append(taken.result().metrics["grad_norm"])
        if kept is not None:
            life.results.append(kept.result().path.rpartition("/")[2])
        if step % 5 == 3:
            sampler = model.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
            life.results.append(sampler.sample(prompt, 1, params).result().sequences[0].tokens)
            life.results.append(sampler.compute_logprobs(prompt).result())
        life.steps += 1
    life.weights = model.save_weights_for_sampler("end").result().path
    return life


def kept_results(server, key, model):
    """Return the results that the server still has for a model, by number, as it sends them."""
    found, number = {}, 0
    while len(found) < 2 or number - max(found) < 3:  # those that are no longer kept come first
        body = {"request_id": f"{model}:{number}"}
        options = {"headers": {"X-API-Key": key}, "timeout": LIMIT_S}
        answer = requests.post(f"{server.url}/api/v1/retrieve_future", json=body, **options)
        if answer.status_code == 200:
            found[number] = answer.content
        assert answer.status_code in (200, 404) and number < 10_000, answer.text
        number += 1
    return found


@pytest.mark.timeout(3000 * SLOWNESS)
@pytest.mark.parametrize(("ranks", "kills"), [(1, 30), (2, 20)])
def test_after_many_kills_all_results_and_weights_are_those_of_an_undisturbed_run(ranks, kills, start, tmp_path):
    make_model("qwen3", tmp_path / "model", 2)
    arguments = ["--checkpoint-every", "3", "--slots", "4", f"parallel.tensor={ranks}"]
    over, lives = threading.Event(), [Life() for _ in SEEDS]
    with (
        MortalServer(start, tmp_path, tmp_path / "model", *arguments, ranks=ranks, seed=ranks) as server,
        ThreadPoolExecutor(len(SEEDS)) as pool,
    ):
        server.up()
        key = tmp_path / "run" / "api_key"
        running = [
            pool.submit(live, life, client_of(server.url, key), seed, lambda _: over.is_set())
            for life, seed in zip(lives, SEEDS, strict=True)
        ]
        try:
            while server.kills < kills and not any(one.done() for one in running):
                server.kill_something(lambda: sum(len(life.results) for life in lives))
        finally:
            over.set()
            server.up()

        def have_ended():
            server.up()
            return all(one.done() for one in running)

        wait_until(have_ended, (tmp_path / "log").read_text)
        assert [one.result() for one in running] == lives and server.kills == kills
        before = [kept_results(server, key.read_text().strip(), life.model) for life in lives]
        server.kill()
        server.up()
        assert [kept_results(server, key.read_text().strip(), life.model) for life in lives] == before
        for life, seed in zip(lives, SEEDS, strict=True):
            count = life.steps
            assert count > kills / 5, f"{count} steps while the server was killed {kills} times"
            alone = live(Life(), client_of(server.url, key), seed, lambda steps, count=count: steps >= count)
            assert alone.results == life.results
            mine, theirs = (adapters_in(saved(tmp_path, one.weights)) for one in (alone, life))
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
