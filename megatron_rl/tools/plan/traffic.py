"""Bytes that a trainer rank sends to others, by axis of the layout: in an update, and when weights are published.

Every collective counts as a ring, in which each of n ranks sends (n - 1) / n of a tensor that is gathered or reduced in
parts, and twice that of one that all of them get the sum of. Routed tokens are taken to spread evenly over the experts.
Left out are single numbers, such as counts of routes and the gradient's norm.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.config import ParallelConfig
from megatron_rl.tools.plan.devices import LINKS
from megatron_rl.tools.plan.memory import Model
from megatron_rl.weights.adapter_rules import adapted, adapter_rule
from megatron_rl.weights.layout import Shares, layers_of_stages, parameters_of_stage
from megatron_rl.weights.mapping import layer_rules

PARTIAL_BYTES = 16
"""Of a label: what tensor ranks tell each other of their columns' logits (`logprob_partials`)."""


@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends along one axis of the layout."""

    axis: str
    ranks: int
    nbytes: float
    link: str
    """A key of LINKS."""

    @property
    def seconds(self) -> float:
        """On a link that nothing else uses."""
        return self.nbytes / LINKS[self.link]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds}


def ranks_along(axis: str, parallel: ParallelConfig, rank: int, world_size: int) -> list[int]:
    """Return the ranks of a rank's group along an axis, itself included, in megatron.core's order of ranks.

    `data` are all ranks that sum up gradients, context ranks among them.
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
    """Of one rank of a trained model.

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
        """What is sent from the first forward pass to the updated weights; labels: rows that the loss looks at."""
        return self._by_link(self._passes(rows, labels, is_training=True) + self._states())

    def of_forward_pass(self, rows: float, labels: float) -> list[Traffic]:
        """The bytes that are sent in a pass without gradients."""
        return self._by_link(self._passes(rows, labels, is_training=False))

    def of_publication(self) -> list[Traffic]:
        """What the ranks that send to the servers receive to have what they send, each stage's first its stage, or the
        very first rank all of the model; and, where an update leaves weights to be gathered later, what each rank sends
        for that."""
        arch, parallel, b = self.model.arch, self.model.engine.parallel, self.model.itemsize
        sent: Counter[str] = Counter()
        if self.model.engine.optimizer.distributed and self.model.engine.optimizer.overlap:
            sent += self._over_replicas(b)
        is_by_stage, ranks_of_stage = self.model.engine.publication == "group", self.world_size // parallel.pipeline
        if self.rank % ranks_of_stage == 0 if is_by_stage else self.rank == 0:
            own = self._published(self.stage, parallel)
            sent["tensor"] = b * (parallel.tensor - 1) * own.dense  # also of what each of them has whole
            sent["expert tensor"] = b * (parallel.expert_tensor - 1) * own.expert
            sent["expert"] = b * (parallel.expert - 1) * parallel.expert_tensor * own.expert
            if not is_by_stage:
                alone = self._alone
                sent["pipeline"] = b * sum(self._published(n, alone).total for n in range(1, parallel.pipeline))
                has_copy = arch.tied and parallel.pipeline > 1 and not self._publishes_adapters
                sent["pipeline"] -= b * arch.vocab * arch.hidden if has_copy else 0
        return self._by_link(sent)

    def _by_link(self, sent: Counter[str]) -> list[Traffic]:
        found = []
        for axis, nbytes in sent.items():
            ranks = ranks_along(axis, self.model.engine.parallel, self.rank, self.world_size)
            is_inside = len({rank // self.gpus_per_node for rank in ranks}) == 1
            if nbytes > 0:
                found.append(Traffic(axis, len(ranks), nbytes, "in a node" if is_inside else "between nodes"))
        return found

    def _share(self, axis: str) -> float:
        size = len(ranks_along(axis, self.model.engine.parallel, self.rank, self.world_size))
        return (size - 1) / size

    @property
    def _alone(self) -> ParallelConfig:
        """The layout in which a rank has all of its stage."""
        return replace(self.model.engine.parallel, tensor=1, expert=1, expert_tensor=1, sequence=None)

    @property
    def _publishes_adapters(self) -> bool:
        return self.model.engine.publication == "adapters"

    def _published(self, stage: int, parallel: ParallelConfig) -> Shares:
        if self._publishes_adapters:
            return self.model.trained_of_stage(stage, parallel)
        return parameters_of_stage(self.model.arch, parallel, stage, self.model.megatron)

    # -- activations --------------------------------------------------------------------------------------------------

    def _passes(self, rows: float, labels: float, *, is_training: bool) -> Counter[str]:
        arch, parallel, megatron = self.model.arch, self.model.engine.parallel, self.model.megatron
        rows, labels = rows / parallel.context, labels / parallel.context  # of this context rank
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
        """kind: as Architecture.kind has it; is_whole: recomputed as a whole."""
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
        """core_forwards: of what the core attention does, which may be recomputed alone."""
        arch, parallel = self.model.arch, self.model.engine.parallel
        all_rows, latent = rows * parallel.context, arch.latent
        if latent is None:
            is_shared = arch.kv_heads < parallel.tensor  # upstream gathers the whole before each rank takes its part
            once = (arch.heads + 2 * arch.kv_heads) * arch.head_dim if is_shared else 0
            sent = self._matrices(rows, arch.hidden, arch.hidden, forwards, backwards, once=once)
            width, passes = 2 * max(1, arch.kv_heads // parallel.tensor) * arch.head_dim, core_forwards + backwards
        else:  # keys and values are made in the core attention, of the compressed rows of all context ranks
            sent = self._matrices(rows, latent.query_rank or arch.hidden, arch.hidden, forwards, backwards)
            sent += self._matrices(all_rows, latent.kv_rank, 0, core_forwards, backwards, once=arch.head_dim)
            width, passes = (latent.kv_rank + arch.head_dim) / parallel.tensor, forwards + backwards
        # Keys and values of all context ranks come together, and their gradients go back.
        sent["context"] += self._share("context") * passes * all_rows * width * self.model.itemsize
        return sent

    def _adapters(self, rows: float, number: int, forwards: int, backwards: int) -> Counter[str]:
        """Of the rows between an adapter's two matrices, in a layer that is recomputed as a whole or not at all."""
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
        """Of matrices whose columns are on different tensor ranks, and of one behind them whose rows are.

        inputs: width of what the first ones read; output: of what the last one gives. once: width of what is gathered
        beside them, and its gradient summed up in parts.
        """
        if self.model.engine.parallel.sequence_parallel:
            # The backward pass gathers inputs again, for the weights' gradients, where these are trained.
            again = inputs if self.model.engine.lora.rank == 0 else 0
            widths = forwards * (inputs + output + once) + backwards * (again + inputs + output + once)
        else:
            widths = forwards * (2 * output + once) + backwards * (2 * inputs + once)
        return Counter({"tensor": self._share("tensor") * rows * self.model.itemsize * widths})

    def _experts(self, rows: float, forwards: int, backwards: int) -> Counter[str]:
        """Routed rows go to their experts and come back, with the router's float32 weights on the way there."""
        arch, parallel, b = self.model.arch, self.model.engine.parallel, self.model.itemsize
        assert arch.mixture is not None
        own = 1 / parallel.tensor if parallel.sequence_parallel else 1.0
        routed, passes = rows * own * arch.mixture.per_token, forwards + backwards
        sent = Counter({"expert": self._share("expert") * passes * routed * (2 * b * arch.hidden + 4)})
        # Each of an expert's tensor ranks computes the rows of all of them. What they add up is in float32.
        joined = routed * parallel.expert_tensor * ((b + 4) * arch.hidden + 4)
        sent["expert tensor"] = self._share("expert tensor") * passes * joined
        return sent

    def _edges(self, rows: float, labels: float, *, is_training: bool) -> Counter[str]:
        """Of the embedding, the head, and what goes from stage to stage."""
        arch, parallel, b = self.model.arch, self.model.engine.parallel, self.model.itemsize
        is_split = parallel.sequence_parallel  # the rows, over the tensor axis
        is_first, is_last = self.stage == 0, self.stage == parallel.pipeline - 1
        forwards, backwards, labelled = 0, 0, 0.0
        if is_first:  # its rows are summed up in parts, whose gradients are gathered, or they are summed for all
            forwards, backwards = (1, int(self.model.engine.lora.rank == 0)) if is_split else (2, 0)
        if is_last:
            forwards += is_split
        if is_last and arch.head == "policy":  # of a value head each tensor rank has the whole gradient
            backwards += 1 if is_split else 2
            labelled = labels * parallel.tensor * PARTIAL_BYTES
        widths = forwards + backwards * is_training
        sent: Counter[str] = Counter()
        sent["tensor"] = self._share("tensor") * (widths * rows * arch.hidden * b + labelled)
        if parallel.pipeline > 1:
            # Forward from each chunk of the model but the last, and back from each but the first.
            hops = parallel.virtual_pipeline - is_last + is_training * (parallel.virtual_pipeline - is_first)
            sent["pipeline"] = hops * rows / (parallel.tensor if is_split else 1) * arch.hidden * b
        return sent

    # -- parameters ---------------------------------------------------------------------------------------------------

    @property
    def _gradient_bytes(self) -> float:
        in_float32 = self.model.engine.optimizer.megatron.get("grad_reduce_in_fp32", True)
        return 4.0 if in_float32 else float(self.model.itemsize)

    def _states(self) -> Counter[str]:
        """Of gradients, and of weights that the distributed optimizer has updated in parts."""
        arch, parallel = self.model.arch, self.model.engine.parallel
        gradient = self._gradient_bytes
        is_distributed = self.model.engine.optimizer.distributed
        sent = self._over_replicas(gradient + self.model.itemsize if is_distributed else 2 * gradient)
        if parallel.sequence_parallel:  # each tensor rank has some rows' gradient of what all of them have whole
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
