"""Detects a hanging run, reports which rank is late, in which phase and before which collective, and ends the run.

Ranks share a key-value store. When a phase exceeds run.phase_timeout_s on any rank, every rank writes its stacks and
last events to run.folder/hang, and its current state to the store. Rank 0 then compares the phases that the ranks have
entered and the collectives that torch's flight recorder has seen. Requests, rewards, agents, environments and servers
have shorter limits, which normally act long before that. How the run ends:

    all ranks answer and wait for rollouts    they abandon the step as after a stop signal: the checkpoint has the state
                                              at the step's start, and the exit code (75) says that it can be resumed
    anything else, a run without checkpoints, every process ends at once with exit code 1; `--resume auto` resumes from
    or no checkpoint within run.grace_s       the newest checkpoint

No collective is retried, because it is unknown how much of it a late rank has done.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl import parallel
from megatron_rl.life import process_exit
from megatron_rl.life.signs_of_life import Silence, where

LOOK_S = 0.5
"""Seconds between two checks of a rank's own phase and of the shared alarm."""
REPORT_PATIENCE_S = 10.0
"""Seconds that rank 0 waits for the other ranks' reports. A rank without a report by then counts as unresponsive."""
LAST_RESORT_S = 60.0
"""Delay, in seconds, of two fallbacks. The first acts this long after a phase has exceeded its limit: a C timer, which
needs no interpreter, writes the stacks. The second acts this long after the verdict: a rank that rank 0 has not ended
ends itself."""
BEAT_S = 2.0
EVENTS_KEPT = 30
ALARM, VERDICT = "alarm", "verdict"


@dataclass(kw_only=True)
class RankReport:
    """The state of one rank when the alarm was raised."""

    rank: int
    host: str
    pid: int
    phase: str
    seconds: float
    """Seconds that the rank has spent in `phase`."""
    phases_entered: int
    """Number of phases entered since the start. All ranks enter the same phases; one with a lower number is late."""
    main_thread: str = ""
    """Function, file and line that the main thread is executing."""
    waits_for: str = ""
    collectives: dict[str, tuple[int, str]] = field(default_factory=dict)
    """{process group: (sequence number of the last collective entered, its description)}."""


class HangWatch:
    """A watcher that reports a hang, and ends the run, if a phase lasts too long on any rank.

        watch = HangWatch(folder, rank=0, world_size=1, control=groups.control, limit_s=600, on_hang=process_exit.stop)
        timers.on_change = watch.enter  # told of each change of phase
        ...
        watch.close()

    Collective: every rank constructs it, at the same place.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        control: dist.ProcessGroup,
        limit_s: float,
        on_hang: Callable[[str], None],
        waits_for: Callable[[str], str] = lambda phase: "",
        can_leave: str = "",
        on_leave: Callable[[str], None] = lambda message: None,
        grace_s: float = 0.0,
    ) -> None:
        """Start the watching thread.

        All callbacks run in the watching thread.

        limit_s: maximum seconds of one phase.
        waits_for: function of the current phase that returns, within REPORT_PATIENCE_S, what this phase waits for.
        can_leave, on_leave: if a phase exceeds its limit, and every rank answers and is in the phase `can_leave`,
        on_leave(message) is called on all ranks.
        on_hang, grace_s: if on_leave is not called, or if this object is not closed within grace_s seconds afterwards,
        on_hang(message) is called on rank 0, and on other ranks that rank 0 does not end.
        """
        self.folder, self.rank, self.world_size, self.limit_s = folder / "hang", rank, world_size, limit_s
        self._on_hang, self._waits_for = on_hang, waits_for
        self._can_leave, self._on_leave, self._grace_s = can_leave, on_leave, grace_s
        self._phase, self._since, self._entered = "", time.monotonic(), 0
        self._began_ns = time.time_ns()
        self._events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._closed = threading.Event()
        self.folder.mkdir(parents=True, exist_ok=True)
        # Opened for appending: a resumed run keeps its earlier reports.
        self._stacks = (self.folder / f"rank-{rank}.txt").open("a")
        self._store = _join_store(rank, control)
        self.looked_at = time.monotonic()
        """Monotonic time at which this rank last reached the store on rank 0; infinity once the watch has ended."""
        self._beats: dict[int, tuple[str, float]] = {}
        """On rank 0: {rank: (the rank's last heartbeat, monotonic time at which it was received)}."""
        self._thread = process_exit.start_thread(self._watch, name="hang-watch")

    def enter(self, phase: str) -> None:
        """Record that this rank begins a phase, or returns to the enclosing phase. phase: '' for no phase."""
        self._events.append(f"{time.strftime('%H:%M:%S')} {phase or '-'}")
        self._entered += 1
        self._phase, self._since = phase, time.monotonic()
        # This timer is in C: it writes the stacks even if a call holds the interpreter and no Python thread can run.
        faulthandler.dump_traceback_later(self.limit_s + LAST_RESORT_S, file=self._stacks)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(REPORT_PATIENCE_S)  # the thread writes to the file that is closed below
        faulthandler.cancel_dump_traceback_later()
        if self._thread.is_alive():  # the thread waits for rank 0, which does not answer
            return
        if self._stacks.tell() == 0:  # no hang was reported, in this run or an earlier one
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._stacks.name)
        self._stacks.close()

    def silent(self) -> Silence:
        """Return for how long other ranks have been silent. Rank 0 knows this of all ranks, the others of rank 0 only.

        While this rank's main thread is between two phases, the result has an entry for this rank too, with the seconds
        since the last phase. May be called from any thread.
        """
        now, found = time.monotonic(), {}
        for rank, (beat, heard_at) in list(self._beats.items()):
            if rank != self.rank:
                found[f"rank {rank} ({beat.partition(' ')[2]})"] = now - heard_at, ""
        other = "rank 0, or the way to it," if self.rank else "the thread that hears of the ranks"
        found[other] = now - self.looked_at, f" It is waited for {where(self._thread)}."
        if self._entered > 0 and not self._phase:
            at = where(threading.main_thread())
            found[f"rank {self.rank}, between two phases,"] = now - self._since, f" It is {at}."
        return found

    # -- the watching thread

    def _watch(self) -> None:
        beat_at = 0.0
        while not self._closed.wait(LOOK_S):
            try:
                if time.monotonic() - beat_at > BEAT_S:
                    beat_at = time.monotonic()
                    self._beat()
                self.looked_at = time.monotonic()
                is_alarm = self._store.check([ALARM])
                # Before its first phase, a run starts servers and loads models, which have other limits.
                if not is_alarm and self._entered > 0 and time.monotonic() - self._since > self.limit_s:
                    self._store.set(ALARM, str(self.rank))
                    is_alarm = True
            except RuntimeError:  # rank 0, which holds the store, is gone: the launcher ends the other ranks
                self.looked_at = math.inf
                return
            if is_alarm:
                self.looked_at = math.inf  # the report follows, so `silent` need not name this thread
                self._tell_all()
                return

    def _beat(self) -> None:
        self._store.set(f"beat {self.rank}", f"{time.monotonic()} {socket.gethostname()}, pid {os.getpid()}")
        keys = [f"beat {rank}" for rank in range(self.world_size)]
        if self.rank == 0 and self._store.check(keys):
            now = time.monotonic()
            for rank, told in enumerate(self._store.multi_get(keys)):
                if self._beats.get(rank, ("", 0.0))[0] != (beat := told.decode()):
                    self._beats[rank] = beat, now

    def _tell_all(self) -> None:
        report = RankReport(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=self._phase,
            seconds=time.monotonic() - self._since,
            phases_entered=self._entered,
            main_thread=where(threading.main_thread()),
            waits_for=self._waits_for(self._phase),
            collectives=last_collectives(self._began_ns),
        )
        self._write(report)
        self._store.set(f"report {self.rank}", json.dumps(asdict(report)))
        if self.rank == 0:
            reports = self._reports()
            message = describe(reports, self.world_size, self.limit_s, self.folder)
            phases = {report.phase for report in reports}
            is_left = len(reports) == self.world_size and bool(self._can_leave) and phases == {self._can_leave}
            # Rank 0 alone decides: ranks that saw different reports could decide differently.
            self._store.set(VERDICT, json.dumps([is_left, message]))
        else:
            is_left, message = self._verdict()
        if is_left:
            self._on_leave(message)
            if self._closed.wait(self._grace_s):  # the run has shut down normally
                return
        if self.rank == 0:
            self._on_hang(message)
        elif not self._closed.wait(LAST_RESORT_S):  # the launcher ends this rank once rank 0 is gone
            self._on_hang(f"rank {self.rank}: the run hangs, and rank 0 does not end it.")

    def _write(self, report: RankReport) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = (when, json.dumps(asdict(report), indent=1), *self._events, "")
        print(*lines, sep="\n", file=self._stacks, flush=True)
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        self._stacks.flush()

    def _verdict(self) -> tuple[bool, str]:
        """Return rank 0's decision: whether the ranks abandon the step, and a message.

        Return (False, '') if no decision arrives in time.
        """
        try:
            self._store.wait([VERDICT], timedelta(seconds=2 * REPORT_PATIENCE_S))
            is_left, message = json.loads(self._store.get(VERDICT))
        except RuntimeError:  # no verdict within the time limit
            return False, ""
        return is_left, message

    def _reports(self) -> list[RankReport]:
        deadline, reports = time.monotonic() + REPORT_PATIENCE_S, []  # shared, so many silent ranks take no longer
        for rank in range(self.world_size):
            left_s = max(0.1, deadline - time.monotonic())
            try:
                self._store.wait([f"report {rank}"], timedelta(seconds=left_s))
                reports.append(RankReport(**json.loads(self._store.get(f"report {rank}"))))
            except RuntimeError:  # the base class of torch's DistStoreError
                continue
        return reports


def describe(reports: list[RankReport], world_size: int, limit_s: float, folder: Path) -> str:
    """Return a message that says which ranks are late.

    It names the ranks that do not answer, then those that have entered fewer phases than others, then those that have
    not entered a collective. reports: the reports of the ranks that answer. limit_s: the limit of a phase, which was
    exceeded. folder: the folder with the stacks.
    """
    answered = {report.rank for report in reports}
    silent = sorted(set(range(world_size)) - answered)
    parts = [f"a phase has lasted more than run.phase_timeout_s = {limit_s:g} s, so the run is ended."]
    if silent:
        parts.append(f"{_ranks(silent)} did not answer (stopped, or its interpreter is held).")
    # A rank that waits in a collective has entered more phases than the rank it waits for.
    ahead = max(report.phases_entered for report in reports)
    behind = [report for report in reports if report.phases_entered < ahead]
    for report in behind or reports[:1]:
        who = f"rank {report.rank} ({report.host}, pid {report.pid})" if behind else "every rank that answered"
        place = f"in phase {report.phase!r}" if report.phase else "between two phases"
        spot = "" if report.phase else f" {report.main_thread}"  # a phase's name says more than a code line
        waits = f", waiting for {report.waits_for}" if behind and report.waits_for else ""
        parts.append(f"{who} is {place} for {report.seconds:.0f} s{spot}{waits}.")
    if behind:
        others = sorted({report.phase for report in reports if report.phases_entered == ahead})
        parts.append(f"The others are in {', '.join(map(repr, others))}.")
    else:
        parts += [f"rank {report.rank} waits for {report.waits_for}." for report in reports if report.waits_for]
    parts += collectives_not_entered(reports)
    parts.append(f"Stacks and last events of each rank are in {folder}; --resume auto goes on from the checkpoint.")
    return " ".join(parts)


def collectives_not_entered(reports: list[RankReport]) -> list[str]:
    """Return a line for each process group in which some ranks have not entered the newest collective.

    The line names these ranks.
    """
    found = []
    groups = dict.fromkeys(group for report in reports for group in report.collectives)
    for group in groups:
        last = {report.rank: report.collectives[group] for report in reports if group in report.collectives}
        number, what = max(last.values())
        late = sorted(rank for rank, (reached, _) in last.items() if reached < number)
        if late:
            found.append(f"{_ranks(late)} did not enter collective {number} of group {group} ({what}).")
    return found


def last_collectives(since_ns: int) -> dict[str, tuple[int, str]]:
    """Return {process group: (sequence number, description)} of the newest collectives that this rank has entered.

    The sequence number is 0 for a group without a collective. The source is torch's flight recorder. The result is
    empty if this version of torch has no recorder for all backends.

    since_ns: collectives before this time (of time.time_ns) are ignored. Groups of the same names may have existed
    earlier in this process, or in the process from which it was forked.
    """
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]
    except ImportError:
        return {}
    # The recorder's group names are torch's numbers, which do not show the members.
    label = {
        group.group_name: f"{group.group_name} (ranks {', '.join(map(str, dist.get_process_group_ranks(group)))})"
        for group in dist.distributed_c10d._world.pg_map
    }
    newest: dict[str, tuple[int, str]] = {text: (0, "") for text in label.values()}
    entries: list[dict[str, Any]] = json.loads(_dump_fr_trace_json()).get("entries", [])
    for entry in entries:
        group, number = label.get(entry["process_group"][0]), entry["collective_seq_id"]
        is_counted = group is not None and not entry["is_p2p"] and entry["time_created_ns"] >= since_ns
        if is_counted and group is not None and number >= newest[group][0]:
            newest[group] = number, f"{entry['profiling_name']} of {entry['input_sizes']}"
    return newest


def _join_store(rank: int, control: dist.ProcessGroup) -> dist.TCPStore:
    """Create the ranks' store on rank 0, or join it on other ranks.

    It is separate from the process group's own store, which collectives that hang may be using.
    """
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    place: list[Any] = [None]
    if rank == 0:
        listener = parallel.own_listener(host)  # not reachable from other hosts if all ranks are on one
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, master_listen_fd=listener)
        place = [store.port]
    dist.broadcast_object_list(place, src=0, group=control)  # the port that the system chose
    return store if rank == 0 else dist.TCPStore(host, place[0], is_master=False, wait_for_workers=False)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
