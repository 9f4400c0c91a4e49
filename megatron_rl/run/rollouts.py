"""The rollout side of a run: its servers, the rollout process of each data head, and what passes between them and the
trainer.
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import Future, wait
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_rl.api import NoServerLeft
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.launch import process_exit
from megatron_rl.launch.cores import free_cores
from megatron_rl.launch.run_token import servers_of
from megatron_rl.launch.server_registry import wait_for_servers
from megatron_rl.launch.signs_of_life import Silence
from megatron_rl.rollout.process import Beginning, RolloutProcess
from megatron_rl.rollout.rollout_metrics import Counts
from megatron_rl.run.late_server_weights import leave_weights
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.types import TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture

if TYPE_CHECKING:
    from megatron_rl.run.rl_run import RLRun

logger = logging.getLogger(__name__)

DIES_BEFORE_NOTICE_S = 1.0
"""Some schedulers send a notice to every process of a job, also to the servers."""
SERVER_LOOK_S = 0.2
"""How often a rank that waits for replies looks whether a server is left to give them."""
PHASES_OF_ROLLOUTS = ("rollout", "evaluate", "publish")
"""In which the trainer waits for its rollout process."""
PUBLICATION_ATTEMPTS = 3
"""How often a version may cost every server before the run ends."""


class Rollouts:
    """Those of one experiment. All ranks call every method; `process` is there on data heads alone."""

    def __init__(self, experiment: RLRun) -> None:
        self.x = experiment
        self.supervisor: Supervisor | None = None
        self.process: RolloutProcess | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Rank 0 starts the servers, or takes those of the config or the registry; every head connects to all."""
        x = self.x
        if x.groups.is_data_head:  # first, so that it makes itself ready while the servers do
            self._start_process()
        urls: list[Any] = [list(x.config.rollout.servers)]
        if x.groups.is_main and x.config.rollout.registry:
            urls = [self._registered_servers()]
        elif x.groups.is_main and not urls[0]:
            urls = [self._start_servers()]
        dist.broadcast_object_list(urls, src=0, group=x.groups.control)
        if self.process is not None:
            self.process.connect(urls[0])
        x.devices.servers_have_started()

    def _start_process(self) -> None:
        x, rank = self.x, self.x.groups.data.rank
        self.process = RolloutProcess(
            x.folder / f"rollout{f'-{rank}' if rank else ''}.log",
            on_death=self._on_death,
            on_drop=self._on_drop,
            lock=x.books.lock(),
        )
        self.process.begin(
            Beginning(
                config=x.config,
                tokenizer=x.tokenizer,
                place=x.books.place(),
                prompts=x.prompts.prompts,
                held_out=x.held_out,
                sys_path=[str(Path(entry).absolute()) for entry in sys.path],
            )
        )

    def _start_servers(self) -> list[str]:
        x, config = self.x, self.x.config
        self.supervisor = Supervisor(
            servers_of(config),
            config.model.path,
            x.folder / "servers",
            dtype=config.model.dtype,
            context_length=read_architecture(config.model.path).max_positions,
            dummy_weights=True,  # version 0 is published before the first request
            threads_per_server=config.run.threads_per_rank or free_cores(),
            devices=devices_by_server(config.rollout),
            on_death=self._on_death,
        )
        x.say(f"starting {config.rollout.server_count} {self.supervisor.backend} rollout server(s)")
        return self.supervisor.start()

    def _registered_servers(self) -> list[str]:
        options, run = self.x.config.rollout, self.x.folder.name
        self.x.say(f"waiting for {options.server_count} rollout server(s) of run {run} in {options.registry}")
        return wait_for_servers(options.registry, run, options.server_count, timeout_s=options.start_timeout_s)

    def stop(self) -> None:
        if self.process is not None:
            self.process.close()
        if self.supervisor is not None:
            self.supervisor.stop()

    def _on_drop(self, url: str, reason: str) -> None:
        if self.supervisor is not None:
            self.supervisor.replace(url, reason)

    def _on_death(self, message: str) -> None:
        """The servers or the process have died: end the run.

        Unless whoever ended them has sent this process a notice too; then save first.
        """
        if self.x.notice.came(within_s=DIES_BEFORE_NOTICE_S):
            self.leave_on_notice()
        else:
            process_exit.stop(message)

    def leave_on_notice(self) -> None:
        self.leave_step(f"{self.x.notice.signal_name or 'a notice'}: the run is about to be ended.")

    def leave_step(self, why: str) -> None:
        """Let the rollout of the step that is under way fail. From any thread."""
        if self.process is not None:
            self.process.fail(why)

    def waits_for(self, phase: str) -> str:
        """Say what the rollout process has under way in a phase that waits for it. From any thread."""
        if self.process is None or phase not in PHASES_OF_ROLLOUTS:
            return ""
        publisher, publication = self.x.engine.publisher if self.x.engine is not None else None, ""
        if phase == "publish" and publisher is not None and publisher.last is not None and publisher.last.parts:
            row, name, *_ = publisher.last.parts[-1]
            publication = f"the publication of version {publisher.last.version} (ended last: {row}, {name}); "
        return publication + self.process.standstill()

    def silent(self) -> Silence:
        """Who of this rank's rollout process and servers has not been heard of, for how long. From any thread."""
        parts = [part for part in (self.process, self.supervisor) if part is not None]
        return {who: silence for part in parts for who, silence in part.silent().items()}

    # -- weights ------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Bring the servers to the policy's weights and version: all that take part, at least one.

        Servers that fail are left out, and those restarted since the last time take part again.
        """
        engine, groups = self.x.engine, self.x.groups
        self.x.devices.prepare_publication()
        version, served_by = engine.get_version(), [[""]]
        watched = nullcontext() if self.supervisor is None else self.supervisor.publication()
        with watched:
            is_published, attempt = [False], 0
            while not is_published[0]:
                if not self._muster():
                    return
                is_published, attempt = [True], attempt + 1
                try:
                    engine.update_weights(self.process if groups.is_main else None, version)
                except NoServerLeft as error:  # those that are restarted, or come back, get it in another attempt
                    if attempt == PUBLICATION_ATTEMPTS:
                        raise
                    logger.warning("%s", error)
                    is_published = [False]
                dist.broadcast_object_list(is_published, src=0, group=groups.control)
        if groups.is_main:
            served_by = [self.process.serving]
        # No head may ask for a reply before the servers have the version.
        dist.broadcast_object_list(served_by, src=0, group=groups.control)
        if self.process is not None and not groups.is_main:
            self.process.settle(served_by[0], version)
        leave_weights(engine, self.process, groups, self.x.folder / "late_servers", self.x.config.model.path)

    def _muster(self) -> bool:
        """Settle who takes part in the publication, at least one server.

        False on all ranks where none is left in a run that is about to end: servers that were ended together with it do
        not come back, and it only has to save.
        """
        x, is_over = self.x, False
        if x.groups.is_main:
            is_over = x.is_ending and not self.process.serving
        if x.groups.is_main and not is_over:
            try:
                self.process.muster()
            except RuntimeError:
                if not x.is_ending:
                    raise
                is_over = True
        return not x.groups.any(is_over)

    # -- groups -------------------------------------------------------------------------------------------------------

    def batch(self) -> TrajectoryBatch | None:
        """Generate this data head's part of the step's groups; None on ranks that drive no rollouts.

        A run takes each step's prompts in order, unless it is asynchronous or may replace some: then each head takes as
        many as it needs from its own share of the prompts, which its ledger hands out.
        """
        self.x.devices.give_to_servers()
        total, data = self.x.config.batch.prompts_per_step, self.x.groups.data
        first, last = data.rank * total // data.size, (data.rank + 1) * total // data.size
        pending: list[Future[TrajectoryBatch]] = []
        if self.x.config.rollout.takes_prompts_in_order:
            start = self.x.prompts.skip(total)
            if self.process is not None:
                pending = [self.process.rollout_batch(start + first, last - first)]
        elif self.process is not None:
            pending = [self.process.prepare_batch(last - first)]
        self.wait_for(pending)
        self.x.devices.give_to_trainer()
        return pending[0].result() if pending else None

    def counts(self) -> list[Counts]:
        """What each rollout process did since the last call, on the main rank; empty on others."""
        own = self.process.counts() if self.process is not None else None
        of_ranks: list[Counts | None] | None = [None] * self.x.groups.world_size if self.x.groups.is_main else None
        dist.gather_object(own, of_ranks, dst=0, group=self.x.groups.control)
        return [counts for counts in of_ranks or [] if counts is not None]

    def evaluate(self, generation: GenerationConfig) -> list[Future[TrajectoryBatch]]:
        """Begin to answer the held-out prompts: one future on the main rank, none on others."""
        self.x.devices.give_to_servers()
        return [self.process.evaluate(generation)] if self.process is not None and self.x.groups.is_main else []

    def wait_for(self, pending: list[Future[TrajectoryBatch]]) -> None:
        """Return once all of `pending` are done, of which a rank may have none.

        Should every server be lost meanwhile, they go on while all ranks publish the weights once more, to servers that
        were restarted.
        """
        stalled = torch.ones(1)
        while stalled:
            stalled.zero_()
            while pending and not stalled and wait(pending, SERVER_LOOK_S).not_done:
                stalled.fill_(self.process.needs_weights)
            dist.all_reduce(stalled, group=self.x.groups.control)
            if stalled:
                self.publish()
                self.x.devices.give_to_servers()


def devices_by_server(options: RolloutConfig) -> list[list[str]] | None:
    """The GPUs that each started server sees, its own first; None where the config leaves that open.

    Those that share theirs with the trainer see the others' too: a publication over ipc comes from the first rank's.
    """
    each, gpus = options.gpus_per_server, options.devices
    own = [gpus[first : first + each] for first in range(0, len(gpus), each)]
    if options.colocated:
        own = [[*mine, *(gpu for gpu in gpus if gpu not in mine)] for mine in own]
    return own or None
