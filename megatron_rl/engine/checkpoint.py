"""Checkpoints in Megatron's dist_checkpointing format, written in the background and loadable in any parallel layout.

A checkpoint is a folder. The sharded state holds the model and, for a training run, its optimizer, schedule and random
states. `hf/` holds config.json and the tokenizer. `carried/` holds the tensors of the model's folder for which the
model has no parameters. manifest.json lists the size and CRC-32 of every file. The folder appears under its name only
when it is complete. Loading rejects a checkpoint that was modified.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from megatron_rl.config import DraftConfig, EngineConfig, ModelConfig
from megatron_rl.engine import manifest, optimizer_kinds
from megatron_rl.engine.draft_head import DraftHead, whole_in_checkpoint
from megatron_rl.engine.host_memory import SharedCopies
from megatron_rl.engine.microbatch_engine import MicrobatchEngine
from megatron_rl.engine.mtp_head import MTPHead, layer_config
from megatron_rl.engine.optimizer_shards import OptimizerShards
from megatron_rl.life import process_exit
from megatron_rl.life.stop_signal import SIGNALS
from megatron_rl.parallel import ParallelGroups
from megatron_rl.platform.plain_checkpoints import check_objects, refusing_code
from megatron_rl.weights import hf_files
from megatron_rl.weights.adapter_rules import is_adapter
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.mapping import hf_shapes, tensors_without_rule, whole_tensors
from megatron_rl.weights.tensor_rules import WeightSource

HF_FILES = "hf"  # folder in a checkpoint that holds config.json and the tokenizer
CARRIED = "carried"  # folder in a checkpoint that holds the tensors of the model's folder that are not trained
COMMON = "common.pt"  # file with the state that all ranks share, in checkpoints of megatron.core up to 0.18
RECIPE = "_extra_state"  # name under which layers save the state of their quantization recipe
WRITER_NICENESS = 10  # niceness of background writers, so that training has priority on shared cores
SCHEDULE_KEYS = {
    "max_lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "lr_warmup_steps": "optimizer.warmup_updates",
    "lr_decay_style": "optimizer.schedule",
    "lr_decay_steps": "run.steps, in updates",
    "start_wd": "optimizer.weight_decay",
}
"""Maps Megatron's name of each parameter of the schedule to our config key."""


class CheckpointWriter:
    """Writes checkpoints of the models of one layout, one checkpoint at a time, in forked processes.

    All ranks call every method.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self.groups = groups
        self.calls = AsyncCallsQueue(persistent=False)
        self.path: Path | None = None  # folder of the checkpoint being written, or None
        self.copies = SharedCopies()

    def start(
        self,
        path: str | Path,
        state: dict[str, Any],
        *,
        model_folder: str | Path,
        head: str,
        is_carrying: bool,
        training: list[Tensor],
        in_background: bool,
    ) -> None:
        """Start writing a snapshot of `state`, after waiting for an earlier checkpoint. The state may then change.

        head: as in MegatronEngine.
        is_carrying: True to add the tensors of `model_folder` that are not trained to the checkpoint.
        training: the tensors that training changes during the save. The writers get copies of them.
        in_background: True if training continues during the save. The writers then run at low priority.
        """
        self.finish(wait=True)
        self.path = path = Path(path)
        aside = path.with_name(f".{path.name}.partial")  # same parent folder: renaming needs the same disk

        def make_room() -> None:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)

        def add_model_files() -> None:
            (aside / HF_FILES).mkdir()
            hf_files.copy_model_files(model_folder, aside / HF_FILES, head=head)
            if is_carrying and request.async_fn is None:  # this rank has no background writer
                _carry(model_folder, aside)

        def publish() -> None:
            manifest.write(aside)
            hf_files.replace_folder(aside, path)

        self._on_main(make_room)
        strategy = get_default_save_sharded_strategy()
        if self.groups.data_context.size > 1:  # replicas divide the writing among themselves
            strategy = FullyParallelSaveStrategyWrapper(strategy, self.groups.data_context.group)
        options: dict[str, Any] = {"async_sharded_save": True}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:  # megatron.core >= 0.18
            options["async_strategy"] = "mcore"
        request = dist_checkpointing.save(state, str(aside), strategy, **options)  # a plan; async_fn writes the tensors
        self._on_main(add_model_files)
        if request.async_fn is not None:
            niceness = WRITER_NICENESS if in_background else 0
            source = model_folder if is_carrying and self.groups.is_main else None
            place = source, aside, self.groups.rank, niceness, os.getpid()
            request = request._replace(async_fn=functools.partial(_write_and_sum, request.async_fn, *place))
        if request.preload_fn is not None:  # preload_fn copies tensors from the GPU
            request = request._replace(preload_fn=functools.partial(self._copied, request.preload_fn, training))
        request.add_finalize_fn(functools.partial(self._on_main, publish))
        self.calls.schedule_async_request(request)

    def _copied(self, preload: Callable[[], list[Any]], training: list[Tensor]) -> list[Any]:
        """Return the buckets that `preload` returns, with copies in place of the tensors in `training`.

        A bucket is Megatron's tuple (file, key, (bytes, tensors)).
        """
        # Compare storages, because Megatron's tensors are views. Nothing else changes during the save.
        storages = {tensor.untyped_storage().data_ptr() for tensor in training}
        buckets = preload()
        tensors = [tensor for _, _, (_, items) in buckets for _, tensor in items]
        own = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() in storages]
        copies = dict(zip(map(id, own), self.copies.of(own), strict=True))
        return [
            (file, key, (data, [(item, copies.get(id(tensor), tensor)) for item, tensor in items]))
            for file, key, (data, items) in buckets
        ]

    def finish(self, *, wait: bool) -> bool:
        """Publish the pending checkpoint if its writers are done. Returns True if no checkpoint is pending afterwards.

        wait: True to wait for the writers. Raises CheckpointError on all ranks if a writer failed. An earlier
        checkpoint of the same name then stays intact.
        """
        if self.path is None:
            return True
        try:
            self.calls.maybe_finalize_async_calls(blocking=wait)
        except CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {_in_words(why)}" for rank, (why, _) in sorted(error.failures.items()))
            raise self._failure(f"a writer failed ({reasons or 'rank 0 says which'})") from error
        if self.calls.get_num_unfinalized_calls() == 0:
            self.path = None
        return self.path is None

    def drop(self) -> None:
        """Stop this rank's writer, if one is running, and discard its checkpoint."""
        for call in self.calls.async_calls:
            call.async_caller.close(abort=True)
        self.calls.async_calls.clear()
        self.path = None

    def _on_main(self, act: Callable[[], None]) -> None:
        if fault := self.groups.on_main(act):
            raise self._failure(fault)

    def _failure(self, fault: str) -> manifest.CheckpointError:
        path, self.path = self.path, None
        assert path is not None
        # A full disk hides the reason of the failure: torch's writer then complains about a file position.
        free = next((shutil.disk_usage(folder).free for folder in path.parents if folder.exists()), 0)
        return manifest.CheckpointError(
            f"checkpoint {str(path)!r}: {fault}, and no new checkpoint is there; see that the disk has space "
            f"({free / 1e9:.2f} GB are free) and no process of the run was killed, and save again."
        )


def _in_words(reason: BaseException) -> str:
    """Return the text of a writer's error. Megatron's text for a killed process is replaced by one that says so."""
    return "its process was killed" if "results_queue should not be empty" in str(reason) else str(reason)


def _carry(model_folder: str | Path, target: Path) -> None:
    """Copy the tensors that are not trained from the model's folder to the checkpoint `target`."""
    if names := tensors_without_rule(model_folder):
        (target / CARRIED).mkdir()
        hf_files.write_tensors(target / CARRIED, whole_tensors(model_folder, names))


def carried_by(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the checkpoint holds unchanged from the model's folder."""
    if (checkpoint / CARRIED).is_dir():
        yield from whole_tensors(checkpoint / CARRIED)


def _write_and_sum(
    write: Callable[..., None],
    carried_from: str | Path | None,
    aside: Path,
    rank: int,
    niceness: int,
    trainer: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run Megatron's writer, then compute the checksums of this rank's files while they are in the page cache.

    If a child process is killed, Megatron's writer would wait for it forever. A SIGCHLD handler ends the writer
    instead.
    """
    process_exit.die_with(trainer)
    process_exit.let_go_of_sockets()
    for number in (signal.SIGINT, *SIGNALS):
        signal.signal(number, signal.SIG_IGN)  # these signals are meant for the trainer, which waits for this process
    os.register_at_fork(after_in_child=functools.partial(_join_writer, os.getpid()))
    signal.signal(signal.SIGCHLD, lambda *_: _fail_with_children(args[-1]))  # args[-1] is Megatron's queue of results
    os.nice(niceness)
    carried: list[Path] = []
    if carried_from is not None:
        try:
            _carry(carried_from, aside)
        except (OSError, ValueError, SafetensorError) as error:
            args[-1].put(RuntimeError(f"{carried_from}: {error}"))
            os._exit(1)
        carried = sorted((aside / CARRIED).glob("*"))
    write(*args, **kwargs)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    manifest.write_part(aside, sorted(aside.glob(f"__{rank}_*")) + carried, name=str(rank))


def _join_writer(writer: int) -> None:
    process_exit.die_with(writer)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _fail_with_children(results: Any) -> None:
    """If a child process has failed, report the failure as the writer's result, and exit.

    The writer's other children end with it.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if code := os.waitstatus_to_exitcode(ended[1]):
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                results.put(RuntimeError(f"process {ended[0]}, which wrote a file of it, {how}"))
                os._exit(1)


def model_state(chunks: list[Any], groups: ParallelGroups, *, adapters: bool = False) -> dict[str, Any]:
    """Return the weights, or only the adapters, as shards. They are named by global layer number, for any chunk count.

    The states of quantization recipes are omitted: only some kinds of layers have them, and they are empty here.
    """
    models: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        state = chunk.sharded_state_dict(metadata=_metadata(groups)).items()
        kept = {name: part for name, part in state if RECIPE not in name and (is_adapter(name) or not adapters)}
        models[f"model{number}"] = kept
    return models


def training_state(engine: MicrobatchEngine) -> tuple[dict[str, Any], list[OptimizerShards]]:
    """Return the state to save or to load: weights and optimizer as shards, schedule, version, random states.

    The second result is the list of the distributed optimizers' shards. After a load, call `take_over` on each of them.
    """
    start_adam(engine.optimizer)
    models = model_state(engine.chunks, engine.groups, adapters=engine.adapters is not None)
    parts, shards = engine.optimizer.chained_optimizers, []
    if engine.config.optimizer.distributed:
        shards = [OptimizerShards(part, models) for part in parts]
        states = {number: part.state() for number, part in enumerate(shards)}
        optimizer = states if len(states) > 1 else states[0]
    else:
        optimizer = engine.optimizer.sharded_state_dict(models, metadata=_metadata(engine.groups))
        _keep_step_count(optimizer, parts)
        for number, part in enumerate(parts):
            if not part.get_parameters():  # the main rank's empty list would be taken for the state of every rank
                optimizer[number].pop("fp32_from_fp16_params", None)
    state = models | {
        "optimizer": optimizer,
        "scheduler": engine.scheduler.state_dict(),
        "version": engine.version,
        "is_distributed": engine.config.optimizer.distributed,
        "dtype": engine.config.model.dtype,
        "layout": _layout(engine.groups),
        "random": _random_state(engine.groups, _layout(engine.groups)),
        "lora": _lora_state(engine),
        "has_draft": False,
    }
    if engine.draft is not None:
        state |= engine.draft.checkpoint_state(_metadata(engine.groups))
    return state, shards


def _lora_state(engine: MicrobatchEngine) -> dict[str, Any]:
    """Return the LoRA options and the checksum of the frozen weights. For a model without adapters, return {}."""
    if engine.adapters is None:
        return {}
    lora = dataclasses.asdict(engine.config.lora)
    lora.pop("path")  # the adapters' initial values do not matter any more
    return lora | {"base": engine.adapters.sum_of_base}


def _check_lora(engine: MicrobatchEngine, common: dict[str, Any], path: str) -> None:
    """Raise ValueError if the checkpoint's adapters have other options or were trained on other base weights."""
    mine, saved = _lora_state(engine), common.get("lora", {})
    if bool(mine) != bool(saved):
        holds, rank = ("adapters alone", saved["rank"]) if saved else ("a whole model, without adapters", 0)
        raise ValueError(
            f"lora.rank = {engine.config.lora.rank}: the checkpoint {path!r} holds {holds}; set lora.rank={rank}."
        )
    for key in mine.keys() - {"base"}:
        if mine[key] != saved[key]:
            raise ValueError(
                f"lora.{key} = {mine[key]}: the checkpoint {path!r} has {saved[key]}; give the same value."
            )
    if mine and mine["base"] != saved["base"]:
        raise ValueError(
            f"model.path = {engine.config.model.path!r}: holds other weights than the adapters of the checkpoint "
            f"{path!r} were trained on; give the model folder of that run."
        )


def _metadata(groups: ParallelGroups) -> dict[str, Any]:
    return {
        "chained_optim_avoid_prefix": True,  # otherwise names would contain an optimizer's position in its chain
        "singleton_local_shards": False,
        "dp_cp_group": groups.data_context.group,
    }


def _layout(groups: ParallelGroups) -> dict[str, int]:
    axes = ("tensor", "pipeline", "context", "expert", "expert_tensor")
    return {axis: getattr(groups, axis).size for axis in axes} | {"world_size": groups.world_size}


def start_adam(optimizer: Any) -> None:
    """Create Adam's state, which would otherwise be created by the first step. Existing state is kept."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if inner is None:  # this rank has no parameters of this kind
            continue
        if isinstance(inner, HybridDeviceOptimizer):
            _start_hybrid(inner)
        elif part.config.use_precision_aware_optimizer:
            for group in inner.param_groups:
                for parameter in group["params"]:
                    if not inner.state[parameter]:
                        inner.initialize_state(parameter, False)  # Megatron's own call omits the second argument
        else:
            part.init_state_fn(inner, part.config)
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            for state in inner.state.values():
                state.setdefault("step", torch.tensor(0.0))  # Megatron's initialization omits it


def _start_hybrid(optimizer: HybridDeviceOptimizer) -> None:
    """Create the state of a partly offloaded optimizer.

    It runs a step that changes no weight, and resets the step count.
    """
    if optimizer.state:
        return
    groups = [group | {"params": []} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group |= {name: before[name] for name in ("lr", "weight_decay")}
    for part in optimizer.sub_optimizers:
        for counted in (*part.param_groups, *part.state.values()):
            if "step" in counted:
                counted["step"] *= 0


def _keep_step_count(state: dict[Any, Any], optimizers: list[Any]) -> None:
    """Add the step count that all parameters share to the state, if it is missing.

    megatron.core 0.16 to 0.19 omits a count of 0.
    """
    for number, optimizer in enumerate(optimizers):
        part = state[number] if 0 in state else state
        inner = part.get("optimizer", part)
        # Only for an Adam with per-parameter counts: Transformer Engine's Adam does not expect one.
        if "state" in inner and optimizer.optimizer and optimizer_kinds.counts_by_parameter(optimizer.optimizer):
            inner["state"].setdefault("common_step", torch.tensor(0.0))


def _random_state(groups: ParallelGroups, saved_layout: dict[str, int]) -> ShardedObject:
    """Return this rank's random state, to save it or to load into it.

    saved_layout: the layout in which the checkpoint was saved. If this run's layout differs, all ranks load rank 0's
    state.
    """
    is_same = saved_layout == _layout(groups)
    return ShardedObject(
        f"random_state_{groups.rank if is_same else 0}",
        {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(),
            "tracker": get_cuda_rng_tracker().get_states(),
        },
        global_shape=(1,),
        global_offset=(0,),
        replica_id=0 if is_same else groups.rank,  # Megatron requires exactly one owner per object
    )


def is_checkpoint(path: str | Path) -> bool:
    return (Path(path) / manifest.NAME).is_file()


def load(path: str | Path, engine: MicrobatchEngine, *, with_optimizer: bool, is_checked: bool = False) -> None:
    """Restore a checkpoint in the same or another layout. Collective: every rank calls it.

    Raises ValueError if the folder is no checkpoint, lacks a required optimizer, or differs from this run in its LoRA
    options, base weights, dtype or schedule. Raises RuntimeError if a file was modified or contains code.
    with_optimizer: True to restore the optimizer, the schedule and the random states too.
    is_checked: True if the caller has already verified the files.
    """
    with refusing_code(path):
        common = _common_state(Path(path)) if is_checked else open_checkpoint(path, engine.groups)
        _check_lora(engine, common, str(path))
        # A checkpoint of a run without a draft head, or with another kind of it, leaves the engine's head as it is.
        draft = engine.draft if engine.draft is not None and engine.draft.is_in(common) else None
        if with_optimizer:
            _load_training(str(path), engine, common, draft)
        else:
            _load_weights(str(path), engine, draft)


def _load_weights(path: str, engine: MicrobatchEngine, draft: DraftHead | None) -> None:
    own = model_state(engine.chunks, engine.groups, adapters=engine.adapters is not None)
    if draft is not None:
        own |= draft.checkpoint_state(_metadata(engine.groups), with_moments=False)
    state = dist_checkpointing.load(own, path)
    _load_models(engine, state)
    if draft is not None:
        draft.load_checkpoint(state, with_moments=False)
    if engine.optimizer is not None:
        engine.optimizer.reload_model_params()


def _load_training(path: str, engine: MicrobatchEngine, common: dict[str, Any], draft: DraftHead | None) -> None:
    if "scheduler" not in common:  # a checkpoint written by megatron-rl convert
        raise ValueError(
            f"checkpoint {path!r}: holds weights only, no optimizer; load it with with_optimizer=False, or give "
            f"one written by save(with_optimizer=True)."
        )
    dtype = engine.config.model.dtype
    if common.get("dtype", dtype) != dtype:  # absent in checkpoints of earlier versions
        raise ValueError(
            f"model.dtype = {dtype!r}: the checkpoint {path!r} has {common['dtype']!r}, and its optimizer "
            f"continues in it; give the same value, or start a new run from its weights."
        )
    schedule = _continued_schedule(engine.scheduler.state_dict(), common["scheduler"], path)
    wanted, shards = training_state(engine)
    if draft is None:
        wanted.pop("draft", None)
    wanted["random"] = _random_state(engine.groups, common["layout"])  # under the names of the saved layout
    was_distributed, is_distributed = common["is_distributed"], engine.config.optimizer.distributed
    if is_distributed and not was_distributed:
        optimizer_kinds.ask_as_plain(wanted["optimizer"], path)
    elif was_distributed and not is_distributed:
        optimizer_kinds.ask_as_distributed(wanted["optimizer"])
    # A stage without experts has nothing to load into their optimizer, and Megatron's load drops empty entries.
    parts = dict(enumerate(engine.optimizer.chained_optimizers))
    idle = {n: part.state_dict() for n, part in parts.items() if not (is_distributed or part.get_parameters())}
    state = dist_checkpointing.load(wanted, path)
    for number in idle:
        state["optimizer"].pop(number, None)
    if is_distributed:
        state["optimizer"] = optimizer_kinds.arrange_as_distributed(state["optimizer"])
    elif was_distributed:
        state["optimizer"] = optimizer_kinds.arrange_as_plain(state["optimizer"])
    state["optimizer"] |= idle
    count = optimizer_kinds.step_count(common["optimizer"])
    optimizer_kinds.fit_adam(state["optimizer"], count, engine.optimizer.chained_optimizers)
    _load_models(engine, state)
    engine.optimizer.load_state_dict(state["optimizer"])
    for part in shards:
        part.take_over()
    if draft is not None:
        draft.load_checkpoint(state)
    engine.scheduler.load_state_dict(schedule)
    engine.version = state["version"]
    _set_random_state(state["random"], with_tracker=common["layout"] == _layout(engine.groups))


def draft_of(path: Path, groups: ParallelGroups) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's draft head, in float32; {} if it has no draft head. Every rank calls it."""
    if not _common_state(path).get("has_draft"):
        return {}
    wanted = {"draft": whole_in_checkpoint({}, groups)}
    return dict(dist_checkpointing.load(wanted, str(path))["draft"]["weights"])


def has_mtp_layer(path: Path) -> bool:
    return "mtp_updates" in _common_state(path)


def mtp_layer_of(path: Path, arch: Architecture, groups: ParallelGroups) -> Iterator[tuple[str, Tensor]]:
    """Yield the HF tensors of a checkpoint's multi-token-prediction layer. Call it in a single process.

    arch: the architecture of the whole model.
    """
    dtype, folder = _common_state(path)["dtype"], path / CARRIED
    config = EngineConfig(model=ModelConfig(path=str(path / HF_FILES), dtype=dtype), draft=DraftConfig(kind="mtp"))
    shapes = hf_shapes(arch.mtp_layer())
    # A router's bias is not trained, so the checkpoint has it as the model's folder had.
    source: WeightSource = hf_files.HFFolder(folder, shapes) if folder.is_dir() else hf_files.RandomWeights(shapes, 0)
    layer = MTPHead(arch, config, groups, source, layer_config(arch, config, {}), device=torch.device("cpu"))
    wanted = layer.checkpoint_state(_metadata(groups), with_moments=False)
    layer.load_checkpoint(dist_checkpointing.load(wanted, str(path)), with_moments=False)
    yield from layer.hf_tensors()


def open_checkpoint(path: str | Path, groups: ParallelGroups) -> dict[str, Any]:
    """Check every file against the manifest and return the unsharded state. Collective: each rank checks some files."""
    path = Path(path)
    if groups.is_main:
        hf_files.recover_folder(path)  # finishes a save that was killed between its two renames
    dist.barrier(group=groups.control)
    if not is_checkpoint(path):
        raise ValueError(
            f"checkpoint {str(path)!r}: no {manifest.NAME} there; give a folder written by save(with_optimizer=True) "
            f"or megatron-rl convert."
        )
    for fault in manifest.faults_for_all(path, groups):
        raise RuntimeError(f"checkpoint {str(path)!r}: {fault}; copy it again, or take an earlier checkpoint.")
    return _common_state(path)


def _common_state(path: Path) -> dict[str, Any]:
    """Read the unsharded state. Its pickle is checked here, because megatron.core's checks differ between versions."""
    # newer versions store it with the sharded objects, which are checked as they are read
    if (path / COMMON).is_file():
        check_objects(path / COMMON)
    return dist_checkpointing.load_common_state_dict(str(path))


def _continued_schedule(mine: dict[str, Any], saved: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the saved schedule. Raises ValueError if it is not the schedule of this run.

    Constant schedules may differ in length.
    """
    if mine["lr_decay_style"] == saved["lr_decay_style"] == "constant":
        saved = saved | {"lr_decay_steps": mine["lr_decay_steps"]}
    for name, key in SCHEDULE_KEYS.items():
        if mine[name] != saved[name]:
            raise ValueError(
                f"{key} = {mine[name]}: the checkpoint {path!r} has {saved[name]}, and its schedule continues as it "
                f"began; give the same value, or start a new run from its weights."
            )
    return saved


def _load_models(engine: MicrobatchEngine, state: dict[str, Any]) -> None:
    for number, chunk in enumerate(engine.chunks):
        own = chunk.state_dict()
        recipes = {name: None for name in own if RECIPE in name}
        frozen = own if engine.adapters is not None else {}
        chunk.load_state_dict(frozen | recipes | state[f"model{number}"])


def _set_random_state(states: dict[str, Any], *, with_tracker: bool) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    if with_tracker:  # its seeds belong to ranks of a layout; a different layout keeps its initial seeds
        get_cuda_rng_tracker().set_states(states["tracker"])
