"""A planned run on one split of the GPUs between servers and trainers: its batch, memory and step time.

The step time is simulated from the times of a token and of an update. Reply lengths are uniform between 0 and the
maximum.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_rl.config import TrainConfig
from megatron_rl.tools.plan import devices
from megatron_rl.tools.plan.devices import Device
from megatron_rl.tools.plan.memory import Model, ServerMemory, TrainerMemory
from megatron_rl.tools.plan.simulation import Workload, simulate
from megatron_rl.tools.plan.step_sizes import BatchPlan, PromptTokens
from megatron_rl.tools.plan.throughput import (
    Decoder,
    forward_flops,
    passes,
    rows_of_step,
    training_passes,
    update_seconds,
)
from megatron_rl.tools.plan.traffic import RankTraffic, Traffic

REPLIES_SIMULATED = 256
"""Maximum number of replies simulated per step. If a step has more, servers and groups are scaled down together."""
STEPS_SIMULATED = 6
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


@dataclass(frozen=True, kw_only=True)
class Split:
    """Seconds of a simulated step, by activity."""

    rollout_s: float
    """Time that a server is busy, on average."""
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
    shares_gpus: bool
    """Whether servers use the trainers' GPUs. They do so in turns (rollout.colocated), or because there are too few
    GPUs for both. In the latter case the plan does not fit."""

    @property
    def slots(self) -> int:
        """Number of replies that fit on a server at the same time, at least 1."""
        return max(1, self.server.replies)

    @property
    def max_staleness(self) -> int:
        return 0 if self.shares_gpus else self.config.rollout.max_staleness

    @cached_property
    def decoder(self) -> Decoder:
        server = self.server
        # A GPU only reads the KV cache of the replies of its own attention replica.
        return Decoder(self.models[0], server.gpus, self.cluster.device, server.kv_per_token / server.replicas)

    @cached_property
    def read_s(self) -> float:
        """Seconds that a server takes to prefill one prompt token, which on average attends to half of the prompt."""
        policy = self.models[0]
        peak = self.server.gpus * self.cluster.device.flops(policy.engine.model.dtype)
        return forward_flops(policy, 1, 0, self.tokens.mean / 2) / (peak * devices.PREFILL_EFFICIENCY)

    @cached_property
    def update_s(self) -> float:
        device = self.cluster.device
        on_cpu = sum(memory.on_cpu for memory in self.trainer.by_model.values())
        computed = update_seconds(self.models, self.config, self.batch, self.tokens, self.trainer_gpus, device)
        copied = self.batch.updates * devices.HOST_TRAFFIC * on_cpu / devices.HOST_BANDWIDTH
        return computed + copied + self._exposed_s(computed)

    @cached_property
    def traffic(self) -> dict[str, list[Traffic]]:
        """{trained model: traffic of one update}, for the rank whose links are busy longest."""
        return {model.name: self._sent(model, RankTraffic.of_update) for model in self.models if model.is_trained}

    @cached_property
    def publication_traffic(self) -> list[Traffic]:
        """Traffic between trainer ranks to assemble published weights, for the rank whose links are busy longest."""
        return self._sent(self.models[0], lambda rank, rows, labels: rank.of_publication())

    def _sent(self, model: Model, of_rank: Callable[[RankTraffic, float, float], list[Traffic]]) -> list[Traffic]:
        """Return the traffic of the busiest rank for one replica's rows of an update.

        of_rank: computes one rank's traffic from its RankTraffic, rows and label rows.
        """
        layout, world = model.engine.parallel, self.trainer_gpus
        share = layout.tensor * layout.pipeline * layout.context / world / self.batch.updates
        rows, labels = (share * count for count in rows_of_step(self.config, self.batch, self.tokens))
        by_stage = [
            of_rank(RankTraffic(model, first, world, self.cluster.gpus_per_node), rows, labels)
            for first in range(0, world, world // layout.pipeline)
        ]
        return max(by_stage, key=lambda sent: sum(part.seconds for part in sent))

    def _exposed_s(self, computed: float) -> float:
        """Return the seconds of a step in which communication between trainer ranks is not hidden by computation.

        computed: seconds of the computation, which can hide gradient and weight traffic (optimizer.overlap).
        """
        exposed, hidden = 0.0, 0.0
        for model in self.models:
            updates = self.batch.updates
            if model.is_trained:
                for part in self.traffic[model.name]:
                    is_hidden = model.engine.optimizer.overlap and part.axis in ("data", "expert data")
                    hidden += updates * part.seconds * is_hidden
                    exposed += updates * part.seconds * (not is_hidden)
            if count := passes(model, self.config) - training_passes(model) * model.is_trained:
                sent = self._sent(model, RankTraffic.of_forward_pass)
                exposed += count * updates * sum(part.seconds for part in sent)
        return exposed + max(0.0, hidden - computed)

    @property
    def publish_s(self) -> float:
        return self.models[0].published_bytes / devices.PUBLICATION_BANDWIDTH

    @property
    def turns_s(self) -> float:
        """Seconds to move all engine states to host memory and back (rollout.colocated)."""
        kept = sum(memory.kept for memory in self.trainer.by_model.values())
        return 2 * kept / devices.HOST_BANDWIDTH if self.config.rollout.colocated else 0.0

    @property
    def least_s(self) -> float:
        """Lower bound of the step time, from the trainer's work and the servers' work with all slots full."""
        longest = self.config.generation.max_new_tokens
        # The cheapest token: a full batch of replies that have just begun.
        one = self.decoder.seconds(self.slots, self.tokens.mean) / self.slots
        servers_s = self.batch.requests * devices.MEAN_REPLY * longest * one / self.servers
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
        share = groups / batch.prompts * self.servers / servers  # simulated over real work of a server, due to rounding
        work = Workload(
            servers=servers,
            slots=self.slots,
            token_s=self.decoder.seconds,
            read_s=self.read_s,
            prompt_tokens=self.tokens.mean,
            groups=spread_lengths(self.config.generation.max_new_tokens, groups, batch.requests // batch.prompts),
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
            reply_tokens=batch.requests * devices.MEAN_REPLY * self.config.generation.max_new_tokens,
        )

    @property
    def fits(self) -> bool:
        return self.trainer.fits and self.server.fits and self.has_gpus_for_both

    @property
    def has_gpus_for_both(self) -> bool:
        return self.config.rollout.colocated or not self.shares_gpus


def spread_lengths(longest: int, groups: int, samples: int) -> Iterator[list[int]]:
    """Yield groups of `samples` reply lengths, endlessly. The lengths of each step (`groups` groups) are evenly spaced
    between 0 and `longest`."""
    count, chance = groups * samples, random.Random(0)
    lengths = [max(1, round((number + 0.5) / count * longest)) for number in range(count)]
    while True:
        chance.shuffle(lengths)
        yield from (lengths[first : first + samples] for first in range(0, count, samples))
