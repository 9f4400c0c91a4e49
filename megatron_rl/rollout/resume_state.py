"""A rollout rank's journal, ledger and reuse buffer, and the state that it takes over from earlier processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import ReuseConfig, RolloutConfig
from megatron_rl.data.curriculum import SuccessRates
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.rollout import journal
from megatron_rl.rollout.events import RolloutEvents
from megatron_rl.rollout.journal import Records, Restored, RolloutJournal
from megatron_rl.rollout.ledger import PromptLedger, Share
from megatron_rl.rollout.reuse_buffer import ReuseBuffer


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """What a rollout process must know to resume: its rank, how many times the run was started, and saved state."""

    rank: int
    ranks: int
    run_attempt: int
    """Number of times that the run was started, this start included."""
    fingerprint: str
    """Hash of every setting that affects a sampled group."""
    resumed: dict[str, Any] | None
    """State in the resumed checkpoint. {} if a resumed run has no checkpoint yet; None for a new run."""
    rates: SuccessRates | None = None
    """Success rates of the prompts, if data.sampling uses them. The process updates its own copy."""


class ResumeState:
    """The resumable state of one rollout rank. folder: the run's journal, if it keeps one."""

    def __init__(
        self,
        prompts: PromptIterator,
        share: Share,
        point: ResumePoint,
        options: RolloutConfig,
        folder: Path | None,
        reuses: ReuseConfig | None = None,
    ) -> None:
        self.point, self.options, self.folder = point, options, folder
        self.buffer: ReuseBuffer | None = None
        self.ledger = PromptLedger(prompts, share, point.rates)
        self.journal: RolloutJournal | None = None
        self.restored: Restored | None = None
        if point.resumed:
            # Earlier versions saved no ledgers for runs that take prompts in order.
            in_order = [{"open": [], "next": point.resumed["prompts"]["number"], "size": 1}]
            self.ledger.load_state_dicts(point.resumed["ledgers"] or in_order)
        if folder is None:
            return
        state = point.resumed or {"step": 0, "version": 0}
        stamp = {"run_attempt": point.run_attempt, "version": state["version"], "fingerprint": point.fingerprint}
        self.journal = RolloutJournal(folder, rank=point.rank, first_step=state["step"], **stamp)
        if point.resumed is not None:
            self.restored = Restored(folder, max_staleness=options.max_staleness, **stamp)
        if reuses is not None and reuses.groups_per_step > 0:
            here = {"seed": prompts.seed, "rank": point.rank, "ranks": point.ranks}
            self.buffer = ReuseBuffer(reuses, self.journal, folder, **here)
            saved = point.resumed["ledgers"] if point.resumed else []
            self.buffer.load_state_dicts([state["reuse"] for state in saved if "reuse" in state])

    @property
    def events(self) -> list[RolloutEvents]:
        # The buffer comes before the journal, which forgets a group with its next event.
        return [it for it in (self.ledger, self.buffer, self.journal) if it is not None]

    def state_dict(self) -> dict[str, Any]:
        return self.ledger.state_dict() | ({} if self.buffer is None else {"reuse": self.buffer.state_dict()})

    @property
    def faults(self) -> list[str]:
        """Descriptions of unreadable parts of earlier journals."""
        return self.restored.faults if self.restored is not None else []

    def metrics(self) -> dict[str, float]:
        """Return counts since this process began: restored groups and replies, skipped prompts, buffered groups."""
        found: dict[str, float] = {}
        if self.ledger.rates is not None:
            found["rollout/passed_over"] = self.ledger.passed_over
        if self.buffer is not None:
            found["rollout/reuse_buffer_groups"] = len(self.buffer.entries)
        if self.restored is not None:
            found["rollout/restored_groups"] = self.restored.groups
            if self.options.journal_replies:
                found["rollout/restored_replies"] = self.restored.replies
        return found

    @property
    def records(self) -> Records:
        return Records(self.restored, self.journal if self.options.journal_replies else None)

    def rotate_journal(self, oldest_checkpoint: int) -> None:
        """Begin a new journal file, because a checkpoint begins.

        Rank 0 deletes files that no checkpoint can need any more.
        """
        if self.journal is None or self.folder is None:
            return
        self.journal.begin_file()
        if self.point.rank == 0:
            # A group is trained at most max_staleness + 1 steps after sampling, and reused at most max_age_steps later.
            kept = self.options.max_staleness + 1 + (self.buffer.options.max_age_steps if self.buffer else 0)
            journal.drop_files_before(self.folder, oldest_checkpoint - kept)

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
