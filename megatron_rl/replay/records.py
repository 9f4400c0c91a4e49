"""Reads the records of steps that run/step_records.py has written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.batch import share_plan
from megatron_rl.batch.step_batch import SharePlan, StepBatch
from megatron_rl.parallel import ParallelGroups
from megatron_rl.run.step_records import (
    COMPUTED,
    COMPUTED_NUMBERS,
    CONSUMED_NUMBERS,
    FACTS,
    FOLDER,
    FORMAT,
    ROWS,
)
from megatron_rl.types import TrajectoryBatch


@dataclasses.dataclass(kw_only=True)
class StepRecord:
    """A step's record as data. Trajectories are in the step's order, whatever the layout that recorded them."""

    folder: Path
    facts: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    """Rows of the step's prompts, by `prompt_index` as text. Values that JSON cannot represent are stored as text."""
    consumed: TrajectoryBatch
    plan: dict[str, Tensor]
    """Columns of the SharePlan, which divides the consumed trajectories among updates and ranks."""
    computed: dict[str, Any] | None
    """Losses, gradients and weights of each update; None if the step did not end."""
    trained: TrajectoryBatch | None
    """Columns that the step computed for the trained trajectories, which are all but greedy replies."""
    update: Tensor | None
    """`[B]`: index of the update that trained each trajectory in `trained`."""

    def batch(self, groups: ParallelGroups) -> StepBatch:
        """Return this rank's part of what the step consumed, divided into updates as recorded.

        The layout may differ.
        """
        lengths, update, group = (self.plan[name] for name in ("lengths", "update", "group"))
        columns = {"lengths": lengths, "update": update, "group": group, "begin": self.plan.get("begin")}
        owner = share_plan.plan_owners(update, lengths, groups.data.size, group=group, begin=columns["begin"])
        plan = SharePlan(groups=groups, updates=int(self.plan["updates"]), owner=owner, **columns)
        own = self.consumed.select((owner == groups.data.rank).nonzero()[:, 0].tolist())
        tokens = dataclasses.replace(own, sequences={})
        return StepBatch.of_tokens(tokens, dict(self.consumed.sequences), plan)

    def trained_batch(self) -> TrajectoryBatch:
        """Return the trained trajectories, with the columns that the step consumed. Greedy replies are left out."""
        if "is_greedy" not in self.consumed:
            return self.consumed
        return self.consumed.select((self.consumed["is_greedy"] == 0).nonzero()[:, 0].tolist())


def read_record(folder: Path) -> StepRecord:
    """Read a step's record from its folder. Raises ValueError if it is missing, incomplete or of another format."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if facts.get("format") != FORMAT:
            raise ValueError(f"its format is {facts.get('format')!r}, and this version reads {FORMAT}")
        rows = json.loads((folder / ROWS).read_text(encoding="utf-8"))
        consumed, plan = _read_batch(folder, CONSUMED_NUMBERS, facts["replicas"])
        computed = trained = update = None
        if (folder / COMPUTED).is_file():
            computed = json.loads((folder / COMPUTED).read_text(encoding="utf-8"))
            trained, of_trained = _read_batch(folder, COMPUTED_NUMBERS, facts["replicas"])
            update = of_trained["update"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(f"record {str(folder)!r}: cannot be read ({error}); give a step that was recorded.") from error
    known = {"folder": folder, "facts": facts, "rows": rows, "consumed": consumed, "plan": plan}
    return StepRecord(**known, computed=computed, trained=trained, update=update)


def _read_batch(folder: Path, kind: str, replicas: int) -> tuple[TrajectoryBatch, dict[str, Tensor]]:
    numbers = load_file(folder / f"{kind}.safetensors")
    plan = {name.removeprefix("plan."): column for name, column in numbers.items() if name.startswith("plan.")}
    sequences = {name.removeprefix("sequences."): it for name, it in numbers.items() if name.startswith("sequences.")}
    parts = [TrajectoryBatch.from_columns(load_file(folder / f"{kind}-{rank}.safetensors")) for rank in range(replicas)]
    whole = TrajectoryBatch.cat(parts)
    if replicas > 1:  # now by replica, and within a replica in the step's order
        whole = whole.select(plan["owner"].argsort(stable=True).argsort().tolist())
    return dataclasses.replace(whole, sequences=sequences), plan


def recorded_steps(run_folder: Path) -> list[int]:
    """Return the numbers of the recorded steps, in order."""
    found = (run_folder / FOLDER).glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in found if (path / FACTS).is_file())
