"""A loop in a thread: what blocks on its pool, and what may not end it."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from megatron_rl.servers.event_loop import EventLoopThread
from tests.kit.waiting import LIMIT_S

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


def test_as_many_blocking_steps_run_at_once_as_there_may_be_episodes_whatever_the_number_of_cores():
    thread, all_are_here = EventLoopThread("test", blocking_steps=100), threading.Barrier(100)

    async def steps():
        await asyncio.gather(*(asyncio.to_thread(all_are_here.wait, LIMIT_S) for _ in range(100)))

    thread.run(steps())  # else BrokenBarrierError
    thread.stop()


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
        from megatron_rl.launch.process_exit import start_thread
        from megatron_rl.servers.event_loop import EventLoopThread
        {dies}
        time.sleep(10_000)
    """
    command = [sys.executable, "-c", textwrap.dedent(script.format(dies=DIES[how]))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 1 and "megatron_rl: thread 'writer' of process" in ended.stderr, ended.stderr
