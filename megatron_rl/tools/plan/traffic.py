"""Computes the bytes that a trainer rank sends to other ranks, by parallel axis, in an update and in a publication.

Every collective counts as a ring over n ranks. Each rank sends (n - 1) / n of a tensor in an all-gather or
reduce-scatter, and twice that in an all-reduce. Routed tokens are assumed to spread evenly over the experts. Single
numbers, such as route counts and the gradient norm, are not counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.config import ParallelConfig
from megatron_rl.tools.plan import devices
from megatron_rl.tools.plan.devices import Device
from megatron_rl.tools.plan.memory import Model
from megatron_rl.weights.adapter_rules import adapted, adapter_rule
from megatron_rl.weights.layout import Shares, layers_of_stages, parameters_of_stage
from megatron_rl.weights.mapping import layer_rules

PARTIAL_BYTES = 16
"""Bytes per label that tensor ranks exchange (`logprob_partials`), as each has the logits of a part of the
vocabulary."""


def publication_seconds(policy: Model, nodes: int, device: Device, gathered: list[Traffic]) -> float:
    """Return the seconds to send the policy's weights to all servers.

    gathered: traffic between trainer ranks to assemble the weights, which overlaps with sending. With group
    publication, all bytes are assumed to pass one link: published runs of this kind are no faster.
    """
    mixture, kind, nbytes = policy.arch.mixture, policy.engine.publication, policy.published_bytes
    if kind in ("disk", "delta"):
        return 2 * nbytes / devices.DISK_BANDWIDTH  # written, then read
    wire_s = nbytes / (devices.LINK_SHARE * (device.node_link if nodes == 1 else devices.CLUSTER_LINK))
    if kind == "ipc":
        experts = sum(mixture.layers) * mixture.experts if mixture else 0
        matrices = 7 * policy.arch.layers + 3 * experts  # of attention, of a feed-forward, of each expert
        return devices.IPC_S + devices.IPC_TENSOR_S * matrices + wire_s
    return devices.GROUP_S + max(wire_s, sum(part.seconds(device) for part in gathered))


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends along one parallel axis."""

    axis: str
    ranks: int
    nbytes: float
    far_bytes: float = 0.0
    """The part of `nbytes` that leaves the node."""

    @property
    def link(self) -> str:
        """Slowest kind of link along the axis, a key of Device.links."""
        return "between nodes" if self.far_bytes else "in a node"

    def seconds(self, device: Device) -> float:
        """Return the transfer time if nothing else uses the links. The two kinds of links work at the same time."""
        near_s, far_s = (self.nbytes - self.far_bytes) / device.node_link, self.far_bytes / devices.CLUSTER_LINK
        return max(near_s, far_s) / devices.LINK_SHARE

    def as_dict(self, device: Device) -> dict[str, Any]:
        return asdict(self) | {"link": self.link, "seconds": self.seconds(device)}


def ranks_along(axis: str, parallel: ParallelConfig, rank: int, world_size: int) -> list[int]:
    """Return the ranks of a rank's group along an axis, itself included, in megatron.core's rank order.

    The axis `data` comprises all ranks that reduce gradients together, including context ranks.
    """
    a_stage, tensor, context = world_size // parallel.pipeline, parallel.tensor, parallel.context
    experts = parallel.expert * parallel.expert_tensor
    stride, size = {
        "tensor": (1, tensor),
        "context": (tensor, context),
        "data": (tensor, a_stage // tensor),
        "expert tensor": (1, parallel.expert_tensor),
        "expert": (parallel.expert_tensor, parallel.expert),
        "expert data": (experts, a_stage // experts),
        "pipeline": (a_stage, parallel.pipeline),
        "embedding": (world_size - a_stage, min(2, parallel.pipeline)),  # the first stage and the last
    }[axis]
    first = rank - rank // stride % size * stride if stride else rank
    return [first + stride * number for number in range(size)]


@dataclass(frozen=True)
class RankTraffic:
    """The traffic of one rank for one trained model.

    For example:

        rank = RankTraffic(model, rank=0, world_size=64, gpus_per_node=8)
        for sent in rank.of_update(rows=65536, labels=60000):  # of its replica, all microbatches together
            print(sent.axis, sent.nbytes, sent.link)
    """

    model: Model
    rank: int
    world_size: int
    gpus_per_node: int

    @property
    def stage(self) -> int:
        return self.rank // (self.world_size // self.model.engine.parallel.pipeline)

    def of_update(self, rows: float, labels: float) -> list[Traffic]:
        """Return the traffic from the first forward pass to the updated weights.

        rows: number of rows of the replica in the update. labels: number of those that the loss uses.
        """
        return self._by_link(self._passes(rows, labels, is_training=True) + self._states(), routes=True)

    def of_forward_pass(self, rows: float, labels: float) -> list[Traffic]:
        """Return the traffic of a forward pass without gradients."""
        return self._by_link(self._passes(rows, labels, is_training=False), routes=True)

    def of_publication(self) -> list[Traffic]:
        """Return the traffic between trainer ranks that a publication needs before it sends weights to the servers.

        A rank that sends parameters to servers first receives them from the other ranks; this counts as its traffic.
        With group publication, the first rank of each stage sends its stage's parameters. Otherwise, rank 0 sends the
        whole model. If optimizer overlap postpones the gathering of updated weights to the publication, each rank also
        sends its part of them.
        """
        arch, parallel, b = self.model.arch, self.model.engine.parallel, self.model.itemsize
        sent: Counter[str] = Counter()
        if self.model.engine.optimizer.distributed and self.model.engine.optimizer.overlap:
            sent += self._over_replicas(b)
        is_by_stage, ranks_of_stage = self.model.engine.publication == "group", self.world_size // parallel.pipeline
        if self.rank % ranks_of_stage == 0 if is_by_stage else self.rank == 0:
            own = self._published(self.stage, parallel)
            sent["tensor"] = b * (parallel.tensor - 1) * own.dense  # including replicated parameters
            sent["expert tensor"] = b * (parallel.expert_tensor - 1) * own.expert
            sent["expert"] = b * (parallel.expert - 1) * parallel.expert_tensor * own.expert
            if not is_by_stage:
                alone = self._alone
                sent["pipeline"] = b * sum(self._published(n, alone).total for n in range(1, parallel.pipeline))
                has_copy = arch.tied and parallel.pipeline > 1 and not self._publishes_adapters
                sent["pipeline"] -= b * arch.vocab * arch.hidden if has_copy else 0
        return self._by_link(sent, routes=False)

    def _by_link(self, sent: Counter[str], *, routes: bool) -> list[Traffic]:
        """Return the traffic of each axis.

        sent: {axis: bytes that this rank sends}. routes: True if the axis `expert` carries routed rows, False if it
        carries gathered weights.
        """
        found = []
        for axis, nbytes in sent.items():
            ranks = ranks_along(axis, self.model.engine.parallel, self.rank, self.world_size)
            near = sum(rank // self.gpus_per_node == self.rank // self.gpus_per_node for rank in ranks)
            if near == len(ranks):
                far = 0.0
            elif axis == "expert" and routes:  # a rank sends equally much to each other rank
                far = (len(ranks) - near) / (len(ranks) - 1)
            elif axis in ("pipeline", "embedding"):  # a rank sends to one other rank
                far = 1.0
            else:  # NCCL has a ring for each rank of the node, and in each of them another rank sends to the next node
                far = 1 / near
            if nbytes > 0:
                found.append(Traffic(axis, len(ranks), nbytes, far * nbytes))
        return found

    def _share(self, axis: str) -> float:
        size = len(ranks_along(axis, self.model.engine.parallel, self.rank, self.world_size))
        return (size - 1) / size

    @property
    def _alone(self) -> ParallelConfig:
        """The model's layout, but with a single rank per stage, which holds all parameters of the stage."""
        return replace(self.model.engine.parallel, tensor=1, expert=1, expert_tensor=1, sequence=None)

    @property
    def _publishes_adapters(self) -> bool:
        return self.model.engine.publication == "adapters"

    def _published(self, stage: int, parallel: ParallelConfig) -> Shares:
        if self._publishes_adapters:
            return self.model.trained_of_stage(stage, parallel)
        return parameters_of_stage(self.model.arch, parallel, stage, self.model.megatron)

    # Activations

    def _passes(self, rows: float, labels: float, *, is_training: bool) -> Counter[str]:
        arch, parallel, megatron = self.model.arch, self.model.engine.parallel, self.model.megatron
        rows, labels = rows / parallel.context, labels / parallel.context  # this context rank's part
        is_full, count = megatron.get("recompute_granularity") == "full", megatron.get("recompute_num_layers") or 1
        kinds: Counter[tuple[tuple[bool, bool], bool]] = Counter()
        firsts: dict[tuple[bool, bool], int] = {}
        for chunk in layers_of_stages(arch, parallel, megatron)[self.stage]:
            for place, number in enumerate(chunk):
                is_whole = is_full and (megatron.get("recompute_method") != "block" or place < count)
                kinds[arch.kind(number), is_whole and is_training] += 1
                firsts.setdefault(arch.kind(number), number)
        sent = self._edges(rows, labels, is_training=is_training)
        for (kind, is_whole), layers in kinds.items():
            of_layer = self._layer(rows, kind, is_whole, is_training)
            of_layer += self._adapters(rows, firsts[kind], 1 + is_whole, int(is_training))
            for axis, nbytes in of_layer.items():
                sent[axis] += layers * nbytes
        return sent

    def _layer(self, rows: float, kind: tuple[bool, bool], is_whole: bool, is_training: bool) -> Counter[str]:
        """Return the bytes of one layer, by axis.

        kind: the layer's entry of Architecture.kind. is_whole: True if the whole layer is recomputed.
        """
        arch, megatron = self.model.arch, self.model.megatron
        has_delta_net, is_mixture = kind
        modules = megatron.get("recompute_modules") or ["core_attn"]
        backwards, is_selective = int(is_training), megatron.get("recompute_granularity") == "selective"

        def forwards(module: str) -> int:
            return 2 if is_whole or (is_training and is_selective and module in modules) else 1

        if has_delta_net:
            sent = self._matrices(rows, arch.hidden, arch.hidden, forwards("self_attn"), backwards)
        else:
            sent = self._attention(rows, forwards("self_attn"), forwards("core_attn"), backwards)
        if is_mixture:
            sent += self._experts(rows, forwards("moe"), backwards)
        if not is_mixture or (arch.mixture and arch.mixture.shared_ffn):
            passes = forwards("moe" if is_mixture else "mlp"), backwards
            sent += self._matrices(rows, arch.hidden, arch.hidden, *passes)
        return sent

    def _attention(self, rows: float, forwards: int, core_forwards: int, backwards: int) -> Counter[str]:
        """Return the bytes of an attention block, by axis.

        forwards, backwards: number of forward and backward passes of the block. core_forwards: number of forward passes
        of core attention, which may be recomputed alone.
        """
        arch, parallel = self.model.arch, self.model.engine.parallel
        all_rows, latent = rows * parallel.context, arch.latent
        if latent is None:
            is_shared = arch.kv_heads < parallel.tensor  # Megatron gathers the whole QKV, then each rank takes its part
            once = (arch.heads + 2 * arch.kv_heads) * arch.head_dim if is_shared else 0
            sent = self._matrices(rows, arch.hidden, arch.hidden, forwards, backwards, once=once)
            width, passes = 2 * max(1, arch.kv_heads // parallel.tensor) * arch.head_dim, core_forwards + backwards
        else:  # core attention expands keys and values from the compressed rows of all context ranks
            sent = self._matrices(rows, latent.query_rank or arch.hidden, arch.hidden, forwards, backwards)
            sent += self._matrices(all_rows, latent.kv_rank, 0, core_forwards, backwards, once=arch.head_dim)
            width, passes = (latent.kv_rank + arch.head_dim) / parallel.tensor, forwards + backwards
        # Keys and values are gathered from all context ranks, and their gradients are scattered back.
        sent["context"] += self._share("context") * passes * all_rows * width * self.model.itemsize
        return sent

    def _adapters(self, rows: float, number: int, forwards: int, backwards: int) -> Counter[str]:
        """Return the bytes of the low-rank activations between the A and B matrices of a layer's adapters.

        number: the layer's index in the model. forwards: 2 if the whole layer is recomputed, else 1. backwards: number
        of backward passes.
        """
        lora, is_split, widths = self.model.engine.lora, self.model.engine.parallel.sequence_parallel, 0
        for rule in layer_rules(self.model.arch, number) if lora.rank > 0 else ():
            width, (down, up) = (
                lora.rank * len(adapted(rule, lora)),
                (adapter_rule(rule, part, lora).layout.split_dim is not None for part in ("lora_A", "lora_B")),
            )
            if "{}" not in rule.megatron and (down or up):
                passes = forwards + backwards if is_split else 2 * (forwards if down else backwards)
                widths += width * passes
        return Counter({"tensor": self._share("tensor") * rows * self.model.itemsize * widths})

    def _matrices(
        self, rows: float, inputs: int, output: int, forwards: int, backwards: int, *, once: int = 0
    ) -> Counter[str]:
        """Return the bytes of column-parallel matrices followed by a row-parallel matrix.

        inputs: input width of the column-parallel matrices. output: output width of the row-parallel matrix. once:
        width of a further tensor that is all-gathered, and whose gradient is reduce-scattered.
        """
        if self.model.engine.parallel.sequence_parallel:
            # The backward pass gathers the inputs again to compute the gradients of trained weights.
            again = inputs if self.model.engine.lora.rank == 0 else 0
            widths = forwards * (inputs + output + once) + backwards * (again + inputs + output + once)
        else:
            widths = forwards * (2 * output + once) + backwards * (2 * inputs + once)
        return Counter({"tensor": self._share("tensor") * rows * self.model.itemsize * widths})

    def _experts(self, rows: float, forwards: int, backwards: int) -> Counter[str]:
        """Return the bytes of a mixture, by axis: routed rows travel to their experts and back.

        The router's float32 weights travel with the rows to the experts.
        """
        arch, parallel, b = self.model.arch, self.model.engine.parallel, self.model.itemsize
        assert arch.mixture is not None
        own = 1 / parallel.tensor if parallel.sequence_parallel else 1.0
        routed, passes = rows * own * arch.mixture.per_token, forwards + backwards
        sent = Counter({"expert": self._share("expert") * passes * routed * (2 * b * arch.hidden + 4)})
        # Each expert tensor rank computes the rows of all of them. Their results are summed in float32.
        joined = routed * parallel.expert_tensor * ((b + 4) * arch.hidden + 4)
        sent["expert tensor"] = self._share("expert tensor") * passes * joined
        return sent

    def _edges(self, rows: float, labels: float, *, is_training: bool) -> Counter[str]:
        """Return the bytes of the embedding, the head, and the transfers between pipeline stages."""
        arch, parallel, b = self.model.arch, self.model.engine.parallel, self.model.itemsize
        is_split = parallel.sequence_parallel  # rows are divided over the tensor axis
        is_first, is_last = self.stage == 0, self.stage == parallel.pipeline - 1
        forwards, backwards, labelled = 0, 0, 0.0
        if is_first:  # the embedding's rows are reduce-scattered and their gradients gathered, or they are all-reduced
            forwards, backwards = (1, int(self.model.engine.lora.rank == 0)) if is_split else (2, 0)
        if is_last:
            forwards += is_split
        if is_last and arch.head == "policy":  # with a value head, each tensor rank already has the whole gradient
            backwards += 1 if is_split else 2
            labelled = labels * parallel.tensor * PARTIAL_BYTES
        widths = forwards + backwards * is_training
        sent: Counter[str] = Counter()
        sent["tensor"] = self._share("tensor") * (widths * rows * arch.hidden * b + labelled)
        if parallel.pipeline > 1:
            # Each model chunk but the last sends forward, each but the first sends gradients back.
            hops = parallel.virtual_pipeline - is_last + is_training * (parallel.virtual_pipeline - is_first)
            sent["pipeline"] = hops * rows / (parallel.tensor if is_split else 1) * arch.hidden * b
        return sent

    # Parameters

    @property
    def _gradient_bytes(self) -> float:
        in_float32 = self.model.engine.optimizer.megatron.get("grad_reduce_in_fp32", True)
        return 4.0 if in_float32 else float(self.model.itemsize)

    def _states(self) -> Counter[str]:
        """Return the bytes of gradient reductions, and of gathering weights that the distributed optimizer updated."""
        arch, parallel = self.model.arch, self.model.engine.parallel
        gradient = self._gradient_bytes
        is_distributed = self.model.engine.optimizer.distributed
        sent = self._over_replicas(gradient + self.model.itemsize if is_distributed else 2 * gradient)
        if parallel.sequence_parallel:  # a replicated parameter's gradient covers only the tensor rank's own rows
            own, whole = (self.model.trained_of_stage(self.stage, each).dense for each in (parallel, self._alone))
            copied = (parallel.tensor * own - whole) / (parallel.tensor - 1)
            sent["tensor"] = self._share("tensor") * 2 * gradient * copied
        is_trained = self.model.engine.lora.rank == 0
        if is_trained and arch.tied and parallel.pipeline > 1 and self.stage in (0, parallel.pipeline - 1):
            sent["embedding"] = self._share("embedding") * 2 * gradient * arch.vocab / parallel.tensor * arch.hidden
        return sent

    def _over_replicas(self, bytes_each: float) -> Counter[str]:
        own = self.model.trained_of_stage(self.stage)
        dense, expert = self._share("data") * own.dense, self._share("expert data") * own.expert
        return Counter({"data": bytes_each * dense, "expert data": bytes_each * expert})
