"""Records of steps for `megatron-rl replay`: what a step consumed, and what it computed from that.

Each replica's first rank writes to `run.folder/records/step-N` the tokens of the trajectories that it trains, and later
the columns that it computed for them. The main rank adds the numbers of all trajectories, the plan that divides them,
the prompts' rows, the run's options, and the losses, gradients and weights of the step.

Steps that are recorded only for alarms stay in memory, up to PENDING_BYTES, and are written when an error ends the run.
replay/records.py reads records.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform as host
import shutil
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from torch import Tensor

from megatron_rl import platform
from megatron_rl.batch.step_batch import StepBatch
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
"""Name stems of the safetensors files. A replica's tokens are in a file whose name also has the replica's number."""
ON_ALARM = "on_alarm"
FORMAT = 1
LOGPROBS = "update_logprobs"
"""Name of a computed column: log p of each trained token, in the forward pass of the update that trains it."""
PLAN = ("lengths", "update", "owner", "group")
PENDING_BYTES = 256 << 20
"""Maximum size of the records that a rank holds in memory for an alarm."""
PACKAGES = ("torch", "megatron-core", "transformers", "tensordict", "numpy", "safetensors")

Columns = dict[str, Tensor]


@dataclasses.dataclass(kw_only=True)
class _Part:
    """One half of a record: what the step consumed, or what it computed.

    It has this rank's tensor files, and JSON files, which only the main rank writes, last.
    """

    files: dict[str, Columns]
    facts: dict[str, Any]

    @property
    def size(self) -> int:
        return sum(column.nbytes for columns in self.files.values() for column in columns.values())


class StepRecorder:
    """Records the steps that telemetry.record_steps asks for. Collective: every rank calls every method but `alarm`.

    recorder = StepRecorder(config, groups, {"policy": engine}, timers, say=print)
    recorder.begin(3, batch)  # before anything is computed from the batch
    recorder.end(batch, {"policy": stats})
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
        """defers: keep records that are only needed for an alarm in memory. False writes them at once."""
        self.config, self.groups, self.engines, self.timers, self._say = config, groups, engines, timers, say
        self.folder = Path(config.run.folder) / FOLDER
        self._defers = defers
        self._step: int | None = None
        """The step in progress, if it is recorded."""
        self._consumed: frozenset[str] = frozenset()
        """Names of the token columns that the step consumed."""
        self._watches: dict[str, _TensorWatch] = {}
        self._pending: dict[int, list[_Part]] = {}
        """Parts of records that are held in memory, by step, oldest first."""

    def begin(
        self,
        step: int,
        batch: StepBatch,
        *,
        prompts: Sequence[dict[str, Any]] = (),
        oldest_checkpoint: Callable[[], int] = lambda: 0,
    ) -> None:
        """Record what the step consumes, if the step is to be recorded.

        prompts: the rows to which `prompt_index` refers. oldest_checkpoint: returns the step of the oldest checkpoint;
        called on the main rank. If record_steps contains on_alarm, records of earlier steps than that are removed,
        unless another entry of record_steps asks for them.
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

    def end(self, batch: StepBatch, stats: dict[str, list[StepStats]]) -> None:
        """Record what the step computed, if the step is recorded.

        batch: the trajectories that were trained. stats: for each model, the statistics of each update.
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
        """Write the records that are in memory, because an error ends the run. Each rank writes its own files."""
        for step in list(self._pending):
            self._write_pending(step)

    def _is_asked_for(self, step: int) -> bool:
        """Return True if record_steps asks for the step, or for a later step whose replay needs this one.

        A replay starts at a checkpoint, so it needs all steps since the last checkpoint.
        """
        every = self.config.run.checkpoint_every_steps
        return self.config.telemetry.records(step, (step // every + 1) * every if every else float("inf"))

    def _folder(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _hold(self, step: int, batch: StepBatch, prompts: Sequence[dict[str, Any]]) -> None:
        """Keep a copy of what the step consumes. Forget the steps before the oldest checkpoint that is kept."""
        options = self.config.run
        every = options.checkpoint_every_steps
        # One more checkpoint than is kept, because the newest may still be on its way to the disk.
        kept_from = max(0, step // every - options.keep_checkpoints) * every
        self._pending = {number: parts for number, parts in self._pending.items() if number >= kept_from}
        if self.groups.is_main and (step % every == 0 or not self._pending):  # listing the folder may be slow
            self._remove_before(kept_from)
        part = self._consumed_part(step, batch, prompts)
        # The step adds to its batch, and may change columns.
        part.files = {name: {key: it.clone() for key, it in columns.items()} for name, columns in part.files.items()}
        self._pending.pop(step, None)  # of an attempt that was abandoned
        self._add(step, part)

    def _add(self, step: int, part: _Part) -> None:
        """Keep a part in memory.

        Above PENDING_BYTES in all, write the oldest records, but never the step in progress.
        """
        self._pending.setdefault(step, []).append(part)
        while sum(part.size for parts in self._pending.values() for part in parts) > PENDING_BYTES:
            if (oldest := next(iter(self._pending))) == step:
                return
            self._write_pending(oldest)

    def _write_pending(self, step: int) -> None:
        """Write a record that is in memory. If that fails, only this record is lost."""
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
        """Remove the records of steps before `oldest_checkpoint`, unless another entry of record_steps needs them."""
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
        """Write this rank's files and, after all ranks have written theirs, the facts.

        Return a description of what failed, or ''. It is the same on all ranks.
        """
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
    """Return everything, apart from the code, that may change the last bits of a result."""
    axes = ("tensor", "pipeline", "context", "data", "expert", "expert_tensor")
    layout = {axis: getattr(groups, axis).size for axis in axes}
    return {"layout": layout, "threads": torch.get_num_threads(), "machine": machine()}


def machine() -> dict[str, str]:
    """Return the name of this host's device, and the versions of installed packages that affect results."""
    device = torch.cuda.get_device_name() if platform.has_cuda() else torch.backends.cpu.get_cpu_capability()
    return {"device": f"{host.machine()} {device}"} | {name: metadata.version(name) for name in PACKAGES}


class _TensorWatch:
    """Notes one model's gradients and changed weights in each update, per HF tensor. Only rank 0 has the result.

    Collective. Every rank holds a copy of its weights in host memory.
    """

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine
        self.before = {name: checksum(tensor) for name, tensor in engine.trained_tensors()}
        self.weights = {id(it): it.detach().to("cpu", copy=True) for it in engine.parameters() if it.requires_grad}
        self.gradients: list[dict[str, tuple[float, str]]] = []
        self.after: list[dict[str, tuple[float, str]]] = []
        """For each update and HF tensor: norm of the change since the step began, and checksum of the weights."""
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
    """Join the log-probs of all updates, each `[n]`, to a column `[N]` over this replica's tokens.

    Tokens of demonstrations are left out.
    """
    column = torch.zeros(len(own["input_ids"]))
    update = own.spread(batch.plan.update[batch.plan.owner == batch.plan.groups.data.rank])
    for number, values in enumerate(logprobs):
        rows = (update == number).nonzero()[:, 0]
        column[rows] = values[: len(rows)].cpu()
    return column


def _numbers(stats: StepStats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in ("loss", "weight", "grad_norm", "lr", "applied", "fault", "sums")}


def _save_files(part: _Part, folder: Path) -> None:
    """Write the part's tensor files. Each file appears under its name only once it is complete."""
    for name, columns in part.files.items():
        aside = folder / f".{name}.partial"
        save_file({key: column.contiguous().numpy() for key, column in columns.items()}, aside)  # faster than torch's
        os.replace(aside, folder / name)
