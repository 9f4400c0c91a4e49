"""One engine for the models of several clients: adapters on one base, or whole models in turn.

A model is its weights, its optimizer's state and the gradients that wait for its next optimizer step. One model, the
occupant, is in Megatron's own tensors. The others are kept on the device as long as there is room, else in host memory.

Passes of several models with adapters run as one: Megatron's schedule gets the microbatches of all of them. Each
microbatch has only rows of one model, so its results are bit-identical to those of a pass of this model alone. If it
had rows of several models, they might not be: the last bits of a row of a matrix product may depend on the number of
rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.adapter_sums import sum_of, write_sums
from megatron_rl.api import LogprobLoss
from megatron_rl.batch.exchange import by_token, own_share
from megatron_rl.config import LoraConfig
from megatron_rl.engine import checkpoint
from megatron_rl.engine.manifest import CheckpointError
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.offload import tensors_of
from megatron_rl.engine.one_copy import one_copy
from megatron_rl.engine.packed_rows import PackedRows
from megatron_rl.parallel import ParallelGroups
from megatron_rl.training_server.wire import Datum
from megatron_rl.types import FinetuneSpec, MicroBatch, TrajectoryBatch, prefix_sums
from megatron_rl.weights.adapter_rules import FirstAdapters, adapter_shapes, write_peft_folder
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.hf_files import replace_folder
from megatron_rl.weights.peft_config import PEFT_PREFIX

TARGETS = "target_tokens"


@dataclasses.dataclass(frozen=True)
class Adapted:
    """The adapters that a client asked for. rank 0: there are none, and the client trains the whole model."""

    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True


@dataclasses.dataclass(frozen=True)
class AdamStep:
    """Options of one optimizer step. clip: maximum gradient norm; 0 disables clipping."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float


@dataclasses.dataclass(eq=False)
class ModelState:
    """A client's model.

    kept: copy of this rank's part of the weights and the optimizer's state; None while the model occupies the engine.
    steps: the step count of each of the optimizer's parameter groups, valid while `kept` is set. gradients: sums since
    the last optimizer step; None if there are none.
    """

    adapted: Adapted
    kept: list[Tensor] | None = None
    steps: list[Any] = dataclasses.field(default_factory=list)
    gradients: list[Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one model: its data and its loss.

    The targets of all data have the shape `[T]`, or all have `[T, K]`.
    """

    model: ModelState
    data: list[Datum]
    loss: LogprobLoss


class SharedEngine(MegatronEngine):
    """An engine that several clients' models share.

    Collective: every rank calls every method, with the same arguments.

    engine = SharedEngine(config.actor)
    engine.initialize()
    model = engine.new_model(Adapted(rank=8, seed=0))
    ((loss, logprobs),) = engine.compute([Pass(model, data, make_loss("cross_entropy", {}))], with_gradients=True)
    engine.optimizer_step(model, AdamStep(1e-4, (0.9, 0.95), 1e-12, 0.0, 0.0))
    """

    groups: ParallelGroups  # after `initialize`
    occupant: ModelState | None = None
    kept_on_device = 0
    """Maximum number of models that are kept on the device in addition to the occupant."""

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        super().initialize(addr, ft_spec)
        checkpoint.start_adam(self.optimizer)
        self._buffers = tensors_of(self)[2]
        self._waiting: set[ModelState] = set()  # those kept on the device
        self._first = [tensor.to("cpu", copy=True) for tensor in self._own()] if self.adapters is None else []

    def _own(self) -> list[Tensor]:
        """Return all tensors, apart from gradients, that differ from model to model. Their order is always the same."""
        trained = self.parameters() if self.adapters is None else self.adapters.parameters
        found = [parameter.data for parameter in trained if parameter.requires_grad]
        storages = {weight.untyped_storage().data_ptr() for weight in found}
        for part in self.optimizer.chained_optimizers:
            for group in [] if part.optimizer is None else part.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.untyped_storage().data_ptr() not in storages:  # a main parameter of its own
                        found.append(parameter.data)
                    state = part.optimizer.state[parameter]
                    found += [state[name] for name in sorted(state) if torch.is_tensor(state[name])]
        return found

    # -- models

    def new_model(self, adapted: Adapted) -> ModelState:
        """Put a new model into the engine, with Adam's state at 0.

        The model's adapters do not yet change the base's outputs. If the engine trains whole models, the model has the
        base's weights.
        """
        self._leave()
        self.occupant = ModelState(adapted)
        if self.adapters is None:
            for mine, first in zip(self._own(), self._first, strict=True):
                mine.copy_(first)
        else:
            self.adapters.set_scale(self._scale_of(adapted))
            self._load_adapters(PaddedAdapters(self.arch, self.config.lora, adapted))
        self._forget_moments()
        return self.occupant

    def drop(self, model: ModelState) -> None:
        self._waiting.discard(model)
        if self.occupant is model:
            self.occupant = None

    def is_at_hand(self, model: ModelState) -> bool:
        """Return True if `compute` can run the model together with others.

        The model must be on the device, and the engine must train adapters.
        """
        return self.adapters is not None and (model is self.occupant or model in self._waiting)

    def occupy(self, model: ModelState) -> None:
        """Copy `model` into Megatron's tensors.

        The model that was in them is first copied to the device or host memory.
        """
        if self.occupant is model:
            return
        self._waiting.discard(model)
        self._leave()
        assert model.kept is not None
        for mine, kept in zip(self._own(), model.kept, strict=True):
            mine.copy_(kept)
        for group, step in zip(self.optimizer.param_groups, model.steps, strict=True):
            group.update({} if step is None else {"step": step})
        if model.gradients is not None:
            model.gradients = [part.to(self.device) for part in model.gradients]
        model.kept, self.occupant = None, model
        if self.adapters is not None:
            self.adapters.set_scale(self._scale_of(model.adapted))

    def _leave(self) -> None:
        model, self.occupant = self.occupant, None
        if model is None:
            return
        place = torch.device("cpu")
        if len(self._waiting) < self.kept_on_device:
            self._waiting.add(model)
            place = self.device
        model.kept = [tensor.to(place, copy=True) for tensor in self._own()]
        model.steps = [group.get("step") for group in self.optimizer.param_groups]
        if model.gradients is not None:
            model.gradients = [part.to(place) for part in model.gradients]

    def _scale_of(self, adapted: Adapted) -> float:
        return self.config.lora.alpha / adapted.rank

    def _forget_moments(self) -> None:
        """Reset Adam's state to that before the first step, and copy the weights to the main parameters."""
        for part in self.optimizer.chained_optimizers:
            if part.optimizer is None:  # this rank has no parameters of this kind
                continue
            for state in part.optimizer.state.values():
                for name in state.keys() & {"step", "exp_avg", "exp_avg_sq"}:
                    state[name] = state[name].zero_() if torch.is_tensor(state[name]) else 0
            for group in part.optimizer.param_groups:
                group.update({"step": 0} if "step" in group else {})
        self.optimizer.reload_model_params()

    # -- computing

    def compute(self, passes: Sequence[Pass], *, with_gradients: bool) -> list[tuple[float, list[Tensor]]]:
        """Compute the passes of different models, in one run of the schedule.

        If there are several, all their models must be at hand. Returns for each pass the loss, and each datum's
        log-probabilities in the shape of its targets. with_gradients: add each loss's gradient to its model's
        gradients. If an error is raised, none is added.
        """
        for one in passes:
            if not self.is_at_hand(one.model):
                assert len(passes) == 1, "a pass of several models needs all of them at hand"
                self.occupy(one.model)
        self._activate()
        batches = [batch_of(one.data) for one in passes]
        shares = [own_share(batch, self.groups) for batch in batches]
        for one, share in zip(passes, shares, strict=True):
            self.check_loss(one.loss, share)
        packs = [self._pack(share, final_rows=False) for share in shares]
        number_of = {id(microbatch): number for number, pack in enumerate(packs) for microbatch in pack}
        stages = [self._stage_of(one) for one in passes]

        def last_stage(hidden: Tensor, microbatch: MicroBatch, packed: PackedRows) -> tuple[Tensor, Tensor, Any]:
            return stages[number_of[id(microbatch)]](hidden, microbatch, packed)

        every = [microbatch for pack in packs for microbatch in pack]
        with torch.set_grad_enabled(with_gradients):
            kept = self._run_passes(passes, every, last_stage, number_of, with_gradients=with_gradients)
        found = []
        for one, batch, share, pack in zip(passes, batches, shares, packs, strict=True):
            own, kept = kept[: len(pack)], kept[len(pack) :]
            totals = self._global_sums([sums for sums, _, _ in own], 0)
            rows = [logprobs for _, _, logprobs in own]
            found.append((totals["loss"], self._by_datum(one.data, batch, share, pack, rows)))
        return found

    def _run_passes(
        self,
        passes: Sequence[Pass],
        microbatches: list[MicroBatch],
        last_stage: Callable[..., tuple[Tensor, Tensor, Any]],
        number_of: dict[int, int],
        *,
        with_gradients: bool,
    ) -> list[Any]:
        """Run the schedule once. Each microbatch is computed with the adapters of its pass.

        number_of: id() of a microbatch -> index of its pass.
        """
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()  # gradients of the last step, which are views of the buffers
        sums: list[list[Tensor]] = [[] for _ in passes]
        prepare = None
        if self.adapters is not None:
            adapters = self.adapters
            lent = [self._parts_of(one.model, sums[n] if with_gradients else None) for n, one in enumerate(passes)]

            def prepare(microbatch: MicroBatch) -> None:
                number = number_of[id(microbatch)]
                adapters.lend(lent[number], self._scale_of(passes[number].model.adapted))

        reduce = self.tf_config.finalize_model_grads_func

        def complete(chunks: list[Any], weight: Tensor, **options: Any) -> None:
            """Reduce the gradients of each pass over the ranks separately, and add them to its model's gradients."""
            for one, parts in zip(passes, sums, strict=True):
                if self.adapters is not None:
                    for chunk in self.wrapped:
                        chunk.zero_grad_buffer()
                    for parameter, part in zip(self.adapters.parameters, parts, strict=True):
                        _main_grad(parameter).copy_(part)
                reduce(chunks, weight.clone(), **options)
                self._keep_gradients(one.model)

        self.tf_config.finalize_model_grads_func = complete
        try:
            return self._run(microbatches, last_stage, forward_only=not with_gradients, prepare=prepare)
        finally:
            self.tf_config.finalize_model_grads_func = reduce
            if self.adapters is not None:
                self.adapters.give_back()

    def _parts_of(self, model: ModelState, sums: list[Tensor] | None) -> list[Tensor]:
        """Return a model's adapters as autograd leaves that share the memory of the adapters.

        sums: None, or an empty list. It is filled with one tensor per leaf, to which the leaf's gradients will be
        added.
        """
        assert self.adapters is not None
        own = self.adapters.parameters
        if self.occupant is model:
            values = [parameter.data for parameter in own]
        else:
            assert model.kept is not None
            values = model.kept[: len(own)]
        leaves = [value.detach() for value in values]
        if sums is not None:
            for parameter, leaf in zip(own, leaves, strict=True):
                sums.append(torch.zeros_like(_main_grad(parameter)))
                hook: Any = leaf.requires_grad_().register_post_accumulate_grad_hook
                hook(_adding_to(sums[-1]))
        return leaves

    def _keep_gradients(self, model: ModelState) -> None:
        if model.gradients is None:
            model.gradients = [torch.zeros_like(buffer) for buffer in self._buffers]
        # Summed outside of Megatron's buffers: their reduction over ranks would count an earlier pass again.
        for total, buffer in zip(model.gradients, self._buffers, strict=True):
            total += buffer

    def _stage_of(self, one: Pass) -> Callable[..., tuple[Tensor, Tensor, Any]]:
        if one.data[0].inputs[TARGETS].ndim == 1:
            return self._last_stage(one.loss, _divides_nothing, learns=False)
        return self._last_stage_of_several

    def _last_stage_of_several(
        self, hidden: Tensor, microbatch: MicroBatch, packed: PackedRows
    ) -> tuple[Tensor, Tensor, Any]:
        """Compute the cross entropy of tokens with several targets each, one target after the other."""
        rows = one_copy(dict(microbatch.rows.items()), self.device)
        columns: list[Tensor] = []
        weights: list[Tensor] = []
        while (name := column_of(TARGETS, len(columns))) in rows:
            labels = torch.where(rows["labels"] < 0, rows["labels"], rows[name])
            weights.append(rows[column_of("weights", len(columns))])
            columns.append(self._head.logprobs(hidden, {"labels": labels}, packed, 1.0, with_entropy=False)[0])
        logprobs = torch.stack(columns, dim=1)
        loss = -(torch.stack(weights, dim=1) * logprobs).sum()  # untrained rows have log-probabilities of 0
        kept = {"loss": loss.detach().float().clone()}, 0, logprobs.detach().float()
        return loss, _divides_nothing({}), kept

    def _by_datum(
        self,
        data: list[Datum],
        batch: TrajectoryBatch,
        share: TrajectoryBatch,
        microbatches: list[MicroBatch],
        rows: list[Tensor],
    ) -> list[Tensor]:
        """Return each datum's log-probabilities.

        rows: log-probabilities of each of this rank's microbatches; [] on earlier pipeline stages.
        """
        width = data[0].inputs[TARGETS].shape[1:]
        columns = []
        for place in [(slice(None), number) for number in range(width[0])] if width else [slice(None)]:
            tokens = self._by_token(share, microbatches, [part[place].contiguous() for part in rows])
            columns.append(by_token(batch, self.groups, functools.partial(_known, tokens)))
        of_tokens = torch.stack(columns, dim=1) if width else columns[0]
        return [part[1:] for part in torch.split(of_tokens, batch.lengths.tolist())]

    def _pack(self, batch: TrajectoryBatch, *, final_rows: bool) -> list[MicroBatch]:
        """Pack the batch, with the clients' targets as labels. These need not be the next tokens."""
        microbatches = super()._pack(batch, final_rows=final_rows)
        for microbatch in microbatches:
            labels = microbatch.rows["labels"]
            name = TARGETS if TARGETS in microbatch.rows.keys() else column_of(TARGETS, 0)
            microbatch.rows["labels"] = torch.where(labels < 0, labels, microbatch.rows[name])
        return microbatches

    def optimizer_step(self, model: ModelState, step: AdamStep) -> tuple[bool, float]:
        """Take an optimizer step with the model's gradients unless they are NaN or infinite, and discard them.

        Returns whether the step was taken, and the gradients' norm before clipping.
        """
        self.occupy(model)
        self._activate()
        assert model.gradients is not None
        for buffer, total in zip(self._buffers, model.gradients, strict=True):
            buffer.copy_(total)
        model.gradients = None
        options = {"lr": step.lr, "betas": step.betas, "eps": step.eps, "weight_decay": step.weight_decay}
        for part in self.optimizer.chained_optimizers:
            part.config.clip_grad = step.clip
            for group in [] if part.optimizer is None else part.optimizer.param_groups:
                group.update(options)
        applied, norm = self.optimizer.step_if(lambda norm: self.is_sound(0.0, norm))
        return applied, norm

    # -- files

    def save_model(self, model: ModelState, folder: Path) -> None:
        """Write the model's weights and optimizer state. The folder appears under its name only once it is complete."""
        self.occupy(model)
        self.save(folder, with_optimizer=True)

    def load_model(self, model: ModelState, folder: Path, *, with_optimizer: bool) -> None:
        """Load a folder that `save_model` has written, and discard the model's gradients.

        with_optimizer: False leaves the saved optimizer state out, so that Adam starts anew.
        """
        self.occupy(model)
        model.gradients = None
        self.load(folder, with_optimizer=with_optimizer)
        if not with_optimizer:
            self._forget_moments()

    def export_model(self, model: ModelState, folder: Path) -> None:
        """Write the model's weights for a rollout server: adapters in PEFT's format, or else a Hugging Face folder."""
        self.occupy(model)
        self._activate()
        if self.adapters is None:
            self.write_weights(folder)
            return
        lora = dataclasses.replace(self.config.lora, rank=model.adapted.rank)
        tensors = {name: cut_to_rank(name, tensor, lora.rank) for name, tensor in self.adapter_tensors()}
        aside = folder.with_name(f".{folder.name}.partial")

        def write() -> None:
            write_peft_folder(aside, tensors, self.arch, lora, self.config.model.path)
            write_sums(aside, {PEFT_PREFIX + name: sum_of(tensor) for name, tensor in tensors.items()})
            replace_folder(aside, folder)

        if fault := self.groups.on_main(write):
            raise CheckpointError(f"sampler weights: {fault}; see that the disk has space, and save again.")


def _divides_nothing(rows: Mapping[str, Tensor]) -> Tensor:
    """Return 0 as the loss weight, so that the engine does not divide the loss: clients' losses are sums."""
    return torch.zeros((), dtype=torch.int)


def column_of(name: str, number: int) -> str:
    """Return the name of the batch column that holds number `number` of a token's several values of an input."""
    return f"{name}.{number}"


def _main_grad(parameter: Tensor) -> Tensor:
    """Return the buffer view in which Megatron sums the parameter's gradients."""
    found: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return found


def _adding_to(total: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that adds a leaf's gradient to `total`, in the dtype of `total`, and clears it.

    Megatron's own hooks do the same.
    """

    def add(leaf: Tensor) -> None:
        assert leaf.grad is not None
        total.add_(leaf.grad)
        leaf.grad = None

    return add


def _known(tokens: Tensor, _: TrajectoryBatch) -> Tensor:
    return tokens


def batch_of(data: list[Datum]) -> TrajectoryBatch:
    """Return each datum as a trajectory of T + 1 tokens. Entry t + 1 of its columns describes the target of token t.

    An input of the shape `[T, K]` becomes K columns (see `column_of`).
    """
    parts = [(datum.tokens, datum.inputs[TARGETS].view(len(datum.tokens), -1)[-1:, 0]) for datum in data]
    tokens = {"input_ids": torch.cat([part for pair in parts for part in pair])}
    lengths = torch.tensor([len(datum.tokens) + 1 for datum in data])
    tokens["loss_mask"] = torch.ones(int(lengths.sum()), dtype=torch.bool)
    tokens["loss_mask"][prefix_sums(lengths)[:-1]] = False
    for name, first in data[0].inputs.items():
        for number, key in [(0, name)] if first.ndim == 1 else [(n, column_of(name, n)) for n in range(first.shape[1])]:
            columns = [datum.inputs[name].view(len(datum.tokens), -1)[:, number] for datum in data]
            tokens[key] = torch.cat([part for column in columns for part in (column.new_zeros(1), column)])
    return TrajectoryBatch(tokens, {}, prefix_sums(lengths))


def cut_to_rank(name: str, tensor: Tensor, rank: int) -> Tensor:
    """Remove the rows or columns that pad an adapter's tensor to the engine's rank. rank: the adapter's own rank."""
    return (tensor[:rank] if name.endswith("lora_A.weight") else tensor[:, :rank]).contiguous()


class PaddedAdapters:
    """The initial adapters of a client's new model, padded with zeros to the engine's rank.

    Adapters of matrices that the client does not train are all zero. If rows of lora_A and the same columns of lora_B
    are both zero, so are their gradients, and they stay zero.
    """

    def __init__(self, arch: Architecture, lora: LoraConfig, adapted: Adapted) -> None:
        self.shapes, self.rank, self.adapted = adapter_shapes(arch, lora), lora.rank, adapted
        self.first = FirstAdapters(arch, dataclasses.replace(lora, rank=adapted.rank), adapted.seed)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        if name not in self.shapes:  # a projection of a fused matrix, without an adapter
            return torch.zeros(stop - start, self.rank)
        full = torch.zeros(self.shapes[name])
        if self.adapted.attention if ".self_attn." in name or ".linear_attn." in name else self.adapted.mlp:
            rows = self.adapted.rank if name.endswith("lora_A.weight") else self.shapes[name][0]
            own = self.first.read(name, 0, 0, rows)
            full[: own.shape[0], : own.shape[1]] = own
        return full.narrow(dim, start, stop - start)
