"""Serves a live web page of a running or finished run. All data comes from the files that the run writes.

    GET /            the page (watch_page.py)
    GET /state.json  the page's data, whose size is bounded also for long runs and many running episodes
    GET /report, /samples.json  the run's report (live_report.py)

Listens on 127.0.0.1 only, and answers only requests whose Host is 127.0.0.1 or localhost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron_rl.telemetry.run_log import CONFIG, METRICS, is_line, is_number
from megatron_rl.tools.watch.live_report import LiveReport
from megatron_rl.tools.watch.watch_page import PAGE

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
SILENT_S = 15.0
"""A rollout process that has not written its status for this long counts as crashed or hung."""
POINTS = 400
"""Maximum number of points of a chart. If a run has more steps, every 2nd, 4th or 8th is shown, and so on."""
SHOWN, LETTERS = 12, 400
STATUS_BYTES = 1 << 22
TAIL_BYTES = 1 << 18
"""Number of bytes read from the end of each dead_letters*.jsonl. The file may be large, because it has tracebacks."""
CURVES = {"reward": "reward/mean", "staleness": "rollout/staleness", "tokens_per_s": "rollout/tokens_per_s"}
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class StepLines:
    """The steps in metrics.jsonl. Each `read` adds the lines written since the previous call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_id, self._read = (0, 0), 0
        self.steps: dict[int, dict[str, Any]] = {}
        self.damaged = 0
        """Number of malformed lines."""

    def read(self) -> None:
        if not self._path.is_file():  # opening a pipe would block
            return
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                # The file was replaced or truncated: the run was resumed at an earlier step. Start over.
                if (about.st_dev, about.st_ino) != self._file_id or about.st_size < self._read:
                    self._file_id, self._read, self.steps = (about.st_dev, about.st_ino), 0, {}
                    self.damaged = 0
                file.seek(self._read)
                content = file.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        lines = [parsed(line) for line in whole.splitlines()]
        self.damaged += sum(not is_line(row, of_samples=False) for row in lines)
        self._read += len(whole)
        for row in lines:
            if is_line(row, of_samples=False) and row.get("kind") == "step":
                self.steps[row["step"]] = {name: number_or_none(row.get(key)) for name, key in CURVES.items()}


class Watch:
    """The state of one run, as shown on the page."""

    def __init__(self, folder: Path) -> None:
        """ValueError if the folder contains no run."""
        if not any((folder / name).exists() for name in (METRICS, CONFIG, "status")):
            raise ValueError(f"run = {str(folder)!r}: no run has begun there; give the run.folder of one.")
        self.folder, self._lines = folder, StepLines(folder / METRICS)

    def state(self) -> dict[str, Any]:
        """Return the data of state.json. Not thread-safe."""
        self._lines.read()
        now, (told, left_out) = time.time(), self._told()
        if self._lines.damaged:
            left_out.append(f"{self._lines.damaged} lines of {METRICS}")
        alive = [one for one in told if not one.get("ended") and now - number(one.get("time")) < SILENT_S]
        words = "running" if alive else "ended" if all(one.get("ended") for one in told) else "silent"
        slowest = [episode for one in alive for episode in one.get("slowest", [])]
        servers = {server["url"]: server for one in alive for server in one.get("servers", [])}
        return {
            "run": self.folder.resolve().name,
            "state": words,
            "about": self._about(told, alive, now)
            + (f"; damaged and left out: {', '.join(left_out)}" if left_out else ""),
            "steps": self._curves(),
            "episodes": dict(sum((Counter(one.get("episodes", {})) for one in alive), Counter())),
            "failures": dict(sum((Counter(one.get("failures", {})) for one in told), Counter()).most_common(20)),
            "slowest": sorted(slowest, key=lambda one: -number(one.get("seconds")))[:SHOWN],
            "servers": list(servers.values()),
            "lost": self._lost(),
        }

    def _told(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the latest status of each rollout process, and the names of malformed status files."""
        found, left_out = [], []
        for path in sorted((self.folder / "status").glob("rollout-*.json")):
            status = None
            with contextlib.suppress(OSError):
                if path.is_file() and path.stat().st_size <= STATUS_BYTES:
                    status = parsed(path.read_bytes())
            if is_status(status):
                found.append(status)
            elif os.path.lexists(path):  # otherwise it was just removed, which is no damage
                left_out.append(ascii(path.name)[1:-1])
        return found, left_out

    def _about(self, told: list[dict[str, Any]], alive: list[dict[str, Any]], now: float) -> str:
        steps = f"{len(self._lines.steps)} steps"
        if alive:
            return f"policy version {max(one['version'] for one in alive)}, {steps}, {len(alive)} rollout process(es)"
        last_s = max((number(one.get("time")) for one in told), default=0.0)
        return f"{steps}, last heard of {round(now - last_s)} s ago" if last_s else steps

    def _curves(self) -> dict[str, list[Any]]:
        steps = sorted(self._lines.steps)
        while len(steps) > POINTS:
            steps = steps[-1::-2][::-1]  # keeps the last step
        curves: dict[str, list[Any]] = {"step": [step + 1 for step in steps]}  # the terminal counts from 1
        return curves | {name: [self._lines.steps[step][name] for step in steps] for name in CURVES}

    def _lost(self) -> list[dict[str, str]]:
        """Return the time and the error, without traceback, of each prompt among those given up most recently."""
        found = []
        for path in self.folder.glob("dead_letters*.jsonl"):
            rows = []
            with contextlib.suppress(OSError):
                if path.is_file():
                    with path.open("rb") as file:
                        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                        rows = [parsed(line) for line in file.read().splitlines()]
            found += [row for row in rows if isinstance(row, dict)]  # the first line may be cut off and not parse
        newest = sorted(found, key=lambda row: str(row.get("time")))[-SHOWN:]
        return [{name: str(row.get(name))[:LETTERS] for name in ("time", "error")} for row in newest]


def parsed(line: bytes) -> Any:
    """Return the JSON value of a line, or None if it is not valid JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def is_status(found: Any) -> bool:
    """Return True if the fields have the types of a rollout status (rollout/status.py), on which the page relies."""
    return (
        isinstance(found, dict)
        and is_number(found.get("time"))
        and is_number(found.get("version"))
        and isinstance(found.get("ended", False), bool)
        and all(is_counts(found.get(name, {})) for name in ("episodes", "failures"))
        and is_list_of(found.get("servers", []), {"url": str})
        and is_list_of(found.get("slowest", []), {"seconds": (int, float), "turns": list})
        and all(is_list_of(one["turns"], {}) for one in found.get("slowest", []))
        and is_shallow(found)
    )


def is_counts(found: Any) -> bool:
    return isinstance(found, dict) and all(map(is_number, found.values()))


def is_list_of(found: Any, kinds: dict[str, Any]) -> bool:
    """Return True for a list of objects that have all keys of `kinds`. kinds: {key: type of its value}."""
    objects = found if isinstance(found, list) else [None]
    return all(isinstance(it, dict) and all(isinstance(it.get(k), kinds[k]) for k in kinds) for it in objects)


def is_shallow(found: Any, depth: int = 6) -> bool:
    """Return True for a JSON value nested at most `depth` deep whose numbers are all valid for `is_number`."""
    if isinstance(found, dict | list):
        parts = found.values() if isinstance(found, dict) else found
        return depth > 0 and all(is_shallow(part, depth - 1) for part in parts)
    return found is None or isinstance(found, str | bool) or is_number(found)


def number_or_none(value: Any) -> Any:
    return value if is_number(value) else None


def number(value: Any) -> float:
    return float(value) if is_number(value) else 0.0


class Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = 5.0
    """Seconds until an idle connection is closed."""

    def do_GET(self) -> None:
        # Against DNS rebinding: a foreign web page must not read the run's data.
        if self.headers.get("Host", "").rpartition(":")[0] not in (LOOPBACK, "localhost"):
            self.send_error(403)
        elif self.path == "/":
            self._answer("text/html; charset=utf-8", PAGE.encode())
        elif self.path == "/state.json":
            self._answer("application/json", json.dumps(self.server.state()).encode())
        elif self.path == "/report":
            tag, page = self.server.report.page()
            is_known = self.headers.get("If-None-Match") == tag
            content, status = (b"", 304) if is_known else (page, 200)
            self._answer("text/html; charset=utf-8", content, status=status, tag=tag)
        elif self.path.partition("?")[0] == "/samples.json":
            found = self.server.report.samples(self.path.partition("?")[2])
            self._answer("application/json", json.dumps(found).encode())
        else:
            self.send_error(404)

    def _answer(self, kind: str, content: bytes, *, status: int = 200, tag: str = "") -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": len(content), "Cache-Control": "no-store"}
        headers |= {"ETag": tag} if tag else {}
        for name, value in (headers | {"Content-Security-Policy": POLICY}).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class WatchServer(ThreadingHTTPServer):
    """HTTP server for the page of one run. ValueError if the port cannot be used."""

    daemon_threads = True  # browsers keep idle connections open, which must not delay the exit

    def __init__(self, folder: Path, port: int) -> None:
        self._watch, self._one_reads = Watch(folder), threading.Lock()
        self.report = LiveReport(folder)
        try:
            super().__init__((LOOPBACK, port), Handler)
        except OSError as error:
            raise ValueError(f"--port {port}: {error.strerror}; give another one, or 0 for any.") from error

    def state(self) -> dict[str, Any]:
        with self._one_reads:
            return self._watch.state()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"


def watch(folder: Path, port: int, page: str = "") -> None:
    """Serve the pages until Ctrl-C. page: path in the printed URL, "" or `report`."""
    with WatchServer(folder, port) as server:
        print(f"{server.url}{page}  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
