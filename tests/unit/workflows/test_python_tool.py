"""The Python tool: programs run and print, and can do nothing else."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest

from megatron_rl.workflows import python_tool
from megatron_rl.workflows.python_tool import Python
from megatron_rl.workflows.tools import ToolCall, ToolError, run_call
from tests.kit.waiting import LATE_S, until


def show(code: str, time_s: float = LATE_S, **options) -> str:
    tool = Python(time_s=time_s, **options)
    return asyncio.run(run_call(ToolCall(name="python", arguments={"code": code}), {"python": tool}))


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(sum(i * i for i in range(10)))", "285"),
        ("import math, json\nprint(json.dumps(math.factorial(20)))", "2432902008176640000"),
        ("def f(n):\n    return n and n + f(n - 1)\n\nprint(f(100))\nprint('ä')", "5050\nä"),
        ("x = 3", "(the program printed nothing)"),
    ],
)
def test_a_program_prints_what_it_computes(code, shown):
    assert show(code) == shown


def test_a_program_that_fails_shows_its_traceback_after_what_it_printed():
    shown = show("print('first')\n[][3]")
    assert shown.startswith("first\n") and shown.endswith("IndexError: list index out of range")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import os; os.mkdir('made')",
        "open('made', 'w')",
        "import socket; socket.socket()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.kill(os.getppid(), 9)",
        "x = 'a' * 10**10",
    ],
)
def test_a_program_only_computes(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = show(f"{code}\nprint('did it')")
    assert "did it" not in shown and ("PermissionError" in shown or "MemoryError" in shown)
    assert not list(tmp_path.iterdir())


def test_a_program_has_some_threads_and_cannot_take_the_hosts():
    pool = "from concurrent.futures import ThreadPoolExecutor\n"
    assert show(f"{pool}with ThreadPoolExecutor(4) as pool: print(sum(pool.map(abs, range(-9, 0))))") == "45"
    bomb = "import _thread, os, threading, time\nthreading.stack_size(32768)\ncount = 0\ntry:\n    while True:\n"
    bomb += "        _thread.start_new_thread(time.sleep, (9,))\n        count += 1\n"
    bomb += "except RuntimeError:\n    print(count, flush=True)\n    os._exit(0)"
    assert 1 <= int(show(bomb)) <= 63
    assert show("print(1)") == "1", "another has its own"


@pytest.mark.slow
def test_late_and_endless_programs_are_killed_and_said_to_be():
    assert show("import time\nwhile True: time.sleep(60)", time_s=0.3) == (
        "error: the program did not end within 0.3 s"
    )
    assert show("while True: print('y' * 1000)") == "error: the program printed more than 1 MiB"
    # One that closes its output still has to end.
    assert "did not end" in show("import os\nos.close(1); os.close(2)\nwhile True: pass", time_s=0.3)
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True)
    assert "lock.py" not in children.stdout and " -X utf8 -" not in children.stdout


def test_a_program_that_has_printed_more_than_is_read_is_not_waited_for(monkeypatch):
    read = Python._read

    async def late(self, stream):
        await asyncio.sleep(0.2)  # so much has come by then that nothing more is taken from the pipe
        return await read(self, stream)

    monkeypatch.setattr(Python, "_read", late)
    monkeypatch.setattr(python_tool, "MOST_PRINTED_BYTES", 1)
    with pytest.raises(ToolError, match="printed more"):
        asyncio.run(Python(time_s=LATE_S)(code="while True: print('y' * 1000)"))


def test_a_host_that_starts_no_interpreter_in_time_is_not_the_programs_fault(monkeypatch):
    monkeypatch.setattr(python_tool, "START_S", 0.0)
    with pytest.raises(RuntimeError, match="was not ready within 0 s; the host has too much to do"):
        asyncio.run(Python(time_s=LATE_S)(code="print(1)"))


def test_the_policy_sees_the_beginning_and_the_end_of_much():
    shown = show("print('b' + 'x' * 9998 + 'e')", characters=100)
    assert shown == "b" + "x" * 49 + "\n... 9900 characters left out ...\n" + "x" * 49 + "e"


def test_programs_run_side_by_side():
    async def all_of_them() -> list[str]:
        tool = Python(time_s=LATE_S)
        return await asyncio.gather(*(tool(code=f"print({n})") for n in range(12)))

    assert asyncio.run(all_of_them()) == [str(n) for n in range(12)]


def test_the_time_of_a_program_that_waits_for_its_turn_has_not_begun():
    async def one_after_the_other() -> None:
        slots = python_tool.AT_ONCE[asyncio.get_running_loop()] = asyncio.Semaphore(1)
        endless = "while True: pass"
        first = asyncio.create_task(Python(time_s=LATE_S)(code=endless))
        await until(slots.locked, "the first one has no slot")
        second = asyncio.create_task(Python(time_s=0.1)(code=endless))
        await asyncio.sleep(0.3)  # and however much longer: no time passes for the second one
        assert not second.done()
        first.cancel()
        with pytest.raises(ToolError, match="did not end within 0.1 s"):
            await second

    asyncio.run(one_after_the_other())
