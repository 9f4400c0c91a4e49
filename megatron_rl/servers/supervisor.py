"""Starts rollout servers on this host, waits until they answer, restarts those that die or hang, and stops them.

Servers are embedded ones or real SGLang. A restarted server keeps its URL. No server outlives the process that started
it, however that process ends.
"""

from __future__ import annotations

import dataclasses
import functools
import http.client
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_rl.config import RolloutConfig
from megatron_rl.launch.run_token import token_in
from megatron_rl.life import process_exit
from megatron_rl.life.signs_of_life import Silence
from megatron_rl.servers.server_process import Server, ServerLauncher

logger = logging.getLogger(__name__)

POLL_S = 0.1
STOP_GRACE_S = 20.0
"""Seconds from SIGTERM to SIGKILL. SGLang finishes requests for up to ten seconds before it exits."""
GIVE_UP_LINES = 3
HEALTH_EVERY_S = 5.0
FIRST_RESTART_S = 1.0
LONGEST_RESTART_S = 60.0
STEADY_S = 600.0
"""If a server ran for more than this many seconds before it ended, its earlier restarts no longer count."""


class Supervisor:
    """Runs `config.server_count` servers of one model, in a `with` block or between `start` and `stop`.

    with Supervisor(RolloutConfig(server_count=2), "models/mine", "runs/mine/servers") as supervisor:
        print(supervisor.urls, supervisor.token_file)
        with supervisor.publication():  # a server that generates nothing now is paused and does not hang
            ...
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str | Path,
        folder: str | Path,
        *,
        devices: list[list[str]] | None = None,
        on_death: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        """Prepare the servers without starting them.

        devices: for each server, its GPUs. options: further fields of ServerLauncher, such as dtype.
        on_death: called with one line of text when the last server is given up, in a thread of the supervisor.
        """
        self.config, self.on_death = config, on_death
        self._launcher = ServerLauncher(
            config=config, model_path=Path(model_path), folder=Path(folder), devices=devices, **options
        )
        self.backend, self.token_file = self._launcher.backend, self._launcher.token_file
        if devices is not None and len(devices) != config.server_count:
            raise ValueError(
                f"rollout.server_count = {config.server_count}: {len(devices)} lists of devices given; give as many."
            )
        self._servers: list[Server] = []
        self._given_up: set[int] = set()
        self._changing = threading.Lock()
        """Held while a server starts, so that none starts after `stop` has begun."""
        self._stopping = threading.Event()
        self._publishing = threading.Event()
        self._lent = threading.Event()
        self._holds_back = threading.Event()
        """Set while no server may be restarted, because the trainer has the devices."""

    def __enter__(self) -> Supervisor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers if server.url is not None]

    @property
    def all_answer(self) -> bool:
        """True if every server is up and has answered since its last start. Callable from any thread."""
        with self._changing:
            return all(server.is_ready and server.process.poll() is None for server in self._servers)

    @property
    def starts(self) -> dict[str, int]:
        """{URL: process id} of the servers. The id changes with each restart. Callable from any thread."""
        with self._changing:
            return {server.url: server.process.pid for server in self._servers if server.url is not None}

    def lend_devices(self) -> None:
        """Lend the servers' devices to the trainer, after waiting for servers that are starting and need memory for it.

        A server that dies from now on is restarted only by `start_missing`.
        """
        with self._changing:
            self._lent.set()
            self._holds_back.set()
        self._wait_for_starting()  # outside the lock, which their threads need

    def take_devices_back(self) -> None:
        """Note that the servers have their devices back, so that they are expected to generate again."""
        self._lent.clear()

    @property
    def lacks_servers(self) -> bool:
        """True if a server has died and will be restarted."""
        with self._changing:
            return any(server.process.poll() is not None for server in self._kept())

    def start_missing(self, dead: Collection[str] = ()) -> None:
        """Restart the servers that died while their devices were lent, and wait until they answer.

        The trainer must not use the devices now. dead: URLs of servers that were killed but whose processes may still
        exist.
        """
        before = self.starts  # read first: a dying server is recognized by its old pid
        self._holds_back.clear()

        def are_restarted() -> bool:
            dying = [s for s in self._kept() if s.url in dead and s.process.pid == before[s.url]]
            return not dying and all(server.process.poll() is None for server in self._kept())

        if self._wait_until(are_restarted):
            self._wait_for_starting()

    def _kept(self) -> list[Server]:
        """Return the servers that are not given up. Call this with `_changing` held."""
        return [server for server in self._servers if server.number not in self._given_up]

    def _wait_for_starting(self) -> None:
        self._wait_until(lambda: all(s.is_ready or s.process.poll() is not None for s in self._servers))

    def _wait_until(self, is_so: Callable[[], bool]) -> bool:
        """Wait until `is_so()` is True, and return True. Return False if it is not so within rollout.start_timeout_s.

        `is_so` is called with `_changing` held.
        """
        deadline = time.monotonic() + self.config.start_timeout_s
        while not self._stopping.is_set():
            with self._changing:
                if is_so():
                    return True
            if time.monotonic() >= deadline or self._stopping.wait(POLL_S):
                break
        return False

    def start(self) -> list[str]:
        """Start the servers and return their URLs once all answer.

        Raises RuntimeError with the end of the log if a server fails, and ValueError if the token's file is invalid.
        """
        self._launcher.folder.mkdir(parents=True, exist_ok=True)
        token_in(self.token_file)  # creates the token if there is none
        self._stopping.clear()
        self._given_up.clear()
        deadline = time.monotonic() + self.config.start_timeout_s
        try:
            for number in range(self.config.server_count):
                self._servers.append(self._launcher.launch(number))
            for server in self._servers:
                self._wait_until_healthy(server, deadline)
        except BaseException:  # also when interrupted: no server may be left behind
            self.stop()
            raise
        for number in range(len(self._servers)):
            process_exit.start_thread(functools.partial(self._keep, number), name=f"server-{number}")
        logger.info("%d %s rollout server(s): %s", len(self._servers), self.backend, ", ".join(self.urls))
        return self.urls

    def stop(self) -> None:
        """Stop all servers by SIGTERM, and after STOP_GRACE_S by SIGKILL. May be called twice."""
        self._stopping.set()
        with self._changing:  # waits for a start in progress; none begins after this
            servers, self._servers = self._servers, []
        for server in servers:
            if server.process.poll() is None:
                server.process.terminate()
        deadline = time.monotonic() + STOP_GRACE_S
        for server in servers:
            try:
                server.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("%s ignored SIGTERM for %g s; killing it", server.name, STOP_GRACE_S)
            server.kill("")  # even if it has ended, because its workers may have outlived it
            server.process.wait()
            if server.watchdog is not None:
                server.watchdog.wait()  # it ends by itself; waiting avoids a zombie

    def replace(self, url: str, reason: str) -> None:
        """Kill the server at `url` if it is alive, so that it is restarted. Does not wait. Callable from any thread."""
        with self._changing:
            for server in self._servers:
                if server.url == url and server.process.poll() is None:
                    server.kill(reason)

    def silent(self) -> Silence:
        """Return for how long the thread that watches each server has made no progress. Callable from any thread.

        A server that does not answer also stops this thread.
        """
        now = time.monotonic()
        with self._changing:
            servers = [server for server in self._servers if server.process.poll() is None]
        patience = f" One that does not answer for {self.config.health_timeout_s:g} s is restarted."
        return {server.name: (now - server.looked_at, f"{patience} Its log is {server.log}.") for server in servers}

    @contextmanager
    def publication(self) -> Iterator[None]:
        """Do not take servers that generate nothing in this `with` block for hanging ones, because they are paused.

        A server that dies is still restarted.
        """
        self._publishing.set()
        try:
            yield
        finally:
            self._publishing.clear()

    def _wait_until_healthy(self, server: Server, deadline: float) -> None:
        while not self._stopping.is_set():
            server.looked_at = time.monotonic()
            if server.process.poll() is not None:
                raise RuntimeError(
                    f"{server.name} {server.how_it_ended()} before it was ready. Its log, {server.log}, ends with:\n"
                    f"{server.tail()}"
                )
            if server.url is None and server.ready_file is not None and server.ready_file.exists():
                server.url = server.ready_file.read_text().strip()
            if server.url is not None and is_healthy(server.url, "/health", timeout_s=10.0):
                server.is_ready = True
                return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{server.name} did not answer within rollout.start_timeout_s = {self.config.start_timeout_s:g} s; "
                    f"raise it if the model is large. Its log, {server.log}, ends with:\n{server.tail()}"
                )
            time.sleep(POLL_S)

    # -- one thread per server

    def _keep(self, number: int) -> None:
        """Restart server `number` whenever it ends, until its restarts (rollout.server_restarts) are used up."""
        url, restarts = self._servers[number].url, 0
        while (server := self._server(number)) is not None:
            started = time.monotonic()
            self._watch(server)
            if self._stopping.is_set():
                return
            server.kill(server.fault)  # its workers may have outlived it and hold its port and GPU
            server.process.wait()
            restarts = 0 if time.monotonic() - started > STEADY_S else restarts
            if restarts == self.config.server_restarts:
                self._give_up(server, restarts)
                return
            delay_s = min(LONGEST_RESTART_S, FIRST_RESTART_S * 2**restarts)
            restarts += 1
            logger.warning(
                "%s %s; restart %d of %d in %g s; its log is %s",
                *(server.name, server.how_it_ended(), restarts, self.config.server_restarts, delay_s, server.log),
            )
            while not self._stopping.wait(delay_s) and not self._restart(number, url):
                delay_s = POLL_S  # the devices are lent: restart as soon as they are back

    def _restart(self, number: int, url: str | None) -> bool:
        """Restart server `number`. url: its earlier URL, which it gets again.

        Return False, without a restart, while no server may be restarted because the trainer has the devices.
        """
        with self._changing:
            if self._holds_back.is_set():
                return False
            if not self._stopping.is_set():
                self._servers[number] = self._launcher.launch(number, url)
            return True

    def _server(self, number: int) -> Server | None:
        with self._changing:
            return None if self._stopping.is_set() else self._servers[number]

    def _watch(self, server: Server) -> None:
        """Watch a server until it has ended. Kill it if it does not start in time, or if it hangs."""
        if not server.is_ready:
            try:
                self._wait_until_healthy(server, time.monotonic() + self.config.start_timeout_s)
            except RuntimeError:
                if server.process.poll() is None:
                    server.kill(f"it did not answer within rollout.start_timeout_s = {self.config.start_timeout_s:g} s")
                return
        patience_s = self.config.health_timeout_s
        well_at = looked_at = time.monotonic()
        while not self._stopping.wait(POLL_S) and server.process.poll() is None:
            now = server.looked_at = time.monotonic()
            if self._is_quiet():  # pauses do not count against it
                well_at = now
            elif now - looked_at > min(HEALTH_EVERY_S, patience_s / 2):
                looked_at = now
                if is_healthy(str(server.url), "/health_generate", timeout_s=patience_s):
                    well_at = time.monotonic()
                # Checked again: a publication may have begun during the wait.
                elif time.monotonic() - well_at > patience_s and not self._is_quiet():
                    server.kill(f"it hung: no good answer to /health_generate for {patience_s:g} s")

    def _is_quiet(self) -> bool:
        """Return True while servers are not expected to generate."""
        return self._publishing.is_set() or self._lent.is_set()

    def _give_up(self, server: Server, restarts: int) -> None:
        ending = " | ".join(line.strip() for line in server.tail().splitlines()[-GIVE_UP_LINES:])
        message = (
            f"{server.name} {server.how_it_ended()} and is given up after {restarts} restarts "
            f"(rollout.server_restarts = {self.config.server_restarts}); its log, {server.log}, ends with: {ending}"
        )
        with self._changing:
            self._given_up.add(server.number)
            is_last = len(self._given_up) == len(self._servers)
        if self._stopping.is_set():  # `stop` has killed it
            return
        if is_last and self.on_death is not None:
            self.on_death(message)
        else:
            logger.error(message)


@contextmanager
def start_servers(
    model_path: str | Path, folder: str | Path, config: RolloutConfig | None = None, **options: Any
) -> Iterator[RolloutConfig]:
    """Start rollout servers of a model for a `with` block, and yield the config for a client of them.

        with start_servers("models/smollm2-135m-instruct", "runs/mine/servers") as rollout:
            engine = RemoteSGLangEngine(rollout)
            engine.initialize()

    folder: folder for the logs, and for the token if config.token_file is not set. options: further arguments of
    Supervisor, such as dtype. Raises the same errors as `Supervisor.start`.
    """
    config = config or RolloutConfig()
    with Supervisor(config, model_path, folder, **options) as supervisor:
        yield dataclasses.replace(config, servers=supervisor.urls, token_file=str(supervisor.token_file))


def is_healthy(url: str, endpoint: str, *, timeout_s: float) -> bool:
    # Not urllib.request: it reads all certificates for each look, and asks the cluster's http_proxy for this host.
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        connection.request("GET", endpoint)  # servers require no token here
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
