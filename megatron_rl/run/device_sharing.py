"""Devices that rollout servers and the trainer share (rollout.colocated), and who has them when.

While servers generate, every engine waits in host memory. While the trainer works, servers have no cache, and from the
end of a rollout to the publication no weights either. An engine that is used takes its turn by itself, so no phase of
the loop can forget to ask.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron_rl.config import TrainConfig
from megatron_rl.engine.offload import SharedDevice
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.process import RolloutProcess
from megatron_rl.servers.server_memory import ALL_MEMORY
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.telemetry.timers import PhaseTimers

NO_MEMORY: frozenset[str] = frozenset()
WEIGHTS = frozenset({"weights"})


class DeviceSharing:
    """Hands the devices from the servers to the trainer and back; does nothing where servers have their own.

        devices = DeviceSharing(config, groups, timers, supervisor, process)
        devices.give_to_trainer()  # before the first engine is made, with shared_device=devices.engines
        devices.prepare_publication()  # servers get memory for weights
        devices.give_to_servers()  # engines go out, servers get their cache

    Made when the servers have started. Collective: every rank calls every method.
    """

    def __init__(
        self,
        config: TrainConfig,
        groups: ParallelGroups,
        timers: PhaseTimers,
        supervisor: Supervisor | None,
        process: RolloutProcess | None,
    ) -> None:
        self.groups, self.timers, self.supervisor, self.process = groups, timers, supervisor, process
        self.are_shared = config.rollout.colocated
        self.held = ALL_MEMORY if self.are_shared else NO_MEMORY
        """The parts of their memory that the servers have; all of it, as they start."""
        self.engines: SharedDevice | None = None
        """The trainer's side; None where every engine is on the device all the time."""
        if self.are_shared or config.run.offload:
            self.engines = SharedDevice(one_at_a_time=config.run.offload, make_room=self._make_room)

    def give_to_servers(self) -> None:
        """Send the engines out and give servers, which have the weights, their cache; replies can be asked for then."""
        if not self.are_shared or self.held == ALL_MEMORY:
            return
        assert self.held == WEIGHTS and self.engines is not None, "a publication comes first"
        with self.timers("device_sharing"):
            self.engines.leave()
            self._set_memory(ALL_MEMORY)
            if self.supervisor is not None:
                self.supervisor.take_devices_back()

    def give_to_trainer(self) -> None:
        """Take the devices from the servers, with their weights, which are going to be replaced."""
        self._lend(NO_MEMORY)

    def prepare_publication(self) -> None:
        """Give the servers memory for weights. Those that died are started again first, while no engine is there."""
        if not self.are_shared:
            return
        assert self.engines is not None
        if self.held == ALL_MEMORY:
            self._lend(WEIGHTS)
        supervisor = self.supervisor  # on rank 0 alone: what the others do below is decided together
        dead = self._set_memory(WEIGHTS)
        if self.groups.any(bool(dead) or (supervisor is not None and supervisor.lacks_servers)):
            self.engines.leave()
            dist.barrier(self.groups.control)  # on every rank: a server that starts takes what memory it finds
            if supervisor is not None:
                supervisor.start_missing(dead)
            self._set_memory(WEIGHTS)
        elif supervisor is not None:
            supervisor.start_missing()  # any that dies from here on

    def _make_room(self) -> None:
        """An engine comes in while the servers may generate: to save, say. They keep the weights, which are current."""
        if self.held == ALL_MEMORY:
            self._lend(WEIGHTS)

    def _lend(self, parts: frozenset[str]) -> None:
        if not self.are_shared or self.held == parts:
            return
        with self.timers("device_sharing"):
            if self.held == ALL_MEMORY and self.supervisor is not None:
                self.supervisor.lend_devices()
            self._set_memory(parts)

    def _set_memory(self, parts: frozenset[str]) -> list[str]:
        """Return the URLs of servers that failed, on the rank that started them."""
        dist.barrier(self.groups.control)  # every engine is out
        dead: list[str] = []
        if self.supervisor is not None and self.process is not None:
            dead = self.process.set_memory(parts, self.supervisor.starts)
        dist.barrier(self.groups.control)  # the servers are
        self.held = parts
        return dead
