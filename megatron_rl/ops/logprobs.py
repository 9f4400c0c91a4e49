"""Log-probability and entropy of labels, from logits whose vocabulary may be split over the tensor-parallel ranks.

Shapes: T rows, V tokens in the vocabulary, V_local columns on this rank. Sums are float32 for every logits dtype. Rows
with a negative label give 0 and get no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.ops.library import ops


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns `[start, stop)` of a vocabulary of `size`. `group` contains the ranks with the other columns.

    For example:

        whole = VocabShard(0, 32000, 32000)
        second_half = VocabShard(16000, 32000, 32000, group)  # on rank 1 of a tensor axis of 2
        gather_logprobs(logits, labels, shard=second_half)  # logits [T, 16000]: log p over all 32000
    """

    start: int
    stop: int
    size: int
    group: dist.ProcessGroup | None = None

    @property
    def is_split(self) -> bool:
        return self.stop - self.start < self.size

    def without_padding(self, columns: int) -> int:
        """Return how many of this rank's `columns` belong to the vocabulary. The last rank may have only padding."""
        return max(0, min(columns, self.stop - self.start))


NORMALISING = {
    *(torch.softmax, torch.log_softmax, torch.logsumexp, F.softmax, F.log_softmax, F.cross_entropy),
    *(Tensor.softmax, Tensor.log_softmax, Tensor.logsumexp),
}
"""Functions that normalise over the last dimension. On one rank's columns of the vocabulary they give wrong results."""


class VocabParallelLogits(Tensor):
    """`[T, V_local]` logits that know their columns, so that `gather_logprobs(logits, labels)` works in any layout.

    Operations that keep the last dimension keep `shard`, such as division by a temperature, a cast, or a slice of rows.
    A softmax over split columns raises ValueError instead of being silently wrong.

        def my_loss(logits: VocabParallelLogits, rows: TensorDict) -> Tensor:
            return -gather_logprobs(logits / 0.7, rows["labels"]).sum() / (rows["labels"] >= 0).sum()
    """

    shard: VocabShard

    @classmethod
    def wrap(cls, logits: Tensor, shard: VocabShard) -> VocabParallelLogits:
        wrapped = logits.as_subclass(cls)
        wrapped.shard = shard
        return wrapped

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        given = [*args, *(kwargs or {}).values()]
        given += [entry for part in given if isinstance(part, list | tuple) for entry in part]  # as for torch.cat
        shards = [a.shard for a in given if isinstance(a, cls) and "shard" in a.__dict__]
        if shards and shards[0].is_split and func in NORMALISING:
            raise ValueError(
                f"logits: {func.__name__} sees only columns {shards[0].start} to {shards[0].stop} of "
                f"{shards[0].size} on this tensor-parallel rank; use megatron_rl.gather_logprobs or "
                f"gather_logprobs_entropy, which reduce over all."
            )
        result = super().__torch_function__(func, types, args, kwargs or {})
        if not shards:
            return result
        for part in result if isinstance(result, tuple | list) else (result,):  # several results, as from torch.split
            if isinstance(part, cls) and part.ndim and part.shape[-1] == shards[0].stop - shards[0].start:
                part.shard = shards[0]
        is_plain = isinstance(result, cls) and "shard" not in result.__dict__  # other columns, or none
        return result.as_subclass(Tensor) if is_plain else result


def packed_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    shard: VocabShard | None = None,
    return_entropy: bool = False,
    inplace_backward: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return log p(label), and with return_entropy also the entropy in nats: `[T]` float32, both differentiable.

    logits: `[T, V_local]` float32, bfloat16, float16 or float64 (CPU only; results are then float64). Rows may be
      strided. Forward and backward each read them once.
    labels: `[T]` int64 over the whole vocabulary. A row with a negative label gives 0, is not read and gets gradient 0.
    temperature: divides the logits; a number, or `[T]` float32.
    shard: this rank's columns; further columns of logits are padding and never read. Default: the columns of
      VocabParallelLogits, or all columns of plain logits. If the vocabulary is split, all ranks of the group call this.
      One all-gather of 16 bytes per row combines their results, and every rank gets the same bits.
    inplace_backward: the gradient overwrites logits, which must not be a leaf; a second backward then raises. Under
      torch.compile the gradient gets its own memory.

    A row whose logits contain NaN or +inf, or only -inf, gives NaN; other rows are unaffected. A label past the
    vocabulary raises on the CPU and fails a device-side assertion on CUDA.
    """
    if isinstance(logits, VocabParallelLogits):
        shard, logits = shard or logits.shard, logits.as_subclass(Tensor)
    check_rows(logits, labels)
    shard = shard or VocabShard(0, logits.shape[1], logits.shape[1])
    if shard.start < 0 or (shard.is_split and shard.group is None):
        raise ValueError(
            f"shard = columns {shard.start} to {shard.stop} of {shard.size}: starts below 0, or lacks the group of the "
            f"ranks that have the other columns."
        )
    if inplace_backward and logits.requires_grad and logits.is_leaf:
        raise ValueError("inplace_backward: logits is a leaf that requires grad, its value would become its gradient.")
    rest = (*check_temperature(temperature, labels), shard.start, shard.without_padding(logits.shape[1]))
    # Detached, because the backward of logprob_finish returns the whole gradient of the logits.
    partials = ops.logprob_partials(logits.detach(), labels, *rest, return_entropy)
    if shard.is_split:
        partials = gather_partials(ops.logprob_fold(partials, labels, *rest[:2]), shard.group)
    logprobs, entropy, _, _ = ops.logprob_finish(logits, partials, labels, *rest, shard.size, inplace_backward)
    return (logprobs, entropy) if return_entropy else logprobs


def check_rows(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} for logits {tuple(logits.shape)}: packed rows need [T] labels "
            f"for [T, V] logits; drop a batch dimension with squeeze(0)."
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"labels has dtype {labels.dtype}: it must be torch.int64; call labels.long().")
    if labels.device != logits.device:
        raise ValueError(f"labels is on {labels.device} and logits on {logits.device}: both must be on one device.")


def check_temperature(temperature: float | Tensor, labels: Tensor) -> tuple[float, Tensor | None]:
    """Return (the temperature, None) for a number, and (1, the temperatures of rows) for a tensor, after checking it.

    The values of a tensor are not checked, because that would wait for the device.
    """
    if not isinstance(temperature, Tensor):
        if not 1e-37 <= temperature <= 1e37:
            raise ValueError(
                f"temperature is {temperature}: it divides the logits in float32 and must be from 1e-37 to 1e37."
            )
        return float(temperature), None
    if temperature.shape != labels.shape or temperature.dtype != torch.float32 or temperature.device != labels.device:
        raise ValueError(
            f"temperature is {temperature.dtype} {tuple(temperature.shape)} on {temperature.device}: a temperature for "
            f"each row is float32 {tuple(labels.shape)} on {labels.device}."
        )
    return 1.0, temperature.contiguous()


def gather_partials(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather a tensor `[1, ...]` of every rank. Returns `[ranks, ...]` on all ranks of the group."""
    ranks = torch.empty((group.size(), *mine.shape[1:]), dtype=mine.dtype, device=mine.device)
    dist.all_gather_into_tensor(ranks, mine, group=group)
    return ranks


def gather_logprobs_entropy(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    """Return log p(label) and entropy in nats, both `[T]` float32 and differentiable.

    logits: `[T, V_local]`, either VocabParallelLogits, as the engine passes them to a loss, or plain with `shard`.
      Plain logits without `shard` have the whole vocabulary.
    labels: `[T]` int64 over the whole vocabulary; negative ones are ignored.
    temperature: divides the logits.
    """
    return packed_logprobs(logits, labels, temperature=temperature, shard=shard, return_entropy=True)


def gather_logprobs(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, *, shard: VocabShard | None = None
) -> Tensor:
    """Return log p(label), `[T]` float32. The arguments are those of `gather_logprobs_entropy`."""
    return packed_logprobs(logits, labels, temperature=temperature, shard=shard)
