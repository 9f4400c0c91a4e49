"""The HTTP client against a server that sends exactly the given bytes."""

import asyncio
import contextlib
import subprocess
from functools import partial

import pytest
import uvloop

from megatron_rl.servers import http_connections
from megatron_rl.servers.http_connections import AnswerTooLong, Connections, Exchange
from megatron_rl.servers.server_http import ServerError, ServerHttp
from megatron_rl.telemetry.spans import Spans
from tests.kit.waiting import LATE_S, until

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CLOSE = object()
"""The server closes the connection here."""


class Scripted:
    """A server that answers each request with the next entry of `answers`, in pieces."""

    def __init__(self, *answers):
        self.answers, self.requests, self.connections, self.hang_ups = list(answers), [], 0, 0

    async def serve(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(size))
                for piece in self.answers.pop(0):
                    if piece is CLOSE:
                        return writer.close()
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
            await reader.read()
            self.hang_ups += 1
        writer.close()


def talking(server, talk, *, keepalive_s=LATE_S, ssl=None, headers=None):
    """Run `talk(ask)` with the server's address; ask() makes a request and returns its exchange when it is over."""

    async def main():
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=ssl)
        scheme, port = "http" if ssl is None else "https", listening.sockets[0].getsockname()[1]
        connections = Connections(headers or {}, keepalive_s=keepalive_s)
        origin = connections.origin(f"{scheme}://{'localhost' if ssl else '127.0.0.1'}:{port}")

        async def ask(body=b"", *, at_most=100, stream=None, method="POST"):
            exchange = Exchange(at_most, stream)
            connections.send(exchange, origin, method, "/path", body, "text/plain")
            try:
                await exchange.wait()
            finally:
                exchange.close()
            return exchange

        ask.origin, ask.connections, ask.url = origin, connections, f"{scheme}://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(LATE_S):
                return await talk(ask)
        finally:
            connections.close()
            listening.close()

    return uvloop.run(main())


@pytest.mark.parametrize(
    "pieces",
    [
        [WHOLE],
        [WHOLE[:20], WHOLE[20:40], WHOLE[40:]],
        [bytes([byte]) for byte in WHOLE],
        [b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n"],
        [b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo", CLOSE],
        [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", CLOSE],
    ],
    ids=["at once", "in three", "byte by byte", "after 100", "chunked", "to the end", "closed"],
)
def test_an_answer_is_read_in_every_form_that_http_has(pieces):
    async def talk(ask):
        first, second = await ask(b"one"), await ask(b"two")
        assert [(one.status, b"".join(one.pieces)) for one in (first, second)] == [(200, b"hello")] * 2

    server = Scripted(pieces, [WHOLE])
    talking(server, talk, headers={"Authorization": "Bearer x"})
    assert server.connections == (2 if CLOSE in pieces else 1)
    first = server.requests[0]
    assert first.startswith(b"POST /path HTTP/1.1\r\nHost: 127.0.0.1:") and first.endswith(b"\r\n\r\none")
    assert b"\r\nAuthorization: Bearer x\r\n" in first and b"\r\nContent-Type: text/plain\r\n" in first


@pytest.mark.parametrize(
    ("pieces", "error", "words"),
    [
        ([b"<html>busy</html>"], ConnectionError, "no valid HTTP answer"),
        ([WHOLE[:-2], CLOSE], ConnectionResetError, "the server closed the connection"),
        ([b"HTTP/1.1 200 OK\r\nX: ", b"x" * 200_000], ConnectionError, "headers of more than 65536 bytes"),
        ([b"HTTP/1.1 200 OK\r\n", *[b"X: %d\r\n" % n for n in range(20_000)]], ConnectionError, "headers of more"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n", b"x" * 101], AnswerTooLong, "more than 100"),
        ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], ConnectionError, "valid"),
        ([CLOSE], ConnectionResetError, "closed the connection"),
    ],
    ids=["no http", "cut off", "long header", "many headers", "long body", "upgrade", "nothing"],
)
def test_a_wrong_answer_is_an_error_and_its_connection_is_not_used_again(pieces, error, words):
    async def talk(ask):
        with pytest.raises(error, match=words):
            await ask()
        assert b"".join((await ask()).pieces) == b"hello"

    server = Scripted(pieces, [WHOLE])
    talking(server, talk)
    assert server.connections == 2


def test_an_answer_that_nobody_asked_for_ends_the_connection():
    async def talk(ask):
        assert b"".join((await ask()).pieces) == b"hello"
        await until(lambda: not ask.origin.open)
        assert b"".join((await ask()).pieces) == b"hello"

    server = Scripted([WHOLE + WHOLE.replace(b"hello", b"wrong")], [WHOLE])
    talking(server, talk)
    assert server.connections == 2


def test_a_call_that_is_given_up_closes_its_connection_and_one_that_waits_again_gets_its_answer():
    async def talk(ask):
        asking = asyncio.ensure_future(ask())
        await until(lambda: server.requests)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: not ask.origin.open)
        assert asking.cancelled()

    server = Scripted([])
    talking(server, talk)

    async def cancelled_and_again(ask):
        (connection,) = await open_connection(ask)
        exchange = Exchange(100)
        connection.send(exchange, b"POST /path HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"")
        waiting = asyncio.ensure_future(exchange.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await exchange.wait()
        assert b"".join(exchange.pieces) == b"hello"
        exchange.fail(ValueError("too late for the connection, and still told"))
        with pytest.raises(ValueError, match="still told"):
            await exchange.wait()
        assert connection in ask.origin.open

    async def open_connection(ask):
        await ask()
        ask.origin.idle.clear()
        return ask.origin.open

    talking(Scripted([WHOLE], [WHOLE]), cancelled_and_again)


def test_idle_connections_are_closed_after_a_while():
    async def talk(ask):
        await ask()
        assert len(ask.origin.open) == 1
        await until(lambda: not ask.origin.open)
        await ask()

    server = Scripted([WHOLE], [WHOLE])
    talking(server, talk, keepalive_s=0.01)
    assert server.connections == 2


def test_concurrent_calls_have_a_connection_each_and_keep_them():
    async def talk(ask):
        for _ in range(2):
            exchanges = await asyncio.gather(*(ask(b"x" * 200_000) for _ in range(5)))
            assert all(b"".join(one.pieces) == b"hello" for one in exchanges)

    server = Scripted(*[[WHOLE]] * 11)
    talking(server, talk)
    assert server.connections == 5 and all(one.endswith(b"x" * 200_000) for one in server.requests)


def test_a_stream_gets_the_body_of_a_good_answer_alone_and_its_error_is_the_callers():
    class Stream:
        def __init__(self):
            self.rest = bytearray()

        def take(self, piece):
            if piece == b"wrong":
                raise ValueError("it is wrong")
            self.rest += piece

    async def talk(ask):
        stream = Stream()
        assert (await ask(stream=stream)).pieces == [] and stream.rest == b"hello"
        stream = Stream()
        assert b"".join((await ask(stream=stream)).pieces) == b"hello" and not stream.rest
        with pytest.raises(ValueError, match="it is wrong"):
            await ask(stream=Stream())
        with pytest.raises(AnswerTooLong, match="an event of more than 4 bytes"):
            await ask(stream=Stream(), at_most=4)

    refused = WHOLE.replace(b"200 OK", b"400 Bad Request")
    talking(Scripted([WHOLE], [refused], [WHOLE.replace(b"hello", b"wrong")], [WHOLE]), talk)


def test_a_server_with_a_certificate_is_asked_over_tls_and_a_stranger_is_refused(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    ours = http_connections.ssl.create_default_context
    theirs = http_connections.ssl.SSLContext(http_connections.ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate, key)

    async def refused(ask):
        with pytest.raises(OSError, match="certificate"):
            await ask()

    async def accepted(ask):
        assert b"".join((await ask(b"secret")).pieces) == b"hello"

    talking(Scripted([WHOLE]), refused, ssl=theirs)
    monkeypatch.setattr(http_connections.ssl, "create_default_context", lambda: ours(cafile=certificate))
    server = Scripted([WHOLE])
    talking(server, accepted, ssl=theirs)
    assert server.requests[0].endswith(b"secret")


def test_a_get_is_sent_again_if_the_server_was_closing_its_connection_and_a_post_is_not():
    async def talk(ask):
        http = ServerHttp(ask.url, ask.connections, Spans())
        call = partial(http.call_once, timeout_s=LATE_S)
        assert b"".join(await call("GET", "/health", None)) == b"hello"
        assert b"".join(await call("GET", "/health", None)) == b"hello"
        with pytest.raises(ServerError, match="/flush: ConnectionResetError: the server closed.*is the server up"):
            await call("POST", "/flush", {})

    server = Scripted([WHOLE], [CLOSE], [WHOLE], [CLOSE], [WHOLE])
    talking(server, talk)
    assert [one.split()[0] for one in server.requests] == [b"GET"] * 3 + [b"POST"]


def test_what_a_url_says_is_in_the_head_of_its_requests():
    connections = Connections({}, keepalive_s=1.0)
    named = connections.origin("http://me:p%40ss@host.example/prefix")
    assert (named.host, named.port, named.is_secure, named.path) == ("host.example", 80, False, "/prefix")
    assert named.head == "Host: host.example\r\nAuthorization: Basic bWU6cEBzcw==\r\n"
    assert connections.origin("http://host.example:8000/a/").path == "/a"
    assert connections.origin("http://host.example:8000") is connections.origin("http://host.example:8000")
    six = connections.origin("https://[::1]")
    assert (six.host, six.port, six.head) == ("::1", 443, "Host: [::1]\r\n")
    with pytest.raises(AssertionError):
        Connections({"X": "a\r\nInjected: b"}, keepalive_s=1.0)


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_call_that_is_given_up_no_longer_connects_and_a_closed_client_fails_its_calls(runner, monkeypatch):
    async def talk():
        loop, begun, ended = asyncio.get_running_loop(), asyncio.Event(), []

        async def connects_for_ever(*_, **__):
            begun.set()
            try:
                await loop.create_future()
            finally:
                ended.append("cancelled")

        client = Connections({}, keepalive_s=LATE_S)
        origin, exchanges = client.origin("http://127.0.0.1:1"), [Exchange(100) for _ in range(4)]
        monkeypatch.setattr(type(loop), "create_connection", connects_for_ever)
        send = partial(client.send, origin=origin, method="GET", path="/", body=b"", content_type="")
        send(exchanges[0])
        await begun.wait()
        exchanges[0].close()
        await until(lambda: ended)
        begun.clear()
        send(exchanges[1])
        await begun.wait()
        send(exchanges[2])  # its task has not begun
        client.close()
        send(exchanges[3])
        for exchange in exchanges:
            with pytest.raises(ConnectionAbortedError):
                await exchange.wait()

    runner(talk())
