"""Ends a server when the process that started both is gone: `python -S watchdog.py SERVER_PID`.

For servers that cannot watch their parent themselves. Standard library only, so that it costs 10 MB and no start time.
The server must lead a process group of its own, and dies with all of it.
"""

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
    while os.getppid() == parent:
        if not is_alive(server):
            return
        time.sleep(POLL_S)
    deadline = time.monotonic() + GRACE_S
    while is_alive(server):
        os.killpg(server, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
