"""Kills a server when its parent process dies: `python -S watchdog.py SERVER_PID`.

The parent starts the server and this watchdog, if the server cannot watch its parent itself. The server must lead its
own process group, because the watchdog kills the whole group. The watchdog imports only the standard library, so it
takes 10 MB and starts at once.
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
    while os.getppid() == parent:  # an orphan is adopted by init or by a subreaper
        if not is_alive(server):
            return
        time.sleep(POLL_S)
    # The server leads its own process group, so it did not receive the signal that ended the parent.
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(ProcessLookupError):  # the whole group has ended
        while is_alive(server) and time.monotonic() < deadline:
            os.killpg(server, signal.SIGTERM)
            time.sleep(POLL_S)
        os.killpg(server, signal.SIGKILL)  # the server if it survived SIGTERM, or workers that outlive it


if __name__ == "__main__":
    main()
