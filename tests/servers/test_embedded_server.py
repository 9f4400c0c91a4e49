"""The embedded server over HTTP: SGLang's shapes, statuses and weight updates, on a tiny random Qwen3."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_rl.launch.ports import free_port
from megatron_rl.tools.embedded_server.bodies import MAX_BODY_BYTES
from megatron_rl.weights.update_group import TensorSpec, checksum, join_update_group, leave_update_group, unpack_bucket
from tests.kit import embedded, programs
from tests.kit.reference import pack_bucket
from tests.kit.run_tokens import AUTHORIZED, TOKEN
from tests.kit.served_models import make_tiny_model
from tests.kit.tokenizers import VOCAB_SIZE
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until

CONTEXT = 512
PROMPT = list(range(100, 120))
LONG = {"max_new_tokens": 450, "ignore_eos": True, "sampling_seed": 1}


class Server:
    """A client of one server process. The weights are restored by whoever changes them."""

    def __init__(self, running: embedded.Process):
        self.process, self.url, self.said = running.process, running.url, running.said

    def post(self, path: str, body: Any = None, **options) -> requests.Response:
        options = {"json": {} if body is None else body, "headers": AUTHORIZED} | options
        return requests.post(f"{self.url}{path}", timeout=LATE_S, **options)

    def get(self, path: str, **options) -> requests.Response:
        return requests.get(f"{self.url}{path}", timeout=LATE_S, **{"headers": AUTHORIZED} | options)

    def ok(self, path: str, body: Any = None) -> Any:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json() if response.content else None

    def generate(self, prompt: list[int] = PROMPT, **body) -> Any:
        sampling = {"max_new_tokens": 8, "ignore_eos": True} | body.pop("sampling", {})
        return self.ok("/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True} | body)

    def checksums(self) -> dict[str, str]:
        return self.ok("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]

    def wait_for_tokens(self, count: int = 1) -> None:
        """Until running requests have generated something."""
        start = self.counter("generation_tokens_total")
        wait_until(lambda: self.counter("generation_tokens_total") >= start + count, "nothing is generated", poll_s=0.0)

    def counter(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(f"sglang:{name}{{")))


@contextmanager
def start_server(model: Path, *options: str, **how: Any) -> Iterator[Server]:
    with embedded.in_a_process(model, *options, **how) as running:
        yield Server(running)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(folder / name, seed=seed) for seed, name in enumerate(("first", "second"))}


@pytest.fixture(scope="module")
def shared(models) -> Iterator[Server]:
    options = ("--parent-pid", str(os.getpid()), "--max-running-requests", "8")
    with start_server(models["first"], *options) as server:
        yield server


@pytest.fixture
def server(shared, models) -> Iterator[Server]:
    """The shared server, with the first model's weights, version "default", an empty cache, not paused."""
    yield shared
    shared.ok("/abort_request", {"abort_all": True})
    shared.ok("/continue_generation")
    shared.post("/end_weight_update")
    if shared.get("/model_info").json()["model_path"] != str(models["first"]) or "touched" in vars(shared):
        shared.ok("/update_weights_from_disk", {"model_path": str(models["first"]), "weight_version": "default"})
        vars(shared).pop("touched", None)
    assert shared.get(f"/flush_cache?timeout={LIMIT_S:g}").status_code == 200


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


@pytest.fixture
def group(server, pool) -> Iterator[dist.ProcessGroup]:
    """The update group of this process (rank 0) and the server."""
    port, name = free_port("127.0.0.1"), "weights"
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    joined = pool.submit(server.ok, "/init_weights_update_group", body | {"group_name": name, "backend": "gloo"})
    group = join_update_group(address="127.0.0.1", port=port, rank=0, world_size=2, name=name)
    assert joined.result()["success"]
    server.touched = True
    yield group
    server.ok("/destroy_weights_update_group", {"group_name": name})
    leave_update_group(group)


def describe(tensors: dict[str, torch.Tensor], **options) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
        "group_name": "weights",
    } | options


def send(
    server: Server, pool, group, tensors: dict[str, torch.Tensor], *, flattened: bool, **options
) -> requests.Response:
    body = describe(tensors, load_format="flattened_bucket" if flattened else None, **options)
    call = pool.submit(server.post, "/update_weights_from_distributed", body)
    for tensor in [pack_bucket(list(tensors.values()))] if flattened else tensors.values():
        dist.broadcast(tensor.clone(), src=0, group=group)
    return call.result()


# Generation


def test_answer_has_the_shape_of_sglang(server):
    answer = server.generate(rid="mine")
    info = answer["meta_info"]
    assert info["id"] == "mine" and info["finish_reason"] == {"type": "length", "length": 8}
    assert (info["prompt_tokens"], info["completion_tokens"], info["weight_version"]) == (20, 8, "default")
    assert info["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]
    assert [token for _, token, text in info["output_token_logprobs"]] == answer["output_ids"]
    assert info["input_token_logprobs"] == [] and info["output_token_logprobs_length"] == 8


def test_prompt_logprobs_start_with_null_and_agree_with_sampled_ones(server):
    reply = server.generate(sampling={"sampling_seed": 5})
    sampled = reply["meta_info"]["output_token_logprobs"]
    whole = PROMPT + reply["output_ids"]
    scored = server.generate(whole, logprob_start_len=0, sampling={"max_new_tokens": 0})
    triples = scored["meta_info"]["input_token_logprobs"]
    assert triples[0] == [None, 100, None] and len(triples) == len(whole) and scored["output_ids"] == []
    for ours, theirs in zip(triples[20:], sampled, strict=True):
        assert ours[1] == theirs[1] and ours[0] == pytest.approx(theirs[0], abs=1e-4)


def test_equal_seeds_give_equal_replies_on_two_servers(server, models):
    sampling = {"sampling_seed": 11, "max_new_tokens": 40, "temperature": 0.8}
    with start_server(models["first"]) as other:
        theirs = other.generate(sampling=sampling)
    assert server.generate(sampling=sampling)["output_ids"] == theirs["output_ids"]


def test_n_samples_come_as_a_list_with_ids_of_their_own(server):
    answers = server.generate(rid="mine", sampling={"n": 3, "sampling_seed": 1})
    assert len({tuple(a["output_ids"]) for a in answers}) == 3
    assert len({a["meta_info"]["id"] for a in answers} - {"mine"}) == 3
    assert answers == server.generate(sampling={"n": 3, "sampling_seed": 1}) or [a["output_ids"] for a in answers] == [
        a["output_ids"] for a in server.generate(sampling={"n": 3, "sampling_seed": 1})
    ]


def test_a_batch_is_answered_in_order(server):
    body = {"input_ids": [[9, 8, 7], [5] * 30], "rid": ["a", "b"], "sampling_params": {"max_new_tokens": 2}}
    answers = server.ok("/generate", body)
    assert [(a["meta_info"]["id"], a["meta_info"]["prompt_tokens"]) for a in answers] == [("a", 3), ("b", 30)]


def test_stop_strings_end_the_reply_and_are_trimmed(server):
    seeded = {"sampling_seed": 3, "max_new_tokens": 60}
    text = server.generate(sampling=seeded)["text"]
    stop = next(word for word in text[8:] if word.isalpha())
    stopped = server.generate(sampling=seeded | {"stop": stop})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == text[: text.find(stop)]
    kept = server.generate(sampling=seeded | {"stop": [stop, "never"], "no_stop_trim": True})
    assert kept["text"].startswith(stopped["text"] + stop) and kept["output_ids"] == stopped["output_ids"]


def test_a_stop_token_is_in_the_ids_but_not_in_the_text(server):
    seeded = {"sampling_seed": 3, "max_new_tokens": 30}
    ids = server.generate(sampling=seeded)["output_ids"]
    reply = server.generate(sampling=seeded | {"ignore_eos": False, "stop_token_ids": [ids[9]]})
    stop_at = min(i for i, token in enumerate(ids) if token in (ids[9], 1))
    assert reply["output_ids"] == ids[: stop_at + 1]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[stop_at]}
    without = server.generate(sampling=seeded | {"max_new_tokens": stop_at}) if stop_at else {"text": ""}
    assert reply["text"] == without["text"]


def test_stream_chunks_are_cumulative_and_end_with_done(server):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}, "return_logprob": True}
    response = server.post("/generate", body | {"stream": True}, stream=True)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    for shorter, longer in zip(chunks, chunks[1:], strict=False):
        assert longer["output_ids"][: len(shorter["output_ids"])] == shorter["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert len(chunks[-1]["meta_info"]["output_token_logprobs"]) == 12


def test_max_new_tokens_is_cut_to_the_context(server):
    reply = server.generate([5] * (CONTEXT - 10), sampling={"max_new_tokens": 100})
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 10}


def test_chat_answers_with_text_and_meta_info(server):
    body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 5, "logprobs": True, "seed": 4}
    answer = server.ok("/v1/chat/completions", body | {"return_meta_info": True})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("length", "stop") and isinstance(choice["message"]["content"], str)
    triples = choice["meta_info"]["output_token_logprobs"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [logprob for logprob, _, _ in triples]
    assert answer["usage"]["completion_tokens"] == len(triples)
    assert answer["metadata"]["weight_version"] == "default"


@pytest.mark.parametrize(
    "body, message",
    [
        (b"{not json", "not JSON"),
        ([1, 2], "must be a JSON object"),
        ({}, "exactly one of input_ids and text"),
        ({"input_ids": [1], "text": "a"}, "exactly one of input_ids and text"),
        ({"input_ids": []}, "input_ids: must be a non-empty list"),
        ({"input_ids": [[]]}, "input_ids: must be a non-empty list"),
        ({"input_ids": "abc"}, "input_ids: must be a non-empty list"),
        ({"input_ids": [1, VOCAB_SIZE]}, f"input_ids[1] = {VOCAB_SIZE}: must be an integer in [0, {VOCAB_SIZE})"),
        ({"input_ids": [-1]}, "input_ids[0] = -1"),
        ({"input_ids": [1.5]}, "input_ids[0] = 1.5"),
        ({"input_ids": [True]}, "input_ids[0] = True"),
        ({"input_ids": ["1"]}, "input_ids[0] = '1'"),
        (
            {"input_ids": [1] * CONTEXT},
            f"The input ({CONTEXT} tokens) is longer than the model's context length ({CONTEXT} tokens).",
        ),
        ({"text": ""}, "text: must be a non-empty string"),
        ({"input_ids": [1], "sampling_params": 3}, "sampling_params = 3: must be an object"),
        ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "unknown field sampling_params.temprature"),
        ({"input_ids": [1], "sampling_params": {"top_p": "x"}}, "sampling_params.top_p = 'x'"),
        ({"input_ids": [1], "sampling_params": {"regex": "a"}}, "sampling_params.regex is not supported"),
        ({"input_ids": [1], "sampling_params": [{}, {}]}, "sampling_params: a list of 2"),
        ({"input_ids": [1], "rid": 5}, "rid = 5"),
        ({"input_ids": [1], "stream": "yes"}, "stream = 'yes'"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len = 9"),
        ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num is not supported"),
        ({"input_ids": [1], "return_routed_experts": True}, "return_routed_experts: the server was started without it"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_bodies_are_refused_with_the_field_and_the_rule(server, body, message):
    response = server.post("/generate", json=None, data=body if isinstance(body, bytes) else json.dumps(body))
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_what_is_too_large_is_refused_and_the_server_lives_on(server):
    too_many = {"input_ids": [[1]] * 4097, "sampling_params": {"max_new_tokens": 1}}
    twice = {"input_ids": [[1]] * 2, "sampling_params": {"max_new_tokens": 1, "n": 2049}}
    for body, message in (
        (too_many, "4097 prompts: a call may ask for 4096 samples in all"),
        (twice, "2 prompts: a call may ask for 4096 samples in all"),
        ({"input_ids": [-1] * CONTEXT}, f"The input ({CONTEXT} tokens) is longer than"),
    ):
        refused = server.post("/generate", body)
        assert refused.status_code == 400 and message in refused.json()["error"]["message"]
    large = b" " * (MAX_BODY_BYTES + 1)
    for path in ("/generate", "/pause_generation", "/update_weights_from_tensor"):
        assert server.post(path, json=None, data=large).status_code == 413, path
    # One that brings weights may be larger, and is read as what it should be.
    server.ok("/begin_weight_update")
    refused = server.post("/update_weights_from_delta", json=None, data=large)
    assert refused.status_code == 400 and "delta" in refused.json()["message"]
    # aiohttp's own bound of a header field.
    assert server.get("/server_info", headers=AUTHORIZED | {"X": "x" * 100_000}).status_code == 400
    server.generate()


def test_unknown_paths_and_methods_answer_in_json(server):
    for response, status in ((server.post("/no_such_path"), 404), (server.get("/generate"), 405)):
        assert response.status_code == status and "message" in response.json()["error"]


def test_a_live_rid_is_refused_and_free_again_afterwards(server, pool):
    first = pool.submit(server.generate, rid="twin", sampling=LONG)
    server.wait_for_tokens()
    refused = server.post("/generate", {"input_ids": PROMPT, "rid": "twin"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "Duplicate request ID detected: twin"
    refused = server.post("/generate", {"input_ids": [PROMPT] * 3, "rid": ["one", "two", "two"]})
    assert refused.json()["error"]["message"] == "Duplicate request ID detected: two"
    server.ok("/abort_request", {"rid": "twin"})
    first.result()
    server.generate(rid="twin")


def test_abort_keeps_partial_tokens(server, pool):
    reply = pool.submit(server.generate, rid="long", sampling=LONG)
    other = pool.submit(server.generate, rid="long-2", sampling=LONG | {"max_new_tokens": 100})
    server.wait_for_tokens(4)
    server.ok("/abort_request", {"rid": "long"})
    info = reply.result()["meta_info"]
    assert info["finish_reason"]["type"] == "abort" and info["finish_reason"]["message"] == "Aborted"
    assert 0 < info["completion_tokens"] == len(info["output_token_logprobs"]) < 450
    assert other.result()["meta_info"]["completion_tokens"] == 100  # an id is no prefix
    server.ok("/abort_request", {"rid": "unknown"})


def test_a_client_that_hangs_up_aborts_its_request(server):
    with pytest.raises(requests.Timeout):
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 490, "ignore_eos": True, "n": 8}}
        requests.post(f"{server.url}/generate", json=body, headers=AUTHORIZED, timeout=0.05)
    wait_until(lambda: not server.counter("num_running_reqs") + server.counter("num_queue_reqs"), "it goes on")
    assert server.counter("num_requests_total") > 0


def test_new_requests_wait_at_the_door_while_paused(server, pool):
    server.ok("/pause_generation", {"mode": "retract"})
    held = pool.submit(server.generate)
    wait_until(lambda: server.counter("num_queue_reqs"), "it does not come")
    assert not held.done() and server.get("/flush_cache").status_code == 200
    server.ok("/continue_generation")
    assert len(held.result()["output_ids"]) == 8
    assert server.post("/pause_generation", {"mode": "nap"}).status_code == 400


# Weights


@pytest.mark.parametrize("flattened", [False, True])
def test_weights_arrive_bit_for_bit_over_gloo(server, pool, group, models, flattened):
    tensors = load_file(models["second"] / "model.safetensors")
    half = len(tensors) // 2
    server.ok("/pause_generation", {"mode": "retract"})
    server.ok("/begin_weight_update")
    for part in (dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])):
        response = send(server, pool, group, part, flattened=flattened, weight_version="2", flush_cache=False)
        assert response.json()["success"], response.text
    server.ok("/end_weight_update")
    server.ok("/continue_generation")
    sums, reply = server.checksums(), server.generate(sampling={"temperature": 0})
    assert server.ok("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 3}) == pytest.approx(
        tensors["model.norm.weight"][:3].tolist()
    )
    assert reply["meta_info"]["weight_version"] == server.get("/model_info").json()["weight_version"] == "2"
    server.ok("/update_weights_from_disk", {"model_path": str(models["second"]), "weight_version": "3"})
    assert sums == server.checksums()
    assert server.generate(sampling={"temperature": 0})["output_ids"] == reply["output_ids"]


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("paused", [False, True])
def test_bfloat16_tensors_are_cast_to_the_servers_dtype(server, pool, group, flattened, paused):
    norm = {"model.norm.weight": torch.randn(64).bfloat16()}
    if paused:
        server.ok("/pause_generation", {"mode": "retract"})
    server.ok("/begin_weight_update")
    assert send(server, pool, group, norm, flattened=flattened).json()["success"]
    assert server.checksums()["model.norm.weight"] == checksum(norm["model.norm.weight"].float())
    server.ok("/continue_generation")
    values = server.ok("/get_weights_by_name", {"name": "model.norm.weight"})
    assert values == norm["model.norm.weight"].float().tolist()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"names": ["model.norm.wait"]}, "model.norm.wait: the qwen3 model has no such tensor"),
        ({"shapes": [[65]]}, "model.norm.weight: shape [65] must be [64]"),
        ({"shapes": [64]}, "model.norm.weight: shape 64 must be a list"),
        ({"dtypes": ["int3"]}, "model.norm.weight: dtype 'int3' must be one of"),
        ({"dtypes": []}, "1 names, 0 dtypes and 1 shapes"),
        ({"group_name": "other"}, "group_name = 'other': no such group"),
        ({"load_format": "direct"}, "load_format = 'direct'"),
        ({"names": None}, "names: required"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_updates_are_refused_before_anything_is_received(server, group, change, message):
    before = server.checksums()
    server.ok("/begin_weight_update")
    body = describe({"model.norm.weight": torch.zeros(64)}) | change
    response = server.post("/update_weights_from_distributed", body)
    assert response.status_code == 400 and message in response.json()["message"]
    assert server.checksums() == before


@contextmanager
def dying_sender(server: Server, send: Callable[[dist.ProcessGroup], object]) -> Iterator[Callable[[], None]]:
    """A process that joins a group with the server and sends something. Call it: the process ends, without a word."""
    port = free_port("127.0.0.1")
    may_end, ends = os.pipe()
    sender = os.fork()
    if sender == 0:
        try:
            os.close(ends)
            send(join_update_group(address="127.0.0.1", port=port, rank=0, world_size=2, name="dying"))
            os.read(may_end, 1)
        finally:
            os._exit(1)
    os.close(may_end)
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    server.ok("/init_weights_update_group", body | {"group_name": "dying"})

    def end() -> None:
        os.close(ends)
        os.waitpid(sender, 0)

    yield end
    server.ok("/destroy_weights_update_group", {"group_name": "dying"})


TWO_TENSORS = {"model.norm.weight": torch.zeros(64), "model.embed_tokens.weight": torch.zeros(VOCAB_SIZE, 64)}


def test_a_sender_that_dies_in_an_update_leaves_the_old_weights_and_a_living_server(server, pool):
    before = server.checksums()
    with dying_sender(server, lambda group: None) as end_sender:
        server.ok("/begin_weight_update")
        body = describe(TWO_TENSORS, group_name="dying")
        update = pool.submit(server.post, "/update_weights_from_distributed", body)
        end_sender()
        assert update.result().status_code == 400
        assert "Failed to update weights" in update.result().json()["message"]
    server.ok("/end_weight_update")
    assert server.checksums() == before and server.get("/health_generate").status_code == 200


def test_a_paused_server_says_that_its_weights_are_incomplete_until_an_update_is_whole(server, pool, group):
    server.ok("/pause_generation", {"mode": "retract"})
    server.ok("/begin_weight_update")
    with dying_sender(server, lambda group: dist.broadcast(torch.zeros(64), group=group, group_src=0)) as end_sender:
        body = describe(TWO_TENSORS, group_name="dying", weight_version="2", flush_cache=False)
        update = pool.submit(server.post, "/update_weights_from_distributed", body)
        end_sender()
        assert update.result().status_code == 400
    assert server.get("/model_info").json()["weight_version"] == "incomplete"
    held = server.checksums()["model.norm.weight"]
    assert held == checksum(TWO_TENSORS["model.norm.weight"]), "it says what it holds, not what it held"
    assert send(server, pool, group, TWO_TENSORS, flattened=False, weight_version="2", flush_cache=False).ok
    server.ok("/end_weight_update")
    server.ok("/continue_generation")
    assert server.get("/model_info").json()["weight_version"] == "2"
    sums = server.checksums()
    assert all(sums[name] == checksum(tensor) for name, tensor in TWO_TENSORS.items())


def test_joining_a_group_that_nobody_hosts_ends_at_its_deadline():
    with pytest.raises(RuntimeError, match="127.0.0.1"):
        join_update_group(
            address="127.0.0.1", port=free_port("127.0.0.1"), rank=1, world_size=2, name="lonely", timeout_s=1
        )


@pytest.fixture
def default_group(monkeypatch) -> Iterator[dist.ProcessGroup]:
    # torchrun sets this, and torch's own rendezvous then expects torchrun's store instead of hosting one.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_group_works_beside_a_default_group_and_under_torchrun(default_group, server, pool, group):
    assert dist.group.WORLD is default_group and dist.get_world_size() == 1 and group.size() == 2
    server.ok("/begin_weight_update")
    assert send(server, pool, group, {"model.norm.weight": torch.ones(64)}, flattened=False).json()["success"]
    assert server.ok("/get_weights_by_name", {"name": "model.norm.weight"}) == [1.0] * 64


def test_updates_need_an_open_session(server, group):
    response = server.post("/update_weights_from_distributed", describe({"model.norm.weight": torch.zeros(64)}))
    assert response.status_code == 400 and response.json() == {
        "success": False,
        "message": "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()",
    }
    server.ok("/begin_weight_update")
    assert server.post("/begin_weight_update").status_code == 400
    server.ok("/end_weight_update")
    assert server.post("/end_weight_update").status_code == 400


def test_unknown_and_repeated_groups_are_refused(server, group):
    assert server.post("/destroy_weights_update_group", {"group_name": "nobody"}).status_code == 400
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "weights"}
    response = server.post("/init_weights_update_group", body | {"backend": "gloo"})
    assert response.status_code == 400 and "that group exists" in response.json()["message"]
    response = server.post("/init_weights_update_group", body | {"backend": "nccl", "group_name": "x"})
    assert response.status_code == 400 and "backend = 'nccl'" in response.json()["message"]


def test_a_bad_folder_leaves_the_old_weights(server, tmp_path, models):
    before = server.checksums()
    headless = make_tiny_model(tmp_path / "headless", seed=5, tied=True)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes((models["second"] / "model.safetensors").read_bytes()[:5000])
    for path, message in (
        (tmp_path / "none", "no *.safetensors"),
        (headless, "lm_head.weight"),
        (tmp_path / "cut", "not a whole safetensors"),
    ):
        response = server.post("/update_weights_from_disk", {"model_path": str(path)})
        assert response.status_code == 400 and message in response.json()["message"], response.text
    assert server.checksums() == before and server.get("/model_info").json()["model_path"] == str(models["first"])


def test_weights_that_an_error_left_half_written_are_named_incomplete(models, monkeypatch):
    with embedded.in_a_thread(models["first"], TOKEN) as it:

        def post(path, body):
            return requests.post(f"{it.url}{path}", json=body, headers=AUTHORIZED, timeout=LATE_S)

        def version():
            found = requests.get(f"{it.url}/model_info", headers=AUTHORIZED, timeout=LATE_S)
            return found.json()["weight_version"]

        def write_some(name, tensor):
            if name == "model.norm.weight":
                raise OSError("the disk is gone")
            write(name, tensor)

        write = it.server.batcher.model.write
        load = {"model_path": str(models["second"]), "weight_version": "2"}
        assert not post("/update_weights_from_disk", load | {"model_path": "nowhere"}).ok and version() == "default"
        monkeypatch.setattr(it.server.batcher.model, "write", write_some)
        response = post("/update_weights_from_disk", load)
        assert response.status_code == 400 and "the disk is gone" in response.json()["message"]
        assert version() == "incomplete"
        monkeypatch.undo()
        assert post("/update_weights_from_disk", load).ok and version() == "2"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_request_that_lives_through_an_update_reports_both_versions(server, pool, models, mode):
    reply = pool.submit(server.generate, sampling=LONG)
    server.wait_for_tokens(10)
    server.ok("/pause_generation", {"mode": mode})
    update = {"model_path": str(models["second"]), "weight_version": "7", "flush_cache": mode == "retract"}
    server.ok("/update_weights_from_disk", update)
    server.ok("/continue_generation")
    info = reply.result()["meta_info"]
    first, second = info["weight_versions"]
    assert (first["version"], first["start"], second["version"]) == ("default", 0, "7")
    assert 0 < first["end"] == second["start"] and second["end"] == 450
    assert info["num_retractions"] == (mode == "retract") and info["weight_version"] == "7"


def test_in_place_requests_refuse_a_flush_and_so_does_an_update_that_asks_for_one(server, pool, models):
    before = server.checksums()
    reply = pool.submit(server.generate, sampling=LONG)
    server.wait_for_tokens()
    server.ok("/pause_generation", {"mode": "in_place"})
    assert server.get("/flush_cache").status_code == 400
    response = server.post("/update_weights_from_disk", {"model_path": str(models["second"])})
    assert response.status_code == 400 and "flush_cache" in response.json()["message"]
    assert server.checksums() == before
    server.ok("/continue_generation")
    assert reply.result()["meta_info"]["completion_tokens"] == 450


def test_an_update_without_a_pause_waits_for_running_requests(server, pool, models):
    reply = pool.submit(server.generate, sampling=LONG)
    server.wait_for_tokens()
    server.ok("/update_weights_from_disk", {"model_path": str(models["second"]), "weight_version": "9"})
    assert reply.result(LIMIT_S)["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 450}]


def test_update_weight_version_aborts_unless_told_not_to(server, pool):
    server.touched = True
    reply = pool.submit(server.generate, sampling=LONG)
    server.wait_for_tokens()
    server.ok("/update_weight_version", {"new_version": "5", "abort_all_requests": False})
    server.wait_for_tokens()
    server.ok("/update_weight_version", {"new_version": "6"})
    info = reply.result()["meta_info"]
    assert info["finish_reason"]["type"] == "abort"
    assert [span["version"] for span in info["weight_versions"]][:2] == ["default", "5"]


# Information and the process


def test_information_endpoints(server, models):
    for path in ("/health", "/ready", "/health_generate"):
        assert server.get(path).status_code == 200
    assert server.get("/model_info").json() == server.get("/get_model_info").json()
    info = server.get("/server_info").json()
    assert (info["version"], info["embedded"], info["dtype"], info["tp_size"]) == ("0.5.21", True, "float32", 1)
    assert TOKEN not in str(info)
    (load,) = server.get("/v1/loads?include=core").json()["loads"]
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == 0
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (str(models["first"]), CONTEXT)
    assert server.counter("num_requests_total") > 0


def test_whoever_does_not_send_the_token_is_told_nothing(server):
    for path in ("/health", "/ready", "/health_generate", "/metrics"):
        assert server.get(path, headers={}).status_code == 200
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}}
    for sent in ("", "Bearer wrong", f"Bearer {TOKEN[:-1]}", TOKEN, f"bearer {TOKEN}", "Bearer \udcff"):
        headers = {"Authorization": sent.encode(errors="surrogateescape")}
        for path in ("/generate", "/pause_generation", "/no_such_endpoint"):
            refused = server.post(path, body, headers=headers)
            assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"}), (sent, path)
        assert server.get("/server_info", headers=headers).status_code == 401
    assert server.post("/generate", body).status_code == 200


def test_a_server_without_a_token_generates_and_lets_nobody_change_it(models):
    with start_server(models["first"], token_file=None) as server:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}}
        assert server.post("/generate", body, headers={}).json()["meta_info"]["completion_tokens"] == 3
        for path in ("/health", "/metrics", "/model_info", "/server_info", "/v1/models", "/v1/loads"):
            assert server.get(path, headers={}).status_code == 200, path
        for path in (
            *("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache", "/weights_checker"),
            *("/init_weights_update_group", "/update_weights_from_disk", "/update_weight_version", "/peer_tensor"),
        ):
            refused = server.post(path, {}, headers=AUTHORIZED)
            assert refused.status_code == 403 and "--token-file FILE" in refused.json()["error"]["message"], path


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "somewhere"])
def test_a_server_that_others_reach_needs_a_token(host, tmp_path):
    command = [sys.executable, "-m", "megatron_rl.tools.embedded_server.server", str(tmp_path), "--host", host]
    result = programs.run(command, env=dict(os.environ))
    assert result.returncode == 1 and f"--host {host}: " in result.stderr and "add --token-file FILE" in result.stderr


def test_a_server_without_a_tokenizer(models, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((models["first"] / name).read_bytes())
    ready = tmp_path / "url"
    with start_server(tmp_path, "--ready-file", str(ready), "--weight-version", "4") as server:
        assert ready.read_text() == server.url
        assert server.get("/health").status_code == 200
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}}
        answer = server.post("/generate", body).json()
        assert answer["text"] == "" and answer["meta_info"]["weight_version"] == "4"
        for bad in (
            {"text": "hi"},
            body | {"sampling_params": {"stop": "x"}},
            body | {"return_text_in_logprobs": True},
        ):
            response = server.post("/generate", bad)
            assert response.status_code == 400 and "tokenizer" in response.json()["error"]["message"]
        server.process.terminate()
        assert server.process.wait(LIMIT_S) == 0


def test_a_server_ends_with_its_parent(models):
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with start_server(models["first"], "--parent-pid", str(parent.pid)) as server:
        parent.kill()
        parent.wait()
        assert server.process.wait(LIMIT_S) == 1
        assert server.said().splitlines()[1:] == [f"rollout server: its parent (pid {parent.pid}) died; exiting"]


def test_a_folder_that_cannot_be_served_says_why(tmp_path):
    command = [sys.executable, "-m", "megatron_rl.tools.embedded_server.server", str(tmp_path)]
    result = programs.run(command, env=dict(os.environ))
    assert result.returncode == 1 and "no config.json" in result.stderr and "Traceback" not in result.stderr


# The bucket


def test_a_bucket_holds_bytes_in_order_and_refuses_unaligned_dtypes():
    tensors = [torch.randn(2, 3), torch.arange(3, dtype=torch.bfloat16)]
    specs = [TensorSpec(str(i), t.dtype, tuple(t.shape)) for i, t in enumerate(tensors)]
    flat = pack_bucket(tensors)
    assert flat.numel() == 24 + 6
    for ours, theirs in zip(unpack_bucket(flat, specs), tensors, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="0 .torch.float32. starts at byte 6, which must be a multiple of 4"):
        unpack_bucket(flat, specs[::-1])
    with pytest.raises(ValueError, match="30 items of torch.uint8, but its 1 tensors need 24 bytes"):
        unpack_bucket(flat, specs[:1])
    assert unpack_bucket(flat[:0], []) == []
