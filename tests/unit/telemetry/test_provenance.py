"""A run names the commit of its code, and leaves the checkout as it is."""

import os
import subprocess

import pytest

from megatron_rl.telemetry import provenance


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "someone")
        monkeypatch.setenv(f"{name}_EMAIL", "someone@example.org")
    (tmp_path / "file").write_text("as committed")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_a_commit_is_named_with_and_without_changes(checkout):
    head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    (checkout / "not tracked").touch()
    assert provenance.commit() == f", commit {head[:7]}"
    (checkout / "file").write_text("changed")
    assert provenance.commit() == f", commit {head[:7]} with changes"


def test_an_installed_package_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == ""


def test_git_takes_no_lock_that_it_would_leave_if_it_were_killed(checkout):
    """It takes the index's lock to write it anew, as it may for a file that was only touched."""
    os.utime(checkout / "file", (1, 1))
    index = (checkout / ".git" / "index").read_bytes()
    provenance.commit()
    assert (checkout / ".git" / "index").read_bytes() == index
