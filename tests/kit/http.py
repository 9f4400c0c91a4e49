"""HTTP servers for tests: programs of their own, and what answers in a thread of this process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatron_rl.launch.ports import free_port
from tests.kit.waiting import wait_until


@contextmanager
def program_at_a_port(script: str | Path, *arguments: str) -> Iterator[int]:
    """Run `python script PORT *arguments` while this lasts; give the port, as soon as the program listens there."""
    port = free_port("127.0.0.1")
    program = subprocess.Popen([sys.executable, str(script), str(port), *arguments], stderr=subprocess.DEVNULL)

    def listens() -> bool:
        assert program.poll() is None, f"{script} has ended with exit code {program.returncode}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(listens, f"{script} does not listen on port {port}")
        yield port
    finally:
        program.kill()
        program.wait()


@dataclass(frozen=True)
class Answer:
    """Bytes, or what is sent as JSON."""

    content: object
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@contextmanager
def answered_by(answer: Callable[[str, str, bytes], Answer]) -> Iterator[str]:
    """Serve HTTP while this lasts, by `answer(method, path with query, body)`; give the server's URL."""

    class Request(BaseHTTPRequestHandler):
        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = answer(self.command, self.path, body)
            is_raw = isinstance(found.content, bytes)
            content = found.content if is_raw else json.dumps(found.content).encode()
            kind = "application/octet-stream" if is_raw else "application/json"
            self.send_response(found.status)
            of_content = {"Content-Type": kind, "Content-Length": str(len(content))}
            for name, value in (of_content | found.headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = handle_one

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Request) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
