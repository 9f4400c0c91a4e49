"""A draft head, with which servers decode ahead: one transformer layer that is trained next to the policy.

As in EAGLE (arXiv 2401.15077), the head reads the policy's last hidden state and the embedding of the next token. With
the policy's own output layer, it predicts the token after that one. It learns the policy's distribution of that token
by soft cross-entropy, from the detached hidden states of the policy's update. So the policy's gradient has the same
bits as without a head.

Every rank has the whole head and its optimizer. The ranks that have hidden states add up their gradients, and then all
ranks take the same step. So no layout splits the head, and it does not matter which pipeline stage has the states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from megatron_rl.config import DraftConfig
from megatron_rl.engine.one_copy import one_copy
from megatron_rl.engine.output_head import Head
from megatron_rl.engine.packed_rows import PackedRows
from megatron_rl.engine.rope import Rope, rotate
from megatron_rl.ops import VocabShard
from megatron_rl.ops.head import CHUNKS_OF_TERM, head_logits, rows_of_chunk
from megatron_rl.ops.library import accumulator
from megatron_rl.parallel import Axis, ParallelGroups
from megatron_rl.types import MicroBatch
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.draft_files import LAYER, PREFIX, has_draft, read_draft, shapes_for
from megatron_rl.weights.hf_files import RandomWeights
from megatron_rl.weights.mapping import hf_shapes
from megatron_rl.weights.tensor_rules import WeightSource

BETAS = (0.9, 0.95)
CLIP_GRAD = 1.0


class DraftRows(NamedTuple):
    """The rows from which a draft head learns in one microbatch, as int64 indices into the microbatch's rows.

    At depth d, row r predicts token r + d + 1. It reads token r + d and a state: the head's own state of row r at depth
    d - 1 or, at depth 1, the policy's state after token r.
    """

    reads: Tensor  # `[R]`: rows of the head, sequence by sequence
    lengths: list[int]  # rows of each sequence
    learned: Tensor  # `[n]`: indices in `reads` of the rows whose prediction counts
    before: Tensor
    """`[R]`: the index that each of these rows has among the rows of the previous depth; at depth 1, among the
    microbatch's rows."""


def draft_rows(microbatch: MicroBatch, context: Axis, depths: int = 1) -> list[DraftRows]:
    """Choose, for each depth, the rows from which this context rank learns.

    A rank takes every `context.size`-th sequence. A row's prediction counts if the policy is trained on the predicted
    token.
    """
    trained = microbatch.rows["labels"] >= 0  # of the policy's rows: it predicts one token ahead, the head two
    bounds = microbatch.rows["cu_seqlens"].tolist()
    reads, lengths = [torch.empty(0, dtype=torch.int64)], []
    for number in range(context.rank, len(bounds) - 1, context.size):
        begin = bounds[number]
        taught = begin + 1 + trained[begin + 1 : bounds[number + 1]].nonzero()[:, 0]
        if len(taught):
            reads.append(torch.arange(begin, int(taught[-1])))
            lengths.append(len(reads[-1]))
    read = torch.cat(reads)
    found = [DraftRows(read, lengths, trained[read + 1].nonzero()[:, 0], read)]
    for depth in range(2, depths + 1):  # the last row of each sequence has no further token to predict
        before, starts = found[-1], [0, *itertools.accumulate(found[-1].lengths)]
        parts = [torch.arange(start, stop - 1) for start, stop in itertools.pairwise(starts)]
        kept = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        read, lengths = before.reads[kept], [length - 1 for length in before.lengths if length > 1]
        found.append(DraftRows(read, lengths, trained[read + depth].nonzero()[:, 0], kept))
    return found


class DraftHead:
    """A draft head with its optimizer, equal on all ranks.

    weights: the initial weights, under the names of draft_files.py.
    """

    splits_rows = False
    """True if the head's passes communicate with ranks that have other rows. Every rank must then run every pass."""

    def __init__(
        self,
        arch: Architecture,
        config: DraftConfig,
        groups: ParallelGroups,
        weights: dict[str, Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.arch, self.config, self.groups, self.dtype = arch, config, groups, dtype
        # Sums of small steps need float32, whatever the dtype of the computation.
        self.weights = {
            name: torch.nn.Parameter(weight.to(device, accumulator(dtype), copy=True))
            for name, weight in weights.items()
        }
        self.device = device
        with device:
            self.rope = Rope.of(arch)
        group = {"params": list(self.weights.values())}  # a rank may have none of them
        self.optimizer = torch.optim.AdamW([group], lr=config.lr, betas=BETAS, weight_decay=0.0)
        self._sums = torch.zeros(config.depths, 3, dtype=torch.float64, device=device)
        """The sums since the last step, for each depth: loss, overlap with the policy's distribution, number of
        predictions."""
        self._seen, self._largest_norm = torch.zeros(config.depths, 3, dtype=torch.float64), 0.0
        """The same sums since the last call of `metrics`, and the largest gradient norm since then."""

    def states(self, hidden: Tensor, embedded: Tensor, positions: Tensor, lengths: list[int]) -> Tensor:
        """Return the head's states `[R, H]`, from which the policy's output layer predicts.

        hidden: `[R, H]`, the policy's states. embedded: `[R, H]`, the embeddings of the tokens that follow.
        positions: `[R]` int64, on the host.
        lengths: the number of rows of each sequence. A row attends to the rows of its sequence up to itself.
        """
        # As SGLang has it: its model of the head knows no embedding at position 0.
        arch, positions = self.arch, one_copy(positions, self.device)
        embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        own = {name.removeprefix(LAYER): weight.to(self.dtype) for name, weight in self.weights.items()}

        def linear(x: Tensor, name: str) -> Tensor:
            return F.linear(x, own[f"{name}.weight"], own.get(f"{name}.bias"))

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (arch.hidden,), own[f"{name}_layernorm.weight"], arch.norm_eps)

        x = linear(torch.cat([norm(hidden, "hidden"), norm(embedded, "token")], -1), "input_proj")
        normed, rotation = norm(x, "input"), self.rope.rotation(positions)
        query, key, value = (linear(normed, f"self_attn.{n}_proj").view(len(x), -1, arch.head_dim) for n in "qkv")
        parts = (part.split(lengths) for part in (rotate(query, rotation), rotate(key, rotation), value))
        attended = [
            F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in qkv), is_causal=True, enable_gqa=True)
            for qkv in zip(*parts, strict=True)
        ]
        x = x + linear(torch.cat([out[0].transpose(0, 1) for out in attended]).flatten(1), "self_attn.o_proj")
        normed = norm(x, "post_attention")
        x = x + linear(F.silu(linear(normed, "mlp.gate_proj")) * linear(normed, "mlp.up_proj"), "mlp.down_proj")
        return norm(x, "final")

    def learn(self, hidden: Tensor, microbatch: MicroBatch, packed: PackedRows, head: Head, embedding: Tensor) -> None:
        """Add the gradient of one microbatch. Every rank of the last pipeline stage calls it.

        hidden: the policy's states, as they are passed to its output head. embedding: this rank's rows of the
        embedding, as `head.shard` says.
        """
        depths = draft_rows(microbatch, self.groups.context, self.config.depths)
        everything = torch.arange(microbatch.tokens)
        tokens, everything, there = one_copy((microbatch.rows["input_ids"], everything, depths), hidden.device)
        known = head.states(hidden.detach(), packed, everything).to(self.dtype)  # [T, H], on every context rank
        states, predicted, gradients = known, [], []
        for depth, (rows, on_device) in enumerate(zip(depths, there, strict=True), 1):
            if not (len(rows.reads) or self.splits_rows):
                break
            embedded = _embedded(tokens[on_device.reads + depth], embedding.detach(), head.shard).to(self.dtype)
            positions = microbatch.positions[rows.reads] + depth - 1
            with torch.enable_grad():
                states = self.states(states[on_device.before], embedded, positions, rows.lengths)
                predicted.append(states[on_device.learned])
            taught = known[on_device.reads[on_device.learned] + depth]
            sums, gradient = soft_cross_entropy(predicted[-1].detach(), taught, head.weight(), head.shard)
            gradients.append(gradient)
            self._sums[depth - 1] += sums
        if predicted:
            torch.autograd.backward(predicted, gradients)

    @torch.no_grad()
    def step(self) -> bool:
        """Update the head, unless no rank had a prediction or the gradient is NaN or infinite. Collective.

        Returns whether the head was updated.
        """
        gradients, squares = self._summed_gradients()
        if self.groups.world_size > 1:
            dist.all_reduce(self._sums)
        sums = (self._sums / self.groups.tensor.size).cpu()  # tensor ranks have the same rows
        count = float(sums[:, 2].sum())
        norm = math.sqrt(squares) / max(count, 1.0)
        self._sums.zero_()
        is_applied = bool(count) and math.isfinite(norm)
        if is_applied:
            scale = min(1.0, CLIP_GRAD / (norm + 1e-6)) / count
            for weight, gradient in zip(self.weights.values(), gradients, strict=True):
                weight.grad = gradient.mul_(scale)
            self.optimizer.step()
            self._seen += sums
            self._largest_norm = max(self._largest_norm, norm)
        self.optimizer.zero_grad()
        return is_applied

    def _summed_gradients(self) -> tuple[list[Tensor], float]:
        """Return the gradient of each weight, summed over ranks, and the squared norm of all gradients together."""
        own = self.weights.values()
        flat = torch.cat([gradient_of(weight).flatten() for weight in own])
        if self.groups.world_size > 1:
            dist.all_reduce(flat)
        flat /= self.groups.tensor.size  # tensor ranks have the same rows
        parts = flat.split([weight.numel() for weight in own])
        return [part.view_as(weight) for part, weight in zip(parts, own, strict=True)], float(flat.norm()) ** 2

    def movable(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return two lists: the tensors that a publication or export reads, and those that only learning needs."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [weight.data for weight in self.weights.values()], moments

    def metrics(self) -> dict[str, float]:
        """Return the head's metrics since the last call, equal on all ranks; {} if it has not learned since.

        `draft/acceptance` is the probability that rejection sampling accepts the head's first guess, at temperature 1.
        `draft/acceptance_d` is that of the guess at depth d, if all guesses before it are accepted.
        """
        found: dict[str, float] = {}
        for depth, (loss, overlap, count) in enumerate(self._seen.tolist(), 1):
            if count:
                behind = "" if depth == 1 else f"_{depth}"
                found |= {f"draft/loss{behind}": loss / count, f"draft/acceptance{behind}": overlap / count}
        if found:
            found["draft/grad_norm"] = self._largest_norm
        self._seen.zero_()
        self._largest_norm = 0.0
        return found

    def tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield the head's tensors in the policy's dtype, on every rank."""
        for name, weight in self.weights.items():
            yield f"{prefix}{name}", weight.detach().to(self.dtype)

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors under the names that servers expect in a publication."""
        return self.tensors(PREFIX)

    def load_folder(self, path: str | Path, policy: Architecture) -> None:
        """Load the draft head's weights from a model's folder, if it has some. Collective: every rank calls it."""
        if has_draft(path):
            self._load_weights(read_draft(path, policy))

    def is_in(self, common: dict[str, Any]) -> bool:
        """Return True if a checkpoint has a head of this kind. common: the checkpoint's unsharded state."""
        return bool(common.get("has_draft"))

    def checkpoint_state(self, metadata: dict[str, Any], *, with_moments: bool = True) -> dict[str, Any]:
        """Return the head's entries of a checkpoint's state, to save them or to load into them.

        metadata: Megatron's options of the format. with_moments: True to include the optimizer's state.
        """
        state: dict[str, Any] = {}
        if with_moments:
            moments = self.optimizer.state_dict()["state"]
            state["weights"] = {n: w.detach().cpu().clone() for n, w in self.weights.items()}
            state["moments"] = {n: {k: v.detach().cpu().clone() for k, v in m.items()} for n, m in moments.items()}
        return {"has_draft": True, "draft": whole_in_checkpoint(state, self.groups)}

    def load_checkpoint(self, state: dict[str, Any], *, with_moments: bool = True) -> None:
        """Take over the head's entries after a checkpoint was loaded into them.

        state: the loaded entries of `checkpoint_state`. with_moments: True to take over the optimizer's state too.
        """
        self._load_weights(state["draft"]["weights"])
        if with_moments:
            options = self.optimizer.state_dict()["param_groups"]  # of the config, which may have changed
            self.optimizer.load_state_dict({"state": state["draft"]["moments"], "param_groups": options})

    @torch.no_grad()
    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(weights[name])


def whole_in_checkpoint(state: dict[str, Any], groups: ParallelGroups) -> ShardedObject:
    """Wrap a draft head's state, to save or load it whole. All ranks have the same state, and rank 0 saves it."""
    return ShardedObject("draft", state, global_shape=(1,), global_offset=(0,), replica_id=groups.rank)


def first_weights(arch: Architecture, policy: WeightSource, seed: int) -> dict[str, Tensor]:
    """Return initial weights of the head, equal on all ranks.

    They are those of the policy's final norm and last layer where the shapes agree, and random elsewhere.
    """
    shapes, own, last = shapes_for(arch), hf_shapes(arch), f"model.layers.{arch.layers - 1}."
    random, weights = RandomWeights(shapes, seed), {}
    for name, shape in shapes.items():
        there = last + name.removeprefix(LAYER)
        there = "model.norm.weight" if name.endswith("final_layernorm.weight") else there
        source, known = (policy, there) if own.get(there) == shape else (random, name)
        weights[name] = source.read(known, 0, 0, shape[0]).float().clone()
    return weights


def gradient_of(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _embedded(tokens: Tensor, embedding: Tensor, shard: VocabShard) -> Tensor:
    """Return the embeddings `[n, H]` of tokens `[n]`. Collective over the tensor axis."""
    own = tokens - shard.start
    is_here = (own >= 0) & (tokens < shard.stop)
    found = embedding[own.where(is_here, torch.zeros_like(own))].masked_fill(~is_here[:, None], 0.0)
    if shard.is_split:
        dist.all_reduce(found, group=shard.group)
    return found


@torch.no_grad()
def soft_cross_entropy(
    states: Tensor, taught: Tensor, weight: Tensor, shard: VocabShard, rows_per_chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sums `[3]` float64 of loss, overlap and rows, and the gradient `[n, H]` of the loss by `states`.

    The loss of a row is -sum p log q, where q is the distribution that the output layer computes from `states` `[n,
    H]`, and p the one that it computes from `taught` `[n, H]`. The overlap is sum min(p, q), the probability that
    rejection sampling accepts a token drawn from q. weight: this tensor rank's part `[V_local, H]` of the output layer,
    padding included. Collective over the tensor axis.
    """
    # Padding counts: tensor ranks have different amounts of it, and communicate in each chunk.
    chunk = rows_per_chunk or rows_of_chunk(CHUNKS_OF_TERM * len(weight))
    weight = weight.detach()[: shard.stop - shard.start]
    states, taught = states.to(weight.dtype), taught.to(weight.dtype)
    gradient, sums = torch.empty_like(states), torch.zeros(3, dtype=torch.float64, device=states.device)
    for start in range(0, len(states), chunk):
        some = slice(start, start + chunk)
        log_p = _log_softmax(head_logits(taught[some], weight), shard)
        log_q = _log_softmax(head_logits(states[some], weight), shard)
        p, q = log_p.exp(), log_q.exp()
        sums[0] -= (p * log_q).sum()
        sums[1] += torch.minimum(p, q).sum()
        torch.mm((q - p).to(weight.dtype), weight, out=gradient[some])
    if shard.is_split:
        dist.all_reduce(sums, group=shard.group)
        dist.all_reduce(gradient, group=shard.group)
    sums[2] = len(states)
    return sums, gradient


def _log_softmax(logits: Tensor, shard: VocabShard) -> Tensor:
    """Return log-probabilities of this rank's columns, normalised over the columns of all ranks."""
    logits = logits.to(accumulator(logits.dtype))
    largest = logits.amax(-1, keepdim=True)
    if shard.is_split:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    logits = logits - largest
    total = logits.exp().sum(-1, keepdim=True)
    if shard.is_split:
        dist.all_reduce(total, group=shard.group)
    return logits - total.log()
