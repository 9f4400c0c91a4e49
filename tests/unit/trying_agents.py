"""Agents for test_agent_workers.py and bench_agents.py: module-level functions, as worker processes import them."""

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path


def asks(base_url, api_key, data, turns=3):
    """Lead a dialogue of some turns by the standard library alone."""
    messages = list(data["messages"])
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    for turn in range(turns):
        request = urllib.request.Request(
            f"{base_url}/chat/completions", json.dumps({"messages": messages}).encode(), headers
        )
        with urllib.request.urlopen(request) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
        messages.append({"role": "user", "content": f"and {turn}?"})
    return 1.0


def never_ends(base_url, api_key, data):
    """Hang in the way that `data` names, after a child has been left that is in a session of its own."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():
            os._exit(0)  # the grandchild is nobody's any more
        Path(data["pids"], f"{os.getpid()}").touch()
        time.sleep(600)
    started = subprocess.Popen(["sleep", "600"])
    for pid in (os.getpid(), started.pid):
        Path(data["pids"], f"{pid}").touch()
    print("it has begun", flush=True)
    if data["how"] == "busy":
        while True:
            pass
    if data["how"] == "sleep":
        time.sleep(600)
    ctypes.PyDLL(None).pause()  # a C function that keeps the interpreter's lock


def leaves_a_daemon(base_url, api_key, data):
    started = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(data["pids"], f"{started.pid}").touch()
    return 1.0


def prints(base_url, api_key, data):
    print("to stdout", data["said"], flush=True)
    print("to stderr", file=sys.stderr)
    os.system("echo of a child")
    if data.get("much"):
        print("x" * 1_000_000)
    raise OSError("its database is down")


def dies(base_url, api_key, data):
    print("in a moment", flush=True)
    os._exit(3)


def raises_what_is_no_exception(base_url, api_key, data):
    raise {"exit": SystemExit(3), "stop": StopIteration("no more"), "cancel": asyncio.CancelledError()}[data["how"]]


async def is_awaited(base_url, api_key, data, value):
    await asyncio.sleep(0)
    return value


def tells(base_url, api_key, data):
    """Note where it runs, what it finds there, and leave a file and a mark of its own."""
    mark = sys.modules[__name__].__dict__.setdefault("marks", [])
    mark.append(1)
    Path(tempfile.gettempdir(), "mine").write_text("for now")
    about = {"cwd": os.getcwd(), "marks": len(mark), "temporary": tempfile.gettempdir(), "pid": os.getpid()}
    Path(data["to"]).write_text(json.dumps(about | {"torch": "torch" in sys.modules}))


def meets(base_url, api_key, data):
    """Return how many ran at once, as far as this one saw."""
    mine = Path(data["folder"], str(os.getpid()))
    mine.touch()
    time.sleep(0.2)
    met = len(list(Path(data["folder"]).iterdir()))
    mine.unlink()
    return met
