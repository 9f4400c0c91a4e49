"""FSDPEngine: a TrainEngine for a transformers model under torch FSDP2. It serves as a reference for MegatronEngine.

Model, attention, language-model head, sharding, clipping and optimizer come from torch and transformers; packing and
the value head are shared with MegatronEngine. Only data parallelism is supported. The engine holds a microbatch's whole
logits at once, so a large vocabulary needs small microbatches. tests/megatron/test_fsdp_referee.py checks that both
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
from megatron_rl.batch.exchange import pack_alike
from megatron_rl.config import EngineConfig, OptimizerConfig, ParallelConfig
from megatron_rl.engine.model_engine import ModelEngine, step_stats, trained_tokens
from megatron_rl.engine.one_copy import one_copy
from megatron_rl.engine.value_head import ValueHead
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

    Parameters, gradients and AdamW's state are sharded over the data axis.

    groups: existing process groups, such as those of the first engine. Default: `initialize` builds them.
    head: `policy`, or `value` for one number per token. If the folder has no value head, the head starts at zero.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        groups: parallel.ParallelGroups | None = None,
        trainable: bool = True,
        head: str = "policy",
    ) -> None:
        check_layout(config.parallel)
        if config.lora.rank > 0:
            raise ValueError(
                f"lora.rank = {config.lora.rank}: FSDPEngine trains whole models; use MegatronEngine, or set it to 0."
            )
        if config.exact:
            raise ValueError(
                "rollout.exact = true: FSDPEngine has transformers' layers, whose bits servers cannot compute; use "
                "MegatronEngine, or set it to false."
            )
        if config.draft.kind != "none":
            raise ValueError(
                f"draft.kind = {config.draft.kind!r}: FSDPEngine trains no draft head; use MegatronEngine, or set it "
                f"to none."
            )
        super().__init__(config, groups=groups, trainable=trainable, head=head)
        if self.arch.mixture is not None:
            raise ValueError(
                f"model.path = {config.model.path!r}: FSDPEngine has no mixtures of experts, and {self.arch.family} is "
                f"one; use MegatronEngine."
            )
        if self.arch.delta_net is not None:  # transformers would carry the recurrent state across packed sequences
            raise ValueError(
                f"model.path = {config.model.path!r}: FSDPEngine has no delta nets, and {self.arch.family} has; use "
                f"MegatronEngine."
            )
        self.dtype = getattr(torch, config.model.dtype)

    # -- life ---------------------------------------------------------------------------------------------------------

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Join the process group, shard the model over the data axis, load its weights and create the optimizer.

        Collective: every rank calls it.
        """
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
        """Start a new optimizer and schedule, for example between a warm start and RL.

        lr: constant learning rate that replaces the configured schedule.
        """
        options = self.optimizer_options(lr)
        self.options, self.total_updates, self.scheduled_updates = options, total_updates, -1
        self.was_skipped = False
        # Like Megatron, no weight decay for norms and biases.
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        self.step_lr_scheduler()  # counts to 0: the first update uses the rate after 0 steps

    def destroy(self) -> None:
        self.close_publisher()
        parallel.stop()

    def train(self, mode: bool = True) -> FSDPEngine:
        self.model.train(mode)
        return self

    # -- computing ----------------------------------------------------------------------------------------------------

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
        microbatches, values = self._pack(batch), []
        for microbatch in microbatches:
            rows, output = self._rows_and_output(microbatch)
            if self.arch.head == "value":
                values.append(output)
            elif post_hook is None:
                # selects log-probs or entropy
                values.append(logprobs_entropy(output, rows, temperature)[entropy])
            else:
                values.append(post_hook(output, rows).float())
        on_host = [value.to(batch["input_ids"].device) for value in values]
        return packing.scatter_rows(microbatches, on_host, len(batch["input_ids"]))

    def step_lr_scheduler(self) -> None:
        if self.was_skipped:
            return
        self.scheduled_updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options, self.scheduled_updates, self.total_updates)

    def _accumulate(self, data, loss_fn, loss_weight_fn, *, backward: bool) -> dict[str, float]:
        """Run all microbatches. Return the global sums of loss, weight and statistics."""
        batch, kept = TrajectoryBatch.of(data), []
        self.check_loss(loss_fn, batch)
        for microbatch in self._pack(batch):
            rows, output = self._rows_and_output(microbatch)
            weight = torch.as_tensor((loss_weight_fn or trained_tokens)(microbatch.rows))  # on the host
            loss_sum, sums = _loss(output, rows, loss_fn, weight)
            if backward:
                loss_sum.backward()
            kept.append(
                {"loss": loss_sum.detach(), "weight": output.new_full((), float(weight), dtype=torch.float64)} | sums
            )
        totals = torch.stack([torch.stack([part[name].double() for part in kept]).sum() for name in kept[0]])
        dist.all_reduce(totals, group=self.groups.data.group)
        return dict(zip(kept[0], totals.tolist(), strict=True))

    def _rows_and_output(self, microbatch: MicroBatch) -> tuple[TensorDict, Tensor]:
        """Return the rows on the device, and the model's output: `[T, V]` float32 logits, or `[T]` values.

        Values are 0 in untrained rows. One forward pass computes all sequences, with masks between them. With one pass
        per sequence, the ranks' numbers of passes would differ, and under FSDP each pass is a collective.
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
        """Return the attention mask of T rows, `[1, 1, T, T]` bool.

        If layers have different windows, return a dict of masks, keyed by transformers' names of the layer types.
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

    def _pack(self, batch: TrajectoryBatch) -> list[MicroBatch]:
        self.check_tokens(batch)
        return pack_alike(
            batch,
            self.groups,
            tokens_per_microbatch=self.config.tokens_per_microbatch,
            allow_longer=self.config.allow_longer_sequences,
        )

    # -- weights ------------------------------------------------------------------------------------------------------

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
        """Return the values `[T]` float32 of one row of packed tokens, `[1, T]`."""
        values = self.score(self.model(**inputs).last_hidden_state[0])
        return values.clone()  # an in-place operation on a view would lose FSDP2's hook, with a warning


def check_layout(layout: ParallelConfig) -> None:
    """Raise ValueError for a layout that FSDPEngine does not support."""
    for key in ("tensor", "pipeline"):
        if getattr(layout, key) > 1:
            raise ValueError(
                f"parallel.{key} = {getattr(layout, key)}: must be 1 for FSDPEngine, which splits over the data axis "
                f"only; set it to 1, or use MegatronEngine."
            )


def _refuse_optimizer(method: str, with_optimizer: bool) -> None:
    if with_optimizer:
        raise ValueError(
            f"{method}: with_optimizer = True: must be False for FSDPEngine, which saves HF folders only; leave it "
            f"out, or use MegatronEngine if a run must be resumed."
        )


def learning_rate(options: OptimizerConfig, updates: int, total_updates: int) -> float:
    """Return the learning rate after `updates` updates, like `OptimizerParamScheduler.get_lr` of megatron.core 0.16."""
    warmup, last = options.warmup_updates, max(total_updates, options.warmup_updates + 1)
    if warmup and updates <= warmup:
        return options.lr * updates / warmup
    if options.schedule == "constant":
        return options.lr
    share = min((updates - warmup) / (last - warmup), 1.0)
    left = 1.0 - share if options.schedule == "linear" else 0.5 * (math.cos(math.pi * share) + 1.0)
    return options.min_lr + left * (options.lr - options.min_lr)


def logprobs_entropy(logits: Tensor, rows: TensorDict, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log p(label) and entropy, both `[T]`, 0 where the label is negative. They are over the rows' supports.

    Uses plain autograd, and no kernel of megatron_rl.ops.
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
    """Return `[n, V]` logits after the penalties and biases of supports `[n, W]`, by the definition in support.py."""
    # Padding adds 0 to the sampled token, whose own entry comes first.
    is_there, places = ids >= 0, ids.where(ids >= 0, ids[:, :1].clamp_min(0))
    planes = adjustment.masked_fill(~is_there[:, :, None], 0.0).to(logits.dtype).unbind(-1)
    before, *more = (torch.zeros_like(logits).scatter_add(1, places, plane) for plane in planes)
    found = logits + before
    if more:
        penalty = more[0].masked_fill(more[0] == 0, 1.0)
        found = torch.where(found < 0, found * penalty, found / penalty) + more[1]
    return found


def _loss(output: Tensor, rows: TensorDict, loss_fn: Any, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a microbatch's loss sum and statistics.

    The sum always has an autograd graph, because backward is a collective that every rank must run.
    """
    count = float(weight)
    if not count.is_integer():
        raise ValueError(f"loss_weight_fn returned {count}: must be an integer count; put fractions into the loss.")
    if not isinstance(loss_fn, LogprobLoss | ValueLoss):
        # A mean over no rows is 0 / 0.
        return loss_fn(output, rows) * count if count else output.sum() * 0.0, {}
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
