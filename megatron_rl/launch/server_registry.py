"""Registry of rollout servers: a folder shared by trainers and servers.

Each server has one JSON file, which names the server's run. A server rewrites its file to renew its lease, and removes
the file when it ends. If a file is older than its lease, its server is lost. Ages are measured by the file system's
clock, because the clocks of two hosts may differ by more than a lease.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.life import process_exit

logger = logging.getLogger(__name__)

PROTOCOL = 1
"""Version of the registration's fields and the server's endpoints, on which trainers and servers must agree."""
RENEWALS_PER_LEASE = 3
POLL_S = 0.2
MOST_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Registration:
    """Contents of a server's registration file."""

    url: str
    run: str
    protocol: int = PROTOCOL
    lease_s: float = 30.0


@contextmanager
def registered(folder: str | Path, registration: Registration, *, is_well: Callable[[], bool]) -> Iterator[Path]:
    """Keep a server registered inside the `with` block, and yield its file.

        with registered("runs/demo/registry", Registration(url="http://a:30000", run="demo"), is_well=server.answers):
            server.wait()  # meanwhile registered_urls("runs/demo/registry", "demo") has the URL

    A thread renews the lease for as long as `is_well()` is true.
    """
    path = Path(folder) / f"{re.sub('[^0-9A-Za-z.]+', '-', registration.url)}.json"
    ended = threading.Event()

    def renew() -> None:
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(asdict(registration)))
        os.utime(aside)  # without an explicit time, NFS uses the server's clock
        aside.replace(path)

    def keep() -> None:
        while not ended.wait(registration.lease_s / RENEWALS_PER_LEASE):
            if not is_well():
                continue
            try:
                renew()
            except OSError as error:  # the next renewal may still be in time
                logger.warning("%s: the lease was not renewed: %s", path, error)

    path.parent.mkdir(parents=True, exist_ok=True)
    renew()
    thread = process_exit.start_thread(keep, name="lease")
    try:
        yield path
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


def registered_urls(folder: str | Path, run: str) -> list[str]:
    """Return the URLs of the servers of a run whose leases have not expired, sorted by file name.

    Raises OSError if the folder cannot be read.
    """
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
        except FileNotFoundError:  # it has just unregistered
            if path.is_symlink():
                name_once(path, "it is a link to nothing")
        except (OSError, ValueError, RecursionError) as error:  # another user's file, or not a registration
            name_once(path, repr(error))
    return urls


def read_entry(path: Path) -> tuple[dict[str, Any], float]:
    """Return a registration file's content and modification time.

    Raises ValueError or RecursionError if the content is invalid.
    """
    # Opening a named pipe must not block. The file is opened before stat so that NFS refreshes its age.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_uid != os.geteuid():  # its owner would be sent the run's token
            raise ValueError(f"it belongs to user {found.st_uid}")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    raw = json.loads(content)
    kinds = {"url": str, "run": str, "protocol": int, "lease_s": (int, float)}
    if not isinstance(raw, dict) or not all(isinstance(raw.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"it must be an object with {', '.join(kinds)} of the right types")
    return raw, found.st_mtime


@functools.lru_cache(maxsize=1000)
def name_once(path: Path, fault: str) -> None:
    """Warn about an invalid file, but only once per file and fault, because the folder is read repeatedly."""
    shown = ascii(str(path))[1:-1]  # a name may contain any bytes
    logger.warning("%s is no registration of a server and is passed over: %s", shown, fault[:200])


def wait_for_servers(folder: str | Path, run: str, count: int, *, timeout_s: float) -> list[str]:
    """Wait until at least `count` servers of a run are registered, and return the URLs of all registered ones.

    Raises RuntimeError after `timeout_s`.
    """
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
