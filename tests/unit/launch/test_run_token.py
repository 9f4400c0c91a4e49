"""The file of the run's token: made once, read by its owner alone, refused where others could know what is in it."""

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from megatron_rl.config import GenerationConfig, TrainConfig
from megatron_rl.launch import run_token
from megatron_rl.launch.run_token import servers_of, token_in
from tests.kit.waiting import LIMIT_S


def refused(path):
    with pytest.raises(ValueError, match=re.escape(f"rollout.token_file = {str(path)!r}: ")) as raised:
        token_in(path)
    return str(raised.value)


def test_token_is_made_where_there_is_none_and_is_the_same_from_then_on(tmp_path):
    path = tmp_path / "new" / "token"
    token = token_in(path)
    assert re.fullmatch(r"[0-9a-f]{64}", token) and token_in(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert token_in(tmp_path / "another") != token


def test_those_who_make_it_at_once_get_the_same(tmp_path):
    path, late = tmp_path / "token", Barrier(8)
    link = os.link

    def link_together(*paths):
        late.wait(LIMIT_S)
        link(*paths)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(run_token.os, "link", link_together)
        assert len(set(pool.map(token_in, [path] * 8))) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_token_is_never_in_a_file_that_others_may_read(tmp_path, monkeypatch):
    seen = []
    link = os.link

    def look(aside, path):
        seen.append((stat.S_IMODE(os.stat(aside).st_mode), Path(path).exists()))
        link(aside, path)

    monkeypatch.setattr(run_token.os, "link", look)
    before = os.umask(0)
    try:
        token_in(tmp_path / "token")
    finally:
        os.umask(before)
    assert seen == [(0o600, False)]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o610])
def test_file_that_others_may_open_is_refused_with_the_way_out(tmp_path, mode):
    path = tmp_path / "token"
    token = token_in(path)
    path.chmod(mode)
    message = refused(path)
    assert f"has mode {mode:o}" in message and f"chmod 600 {path}" in message and token not in message
    path.chmod(0o600)
    assert token_in(path) == token


def test_file_of_another_user_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "token"
    token_in(path)
    monkeypatch.setattr(run_token.os, "geteuid", lambda: os.getuid() + 1)
    assert f"belongs to user {os.getuid()}" in refused(path)


def test_link_to_another_file_is_not_followed(tmp_path):
    token_in(tmp_path / "token")
    (tmp_path / "link").symlink_to(tmp_path / "token")
    assert "cannot be read or made" in refused(tmp_path / "link")


@pytest.mark.parametrize(
    "content", ["", "short", "two words of which it must be one", "zwölf Bytes sind zu wenig", "\xff" * 40]
)
def test_file_without_a_token_is_refused_and_not_shown(tmp_path, content):
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_bytes(content.encode("latin-1"))
    message = refused(path)
    assert not content or content not in message


def test_a_run_keeps_its_token_where_its_servers_find_it():
    config = TrainConfig(generation=GenerationConfig(n_samples=2))
    config.run.folder = "runs/a"
    assert servers_of(config).token_file == "runs/a/token"
    config.rollout.registry = "/shared/servers"
    assert servers_of(config).token_file == "/shared/servers/a.token"
    config.rollout.token_file = "/home/me/token"
    assert servers_of(config).token_file == "/home/me/token"
