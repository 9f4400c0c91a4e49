"""Process groups and this rank's place in the layout, built once from Megatron's groups and passed by hand."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron_rl import platform
from megatron_rl.config import ParallelConfig


@dataclass(frozen=True)
class Axis:
    """One dimension of the rank grid: the group of the ranks along it, their number and this rank's index."""

    group: dist.ProcessGroup
    size: int
    rank: int


@dataclass(frozen=True)
class ParallelGroups:
    """One layout of the world. Several may exist (a critic's beside the policy's); `activate` says which one acts.

    For example:

        groups = parallel.start(config.parallel, seed=1)  # on every rank
        groups.tensor.size, groups.data.rank
        if groups.any(has_failed):  # the same answer on every rank, so that all take the same way
            return
    """

    tensor: Axis
    pipeline: Axis
    context: Axis
    data: Axis
    """Replicas of the model with other trajectories."""
    data_context: Axis
    """Data and context together: the ranks that gradients of dense layers are summed over."""
    expert: Axis
    expert_tensor: Axis
    expert_data: Axis
    """Replicas of an expert: the ranks that its gradients are summed over."""
    control: dist.ProcessGroup
    """All ranks over gloo, for small Python objects."""
    rank: int
    world_size: int
    upstream_state: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The globals of megatron.core's parallel_state under this layout."""

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def is_rollout_rank(self) -> bool:
        """True on the one rank of each data-parallel replica that drives its rollouts."""
        return self.tensor.rank == 0 and self.pipeline.rank == 0 and self.context.rank == 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @functools.cached_property
    def replicas(self) -> tuple[list[int], ...]:
        """The ranks of each data-parallel replica in the order of data ranks, the first one first.

        In the policy's layout that is its rollout rank.
        """
        tensor, stages = self.tensor.size * self.context.size, range(self.pipeline.size)
        stage = self.world_size // self.pipeline.size  # megatron.core's order: tensor, context, data, pipeline
        return tuple(
            [number * stage + first + place for number in stages for place in range(tensor)]
            for first in range(0, stage, tensor)
        )

    def on_main(self, act: Callable[[], object]) -> str:
        """Run `act` on the main rank while the others wait; return on all which OSError ended it, '' if none did."""
        fault = [""]
        if self.is_main:
            try:
                act()
            except OSError as error:  # a disk's fault, which all must hear of; a bug ends this rank, and so the run
                fault = [str(error)]
        dist.broadcast_object_list(fault, src=0, group=self.control)
        return fault[0]

    def any(self, is_so: bool) -> bool:
        """True on all ranks if it is so on one. All ranks call it."""
        votes = torch.tensor([int(is_so)])  # on the host: gloo's answer waits for no kernel
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.control)
        return bool(votes[0])

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers. All ranks call it."""
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self.control)
        return int(numbers[0])

    def activate(self) -> None:
        """Make this the layout that megatron.core sees: it keeps its groups in globals. No communication."""
        from megatron.core import parallel_state

        vars(parallel_state).update(self.upstream_state)  # modules built or run from now on read these


def start(
    config: ParallelConfig, *, seed: int, timeout_s: float = 1800.0, control: dist.ProcessGroup | None = None
) -> ParallelGroups:
    """Join the trainer's process group and build a layout, which is then the active one. All ranks call it.

    Without torchrun's variables this process is a world of its own. A second call adds a second layout of the same
    ranks, which shares the first one's `control` group where it is given. Raises ValueError where the layout does not
    divide the world.

    timeout_s: for each collective of every group, be it over NCCL or gloo.
    """
    platform.prepare()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    config.check_world_size(int(os.environ.get("WORLD_SIZE", 1)))
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "500")  # torch remembers the last collectives; see life/hang_watch.py
    if platform.has_cuda():
        torch.cuda.set_device(platform.device())
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(platform.backend(), timeout=timeout, **_place_in_world(timeout))
        else:
            alone = dist.HashStore()  # in this process: opens no port
            dist.init_process_group(platform.backend(), timeout=timeout, store=alone, rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()  # forgets the other layout's groups; they live on in ParallelGroups
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        # Upstream uses them in checkpoints of kinds that are not written here; each is a mesh of sockets.
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)  # upstream's layers ask for its random states by name, also without a GPU
    groups = ParallelGroups(
        tensor=_axis(parallel_state.get_tensor_model_parallel_group()),
        pipeline=_axis(parallel_state.get_pipeline_model_parallel_group()),
        context=_axis(parallel_state.get_context_parallel_group()),
        data=_axis(parallel_state.get_data_parallel_group()),
        data_context=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert=_axis(parallel_state.get_expert_model_parallel_group()),
        expert_tensor=_axis(parallel_state.get_expert_tensor_parallel_group()),
        expert_data=_axis(parallel_state.get_expert_data_parallel_group()),
        control=control or _control_group(timeout),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        # Of what upstream's module has, its groups and sizes are the names in capitals.
        upstream_state={name: value for name, value in vars(parallel_state).items() if name.strip("_").isupper()},
    )
    assert groups.rank in groups.replicas[groups.data.rank], "megatron.core orders ranks in another way"
    platform.let_gloo_listeners_wait()
    return groups


def first_ranks_of_nodes(groups: ParallelGroups, *, timeout_s: float) -> Axis | None:
    """Return the axis of the first rank of each node, on these ranks, and None on others. All ranks call it.

    Its group takes tensors of the device, and objects by way of the host.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", groups.world_size))
    if groups.any(here != groups.least(here)):
        raise ValueError(
            f"rollout.colocated = true: this node has {here} ranks, and others have other numbers of them; start as "
            f"many on each, one for each of its GPUs."
        )
    ranks, backend = range(0, groups.world_size, here), "cpu:gloo,cuda:nccl" if platform.has_cuda() else "gloo"
    group = dist.new_group(list(ranks), backend=backend, timeout=timedelta(seconds=timeout_s))
    return _axis(cast(dist.ProcessGroup, group)) if groups.rank in ranks else None


def stage_heads(groups: ParallelGroups) -> Axis | None:
    """Return the axis of the first ranks of the pipeline's stages, over gloo; None on others. All ranks call it."""
    ranks: list[Any] = [dist.get_process_group_ranks(groups.pipeline.group)]  # of the main rank: the heads
    dist.broadcast_object_list(ranks, src=0, group=groups.control)
    group = dist.new_group(ranks[0], backend="gloo")
    return _axis(cast(dist.ProcessGroup, group)) if groups.rank in ranks[0] else None


Cut = tuple[tuple[range, ...], ...]
"""The layers, counted over the whole model, of each model chunk of each pipeline stage."""


@functools.cache
def cut_by_upstream(layers: int, stages: int, chunks: int, fields: str) -> Cut:
    """Return how megatron.core cuts a model of `layers` layers into a pipeline. Needs no process group.

    fields: those of TransformerConfig that say how, as JSON. ValueError with upstream's reason where it refuses, or
    where a layer would be left out.
    """
    platform.prepare()
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    def layers_of(stage: int, chunk: int) -> range:
        if layout is None:
            place = chunk if chunks > 1 else None, stage
            first = get_transformer_layer_offset(asked, *place)
            return range(first, first + get_num_layers_to_build(asked, *place))
        # A layout's own functions count by the layout that is active, which may be another or none.
        rows = [[row[number].count(LayerType.decoder) for row in layout.layout] for number in range(chunks)]
        first = sum(map(sum, rows[:chunk])) + sum(rows[chunk][:stage])
        return range(first, first + rows[chunk][stage])

    try:
        asked = TransformerConfig(
            num_layers=layers,
            hidden_size=1,
            num_attention_heads=1,
            pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            **json.loads(fields),
        )
        layout = asked.pipeline_model_parallel_layout
        if (found := asked.virtual_pipeline_model_parallel_size or 1) != chunks:
            raise ValueError(f"it has {found} model chunks a stage")
        cut = tuple(tuple(layers_of(stage, chunk) for chunk in range(chunks)) for stage in range(stages))
    except (AssertionError, NotImplementedError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    if [number for chunk in range(chunks) for stage in cut for number in stage[chunk]] != list(range(layers)):
        raise ValueError("not every layer would be on one stage")
    return cut


LOOPBACK = ("127.0.0.1", "localhost")
MESH_RANKS = 128
"""With more ranks gloo connects two of them once they meet in a collective, and not each with each at the start."""
GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"
"""torch's way to ask for that; it has no other."""


def own_listener(host: str, port: int = 0) -> int | None:
    """Return a listening socket's descriptor for a store of torch's that serves processes of this host alone.

    Left to itself a store listens on every address of its host. None for other hosts' ranks, which may know this one
    by any of its addresses.
    """
    return socket.create_server((host, port)).detach() if host in LOOPBACK else None


def _place_in_world(timeout: timedelta) -> dict[str, Any]:
    """Return init_process_group's arguments where torch's own store would open a port to other hosts; else none."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # which is there already
    if is_torchruns or host not in LOOPBACK:
        return {}
    listener = None
    if rank == 0:
        # This process's last world may have the port still: torch takes that world's store again, or else says so.
        with contextlib.suppress(OSError):
            listener = own_listener(host, port)
    store = dist.TCPStore(
        host, port, size, is_master=rank == 0, timeout=timeout, multi_tenant=True, master_listen_fd=listener
    )
    return {"store": store, "rank": rank, "world_size": size}


def _control_group(timeout: timedelta) -> dist.ProcessGroup:
    """Return a new group of all ranks over gloo. All ranks call it."""
    is_lazy = dist.get_world_size() > MESH_RANKS and GLOO_LAZY not in os.environ
    if is_lazy:
        os.environ[GLOO_LAZY] = "1"
    try:
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
    finally:
        if is_lazy:
            del os.environ[GLOO_LAZY]  # it is for this group, and not for the servers that this process may start


def stop() -> None:
    """Leave all groups. All ranks call it."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(group, dist.get_world_size(group), dist.get_rank(group))
