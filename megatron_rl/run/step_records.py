"""Records of steps for `megatron-rl replay`: what a step consumed, and what it computed from that.

`run.folder/records/step-N` is written by each replica's first rank: the tokens of the trajectories that it trains, and
later the columns that it computed for them. The main rank adds the numbers of all trajectories, the plan that divides
them, the prompts' rows, the run's options, and the losses, gradients and weights of the step. A step that fails leaves
what it consumed.

Steps that are recorded for alarms only stay in memory, and are written when an error ends the run. That costs a copy of
the step's tokens. What does not fit into PENDING_BYTES is written at once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform as host
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl import platform
from megatron_rl.batch import share_plan
from megatron_rl.batch.step_batch import SharePlan, StepBatch
from megatron_rl.config import TrainConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.parallel import ParallelGroups
from megatron_rl.telemetry.provenance import provenance
from megatron_rl.telemetry.timers import PhaseTimers
from megatron_rl.types import StepStats, TrajectoryBatch
from megatron_rl.weights.update_group import checksum

FOLDER = "records"
FACTS, ROWS, COMPUTED = "record.json", "rows.json", "computed.json"
CONSUMED_NUMBERS, COMPUTED_NUMBERS = "consumed", "computed"
"""First part of the names of safetensors files. A replica's tokens are in a file with its number."""
ON_ALARM = "on_alarm"
FORMAT = 1
LOGPROBS = "update_logprobs"
"""Computed column: log p of each trained token in the forward pass of its own update."""
PLAN = ("lengths", "update", "owner", "group")
PENDING_BYTES = 256 << 20
"""Maximum size of the records that a rank holds in memory for an alarm."""
PACKAGES = ("torch", "megatron-core", "transformers", "tensordict", "numpy", "safetensors")

Columns = dict[str, Tensor]


@dataclasses.dataclass(kw_only=True)
class _Part:
    """This rank's files of one half of a record. facts: JSON files, which the main rank writes last."""

    files: dict[str, Columns]
    facts: dict[str, Any]

    @property
    def size(self) -> int:
        return sum(column.nbytes for columns in self.files.values() for column in columns.values())


class StepRecorder:
    """Records the steps that telemetry.record_steps asks for. Collective: every rank calls every method but `alarm`.

    recorder = StepRecorder(config, groups, {"policy": engine}, timers, say=print)
    recorder.begin(3, batch)  # before anything is computed from the batch
    ...
    recorder.end(batch, updates, {"policy": stats})
    """

    def __init__(
        self,
        config: TrainConfig,
        groups: ParallelGroups,
        engines: dict[str, MegatronEngine],
        timers: PhaseTimers,
        *,
        say: Callable[[str], None],
        defers: bool = True,
    ) -> None:
        """defers: hold records for alarms in memory. False writes them at once."""
        self.config, self.groups, self.engines, self.timers, self._say = config, groups, engines, timers, say
        self.folder = Path(config.run.folder) / FOLDER
        self._defers = defers
        self._step: int | None = None
        """The step in progress, if it is recorded."""
        self._consumed: frozenset[str] = frozenset()
        """Token columns that the step consumed."""
        self._watches: dict[str, _TensorWatch] = {}
        self._pending: dict[int, list[_Part]] = {}
        """Parts of the records in memory, by step, oldest first."""

    def begin(
        self,
        step: int,
        batch: StepBatch,
        *,
        prompts: Sequence[dict[str, Any]] = (),
        oldest_checkpoint: Callable[[], int] = lambda: 0,
    ) -> None:
        """Write what the step consumes, if the step is recorded.

        prompts: the rows that the batch's `prompt_index` refers to; those of this step are recorded.
        oldest_checkpoint: called on the main rank. With on_alarm, records of steps before the step that it returns are
        removed, unless another entry asks for them.
        """
        options, is_asked_for, self._step = self.config.telemetry, self._is_asked_for(step), None
        if not is_asked_for and not (ON_ALARM in options.record_steps and self.config.run.checkpoint_every_steps > 0):
            return
        with self.timers("record"):
            self._step, self._consumed = step, frozenset(batch.tokens)
            if self._defers and not is_asked_for:
                self._hold(step, batch, prompts)
                return
            fault = self.groups.on_main(lambda: self._make_room(self._folder(step), oldest_checkpoint()))
            fault = fault or self._write(step, self._consumed_part(step, batch, prompts))
            if fault:
                self._warn(step, fault)
                self._step = None
            elif options.records(step, step + 1):
                self._watches = {name: _TensorWatch(engine) for name, engine in self.engines.items()}

    def end(self, batch: StepBatch, shares: list[TrajectoryBatch], stats: dict[str, list[StepStats]]) -> None:
        """Write what the step computed, if the step is recorded.

        batch: the trajectories that were trained. shares: this rank's updates. stats: by model, of each update.
        """
        step, self._step = self._step, None
        if step is None:
            return
        with self.timers("record"):
            own = batch.own()
            columns = {name: column for name, column in own.tokens.items() if name not in self._consumed}
            logprobs = [update.logprobs for update in stats["policy"]]
            if logprobs and all(column is not None for column in logprobs):
                columns[LOGPROBS] = _of_updates(batch, own, logprobs)
            computed: dict[str, Any] = {
                "updates": {model: [_numbers(update) for update in updates] for model, updates in stats.items()},
                "tensors": {model: watch.result() for model, watch in self._watches.items()},
            }
            self._watches = {}
            tokens = {f"tokens.{name}": column for name, column in columns.items()} | {"cu_seqlens": own.cu_seqlens}
            part = self._part(COMPUTED_NUMBERS, batch, tokens, {COMPUTED: computed})
            if step in self._pending:
                self._add(step, part)
            elif fault := self._write(step, part):
                self._warn(step, fault)

    def alarm(self) -> None:
        """Write the records in memory, because an error ends the run. Each rank writes its own files."""
        for step in list(self._pending):
            self._write_pending(step)

    def _is_asked_for(self, step: int) -> bool:
        """Return True if the step is recorded for itself, or for a later step before the next checkpoint."""
        every = self.config.run.checkpoint_every_steps
        return self.config.telemetry.records(step, (step // every + 1) * every if every else float("inf"))

    def _folder(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _hold(self, step: int, batch: StepBatch, prompts: Sequence[dict[str, Any]]) -> None:
        """Keep a copy of what the step consumes, and forget steps before the checkpoints that are kept."""
        options = self.config.run
        every = options.checkpoint_every_steps
        # One more checkpoint than is kept, because the newest may still be on its way to the disk.
        kept_from = max(0, step // every - options.keep_checkpoints) * every
        self._pending = {number: parts for number, parts in self._pending.items() if number >= kept_from}
        if self.groups.is_main:
            self._remove_before(kept_from)
        part = self._consumed_part(step, batch, prompts)
        # The step adds to its batch, and may change columns.
        part.files = {name: {key: it.clone() for key, it in columns.items()} for name, columns in part.files.items()}
        self._pending.pop(step, None)  # of an attempt that was abandoned
        self._add(step, part)

    def _add(self, step: int, part: _Part) -> None:
        """Keep a part in memory. Write the oldest records if they are too many, but never the step in progress."""
        self._pending.setdefault(step, []).append(part)
        while sum(part.size for parts in self._pending.values() for part in parts) > PENDING_BYTES:
            if (oldest := next(iter(self._pending))) == step:
                return
            self._write_pending(oldest)

    def _write_pending(self, step: int) -> None:
        """Write a record from memory. If that fails, only this record is lost."""
        folder, parts = self._folder(step), self._pending.pop(step)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.groups.is_main:  # what a run that was killed has left
                for name in (FACTS, COMPUTED):
                    (folder / name).unlink(missing_ok=True)
            for part in parts:
                _save_files(part, folder)
                self._save_facts(part, folder)
        except (OSError, SafetensorError) as error:
            self._say(f"WARNING: the record {folder} cannot be written: {error}.")

    def _make_room(self, folder: Path, oldest_checkpoint: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed and has resumed before this step
        folder.mkdir(parents=True)
        if ON_ALARM in self.config.telemetry.record_steps:
            self._remove_before(oldest_checkpoint)

    def _remove_before(self, oldest_checkpoint: int) -> None:
        """Remove records of steps before a checkpoint's, unless another entry asks for them."""
        for path in self.folder.glob("step-*"):
            other = int(path.name.removeprefix("step-"))
            if other < oldest_checkpoint and not self._is_asked_for(other):
                shutil.rmtree(path, ignore_errors=True)

    def _consumed_part(self, step: int, batch: StepBatch, prompts: Sequence[dict[str, Any]]) -> _Part:
        own = batch.own().columns()
        tokens = {name: column for name, column in own.items() if not name.startswith("sequences.")}
        places = set(batch["prompt_index"].tolist()) if prompts and "prompt_index" in batch else set()
        facts = {"format": FORMAT, "step": step, "version": self.engines["policy"].get_version()}
        facts |= {"replicas": self.groups.data.size}
        rows = {place: prompts[place] for place in sorted(places)}
        return self._part(CONSUMED_NUMBERS, batch, tokens, {ROWS: rows, FACTS: facts})

    def _part(self, kind: str, batch: StepBatch, tokens: Columns, facts: dict[str, Any]) -> _Part:
        """Return the part of a record that this rank writes."""
        files: dict[str, Columns] = {}
        if self.groups.is_rollout_rank:
            files[f"{kind}-{self.groups.data.rank}.safetensors"] = tokens
        if self.groups.is_main:
            plan = {f"plan.{name}": getattr(batch.plan, name) for name in PLAN}
            plan |= {"plan.updates": torch.tensor([batch.plan.updates])}
            plan |= {} if batch.plan.begin is None else {"plan.begin": batch.plan.begin}
            numbers = {f"sequences.{name}": column for name, column in batch.sequences.items()}
            files[f"{kind}.safetensors"] = plan | numbers
        return _Part(files=files, facts=facts)

    def _write(self, step: int, part: _Part) -> str:
        """Write this rank's files, and the facts after all ranks have written. Return a fault on all ranks, or ''."""
        folder, fault = self._folder(step), ""
        try:
            _save_files(part, folder)
        except (OSError, SafetensorError) as error:
            fault = str(error)
        if self.groups.any(bool(fault)):
            return fault or "another rank failed"
        return self.groups.on_main(lambda: self._save_facts(part, folder))

    def _save_facts(self, part: _Part, folder: Path) -> None:
        for name, content in part.facts.items() if self.groups.is_main else ():
            content = content | self._facts_of_run if name == FACTS else content
            (folder / name).write_text(json.dumps(content, default=repr), encoding="utf-8")

    def _warn(self, step: int, fault: str) -> None:
        self._say(f"WARNING: the record {self._folder(step)} cannot be written: {fault}. Training goes on.")

    @functools.cached_property
    def _facts_of_run(self) -> dict[str, Any]:
        """The facts that all records of the run share. They are computed once, because that takes 0.1 s."""
        config = self.config.to_yaml()
        return {"config": config, "made_by": provenance(), "arithmetic": arithmetic(self.groups)}


def arithmetic(groups: ParallelGroups) -> dict[str, Any]:
    """Return everything but the code that may change the last bits of a result."""
    axes = ("tensor", "pipeline", "context", "data", "expert", "expert_tensor")
    layout = {axis: getattr(groups, axis).size for axis in axes}
    return {"layout": layout, "threads": torch.get_num_threads(), "machine": machine()}


def machine() -> dict[str, str]:
    """Return this host's device and its versions of packages that compute."""
    device = torch.cuda.get_device_name() if platform.has_cuda() else torch.backends.cpu.get_cpu_capability()
    return {"device": f"{host.machine()} {device}"} | {name: metadata.version(name) for name in PACKAGES}


class _TensorWatch:
    """Gradients and changed weights of one model in each update, by HF tensor. Only rank 0 has the results.

    Holds a copy of this rank's weights in host memory until `result`. Collective: every rank calls every method.
    """

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine
        self.before = {name: checksum(tensor) for name, tensor in engine.trained_tensors()}
        self.weights = {id(it): it.detach().to("cpu", copy=True) for it in engine.parameters() if it.requires_grad}
        self.gradients: list[dict[str, tuple[float, str]]] = []
        self.after: list[dict[str, tuple[float, str]]] = []
        """For each update: by tensor, the norm of the change since the step began, and the weights' checksum."""
        engine.on_gradients = self._note_gradients

    def _note_gradients(self) -> None:
        if self.gradients:
            self._note_weights()  # those of the update before
        self.gradients.append({name: (_norm(it), checksum(it)) for name, it in self.engine.gradients()})

    def _note_weights(self) -> None:
        changes = {name: _norm(tensor) for name, tensor in self.engine.trained_tensors(self._change)}
        self.after.append({name: (changes[name], checksum(it)) for name, it in self.engine.trained_tensors()})

    def result(self) -> dict[str, Any]:
        self.engine.on_gradients = None
        if self.gradients:
            self._note_weights()
        return {"before": self.before, "gradients": self.gradients, "after": self.after}

    def _change(self, parameter: Tensor) -> Tensor:
        before = self.weights.get(id(parameter))
        return torch.zeros_like(parameter) if before is None else parameter.detach() - before.to(parameter.device)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _of_updates(batch: StepBatch, own: TrajectoryBatch, logprobs: list[Any]) -> Tensor:
    """Join the updates' log-probs `[n]` to a column of this replica's tokens `[N]`. Demonstrations are left out."""
    column = torch.zeros(len(own["input_ids"]))
    update = own.spread(batch.plan.update[batch.plan.owner == batch.plan.groups.data.rank])
    for number, values in enumerate(logprobs):
        rows = (update == number).nonzero()[:, 0]
        column[rows] = values[: len(rows)].cpu()
    return column


def _numbers(stats: StepStats) -> dict[str, Any]:
    kept = {"loss": stats.loss, "weight": stats.weight, "grad_norm": stats.grad_norm, "lr": stats.lr}
    return kept | {"applied": stats.applied, "fault": stats.fault, "sums": stats.sums}


def _save_files(part: _Part, folder: Path) -> None:
    """Write the part's tensors. Each file appears under its name when it is complete."""
    for name, columns in part.files.items():
        aside = folder / f".{name}.partial"
        save_file({key: column.contiguous().numpy() for key, column in columns.items()}, aside)  # faster than torch's
        os.replace(aside, folder / name)


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class StepRecord:
    """A step's record as data. Trajectories are in the step's order, whatever layout recorded them."""

    folder: Path
    facts: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    """Rows of the step's prompts, by `prompt_index`. Values that JSON does not know are text."""
    consumed: TrajectoryBatch
    plan: dict[str, Tensor]
    """SharePlan's columns for the consumed trajectories."""
    computed: dict[str, Any] | None
    """Losses, gradients and weights; None if the step did not come to its end."""
    trained: TrajectoryBatch | None
    """Computed columns of the trajectories that were trained, which exclude greedy replies."""
    update: Tensor | None
    """`[B]` update of each trained trajectory."""

    def batch(self, groups: ParallelGroups) -> StepBatch:
        """Return this rank's view of what the step consumed, in any layout. The updates are those of the record."""
        lengths, update, group = (self.plan[name] for name in ("lengths", "update", "group"))
        columns = {"lengths": lengths, "update": update, "group": group, "begin": self.plan.get("begin")}
        owner = share_plan.plan_owners(update, lengths, groups.data.size, group=group, begin=columns["begin"])
        plan = SharePlan(groups=groups, updates=int(self.plan["updates"]), owner=owner, **columns)
        own = self.consumed.select((owner == groups.data.rank).nonzero()[:, 0].tolist())
        tokens = dataclasses.replace(own, sequences={})
        return StepBatch.of_tokens(tokens, dict(self.consumed.sequences), plan)

    def trained_batch(self) -> TrajectoryBatch:
        """Return the trajectories that were trained, as they were consumed: all but greedy replies."""
        consumed = self.consumed
        if "is_greedy" not in consumed:
            return consumed
        return consumed.select((consumed["is_greedy"] == 0).nonzero()[:, 0].tolist())


def read_record(folder: Path) -> StepRecord:
    """Read a record. Raises ValueError if the folder has none, or one that is incomplete or of another format."""
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
    """Return the steps with a record, in order."""
    found: Iterator[Path] = (run_folder / FOLDER).glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in found if (path / FACTS).is_file())
