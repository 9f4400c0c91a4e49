"""A real replay with the code of other revisions of this checkout."""

import shutil
import subprocess

import pytest

from megatron_rl.replay.revisions import bisect_replay, replay_at
from tests.kit.records import make_records
from tests.kit.runs import ROOT

pytestmark = [
    pytest.mark.thorough,  # tests/unit/replay/test_revisions.py walks a repository whose replays take no time
    pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="this is no git checkout"),
]


def git(root, *words):
    whole = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(whole, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """This checkout with four more commits, of which the third changes the advantages."""
    root = tmp_path_factory.mktemp("clone") / "checkout"
    git(ROOT, "clone", "-q", "--no-hardlinks", str(ROOT), str(root))
    tracked = git(ROOT, "diff", "HEAD", "--name-only", "--diff-filter=d").split()
    for name in tracked:  # what is tested may not be committed yet
        shutil.copy2(ROOT / name, root / name)
    for path in (ROOT / "megatron_rl").glob("_C_cpu.*"):
        shutil.copy2(path, root / "megatron_rl")
    git(root, "commit", "-q", "--allow-empty", "-am", "as it is")
    git(root, "tag", "good")
    source = root / "megatron_rl" / "algo" / "advantage.py"
    for number in range(4):
        text = source.read_text()
        if number == 2:
            text = text.replace('    return batch["scores"]', '    return batch["scores"] ** 3', 1)
        source.write_text(f"{text}# comment {number}\n")
        git(root, "commit", "-qam", f"commit {number}")
    return root


def test_a_step_is_replayed_by_another_revision_and_the_change_is_found(checkout, tmp_path, capfd):
    run = make_records(tmp_path / "run")
    words = [str(run), "--step", "0"]
    assert replay_at("good", words, tmp_path / "replay", root=checkout) == 0
    assert "as it is)" in (out := capfd.readouterr().out) and "step 0: the same to the bit" in out
    assert replay_at("HEAD", words, tmp_path / "replay", root=checkout) == 1
    assert "advantages of tokens" in capfd.readouterr().out
    assert ", commit 2)" in bisect_replay("good", "HEAD", words, root=checkout)
    assert git(checkout, "worktree", "list").count("\n") == 0
