"""A planned run on one split of the GPUs between servers and trainers: its batch, memory and step time.

The step time is simulated from the times of a token and of an update, for assumed or known reply lengths.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_rl.config import TrainConfig
from megatron_rl.tools.plan import devices
from megatron_rl.tools.plan.devices import Device
from megatron_rl.tools.plan.memory import Model, ServerMemory, TrainerMemory
from megatron_rl.tools.plan.simulation import Workload, simulate
from megatron_rl.tools.plan.step_sizes import BatchPlan, PromptTokens, ReplyTokens, replies_of, usual_microbatches
from megatron_rl.tools.plan.throughput import (
    Decoder,
    causal_keys,
    draft_seconds,
    forward_flops,
    forward_seconds,
    passes,
    rows_of_step,
    training_passes,
    with_bubble,
)
from megatron_rl.tools.plan.traffic import RankTraffic, Traffic, publication_seconds

REPLIES_SIMULATED = 256
"""Maximum number of replies simulated per step. If a step has more, servers and groups are scaled down together."""
STEPS_SIMULATED = 6
GRADIENT_AXES = ("data", "expert data", "embedding")
"""Axes along which ranks communicate once per update instead of once per microbatch."""
LONGEST_FILLING = 16
"""Maximum number of steps simulated before the measured ones, to fill the pipeline."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The available GPUs: `Cluster(nodes=4, gpus_per_node=8, device=DEVICES["h100"])`."""

    nodes: int
    gpus_per_node: int
    device: Device
    servers: int = 0
    """Fixed number of servers; 0 lets the plan choose."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Work:
    """Seconds that the trainer spends on computation, and on communication that computation does not hide."""

    compute_s: float = 0.0
    traffic_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute_s + self.traffic_s

    def __add__(self, other: Work) -> Work:
        return Work(self.compute_s + other.compute_s, self.traffic_s + other.traffic_s)

    def __mul__(self, times: float) -> Work:
        return Work(times * self.compute_s, times * self.traffic_s)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Seconds of a simulated step, by activity."""

    rollout_s: float
    """Time that a server is busy, as a mean over all servers."""
    wait_s: float
    """Time that the trainer waits for replies."""
    update_s: float
    publish_s: float
    turns_s: float
    """Time to hand the GPUs over between servers and trainer (rollout.colocated)."""
    reply_tokens: float
    """Mean total number of tokens in a step's replies."""

    @property
    def step_s(self) -> float:
        return self.wait_s + self.update_s + self.publish_s + self.turns_s

    @property
    def tokens_per_s(self) -> float:
        return self.reply_tokens / self.step_s

    @property
    def server_idle(self) -> float:
        return 1 - self.rollout_s / self.step_s

    @property
    def trainer_idle(self) -> float:
        return self.wait_s / self.step_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A planned run on one split of the GPUs: its batch, memory and time.

    For example:

        plan = best_plan(config, PromptTokens.of([9, 12]), Cluster(nodes=1, gpus_per_node=8, device=DEVICES["h100"]))
        if plan.fits:
            print(plan.trainer_gpus, plan.servers, plan.trainer.peak, plan.split.step_s)
    """

    config: TrainConfig
    cluster: Cluster
    tokens: PromptTokens
    models: list[Model]
    batch: BatchPlan
    trainer: TrainerMemory
    server: ServerMemory
    servers: int
    trainer_gpus: int
    is_balanced: bool = False
    """True if the router gives every expert equally many rows, as in most benchmarks of pre-training."""
    shares_gpus: bool
    """True if servers use the trainers' GPUs. They do so in turns (rollout.colocated), or because there are too few
    GPUs for both. In the latter case the plan does not fit."""

    @cached_property
    def replies(self) -> ReplyTokens:
        return replies_of(self.config, self.tokens)

    @property
    def slots(self) -> int:
        """Number of replies of mean length that fit on a server at the same time, at least 1."""
        return max(1, self.server.replies_of(self.tokens.mean + self.replies.mean))

    @property
    def max_staleness(self) -> int:
        return 0 if self.shares_gpus else self.config.rollout.max_staleness

    @cached_property
    def decoder(self) -> Decoder:
        server = self.server
        # A GPU only reads the KV cache of the replies of its own attention replica.
        kv_per_token, nodes = server.kv_per_token / server.replicas, -(-server.gpus // self.cluster.gpus_per_node)
        return Decoder(self.models[0], server.gpus, self.cluster.device, kv_per_token, nodes)

    @cached_property
    def read_s(self) -> float:
        """Seconds to prefill one prompt token on a server. On average the token attends to half of the prompt."""
        policy = self.models[0]
        peak = self.server.gpus * self.cluster.device.flops(policy.engine.model.dtype)
        return forward_flops(policy, 1, 0, self.tokens.mean / 2) / (peak * devices.PREFILL_EFFICIENCY)

    @cached_property
    def work(self) -> dict[str, Work]:
        """The trainer's work in a step, by activity: the passes before the updates, the updates, the optimizer."""
        first, updates, optimizer = Work(), Work(), Work()
        for model in self.models:
            trained = training_passes(model) if model.is_trained else 0.0
            first += self._forward_passes(model, passes(model, self.config) - trained)
            if model.is_trained:
                updates += self._updates(model, trained)
                optimizer += self._optimizer(model)
        on_cpu = sum(memory.on_cpu for memory in self.trainer.by_model.values())
        copied = self.batch.updates * devices.HOST_TRAFFIC * on_cpu / devices.HOST_BANDWIDTH
        hidden = updates.compute_s if self.config.optimizer.overlap else 0.0
        optimizer = Work(optimizer.compute_s + copied, max(0.0, optimizer.traffic_s - hidden))
        return {"passes before": first, "updates": updates, "optimizer": optimizer}

    @property
    def update_s(self) -> float:
        return sum(part.seconds for part in self.work.values())

    def _microbatch_s(self, model: Model) -> float:
        """Return the seconds of a forward pass over one microbatch, without traffic."""
        count = self.batch.updates * self.batch.replicas * self.microbatches
        rows, labels = (total / count for total in rows_of_step(self.config, self.batch, self.tokens))
        keys = causal_keys(self.config, self.tokens)
        imbalance = 1.0 if self.is_balanced else devices.ROUTING_IMBALANCE
        return forward_seconds(model, rows, labels, keys, self.cluster.device, imbalance)

    def _draft_s(self, model: Model) -> float:
        """Return the seconds to train the draft head on one microbatch."""
        if model.engine.draft.kind == "none":
            return 0.0
        count = self.batch.updates * self.batch.replicas * self.microbatches
        reply = self.replies.mean
        rows, labels = (self.batch.trajectories * length / count for length in (self.tokens.mean + reply, reply))
        return draft_seconds(model, rows, labels, causal_keys(self.config, self.tokens), self.cluster.device)

    @cached_property
    def microbatches(self) -> float:
        """Expected microbatches of a replica in an update."""
        of_replica = self.batch.trajectories / (self.batch.updates * self.batch.replicas)
        return usual_microbatches(self.config, self.tokens, of_replica)

    def _forward_passes(self, model: Model, count: float) -> Work:
        """Return the work of `count` forward passes over the step's tokens."""
        if not count:
            return Work()
        microbatches = self.batch.updates * self.microbatches
        sent = self.batch.updates * self._sent_s(self._sent(model, RankTraffic.of_forward_pass))
        return Work(microbatches * self._microbatch_s(model), sent) * (count * with_bubble(model, microbatches))

    def _updates(self, model: Model, passes: float) -> Work:
        sent = self._sent_s(part for part in self.traffic[model.name] if part.axis not in GRADIENT_AXES)
        work = Work(self.microbatches * (passes * self._microbatch_s(model) + self._draft_s(model)), sent)
        return work * (self.batch.updates * with_bubble(model, self.microbatches))

    def _optimizer(self, model: Model) -> Work:
        """Return the time to read and write all states once, and to reduce gradients and gather weights."""
        states = self.trainer.by_model[model.name].states
        names = ("gradients", "optimizer", "draft head")
        moved = 2 * sum(states.get(name, 0.0) for name in names) / self.cluster.device.bandwidth
        sent = self._sent_s(part for part in self.traffic[model.name] if part.axis in GRADIENT_AXES)
        return Work(moved, sent) * self.batch.updates

    @cached_property
    def traffic(self) -> dict[str, list[Traffic]]:
        """{trained model: traffic of one update on the rank whose links are busy longest}."""
        return {model.name: self._sent(model, RankTraffic.of_update) for model in self.models if model.is_trained}

    @cached_property
    def publication_traffic(self) -> list[Traffic]:
        """Traffic to assemble published weights from other trainer ranks, on the rank whose links are busy longest."""
        return self._sent(self.models[0], lambda rank, rows, labels: rank.of_publication())

    def _sent(self, model: Model, of_rank: Callable[[RankTraffic, float, float], list[Traffic]]) -> list[Traffic]:
        """Return the traffic of the rank whose links are busy longest, for one replica's rows of an update.

        of_rank: function that returns a rank's traffic, given its RankTraffic, the number of rows and the number of
        label rows.
        """
        layout, world = model.engine.parallel, self.trainer_gpus
        share = layout.tensor * layout.pipeline * layout.context / world / self.batch.updates
        rows, labels = (share * count for count in rows_of_step(self.config, self.batch, self.tokens))
        by_stage = [
            of_rank(RankTraffic(model, first, world, self.cluster.gpus_per_node), rows, labels)
            for first in range(0, world, world // layout.pipeline)
        ]
        return max(by_stage, key=self._sent_s)

    def _sent_s(self, sent: Iterable[Traffic]) -> float:
        return sum(part.seconds(self.cluster.device) for part in sent)

    @property
    def publish_s(self) -> float:
        return publication_seconds(self.models[0], self.cluster.nodes, self.cluster.device, self.publication_traffic)

    @property
    def turns_s(self) -> float:
        """Seconds to move all engine states to host memory and back (rollout.colocated)."""
        kept = sum(memory.kept for memory in self.trainer.by_model.values())
        return 2 * kept / devices.HOST_BANDWIDTH if self.config.rollout.colocated else 0.0

    @property
    def least_s(self) -> float:
        """Lower bound of the step time, from the trainer's work and from the servers' work with all slots in use."""
        # The cheapest token: a full batch of replies that have just begun.
        one = self.decoder.seconds(self.slots, self.tokens.mean) / self.slots
        servers_s = self.batch.requests * self.replies.mean * one / self.servers
        both = max(servers_s, self.update_s) if self.max_staleness else servers_s + self.update_s
        return both + self.publish_s + self.turns_s

    @cached_property
    def split(self) -> Split:
        """The simulated time of a step. Large runs are simulated with fewer servers and groups.

        This is much slower to compute than `least_s`.
        """
        batch, servers, groups = self.batch, self.servers, self.batch.prompts
        # Servers and groups are scaled by the same factor, so each server has as much work as in the run.
        if batch.requests > REPLIES_SIMULATED:
            servers = max(1, servers * REPLIES_SIMULATED // batch.requests)
            groups = max(1, round(groups * servers / self.servers))
        share = groups / batch.prompts * self.servers / servers  # simulated / real work of a server, due to rounding
        work = Workload(
            servers=servers,
            slots=self.slots,
            token_s=self.decoder.seconds,
            read_s=self.read_s,
            prompt_tokens=self.tokens.mean,
            groups=spread_lengths(self.replies, groups, batch.requests // batch.prompts),
            groups_per_step=groups,
            groups_at_once=max(1, round(batch.episodes_running * groups / batch.prompts)),
            max_staleness=self.max_staleness,
            drops_stale=self.config.rollout.stale == "drop",
            # Rounding gave a server `share` times its work, so the trainer's times are scaled alike.
            update_s=self.update_s * share,
            publish_s=(self.publish_s + self.turns_s) * share,
        )
        filling = min(self.max_staleness + 2, LONGEST_FILLING) if self.max_staleness else 0
        outcome = simulate(work, steps=STEPS_SIMULATED, first=filling)
        return Split(
            rollout_s=outcome.busy * outcome.step_s / share,
            wait_s=outcome.wait_s / share,
            update_s=self.update_s,
            publish_s=self.publish_s,
            turns_s=self.turns_s,
            reply_tokens=batch.requests * self.replies.mean,
        )

    @property
    def step_range_s(self) -> tuple[float, float]:
        """Shortest and longest step time in seconds, given the plan's errors for published runs (STEP_RANGE)."""
        shortest, longest = devices.STEP_RANGE
        return self.split.step_s * shortest, self.split.step_s * longest

    @property
    def tokens_per_s_of_gpu(self) -> float:
        """Prompt and reply tokens of a step's trajectories, per second and per GPU of servers and trainer together.

        Each prompt counts once per reply. This is NeMo-RL's definition.
        """
        tokens = self.batch.trajectories * (self.tokens.mean + self.replies.mean)
        return tokens / self.split.step_s / self.cluster.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of the updates: their forward and backward passes' share of the trainer's peak FLOPS.

        Attention is causal, and recomputed activations do not count. Passes before the updates count neither as FLOPs
        nor as time.
        """
        rows, labels = rows_of_step(self.config, self.batch, self.tokens)
        keys, share = causal_keys(self.config, self.tokens), 0.0
        for model in self.models:
            passes = 2 if model.engine.lora.rank > 0 else 3
            flops = forward_flops(model, rows, labels, keys) * passes * model.is_trained
            share += flops / (self.trainer_gpus * self.cluster.device.flops(model.engine.model.dtype))
        return share / (self.work["updates"].seconds + self.work["optimizer"].seconds)

    @property
    def bound(self) -> tuple[str, float]:
        """Name and seconds of the part of a step that takes longest."""
        split, work, longest = self.split, self.work.values(), self.replies.lengths[-1]
        alone_s = longest * self.decoder.seconds(1, self.tokens.mean + longest / 2)
        # With staleness, other replies are decoded beside the longest one.
        is_tail = alone_s > split.wait_s / 2 and not self.max_staleness
        waits_for = "the longest reply" if is_tail else "the servers' decoding"
        parts = {
            waits_for: split.wait_s,
            "the trainer's computation": sum(part.compute_s for part in work),
            "the trainer's traffic": sum(part.traffic_s for part in work),
            "the publication": split.publish_s + split.turns_s,
        }
        return max(parts.items(), key=lambda part: part[1])

    @property
    def fits(self) -> bool:
        return self.trainer.fits and self.is_served and self.has_gpus_for_both

    @property
    def is_served(self) -> bool:
        """True if a server has memory for at least one reply. Assumed for servers that already run."""
        return self.server.fits or bool(self.config.rollout.servers)

    @property
    def has_gpus_for_both(self) -> bool:
        return self.config.rollout.colocated or not self.shares_gpus


def spread_lengths(replies: ReplyTokens, groups: int, samples: int) -> Iterator[list[int]]:
    """Yield groups of `samples` reply lengths, endlessly.

    The lengths of each step, which is `groups` groups, are evenly spaced quantiles in random order.
    """
    count, chance = groups * samples, random.Random(0)
    lengths = replies.spread(count)
    while True:
        chance.shuffle(lengths)
        yield from (lengths[first : first + samples] for first in range(0, count, samples))
