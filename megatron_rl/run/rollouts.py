"""The rollout side of a run: its processes, and the exchange of weights and replies with them.

`RolloutProcesses` starts and stops the servers and this rank's rollout process, before an engine exists. `Rollouts`
publishes the engine's weights to the servers and requests replies. Servers that share the trainer's devices run on all
of its nodes: the first rank of each node starts the node's servers and sends them their weights.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_rl import parallel
from megatron_rl.algo.reward_shaping import take_out_greedy
from megatron_rl.api import NoServerLeft
from megatron_rl.config import DraftConfig, GenerationConfig, RolloutConfig, TrainConfig
from megatron_rl.data.prompts import PromptIterator
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.launch.cores import free_cores
from megatron_rl.launch.local import gpus_of_host
from megatron_rl.launch.ports import address_towards
from megatron_rl.launch.run_token import servers_of
from megatron_rl.launch.server_registry import wait_for_servers
from megatron_rl.life.signs_of_life import Silence
from megatron_rl.parallel import Axis, ParallelGroups
from megatron_rl.rollout.groups import mean_reward
from megatron_rl.rollout.process import RolloutProcess
from megatron_rl.rollout.rollout_rank import Beginning, RolloutRank
from megatron_rl.run.device_sharing import DeviceSharing
from megatron_rl.run.run_checkpoints import PromptResumeState
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.telemetry.rollout_metrics import Counts
from megatron_rl.types import TrajectoryBatch
from megatron_rl.weights.adapter_rules import last_parts
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.draft_files import write_draft_config
from megatron_rl.weights.ipc import IPCPublisher, NodesOfServers
from megatron_rl.weights.route_form import route_form

logger = logging.getLogger(__name__)

SERVER_LOOK_S = 0.2
"""Interval in seconds at which a rank that waits for replies checks whether servers need weights."""
PHASES_OF_ROLLOUTS = ("rollout", "evaluate", "publish")
"""Phases in which the trainer waits for its rollout process."""
PUBLICATION_ATTEMPTS = 3
"""Maximum attempts to publish one version. If all servers fail in every attempt, the run ends."""


class RolloutProcesses:
    """The servers and the rollout process that this rank starts.

    Rank 0 starts the run's servers; with colocated servers, each node's first rank starts some. Each rollout rank
    starts a rollout process.

        processes = RolloutProcesses(config, groups, on_death=process_exit.stop, say=print)
        processes.start(tokenizer, prompts, held_out, resume_state)
        ...
        processes.stop()

    Collective: every rank calls every method. `process` and `supervisor` are None on ranks that did not start them.
    """

    def __init__(
        self,
        config: TrainConfig,
        groups: ParallelGroups,
        *,
        on_death: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        """on_death(message) is called from a thread if all servers, or the rollout process, have died."""
        self.config, self.groups, self.folder = config, groups, Path(config.run.folder)
        self._on_death, self._say = on_death, say
        self.routes = route_form(read_architecture(config.model.path), config.algo.routing_replay)
        self.supervisor: Supervisor | None = None
        self.process: RolloutProcess | None = None
        self.nodes: Axis | None = None
        """Process group of the first ranks of all nodes. None on other ranks, or if the servers have devices of their
        own."""
        self.urls: list[list[str]] = []
        """URLs of all servers, grouped by the node that the run started them on."""
        self.dropped: dict[str, str] = {}
        """On the main rank: URL -> reason for each server of another node that must be restarted."""

    def start(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: PromptIterator,
        held_out: list[dict[str, Any]],
        resume_state: PromptResumeState,
    ) -> None:
        """Start the servers, or find them in the config or the registry. Connect every rollout rank to all of them."""
        if self.groups.is_rollout_rank:  # first, so that it gets ready while the servers start
            self._start_process(tokenizer, prompts, held_out, resume_state)
        urls: list[Any] = [[list(self.config.rollout.servers)]]
        if self.config.rollout.colocated:
            urls = [self._start_on_nodes()]
        elif self.groups.is_main and self.config.rollout.registry:
            urls = [[self._registered_servers()]]
        elif self.groups.is_main and not self.config.rollout.servers:
            urls = [[self._start_servers(servers_of(self.config), self.folder / "servers")]]
        # The other ranks wait here until the servers have started. The hang watch begins with the first phase.
        dist.broadcast_object_list(urls, src=0, group=self.groups.control)
        self.urls = urls[0]
        if self.process is not None:
            self.process.connect([url for of_node in self.urls for url in of_node])

    def _start_process(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: PromptIterator,
        held_out: list[dict[str, Any]],
        resume_state: PromptResumeState,
    ) -> None:
        rank = self.groups.data.rank
        self.process = RolloutProcess(
            self.folder / f"rollout{f'-{rank}' if rank else ''}.log",
            on_death=self._on_death,
            on_drop=self._on_drop,
            lock=resume_state.lock(),
        )
        self.process.begin(
            Beginning(
                config=self.config,
                tokenizer=tokenizer,
                resume_point=resume_state.resume_point(),
                prompts=prompts.prompts,
                held_out=held_out,
                sys_path=[str(Path(entry).absolute()) for entry in sys.path],
                routes=self.routes,
            )
        )

    def _start_on_nodes(self) -> list[list[str]]:
        """Start this node's share of the servers, if this rank is the first of its node.

        Returns the URLs of all servers, grouped by node, on the nodes' first ranks; [] on other ranks.
        """
        config, options = self.config, servers_of(self.config)
        self.nodes = nodes = parallel.first_ranks_of_nodes(self.groups, timeout_s=config.collective_timeout_s)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.groups.world_size))
        options.check_share(self.groups.world_size // here, len(gpus_of_host()))  # on all ranks, so that none waits
        if nodes is None:
            return []
        if nodes.size == 1:
            return [self._start_servers(options, self.folder / "servers")]
        options = replace(options, server_count=options.server_count // nodes.size)
        host, urls = address_towards(os.environ["MASTER_ADDR"]), [[""]] * nodes.size
        own = self._start_servers(options, self.folder / "servers" / f"node-{nodes.rank}", host=host)
        dist.all_gather_object(urls, own, group=nodes.group)
        return urls

    def _start_servers(self, options: RolloutConfig, folder: Path, **where: str) -> list[str]:
        config, arch, lora = self.config, read_architecture(self.config.model.path), None
        if options.publication == "adapters":
            lora = replace(config.lora, targets=last_parts(arch, config.lora))
        has_draft = config.draft.kind == "eagle"
        self.supervisor = Supervisor(
            options,
            config.model.path,
            folder,
            **where,
            dtype=config.model.dtype,
            context_length=arch.max_positions,
            dummy_weights=lora is None,  # version 0 is published before the first request
            lora=lora,
            threads_per_server=config.run.threads_per_rank or free_cores(),
            devices=devices_by_server(options),
            on_death=self._on_death,
            routes=self.routes,
            # draft.kind = mtp is trained, but no server of a run decodes with it.
            draft=config.draft if has_draft else DraftConfig(),
            draft_folder=write_draft_config(folder, arch, config.model.dtype) if has_draft else None,
        )
        self._say(f"starting rollout servers: {options.server_count} {self.supervisor.backend}")
        return self.supervisor.start()

    def _registered_servers(self) -> list[str]:
        options, run = self.config.rollout, self.folder.name
        self._say(f"waiting for rollout servers: {options.server_count} of run {run} in {options.registry}")
        return wait_for_servers(options.registry, run, options.server_count, timeout_s=options.start_timeout_s)

    def stop(self) -> None:
        """Stop the rollout process and the servers that this rank started, if any."""
        if self.process is not None:  # before the servers, whose end would look like a failure
            self.process.close()
        if self.supervisor is not None:
            self.supervisor.stop()

    def _on_drop(self, url: str, reason: str) -> None:
        if self.supervisor is not None:  # servers that others started are not restarted here
            self.supervisor.replace(url, reason)
        if any(url in urls for urls in self.urls[1:]):
            self.dropped[url] = reason

    @property
    def on_main(self) -> RolloutProcess:
        """The main rank's rollout process. Use this on the main rank only."""
        assert self.process is not None
        return self.process

    def leave_step(self, why: str) -> None:
        """Make the current step's rollout fail with the message `why`. Callable from any thread."""
        if self.process is not None:
            self.process.fail(why)

    def silent(self) -> Silence:
        """Return how long parts of the rollout process and the servers have been silent. Callable from any thread."""
        parts = [part for part in (self.process, self.supervisor) if part is not None]
        return {who: silence for part in parts for who, silence in part.silent().items()}


class Rollouts:
    """Sends the policy's weights to the servers and brings replies to the trainer.

        rollouts = Rollouts(config, groups, processes, devices, engine, is_ending=lambda: False)
        rollouts.publish()
        rollouts.give_to_servers()
        rollouts.wait_for([process.rpc.start(RolloutRank.prepare_batch)] if process is not None else [])

    Collective: every rank calls every method unless its docstring says otherwise.
    """

    def __init__(
        self,
        config: TrainConfig,
        groups: ParallelGroups,
        processes: RolloutProcesses,
        devices: DeviceSharing,
        engine: MegatronEngine,
        *,
        is_ending: Callable[[], bool],
    ) -> None:
        """is_ending: returns True once the run is about to end. Failures of servers and replies are then expected."""
        self.config, self.groups, self.devices = config, groups, devices
        self.engine, self.is_ending = engine, is_ending
        self.processes, self.supervisor, self.process = processes, processes.supervisor, processes.process
        if processes.nodes is not None and processes.nodes.size > 1 and config.rollout.publication == "ipc":
            nodes = NodesOfServers(processes.nodes, processes.urls, engine.device)
            receiver = self.process if groups.is_main else None
            engine.publisher = IPCPublisher(receiver, bucket_bytes=config.actor.bucket_bytes, nodes=nodes)

    def waits_for(self, phase: str) -> str:
        """Describe what the rollout process is doing if the trainer waits for it in `phase`; otherwise return ''.

        Callable from any thread.
        """
        if self.process is None or phase not in PHASES_OF_ROLLOUTS:
            return ""
        publisher, publication = self.engine.publisher, ""
        if phase == "publish" and publisher is not None and publisher.last is not None and publisher.last.parts:
            row, name, *_ = publisher.last.parts[-1]
            publication = f"the publication of version {publisher.last.version} (ended last: {row}, {name}); "
        return publication + self.process.hang_report()

    # -- weights ------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Publish the policy's weights and version to all participating servers.

        Servers that fail are dropped. Servers restarted since the last publication take part again. If no server is
        left and the run is ending, nothing is published.
        """
        engine, groups = self.engine, self.groups
        self.devices.prepare_publication(engine)
        version, served_by = engine.get_version(), [[""]]
        watched = nullcontext() if self.supervisor is None else self.supervisor.publication()
        with watched:
            is_published, attempt = [False], 0
            while not is_published[0]:
                if not self._select_servers():  # for each attempt, because servers may have returned
                    return
                is_published, attempt = [True], attempt + 1
                try:
                    engine.update_weights(self.process if groups.is_main else None, version)
                except NoServerLeft as error:  # restarted or returning servers get the weights in another attempt
                    if attempt == PUBLICATION_ATTEMPTS:  # the weights may be what makes servers fail
                        raise
                    logger.warning("%s", error)
                    is_published = [False]
                dist.broadcast_object_list(is_published, src=0, group=groups.control)
        if groups.is_main:
            served_by = [self.processes.on_main.serving]
        # No rank may request a reply before the servers have the version.
        dist.broadcast_object_list(served_by, src=0, group=groups.control)
        if self.process is not None and not groups.is_main:  # the main rank's process has published
            self.process.mark_published(served_by[0], version)

    def _select_servers(self) -> bool:
        """Select the servers of the publication, at least one.

        Returns False on all ranks if no server is left and the run is ending. The servers were then stopped together
        with the run and do not come back; the run only has to save.
        """
        is_over = False
        if self.groups.is_main:
            is_over = self.is_ending() and not self.processes.on_main.serving
        if self.groups.is_main and not is_over:
            try:
                self.processes.on_main.select_servers()
            except RuntimeError:
                if not self.is_ending():
                    raise
                is_over = True
        return not self.groups.any(is_over)

    # -- groups -------------------------------------------------------------------------------------------------------

    def give_to_servers(self) -> None:
        """Give shared devices to the servers. Publish first if the servers had to release their weights."""
        if self.devices.servers_lack_weights:
            self.publish()
        self.devices.give_to_servers()

    def counts(self) -> list[Counts]:
        """Return, on the main rank, each rollout process's counts since the last call.

        Other ranks get an empty list.
        """
        own = self.process.counts() if self.process is not None else None
        of_ranks: list[Counts | None] | None = [None] * self.groups.world_size if self.groups.is_main else None
        dist.gather_object(own, of_ranks, dst=0, group=self.groups.control)
        return [counts for counts in of_ranks or [] if counts is not None]

    def evaluate(self, generation: GenerationConfig) -> list[Future[TrajectoryBatch]]:
        """Begin to answer the held-out prompts.

        Return a list with one future on the main rank, an empty one on others.
        """
        self.give_to_servers()
        if self.process is None or not self.groups.is_main:
            return []
        return [self.process.rpc.start(RolloutRank.evaluate, generation)]

    def wait_for(self, pending: list[Future[TrajectoryBatch]]) -> None:
        """Wait until all futures in `pending` are done. The list may be empty on some ranks.

        If all servers are lost meanwhile, all ranks publish the weights to the restarted servers, and the requests
        continue.
        """
        stalled = torch.ones(1)
        while stalled:  # a round ends once each rank is done or stalled: all must join a publication
            stalled.zero_()
            while pending and not stalled and wait(pending, SERVER_LOOK_S).not_done:
                stalled.fill_(self.process is not None and self.process.needs_weights)
            dist.all_reduce(stalled, group=self.groups.control)
            if stalled:
                self.publish()
                self.devices.give_to_servers()

    def mean_reward(self, generation: GenerationConfig) -> float:
        """Publish the weights, and return the mean reward of sampled replies to the held-out prompts.

        All ranks return the same number. It is 0 if the run is ending and the replies were cut short.
        """
        self.publish()
        sampled = self.evaluate(generation)
        self.wait_for(sampled)
        reward = [0.0]
        for found in sampled:
            if found.exception() is None or not self.is_ending():  # otherwise `result` raises
                reward = [mean_reward(take_out_greedy(found.result()))]
        dist.broadcast_object_list(reward, src=0, group=self.groups.control)
        return reward[0]


def devices_by_server(options: RolloutConfig) -> list[list[str]] | None:
    """Return the GPUs that each server to start can see, its own first. None if the config does not determine them.

    A server that shares the trainer's GPUs sees all of them, because an ipc publication comes from the first rank's
    GPU.
    """
    each, gpus = options.gpus_per_server, options.devices
    if options.colocated and not gpus and len(visible := gpus_of_host()) >= options.server_gpus:
        gpus = visible[: options.server_gpus]  # because no launcher has assigned GPUs
    own = [gpus[first : first + each] for first in range(0, len(gpus), each)]
    if options.colocated:
        own = [[*mine, *(gpu for gpu in gpus if gpu not in mine)] for mine in own]
    return own or None
