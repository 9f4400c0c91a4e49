"""The checkpoints of a run, from which it continues after any death: `run.folder/checkpoints/step-N`.

One holds an engine's checkpoint per trained model, run.json (what the loop itself remembers) and, last, the manifest.
It is written aside and appears under its name when it is whole; older ones go only after that, and none that is damaged
goes at all. All ranks call every method.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.engine import manifest
from megatron_rl.engine.manifest import CheckpointError
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.parallel import ParallelGroups
from megatron_rl.weights.hf_files import recover_folder, replace_folder

FOLDER, RUN_STATE = "checkpoints", "run.json"
AUTO = "auto"
"""Asks for the newest good checkpoint of the run's own folder, or a fresh start where there is none."""


class RunCheckpoints:
    """Writes, finds and thins out the checkpoints of one run, one at a time and in the background."""

    def __init__(self, run_folder: str | Path, *, keep: int, groups: ParallelGroups) -> None:
        self.folder, self.keep, self.groups = Path(run_folder) / FOLDER, keep, groups
        self.engines: dict[str, MegatronEngine] = {}
        self.aside: Path | None = None
        """What is being written."""
        self.passed_over: list[str] = []
        """Damaged checkpoints that `choose` met, each with its fault."""

    # -- writing ------------------------------------------------------------------------------------------------------

    def start(self, step: int, engines: dict[str, MegatronEngine], state: dict[str, Any]) -> None:
        """Begin to write the engines and `state` (of JSON) as they are now. CheckpointError where that fails."""
        self.finish(wait=True)
        aside = self.folder / f".step-{step}.partial"

        def make_room() -> None:
            for abandoned in self.folder.glob(".step-*.partial"):  # of a run that was killed
                shutil.rmtree(abandoned)
            aside.mkdir(parents=True)
            (aside / RUN_STATE).write_text(json.dumps({"step": step} | state))

        self._on_main(make_room, step)
        self.aside, self.engines = aside, engines
        for name, engine in engines.items():
            engine.save_async(aside / name)

    def finish(self, *, wait: bool) -> bool:
        """Publish the checkpoint in work if its writers are done, or after waiting for them; True if none is left.

        CheckpointError on all ranks where it could not be written; earlier ones are all there then.
        """
        if self.aside is None:
            return True
        try:
            # Of all engines, also after one that is not done: each call is a collective.
            is_done = all([engine.finish_saves(wait=wait) for engine in self.engines.values()])
        except CheckpointError:
            self.aside = None
            raise
        if not is_done:
            return False
        aside, self.aside = self.aside, None
        step = int(aside.name.split("-")[1].removesuffix(".partial"))

        def publish() -> None:
            manifest.write(aside)
            replace_folder(aside, self.folder / f"step-{step}")
            for old in sorted(self._steps())[: -self.keep]:
                shutil.rmtree(self.folder / f"step-{old}")

        self._on_main(publish, step)
        return True

    def _on_main(self, act: Callable[[], None], step: int) -> None:
        fault = self.groups.on_main(act)
        if fault:
            raise CheckpointError(
                f"checkpoint {str(self.folder / f'step-{step}')!r}: {fault}; earlier ones are untouched. See that the "
                f"disk has space and that run.folder can be written."
            )

    # -- finding ------------------------------------------------------------------------------------------------------

    def choose(self, resume: str) -> Path | None:
        """Return the checkpoint to continue from, every file of it compared with its sums, or None for a fresh start.

        resume: `auto`, a checkpoint's folder, or empty for a fresh start. Steps of this run that come after the chosen
        one are set aside under other names, as are damaged ones that `auto` passes over. ValueError for a folder that
        is no checkpoint, or for a fresh start in the folder of a run that could be continued; RuntimeError where
        what there is is damaged.
        """
        names: list[Any] = [None]
        if self.groups.is_main:
            for old in self.folder.glob(".step-*.old"):  # killed while it replaced a checkpoint of the same step
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
        chosen = self._checked(Path(resume))
        for step in steps:
            if step > read_state(chosen)["step"]:
                self._set_aside(step, "superseded")
        return chosen

    def _newest_good(self, steps: list[int]) -> Path | None:
        damaged: dict[int, str] = {}
        for step in steps:
            path = self.folder / f"step-{step}"
            faults = manifest.faults_for_all(path, self.groups)
            if not faults:
                for other in damaged:
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

    def _checked(self, path: Path) -> Path:
        if not (path / RUN_STATE).is_file():
            raise ValueError(
                f"--resume {str(path)!r}: has no {RUN_STATE}, so it is no checkpoint of a run; give run.folder/"
                f"{FOLDER}/step-N, or {AUTO}."
            )
        for fault in manifest.faults_for_all(path, self.groups):
            raise RuntimeError(f"--resume {str(path)!r}: {fault}; give an earlier checkpoint, or {AUTO}.")
        return path

    def _set_aside(self, step: int, reason: str) -> None:
        """Rename a checkpoint so that it is neither found nor thinned out."""

        def rename() -> None:
            path = self.folder / f"step-{step}"
            names = (path.with_name(f"{path.name}.{reason}{number or ''}") for number in itertools.count())
            path.rename(next(name for name in names if not name.exists()))

        self._on_main(rename, step)

    def _steps(self) -> list[int]:
        found = (re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*"))
        return [int(match[1]) for match in found if match]


def read_state(path: Path) -> dict[str, Any]:
    """Return what `start` was given for a chosen checkpoint, with its `step`: the number of finished steps."""
    state: dict[str, Any] = json.loads((path / RUN_STATE).read_text())
    return state
