"""The doctor's checks of a machine and of a job's hosts."""

import os
import resource
import socket
import time
from collections import namedtuple

import pytest

from megatron_rl.launch import ports
from megatron_rl.tools.doctor import host_probe, machine_checks
from megatron_rl.tools.doctor.hosts import check_hosts, judge
from megatron_rl.tools.doctor.machine_checks import check_machine, is_free
from tests.kit.waiting import LATE_S


def said(findings):
    return [str(it) for it in findings]


def of_disk(text):
    """The disk of a tests' machine may be slow."""
    return "MB/s" in text


def test_limits_shared_memory_and_ports_are_named(tmp_path, monkeypatch):
    assert [text for text in said(check_machine(tmp_path)) if not of_disk(text)] == []
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: usage(1e6))
    monkeypatch.setattr(machine_checks, "is_free", lambda port: port < 24_005)
    monkeypatch.setattr(machine_checks, "first_of_connections", lambda: ports.LOWEST + 64)
    found = [text for text in said(check_machine(tmp_path)) if not of_disk(text)]
    assert found == [
        "machine, open files: the limit is 1024; raise it to 4096 (ulimit -n)",
        "machine, /dev/shm: has 1 MB free; give the container more",
        "machine, ports 24000 to 24063: only 5 of 64 that were tried are free; end what listens there (ss -ltnp)",
    ]


def test_a_port_on_which_something_listens_is_not_free():
    with socket.create_server(("", 0)) as listener:
        assert not is_free(listener.getsockname()[1])


def host(name, **changed):
    return {"host": name, "faults": [], "unreached": [], "clock_s": 0.0, "gloo": "", "nccl": None} | changed


def test_what_hosts_have_found_is_judged():
    assert said(judge([host("n1"), host("n2", clock_s=-0.3)])) == []
    faults = [["open files", "the limit is 1024"]]
    found = said(
        judge(
            [
                host("n1", faults=faults),
                host("n2", clock_s=-0.4, unreached=["n3", "n1"]),
                {"host": "n3", "silent": True, "nccl": None},
                host("n4", clock_s=0.2, gloo="RuntimeError: timed out", nccl="DistBackendError: no"),
            ]
        )
    )
    for text, words in zip(
        found,
        (
            ("hosts, n3: does not reach n1, or its process ended",),
            ("hosts, n1, open files: the limit is 1024",),
            ("hosts, n2: cannot connect to n3, n1; ",),
            ("hosts, n4, clock: is 0.6 s ahead of n2's",),
            ("hosts, n4, gloo: a sum over all hosts failed (RuntimeError: timed out)", "GLOO_SOCKET_IFNAME"),
            ("hosts, n4, nccl: a sum over all hosts failed (DistBackendError: no)", "NCCL_SOCKET_IFNAME"),
        ),
        strict=True,
    ):
        assert all(word in text for word in words), text


def test_there_is_nothing_between_hosts_outside_a_job(tmp_path):
    assert list(check_hosts(tmp_path / "run", {})) == [] and not (tmp_path / "run").exists()


def test_hosts_find_what_each_has_and_whose_clock_is_ahead(tmp_path):
    """Two processes stand for two hosts, and the second one's clock is ahead."""
    meet, output = f"127.0.0.1:{ports.free_port('127.0.0.1')}", tmp_path / "found"
    children = []
    for rank in (0, 1):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if rank == 1:
                    host_probe.time.time = lambda: time.time_ns() / 1e9 + 7.0
                found = host_probe.probe(["a", "b"], rank, meet, tmp_path, timeout_s=LATE_S)
                if rank == 0:
                    output.write_text(repr(found))
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]
    first, second = eval(output.read_text())
    assert first["clock_s"] == 0.0 and second["clock_s"] == pytest.approx(7.0, abs=2.0)
    assert first["unreached"] == second["unreached"] == [] and first["gloo"] == second["gloo"] == ""
    assert first["nccl"] is None and sorted(path.name for path in tmp_path.iterdir()) == ["found"]
    (finding,) = [text for text in said(judge([first, second])) if not of_disk(text)]
    assert finding.startswith("hosts, b, clock: is ") and "ahead of a's" in finding


def test_a_host_that_does_not_come_is_named(tmp_path):
    meet = f"127.0.0.1:{ports.free_port('127.0.0.1')}"
    found = host_probe.probe(["a", "b"], 0, meet, tmp_path, timeout_s=0.5)
    assert found[0]["unreached"] == [] and found[0]["gloo"] is None
    (finding,) = [text for text in said(judge(found)) if not of_disk(text)]
    assert finding.startswith("hosts, b: does not reach a, or its process ended")
