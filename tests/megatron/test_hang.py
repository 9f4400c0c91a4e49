"""Ranks that stand still: who is late is found from real ranks in real collectives."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl import parallel
from megatron_rl.config import ParallelConfig
from megatron_rl.life import hang_watch
from megatron_rl.life.hang_watch import HangWatch, RankReport, describe
from megatron_rl.life.signs_of_life import SignsOfLife
from megatron_rl.run.rollouts import Rollouts
from megatron_rl.telemetry.timers import PhaseTimers
from megatron_rl.weights.publish import Publication
from tests.kit.ranks import run_ranks
from tests.kit.waiting import LATE_S, LIMIT_S, wait_until


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """All ranks have the time to report that a slow machine takes; and they look often."""
    for name in ("REPORT_PATIENCE_S", "LAST_RESORT_S"):
        monkeypatch.setattr(hang_watch, name, LATE_S)
    monkeypatch.setattr(hang_watch, "LOOK_S", 0.05)


def slow_data(stands: Path, told: threading.Event) -> None:
    stands.touch()
    assert told.wait(LIMIT_S)


def late_rank(folder: str) -> str:
    """Ranks 0 and 1 wait in a collective for rank 2. The limit is over only then, however slow the machine is."""
    groups = parallel.start(ParallelConfig(), seed=1)
    messages: list[str] = []
    stands = [Path(folder) / f"rank-{rank}.stands" for rank in range(3)]
    watch = HangWatch(
        Path(folder),
        rank=groups.rank,
        world_size=groups.world_size,
        control=groups.control,
        limit_s=LATE_S,
        on_hang=messages.append,
        waits_for=lambda phase: f"12 of 64 groups of {phase}" if groups.rank == 2 else "",
    )
    timers = PhaseTimers(on_change=watch.enter)
    with timers("data"):
        if groups.rank == 2:
            told = threading.Event()
            threading.Thread(target=lambda: (when_all_have_reported(folder), told.set())).start()
            slow_data(stands[2], told)
    with timers("update"):
        # The flight recorder has the collective as soon as it has begun; while it begins nobody may ask the recorder.
        work = dist.all_reduce(torch.ones(4), async_op=True)
        stands[groups.rank].touch()
        if groups.rank == 0:
            wait_until(lambda: all(file.exists() for file in stands), "all ranks stand")
            watch.limit_s = 0.1
        work.wait()
    if groups.rank == 0:
        wait_until(lambda: messages, "the message of who is late")
    watch.close()
    return messages[0] if messages else ""


def when_all_have_reported(folder: str) -> None:
    files = [Path(folder) / "hang" / f"rank-{rank}.txt" for rank in range(3)]
    wait_until(lambda: all("in late_rank" in file.read_text() for file in files), "all ranks' stacks")


def test_late_rank_is_named_with_its_phase_and_the_collective_that_others_wait_in(tmp_path):
    # The ranks are forks of this process: torch's recorder has collectives of an earlier world, with higher numbers.
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'world'}", rank=0, world_size=1)
    for _ in range(50):
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    message, *others = run_ranks(3, late_rank, str(tmp_path))
    assert others == ["", ""]
    assert message.startswith("a phase has lasted more than run.phase_timeout_s = 0.1 s")
    assert (
        "rank 2 (" in message
        and "is in phase 'data' for" in message
        and "waiting for 12 of 64 groups of data" in message
    )
    assert "The others are in 'update'." in message
    assert "rank 2 did not enter collective" in message and "gloo:all_reduce of [[4]]" in message
    assert "rank 0 (" not in message and "rank 1 (" not in message
    for rank, function in enumerate(["late_rank", "late_rank", "slow_data"]):
        assert f"in {function}" in (tmp_path / "hang" / f"rank-{rank}.txt").read_text()


def on_time(folder: str) -> None:
    """The clock jumps, and the watch looks at each of its times."""
    groups = parallel.start(ParallelConfig(), seed=1)
    jumped = 0.0
    hang_watch.time = SimpleNamespace(**vars(time) | {"monotonic": lambda: time.monotonic() + jumped})
    options = {"rank": groups.rank, "world_size": 2, "control": groups.control, "limit_s": LATE_S}
    watch = HangWatch(Path(folder), on_hang=lambda m: 1 / 0, **options)
    timers = PhaseTimers(on_change=watch.enter)

    def later(limits: float) -> None:
        nonlocal jumped
        jumped += limits * LATE_S
        now = hang_watch.time.monotonic()
        wait_until(lambda: watch.looked_at > now, "the watch looks")
        wait_until(lambda last=watch.looked_at: watch.looked_at > last, "it has compared that time with the limit")

    later(2.0)  # before the first phase, in which models are loaded
    for _ in range(4):  # each phase is in time, though all together are not
        with timers("update"):
            later(0.6)
            dist.all_reduce(torch.ones(1))
    watch.close()


def test_phases_in_time_leave_nothing(tmp_path):
    run_ranks(2, on_time, str(tmp_path))
    assert not list((tmp_path / "hang").iterdir())


def test_ranks_that_do_not_answer_and_ranks_that_all_wait_in_one_place_are_told_apart():
    report = {"host": "n1", "pid": 7, "phase": "rollout", "seconds": 61.0, "phases_entered": 5}
    reports = [RankReport(rank=rank, **report) for rank in (0, 2)]
    text = describe(reports, 4, 60.0, Path("runs/x/hang"))
    assert "ranks 1, 3 did not answer" in text
    assert "every rank that answered is in phase 'rollout' for 61 s." in text
    assert "runs/x/hang" in text
    reports[1].waits_for = "requests: 3"
    assert "rank 2 waits for requests: 3." in describe(reports, 4, 60.0, Path("runs/x/hang"))


def test_a_rank_that_waits_between_two_phases_is_named_with_its_place_in_the_code():
    report = RankReport(rank=0, host="n1", pid=7, phase="", seconds=61.0, phases_entered=5, main_thread="in all_reduce")
    text = describe([report], 2, 60.0, Path("hang"))
    assert "rank 1 did not answer" in text
    assert "every rank that answered is between two phases for 61 s in all_reduce." in text


def waiting_in(folder: str, phases: tuple[str, str], leaves: bool, expected: list[list[str]]) -> list[str]:
    """What is called on this rank while all stand still; those who are asked to leave do where `leaves`."""
    groups = parallel.start(ParallelConfig(), seed=1)
    calls: list[str] = []
    watch = HangWatch(
        Path(folder),
        rank=groups.rank,
        world_size=groups.world_size,
        control=groups.control,
        limit_s=LATE_S,
        on_hang=lambda message: calls.append("on_hang"),
        can_leave="rollout",
        on_leave=lambda message: calls.append("on_leave"),
        grace_s=LATE_S if leaves else 0.1,
    )
    timers = PhaseTimers(on_change=watch.enter)
    with timers(phases[groups.rank]):
        dist.barrier(group=groups.control)  # both are in their phases
        if groups.rank == 0:
            watch.limit_s = 0.1
        wait_until(lambda: len(calls) >= len(expected[groups.rank]), lambda: f"{expected} are called, not {calls}")
        dist.barrier(group=groups.control)  # rank 0 has the store, from which the other learns what was decided
    watch.close()
    return calls


@pytest.mark.parametrize(
    "phases, leaves, expected",
    [
        (("rollout", "rollout"), True, [["on_leave"], ["on_leave"]]),
        (("rollout", "rollout"), False, [["on_leave", "on_hang"], ["on_leave"]]),
        (("rollout", "update"), False, [["on_hang"], []]),
    ],
    ids=["they do", "they cannot", "one is elsewhere"],
)
def test_ranks_that_all_wait_for_rollouts_are_asked_to_leave_before_they_are_ended(tmp_path, phases, leaves, expected):
    assert run_ranks(2, waiting_in, str(tmp_path), phases, leaves, expected) == expected


def test_a_publication_that_stands_still_names_its_version_and_the_last_that_it_managed():
    parts = [("publication", "pause", 1.0, 1.1), ("gathering", "bucket 1", 1.1, 1.2)]
    publisher = SimpleNamespace(last=Publication(3, parts=parts))
    engine, processes = SimpleNamespace(publisher=publisher), SimpleNamespace(supervisor=None, process=None, nodes=None)
    rollouts = Rollouts(None, None, processes, None, engine, is_ending=lambda: False)
    assert rollouts.waits_for("publish") == "", "a rank without rollouts"
    rollouts.process = SimpleNamespace(hang_report=lambda: "control: 1; the oldest: /x to http://n1 for 9.0 s")
    published = "the publication of version 3 (ended last: gathering, bucket 1)"
    under_way = "control: 1; the oldest: /x to http://n1 for 9.0 s"
    assert rollouts.waits_for("publish") == f"{published}; {under_way}"
    assert rollouts.waits_for("rollout") == under_way and rollouts.waits_for("update") == ""


def stopped(folder: str, victim: int) -> bool:
    """Whether the other rank names one that is stopped, and no longer after it has let it go on."""
    groups = parallel.start(ParallelConfig(), seed=1)
    pids: list = [0, 0]
    dist.all_gather_object(pids, os.getpid(), group=groups.control)
    options = {"rank": groups.rank, "world_size": 2, "control": groups.control, "limit_s": LATE_S}
    watch, is_named = HangWatch(Path(folder), on_hang=lambda m: 1 / 0, **options), False
    timers = PhaseTimers(on_change=watch.enter)
    name = f"rank 1 ({socket.gethostname()}, pid {pids[1]})" if victim else "rank 0, or the way to it,"

    def silence() -> float | None:
        return watch.silent().get(name, (None,))[0]

    with timers("update"):
        if groups.rank != victim:
            signs = SignsOfLife([watch.silent], say=print)
            wait_until(lambda: (silence() or LATE_S) < 1.5, "the first sign of life")
            os.kill(pids[victim], signal.SIGSTOP)
            wait_until(lambda: silence() > 1.5, watch.silent)
            is_named = True
            signs.look()
            os.kill(pids[victim], signal.SIGCONT)
            wait_until(lambda: silence() < 1.5, watch.silent)
        dist.barrier(group=groups.control)
    watch.close()
    return is_named


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_rank_that_is_stopped_is_known_to_the_other_long_before_its_phase_has_lasted_too_long(
    victim, tmp_path, monkeypatch
):
    monkeypatch.setattr(hang_watch, "BEAT_S", 0.2)
    assert run_ranks(2, stopped, str(tmp_path), victim)[1 - victim]


def test_a_main_thread_that_stays_between_two_phases_is_named_with_its_place(tmp_path):
    run_ranks(1, between_phases, str(tmp_path))


def between_phases(folder: str) -> None:
    groups = parallel.start(ParallelConfig(), seed=1)
    options = {"rank": 0, "world_size": 1, "control": groups.control, "limit_s": LATE_S, "on_hang": print}
    watch = HangWatch(Path(folder), **options)
    timers = PhaseTimers(on_change=watch.enter)
    with timers("update"):
        assert not [who for who in watch.silent() if "between" in who]
        before = time.monotonic()
    seconds, more = watch.silent()["rank 0, between two phases,"]
    assert 0 <= seconds <= time.monotonic() - before and " It is in " in more
    watch.close()
