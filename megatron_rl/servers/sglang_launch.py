"""Starts SGLang with the token of a file: `python -m megatron_rl.servers.sglang_launch --token-file FILE ...`.

SGLang takes the token as an argument alone, and shows its arguments in its log. An argument is shown by `ps` to every
user of the host, so it is added here, inside the process; and what is logged says `***` in its place.
"""

from __future__ import annotations

import logging
import runpy
import sys

from megatron_rl.launch.run_token import token_in

SGLANG = "sglang.launch_server"


def hide_in_logs(token: str) -> None:
    """Replace the token in everything that this process logs from now on."""
    make_record = logging.getLogRecordFactory()

    def make_hidden(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # it does not fit its arguments, which logging itself reports
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
    # With `=`: as a word of its own, a token that begins with a dash would be taken for an option.
    sys.argv = [SGLANG, *arguments, f"--api-key={token}"]
    # As `python -m` does: SGLang's workers, which are spawned, import the module that __main__ then is.
    runpy.run_module(SGLANG, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
