"""The process of tests.kit.worker_processes: it imports what a process of a pool needs, and forks one for each request.

It imports no more: a worker has the memory and the modules that it has in a run.
"""

import fcntl
import json
import os
import socket
import sys

from megatron_rl.rewards import worker

MOST_BYTES, MOST_FILES = 1 << 17, 8


def main() -> None:
    """Fork what is asked for; answer with its pid when it is an orphan."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    while True:
        text, files, _, _ = socket.recv_fds(asked, MOST_BYTES, MOST_FILES)
        if not text:
            return
        is_born, says_so = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) != 0:
                os.write(says_so, str(pid).encode())
                os._exit(0)
            asked.close()
            os.close(is_born)
            os.close(says_so)
            become(files, **json.loads(text))
            break
        os.waitpid(between, 0)
        asked.send(os.read(is_born, 32))
        for file in (*files, is_born, says_so):
            os.close(file)
    worker.main()


def become(files: list[int], argv: list[str], env: dict[str, str], cwd: str, numbers: list[int]) -> None:
    """Be what the command's interpreter would be."""
    os.setsid()
    # Above all of their numbers until each has its own, for else one could overwrite another.
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = argv


if __name__ == "__main__":
    main()
