"""A loop in a thread: what blocks on its pool, and what may not end it."""

import asyncio
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from megatron_rl.config import users_code
from megatron_rl.life import beat as life_beat
from megatron_rl.life.beat import BUSY_S, LATE_S, LOOK_S, Beat, HoldWatch
from megatron_rl.servers.event_loop import EventLoopThread
from tests.kit.waiting import LIMIT_S, wait_until

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


def test_as_many_blocking_steps_run_at_once_as_there_may_be_episodes_whatever_the_number_of_cores():
    thread, all_are_here = EventLoopThread("test", blocking_steps=100), threading.Barrier(100)

    async def steps():
        await asyncio.gather(*(asyncio.to_thread(all_are_here.wait, LIMIT_S) for _ in range(100)))

    thread.run(steps())  # else BrokenBarrierError
    thread.stop()


class Blocking:
    """What a user might write into a workflow."""

    def __init__(self):
        self.goes_on, self.has_begun = threading.Event(), threading.Event()

    async def waits(self):
        self.has_begun.set()
        self.goes_on.wait(LIMIT_S)

    async def by_a_call_of_ours(self):
        users_code.call(self.goes_on.wait, [LIMIT_S], {}, key="", contract="")


@pytest.fixture
def told():
    """The warnings of one event loop, each of which lets what blocks it go on."""
    blocking, words = Blocking(), []

    class Handler(logging.Handler):
        def emit(self, record):
            words.append(record.getMessage())
            blocking.goes_on.set()

    handler = Handler(level=logging.WARNING)
    life_beat.logger.addHandler(handler)
    yield blocking, words
    life_beat.logger.removeHandler(handler)


def test_an_episode_that_blocks_the_event_loop_is_told_once_with_the_users_file_and_line(told):
    blocking, words = told
    thread = EventLoopThread("test")
    thread.run(blocking.waits())  # until it is told
    line = Blocking.waits.__code__.co_firstlineno + 2
    assert words[0].startswith(f"{__file__}:{line}, in Blocking.waits, has held the event loop for ")
    assert "asyncio.to_thread" in words[0] and len(words) == 1
    thread.stop()


def held_by(thread, episode, times):
    """Let a watch look at these times, by a clock of its own, while an episode holds the loop."""
    beat, watch = thread.run(watched(thread))
    thread.submit(episode)
    wait_until(lambda: beat.stands_still_s > LATE_S)
    for now in times:
        watch.look(time.monotonic() + now)


async def watched(thread):
    beat = Beat(thread.loop)
    beat.begin()
    return beat, HoldWatch(beat)


LOOKS = [LOOK_S * number for number in range(1, 100)]


@pytest.mark.parametrize(
    ("name", "times", "count"),
    [("waits", LOOKS, 1), ("by_a_call_of_ours", LOOKS, 0), ("waits", [1000.0], 0)],
    ids=["a user's code", "our own code", "a process that was stopped"],
)
def test_only_a_users_code_is_told_of_and_only_once(told, monkeypatch, name, times, count):
    blocking, words = told
    monkeypatch.setattr(HoldWatch, "begin", lambda self: None)  # of the thread's own
    thread = EventLoopThread("test")
    held_by(thread, getattr(blocking, name)(), times)
    blocking.goes_on.set()
    thread.stop()
    assert len(words) == count


def test_many_short_blocks_add_up_to_a_warning(told, monkeypatch):
    blocking, words = told
    monkeypatch.setattr(HoldWatch, "begin", lambda self: None)
    monkeypatch.setattr(Beat, "stands_still_s", 0.0)  # each is over before a beat is late
    thread = EventLoopThread("test")
    _, watch = thread.run(watched(thread))
    thread.submit(blocking.waits())
    wait_until(blocking.has_begun.is_set)
    count = 0
    while not words:
        count += 1
        watch.look(time.monotonic() + LOOK_S * count)
    thread.stop()
    assert count * LOOK_S >= BUSY_S / 2 and len(words) == 1


def test_a_computation_that_lets_no_other_thread_run_is_told_of(told, monkeypatch):
    blocking, words = told
    monkeypatch.setattr(HoldWatch, "begin", lambda self: None)
    thread = EventLoopThread("test")
    used = iter([0.0, 3.0])
    monkeypatch.setattr(HoldWatch, "_cpu_s", lambda self: next(used))
    held_by(thread, blocking.waits(), [0.1, 3.1])
    thread.stop()
    assert len(words) == 1


DIES = {
    "an error": "start_thread(lambda: 1 / 0, name='writer')",
    "an exit, of which threading says nothing": "start_thread(lambda: sys.exit(), name='writer')",
    "a loop that somebody stopped": "loop = EventLoopThread('writer').loop; loop.call_soon_threadsafe(loop.stop)",
    "a loop out of which somebody exited": "EventLoopThread('writer').loop.call_soon_threadsafe(sys.exit)",
}


@pytest.mark.parametrize("how", DIES)
def test_a_thread_that_dies_is_named_and_ends_its_process(how):
    script = """
        import sys, time
        from megatron_rl.life.process_exit import start_thread
        from megatron_rl.servers.event_loop import EventLoopThread
        {dies}
        time.sleep(10_000)
    """
    command = [sys.executable, "-c", textwrap.dedent(script.format(dies=DIES[how]))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 1 and "megatron_rl: thread 'writer' of process" in ended.stderr, ended.stderr
