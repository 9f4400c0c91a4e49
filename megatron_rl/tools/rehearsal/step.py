"""Rehearses one RL step without servers, prompts or weights. Calls the parts of RLRun in the order of its loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_rl.batch import exchange, packing
from megatron_rl.batch.step_batch import SharePlan, StepBatch
from megatron_rl.config import TrainConfig
from megatron_rl.engine import offload, schedule
from megatron_rl.engine.checkpoint import start_adam, training_state
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.offload import tensors_of
from megatron_rl.engine.packed_rows import PackedRows
from megatron_rl.parallel import ParallelGroups
from megatron_rl.run.device_sharing import DeviceSharing
from megatron_rl.run.rl_run import RLRun
from megatron_rl.tools.rehearsal.device_ledger import Ledger
from megatron_rl.tools.rehearsal.stand_ins import NoWeights
from megatron_rl.types import PART, TrajectoryBatch, prefix_sums
from megatron_rl.weights import mapping
from megatron_rl.weights.publish import WeightPublisher, fill_buckets, plan_buckets
from megatron_rl.weights.update_group import TensorSpec


class RehearsedRun(RLRun):
    """An RL run that has only engines, without servers and rollouts."""

    packed: PackedRows
    """The rows of the policy's last microbatch."""

    def _start(self) -> None:
        self._join()
        self.devices = DeviceSharing(self.config, self.groups, self.timers, None, None)
        self._build_models([], None)
        for engine in self.trained.values():
            start_adam(engine.optimizer)  # rehearse a later step: before the first one, an optimizer has no moments

    @property
    def engines(self) -> list[MegatronEngine]:
        """The engines of all models on this rank."""
        # With adapters, the reference is the policy's own model.
        others = [engine for engine in (self.reference, self.reward_model) if isinstance(engine, MegatronEngine)]
        others += self.teachers.own_engines.values()
        return [*self.trained.values(), *others]

    def say(self, text: str) -> None:
        """Discard the text, because nobody reads the output of one rank among a thousand."""


@contextlib.contextmanager
def rehearse_step(
    config: TrainConfig, ledger: Ledger, lengths: Sequence[tuple[int, int]] = ()
) -> Iterator[RehearsedRun]:
    """Run one step of this rank and record it in the ledger. The engines exist until the context ends.

    lengths: as in made_batch.
    """
    mapping.HFFolder = mapping.RandomWeights = NoWeights
    # A storage without memory reports the device `meta`.
    offload._bytes_of = lambda storage: torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    config = replace(config, batch=replace(config.batch, updates_per_step=1))
    step = config.critic.warmup_steps  # the first that updates the policy
    count_for_all_replicas()
    run = RehearsedRun(config)
    watch_microbatches(ledger, run)
    run.timers.on_change = ledger.enter
    with contextlib.ExitStack() as run.at_end:
        run._start()
        for engine in run.engines:
            for part, tensors in zip(("weights", "optimizer", "gradients"), tensors_of(engine), strict=True):
                ledger.mark(part, tensors)
        ledger.layers = run.engine.chunks[0].config.transformer_impl
        ledger.enter("step")
        whole = made_batch(config, run.groups.data.size, run.engine.arch.vocab, lengths)
        batch = rehearsed_batch(whole, run.groups, share_prompts=config.batch.share_prompts)
        batch = run.add_reward_model_scores(batch)
        with run.timers("advantages"):
            run.compute_advantages(batch)
            updates = run.split_into_updates(batch, step)
        with run.timers("logprobs"):
            run.actor.compute_logprobs(updates)
            targets = run.teacher_targets(updates)
        with run.timers("update"):
            run.actor.update(updates, targets)
        run.update_critic(batch, step)
        for engine in run.trained.values():
            ledger.mark("gradients", host_gradients(engine))
        with run.timers("publish"):
            groups, export = run.groups, run.engine.export()
            by_stage = config.rollout.publication == "group" and groups.pipeline.size > 1
            is_sender = groups.tensor.rank == groups.data_context.rank == 0 if by_stage else groups.is_main
            specs = export.stages[groups.pipeline.rank] if by_stage else export.specs
            if config.rollout.publication == "adapters":
                specs = run.engine.adapter_specs()
            publisher = BucketsAlone(NoServers() if is_sender else None, ledger, run.engine.config.bucket_bytes, specs)
            publisher.is_by_stage = by_stage
            run.engine.publisher = publisher
            run.devices.prepare_publication(run.engine)
            run.engine.update_weights(publisher.receiver, 1)
        with run.timers("checkpoint"):
            state, _ = training_state(run.engine)
            ledger.checkpoint_bytes = bytes_to_write(state, run.groups, run.engine.config.optimizer.distributed)
        if run.devices.engines is not None:
            with run.timers("offload"):
                run.engine.offload()
                run.engine.onload()
        yield run


def bytes_to_write(state: dict[str, Any], groups: ParallelGroups, is_distributed: bool) -> float:
    """Return the bytes of a checkpoint that this rank copies to the host and writes.

    Replicas share the writing. With a distributed optimizer, each replica writes its own shard of the optimizer state.
    """
    total = 0.0
    for part in nested_values(state):
        if isinstance(part, ShardedTensor | ShardedTensorFactory):
            replicas = groups.expert_data if ".experts." in part.key else groups.data_context
            is_own = is_distributed and part.key.startswith("optimizer.")
            total += part.data.nbytes / (1 if is_own else replicas.size)
    return total


def host_gradients(engine: MegatronEngine) -> Iterator[Tensor]:
    """Yield the host tensors to which a CPU optimizer copies gradients."""
    for part in engine.optimizer.chained_optimizers:
        yield from getattr(part.optimizer, "cpu_copy_map_grad", {}).values()


def watch_microbatches(ledger: Ledger, run: RehearsedRun) -> None:
    """Make the ledger record which part of a step repeats with every microbatch, and count the microbatches.

    Also store the rows of the update's last microbatch in run.packed.
    """
    pack, finalize, run_all = schedule.own_rows, schedule.finalize_model_grads, schedule.run

    def noted_pack(*args: Any, **options: Any) -> Any:
        ledger.is_in_microbatch = True
        ledger.phases[ledger.phase].microbatches += 1
        ids, packed = pack(*args, **options)
        if ledger.phase == "update":
            run.packed = packed
        return ids, packed

    def noted_finalize(*args: Any, **options: Any) -> None:
        ledger.is_in_microbatch = False
        finalize(*args, **options)

    def noted_run(*args: Any, **options: Any) -> Any:
        try:
            return run_all(*args, **options)
        finally:
            ledger.is_in_microbatch = False

    schedule.own_rows, schedule.finalize_model_grads, schedule.run = noted_pack, noted_finalize, noted_run


@dataclass(kw_only=True)
class RehearsedBatch(StepBatch):
    """A step's trajectories on a rank without peers.

    The rank has the tokens of all ranks, and derives from them what the other ranks would send.
    """

    whole: TrajectoryBatch

    @classmethod
    def shared_out(cls, whole: TrajectoryBatch, plan: SharePlan) -> RehearsedBatch:
        here = plan.owner == plan.groups.data.rank
        return cls.of_tokens(whole.select(here.nonzero()[:, 0].tolist()), whole.sequences, plan, whole=whole)

    def completed(self, values: Tensor) -> Tensor:
        return values

    def total(self, counts: Tensor) -> Tensor:
        return counts

    def in_layout(self, groups: ParallelGroups) -> StepBatch:
        if groups is self.plan.groups:
            return self
        if id(groups) not in self._in_layouts:  # kept, because its columns may be set
            self._in_layouts[id(groups)] = RehearsedBatch.shared_out(self.whole, self.plan.in_layout(groups))
        return self._in_layouts[id(groups)]

    def taken_from(self, other: StepBatch, column: Tensor) -> Tensor:
        return torch.zeros(len(self.tokens["input_ids"]), dtype=column.dtype)

    def own(self) -> TrajectoryBatch:
        return self._noted([super().own()], lambda batch: [StepBatch.own(batch)])[0]

    def shares(self) -> list[TrajectoryBatch]:
        return self._noted(super().shares(), StepBatch.shares)

    def _noted(
        self, own: list[TrajectoryBatch], parts_of: Callable[[StepBatch], list[TrajectoryBatch]]
    ) -> list[TrajectoryBatch]:
        """Enter each part of `own` in SHARES_OF_ALL, with the other ranks' parts, and return `own`.

        parts_of: function that returns the parts of a rank's batch.
        """
        groups = self.plan.groups
        for rank in range(groups.data.size):
            of_rank = replace(groups, data=replace(groups.data, rank=rank))
            parts = parts_of(RehearsedBatch.shared_out(self.whole, replace(self.plan, groups=of_rank)))
            for mine, other in zip(own, parts, strict=True):
                SHARES_OF_ALL.setdefault(id(mine.sequences), [mine]).append(other)
        return own


def rehearsed_batch(whole: TrajectoryBatch, groups: ParallelGroups, *, share_prompts: bool) -> RehearsedBatch:
    """Distribute a step's trajectories over the ranks of a layout. The step has a single update."""
    begin = packing.beginnings(whole) if share_prompts else None
    options: dict[str, Any] = {"updates": 1, "seed": 0, "begin": begin}
    return RehearsedBatch.shared_out(whole, exchange.plan_step(whole.sequences, whole.lengths, groups, **options))


SHARES_OF_ALL: dict[int, list[TrajectoryBatch]] = {}
"""Maps id(share.sequences) of each of this rank's shares to a list: the share itself, then the shares that all
data-parallel ranks, this one included, compute at the same time."""


def count_for_all_replicas() -> None:
    """Make a rank compute the number of microbatches that all ranks would agree on.

    On a cluster, ranks exchange their numbers. A rehearsed rank instead computes the number for every data-parallel
    rank's share, and takes the maximum.
    """
    least = exchange.least_alone

    def least_of_all(batch: TrajectoryBatch, *args: Any, **options: Any) -> int:
        own, *every = SHARES_OF_ALL.get(id(batch.sequences)) or next(
            # A teacher reads a share's trajectories in a batch of its own.
            shares
            for shares in SHARES_OF_ALL.values()
            if torch.equal(shares[0].cu_seqlens, batch.cu_seqlens)
        )
        if len(own["input_ids"]) < len(batch["input_ids"]):
            every = [share.with_one_more_token()[0] for share in every]
        return max(least(share, *args, **options) for share in every)

    exchange.least_alone = least_of_all


class NoServers:
    """Rollout servers that receive no requests."""

    server_ranks: ClassVar[dict[str, int]] = {}

    def checksum_forms(self) -> dict[str, Any]:
        return {}


class BucketsAlone(WeightPublisher):
    """A publisher that gathers weights and fills buckets, but sends nothing.

    It keeps two buckets alive, as many as would be in flight in a real publication.
    """

    def __init__(self, receiver: Any, ledger: Ledger, bucket_bytes: int, specs: Sequence[TensorSpec]) -> None:
        super().__init__(receiver)
        self.ledger, self.bucket_bytes, self.specs = ledger, bucket_bytes, list(specs)

    def _deliver(self, specs: Any, tensors: Any, version: int, checksums: Any) -> None:
        in_flight: list[Tensor] = []
        for bucket, pieces in fill_buckets(plan_buckets(self.specs, self.bucket_bytes), tensors):
            in_flight = [*in_flight[-1:], *pieces]
            self.ledger.buckets.append(sum(spec.nbytes for spec in bucket))


def made_batch(
    config: TrainConfig, replicas: int, vocab: int, lengths: Sequence[tuple[int, int]] = ()
) -> TrajectoryBatch:
    """Draw a step's trajectories: about one microbatch per replica and pipeline stage, but at least two per replica.

    lengths: as returned by read_lengths. If given, each group's prompt and reply lengths are drawn from them. Otherwise
    prompts have data.max_prompt_tokens tokens (512 if the option is 0), and replies have a random length between a
    quarter of generation.max_new_tokens and all of it.
    """
    samples = config.generation.n_samples
    generator = torch.Generator().manual_seed(1)
    wanted = config.batch.tokens_per_microbatch * max(2, config.parallel.pipeline) * replicas
    prompts: list[int] = []
    replies: list[int] = []
    rows = 0
    while rows < wanted * 0.9:
        prompt, of_group = drawn_group(config, lengths, generator)
        rows += sum(of_group) + prompt * (1 if config.batch.share_prompts else samples)  # a shared prompt counts once
        prompts += [prompt] * samples
        replies += of_group
    sizes = torch.tensor(prompts) + torch.tensor(replies)
    cu = prefix_sums(sizes)
    count = int(cu[-1])
    position = torch.arange(count) - torch.repeat_interleave(cu[:-1], sizes)
    is_reply = position >= torch.repeat_interleave(torch.tensor(prompts), sizes)
    group = torch.arange(len(sizes)) // samples
    sample = torch.arange(len(sizes)) % samples
    # All prompts of a group are equal, and its replies differ from their first token on.
    of_sequence = torch.where(is_reply, *(torch.repeat_interleave(number, sizes) for number in (sample, group)))
    ids = (position + of_sequence) % vocab
    tokens: dict[str, Tensor] = {
        "input_ids": ids.to(torch.int32),
        "loss_mask": is_reply,
        "logprobs": torch.full((count,), -1.0) * is_reply,
        "versions": torch.where(is_reply, 0, -1),
    }
    sequences = {
        "rewards": torch.rand(len(sizes), generator=generator),
        "group": group,
        "sample": sample,
    }
    return TrajectoryBatch(tokens, sequences | reported_columns(config, sequences["rewards"], sample), cu)


def reported_columns(config: TrainConfig, rewards: Tensor, sample: Tensor) -> dict[str, Tensor]:
    """Return the columns that the config's workflow reports because its advantage estimator needs them.

    rewards, sample: each trajectory's reward, and its number in its group.
    """
    if config.algo.advantage == "remax":
        if config.reward_model.path:  # scores the greedy reply like the others
            return {"is_greedy": (sample == 0).float()}
        return {"greedy_reward": rewards.flip(0), "greedy_tokens": torch.ones_like(rewards)}
    if config.algo.advantage == "gdpo":  # parts of the reward that add up to it
        weights = {name: weight for name, weight in config.rollout.weights.items() if weight} or {"reward": 1.0}
        return {PART + name: rewards / weight / len(weights) for name, weight in weights.items()}
    return {"agent": torch.zeros_like(sample)} if config.algo.advantage == "agent_norm" else {}


def drawn_group(
    config: TrainConfig, lengths: Sequence[tuple[int, int]], generator: torch.Generator
) -> tuple[int, list[int]]:
    """Draw a group. Return the number of tokens of its prompt, and of each reply. lengths: as in made_batch."""
    samples, most = config.generation.n_samples, config.generation.max_new_tokens
    drawn = torch.randint(most // 4, most + 1, (samples,), generator=generator).tolist()
    if not lengths:
        return config.data.max_prompt_tokens or 512, drawn
    lines = torch.randint(len(lengths), (samples,), generator=generator).tolist()
    return lengths[lines[0]][0], [lengths[line][1] or limit for line, limit in zip(lines, drawn, strict=True)]
