"""The passes of an engine on Megatron-Core: it packs a batch into microbatches and runs them through the pipeline."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from megatron_rl import support
from megatron_rl.api import LogprobLoss, ValueLoss
from megatron_rl.batch import packing
from megatron_rl.engine import schedule
from megatron_rl.engine.adapters import Adapters
from megatron_rl.engine.draft_head import DraftHead
from megatron_rl.engine.model_engine import ModelEngine, loss_weight, step_stats, trained_tokens
from megatron_rl.engine.offload import SharedDevice
from megatron_rl.engine.one_copy import one_copy
from megatron_rl.engine.output_head import Head
from megatron_rl.engine.packed_rows import PackedRows
from megatron_rl.engine.routing import RoutingReplay
from megatron_rl.ops import Cut, KeptTokens, TeacherStates, TopTokens
from megatron_rl.types import MicroBatch, StepStats, TrajectoryBatch


class MicrobatchEngine(ModelEngine):
    """The passes of MegatronEngine over batches: log-probs, values, distributions, losses and their gradients."""

    chunks: list[Any]  # this rank's parts of the model, one for each virtual pipeline stage
    wrapped: list[Any]  # the chunks with what Megatron puts around them
    tf_config: Any
    device: torch.device
    routing: RoutingReplay | None
    adapters: Adapters | None
    draft: DraftHead | None  # the head with which servers decode ahead, if config.draft asks for one
    _far_embedding: Tensor | None
    """The embedding with which a draft head learns in this update. It is set on the last of several pipeline stages."""
    shared_device: SharedDevice | None
    _head: Head

    @abc.abstractmethod
    def _activate(self, *, with_states: bool = True) -> None:
        """Make megatron.core use this engine's layout, and move the engine's tensors to the device.

        with_states: False to leave the optimizer's state where it is.
        """

    def eval_batch(self, data, loss_fn, loss_weight_fn=None) -> StepStats:
        self._activate()
        with torch.no_grad():
            totals, logprobs = self._accumulate(data, loss_fn, loss_weight_fn or trained_tokens, forward_only=True)
        return step_stats(totals, logprobs=logprobs, grad_norm=0.0, applied=False, lr=0.0)

    def forward(self, data, post_hook=None, *, temperature: float = 1.0, entropy: bool = False) -> Tensor:
        self._activate()
        self.check_head("post_hook", self.arch.head if post_hook is None else "policy")
        batch, head = TrajectoryBatch.of(data), self._head

        def results(hidden: Tensor, microbatch: MicroBatch, packed: PackedRows) -> Tensor:
            of_head = ("labels", support.COLUMN, support.ADJUSTMENT)
            read = of_head if post_hook is None else tuple(microbatch.rows.keys())
            rows = one_copy({key: microbatch.rows[key] for key in read if key in microbatch.rows.keys()}, self.device)
            if self.arch.head == "value":
                values = head.values(hidden, rows["labels"], packed)
            elif post_hook is None:
                values = head.logprobs(hidden, rows, packed, temperature, entropy)[int(entropy)]
            else:
                values = post_hook(head.logits(hidden, packed), TensorDict(rows))
            return values.detach().float()

        microbatches, rows = self._run_forward(batch, results, final_rows=post_hook is not None)
        return self._by_token(batch, microbatches, rows)

    @torch.no_grad()
    def _run_forward(
        self, batch: TrajectoryBatch, results: Callable[..., Any], *, final_rows: bool = False
    ) -> tuple[list[MicroBatch], list[Any]]:
        """Run a forward pass. Returns the microbatches, and what `results` returned for each of them.

        `results(hidden, microbatch, packed)` is called on the last pipeline stage. On other stages, the second list is
        empty.
        """

        def last_stage(hidden: Tensor, microbatch: MicroBatch, packed: PackedRows) -> tuple[Tensor, Tensor, Any]:
            # The schedule requires a loss and a weight too.
            return hidden.sum() * 0.0, torch.zeros((), dtype=torch.int), results(hidden, microbatch, packed)

        microbatches = self._pack(batch, final_rows=final_rows)
        return microbatches, self._run(microbatches, last_stage, forward_only=True)

    @torch.no_grad()
    def distributions(self, data, *, top: int = 0, temperature: float = 1.0) -> TeacherStates | TopTokens:
        """Return this model's distribution at each trained token, for training another engine with the same layout.

        The result is on the host of the last pipeline stage, and other stages get empty tensors. It has one row per
        trained token, in token order. With `top` > 0, a row has the `top` most likely tokens at `temperature`. With
        `top` = 0, it has hidden states; together with a snapshot of the output layer, they define the whole
        distribution.
        """
        self._activate()
        batch, head = TrajectoryBatch.of(data), self._head

        def results(hidden: Tensor, microbatch: MicroBatch, packed: PackedRows) -> list[Tensor]:
            trained = one_copy((microbatch.rows["labels"] >= 0).nonzero()[:, 0], self.device)
            states = head.states(hidden, packed, trained)
            most = head.top(states, top, temperature) if top > 0 else None
            return [part.cpu() for part in ((states,) if most is None else (most.tokens, most.logprobs))]

        microbatches, kept = self._run_forward(batch, results)
        mask = batch["loss_mask"].bool()
        number, count = mask.cumsum(0) - 1, int(mask.sum())
        if not kept:  # not the last stage, or no microbatch
            return TeacherStates(torch.empty(count, 0), torch.empty(0, 0))
        rows = number[torch.cat([it.source[it.rows["labels"] >= 0] for it in microbatches])]
        columns = []
        for parts in zip(*kept, strict=True):
            joined = torch.cat(parts)
            columns.append(joined.new_zeros(count, joined.shape[1]).index_copy_(0, rows, joined))
        if top > 0:
            return TopTokens(*columns)
        weight = self._output_weight().detach()
        is_passing = self.trainable or self.shared_device is not None  # the weight may be trained or offloaded later
        return TeacherStates(columns[0], weight.clone() if is_passing else weight)

    @torch.no_grad()
    def kept_tokens(self, data, cut: Cut, *, temperature: float) -> KeptTokens:
        """Return, for each trained token, the tokens of this model's distribution that the sampling options keep.

        The result is on the host. Rows of untrained tokens have no ids, and their log_mass is 0. cut: the sampling
        options.
        """
        self._activate()
        batch, head = TrajectoryBatch.of(data), self._head

        def results(hidden: Tensor, microbatch: MicroBatch, packed: PackedRows) -> Tensor:
            found = head.kept(hidden, one_copy(microbatch.rows["labels"], self.device), packed, cut, temperature)
            columns = found.log_mass.float().view(torch.int32), found.is_outside.int()
            return torch.cat([found.ids, torch.stack(columns, 1)], 1).cpu()

        microbatches, kept = self._run_forward(batch, results)
        tables = torch.full((len(batch["input_ids"]), cut.width + 2), support.NO_TOKEN, dtype=torch.int32)
        tables[:, cut.width :] = 0
        for number, microbatch in enumerate(microbatches):
            # One microbatch at a time on the device, because the column may have some hundred numbers per token.
            table = kept[number] if kept else torch.empty(microbatch.tokens, cut.width + 2, dtype=torch.int32)
            if self.groups.pipeline.size > 1:
                sent = table.to(self.device)
                dist.broadcast(sent, group=self.groups.pipeline.group, group_src=self.groups.pipeline.size - 1)
                table = sent.cpu()
            predicted = microbatch.source >= 0
            tables[microbatch.source[predicted]] = table[predicted]
        log_mass = tables[:, cut.width].contiguous().view(torch.float32)
        return KeptTokens(tables[:, : cut.width].contiguous(), log_mass, tables[:, -1].bool())

    def _accumulate(
        self, data, loss_fn, loss_weight_fn, *, forward_only: bool
    ) -> tuple[dict[str, float], Tensor | None]:
        """Return the global sums of loss, weight and statistics, and the log-probs `[N]` of this rank's tokens.

        The log-probs are None unless the loss is a LogprobLoss. forward_only: True to compute no gradient.
        """
        batch = TrajectoryBatch.of(data)
        self.check_loss(loss_fn, batch)
        if self.draft is not None and not forward_only:
            self._bring_embedding()
        wants_final_rows = not isinstance(loss_fn, LogprobLoss | ValueLoss)
        microbatches = self._pack(batch, final_rows=wants_final_rows)
        last_stage = self._last_stage(loss_fn, loss_weight_fn, learns=not forward_only)
        kept = self._run(microbatches, last_stage, forward_only=forward_only)
        totals = self._global_sums([sums for sums, _, _ in kept], sum(weight for _, weight, _ in kept))
        if self.routing is not None:  # scaled, because metrics divide it by the number of trained tokens
            totals["changed_routes"] = self.routing.changed_share * totals.get("tokens", totals["weight"])
        if not isinstance(loss_fn, LogprobLoss):
            return totals, None
        return totals, self._by_token(batch, microbatches, [logprobs for _, _, logprobs in kept])

    def _last_stage(self, loss_fn, loss_weight_fn, *, learns: bool) -> schedule.LastStage:
        """Return the function that computes a microbatch's loss on the last stage.

        It keeps (statistics, weight, log-probs or None) of each microbatch. learns: True if the draft head learns too.
        """
        head = self._head

        def last_stage(hidden: Tensor, microbatch: MicroBatch, packed: PackedRows):
            # These rows are on the host, so reading the weight does not wait for the device.
            weight, logprobs = loss_weight(loss_weight_fn(microbatch.rows)), None
            rows = TensorDict(one_copy(dict(microbatch.rows.items()), self.device))
            if isinstance(loss_fn, ValueLoss):
                loss_sum, sums = loss_fn.fn(head.values(hidden, rows["labels"], packed), rows)
            elif isinstance(loss_fn, LogprobLoss):
                term = None if loss_fn.beside is None else loss_fn.beside.of(microbatch.rows, self.device)
                loss_sum, sums, logprobs = head.logprob_loss(loss_fn, hidden, rows, packed, term)
            elif int(weight) == 0:  # a mean over no rows is 0 / 0; keep the graph for the schedule's backward
                loss_sum, sums = head.logits(hidden, packed).sum() * 0.0, {}
            else:
                loss_sum, sums = loss_fn(head.logits(hidden, packed), rows) * weight, {}
            if learns and self.draft is not None:
                self.draft.learn(hidden, microbatch, packed, head, self._embedding())
            loss_sum = loss_sum.as_subclass(Tensor)  # drop the VocabParallelLogits type: Megatron needs plain tensors
            kept = {"loss": loss_sum.detach().float().clone()} | {k: v.detach().float() for k, v in sums.items()}
            # Context ranks compute one loss together. Megatron sums their gradients, so one of them counts the weight.
            counted = weight if self.groups.context.rank == 0 else torch.zeros_like(weight)
            return loss_sum, counted, (kept, int(weight), logprobs)

        return last_stage

    def _run(
        self,
        microbatches: list[MicroBatch],
        last_stage: schedule.LastStage,
        *,
        forward_only: bool,
        prepare: Callable[[MicroBatch], None] | None = None,
    ) -> list[Any]:
        kept = schedule.run(
            self.wrapped,
            microbatches,
            last_stage,
            forward_only=forward_only,
            groups=self.groups,
            config=self.tf_config,
            device=self.device,
            mixtures=None if self.routing is None else self.routing.mixtures,
            copies_shared_keys=self.config.model.shared_keys == "copied",
            prepare=prepare,
        )
        if self.routing is not None:
            self.routing.finish_pass(self.groups.control)
        return kept

    def _pack(self, batch: TrajectoryBatch, *, final_rows: bool) -> list[MicroBatch]:
        if self.routing is not None:
            self.routing.check(batch)
        return self.in_microbatches(
            batch,
            multiple_of=self.groups.pipeline.size if len(self.chunks) > 1 else 1,  # as the interleaved schedule needs
            share_prompts=self.config.share_prompts,
            final_rows=final_rows,
        )

    def _by_token(self, batch: TrajectoryBatch, microbatches: list[MicroBatch], rows: list[Tensor]) -> Tensor:
        """Return the results of the batch's tokens, `[N]` float32, on all pipeline stages.

        rows: the result of `_run`, one tensor `[T]` per microbatch.
        """
        counts = [microbatch.tokens for microbatch in microbatches]
        results = torch.cat(rows) if rows else torch.empty(sum(counts), dtype=torch.float32, device=self.device)
        if self.groups.pipeline.size > 1:
            dist.broadcast(results, group=self.groups.pipeline.group, group_src=self.groups.pipeline.size - 1)
        # one wait for all microbatches; the row numbers are on the host
        results = results.to(batch["input_ids"].device)
        return packing.scatter_rows(microbatches, list(results.split(counts)), len(batch["input_ids"]))

    def _global_sums(self, kept: list[dict[str, Tensor]], weight: int) -> dict[str, float]:
        """Return the sums of statistics and weights over all microbatches and data-parallel ranks, on every rank.

        kept: the statistics of each of this rank's microbatches. weight: the sum of their weights.
        """
        totals: list[Any] = [None]
        if self.groups.is_last_stage:
            names = list(kept[0])  # every microbatch has the same names, even without a trained row
            sums = [torch.stack([part[n] for part in kept]).double().sum() for n in names]
            sums = torch.stack([*sums, torch.full_like(sums[0], weight)])
            dist.all_reduce(sums, group=self.groups.data.group)  # tensor and context peers already have the same sums
            totals = [dict(zip([*names, "weight"], sums.cpu().tolist(), strict=True))]
        if self.groups.pipeline.size > 1:  # on the host; the last global rank is on the last stage
            dist.broadcast_object_list(totals, src=self.groups.world_size - 1, group=self.groups.control)
        return totals[0]

    def _output_weight(self) -> Tensor:
        return self._arrived(self.chunks[-1].output_weight(), self.wrapped[-1])

    def _embedding(self) -> Tensor:
        """Return this tensor rank's part of the embedding. It is called on the last pipeline stage."""
        if self.arch.tied:
            return self._output_weight()
        return self._first_embedding() if self._far_embedding is None else self._far_embedding

    def _first_embedding(self) -> Tensor:
        return self._arrived(self.chunks[0].embedding.word_embeddings.weight, self.wrapped[0])

    def _arrived(self, weight: Tensor, wrapped: Any) -> Tensor:
        """Return a weight after waiting for its update, as Megatron does before the forward pass of each module.

        wrapped: the model chunk, wrapped in DDP, that has the weight.
        """
        if self.optimizer is not None and self.config.optimizer.overlap and weight.requires_grad:
            wrapped.param_to_bucket_group[weight].finish_param_sync()
        return weight

    @torch.no_grad()
    def _bring_embedding(self) -> None:
        """Copy the embedding from the first to the last pipeline stage, unless the last stage has it anyway."""
        pipeline = self.groups.pipeline
        if pipeline.size == 1 or self.arch.tied:
            return
        if self.groups.is_first_stage:
            dist.send(self._first_embedding().detach(), group_dst=pipeline.size - 1, group=pipeline.group)
        elif self.groups.is_last_stage:
            if self._far_embedding is None:
                self._far_embedding = torch.empty_like(self.chunks[-1].output_layer.weight)
            dist.recv(self._far_embedding, group_src=0, group=pipeline.group)
