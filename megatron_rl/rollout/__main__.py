"""The rollout process that a trainer starts: python -m megatron_rl.rollout --socket FD --trainer PID [--lock FD]

It serves its trainer and dies with it. Ctrl-C and schedulers' stop signals are left to the trainer, which saves first.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket

from megatron_rl.launch import start_up
from megatron_rl.life.process_exit import die_with

THE_TRAINERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def main() -> None:
    parser = argparse.ArgumentParser("megatron_rl.rollout", description="A trainer's rollout process.")
    parser.add_argument("--socket", type=int, required=True, help="open end of a socket pair")
    parser.add_argument("--trainer", type=int, required=True, help="process that has the other end")
    parser.add_argument("--lock", type=int, help="open file that holds the journal's lock")
    args = parser.parse_args()
    die_with(args.trainer)
    for number in THE_TRAINERS:
        # Not SIG_IGN: programs that a reward starts would inherit it.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, THE_TRAINERS)
    for descriptor in filter(None, (args.socket, args.lock)):
        os.set_inheritable(descriptor, False)
    if args.lock:
        os.register_at_fork(after_in_child=lambda: os.close(args.lock))
    with start_up.importing():  # takes seconds; the trainer's signals are handled already
        from megatron_rl.rollout.rollout_rank import serve_trainer

    serve_trainer(socket.socket(fileno=args.socket))


if __name__ == "__main__":
    main()
