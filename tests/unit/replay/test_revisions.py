"""Other revisions of a checkout are run in a worktree of their own, and the checkout stays as it is."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_rl.replay.replay_command import main, without
from megatron_rl.replay.revisions import Revisions, bisect_command
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
REPLAY = """
import json, pathlib, sys
import mine
folder = pathlib.Path(sys.argv[sys.argv.index("--folder") + 1])
folder.mkdir(exist_ok=True)
if mine.VALUE is not None:
    (folder / "replay.json").write_text(json.dumps({"differs": "loss" if mine.VALUE > 3 else None}))
print("value", mine.VALUE, sys.argv[1:3], flush=True)
sys.exit(mine.VALUE is None or mine.VALUE > 3)
"""


def git(root, *words):
    whole = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(whole, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(autouse=True)
def folder_of_worktrees(tmp_path_factory, monkeypatch):
    """Temporary folders of this test alone."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    return folder


@pytest.fixture
def checkout(tmp_path):
    """A package whose mine.VALUE is 0 to 6 in the seven commits of its history, and a file that is changed since."""
    root = tmp_path / "checkout"
    package = root / "megatron_rl" / "replay"
    package.mkdir(parents=True)
    git(root.parent, "init", "-q", "-b", "main", str(root))
    (root / "megatron_rl" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(REPLAY)
    for value in range(7):
        (root / "mine.py").write_text(f"VALUE = {value}\n")
        git(root, "add", ".")
        git(root, "commit", "-qm", f"value {value}")
        git(root, "tag", f"v{value}")
    git(root, "checkout", "-q", "-b", "other", "v3")
    for value in (None, 4):  # a revision that cannot judge, between good and bad
        (root / "mine.py").write_text(f"VALUE = {value}\n")
        git(root, "commit", "-qam", f"other {value}")
    git(root, "checkout", "-q", "main")
    (root / "mine.py").write_text("VALUE = 'of the user'\n")
    return root


def state(root):
    return git(root, "status", "--porcelain", "--branch"), git(root, "rev-parse", "HEAD"), git(root, "worktree", "list")


def test_a_replay_at_a_revision_runs_its_code_and_leaves_the_checkout_alone(
    checkout, monkeypatch, capfd, tmp_path, folder_of_worktrees
):
    monkeypatch.setattr("megatron_rl.replay.revisions.ROOT", checkout)
    before, words = state(checkout), [str(tmp_path), "--step", "1", "--folder", str(tmp_path / "found")]
    for revision, code in (("v2", 0), ("main~1", 1)):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--at", revision])
        assert ended.value.code == code
    out = capfd.readouterr().out
    assert "(2" in out and "value 2)" in out and f"value 2 ['{tmp_path}', '--step']" in out and "value 5 [" in out
    assert state(checkout) == before and list(folder_of_worktrees.iterdir()) == []


def test_bisect_finds_the_revision_from_which_on_a_replay_differs(
    checkout, monkeypatch, capfd, tmp_path, folder_of_worktrees
):
    monkeypatch.setattr("megatron_rl.replay.revisions.ROOT", checkout)
    before = state(checkout)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--step", "1", "--bisect", "v1", "v6"])
    out = capfd.readouterr().out
    assert ended.value.code == 0 and out.count("good: ") >= 2 and out.count("bad: ") >= 2
    assert out.splitlines()[-1].startswith(f"the first bad revision: {git(checkout, 'rev-parse', '--short', 'v4')} (")
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--step", "1", "--bisect", "v1", "other"])
    assert "skip: " in capfd.readouterr().out and "only 'skip'ped commits left" in ended.value.code
    assert state(checkout) == before and list(folder_of_worktrees.iterdir()) == []


def test_bisect_takes_a_command_of_the_user_with_the_exit_codes_of_git(checkout, capfd):
    command = [sys.executable, "-c", "import mine, sys; sys.exit([0, 0, 125, 0, 3, 1, 1][mine.VALUE])"]
    assert "value 4)" in bisect_command("v0", "v6", command, root=checkout)
    assert "bad: " in capfd.readouterr().out
    with pytest.raises(ValueError, match="--bisect v0 v3: v3 is good, and should be bad; give other ends"):
        bisect_command("v0", "v3", command, root=checkout)
    with pytest.raises(ValueError, match="v2 cannot be judged, and should be good"):
        bisect_command("v2", "v6", command, root=checkout)
    with pytest.raises(RuntimeError, match="ended with 200, which judges nothing"):
        bisect_command("v2", "v6", [sys.executable, "-c", "raise SystemExit(200)"], root=checkout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_bisect_that_is_ended_ends_its_command_and_removes_its_worktree(
    checkout, number, tmp_path, folder_of_worktrees
):
    before, begun = state(checkout), tmp_path / "begun"
    waiting = f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(1e6)"
    pid = os.fork()
    if pid == 0:
        os.setpgrp()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            bisect_command("v0", "v6", [sys.executable, "-c", waiting], root=checkout)
        except KeyboardInterrupt:
            os._exit(130)
        except SystemExit as ended:
            os._exit(ended.code)
        finally:
            os._exit(1)
    wait_until(lambda: begun.is_file() and begun.read_text(), "the command")
    (os.killpg if number == signal.SIGINT else os.kill)(pid, number)  # a terminal's Ctrl-C reaches both
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + number
    wait_until(lambda: not Path(f"/proc/{begun.read_text()}").exists(), "the command's end")
    assert state(checkout) == before and list(folder_of_worktrees.iterdir()) == []


def test_unknown_revisions_and_an_installed_package_are_refused(checkout, tmp_path, capsys):
    with Revisions(checkout) as revisions, pytest.raises(ValueError, match="'v9' is no revision of"):
        revisions.check_out("v9")
    with pytest.raises(ValueError, match="is no git checkout, so it has no other revisions; clone"):
        Revisions(tmp_path)
    for words, said in (
        (["run", "--step", "1", "--", "true"], "is for --bisect"),
        (["run", "--step", "1", "--at", "a", "--bisect", "a", "b"], "and not both"),
        (["run"], "RUN and --step are needed"),
        (["--bisect", "a", "b"], "RUN and --step are needed"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert said in capsys.readouterr().err


def test_arguments_are_passed_on_without_those_of_the_walk():
    words = ["run", "--bisect", "a", "b", "--step=3", "--at=x", "--folder", "f", "model.path=m"]
    assert without(words, {"--bisect": 2, "--at": 1, "--folder": 1}) == ["run", "--step=3", "model.path=m"]
