"""One engine that the models of several clients occupy in turn: adapters on one base, or whole models.

A model is its weights, its optimizer's state and the gradients that wait for its next optimizer step. All of it is in
host memory while another model has the engine. Copies are exact, so that a model's results are to the bit those that it
would have alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.adapter_sums import sum_of, write_sums
from megatron_rl.api import LogprobLoss
from megatron_rl.batch.exchange import by_token
from megatron_rl.config import LoraConfig
from megatron_rl.engine import checkpoint
from megatron_rl.engine.adapters import Adapter
from megatron_rl.engine.manifest import CheckpointError
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.offload import tensors_of
from megatron_rl.training_server.wire import Datum
from megatron_rl.types import FinetuneSpec, MicroBatch, TrajectoryBatch, prefix_sums
from megatron_rl.weights.adapter_rules import FirstAdapters, adapter_shapes, write_peft_folder
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.hf_files import replace_folder
from megatron_rl.weights.peft_config import PEFT_PREFIX

TARGETS = "target_tokens"


@dataclasses.dataclass(frozen=True)
class Adapted:
    """The adapters that a client asked for. rank 0: it trains the whole model."""

    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True


@dataclasses.dataclass(frozen=True)
class AdamStep:
    """Options of one optimizer step. `clip` 0 clips nothing."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float


@dataclasses.dataclass(eq=False)
class ModelState:
    """A client's model.

    kept: this rank's part of weights and optimizer, in host memory, or None while the model occupies the engine. steps:
    the counts that an optimizer keeps by group. gradients: sums since the last optimizer step, or None.
    """

    adapted: Adapted
    kept: list[Tensor] | None = None
    steps: list[Any] = dataclasses.field(default_factory=list)
    gradients: list[Tensor] | None = None


class SharedEngine(MegatronEngine):
    """Collective: every rank calls every method, with the same arguments.

    engine = SharedEngine(config.actor)
    engine.initialize()
    model = engine.new_model(Adapted(rank=8, seed=0))
    loss, logprobs = engine.add_gradients(model, data, make_loss("cross_entropy", {}))
    engine.optimizer_step(model, AdamStep(1e-4, (0.9, 0.95), 1e-12, 0.0, 0.0))
    """

    occupant: ModelState | None = None

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        super().initialize(addr, ft_spec)
        checkpoint.start_adam(self.optimizer)
        self._buffers = tensors_of(self)[2]
        self._first = [tensor.to("cpu", copy=True) for tensor in self._own()] if self.adapters is None else []

    def _own(self) -> list[Tensor]:
        """Return all tensors that differ from model to model, besides gradients, in an order that loading keeps."""
        found = [parameter.data for parameter in self.parameters() if parameter.requires_grad]
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
        """Start a model: new adapters that change nothing yet, or the base's own weights; and Adam's state at 0."""
        self._leave()
        self.occupant = ModelState(adapted)
        if self.adapters is None:
            for mine, first in zip(self._own(), self._first, strict=True):
                mine.copy_(first)
        else:
            self._scale_adapters(adapted)
            self._load_adapters(PaddedAdapters(self.arch, self.config.lora, adapted))
        self._forget_moments()
        return self.occupant

    def drop(self, model: ModelState) -> None:
        if self.occupant is model:
            self.occupant = None

    def occupy(self, model: ModelState) -> None:
        """Put `model` into the engine, and the one that was in it into host memory."""
        if self.occupant is model:
            return
        self._leave()
        assert model.kept is not None
        for mine, kept in zip(self._own(), model.kept, strict=True):
            mine.copy_(kept)
        for group, step in zip(self.optimizer.param_groups, model.steps, strict=True):
            group.update({} if step is None else {"step": step})
        if model.gradients is not None:
            model.gradients = [part.to(self.device) for part in model.gradients]
        model.kept, self.occupant = None, model
        self._scale_adapters(model.adapted)

    def _leave(self) -> None:
        model, self.occupant = self.occupant, None
        if model is None:
            return
        model.kept = [tensor.to("cpu", copy=True) for tensor in self._own()]
        model.steps = [group.get("step") for group in self.optimizer.param_groups]
        if model.gradients is not None:
            model.gradients = [part.cpu() for part in model.gradients]

    def _scale_adapters(self, adapted: Adapted) -> None:
        for chunk in self.chunks:
            for module in chunk.modules():
                if isinstance(module, Adapter):
                    module.scale = self.config.lora.alpha / adapted.rank

    def _forget_moments(self) -> None:
        """Set Adam's state to that before the first step, and its main parameters to the weights."""
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

    @torch.no_grad()
    def logprobs(self, model: ModelState, data: list[Datum], loss: LogprobLoss) -> tuple[float, list[Tensor]]:
        """Return the loss, and each datum's log-probabilities `[T]` of its targets."""
        return self._sums(model, data, loss, forward_only=True)

    def add_gradients(self, model: ModelState, data: list[Datum], loss: LogprobLoss) -> tuple[float, list[Tensor]]:
        """Add the gradient of the loss to the model's; return what `logprobs` returns."""
        self.occupy(model)
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()  # gradients of the last step, which are views of the buffers
        found = self._sums(model, data, loss, forward_only=False)
        if model.gradients is None:
            model.gradients = [torch.zeros_like(buffer) for buffer in self._buffers]
        # Summed outside of Megatron's buffers: their reduction over ranks would count an earlier pass once more.
        for total, buffer in zip(model.gradients, self._buffers, strict=True):
            total += buffer
        return found

    def _sums(
        self, model: ModelState, data: list[Datum], loss: LogprobLoss, *, forward_only: bool
    ) -> tuple[float, list[Tensor]]:
        self.occupy(model)
        totals: dict[str, float] = {}

        def compute(share: TrajectoryBatch) -> Tensor:
            found, logprobs = self._accumulate(share, loss, _divides_nothing, forward_only=forward_only)
            totals.update(found)
            assert logprobs is not None
            return logprobs

        self._activate()
        batch = batch_of(data)
        of_tokens = by_token(batch, self.groups, compute)
        return totals["loss"], [part[1:] for part in of_tokens.split(batch.lengths.tolist())]

    def _pack(self, batch: TrajectoryBatch, *, final_rows: bool) -> list[MicroBatch]:
        """Take the labels from the targets, which need not be the next tokens."""
        microbatches = super()._pack(batch, final_rows=final_rows)
        for microbatch in microbatches:
            labels = microbatch.rows["labels"]
            microbatch.rows["labels"] = torch.where(labels < 0, labels, microbatch.rows[TARGETS])
        return microbatches

    def optimizer_step(self, model: ModelState, step: AdamStep) -> tuple[bool, float]:
        """Apply and forget the model's gradients. Return False if they are not finite, and their norm before clipping.

        Gradients that are not finite change nothing.
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
        return self.optimizer.step_if(lambda norm: self.is_sound(0.0, norm))

    # -- files

    def save_model(self, model: ModelState, folder: Path) -> None:
        """Write weights and optimizer. The folder appears under its name when it is complete."""
        self.occupy(model)
        self.save(folder, with_optimizer=True)

    def load_model(self, model: ModelState, folder: Path, *, with_optimizer: bool) -> None:
        """Load what `save_model` wrote. Without the optimizer, Adam starts anew. Gradients are forgotten."""
        self.occupy(model)
        model.gradients = None
        self.load(folder, with_optimizer=with_optimizer)
        if not with_optimizer:
            self._forget_moments()

    def export_model(self, model: ModelState, folder: Path) -> None:
        """Write the weights for a rollout server: adapters in PEFT's format, or a whole Hugging Face folder."""
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
    """Return the loss weight 0, by which the engine divides nothing: the client's losses are sums."""
    return torch.zeros((), dtype=torch.int)


def batch_of(data: list[Datum]) -> TrajectoryBatch:
    """Return the data as trajectories of T + 1 tokens, whose entries t + 1 describe the targets of tokens t."""
    last = [datum.inputs[TARGETS][-1:] for datum in data]
    tokens = {
        "input_ids": torch.cat([part for pair in zip((d.tokens for d in data), last, strict=True) for part in pair])
    }
    lengths = torch.tensor([len(datum.tokens) + 1 for datum in data])
    tokens["loss_mask"] = torch.ones(int(lengths.sum()), dtype=torch.bool)
    tokens["loss_mask"][prefix_sums(lengths)[:-1]] = False
    for name in data[0].inputs:
        columns = [datum.inputs[name] for datum in data]
        tokens[name] = torch.cat([part for column in columns for part in (column.new_zeros(1), column)])
    return TrajectoryBatch(tokens, {}, prefix_sums(lengths))


def cut_to_rank(name: str, tensor: Tensor, rank: int) -> Tensor:
    """Return an adapter's tensor without the rows or columns that pad it to the engine's rank."""
    return (tensor[:rank] if name.endswith("lora_A.weight") else tensor[:, :rank]).contiguous()


class PaddedAdapters:
    """A client's first adapters, padded with zeros to the engine's rank.

    If rows of lora_A and columns of lora_B are both zero, so are their gradients, and they stay zero. Matrices that the
    client leaves out have zeros alone.
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
