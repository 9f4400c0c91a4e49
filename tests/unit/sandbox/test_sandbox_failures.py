"""A host that cannot lock text in, or kills it for want of memory, gives no reward. No text can make it look so."""

import asyncio
import itertools
import os
import resource
import signal
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_rl.api import InfrastructureFailure
from megatron_rl.rewards import code
from megatron_rl.rewards.reward_service import RewardLost, RewardService
from megatron_rl.sandbox import lock, locked
from megatron_rl.sandbox.locked import SandboxFailed, TextFailed, evaluate, refuse_killed, run_program
from megatron_rl.sandbox.trial import holds
from megatron_rl.workflows import python_tool
from megatron_rl.workflows.python_tool import Python
from tests.kit.waiting import LATE_S, wait_until

BOUNDS = {"time_s": LATE_S, "memory_bytes": 1 << 29}
WAYS = {
    "a function": lambda text: evaluate(executed, text, **BOUNDS),
    "a program": lambda text: run_program(text, "", **BOUNDS),
    "a test": lambda text: holds(f"def f():\n    {text}", "assert f() is None", **BOUNDS),
    "a reward": lambda text: code.program_output("", text, [], [], tests=[{"input": "", "output": "1"}], time_s=LATE_S),
    "a tool": lambda text: asyncio.run(Python(time_s=LATE_S)(code=text)),
}
SLEEPS = "__import__('time').sleep(3600)"


def executed(text):
    exec(text, {})


@pytest.fixture(autouse=True)
def checked():
    locked.check_host()  # it remembers that this host can


@pytest.mark.parametrize("way", WAYS)
def test_a_process_that_the_kernel_does_not_lock_is_no_failure_of_its_text(way, monkeypatch):
    if way == "a tool":  # whose launcher is a program of its own
        monkeypatch.setattr(python_tool, "LAUNCHER", os.devnull)
    # A filter without a step is none: the kernel refuses it, as one without seccomp or memory refuses any.
    monkeypatch.setattr(lock, "filter_steps", lambda pid, has_threads: [])
    with pytest.raises(InfrastructureFailure, match="ended before it was locked in") as raised:
        WAYS[way]("print(1)")
    assert raised.value.kind == "sandbox"


@contextmanager
def killer(count):
    """Kill one of this process's children once `count` are locked in, as the kernel does where memory is short."""

    def kill():
        wait_until(lambda: sum(map(is_locked_in, children())) == count, children)
        os.kill(min(children()), signal.SIGKILL)

    def is_locked_in(pid):
        """Whether it has its filter, and is no launcher any more, which yet has to say that it is locked in."""
        return filters(pid) > filters("self") and python_tool.LAUNCHER not in Path(f"/proc/{pid}/cmdline").read_text()

    def filters(pid):
        (line,) = (line for line in Path(f"/proc/{pid}/status").open() if line.startswith("Seccomp_filters:"))
        return int(line.split()[1])

    def children():
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split())) - before

    before = set()
    before = children()
    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("way", WAYS)
def test_a_process_that_the_host_kills_is_no_failure_of_its_text(way):
    """Of a test there are the program, which is killed here, and its judge."""
    text = SLEEPS if way == "a test" else f"{SLEEPS}\nprint(1)"
    with killer(2 if way == "a test" else 1), pytest.raises(InfrastructureFailure, match="lack of memory"):
        WAYS[way](text)


@pytest.mark.parametrize("kill", ["os.kill(os.getpid(), 9)", "signal.raise_signal(9)", "signal.pthread_kill(me(), 9)"])
def test_text_that_would_look_as_if_the_host_had_killed_it_has_failed(kill):
    text = f"import os, signal, threading; me = threading.get_ident; {kill}"
    with pytest.raises(TextFailed, match="PermissionError"):
        WAYS["a function"](text)
    assert WAYS["a program"](text) is None and WAYS["a test"](text) is False and WAYS["a reward"](text) == 0.0
    assert "PermissionError" in WAYS["a tool"](text)


@pytest.mark.parametrize("end", ["os._exit(0)", "os.abort()", "os.close(3); time.sleep(1)", "os.kill(os.getpid(), 15)"])
def test_text_that_ends_without_a_result_has_failed(end):
    with pytest.raises(TextFailed, match="ended without a result"):
        WAYS["a function"](f"import os, time; {end}")


@pytest.fixture
def starved():
    """Give this process and its children one core together with three others that never rest."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    busy = [subprocess.Popen(["bash", "-c", "while :; do :; done"]) for _ in range(3)]
    yield
    for process in busy:
        process.kill()
        process.wait()
    os.sched_setaffinity(0, before)


COMPUTES = "import time; began = time.process_time(); all(iter(lambda: time.process_time() < began + 0.6, False))"


@pytest.mark.parametrize("way", ["a function", "a program", "a test"])
def test_text_that_has_no_processor_is_given_more_time(way, starved):
    """It computes for 0.6 s, which take about 2.4 s here. Its limit is 1.5 s, as a slow start of Python counts too."""
    bounds = {"time_s": 1.5, "memory_bytes": 1 << 29}
    if way == "a function":
        evaluate(executed, COMPUTES, **bounds)
    elif way == "a program":
        assert run_program(f"{COMPUTES}\nprint(1)", "", **bounds) == "1\n"
    else:
        assert holds(f"def f():\n    {COMPUTES}", "assert f() is None", **bounds)


def test_host_without_a_processor_for_text_is_at_fault(monkeypatch):
    waits = itertools.count(0.0, locked.LONGEST_WAIT_S + 1)
    monkeypatch.setattr(locked, "processor_use", lambda pid: (0.0, next(waits)))
    with pytest.raises(SandboxFailed, match="waited 61 s for a processor; the host has too much to do"):
        evaluate(executed, SLEEPS, time_s=0.1, memory_bytes=1 << 28)


@pytest.mark.slow
def test_a_limit_of_processor_time_is_not_the_host():
    """One second, which the kernel ends in the same way as it ends a process for want of memory."""
    spins = subprocess.Popen(
        ["bash", "-c", "while :; do :; done"], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    )
    os.waitid(os.P_PID, spins.pid, os.WEXITED | os.WNOWAIT)
    refuse_killed(spins.pid, -0.5)  # whose limit is 1 s
    with pytest.raises(SandboxFailed, match="long before its own limits"):
        refuse_killed(spins.pid, 5.0)
    assert spins.wait() == -signal.SIGKILL


def test_a_host_without_processes_gives_no_reward(monkeypatch):
    def no_process(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_process)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    for way in ("a function", "a program", "a test", "a reward"):
        with pytest.raises(SandboxFailed, match="no process could be started to lock text in: .*unavailable"):
            WAYS[way]("1")


def test_a_worker_says_that_its_sandbox_failed_and_whose_fault_it_was_not():
    service = RewardService([("killed", "tests.unit.trying_rewards:loses_its_sandbox", {})], workers=1)
    try:
        with pytest.raises(RewardLost, match="SandboxFailed: no memory .reward killed, .*trying_rewards.py") as raised:
            asyncio.run(service.call({"completions": "1"}, LATE_S))
        assert raised.value.kind == "sandbox"
    finally:
        service.close()
