"""The state from which a killed run resumes: its checkpoints, and its position in the prompts.

A checkpoint, `run.folder/checkpoints/step-N`, holds an engine checkpoint per trained model, run.json (the loop's own
state) and, written last, the manifest. It is written under a temporary name and renamed when complete. Only then are
older checkpoints removed, but no damaged ones. Collective: every rank calls every method.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.config import TrainConfig
from megatron_rl.data.curriculum import SuccessRates, are_rates, measured_rates
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.engine import manifest
from megatron_rl.engine.manifest import CheckpointError
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout import journal
from megatron_rl.rollout.process import RolloutProcess
from megatron_rl.rollout.resume_state import ResumePoint
from megatron_rl.rollout.reuse_buffer import is_buffer
from megatron_rl.weights.hf_files import recover_folder, replace_folder

FOLDER, RUN_STATE = "checkpoints", "run.json"
AUTO = "auto"
"""Value of `resume` that selects the newest good checkpoint in the run's own folder, or a fresh start if there is
none."""
IS_PLACE = "must have number and count, whole numbers of at least 0"


class RunCheckpoints:
    """Writes, finds and prunes the checkpoints of one run. Checkpoints are written one at a time, in the background."""

    def __init__(
        self,
        run_folder: str | Path,
        *,
        keep: int,
        groups: ParallelGroups,
        is_needed: Callable[[int, int], bool] = lambda step, next_step: False,
    ) -> None:
        """is_needed: gets the steps of two consecutive checkpoints. True keeps the first, however old it is."""
        self.folder, self.keep, self.groups, self.is_needed = Path(run_folder) / FOLDER, keep, groups, is_needed
        self.engines: dict[str, MegatronEngine] = {}
        self.aside: Path | None = None
        self.step = 0
        """Step of the checkpoint that is being written, if `aside`, its temporary folder, is set."""
        self.newest = 0
        """Step of the newest checkpoint that this process has written or resumed."""
        self.passed_over: list[str] = []
        """Descriptions of the damaged checkpoints that `choose` skipped: name and fault."""

    # -- writing ------------------------------------------------------------------------------------------------------

    def start(
        self, step: int, engines: dict[str, MegatronEngine], state: dict[str, Any], *, in_background: bool = True
    ) -> None:
        """Begin to write a checkpoint of the engines and of `state` (JSON data) as they are now.

        Waits first for the checkpoint in progress, if any. Raises CheckpointError if writing fails.
        """
        self.finish(wait=True)
        # A unique name: a writer of a run killed in this step may still be active.
        unique = [f".step-{step}.{uuid.uuid4().hex[:8]}.partial"]
        dist.broadcast_object_list(unique, src=0, group=self.groups.control)
        aside = self.folder / unique[0]

        def make_room() -> None:
            for abandoned in self.folder.glob(".step-*.partial"):
                shutil.rmtree(abandoned, ignore_errors=True)
            aside.mkdir(parents=True)
            (aside / RUN_STATE).write_text(json.dumps({"step": step} | state))

        self._on_main(make_room, step)  # returns on all ranks once the folder exists
        self.engines = engines
        try:
            for name, engine in engines.items():
                engine.save_async(aside / name, beside=engines.values(), in_background=in_background)
        except CheckpointError:  # on all ranks: the engines agree on it
            self._abandon()
            raise
        self.aside, self.step = aside, step

    def finish(self, *, wait: bool) -> None:
        """Publish the checkpoint in progress, if there is one and its writers are done.

        wait: wait until the writers are done. Raises CheckpointError on all ranks if the checkpoint could not be
        written. All earlier checkpoints then still exist.
        """
        if self.aside is None:
            return
        try:
            # Ask all engines, even after one that is not done, because each call is a collective.
            is_done = all([engine.finish_saves(wait=wait) for engine in self.engines.values()])
        except CheckpointError:
            self._abandon()
            raise
        if not is_done:
            return
        aside, self.aside = self.aside, None

        def publish() -> None:
            manifest.write(aside)  # last file: a folder that has it is complete
            replace_folder(aside, self.folder / f"step-{self.step}")
            # Only now, so that there are never fewer good checkpoints than before.
            steps = sorted(self._steps())
            for old, following in list(itertools.pairwise(steps))[: len(steps) - self.keep]:
                if not self.is_needed(old, following):
                    shutil.rmtree(self.folder / f"step-{old}")

        self._on_main(publish, self.step)
        self.newest = self.step

    def close(self) -> None:
        """Abandon the checkpoint in progress, so that its writers do not outlive a failed run."""
        if self.aside is not None:
            for engine in self.engines.values():
                engine.drop_saves()

    def _abandon(self) -> None:
        """Give up the checkpoint in progress, because an engine could not write it.

        Wait for the other engines' writers.
        """
        self.aside = None
        for engine in self.engines.values():
            with contextlib.suppress(CheckpointError):
                engine.finish_saves(wait=True)

    def _on_main(self, act: Callable[[], None], step: int) -> None:
        if fault := self.groups.on_main(act):
            raise CheckpointError(
                f"checkpoint {str(self.folder / f'step-{step}')!r}: {fault}; earlier ones are untouched. See that the "
                f"disk has space and that run.folder can be written."
            )

    @property
    def oldest(self) -> int:
        """Step of the oldest among the newest `keep` checkpoints; 0 if there are none. Only valid on the main rank."""
        return min(sorted(self._steps())[-self.keep :], default=0)

    # -- finding ------------------------------------------------------------------------------------------------------

    def choose(self, resume: str) -> Path | None:
        """Return the checkpoint to resume, after verifying the checksums of all its files; None for a fresh start.

        resume: `auto`, a checkpoint's folder, or empty for a fresh start. Later checkpoints than a named one are
        renamed, and so are damaged ones that `auto` skips. Raises ValueError if the folder is no checkpoint, or if a
        fresh start is asked for in the folder of a run that could be resumed. Raises RuntimeError if the named
        checkpoint, or every one, is damaged.
        """
        names: list[Any] = [None]
        if self.groups.is_main:
            for old in self.folder.glob(".step-*.old"):  # the process was killed while it replaced this checkpoint
                recover_folder(self.folder / old.name.removeprefix(".").removesuffix(".old"))
            names = [sorted(self._steps(), reverse=True)]
        dist.broadcast_object_list(names, src=0, group=self.groups.control)
        steps: list[int] = names[0]
        if resume == AUTO:
            return self._newest_good(steps)
        is_another_runs = bool(resume) and Path(resume).resolve().parent != self.folder.resolve()
        if steps and (not resume or is_another_runs):
            raise ValueError(
                f"run.folder = {str(self.folder.parent)!r}: has checkpoints of a run, up to step {steps[0]}; "
                f"--resume {AUTO} continues it. For a new run name another folder, or move {self.folder} away."
            )
        if not resume:
            return None
        chosen = Path(resume)
        if not (chosen / RUN_STATE).is_file():
            raise ValueError(
                f"--resume {str(chosen)!r}: has no {RUN_STATE}, so it is no checkpoint of a run; give run.folder/"
                f"{FOLDER}/step-N, or {AUTO}."
            )
        for fault in manifest.faults_for_all(chosen, self.groups):
            raise RuntimeError(f"--resume {str(chosen)!r}: {fault}; give an earlier checkpoint, or {AUTO}.")
        for step in steps:  # otherwise `auto` would later prefer the steps of the abandoned course
            if step > read_state(chosen)["step"]:
                self._set_aside(step, "superseded")
        return chosen

    def _newest_good(self, steps: list[int]) -> Path | None:
        damaged: dict[int, str] = {}
        for step in steps:  # newest first
            path = self.folder / f"step-{step}"
            faults = manifest.faults_for_all(path, self.groups)
            if not faults:
                for other in damaged:  # only once a good one is known: they may be all there is
                    self._set_aside(other, "damaged")
                self.passed_over = [f"checkpoint step-{other}: {fault}" for other, fault in damaged.items()]
                return path
            damaged[step] = faults[0]
        if damaged:
            named = "; ".join(f"step-{step}: {fault}" for step, fault in damaged.items())
            raise RuntimeError(
                f"--resume {AUTO}: every checkpoint in {str(self.folder)!r} is damaged ({named}). All are left as they "
                f"are; restore one from a copy, or start again in another run.folder."
            )
        return None

    def _set_aside(self, step: int, reason: str) -> None:
        """Rename a checkpoint so that it is neither found nor pruned."""

        def rename() -> None:
            path = self.folder / f"step-{step}"
            names = (path.with_name(f"{path.name}.{reason}{number or ''}") for number in itertools.count())
            path.rename(next(name for name in names if not name.exists()))

        self._on_main(rename, step)

    def _steps(self) -> list[int]:
        found = (re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*"))
        return [int(match[1]) for match in found if match]


def read_state(path: Path) -> dict[str, Any]:
    """Return the `state` with which a checkpoint was written, and `step`. Raises RuntimeError if it is invalid."""
    where = f"checkpoint {str(path)!r}: its {RUN_STATE}"
    try:
        state = json.loads((path / RUN_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RuntimeError(f"{where} cannot be read ({error}); give an earlier checkpoint.") from error
    if not isinstance(state, dict):
        raise RuntimeError(f"{where} is a {type(state).__name__} and no object; give an earlier checkpoint.")
    named = re.fullmatch(r"step-(\d+)(\..*)?", path.name)
    ledgers = state.get("ledgers", [])
    rules = {
        "step": (is_count(state.get("step")), "must be a whole number of at least 0"),
        "version": (is_count(state.get("version", 0)), "must be a whole number of at least 0"),
        "prompts": ("prompts" not in state or is_place(state["prompts"]), IS_PLACE),
        "demonstrations": ("demonstrations" not in state or is_place(state["demonstrations"]), IS_PLACE),
        "config": (isinstance(state.get("config", {}), dict), "must be the run's config, by sections"),
        "ledgers": (isinstance(ledgers, list) and all(map(is_ledger, ledgers)), "must be a list of ledgers' states"),
        "rates": ("rates" not in state or are_rates(state["rates"]), "must be places of prompts and their rates"),
    }
    if named and rules["step"][0]:
        rules["step"] = state["step"] == int(named[1]), f"must be that of the folder, {named[1]}"
    for key, (holds, rule) in rules.items():
        if not holds:
            raise RuntimeError(
                f"{where} has {key} = {state.get(key)!r:.200}, which {rule}; give an earlier checkpoint."
            )
    return state


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63  # from JSON, where `true` would pass for 1


def is_place(state: Any) -> bool:
    """Return True if `state` has the form of an iterator's position in its prompts or rows."""
    return isinstance(state, dict) and all(is_count(state.get(name)) for name in ("number", "count"))


def is_ledger(state: Any) -> bool:
    if not (isinstance(state, dict) and is_count(state.get("next")) and isinstance(state.get("open"), list)):
        return False
    undecided = state.get("undecided", [])
    share = [state["size"]] if "size" in state else [state.get(name) for name in ("period", "first", "end")]
    if not (isinstance(undecided, list) and all(map(is_count, (*state["open"], *undecided, *share)))):
        return False
    if "reuse" in state and not is_buffer(state["reuse"]):
        return False
    return share[0] > 0 and (len(share) == 1 or share[1] < share[2] <= share[0])


def wait_for_earlier_processes(run_folder: Path, groups: ParallelGroups) -> None:
    """Wait until no other process writes the run's journal.

    Raises RuntimeError, which names such a process, on all ranks if it does not end.
    """
    if fault := groups.on_main(lambda: journal.wait_for_owners(run_folder / journal.FOLDER)):
        raise RuntimeError(fault)


class PromptResumeState:
    """The run's position in its prompts. Each rollout process has its rank's own part (resume_state.py).

    resumed: state of the resumed checkpoint; {} if a resumed run has none yet; None for a new run.
    """

    def __init__(
        self, config: TrainConfig, prompts: PromptIterator, groups: ParallelGroups, resumed: dict[str, Any] | None
    ) -> None:
        self.prompts, self.groups, self.resumed = prompts, groups, resumed
        self.rates: SuccessRates | None = None
        """Success rates of the prompts, equal on all ranks. None if data.sampling is `all`."""
        if config.data.sampling != "all":
            path = config.data.success_rates
            measured = measured_rates(prompts.prompts, path) if path else []
            self.rates = SuccessRates(config.data, seed=config.run.seed, measured=measured)
            if resumed and "rates" in resumed:
                self.rates.load_state_dict(resumed["rates"])
        self.config, self.folder = config, Path(config.run.folder) / journal.FOLDER
        attempt = [journal.next_run_attempt(self.folder)]
        dist.broadcast_object_list(attempt, src=0, group=groups.control)
        self.run_attempt: int = attempt[0]
        if resumed:
            prompts.load_state_dict(resumed["prompts"])

    def resume_point(self) -> ResumePoint:
        """Return what this rank's rollout process must know to resume."""
        return ResumePoint(
            rank=self.groups.data.rank,
            ranks=self.groups.data.size,
            run_attempt=self.run_attempt,
            fingerprint=fingerprint(self.config),
            resumed=self.resumed,
            rates=self.rates,
        )

    def lock(self) -> int | None:
        """Take the lock of this rank's journal, for its rollout process. Return None if the run keeps no journal."""
        keeps_journal = self.config.run.checkpoint_every_steps > 0
        return journal.take_lock(self.folder, self.groups.data.rank) if keeps_journal else None

    def note_step(self, rollout: RolloutProcess | None) -> None:
        """Record the position between two steps for `state_dict`, and add the outcomes so far to the success rates.

        rollout: this rank's rollout process, if it has one.
        """
        # Not asked when a checkpoint is written, because an abandoned step restarts from its beginning.
        self._ledger_state = None if rollout is None else rollout.ledger_state()
        outcomes = [] if self._ledger_state is None else self._ledger_state.pop("outcomes")
        if self.rates is None:
            return
        # Between two steps no rank takes a prompt, so all choose those of a step by the same rates.
        of_ranks: list[Any] = [None] * self.groups.world_size
        dist.all_gather_object(of_ranks, outcomes, group=self.groups.control)
        outcomes = sorted(outcome for of_rank in of_ranks for outcome in of_rank)
        self.rates.add(outcomes)
        if rollout is not None:
            rollout.add_outcomes(outcomes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the prompts for a checkpoint: the iterator's state and all ledgers.

        The result is equal on all ranks.
        """
        states: list[Any] = [None] * self.groups.world_size
        dist.all_gather_object(states, self._ledger_state, group=self.groups.control)
        ledgers = [state for state in states if state is not None]
        rates = {} if self.rates is None else {"rates": self.rates.state_dict()}
        return {"prompts": self.prompts.state_dict(), "ledgers": ledgers} | rates


def fingerprint(config: TrainConfig) -> str:
    """Hash all settings that affect a group that is sampled at a given policy version."""
    sections = ("model", "generation", "data", "warm_start", "optimizer")
    settings: dict[str, Any] = {name: dataclasses.asdict(getattr(config, name)) for name in sections}
    rollout, seed = config.rollout, config.run.seed
    settings |= {"workflow": rollout.workflow, "args": rollout.workflow_args, "reward": rollout.reward, "seed": seed}
    settings |= {"recipe": rollout.recipe}
    # Journals of runs without these options do not mention them.
    if not config.generation.min_p:
        del settings["generation"]["min_p"]
    if config.algo.routing_replay != "off":
        settings |= {"routing_replay": config.algo.routing_replay}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
