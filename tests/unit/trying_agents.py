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

from megatron_rl import InfrastructureFailure


def asked(base_url, api_key, **body):
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    return urllib.request.urlopen(
        urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    )


def asks(base_url, api_key, data, turns=3, streams=False):
    """Lead a dialogue of some turns by the standard library alone."""
    messages = list(data["messages"])
    for turn in range(turns):
        with asked(base_url, api_key, messages=messages, stream=streams) as answer:
            messages.append(streamed(answer) if streams else json.load(answer)["choices"][0]["message"])
        messages.append({"role": "user", "content": f"and {turn}?"})
    return 1.0


def streamed(answer):
    """Return the message that the events of a stream make."""
    lines = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    return {"role": "assistant", "content": "".join(delta.get("content", "") for delta in deltas)}


def hangs_up(base_url, api_key, data):
    """Leave a stream after its first words, then ask for five tokens."""
    with asked(base_url, api_key, messages=data["messages"], stream=True) as answer:
        while b'"content": ""' in (line := answer.readline()) or not line.startswith(b"data: "):
            pass
    messages = [*data["messages"], {"role": "user", "content": "briefly"}]
    with asked(base_url, api_key, messages=messages, max_tokens=5) as answer:
        json.load(answer)
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


def loses_its_database(base_url, api_key, data):
    raise InfrastructureFailure("the database at host7 is down", kind="database")


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
    """Return how many ran at once, as far as this one saw. The first one waits for another."""
    mine, have_met = Path(data["folder"], str(os.getpid())), Path(data["have_met"])
    mine.touch()
    while (met := len(os.listdir(data["folder"]))) < 2 and not have_met.exists():
        time.sleep(0.01)
    have_met.touch()
    time.sleep(0.05)  # in which one too many may come
    met = max(met, len(os.listdir(data["folder"])))
    mine.unlink()
    return met
