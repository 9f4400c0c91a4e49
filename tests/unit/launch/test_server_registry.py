"""The registry of rollout servers: who is in it, for whom, and for how long."""

import json
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_rl.launch.server_registry import (
    MOST_BYTES,
    PROTOCOL,
    Registration,
    name_once,
    registered,
    registered_urls,
    wait_for_servers,
)
from tests.kit.waiting import wait_until


def registration(url="http://a:1", run="r", **fields):
    return Registration(url=url, run=run, **fields)


def write(folder, name, **fields):
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"url": "http://b:1", "run": "r", "protocol": PROTOCOL, "lease_s": 30.0} | fields))
    return path


def test_server_is_in_it_while_its_lease_lasts_and_leaves_by_itself(tmp_path):
    with registered(tmp_path / "new", registration(), is_well=lambda: True):
        assert registered_urls(tmp_path / "new", "r") == ["http://a:1"]
    assert registered_urls(tmp_path / "new", "r") == []
    assert list((tmp_path / "new").iterdir()) == []


def test_other_runs_never_see_it(tmp_path):
    write(tmp_path, "b", run="other")
    assert registered_urls(tmp_path, "r") == []
    assert registered_urls(tmp_path, "other") == ["http://b:1"]


def test_killed_server_is_out_once_its_lease_is_over(tmp_path):
    path = write(tmp_path, "b")
    now = time.time()
    os.utime(path, (now - 25, now - 25))
    assert registered_urls(tmp_path, "r") == ["http://b:1"]
    os.utime(path, (now - 35, now - 35))
    assert registered_urls(tmp_path, "r") == []


def test_clock_of_this_host_does_not_matter(tmp_path, monkeypatch):
    write(tmp_path, "b")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert registered_urls(tmp_path, "r") == ["http://b:1"]


@pytest.mark.slow
def test_lease_is_renewed_while_the_server_is_well(tmp_path):
    is_well = [True]
    with registered(tmp_path, registration(lease_s=0.5), is_well=lambda: is_well[0]) as path:
        first = path.stat().st_mtime
        wait_until(lambda: path.stat().st_mtime >= first + 0.5)
        is_well[0] = False
        wait_until(lambda: registered_urls(tmp_path, "r") == [])
        is_well[0] = True
        wait_until(lambda: registered_urls(tmp_path, "r") == ["http://a:1"])


def test_restarted_server_takes_its_own_place(tmp_path):
    write(tmp_path, "http-a-1", url="http://a:1")  # of the one that was killed
    with registered(tmp_path, registration(), is_well=lambda: True):
        assert registered_urls(tmp_path, "r") == ["http://a:1"]


def test_what_is_no_registration_is_passed_over_with_its_name(tmp_path, caplog):
    write(tmp_path, "b")
    write(tmp_path, "newer", protocol=PROTOCOL + 1, url="http://c:1")
    (tmp_path / "half.json").write_text('{"url": "http://d')
    (tmp_path / "list.json").write_text("[]")
    assert registered_urls(tmp_path, "r") == ["http://b:1"]
    assert "half.json is no registration" in caplog.text and "list.json is no registration" in caplog.text


def test_run_that_waits_in_vain_says_how_to_start_servers(tmp_path):
    write(tmp_path, "b")
    assert wait_for_servers(tmp_path, "r", 1, timeout_s=0) == ["http://b:1"]
    with pytest.raises(RuntimeError, match="1 servers have registered for run 'r'.*server_count = 2.*--run r"):
        wait_for_servers(tmp_path, "r", 2, timeout_s=0.1)


def test_server_of_another_user_is_not_sent_the_runs_token(tmp_path, monkeypatch, caplog):
    with registered(tmp_path, Registration(url="http://a:1", run="r"), is_well=lambda: True):
        monkeypatch.setattr("megatron_rl.launch.server_registry.os.geteuid", lambda: os.getuid() + 1)
        assert registered_urls(tmp_path, "r") == []
    assert f"belongs to user {os.getuid()}" in caplog.text


def test_a_file_of_another_user_that_cannot_be_read_is_passed_over(tmp_path, monkeypatch, caplog):
    theirs = write(tmp_path, "theirs")
    write(tmp_path, "ours", url="http://a:1")
    opened = os.open

    def open_ours(path, *args, **options):
        if path == theirs:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", open_ours)
    assert registered_urls(tmp_path, "r") == ["http://a:1"]
    assert str(theirs) in caplog.text and "Permission denied" in caplog.text


ODD_ENTRIES = {
    "deep": lambda path: path.write_text("[" * 60_000),
    "deep in a field": lambda path: path.write_text('{"url": ' + '{"a":' * 10_000),
    "large": lambda path: path.write_bytes(b" " * (MOST_BYTES + 1)),
    "huge": lambda path: (path.touch(), os.truncate(path, 1 << 32)),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe{"),
    "half a character": lambda path: path.write_bytes(b'{"url": "\xc3'),
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "link to nothing": lambda path: path.symlink_to("gone"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": lambda path: (os.mkfifo(path.with_suffix(".pipe")), path.symlink_to(path.with_suffix(".pipe"))),
    "null": lambda path: path.write_text("null"),
    "number": lambda path: path.write_text("1"),
    "huge number": lambda path: path.write_text("1" * 5_000),
    "empty": lambda path: path.write_text(""),
    "url no text": lambda path: path.write_text(json.dumps(asdict(registration()) | {"url": ["http://a:1"]})),
    "lease no number": lambda path: path.write_text(json.dumps(asdict(registration()) | {"lease_s": "30"})),
}


@pytest.mark.parametrize("kind", ODD_ENTRIES)
def test_an_odd_entry_neither_blocks_nor_ends_the_watch_of_all_servers_and_is_named_once(
    kind, tmp_path, caplog, monkeypatch
):
    name_once.cache_clear()
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    ODD_ENTRIES[kind](Path(f"{kind}.json"))
    write(tmp_path, "z", url="http://a:1")
    assert [registered_urls(tmp_path, "r") for _ in range(3)] == [["http://a:1"]] * 3
    assert [record.getMessage().startswith(str(tmp_path / kind)) for record in caplog.records] == [True]
