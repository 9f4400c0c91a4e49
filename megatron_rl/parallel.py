"""Process groups of the parallel layout and this rank's place in each, built from Megatron's groups."""

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
from megatron_rl.platform import cpu


@dataclass(frozen=True)
class Axis:
    """One axis of the rank grid: its process group, its size and this rank's index."""

    group: dist.ProcessGroup
    size: int
    rank: int


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of one parallel layout, which covers all ranks.

    Policy and critic may have different layouts. `activate` selects the one that megatron.core uses.

    For example:

        groups = parallel.start(config.parallel, seed=1)  # on every rank
        groups.tensor.size, groups.data.rank
        if groups.any(has_failed):  # every rank gets the same answer, so all ranks return together
            return
    """

    tensor: Axis
    pipeline: Axis
    context: Axis
    data: Axis
    data_context: Axis
    """Data and context axes combined: the ranks over which gradients of dense layers are summed."""
    expert: Axis
    expert_tensor: Axis
    expert_data: Axis
    """Replicas of an expert: the ranks over which its gradients are summed."""
    control: dist.ProcessGroup
    """Gloo group of all ranks, for small Python objects."""
    rank: int
    world_size: int
    upstream_state: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Values of the globals in megatron.core's parallel_state for this layout."""

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
        """Global ranks of each data-parallel replica. In the policy's layout, the first of them is the rollout rank."""
        tensor, stages = self.tensor.size * self.context.size, range(self.pipeline.size)
        stage = self.world_size // self.pipeline.size  # megatron.core's rank order: tensor, context, data, pipeline
        return tuple(
            [number * stage + first + place for number in stages for place in range(tensor)]
            for first in range(0, stage, tensor)
        )

    def on_main(self, act: Callable[[], object]) -> str:
        """Run `act` on the main rank while the others wait. Collective: every rank calls it.

        On all ranks, returns the text of the OSError that `act` raised, or '' if it raised none.
        """
        fault = [""]
        if self.is_main:
            try:
                act()
            except OSError as error:  # every rank must learn of a disk error; a bug ends this rank and so the run
                fault = [str(error)]
        dist.broadcast_object_list(fault, src=0, group=self.control)
        return fault[0]

    def any(self, is_so: bool) -> bool:
        """Return True on all ranks if `is_so` is True on any rank. Collective: every rank calls it."""
        votes = torch.tensor([int(is_so)])  # on the host: gloo need not wait for a CUDA kernel
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.control)
        return bool(votes[0])

    def least(self, number: int) -> int:
        """Return the smallest number over all ranks. Collective: every rank calls it."""
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self.control)
        return int(numbers[0])

    def activate(self) -> None:
        """Make megatron.core use this layout by setting its globals. Needs no communication."""
        from megatron.core import parallel_state

        vars(parallel_state).update(self.upstream_state)  # modules built or run after this read these globals


def start(
    config: ParallelConfig, *, seed: int, timeout_s: float = 1800.0, control: dist.ProcessGroup | None = None
) -> ParallelGroups:
    """Join the trainer's process group, build a layout and activate it. Collective: every rank calls it.

    Without torchrun's environment variables, this process forms a world of size 1. A second call adds another layout
    over the same ranks; pass it the first layout's `control` group. timeout_s: how long each collective may take.
    Raises ValueError if the layout does not divide the world size, and RuntimeError if another process uses
    MASTER_PORT.
    """
    platform.prepare()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    config.check_world_size(int(os.environ.get("WORLD_SIZE", 1)))
    # torch then records the last collectives; see life/hang_watch.py
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "500")
    if platform.has_cuda():
        torch.cuda.set_device(platform.device())
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        if "WORLD_SIZE" in os.environ:
            try:
                dist.init_process_group(platform.backend(), timeout=timeout, **_place_in_world(timeout))
            except dist.DistNetworkError as error:
                if "EADDRINUSE" not in str(error):
                    raise
                host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
                raise RuntimeError(
                    f"MASTER_PORT = {port}: another process on {host} listens there, and rank 0 must. Submit the job "
                    f"again, as another job has another port; with torchrun, set --master-port."
                ) from error
        else:
            alone = dist.HashStore()  # an in-process store opens no port
            dist.init_process_group(platform.backend(), timeout=timeout, store=alone, rank=0, world_size=1)
        if platform.has_cuda():
            gpu = str(torch.cuda.get_device_properties(platform.device()).uuid)
            check_own_gpu(dist.distributed_c10d._get_default_store(), dist.get_rank(), gpu)
    if parallel_state.model_parallel_is_initialized():
        # clears the other layout's globals; its ParallelGroups still holds the groups
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        # Megatron needs gloo groups only for checkpoint formats not written here. Each would open a mesh of sockets.
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)  # Megatron's layers look up its RNG states by name, even without a GPU
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
        # In Megatron's module, the groups and sizes are the names in capitals.
        upstream_state={name: value for name, value in vars(parallel_state).items() if name.strip("_").isupper()},
    )
    assert groups.rank in groups.replicas[groups.data.rank], "megatron.core orders ranks in another way"
    if not platform.has_cuda():
        cpu.let_gloo_listeners_wait()  # after the groups exist, because their threads must be running
    return groups


def first_ranks_of_nodes(groups: ParallelGroups, *, timeout_s: float) -> Axis | None:
    """Return an axis that contains the first rank of each node; None on all other ranks. Collective.

    The axis's group can also send device tensors. Raises ValueError if nodes have different numbers of ranks.
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
    """Return an axis that contains the first rank of each pipeline stage; None on all other ranks. Collective.

    The axis's group uses gloo.
    """
    # They are the main rank's pipeline group.
    ranks: list[Any] = [dist.get_process_group_ranks(groups.pipeline.group)]
    dist.broadcast_object_list(ranks, src=0, group=groups.control)
    group = dist.new_group(ranks[0], backend="gloo")
    return _axis(cast(dist.ProcessGroup, group)) if groups.rank in ranks[0] else None


Cut = tuple[tuple[range, ...], ...]
"""The layers in each model chunk, by their numbers in the whole model: `cut[stage][chunk]` is a range."""


@functools.cache
def cut_by_upstream(layers: int, stages: int, chunks: int, fields: str) -> Cut:
    """Return how megatron.core splits a model of `layers` layers into a pipeline. Needs no process group.

    fields: JSON of the TransformerConfig fields that determine the split. Raises ValueError if Megatron rejects the
    split, with its reason, or if a layer would be missing or repeated.
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
        # The methods of PipelineParallelLayerLayout use the active layout, which may be a different one or none.
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
"""With more ranks than this, gloo connects a pair of ranks on first use instead of all pairs at the start."""
GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"
"""Environment variable that makes gloo connect a pair of ranks on first use. torch has no other switch for this."""


def own_listener(host: str, port: int = 0) -> int | None:
    """Return the descriptor of a listening socket for a torch store, or None if other hosts connect to the store.

    By default, a store would listen on every address of its host.
    """
    return socket.create_server((host, port)).detach() if host in LOOPBACK else None


def check_own_gpu(store: dist.Store, rank: int, gpu: str) -> None:
    """Raise ValueError if an earlier caller, another rank, has the same GPU.

    gpu: the GPU's UUID. NCCL would also fail, but its message would not name the rank.
    """
    first = store.compare_set(f"rank_on_gpu_{gpu}", "", str(rank)).decode()
    if first != str(rank):
        raise ValueError(
            f"rank {rank}: its GPU {gpu} is rank {first}'s too, and NCCL takes a GPU once; start at most as many ranks "
            f"per host as it has GPUs, or correct the ranks' LOCAL_RANK and CUDA_VISIBLE_DEVICES."
        )


def _place_in_world(timeout: timedelta) -> dict[str, Any]:
    """Return arguments of init_process_group for a run on this host alone; {} for other runs.

    With these arguments, the run's store opens no port to other hosts.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun has already created this store
    if is_torchruns or host not in LOOPBACK:
        return {}
    listener = None
    if rank == 0:
        # If this process's previous world still holds the port, torch reuses that store or reports an error.
        with contextlib.suppress(OSError):
            listener = own_listener(host, port)
    store = dist.TCPStore(
        host, port, size, is_master=rank == 0, timeout=timeout, multi_tenant=True, master_listen_fd=listener
    )
    return {"store": store, "rank": rank, "world_size": size}


def _control_group(timeout: timedelta) -> dist.ProcessGroup:
    is_lazy = dist.get_world_size() > MESH_RANKS and GLOO_LAZY not in os.environ
    if is_lazy:
        os.environ[GLOO_LAZY] = "1"
    try:
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
    finally:
        if is_lazy:
            del os.environ[GLOO_LAZY]  # must not leak into servers that this process may start


def stop() -> None:
    """Leave all groups. Collective: every rank calls it."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(group, dist.get_world_size(group), dist.get_rank(group))
