"""MegatronEngine: a TrainEngine on Megatron-Core. Its results do not depend on the layout or the microbatch split."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_rl import parallel, platform
from megatron_rl.api import WeightReceiver
from megatron_rl.config import EngineConfig
from megatron_rl.engine import checkpoint, schedule
from megatron_rl.engine.adapters import Adapters
from megatron_rl.engine.draft_head import DraftHead, first_weights
from megatron_rl.engine.host_memory import left_out_of_forks
from megatron_rl.engine.layers import add_gradients_in_products
from megatron_rl.engine.microbatch_engine import MicrobatchEngine
from megatron_rl.engine.model import DTYPES, build_chunks, transformer_config, vocab_shard
from megatron_rl.engine.model_engine import step_stats, trained_tokens
from megatron_rl.engine.mtp_head import MTPHead, layer_config
from megatron_rl.engine.offload import HostCopy, SharedDevice, tensors_of
from megatron_rl.engine.optimizer import build_optimizer, build_scheduler, complete_gradients, gradient_buffers
from megatron_rl.engine.output_head import Head
from megatron_rl.engine.routing import RoutingReplay
from megatron_rl.launch.ports import address_towards
from megatron_rl.ops import fixed_order
from megatron_rl.ops.head import head_logits
from megatron_rl.types import FinetuneSpec, StepStats
from megatron_rl.weights import adapter_rules
from megatron_rl.weights.draft_files import has_draft, read_draft, write_draft
from megatron_rl.weights.mapping import hf_shapes, weight_source
from megatron_rl.weights.mtp_layers import copies_in, mtp_source, specs_with_layer, with_layer
from megatron_rl.weights.publish import GroupPublisher
from megatron_rl.weights.reshard import HFExport, load_shards
from megatron_rl.weights.route_form import route_form
from megatron_rl.weights.senders import StageHeads
from megatron_rl.weights.tensor_rules import WeightSource
from megatron_rl.weights.update_group import TensorSpec


class MegatronEngine(MicrobatchEngine):
    """A model on Megatron-Core: policy, critic or, with `trainable=False`, a frozen reference or reward model.

        engine = MegatronEngine(config.actor)
        engine.initialize(None, FinetuneSpec(total_updates=100))
        logprobs = engine.forward(batch)  # [N], log p of each token of this rank's trajectories
        stats = engine.train_batch(batch, LogprobLoss(my_loss, temperature=1.0))
        engine.step_lr_scheduler()
        engine.save("runs/mine/final")

    Collective: every rank calls every method. Each data-parallel replica passes its share of the data, and all ranks of
    a replica pass the same.
    groups: an existing layout, such as that of the first engine. Default: `initialize` builds one.
    head: `policy`, or `value` for one number per token. If the folder has no value head, the head starts at zero.
    shared_device: needed if engines take turns on the device, or if rollout servers use it too.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        groups: parallel.ParallelGroups | None = None,
        trainable: bool = True,
        head: str = "policy",
        megatron: dict[str, Any] | None = None,
        shared_device: SharedDevice | None = None,
    ) -> None:
        super().__init__(config, groups=groups, trainable=trainable, head=head)
        self.passed_through = megatron or {}
        self._plans: dict[str, HFExport] = {}
        self.draft = self._far_embedding = None
        self._mtp_copies: dict[str, str] = {}
        """Maps each copy of the embedding or the output layer in the folder's multi-token-prediction layer to the name
        of the original."""
        self.checkpoints: checkpoint.CheckpointWriter | None = None
        self.on_gradients: Callable[[], None] | None = None
        """If set, `train_batch` calls it on every rank between the backward pass and the optimizer's step."""
        self.shared_device = shared_device
        self._host_weights, self._host_states = HostCopy(), HostCopy()

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Join the process group, build this rank's shard, load its weights and create the optimizer."""
        config = self.config
        source = self.first_weights()  # before creating process groups, so that a bad folder fails at once
        self.tf_config = transformer_config(self.arch, config, self.passed_through)
        make_draft = self._draft_maker(source)
        if self.trainable and self.shared_device and config.optimizer.megatron.get("optimizer_cpu_offload"):
            raise ValueError(
                "optimizer.megatron.optimizer_cpu_offload = True: the engine shares its GPU, so its whole state is "
                "moved to the host while others use the GPU; remove this option, or give the engine GPUs of its own."
            )
        platform.use_flash_attention(config.model.flash_attention)
        platform.check_shared_keys(config.model.shared_keys)
        if self.arch.delta_net is not None:
            platform.check_delta_kernel(config.model.delta_kernel, config.model.dtype)
        self.groups = self.groups or parallel.start(config.parallel, seed=config.seed)
        layout = (self.groups.tensor.size, self.groups.pipeline.size, self.groups.context.size)
        assert layout == (config.parallel.tensor, config.parallel.pipeline, config.parallel.context)
        self._activate()
        self.device = platform.device()
        self.dtype = DTYPES[config.model.dtype]
        self.shard = vocab_shard(self.arch, self.groups)
        with self.device:  # for layers without a device argument
            self.chunks = build_chunks(self.arch, self.tf_config, self.groups, config)
        form = route_form(self.arch, config.routing_replay)
        self.routing = None if form is None else RoutingReplay(form, self.chunks, self.device)
        self.wrapped = list(self.chunks)
        self.adapters = Adapters(self.chunks, self.arch, config.lora, self.groups) if config.lora.rank > 0 else None
        if self.dtype is torch.bfloat16:  # despite its name, Megatron's wrapper for bfloat16 too
            self.wrapped = [Float16Module(self.tf_config, chunk) for chunk in self.chunks]
        # after wrapping, because the wrapper would round weights that must stay float32
        load_shards(self.chunks, source, self.arch, self.groups)
        if config.model.init == "hf":
            self.say_what_is_not_loaded(config.model.path)
        if self.adapters is not None:
            self.adapters.note_base(self.groups)
            self._load_adapters(adapter_rules.adapter_source(self.arch, config.lora, seed=config.seed))
        product = fixed_order.logits if config.exact else head_logits
        self._head = Head(self.chunks[-1], self._output_weight, self.shard, self.groups.context, product)
        self.optimizer = self.scheduler = None
        self.draft = None if make_draft is None else make_draft()
        if self.trainable:
            self._prepare_training((ft_spec or FinetuneSpec(total_updates=1)).total_updates)
        else:
            for chunk in self.chunks:
                chunk.requires_grad_(False).eval()

    def _draft_maker(self, policy: WeightSource) -> Callable[[], DraftHead] | None:
        """Read the initial weights of a draft head, and return a function that builds the head.

        Returns None if the engine is to have no draft head. policy: the source of the policy's weights.
        """
        config, path = self.config, self.config.model.path
        if config.draft.kind == "none" or not self.trainable:
            return None
        is_new = config.model.init == "random"
        if config.draft.kind == "eagle":
            is_there = not is_new and has_draft(path)
            weights = read_draft(path, self.arch) if is_there else first_weights(self.arch, policy, config.seed)
            return lambda: DraftHead(
                self.arch, config.draft, self.groups, weights, device=self.device, dtype=self.dtype
            )
        source = mtp_source(path, self.arch, random_seed=config.seed if is_new else None)
        self._mtp_copies = {} if is_new else copies_in(path, self.arch)
        tf_config = layer_config(self.arch, config, self.passed_through)
        return lambda: MTPHead(self.arch, config, self.groups, source, tf_config, device=self.device)

    def _prepare_training(self, total_updates: int) -> None:
        options = self.config.optimizer
        ddp = gradient_buffers(options)
        self.wrapped = [
            # As in Megatron: the reduction of later chunks overlaps with the first chunk's backward pass anyway.
            DistributedDataParallel(self.tf_config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.wrapped)
        ]
        if self.tf_config.transformer_impl == "transformer_engine":
            for chunk in self.chunks:
                add_gradients_in_products(chunk)
        self.tf_config.finalize_model_grads_func = schedule.divide_by_weight(self.groups)
        if options.overlap:  # gradients are complete, and so reducible, only in the last microbatch
            no_sync = [chunk.no_sync for chunk in self.wrapped]
            self.tf_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.reset_optimizer(total_updates)

    def reset_optimizer(self, total_updates: int, lr: float | None = None) -> None:
        """Start a new optimizer and a new schedule, for example after a warm start.

        lr: if given, the learning rate is constant at this value.
        """
        self._activate()
        options = self.optimizer_options(lr)
        self.was_skipped = False
        self.optimizer = build_optimizer(options, self.wrapped, self.dtype)
        self.tf_config.grad_scale_func = self.optimizer.scale_loss
        self.scheduler = build_scheduler(options, self.optimizer, total_updates)

    def offload(self, *, keeps_weights: bool = False) -> None:
        """Move the optimizer's state and the weights to host memory, and discard the gradients.

        keeps_weights: True to leave the weights on the device. Further calls do nothing.
        """
        weights, states, gradients = tensors_of(self)
        self._far_embedding = None
        if not (self._host_states.is_out or self._host_weights.is_out):
            self._gather_weights()  # a pending all-gather would write into emptied storages
            if self.optimizer is not None:
                self.optimizer.zero_grad()  # main parameters have separate gradients
        if not self._host_states.is_out:
            self._host_states.take(states, gradients, self.device)
        if not (keeps_weights or self._host_weights.is_out):
            self._host_weights.take(weights, [], self.device)

    def onload(self, *, with_states: bool = True) -> None:
        """Move everything back to the device. Further calls do nothing. Every method that computes calls it.

        with_states: False to move only the weights.
        """
        self._host_weights.give_back()
        if with_states:
            self._host_states.give_back()

    def _activate(self, *, with_states: bool = True) -> None:
        self.groups.activate()
        if self.shared_device is None:
            self.onload(with_states=with_states)
        else:
            self.shared_device.take(self, with_states=with_states)

    def destroy(self) -> None:
        self.close_publisher()
        self.finish_saves()
        parallel.stop()

    def train(self, mode: bool = True) -> MegatronEngine:
        for chunk in self.wrapped:
            chunk.train(mode)
        return self

    def train_batch(self, data, loss_fn, loss_weight_fn=None) -> StepStats:
        self._activate()
        self.check_trainable()
        # DDP owns the gradient buffers; the optimizer has separate gradients of its float32 weights.
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        totals, logprobs = self._accumulate(data, loss_fn, loss_weight_fn or trained_tokens, forward_only=False)
        if self.on_gradients is not None:
            self.on_gradients()
        lr, loss = float(self.optimizer.param_groups[0]["lr"]), totals["loss"]
        applied, grad_norm = self.optimizer.step_if(lambda norm: self.is_sound(loss, norm))
        if self.draft is not None:
            self.draft.step()
        fault = self.note_update(applied, data, loss_fn, loss=loss, grad_norm=grad_norm, results=logprobs)
        return step_stats(totals, logprobs=logprobs, grad_norm=grad_norm, applied=applied, fault=fault, lr=lr)

    def _gather_weights(self) -> None:
        """Exchange updated weights between ranks now, so that they can be read outside a forward pass."""
        if self.optimizer is not None and self.config.optimizer.overlap:
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)

    def parameters(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(chunk.parameters() for chunk in self.chunks)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors in HF's names and shapes, with adapters merged into them."""
        export = self.export()
        self._gather_weights()
        return export.stream()

    def _plan(self, name: str, **options: Any) -> HFExport:
        """Return the export plan called `name`. The first call for a name creates it with `options`."""
        self._activate(with_states=False)
        if name not in self._plans:
            self._plans[name] = HFExport(self.chunks, self.arch, self.groups, **options)
        return self._plans[name]

    def export(self) -> HFExport:
        """Return the export plan from which `hf_tensors` streams."""
        return self._plan("model", shard_of=self._shard_of)

    def _export_for_servers(self) -> HFExport:
        """Return the export plan of a publication: the model and, if servers take it in this form, the draft head."""
        if self.draft is None or isinstance(self.draft, MTPHead):
            return self.export()
        return self._plan("servers", shard_of=self._shard_of, whole=self.draft.published)

    @property
    def _shard_of(self) -> Callable[[Tensor], Tensor]:
        return Tensor.detach if self.adapters is None else self.adapters.merged

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters' HF tensors on global rank 0, under names without PEFT's prefix.

        The other ranks get no tensors, and must exhaust the iterator too.
        """
        known = {spec.name for spec in self.adapter_specs()}
        self._gather_weights()
        return ((name, tensor) for name, tensor in self._plans["adapters"].stream() if name in known)

    def adapter_specs(self) -> list[TensorSpec]:
        """Return the specs of the tensors that `adapter_tensors` yields."""
        plan, known = (
            self._plan("adapters", lora=self.config.lora),
            adapter_rules.adapter_shapes(self.arch, self.config.lora),
        )
        return [spec for spec in plan.specs if spec.name in known]

    def trained_tensors(self, shard_of: Callable[[Tensor], Tensor] = Tensor.detach) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors derived from the trained parameters, in HF's names and shapes, on global rank 0.

        shard_of: function that is applied to each trained parameter; by default, the weights are yielded. The other
        ranks get no tensors, and must exhaust the iterator too.
        """
        self._activate(with_states=False)
        self._gather_weights()
        return self._trained_tensors(shard_of)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of the trained parameters in the weights' dtype, in the form of `trained_tensors`.

        Call this only in `on_gradients`, because the optimizer's step clips the gradients.
        """
        for chunk in self.wrapped if self.config.optimizer.distributed else ():
            complete_gradients(chunk)
        return self._trained_tensors(lambda it: it.main_grad.to(it.dtype) if it.requires_grad else torch.zeros_like(it))

    def _trained_tensors(self, shard_of: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        lora = self.config.lora if self.adapters is not None else None
        trained = hf_shapes(self.arch) if lora is None else adapter_rules.adapter_shapes(self.arch, lora)
        stream = HFExport(self.chunks, self.arch, self.groups, lora, shard_of=shard_of).stream()
        return ((name, tensor) for name, tensor in stream if name in trained)

    def _load_adapters(self, source: WeightSource) -> None:
        load_shards(self.chunks, source, self.arch, self.groups, self.config.lora)

    def saved_tensors(self) -> Iterator[tuple[str, Tensor]]:
        tensors = self.hf_tensors()
        if not isinstance(self.draft, MTPHead):
            return tensors
        return with_layer(tensors, self.draft.hf_tensors(), self._mtp_copies)

    def write_weights(self, path: str | Path) -> None:
        super().write_weights(path)
        if self.draft is not None and not isinstance(self.draft, MTPHead):
            head = dict(self.draft.tensors())
            self.write_on_main("draft head", lambda: write_draft(path, head, self.arch))
        if self.adapters is not None:
            tensors, folder = dict(self.adapter_tensors()), Path(path) / "adapter"
            lora, model = self.config.lora, self.config.model.path
            self.write_on_main(
                "adapters", lambda: adapter_rules.write_peft_folder(folder, tensors, self.arch, lora, model)
            )

    @property
    def base(self) -> FrozenBase:
        return FrozenBase(self)

    @torch.no_grad()
    def copy_weights(self, other: MegatronEngine) -> None:
        """Copy the weights of another engine with the same architecture and layout."""
        self._activate()
        other.onload()  # both are on the device during the copy
        other._gather_weights()
        for mine, theirs in zip(self.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)

    def update_weights(self, receiver: WeightReceiver | None, version: int) -> None:
        if self.config.publication == "adapters":
            self.publish(receiver, self.adapter_specs(), self.adapter_tensors(), version)
            return
        export = self._export_for_servers()
        self._gather_weights()
        if self.publisher is None and self.config.publication == "group" and self.groups.pipeline.size > 1:
            heads = parallel.stage_heads(self.groups)
            stages = StageHeads(heads, export.stages, self.groups.pipeline.rank, address_towards)
            options = {"bucket_bytes": self.config.bucket_bytes, "backend": platform.backend(), "stages": stages}
            self.publisher = GroupPublisher(receiver, **options)
        by_stage = self.publisher is not None and self.publisher.is_by_stage
        specs, tensors = export.specs, export.stream_of_stage() if by_stage else export.stream_in_step()
        if isinstance(self.draft, MTPHead) and self.config.publication == "disk":
            layer, copies = self.draft.export, self._mtp_copies
            specs = specs_with_layer(specs, layer.specs, copies)
            tensors = with_layer(tensors, layer.stream_in_step(), copies)
        self.publish(receiver, specs, tensors, version)

    def save(self, path: str | Path, *, with_optimizer: bool = False) -> None:
        self._activate()
        if with_optimizer:
            self.save_async(path, in_background=False)
            self.finish_saves()
        else:
            self.write_weights(path)

    def _check_optimizer(self, method: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                f"{method}: with_optimizer = True, but an engine with trainable=False has no optimizer; leave it out."
            )

    def save_async(
        self, path: str | Path, *, beside: Iterable[MegatronEngine] = (), in_background: bool = True
    ) -> None:
        """Start writing a resumable checkpoint, which `finish_saves` publishes when the writers are done.

        beside: other engines in these processes that train during the save. The writers' processes do not get their
        tensors. in_background: False if the caller waits for the writers, which then run at normal priority.
        """
        self._activate()
        self._check_optimizer("save")
        self.checkpoints = self.checkpoints or checkpoint.CheckpointWriter(self.groups)
        self._gather_weights()
        state, _ = checkpoint.training_state(self)
        training = [tensor for engine in {self, *beside} for part in tensors_of(engine) for tensor in part]
        with left_out_of_forks(training):
            self.checkpoints.start(
                path,
                state,
                is_carrying=self.config.model.init == "hf" and self.adapters is None,
                training=training,
                in_background=in_background,
                **self.saved_model,
            )

    def finish_saves(self, *, wait: bool = True) -> bool:
        """Publish the checkpoint if its writers are done. Returns True if no checkpoint is pending afterwards.

        wait: True to wait for the writers. Errors are those of `CheckpointWriter.finish`.
        """
        if self.checkpoints is None:
            return True
        self.groups.activate()
        return self.checkpoints.finish(wait=wait)

    def drop_saves(self) -> None:
        """Stop this rank's writer at once and discard its unfinished checkpoint."""
        if self.checkpoints is not None:
            self.checkpoints.drop()

    def load(self, path: str | Path, *, with_optimizer: bool = False, is_checked: bool = False) -> None:
        """Load a HF folder, a checkpoint or, for an engine with adapters, a PEFT folder.

        with_optimizer: True to restore the training state too. is_checked: True if the caller has already compared the
        checkpoint's checksums.
        """
        self._activate()
        if with_optimizer:
            self._check_optimizer("load")
        if with_optimizer or checkpoint.is_checkpoint(path):
            checkpoint.load(path, self, with_optimizer=with_optimizer, is_checked=is_checked)
            return
        if self.adapters is not None and adapter_rules.is_peft_folder(path):
            self._load_adapters(adapter_rules.PeftFolder(path, self.arch, self.config.lora))
        else:
            load_shards(self.chunks, weight_source(path, self.arch), self.arch, self.groups)
            self.say_what_is_not_loaded(path)
            if self.draft is not None:
                self.draft.load_folder(path, self.arch)
            if self.adapters is not None:
                self.adapters.note_base(self.groups)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()


class FrozenBase:
    """A policy's model without its adapters, as a reference model: `ref_logprobs = policy.base.forward(batch)`."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine

    def forward(self, data: Any, **options: Any) -> Tensor:
        with self.engine.adapters.off():
            return self.engine.forward(data, **options)
