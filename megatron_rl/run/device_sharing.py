"""Whose turn it is on devices that rollout servers and the trainer share (rollout.colocated).

While servers generate, every engine waits in host memory. While the trainer works, servers have no cache, and from the
end of a rollout to the publication no weights either. An engine that is used takes its turn by itself, so no phase of
the loop can forget to ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_rl.engine.offload import Turns
from megatron_rl.servers.server_memory import ALL_MEMORY

if TYPE_CHECKING:
    from megatron_rl.run.rl_run import RLRun

NO_MEMORY: frozenset[str] = frozenset()
WEIGHTS = frozenset({"weights"})


class SharedDevices:
    """Those of one experiment. All ranks call every method; where servers have devices of their own, none does much."""

    def __init__(self, experiment: RLRun) -> None:
        self.x = experiment
        self.are_shared = experiment.config.rollout.colocated
        self.held = NO_MEMORY
        """What the servers have of their memory."""
        one_at_a_time = experiment.config.run.offload
        self.turns: Turns | None = None
        if self.are_shared or one_at_a_time:
            self.turns = Turns(one_at_a_time=one_at_a_time, make_room=self._make_room)

    def servers_have_started(self) -> None:
        """With all their memory, which no engine may find taken."""
        if self.are_shared:
            self.held = ALL_MEMORY
            self.give_to_trainer()

    def give_to_servers(self) -> None:
        """Before replies are asked for: engines go out, and servers that have the weights get their cache."""
        if not self.are_shared or self.held == ALL_MEMORY:
            return
        assert self.held == WEIGHTS and self.turns is not None, "a publication comes first"
        with self.x.timers("turns"):
            self.turns.leave()
            self._occupy(ALL_MEMORY)
            if self.x.rollouts.supervisor is not None:
                self.x.rollouts.supervisor.take_devices_back()

    def give_to_trainer(self) -> None:
        """After a rollout: the weights of the servers are going to be replaced."""
        self._lend(NO_MEMORY)

    def prepare_publication(self) -> None:
        """Give the servers memory for weights. Those that died are started again first, while no engine is there."""
        if not self.are_shared:
            return
        assert self.turns is not None
        if self.held == ALL_MEMORY:
            self._lend(WEIGHTS)
        supervisor = self.x.rollouts.supervisor
        dead = self._occupy(WEIGHTS)
        if self.x.groups.any(bool(dead) or (supervisor is not None and supervisor.lacks_servers)):
            self.turns.leave()
            dist.barrier(self.x.groups.control)
            if supervisor is not None:
                supervisor.start_missing(dead)
            self._occupy(WEIGHTS)
        elif supervisor is not None:
            supervisor.start_missing()  # any that dies from here on

    def _make_room(self) -> None:
        """An engine comes in while the servers may generate: to save, say. They keep the weights, which are current."""
        if self.held == ALL_MEMORY:
            self._lend(WEIGHTS)

    def _lend(self, parts: frozenset[str]) -> None:
        if not self.are_shared or self.held == parts:
            return
        with self.x.timers("turns"):
            if self.held == ALL_MEMORY and self.x.rollouts.supervisor is not None:
                self.x.rollouts.supervisor.lend_devices()
            self._occupy(parts)

    def _occupy(self, parts: frozenset[str]) -> list[str]:
        """Return the URLs of servers that failed, on the rank that started them."""
        dist.barrier(self.x.groups.control)  # every engine is out
        rollouts, dead = self.x.rollouts, []
        if rollouts.supervisor is not None and rollouts.process is not None:
            dead = rollouts.process.occupy(parts, rollouts.supervisor.starts)
        dist.barrier(self.x.groups.control)  # the servers are
        self.held = parts
        return dead
