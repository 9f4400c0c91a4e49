"""HTTP servers for tests: programs of their own, and what answers in a thread of this process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
