"""A folder is replaced whole or not at all, wherever the process is killed."""

import os
import shutil
from pathlib import Path

import pytest

from megatron_rl.weights.hf_files import recover_folder, replace_folder


def killed_at(call: int, aside: Path, folder: Path) -> bool:
    """Run replace_folder in a fork that dies just before its `call`-th change to the disk; False if it lives."""
    pid = os.fork()
    if pid == 0:
        calls = 0

        def counted(function):
            def run(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls > call:
                    os._exit(9)
                return function(*args, **kwargs)

            return run

        Path.rename, shutil.rmtree = counted(Path.rename), counted(shutil.rmtree)
        replace_folder(aside, folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("call", range(6))
def test_a_folder_is_the_old_or_the_new_one_wherever_its_replacement_is_killed(call, tmp_path):
    folder, aside = tmp_path / "checkpoint", tmp_path / ".checkpoint.partial"
    for path, text in ((folder, "old"), (aside, "new")):
        path.mkdir()
        (path / "file").write_text(text)
    was_killed = killed_at(call, aside, folder)
    recover_folder(folder)
    # Its changes: remove an older leftover, move the old one away, move the new one in, remove the old one.
    assert was_killed == (call < 4)
    assert (folder / "file").read_text() == ("old" if call < 3 else "new")
    if aside.exists():
        replace_folder(aside, folder)
    assert (folder / "file").read_text() == "new"
