"""Devices that rollout servers and the trainer share (rollout.colocated), and who uses them when.

While servers generate, every engine waits in host memory. While the trainer works, the servers have neither KV cache
nor CUDA graphs, and no weights either until the publication. During the publication, the device has the weights of the
servers and of the policy, and nothing else. A checkpoint needs all of the policy, so the servers release their weights
again. An engine moves onto the device by itself when it is used.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_rl.config import TrainConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.offload import SharedDevice
from megatron_rl.parallel import Axis, ParallelGroups
from megatron_rl.rollout.process import RolloutProcess
from megatron_rl.servers.server_memory import ALL_MEMORY
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.telemetry.timers import PhaseTimers

NO_MEMORY: frozenset[str] = frozenset()
WEIGHTS = frozenset({"weights"})


class DeviceSharing:
    """Hands the devices from the servers to the trainer and back. Does nothing if the servers have their own devices.

    Create this after the servers have started. Collective: every rank calls every method. A step calls
    `give_to_trainer`, `prepare_publication` and `give_to_servers` in this order.
    """

    def __init__(
        self,
        config: TrainConfig,
        groups: ParallelGroups,
        timers: PhaseTimers,
        supervisor: Supervisor | None,
        process: RolloutProcess | None,
        nodes: Axis | None = None,
        dropped: dict[str, str] | None = None,
    ) -> None:
        """supervisor, nodes: None on all ranks except each node's first.

        process: used only on the main rank, where it commands all servers. dropped: URL -> reason for each server of
        another node that must be restarted.
        """
        self.groups, self.timers, self.supervisor, self.process = groups, timers, supervisor, process
        self.nodes, self.dropped = nodes, {} if dropped is None else dropped
        self._starts: dict[str, int] = {}
        """URL -> process id of each of this node's servers when `_set_memory` last ran."""
        self.are_shared = config.rollout.colocated
        self.held = ALL_MEMORY if self.are_shared else NO_MEMORY
        """Parts of GPU memory that the servers hold now. Empty if they do not share the trainer's devices."""
        self.engines: SharedDevice | None = None
        """Moves the trainer's engines on and off the device. None if all engines always stay on it."""
        if self.are_shared or config.run.offload:
            self.engines = SharedDevice(one_at_a_time=config.run.offload, make_room=self._make_room)

    def give_to_servers(self) -> None:
        """Move the engines to host memory, and let the servers allocate their KV cache.

        The servers must already have the weights.
        """
        if not self.are_shared or self.held == ALL_MEMORY:
            return
        assert self.held == WEIGHTS and self.engines is not None, "a publication comes first"
        with self.timers("device_sharing"):
            self.engines.leave()
            self._set_memory(ALL_MEMORY)
            if self.supervisor is not None:
                self.supervisor.take_devices_back()

    def give_to_trainer(self) -> None:
        """Make the servers release all their device memory.

        This includes their weights, because the next publication replaces them.
        """
        self._lend(NO_MEMORY)

    def prepare_publication(self, policy: MegatronEngine) -> None:
        """Restart dead servers, and let all servers allocate memory for weights.

        Of the trainer's data, only the policy's weights stay on the device.
        """
        if not self.are_shared:
            return
        assert self.engines is not None
        self.engines.leave_but_weights(policy)
        self._lend(WEIGHTS)
        supervisor = self.supervisor  # on rank 0 only, so all ranks decide together below
        dead = self._set_memory(WEIGHTS)
        if self.groups.any(bool(dead) or (supervisor is not None and supervisor.lacks_servers)):
            self.engines.leave()
            dist.barrier(self.groups.control)  # on every rank: starting servers take all free memory
            if supervisor is not None:
                supervisor.start_missing(dead)
            self._set_memory(WEIGHTS)
        elif supervisor is not None:
            supervisor.start_missing()  # those that die from now on

    @property
    def servers_lack_weights(self) -> bool:
        """True if the servers have released their weights, so that a publication must precede `give_to_servers`."""
        return self.are_shared and self.held == NO_MEMORY

    def _make_room(self, with_states: bool) -> None:
        """Make the servers release memory for an engine that needs the device now, for example to save a checkpoint.

        with_states: make room for the optimizer's states as well. The servers then release their weights too, and
        another publication must follow.
        """
        self._lend(NO_MEMORY if with_states else WEIGHTS)

    def _lend(self, parts: frozenset[str]) -> None:
        """Make the servers release all memory except `parts`. Does nothing if they hold no more than these."""
        if not self.held > parts:
            return
        with self.timers("device_sharing"):
            if self.held == ALL_MEMORY and self.supervisor is not None:
                self.supervisor.lend_devices()
            self._set_memory(parts)

    def _set_memory(self, parts: frozenset[str]) -> list[str]:
        """Make the servers hold exactly `parts`.

        Return the URLs of servers that failed, on ranks that started servers.
        """
        dist.barrier(self.groups.control)  # until every engine is out
        dead: list[str] = []
        if self.supervisor is not None and self.nodes is not None:
            dead = self._command_servers(parts, self.supervisor, self.nodes)
        dist.barrier(self.groups.control)  # until the servers are done
        self.held = parts
        return dead

    def _command_servers(self, parts: frozenset[str], supervisor: Supervisor, nodes: Axis) -> list[str]:
        own, starts = supervisor.starts, [{}] * nodes.size
        dist.all_gather_object(starts, own, group=nodes.group)
        told: list[Any] = [None, None]
        if nodes.rank == 0 and self.process is not None:
            told[0] = self.process.set_memory(
                parts, {url: start for of_node in starts for url, start in of_node.items()}
            )
            told[1] = {url: self.dropped.pop(url) for url in list(self.dropped)}
        dist.broadcast_object_list(told, group_src=0, group=nodes.group)
        dead, dropped = told
        for url in own.keys() & dropped.keys():
            # A server that died of its fault may have been restarted since. Do not kill the new process for it.
            if url in dead or self._starts.get(url) == own[url]:
                supervisor.replace(url, dropped[url])
        self._starts = own
        return dead
