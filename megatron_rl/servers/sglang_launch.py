"""Starts SGLang with the token in a file: `python -m megatron_rl.servers.sglang_launch --token-file FILE ...`.

SGLang accepts the token only as an argument, and it logs its arguments. Since `ps` shows a process's arguments to every
user of the host, this module adds the token inside the process. Log messages show `***` instead of the token.
"""

from __future__ import annotations

import logging
import runpy
import sys

from megatron_rl.launch.run_token import token_in

SGLANG = "sglang.launch_server"


def hide_in_logs(token: str) -> None:
    """Replace the token by `***` in everything that this process logs from now on."""
    make_record = logging.getLogRecordFactory()

    def make_hidden(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # message and arguments do not match; logging reports that itself
            return record
        if token in message:
            record.msg, record.args = message.replace(token, "***"), ()
        return record

    logging.setLogRecordFactory(make_hidden)


def main() -> None:
    _, option, file, *arguments = sys.argv
    assert option == "--token-file", "the supervisor names it first"
    token = token_in(file, key="--token-file")
    hide_in_logs(token)
    # With `=`, because a separate token that begins with a dash would be parsed as an option.
    sys.argv = [SGLANG, *arguments, f"--api-key={token}"]
    # As `python -m` does: SGLang's spawned workers import the module that is then __main__.
    runpy.run_module(SGLANG, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
