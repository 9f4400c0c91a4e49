"""Ends a server when the process that started both is gone: `python -S watchdog.py SERVER_PID`.

For servers that cannot watch their parent themselves. Standard library only, so that it costs 10 MB and no start time.
The server must lead a process group of its own, and dies with all of it.
"""

import contextlib
import os
import signal
import sys
import time

POLL_S = 0.5
GRACE_S = 5.0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    server, parent = int(sys.argv[1]), os.getppid()
    while os.getppid() == parent:  # an orphan has another parent: init, or a subreaper
        if not is_alive(server):
            return
        time.sleep(POLL_S)
    # In a group of its own, it has not had the signal that ended the parent.
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        while is_alive(server) and time.monotonic() < deadline:
            os.killpg(server, signal.SIGTERM)
            time.sleep(POLL_S)
        os.killpg(server, signal.SIGKILL)  # what SIGTERM did not end: the server, or workers that outlive it


if __name__ == "__main__":
    main()
