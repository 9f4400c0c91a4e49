"""What a command says of an error: one line, and where the rest is."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_rl.launch import rank
from megatron_rl.life.last_words import KEPT, one_line


def said(capsys, act, folder=None):
    with pytest.raises(SystemExit) as ended, one_line("megatron-rl x", folder=lambda: folder):
        act()
    assert "\n" not in ended.value.code
    return ended.value.code


def test_what_the_user_wrote_is_one_line_without_a_traceback(capsys):
    from megatron_rl.config import load_config

    line = said(capsys, lambda: load_config("configs/count_grpo.yaml", ["run.steps=0"]))
    assert line.startswith("megatron-rl x: run.steps = 0: must be at least 1") and "traceback" not in line


def test_error_of_the_users_own_code_names_its_line_and_keeps_the_traceback(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_data.py").write_text("def rows():\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    from megatron_rl.data.prompts import load_prompts

    own = {"key": "data.train", "import_from": ["own_data"]}
    line = said(capsys, lambda: load_prompts("own_data:rows", **own), tmp_path)
    where = f"({tmp_path}/own_data.py, line 2) [traceback: {tmp_path}/traceback.log]"
    assert line == f"megatron-rl x: ZeroDivisionError: division by zero {where}"
    assert "return 1 / 0" in (tmp_path / "traceback.log").read_text()
    sys.modules.pop("own_data")


def test_traceback_has_a_file_where_there_is_no_folder_yet(capsys):
    line = said(capsys, lambda: (_ for _ in ()).throw(RuntimeError("several\nlines")))
    kept = Path(line.partition("[traceback: ")[2].rstrip("]"))
    assert "several lines" in line and "RuntimeError" in kept.read_text()
    kept.unlink()


def test_tracebacks_in_the_temporary_folder_do_not_pile_up(capsys, tmp_path, monkeypatch):
    """The newest of this user's stay; other files, and what only looks like one, are left alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [
        tmp_path / "megatron_rl-x.log",
        tmp_path / "other-traceback.log",
        tmp_path / "megatron_rl-d-traceback.log",
    ]
    others[0].touch()
    others[1].touch()
    others[2].mkdir()
    for number in range(KEPT + 5):
        old = tmp_path / f"megatron_rl-{number:02}-traceback.log"
        old.touch()
        os.utime(old, (number, number))
    line = said(capsys, lambda: (_ for _ in ()).throw(RuntimeError("no folder")))
    left = {path.name for path in tmp_path.iterdir()} - {path.name for path in others}
    assert left == {f"megatron_rl-{number:02}-traceback.log" for number in range(5, KEPT + 5)} | {
        Path(line.partition("[traceback: ")[2].rstrip("]")).name
    }
    assert all(path.exists() for path in others)


def test_a_run_that_may_open_few_files_ends_with_a_word_and_does_not_stand_still(capsys, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (128, 128))
    monkeypatch.setattr(rank.open_files, "raise_limit", lambda: 128)
    with pytest.raises(SystemExit, match="may have 128 files and sockets open.* at least 512; raise the limit"):
        rank.main("A run.", lambda config: pytest.fail("it went on"), ["configs/gsm8k_tiny.yaml"])


def test_other_ranks_leave_the_word_to_the_first(monkeypatch, capsys):
    waited = []
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr("time.sleep", waited.append)
    assert said(capsys, lambda: (_ for _ in ()).throw(ValueError("wrong"))).startswith("megatron-rl x: rank 2: ")
    assert waited == [3.0]


def test_commands_find_modules_in_the_current_folder_as_python_does(tmp_path):
    (tmp_path / "own_data.py").write_text("")
    script = "from megatron_rl.cli import main\ntry:\n    main(['report', 'none'])\nfinally:\n    import own_data\n"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "command.py").write_text(script)  # whose folder Python puts first, as that of a command
    command = [sys.executable, "elsewhere/command.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "has no metrics.jsonl" in done.stderr and len(done.stderr.splitlines()) == 1
