"""Whoever stands still is named within a minute: processes that are stopped, and threads that do not get on."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from megatron_rl.life import signs_of_life
from megatron_rl.life.beat import Beat
from megatron_rl.life.signs_of_life import LOOK_S, SILENT_S, SignsOfLife, StoppedProcesses
from megatron_rl.servers.event_loop import EventLoopThread
from tests.kit.waiting import LIMIT_S, wait_until


def test_by_default_whoever_is_silent_is_named_within_a_minute():
    assert SILENT_S + 2 * LOOK_S <= 60


@pytest.fixture
def process():
    with subprocess.Popen(["sleep", "infinity"]) as started:
        yield started
        started.kill()


def test_a_stopped_process_is_named_once_with_the_way_out_and_again_when_it_is_back(process, monkeypatch):
    monkeypatch.setattr(signs_of_life, "SILENT_S", 0.2)
    monkeypatch.setattr(signs_of_life, "LOOK_S", 0.05)
    said, looks = [], []
    signs = SignsOfLife([StoppedProcesses(), lambda: looks.append(1) or {}], say=said.append)
    signs.start()
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: said)
    before = len(looks)
    wait_until(lambda: len(looks) >= before + 3)
    (line,) = said
    who = f"process 'sleep infinity' (pid {process.pid}), which a signal has stopped,"
    assert line.startswith(f"{who} has given no sign of life for ") and f"kill -CONT {process.pid}" in line
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: len(said) == 2)
    assert said[1] == f"{who} is back, or gone."
    signs.close()


def test_a_stopped_rank_is_named_by_its_number(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with subprocess.Popen(["sleep", "infinity"], env=os.environ | {"RANK": "3"}) as rank:
        try:
            rank.send_signal(signal.SIGSTOP)
            stopped = StoppedProcesses(descends=False)
            wait_until(lambda: [who for who in stopped() if who.startswith(f"rank 3 (pid {rank.pid})")])
        finally:
            rank.kill()


def test_a_stopped_process_of_the_rewards_is_named_though_its_environment_cannot_be_read(monkeypatch):
    def refuse(process):
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "environ", refuse)
    sleeping = [sys.executable, "-c", "import signal; signal.pause()", "megatron_rl.rewards"]
    with subprocess.Popen(sleeping) as rewards:
        try:
            rewards.send_signal(signal.SIGSTOP)
            wait_until(
                lambda: [who for who in StoppedProcesses()() if who.startswith("a process of the rewards (pid ")]
            )
        finally:
            rewards.kill()


def test_a_process_that_stood_still_itself_blames_nobody_when_it_goes_on(monkeypatch):
    class Clock:
        now = heard_at = 100.0

        def monotonic(self):
            return self.now

    clock, said = Clock(), []
    monkeypatch.setattr(signs_of_life, "time", clock)
    signs = SignsOfLife([lambda: {"the other": (clock.now - clock.heard_at, "")}], say=said.append)
    rounds = iter([500.0, 5.0])

    def wait(_):
        if (passed := next(rounds, None)) is None:
            return True
        clock.heard_at = clock.now if passed == 5.0 else clock.heard_at  # who answers as soon as it is asked again
        clock.now += passed
        return False

    monkeypatch.setattr(signs._closed, "wait", wait)
    signs._keep_looking()
    assert not said


def test_an_event_loop_that_something_keeps_from_its_work_says_for_how_long():
    thread = EventLoopThread("test")
    beat = Beat(thread.loop)
    thread.loop.call_soon_threadsafe(beat.begin)
    wait_until(lambda: beat.stands_still_s == 0.0)
    goes_on = threading.Event()
    thread.loop.call_soon_threadsafe(goes_on.wait, LIMIT_S)
    wait_until(lambda: beat.stands_still_s > 0.3)
    goes_on.set()
    wait_until(lambda: beat.stands_still_s == 0.0 and beat.lag_s > 0.3)
    thread.stop()
