"""What a run that stands still says before it ends: which rank is late, in which phase and before which collective.

Every rank reports the phase it is in to a key-value store. When a phase outlasts its limit anywhere, every rank writes
its stacks and last events to run.folder/hang, and rank 0 compares: the phases they went through, and the collectives
that torch's flight recorder saw. Then the run ends, so that a scheduler or `--resume auto` goes on from the checkpoint.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
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

LOOK_S = 0.5
"""How often a rank looks at its own phase and at the others' alarm."""
REPORT_PATIENCE_S = 10.0
"""How long rank 0 waits for the others' reports; who has none by then answers no more."""
LAST_RESORT_S = 60.0
"""After the limit, the stacks are written by a timer that needs no interpreter, and the process ends without rank 0."""
EVENTS_KEPT = 30
ALARM = "alarm"


@dataclass(kw_only=True)
class RankReport:
    """Where one rank stood when the alarm came."""

    rank: int
    host: str
    pid: int
    phase: str
    seconds: float
    """In that phase."""
    phases_entered: int
    """Since the start; all ranks enter the same ones, so who has entered fewer is behind."""
    waits_for: str = ""
    """What the phase itself says it waits for."""
    collectives: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By process group: the number of the last collective that was entered, and what it was."""


class HangWatch:
    """One per rank; `enter` is told each change of phase. All ranks make it at the same place."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        control: dist.ProcessGroup,
        limit_s: float,
        on_hang: Callable[[str], None],
        waits_for: Callable[[], str] = str,
    ) -> None:
        """limit_s: seconds that one phase may last. on_hang(message) is called on rank 0 from a thread of this object.

        waits_for() may say, from that thread, what the current phase waits for.
        """
        self.folder, self.rank, self.world_size, self.limit_s = folder / "hang", rank, world_size, limit_s
        self._on_hang, self._waits_for = on_hang, waits_for
        self._phase, self._since, self._entered = "", time.monotonic(), 0
        self._events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._closed = threading.Event()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stacks = (self.folder / f"rank-{rank}.txt").open("w")
        self._store = _join_store(rank, control)
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        """This rank begins a phase, or goes back to the one around it; '' is none."""
        self._events.append(f"{time.strftime('%H:%M:%S')} {phase or '-'}")
        self._entered += 1
        self._phase, self._since = phase, time.monotonic()
        faulthandler.dump_traceback_later(self.limit_s + LAST_RESORT_S, file=self._stacks)

    def close(self) -> None:
        """The run is over, or fails by itself."""
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._stacks.tell() == 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._stacks.name)
        self._stacks.close()

    # -- the watching thread

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                is_alarm = self._store.check([ALARM])
                if not is_alarm and time.monotonic() - self._since > self.limit_s:
                    self._store.set(ALARM, str(self.rank))
                    is_alarm = True
            except RuntimeError:  # rank 0, which holds the store, is gone: the launcher ends the others
                return
            if is_alarm:
                self._tell_all()
                return

    def _tell_all(self) -> None:
        report = RankReport(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=self._phase,
            seconds=time.monotonic() - self._since,
            phases_entered=self._entered,
            waits_for=self._waits_for(),
            collectives=last_collectives(),
        )
        self._write(report)
        self._store.set(f"report {self.rank}", json.dumps(asdict(report)))
        if self.rank == 0:
            self._on_hang(self._message())
        elif not self._closed.wait(LAST_RESORT_S):
            self._on_hang(f"rank {self.rank}: the run stands still, and rank 0 does not end it.")

    def _write(self, report: RankReport) -> None:
        print(json.dumps(asdict(report), indent=1), *self._events, "", sep="\n", file=self._stacks, flush=True)
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        self._stacks.flush()

    def _message(self) -> str:
        deadline, reports = time.monotonic() + REPORT_PATIENCE_S, []
        for rank in range(self.world_size):
            left_s = max(0.1, deadline - time.monotonic())
            try:
                self._store.wait([f"report {rank}"], timedelta(seconds=left_s))
                reports.append(RankReport(**json.loads(self._store.get(f"report {rank}"))))
            except RuntimeError:  # torch's DistStoreError is one
                continue
        return describe(reports, self.world_size, self.limit_s, self.folder)


def describe(reports: list[RankReport], world_size: int, limit_s: float, folder: Path) -> str:
    """Say who is late: ranks that do not answer, then those behind in phases, then those behind in a collective."""
    answered = {report.rank for report in reports}
    silent = sorted(set(range(world_size)) - answered)
    parts = [f"a phase has lasted more than run.phase_timeout_s = {limit_s:g} s, so the run is ended."]
    if silent:
        parts.append(f"{_ranks(silent)} did not answer (stopped, or its interpreter is held).")
    ahead = max(report.phases_entered for report in reports)
    behind = [report for report in reports if report.phases_entered < ahead]
    for report in behind or reports[:1]:
        who = f"rank {report.rank} ({report.host}, pid {report.pid})" if behind else "every rank that answered"
        where = f"in phase {report.phase!r} for {report.seconds:.0f} s" if report.phase else "between phases"
        waits = f", waiting for {report.waits_for}" if report.waits_for else ""
        parts.append(f"{who} is {where}{waits}.")
    if behind:
        others = sorted({report.phase for report in reports if report.phases_entered == ahead})
        parts.append(f"The others are in {', '.join(map(repr, others))}.")
    parts += collectives_not_entered(reports)
    parts.append(f"Stacks and last events of each rank are in {folder}; --resume auto goes on from the checkpoint.")
    return " ".join(parts)


def collectives_not_entered(reports: list[RankReport]) -> list[str]:
    """For each process group whose ranks differ: who has not entered which collective, that others wait in."""
    found = []
    groups = dict.fromkeys(group for report in reports for group in report.collectives)
    for group in groups:
        last = {r.rank: tuple(r.collectives[group]) for r in reports if group in r.collectives}
        number, what = max(last.values())
        late = sorted(rank for rank, (reached, _) in last.items() if reached < number)
        if late:
            found.append(f"{_ranks(late)} did not enter collective {number} of group {group} ({what}).")
    return found


def last_collectives() -> dict[str, tuple[int, str]]:
    """The newest collective that torch's flight recorder saw here, for each process group that this rank is in.

    The number is 0 where there was none yet. Empty where this torch has no recorder for all backends.
    """
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json
    except ImportError:
        return {}
    label = {
        group.group_name: f"{group.group_name} (ranks {', '.join(map(str, dist.get_process_group_ranks(group)))})"
        for group in dist.distributed_c10d._world.pg_map
    }
    newest: dict[str, tuple[int, str]] = {text: (0, "") for text in label.values()}
    entries: list[dict[str, Any]] = json.loads(_dump_fr_trace_json()).get("entries", [])
    for entry in entries:
        group, number = label.get(entry["process_group"][0]), entry["collective_seq_id"]
        if group is not None and not entry["is_p2p"] and number >= newest[group][0]:
            newest[group] = number, f"{entry['profiling_name']} of {entry['input_sizes']}"
    return newest


def _join_store(rank: int, control: dist.ProcessGroup) -> dist.TCPStore:
    """A store of its own: the process group's would be shared with collectives that hang."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    place: list[Any] = [None]
    if rank == 0:
        # Left to itself it would listen on every address; another host's ranks may know this one by any of them.
        own = socket.create_server((host, 0)) if host in ("127.0.0.1", "localhost") else None
        port, listener = (own.getsockname()[1], own.detach()) if own is not None else (0, None)
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
        place = [store.port]
    dist.broadcast_object_list(place, src=0, group=control)
    return store if rank == 0 else dist.TCPStore(host, place[0], is_master=False, wait_for_workers=False)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
