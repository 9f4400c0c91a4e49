"""How many threads a run takes where it is not told: those of the cores that others leave."""

from __future__ import annotations

import os

import pytest

from megatron_rl.launch import cores


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Describe a host: host(usable, load over a minute, busy now, quota)."""

    def describe(usable: int, load: float, busy: float, quota: str = "max 100000") -> None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
        monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
        monkeypatch.setattr(cores, "busy_cores", lambda: busy)

    return describe


@pytest.mark.parametrize(
    "described, free",
    [
        ((64, 0.1, 0.2), 64),
        ((64, 40.0, 41.0), 24),
        ((2, 16.0, 2.0), 1),  # a host that is busy all over: one thread, as two would wait for each other
        ((64, 60.0, 0.0), 64),  # what made the load has just ended
        ((64, 3.0, 64.0), 61),  # ranks of one run that start together
        ((64, 0.0, 0.0, "200000 100000"), 2),  # a container's quota
        ((64, 0.0, 0.0, "50000 100000"), 1),
    ],
)
def test_a_run_takes_the_cores_that_are_free(host, described, free):
    host(*described)
    assert cores.free_cores() == free


def test_a_host_without_cgroups_has_no_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "none")
    assert cores.quota() == float("inf")


def test_what_works_now_is_seen():
    assert 0 <= cores.busy_cores() <= (os.cpu_count() or 1) + 1
