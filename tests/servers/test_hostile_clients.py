"""What clients may send the embedded server: nobody stops it, holds it up, or fills its memory or its log."""

from __future__ import annotations

import asyncio
import gzip
import importlib.metadata
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from megatron_rl import cli
from megatron_rl.tools.embedded_server import bodies, connections, server, weight_endpoints
from megatron_rl.tools.embedded_server.batcher import Batcher
from megatron_rl.tools.embedded_server.guard import MOST_IN_WINDOW, LogRate
from megatron_rl.tools.embedded_server.listening import listen
from megatron_rl.tools.embedded_server.server import build_server, open_to_clients
from tests.kit.embedded import InAThread, in_a_thread
from tests.kit.examples import max_examples
from tests.kit.run_tokens import AUTHORIZED, TOKEN
from tests.kit.waiting import LIMIT_S, SLOWNESS, wait_until

PROMPT = list(range(100, 110))
SHORT = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
STALL_S = 2.0 * SLOWNESS
"""What this process, the server and its clients, may compute at most before /health is answered.

Not of the clock's seconds, of which other processes take their part.
"""


class Served(InAThread):
    """One server in this process, and what clients send it."""

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        options = {"json": body, "headers": AUTHORIZED, "timeout": LIMIT_S} | options
        return requests.post(f"{self.url}{path}", **options)

    def error(self, path: str, body: Any, **options: Any) -> tuple[int, str]:
        answer = self.post(path, body, **options)
        told = answer.json()
        return answer.status_code, told["error"]["message"] if "error" in told else told["message"]

    def connect(self, sent: bytes) -> socket.socket:
        peer = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)
        peer.sendall(sent)
        return peer

    @contextmanager
    def is_never_held_up(self) -> Iterator[None]:
        """Ask for /health all the time; nobody in this block may make that slow."""
        over, slowest = threading.Event(), [0.0]

        def ask() -> None:
            with requests.Session() as session:
                while not over.is_set():
                    begin = time.process_time()
                    assert session.get(f"{self.url}/health", timeout=LIMIT_S).status_code == 200
                    slowest[0] = max(slowest[0], time.process_time() - begin)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert slowest[0] < STALL_S, f"/health took {slowest[0]:.1f} s"


@contextmanager
def served(model: Path, token: str | None) -> Iterator[Served]:
    with in_a_thread(model, token) as it:
        yield Served(it.server, it.port)


@pytest.fixture(scope="module")
def guarded(tiny_model: Path) -> Iterator[Served]:
    with served(tiny_model, TOKEN) as it:
        yield it


@pytest.fixture(scope="module")
def tokenless(tiny_model: Path) -> Iterator[Served]:
    with served(tiny_model, None) as it:
        yield it


# Templates and chats


CHAT = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 1}


@pytest.mark.parametrize("name", ["chat_template", "tools", "tokenize", "messages", "eos_token", "strftime_now", "no"])
def test_a_request_brings_no_template_and_sets_nothing_but_the_templates_own_variables(tokenless, name):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with tokenless.is_never_held_up():
        status, message = tokenless.error(
            "/v1/chat/completions", CHAT | {"chat_template_kwargs": {name: endless}}, headers={}
        )
    assert status == 400 and f"chat_template_kwargs.{name}" in message


def test_the_templates_own_variables_are_set_as_before(guarded):
    def prompt_of(**options: object) -> int:
        answer = guarded.post("/v1/chat/completions", CHAT | {"chat_template_kwargs": options}).json()
        return answer["usage"]["prompt_tokens"]

    plain = prompt_of()
    assert prompt_of(enable_thinking=True) == plain + 1 == prompt_of(enable_thinking=False) + 1
    assert prompt_of(add_generation_prompt=False) == plain - 1
    assert prompt_of(reasoning_effort="low") == plain  # which this template does not read


DEEP = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content = 5"),
        ({"messages": [{"role": "user", "content": DEEP}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (
            {"chat_template_kwargs": {"continue_final_message": True, "add_generation_prompt": True}},
            "messages: the model's chat template refuses them",
        ),
        ({"messages": [{"role": {}, "content": "a"}]}, "messages[0].role = {}"),
        ({"messages": [{"content": "a"}]}, "messages[0].role = None"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": DEEP}]}, "messages[0]: is nested deeper than 8"),
        ({"messages": [{"role": "user", "content": "a"}] * 5000}, "messages: has 5000; must have at most 4096"),
        ({"messages": [{"role": "user", "content": "a" * 3_000_000}]}, "messages: must have at most"),
        ({"messages": DEEP}, "messages: must be a non-empty list of objects"),
        ({"messages": []}, "messages: must be a non-empty list"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs = [1]: must be an object"),
        ({"chat_template_kwargs": {"enable_thinking": DEEP}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": "a" * 10_000}}, "chat_template_kwargs.enable_thinking"),
        ({"max_tokens": "many"}, "max_tokens = 'many': must be an integer"),
        ({"max_completion_tokens": -1}, "max_completion_tokens = -1"),
        ({"seed": 2**64 - 1}, "seed = 18446744073709551615"),
        ({"n": 0}, "n = 0"),
        ({"top_p": DEEP}, "top_p = [[["),
        ({"stop": {}}, "stop = {}"),
        ({"logprobs": 1}, "logprobs = 1: must be true or false"),
        ({"return_meta_info": "yes"}, "return_meta_info = 'yes'"),
        ({"model": 5}, "model = 5: must be a string"),
        ({"rid": ["a"]}, "rid = ['a']"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_every_field_of_a_chat_is_checked_and_named(tokenless, change, named):
    status, message = tokenless.error("/v1/chat/completions", CHAT | change, headers={})
    assert status == 400 and named in message and len(message) < 2000


# What holds others up


@pytest.mark.parametrize(
    "field, value",
    [
        ("top_k", 2**64 - 1),
        ("stop_token_ids", list(range(100_000))),
        ("logit_bias", {str(i): 1 for i in range(100_000)}),
        ("logit_bias", {"9" * 5000: 1}),
        ("stop", "a" * 100_000),
        ("max_new_tokens", DEEP),
        ("temperature", -1e308),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_no_sampling_field_stops_or_slows_the_generation_of_others(tokenless, field, value):
    body = SHORT | {"sampling_params": {"max_new_tokens": 2, field: value}}
    status, message = tokenless.error("/generate", body, headers={})
    assert status == 400 and f"sampling_params.{field}" in message and len(message) < 2000
    assert tokenless.post("/generate", SHORT, headers={}).status_code == 200


@pytest.mark.parametrize("temperature", [1e-300, 1e-7, 1e308])
def test_extreme_temperatures_are_greedy_or_even_and_harm_nobody(tokenless, temperature):
    body = SHORT | {"sampling_params": {"max_new_tokens": 2, "temperature": temperature, "ignore_eos": True}}
    assert tokenless.post("/generate", body, headers={}).json()["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * (bodies.MAX_BODY_BYTES // 4) + b"[]]",
        b'{"input_ids":[' + b'{"a":[]},' * (bodies.MAX_BODY_BYTES // 12) + b"1]}",
        b'{"input_ids":[' + b'"ab",' * (bodies.MAX_BODY_BYTES // 6) + b"1]}",
        b"[" * 2000 + b"]" * 2000,
        b'{"text":"' + b"a" * (bodies.MAX_BODY_BYTES - 100) + b'"}',
    ],
    ids=["lists", "objects", "strings", "deep", "text"],
)
def test_a_body_that_is_slow_to_read_is_refused_and_holds_nobody_up(tokenless, body):
    headers = {"Content-Type": "application/json"}
    with tokenless.is_never_held_up():
        assert tokenless.post("/generate", json=None, data=body, headers=headers).status_code == 400


def test_a_request_without_the_token_is_refused_before_its_body(guarded):
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    for extra in (b"Content-Length: 16000000\r\n", b"Content-Length: 9\r\nExpect: 100-continue\r\n"):
        with guarded.connect(head + extra + b"\r\n") as peer:  # which sends no body that could be waited for
            assert peer.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_nothing_compressed_is_unpacked(guarded):
    bomb = gzip.compress(b" " * 50_000_000)
    with guarded.is_never_held_up():
        for coding in ("gzip", "deflate", "br", "zstd", "gzip, gzip", "nonsense", ""):
            headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
            assert guarded.post("/generate", json=None, data=bomb, headers=headers).status_code == 401
            status, message = guarded.error("/generate", None, data=bomb, headers=headers | AUTHORIZED)
            assert status == 415 and "Content-Encoding" in message, coding


def test_joining_groups_takes_few_threads_and_each_group_once(guarded, monkeypatch):
    let_go = threading.Event()

    def never_there(**_: object) -> None:
        let_go.wait(LIMIT_S)
        raise RuntimeError("nobody came")

    monkeypatch.setattr(weight_endpoints, "join_update_group", never_there)
    good = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    before = threading.active_count()
    for number in range(2 * weight_endpoints.MOST_JOINING):
        for _ in range(2):
            with pytest.raises(requests.Timeout):
                guarded.post("/init_weights_update_group", good | {"group_name": str(number)}, timeout=0.05)
                raise requests.Timeout  # it was refused at once
    joining = lambda: [thread for thread in threading.enumerate() if thread.name == "weights"]  # noqa: E731
    wait_until(joining, "nobody tries to join")
    weights = joining()
    assert len(weights) <= weight_endpoints.MOST_JOINING and threading.active_count() < before + 20
    status, message = guarded.error("/init_weights_update_group", good | {"group_name": "0"})
    assert status == 400 and "still trying to join" in message
    let_go.set()
    for thread in weights:
        thread.join(LIMIT_S)
    assert guarded.error("/init_weights_update_group", good | {"group_name": "0"}) == (
        400,
        "Failed to join group 0 at 127.0.0.1:9: nobody came",
    )


# Connections


@pytest.fixture
def narrow(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server that lets in few, and has little patience."""
    monkeypatch.setattr(connections, "MOST_STRANGERS", 16)
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 24)
    for module, name, value in (
        (connections, "HEADERS_S", 0.5 * SLOWNESS),
        (connections, "LOOK_EVERY_S", 0.05),
        (bodies, "FIRST_S", 0.5 * SLOWNESS),
        (bodies, "SLOWEST_BYTES_PER_S", 10**9),
        (server, "CHUNK_S", 0.2),
    ):
        monkeypatch.setattr(module, name, value)
    with served(tiny_model, TOKEN) as it:
        yield it


HALF = b"POST /generate HTTP/1.1\r\nHost: a\r\nX: "


def test_half_requests_keep_nobody_out(narrow):
    with requests.Session() as old:
        old.headers.update(AUTHORIZED)
        assert old.post(f"{narrow.url}/generate", json=SHORT, timeout=LIMIT_S).status_code == 200
        strangers = [narrow.connect(HALF) for _ in range(100)]
        assert narrow.post("/generate", SHORT).status_code == 200
        assert old.post(f"{narrow.url}/generate", json=SHORT, timeout=LIMIT_S).status_code == 200
    for peer in strangers:
        assert peer.recv(1) == b"", "closed by the server, for all those to come or for its own silence"
        peer.close()


def test_idle_clients_and_unfinished_bodies_keep_nobody_out(narrow):
    answer = b"GET /server_info HTTP/1.1\r\nHost: a\r\nAuthorization: " + AUTHORIZED["Authorization"].encode()
    body = answer.replace(b"GET /server_info", b"POST /generate") + b"\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n    "
    idle = [narrow.connect(answer + b"\r\n\r\n") for _ in range(20)]
    slow = [narrow.connect(body) for _ in range(20)]
    assert narrow.post("/generate", SHORT).status_code == 200
    for peer in slow:  # those that were let in, after their time
        assert b" 408 " in peer.recv(4096)
    for peer in idle + slow:
        peer.close()


def test_a_client_that_reads_no_stream_is_cut_off_and_its_request_ends(narrow):
    body = {"input_ids": PROMPT, "stream": True, "return_logprob": True}
    text = json.dumps(body | {"sampling_params": {"max_new_tokens": 490, "ignore_eos": True}}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(text)}\r\n\r\n"
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect(("127.0.0.1", narrow.port))
    peer.sendall(head.encode() + text)
    wait_until(lambda: narrow.server.live, "the request does not begin")
    wait_until(lambda: not narrow.server.live, "nobody cuts it off")
    assert narrow.server.live_tokens == 0
    peer.close()


def test_where_no_file_is_left_the_log_stays_short_and_clients_come_in_again(narrow, monkeypatch, caplog):
    accept, failures = socket.socket.accept, iter(range(3))

    def none_left(self: socket.socket) -> Any:
        if next(failures, None) is not None:
            raise OSError(24, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", none_left)
    assert narrow.post("/generate", SHORT).status_code == 200
    assert len([record for record in caplog.records if "cannot accept" in record.message]) <= 3


def test_a_message_that_repeats_is_left_out_of_the_log_and_counted(monkeypatch):
    rate, now = LogRate(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def passes() -> logging.LogRecord | None:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "from %s", ("b",), None)
        return record if rate.filter(record) else None

    assert sum(passes() is not None for _ in range(1000)) == MOST_IN_WINDOW
    now[0] = 61.0
    assert passes().getMessage() == f"from b ({1000 - MOST_IN_WINDOW} more of these were left out)"


# Web pages


def test_a_web_page_reaches_no_server_without_a_token(tokenless):
    own = f"127.0.0.1:{tokenless.port}"
    for headers, status in (
        ({"Host": own}, 200),
        ({"Host": f"localhost:{tokenless.port}"}, 200),
        ({"Host": "[::1]:8000", "Origin": "http://[::1]:8000"}, 200),  # by a tunnel
        ({"Host": own, "Origin": f"http://{own}"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": f"127.0.0.1.evil.example:{tokenless.port}"}, 403),
        ({"Host": f"evil@{own}"}, 403),
        ({"Host": f"{own}/evil"}, 403),
        ({"Host": "127.0.0.1:port"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "0.0.0.0"}, 403),
        ({"Host": own, "Origin": "http://evil.example"}, 403),
        ({"Host": own, "Origin": "null"}, 403),
        ({"Host": own, "Origin": "http://127.0.0.1:1"}, 403),
        ({"Host": own, "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": own, "Content-Type": "text/plain"}, 415),
        ({"Host": own, "Content-Type": "text/plain; application/json"}, 415),
        ({"Host": own, "Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Host": own, "Content-Type": "application/json; charset=utf-8"}, 200),
    ):
        sent = {"Content-Type": "application/json"} | headers
        answer = tokenless.post("/generate", json=None, data=json.dumps(SHORT), headers=sent)
        assert answer.status_code == status, (headers, answer.text)
    assert requests.get(f"{tokenless.url}/server_info", headers={"Host": "evil.example"}).status_code == 403


def test_unknown_paths_are_404_and_wrong_methods_405_with_and_without_a_token(guarded, tokenless):
    for it, headers in ((guarded, AUTHORIZED), (tokenless, {})):
        assert it.post("/no_such_path", {}, headers=headers).status_code == 404
        refused = requests.get(f"{it.url}/generate", headers=headers, timeout=LIMIT_S)
        assert refused.status_code == 405 and "POST" in refused.headers["Allow"]
    assert guarded.post("/no_such_path", {}, headers={}).status_code == 401


# Everything at once

VALUES = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.5, -1e308, "", "a", "\0", "é\u2028", "9" * 400),
    *([], {}, [[]], [None], ["a"], [1], [-1], [2**64 - 1], {"a": 1}, DEEP, [[1]] * 50, {"": {}}),
)
FIELDS = (
    *("input_ids", "text", "sampling_params", "rid", "stream", "return_logprob", "logprob_start_len", "messages"),
    *("chat_template_kwargs", "max_tokens", "temperature", "stop", "abort_all", "mode", "tags", "group_name"),
    *("master_address", "master_port", "rank_offset", "world_size", "backend", "names", "dtypes", "shapes"),
    *("load_format", "flush_cache", "weight_version", "model_path", "new_version", "abort_all_requests", "name"),
    *("truncate_size", "action", "selector", "shared_memory", "peer_version", "peer_url", "return_meta_info", "n"),
)
BASES: tuple[dict[str, Any], ...] = (
    {},
    SHORT,
    CHAT,
    {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "shared_memory": {"file": "torch_1_2_3"}},
    {"name": "model.norm.weight", "peer_version": "default", "new_version": "default", "selector": "all"},
)
RAW = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"a"',
    b"NaN",
    b'{"a":1e999}',
    b'{"a":"\\ud800"}',
    b"\xff",
    b'{"a":1,"a":2}',
    b"\0" * 99,
)
TYPES = ("application/json", "text/plain", "multipart/form-data; boundary=x", "a/b;charset=nonsense", "\x80", "")


def test_nothing_that_is_sent_anywhere_is_answered_with_500_or_holds_anyone_up(guarded, tokenless):
    rng, faults = random.Random(16), []
    for it, authorized in ((guarded, AUTHORIZED), (tokenless, {})):
        paths = sorted({r.resource.canonical for r in it.server.app(None, "", None).router.routes()})
        with requests.Session() as session, it.is_never_held_up():
            for count in range(max_examples(120, 500)):
                path, method = rng.choice(paths), rng.choice(["POST"] * 6 + ["GET", "PUT", "DELETE", "HEAD", "X"])
                body = rng.choice(BASES) | {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randrange(3))}
                raw = rng.choice(RAW) if rng.random() < 0.2 else json.dumps(body).encode()
                query = rng.choice(["", "?timeout=nan", "?timeout=1e9", "?timeout=-1", "?%ff=%00&a"])
                headers = {"Content-Type": rng.choice(TYPES[:1] * 8 + TYPES)}
                headers |= authorized if rng.random() < 0.9 else {"Authorization": "Bearer \xe9"}
                if path in ("/init_weights_update_group", "/pause_generation", "/release_memory_occupation"):
                    continue  # what is right there holds the others up, as it should
                answer = session.request(method, f"{it.url}{path}{query}", data=raw, headers=headers, timeout=LIMIT_S)
                if answer.status_code >= 500 or len(answer.content) > 50_000:
                    faults.append(
                        (count, method, path, query, headers, raw[:200], answer.status_code, answer.text[:300])
                    )
        assert not faults, faults[:3]
        assert it.post("/generate", SHORT, headers=authorized).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nExpect: a miracle\r\nContent-Length: 2\r\n\r\n{}",
        b"GET http://evil.example/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"GET /%00%ff/../health HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_broken_http_is_answered_below_500_or_not_at_all(guarded, tokenless, sent):
    for it in (guarded, tokenless):
        for token in (b"", f"Authorization: Bearer {TOKEN}\r\n".encode()):
            with it.connect(sent.replace(b"Host", token + b"Host", 1)) as peer:
                peer.shutdown(socket.SHUT_WR)
                head = peer.recv(4096)
                assert not head or head[9:10] in (b"2", b"4"), head
        assert requests.get(f"{it.url}/health", timeout=LIMIT_S).status_code == 200


def test_pipelined_requests_are_answered_in_order(guarded):
    one = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: " + AUTHORIZED["Authorization"].encode() + b"\r\n\r\n"
    with guarded.connect(one * 200 + b"GET /no HTTP/1.0\r\nConnection: close\r\n\r\n") as peer:
        answered = b"".join(iter(lambda: peer.recv(65536), b""))
    assert answered.count(b"HTTP/1.1 200 OK") == 200 and b" 401 " in answered[-400:]


# The batcher's thread


def test_a_server_whose_batcher_died_says_so_and_ends(tiny_model, monkeypatch):
    async def scene() -> None:
        rollout_server, listener = (
            build_server(tiny_model, server.parser().parse_args([str(tiny_model)])),
            listen("127.0.0.1", 0),
        )
        async with open_to_clients(rollout_server, listener, host="127.0.0.1", token=None) as over:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            monkeypatch.setattr(Batcher, "_next_command", lambda self: 1 / 0)
            running = rollout_server.batcher.call(lambda: None)
            await asyncio.wait_for(over.wait(), LIMIT_S)
            assert (await asyncio.to_thread(requests.get, f"{url}/health")).status_code == 503
            assert (await asyncio.to_thread(requests.post, f"{url}/generate", json=SHORT)).status_code == 503
            with pytest.raises(RuntimeError, match="its thread died: ZeroDivisionError"):
                running.result(LIMIT_S)

    with pytest.raises(RuntimeError, match="its thread died: ZeroDivisionError: division by zero"):
        asyncio.run(scene())


# The command line


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["--port", "PORT"],
            "megatron-rl serve: --port PORT: port PORT is in use on 127.0.0.1; end what listens there",
        ),
        (["--host", "192.0.2.1", "--token-file", "TOKEN"], "megatron-rl serve: --host 192.0.2.1 --port 30000: Cannot"),
    ],
)
def test_a_place_where_one_cannot_listen_is_named_in_one_line(tiny_model, tmp_path, words, said):
    with listen("127.0.0.1", 0) as taken:
        names = {"PORT": str(taken.getsockname()[1]), "TOKEN": str(tmp_path / "token")}
        with pytest.raises(SystemExit) as ended:
            server.main([str(tiny_model), *(names.get(word, word) for word in words)])
    assert not any(handler.filters for handler in logging.getLogger().handlers), "its program's log alone is thinned"
    assert str(ended.value).startswith(said.replace("PORT", names["PORT"]))


def test_a_port_out_of_range_and_the_version_are_one_line(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        server.main(["model", "--port", "70000"])
    assert "--port: '70000': must be a number in [0, 65535]" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert not ended.value.code and capsys.readouterr().out.startswith("megatron-rl ")
    monkeypatch.setattr(cli, "version", lambda _: importlib.metadata.version("a package that is not installed"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert not ended.value.code and "sources that are not installed" in capsys.readouterr().out
