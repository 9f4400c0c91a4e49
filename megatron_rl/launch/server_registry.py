"""Rollout servers that register themselves in a folder which trainers and servers share, and leave it by themselves.

One JSON file for each server, written aside and renamed, that names the run it serves: other runs never touch it. Every
renewal writes it anew, and a file that is older than its lease is that of a server that is gone. Age is counted by the
file system's clock alone, because those of two hosts may differ by more than a lease.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.life import process_exit

logger = logging.getLogger(__name__)

PROTOCOL = 1
"""Counts what trainers and servers must agree on: this file's fields, and the endpoints behind the URL."""
LEASE_S = 30.0
RENEWALS_PER_LEASE = 3
POLL_S = 0.2
MOST_BYTES = 1 << 16
"""Largest file that is read as a registration."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """The contents of a server's file."""

    url: str
    run: str
    protocol: int = PROTOCOL
    lease_s: float = LEASE_S


class Lease:
    """A server's place in a registry, renewed from a thread while the `with` block lasts and `is_well` says so.

    with Lease("runs/demo/registry", Registration(url="http://10.0.0.2:30000", run="demo"), is_well=server.answers):
        server.wait()  # meanwhile registered_urls("runs/demo/registry", "demo") has the URL
    """

    def __init__(self, folder: str | Path, registration: Registration, *, is_well: Callable[[], bool]) -> None:
        self.folder, self.registration, self.is_well = Path(folder), registration, is_well
        self.path = self.folder / f"{re.sub('[^0-9A-Za-z.]+', '-', registration.url)}.json"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._renew()
        self._thread = process_exit.start_thread(self._keep, name="lease")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self.path.unlink(missing_ok=True)

    def _keep(self) -> None:
        while not self._ended.wait(self.registration.lease_s / RENEWALS_PER_LEASE):
            if not self.is_well():
                continue
            try:
                self._renew()
            except OSError as error:  # the next one may go well, in time
                logger.warning("%s: the lease was not renewed: %s", self.path, error)

    def _renew(self) -> None:
        aside = self.path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(asdict(self.registration)))
        os.utime(aside)  # without a time, NFS takes its server's
        aside.replace(self.path)


def registered_urls(folder: str | Path, run: str) -> list[str]:
    """Return the URLs of the servers of `run` whose lease has not run out, in a fixed order. OSError for a bad disk."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-") as file:
        os.utime(file.name)
        now = os.stat(file.name).st_mtime
    urls = []
    for path in sorted(folder.glob("*.json")):
        try:
            raw, written = read_entry(path)
            if (raw["run"], raw["protocol"]) == (run, PROTOCOL) and now - written <= raw["lease_s"]:
                urls.append(str(raw["url"]))
        except FileNotFoundError:  # it has just left
            if path.is_symlink():
                name_once(path, "it is a link to nothing")
        # Another user's, or no registration.
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            name_once(path, repr(error))
    return urls


def read_entry(path: Path) -> tuple[dict[str, Any], float]:
    """Return what a registration's file says, and when it was written. ValueError for what is no registration."""
    # Without waiting, as the opening of a pipe would. Opened at all, so that NFS asks for its age again.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_uid != os.geteuid():  # who would be sent the run's token
            raise ValueError(f"it belongs to user {found.st_uid}")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    raw = json.loads(content)
    kinds = {"url": str, "run": str, "protocol": int, "lease_s": (int, float)}
    if not isinstance(raw, dict) or not all(isinstance(raw[name], kind) for name, kind in kinds.items()):
        raise ValueError(f"it must be an object with {', '.join(kinds)} of the right types")
    return raw, found.st_mtime


@functools.lru_cache(maxsize=1000)
def name_once(path: Path, fault: str) -> None:
    """Warn of an entry that is no registration, once for each fault that it has: the folder is read again and again."""
    shown = ascii(str(path))[1:-1]  # a name may hold any bytes
    logger.warning("%s is no registration of a server and is passed over: %s", shown, fault[:200])


def wait_for_servers(folder: str | Path, run: str, count: int, *, timeout_s: float) -> list[str]:
    """Return the registered URLs once there are `count` at least; RuntimeError where that takes too long."""
    deadline = time.monotonic() + timeout_s
    while len(urls := registered_urls(folder, run)) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"rollout.registry = {str(folder)!r}: {len(urls)} servers have registered for run {run!r} within "
                f"rollout.start_timeout_s = {timeout_s:g} s, rollout.server_count = {count} must; start them with "
                f"megatron-rl serve MODEL --register {folder} --run {run}."
            )
        time.sleep(POLL_S)
    return urls
