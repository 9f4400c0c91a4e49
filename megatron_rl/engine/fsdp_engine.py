"""FSDPEngine: a TrainEngine for a transformers model under torch FSDP2. It serves as a reference for MegatronEngine.

The model, its attention and output layer, sharding, clipping and the optimizer come from torch and transformers.
Packing, the value head and the learning-rate schedule are those of MegatronEngine. The logits of a whole microbatch are
held at once, so a large vocabulary needs small microbatches. tests/megatron/test_fsdp_referee.py checks that both
engines agree on log-probs, losses, gradient norms and weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_rl import parallel, platform, support
from megatron_rl.api import LogprobLoss, ValueLoss, WeightReceiver
from megatron_rl.batch import packing
from megatron_rl.config import EngineConfig
from megatron_rl.engine.layers import ValueHead
from megatron_rl.engine.model_engine import ModelEngine, loss_weight, step_stats, trained_tokens
from megatron_rl.engine.one_copy import one_copy
from megatron_rl.engine.optimizer import build_scheduler
from megatron_rl.types import FinetuneSpec, MicroBatch, StepStats, TrajectoryBatch
from megatron_rl.weights.mapping import weight_source
from megatron_rl.weights.tensor_rules import WeightSource
from megatron_rl.weights.update_group import TensorSpec


class FSDPEngine(ModelEngine):
    """A model under FSDP2: policy, critic or, with `trainable=False`, a frozen reference or reward model.

        engine = FSDPEngine(config.actor)  # the layout has no axis but data
        engine.initialize(None, FinetuneSpec(total_updates=100))
        stats = engine.train_batch(batch, LogprobLoss(my_loss, temperature=1.0))
        engine.step_lr_scheduler()

    Parameters, gradients and AdamW's state are sharded over the data axis. The arguments `groups` and `head` are those
    of MegatronEngine.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        groups: parallel.ParallelGroups | None = None,
        trainable: bool = True,
        head: str = "policy",
    ) -> None:
        super().__init__(config, groups=groups, trainable=trainable, head=head)
        arch, layout, lora, draft, model = self.arch, config.parallel, config.lora.rank, config.draft.kind, config.model
        splits = "must be 1 for FSDPEngine, which splits over the data axis only"
        refusals = [  # holds, why, what else to do
            (layout.tensor > 1, f"parallel.tensor = {layout.tensor}: {splits}", "set it to 1"),
            (layout.pipeline > 1, f"parallel.pipeline = {layout.pipeline}: {splits}", "set it to 1"),
            (lora > 0, f"lora.rank = {lora}: FSDPEngine trains whole models", "set it to 0"),
            (config.exact, "rollout.exact = true: servers cannot compute the bits of FSDPEngine", "set it to false"),
            (draft != "none", f"draft.kind = {draft!r}: FSDPEngine trains no draft head", "set it to none"),
        ]
        lacks = f"model.path = {model.path!r}: FSDPEngine has no"
        refusals += [
            (arch.mixture is not None, f"{lacks} mixtures of experts, and {arch.family} is one", "another model"),
            # transformers would carry the recurrent state across packed sequences
            (arch.delta_net is not None, f"{lacks} delta nets, and {arch.family} has", "another model"),
        ]
        for holds, why, otherwise in refusals:
            if holds:
                raise ValueError(f"{why}; use MegatronEngine, or {otherwise}.")
        self.dtype = getattr(torch, model.dtype)

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Join the process group, shard the model, load its weights and create the optimizer. Collective."""
        source = self.first_weights()  # before creating process groups, so that a bad folder fails at once
        self.groups = self.groups or parallel.start(self.config.parallel, seed=self.config.seed)
        self.device = platform.device()
        self.model = self._sharded_model()
        self._read_weights(source)
        self.optimizer: torch.optim.Optimizer | None = None
        if self.trainable:
            self.reset_optimizer((ft_spec or FinetuneSpec(total_updates=1)).total_updates)
        else:
            self.model.requires_grad_(False)
            self.model.eval()

    def _sharded_model(self):
        """Build the model and shard it. Before sharding, each rank holds the whole model in host memory."""
        # transformers computes no gradient for the padding token's embedding, but that token may also end turns.
        changes = {"attention_dropout": 0.0, "pad_token_id": None}
        hf_config = AutoConfig.from_pretrained(self.config.model.path, **changes)
        options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        if self.arch.head == "value":
            model: nn.Module = ValueModel(AutoModel.from_config(hf_config, **options), self.arch.hidden)
        else:
            model = AutoModelForCausalLM.from_config(hf_config, **options)
        # Name the mesh's device: FSDP2 would otherwise ask torch.cuda, which may be the platform's stand-ins.
        mesh = DeviceMesh.from_group(self.groups.data.group, self.device.type)
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for part in (*model.model.layers, model):
            # Reshard the root too after a forward pass, so that parameters() always returns this rank's shards.
            fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
            part.set_gradient_divide_factor(1.0)  # gradients are summed over ranks; train_batch divides once
            part.set_force_sum_reduction_for_comms(True)  # gloo lacks PREMUL_SUM, with which FSDP2 applies a factor
        return model

    @torch.no_grad()
    def _read_weights(self, source: WeightSource) -> None:
        data = self.groups.data
        for name, parameter in self.model.named_parameters():
            count = len(parameter)
            rows = -(-count // data.size)  # FSDP2 splits dimension 0 like torch.chunk
            start = min(data.rank * rows, count)
            parameter.to_local().copy_(source.read(name, 0, start, min(start + rows, count)))

    def reset_optimizer(self, total_updates: int, lr: float | None = None) -> None:
        """Start a new optimizer and a new schedule, for example after a warm start.

        lr: if given, the learning rate is constant at this value, and there is no schedule.
        """
        options = self.options = self.optimizer_options(lr)
        self.was_skipped = False
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": matrices}, {"params": vectors, "wd_mult": 0.0}]  # as in Megatron
        self.optimizer = torch.optim.AdamW(groups, betas=(options.beta1, options.beta2), eps=options.eps)
        self.scheduler = build_scheduler(options, self.optimizer, total_updates)  # also sets the weight decay

    def destroy(self) -> None:
        self.close_publisher()
        parallel.stop()

    def train(self, mode: bool = True) -> FSDPEngine:
        self.model.train(mode)
        return self

    def train_batch(self, data, loss_fn, loss_weight_fn=None) -> StepStats:
        self.check_trainable()
        self.optimizer.zero_grad()
        totals = self._accumulate(data, loss_fn, loss_weight_fn, backward=True)
        for parameter in self.model.parameters():
            parameter.grad.div_(max(totals["weight"], 1.0))  # the one division
        # As in Megatron, clip_grad = 0 disables clipping. The norm is a DTensor: each rank has the part of its shards.
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_grad or math.inf)
        grad_norm, lr, loss = float(norm.full_tensor()), self.optimizer.param_groups[0]["lr"], totals["loss"]
        applied = self.is_sound(loss, grad_norm)
        if applied:
            self.optimizer.step()
        fault = self.note_update(applied, data, loss_fn, loss=loss, grad_norm=grad_norm)
        return step_stats(totals, grad_norm=grad_norm, applied=applied, fault=fault, lr=lr)

    def eval_batch(self, data, loss_fn, loss_weight_fn=None) -> StepStats:
        with torch.no_grad():
            totals = self._accumulate(data, loss_fn, loss_weight_fn, backward=False)
        return step_stats(totals, grad_norm=0.0, applied=False, lr=0.0)

    @torch.no_grad()
    def forward(self, data, post_hook=None, *, temperature: float = 1.0, entropy: bool = False) -> Tensor:
        self.check_head("post_hook", self.arch.head if post_hook is None else "policy")
        batch = TrajectoryBatch.of(data)
        microbatches, values = self.in_microbatches(batch), []
        for microbatch in microbatches:
            rows, output = self._rows_and_output(microbatch)
            if self.arch.head == "value":
                values.append(output)
            elif post_hook is None:
                values.append(logprobs_entropy(output, rows, temperature)[int(entropy)])
            else:
                values.append(post_hook(output, rows).float())
        on_host = [value.to(batch["input_ids"].device) for value in values]
        return packing.scatter_rows(microbatches, on_host, len(batch["input_ids"]))

    def _accumulate(self, data, loss_fn, loss_weight_fn, *, backward: bool) -> dict[str, float]:
        batch, kept = TrajectoryBatch.of(data), []
        self.check_loss(loss_fn, batch)
        for microbatch in self.in_microbatches(batch):
            rows, output = self._rows_and_output(microbatch)
            weight = loss_weight((loss_weight_fn or trained_tokens)(microbatch.rows))
            loss_sum, sums = _loss(output, rows, loss_fn, int(weight))
            if backward:
                loss_sum.backward()
            kept.append({"loss": loss_sum.detach(), "weight": weight.to(self.device)} | sums)
        totals = torch.stack([torch.stack([part[name].double() for part in kept]).sum() for name in kept[0]])
        dist.all_reduce(totals, group=self.groups.data.group)
        return dict(zip(kept[0], totals.tolist(), strict=True))

    def _rows_and_output(self, microbatch: MicroBatch) -> tuple[TensorDict, Tensor]:
        """Return the microbatch's rows on the device, and the model's output: `[T, V]` float32 logits, or `[T]` values.

        Values are 0 in untrained rows. A single pass computes all sequences, with masks between them: under FSDP each
        pass is a collective, and ranks have different numbers of sequences.
        """
        columns, positions = one_copy((dict(microbatch.rows.items()), microbatch.positions), self.device)
        rows = TensorDict(columns)
        output = self.model(
            input_ids=rows["input_ids"][None],
            position_ids=positions[None],
            attention_mask=self._masks(positions),
            use_cache=False,
        )
        if self.arch.head == "value":
            return rows, output.masked_fill(rows["labels"] < 0, 0.0)
        return rows, output.logits[0].float()

    def _masks(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the attention mask of T rows, `[1, 1, T, T]` bool. positions: as in MicroBatch.

        If layers differ, return one mask for each of transformers' layer types, by the type's name.
        """
        # A sequence begins at each position 0.
        sequence, row = (positions == 0).cumsum(0), torch.arange(len(positions), device=self.device)
        distance = row[:, None] - row[None, :]
        visible = (sequence[:, None] == sequence[None, :]) & (distance >= 0)
        masks = {}
        for window in set(self.arch.windows):
            mask = (visible if window is None else visible & (distance < window))[None, None]
            masks["full_attention" if window is None else "sliding_attention"] = mask
        return masks if len(masks) > 1 else mask

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():  # transformers' names, without a tied head
            full = parameter.detach().full_tensor()
            if self.groups.is_main:
                yield name, full.to(self.dtype)

    def update_weights(self, receiver: WeightReceiver | None, version: int) -> None:
        specs = [TensorSpec(name, self.dtype, tuple(p.shape)) for name, p in self.model.named_parameters()]
        self.publish(receiver, specs, self.hf_tensors(), version)

    def save(self, path: str | Path, *, with_optimizer: bool = False) -> None:
        _refuse_optimizer("save", with_optimizer)
        self.write_weights(path)

    def load(self, path: str | Path, *, with_optimizer: bool = False) -> None:
        _refuse_optimizer("load", with_optimizer)
        self._read_weights(weight_source(path, self.arch))


class ValueModel(nn.Module):
    """A transformers model with a value head. Its parameters are named as in a sequence classification model."""

    def __init__(self, trunk: nn.Module, hidden: int) -> None:
        super().__init__()
        self.model, self.score = trunk, ValueHead(hidden, torch.float32)

    def forward(self, **inputs: Any) -> Tensor:
        values = self.score(self.model(**inputs).last_hidden_state[0])
        return values.clone()  # an in-place operation on a view would lose FSDP2's hook, with a warning


def _refuse_optimizer(method: str, with_optimizer: bool) -> None:
    if with_optimizer:
        raise ValueError(
            f"{method}: with_optimizer = True: must be False for FSDPEngine, which saves HF folders only; leave it "
            f"out, or use MegatronEngine if a run must be resumed."
        )


def logprobs_entropy(logits: Tensor, rows: TensorDict, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log p(label) and entropy, both `[T]`, 0 where the label is negative.

    Rows that have a support get both over the support's tokens.
    """
    labels = rows["labels"]
    trained = (labels >= 0).nonzero()[:, 0]
    scaled = logits[trained]
    if support.COLUMN in rows.keys():  # noqa: SIM118  a TensorDict has no `in`
        ids = rows[support.COLUMN][trained].long()
        if support.ADJUSTMENT in rows.keys():  # noqa: SIM118
            scaled = _adjusted(scaled, ids, rows[support.ADJUSTMENT][trained])
        inside = scaled.new_zeros(scaled.shape, dtype=torch.bool)
        inside.scatter_(1, ids.where(ids >= 0, ids[:, :1].clamp_min(0)), True)  # padding repeats the sampled token
        scaled = scaled.masked_fill(~(inside | (ids[:, :1] < 0)), -math.inf)
    log_p = (scaled / temperature).log_softmax(-1)
    chosen = log_p.gather(-1, labels[trained, None])[:, 0]
    zeros, known = torch.zeros(len(labels), device=logits.device), log_p.masked_fill(log_p == -math.inf, 0.0)
    return zeros.index_copy(0, trained, chosen), zeros.index_copy(0, trained, -(log_p.exp() * known).sum(-1))


def _adjusted(logits: Tensor, ids: Tensor, adjustment: Tensor) -> Tensor:
    """Return the logits `[n, V]` after the penalties and biases of supports `[n, W]`, as support.py defines them."""
    # Padding adds 0 to the sampled token, whose own entry comes first.
    is_there, places = ids >= 0, ids.where(ids >= 0, ids[:, :1].clamp_min(0))
    planes = adjustment.masked_fill(~is_there[:, :, None], 0.0).to(logits.dtype).unbind(-1)
    before, *more = (torch.zeros_like(logits).scatter_add(1, places, plane) for plane in planes)
    found = logits + before
    if more:
        penalty = more[0].masked_fill(more[0] == 0, 1.0)
        found = torch.where(found < 0, found * penalty, found / penalty) + more[1]
    return found


def _loss(output: Tensor, rows: TensorDict, loss_fn: Any, weight: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a microbatch's loss sum and its statistics.

    The loss sum always has a graph, because all ranks must run the backward pass.
    """
    if not isinstance(loss_fn, LogprobLoss | ValueLoss):
        # A mean over no rows is 0 / 0.
        return loss_fn(output, rows) * weight if weight else output.sum() * 0.0, {}
    if isinstance(loss_fn, ValueLoss):
        loss_sum, sums = loss_fn.fn(output, rows)
    elif loss_fn.beside is not None:
        raise ValueError(
            f"loss_fn.beside = {loss_fn.beside!r}: must be None for FSDPEngine, which cannot add a loss on whole "
            f"logits to a loss on log-probs; leave it out, or use MegatronEngine."
        )
    else:
        loss_sum, sums = loss_fn.fn(*logprobs_entropy(output, rows, loss_fn.temperature), rows)
    return loss_sum, {name: value.detach() for name, value in sums.items()}
