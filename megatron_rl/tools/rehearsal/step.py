"""A step of RL without servers, prompts and weights: the parts of RLRun, in the order of its loop."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_rl.config import TrainConfig
from megatron_rl.engine import offload
from megatron_rl.engine.checkpoint import start_adam, training_state
from megatron_rl.run.device_sharing import DeviceSharing
from megatron_rl.run.rl_run import RLRun
from megatron_rl.tools.rehearsal.device_ledger import Ledger
from megatron_rl.tools.rehearsal.stand_ins import NoWeights
from megatron_rl.types import TrajectoryBatch, prefix_sums
from megatron_rl.weights import mapping
from megatron_rl.weights.publish import WeightPublisher, fill_buckets, plan_buckets


class RehearsedRun(RLRun):
    """An RL run of engines alone."""

    def _start(self) -> None:
        self._join()
        self.devices = DeviceSharing(self.config, self.groups, self.timers, None, None)
        self._start_engines()
        for engine in self.trained.values():
            start_adam(engine.optimizer)  # the step is one of many: the first would meet an optimizer without moments

    def say(self, text: str) -> None:
        """Keep it: nobody reads what one of a thousand ranks says."""


def rehearse_step(config: TrainConfig, ledger: Ledger) -> None:
    """Run one step of this rank and tell the ledger of it."""
    mapping.HFFolder = mapping.RandomWeights = NoWeights
    # A storage without memory says that it is on torch's device for such.
    offload._bytes_of = lambda storage: torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    config = replace(config, batch=replace(config.batch, updates_per_step=1))
    run = RehearsedRun(config)
    run.timers.on_change = ledger.enter
    with contextlib.ExitStack() as run.at_end:
        run._start()
        ledger.enter("step")
        batch = made_batch(config, run.groups.data.size, run.engine.arch.vocab)
        batch = run.add_reward_model_scores(batch)
        with run.timers("advantages"):
            run.compute_advantages(batch)
            updates = run.split_into_updates(batch, 0)
        with run.timers("logprobs"):
            run.actor.compute_logprobs(updates)
        with run.timers("update"):
            run.actor.update(updates)
        run.update_critic(batch, 0)
        with run.timers("publish"):
            receiver = NoServers() if run.groups.is_main else None
            run.engine.publisher = BucketsAlone(receiver, ledger, bucket_bytes=run.engine.config.bucket_bytes)
            run.engine.update_weights(receiver, 1)
        with run.timers("checkpoint"):
            training_state(run.engine)
        if run.devices.engines is not None:
            with run.timers("offload"):
                run.engine.offload()
                run.engine.onload()


class NoServers:
    """Rollout servers of which nobody asks anything."""

    server_ranks: ClassVar[dict[str, int]] = {}

    def checksum_forms(self) -> dict[str, Any]:
        return {}


class BucketsAlone(WeightPublisher):
    """Gathers and fills buckets as for servers over a process group, and keeps the two that would be under way."""

    def __init__(self, receiver: Any, ledger: Ledger, *, bucket_bytes: int) -> None:
        super().__init__(receiver)
        self.ledger, self.bucket_bytes = ledger, bucket_bytes

    def _deliver(self, specs: Any, tensors: Any, version: int, checksums: Any) -> None:
        in_flight: list[Tensor] = []
        for bucket, pieces in fill_buckets(plan_buckets(specs, self.bucket_bytes), tensors):
            in_flight = [*in_flight[-1:], *pieces]
            self.ledger.buckets.append(sum(spec.nbytes for spec in bucket))


def made_batch(config: TrainConfig, replicas: int, vocab: int) -> TrajectoryBatch:
    """Draw a step's trajectories by the config's limits: enough for two microbatches of each replica, and for as many
    as are under way at one time in a pipeline."""
    prompt, reply = config.data.max_prompt_tokens or 512, config.generation.max_new_tokens
    samples = config.generation.n_samples
    generator = torch.Generator().manual_seed(1)
    wanted = config.batch.tokens_per_microbatch * max(2, config.parallel.pipeline) * replicas
    lengths: list[int] = []
    shared = prompt * (samples - 1) if config.batch.share_prompts else 0  # rows of a group that are computed once
    while sum(lengths) - shared * (len(lengths) // samples) < wanted * 0.9:
        lengths += [prompt + n for n in torch.randint(reply // 4, reply + 1, (samples,), generator=generator).tolist()]
    sizes = torch.tensor(lengths)
    cu = prefix_sums(sizes)
    count = int(cu[-1])
    position = torch.arange(count) - torch.repeat_interleave(cu[:-1], sizes)
    is_reply = position >= prompt
    group = torch.arange(len(lengths)) // samples
    sample = torch.arange(len(lengths)) % samples
    # A group's prompt is one, and its replies differ from their first token on.
    of_sequence = torch.where(is_reply, *(torch.repeat_interleave(number, sizes) for number in (sample, group)))
    ids = (position + of_sequence) % vocab
    tokens: dict[str, Tensor] = {
        "input_ids": ids,
        "loss_mask": is_reply,
        "logprobs": torch.full((count,), -1.0) * is_reply,
        "versions": torch.where(is_reply, 0, -1),
    }
    sequences = {
        "rewards": torch.rand(len(lengths), generator=generator),
        "group": group,
        "sample": sample,
    }
    return TrajectoryBatch(tokens, sequences, cu)
