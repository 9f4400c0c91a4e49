"""Locks on files: one process at a time, and none of a process that is gone."""

import contextlib
import os
import signal

import pytest

from megatron_rl.launch import file_lock
from tests.kit.interpreters import start_python

OWNER = """
import os, signal, sys
from pathlib import Path
from megatron_rl.launch import file_lock
file_lock.sign(file_lock.take(Path(sys.argv[1]), by_process=True), os.getpid())
writer = os.fork()  # as a checkpoint's
if writer:
    print(writer, flush=True)
signal.pause()
"""


def test_lock_of_a_process_ends_with_it_and_not_with_what_it_has_forked(tmp_path):
    path = tmp_path / "run.lock"
    owner = start_python(OWNER, path)
    writer = int(owner.stdout.readline())
    try:
        with pytest.raises(file_lock.LockHeld, match=rf"process {owner.pid} on .* keeps the lock"):
            file_lock.take(path, patience_s=0.1, by_process=True)
        owner.kill()
        owner.wait()
        os.kill(writer, 0)  # it is still there
        os.close(file_lock.take(path, patience_s=0.1, by_process=True))
    finally:
        for left in (owner, writer):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left if isinstance(left, int) else left.pid, signal.SIGKILL)
        owner.stdout.close()
        owner.stderr.close()
