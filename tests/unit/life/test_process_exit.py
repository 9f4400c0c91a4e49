"""A process that is done ends with its exit code, whatever its other threads are at."""

import io

import pytest

from megatron_rl.life.process_exit import is_alive
from tests.kit.interpreters import run_python

LETS_GO_OF_A_GROUP = """
    import atexit, os, signal, sys, threading, time
    import torch
    import torch.distributed as dist
    from megatron_rl.launch.ports import free_port
    from megatron_rl.life.process_exit import run_and_end
    from megatron_rl.weights.update_group import join_update_group, leave_update_group

    def main():
        port = free_port("127.0.0.1")
        peer = os.fork()
        group = join_update_group(address="127.0.0.1", port=port, rank=int(peer == 0), world_size=2, name="weights")
        if peer == 0:
            signal.pause()
        atexit.register(os.kill, peer, signal.SIGKILL)
        left = [group, dist.broadcast(torch.ones(10_000_000), group=group, group_src=0, async_op=True)]
        leave_update_group(left[0])
        del group
        threading.Thread(target=left.clear, daemon=True).start()
        time.sleep(0.2)
        sys.exit(75)

    run_and_end(main)
"""


@pytest.mark.slow  # it imports torch
def test_a_peer_that_takes_nothing_does_not_change_the_exit_code():
    ended = run_python(LETS_GO_OF_A_GROUP)
    assert ended.returncode == 75 and not ended.stderr, ended.stderr


ENDS = """
    import atexit, sys, threading, time
    from concurrent.futures import ThreadPoolExecutor
    from megatron_rl.life.process_exit import run_and_end

    def main():
        atexit.register(print, "registered")
        threading.Thread(target=lambda: (time.sleep(0.3), sys.stdout.write("not a daemon\\n"))).start()
        pool = ThreadPoolExecutor(1)
        pool.submit(lambda: (time.sleep(0.3), sys.stdout.write("submitted\\n")))
        {ending}

    run_and_end(main)
"""


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(75)", 75, ""),
        ("sys.exit('train: a key is wrong')", 1, "train: a key is wrong\n"),
        ("raise ValueError('why')", 1, "ValueError: why\n"),
    ],
)
def test_everything_else_is_as_sys_exit_has_it(ending, code, said):
    ended = run_python(ENDS.format(ending=ending))
    assert ended.returncode == code and ended.stderr.endswith(said) and bool(ended.stderr) == bool(said)
    *threads, last = ended.stdout.splitlines()
    assert sorted(threads) == ["not a daemon", "submitted"] and last == "registered"


def test_a_process_that_ends_while_it_is_looked_at_is_not_alive(monkeypatch):
    class Ended(io.StringIO):
        def read(self, *_):
            raise ProcessLookupError

    monkeypatch.setattr("builtins.open", lambda _: Ended())
    assert not is_alive(1)
