"""Who the operators are measured beside: an adapter each, with its version and what it does and does not compute.

A peer that cannot be imported is listed as absent with the reason. Nothing of a peer is kept in this repository:
benchmarks/gpu_wheels.sh fetches what a machine without a network lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from frame import commit
from suite_bars import ENTROPY, LOGP_BACKWARD
from torch import Tensor

from megatron_rl.ops import PpoOptions, VocabShard, lm_head_loss, packed_logprobs, ppo_loss
from tests.kit import operators as reference

LOGP, ENTROPY_BACKWARD = "logp", "logp, entropy, backward"
POLICY = "policy loss, backward"
FORWARD = (LOGP, ENTROPY)
BACKWARD = (LOGP_BACKWARD, ENTROPY_BACKWARD, POLICY)
MODES = (*FORWARD, *BACKWARD)

POLICY_OPTIONS = PpoOptions()
POLICY_SEQUENCE = 512
"""In POLICY, rows come in sequences of this length: one advantage each, no label on the last row."""


@dataclass(frozen=True)
class Given:
    """What belongs to the logits: labels `[T]`, upstream gradients `[T]`, and for POLICY the other columns `[T]`."""

    labels: Tensor
    by_logprob: Tensor
    by_entropy: Tensor
    proximal: Tensor
    advantages: Tensor


Found = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Log-probs (or losses), entropy, gradient of the logits; None where it has none."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    name: str
    version: str
    notes: str
    calls: dict[str, Callable[[Tensor, Given], Found]]
    sign: float = 1.0
    """-1 where it returns -log p, whose upstream gradient it is given."""
    overwrites: tuple[str, ...] = BACKWARD
    """Where it writes into the logits: they are put back before each call, outside the clock."""
    unit_gradient: bool = False
    """It knows the upstream gradient 1 of every row only."""
    is_slow: bool = False
    """So slow to compile or to run that it is measured on some of the rows only."""
    least_rows: int = 1
    head: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    """(hidden, weight, labels, advantages) -> (loss, gradient of hidden, of weight), the loss a sum over rows."""


class InGraph(torch.autograd.Function):
    """Gives logits a place in the graph without copying them; as a leaf they could not be overwritten."""

    @staticmethod
    def forward(ctx, leaf: Tensor, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, None]:
        return None, None


def in_graph(logits: Tensor) -> Tensor:
    return InGraph.apply(torch.zeros((), requires_grad=True), logits)


def calls_of(function: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]], has_entropy: bool):
    """Calls of a differentiable `function(logits, labels, with_entropy) -> (log-probs, entropy or None)`."""

    def forward(with_entropy: bool):
        def call(logits: Tensor, given: Given) -> Found:
            with torch.no_grad():
                return (*function(logits, given.labels, with_entropy), None)

        return call

    def backward(with_entropy: bool):
        def call(logits: Tensor, given: Given) -> Found:
            x = in_graph(logits)
            logprobs, entropy = function(x, given.labels, with_entropy)
            outputs = [logprobs, entropy] if with_entropy else [logprobs]
            upstream = [given.by_logprob, given.by_entropy] if with_entropy else [given.by_logprob]
            return logprobs.detach(), None, torch.autograd.grad(outputs, x, upstream)[0]

        return call

    calls = {LOGP: forward(False), LOGP_BACKWARD: backward(False)}
    return calls | ({ENTROPY: forward(True), ENTROPY_BACKWARD: backward(True)} if has_entropy else {})


def policy_call(loss_of: Callable[[Tensor, Given], Tensor]):
    def call(logits: Tensor, given: Given) -> Found:
        x = in_graph(logits)
        return None, None, torch.autograd.grad(loss_of(x, given), x)[0]

    return call


def ours() -> Peer:
    def logprobs(logits, labels, with_entropy):
        if with_entropy:
            return packed_logprobs(logits, labels, return_entropy=True, inplace_backward=True)
        return packed_logprobs(logits, labels, inplace_backward=True), None

    def policy_loss(x, given):
        own = packed_logprobs(x, given.labels, inplace_backward=True)
        return ppo_loss(own, given.proximal, None, given.advantages, given.labels >= 0, POLICY_OPTIONS)[0]

    def head(hidden, weight, labels, advantages):
        def of_some(logprobs, entropy, places):
            return ppo_loss(logprobs, None, None, advantages[places], labels[places] >= 0, POLICY_OPTIONS)

        h, shard = hidden.detach().requires_grad_(), VocabShard(0, len(weight), len(weight))
        loss, _ = lm_head_loss(h, weight, labels, of_some, shard=shard, main_grad=weight.main_grad)
        return loss.detach(), *torch.autograd.grad(loss, h), weight.main_grad

    return Peer(
        name="ours",
        version=commit(),
        notes="entropy, temperature inside, in place, ignored rows not read; the policy loss with its 19 statistics",
        calls=calls_of(logprobs, has_entropy=True) | {POLICY: policy_call(policy_loss)},
        head=head,
    )


def eager_logprobs(logits, labels, with_entropy):
    if with_entropy:
        return reference.logprobs_entropy(logits.float(), labels)
    return logits.float().log_softmax(-1).gather(-1, labels.clamp_min(0)[:, None])[:, 0], None


def eager_policy_loss(logits, given):
    own, mask = eager_logprobs(logits, given.labels, False)[0], given.labels >= 0
    return reference.ppo_loss(own, given.proximal, None, given.advantages, mask, POLICY_OPTIONS)


def torch_eager() -> Peer:
    def head(hidden, weight, labels, advantages):
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        own = eager_logprobs(h @ w.T, labels, False)[0]
        loss = reference.ppo_loss(own, None, None, advantages, labels >= 0, POLICY_OPTIONS)
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    return Peer(
        name="torch eager",
        version=torch.__version__,
        notes="float32 log_softmax of all rows; entropy; temperature outside, not counted here; whole logits",
        calls=calls_of(eager_logprobs, has_entropy=True) | {POLICY: policy_call(eager_policy_loss)},
        overwrites=(),
        is_slow=True,
        head=head,
    )


def torch_compile() -> Peer:
    logprobs = torch.compile(eager_logprobs, dynamic=False)
    columns = ("labels", "proximal", "advantages")

    @torch.compile(dynamic=False)
    def policy_loss(logits, labels, proximal, advantages):
        return eager_policy_loss(logits, Given(labels, labels, labels, proximal, advantages))

    return Peer(
        name="torch.compile",
        version=torch.__version__,
        notes="of the eager functions, static shapes, compile time left out",
        calls=calls_of(logprobs, has_entropy=True)
        | {POLICY: policy_call(lambda x, given: policy_loss(x, *(getattr(given, name) for name in columns)))},
        overwrites=(),
        is_slow=True,
    )


def flash_attention() -> Peer:
    try:
        from flash_attn import __version__ as found
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    except ImportError:
        from flash_attn_cross_entropy import __version__ as found
        from flash_attn_cross_entropy import cross_entropy_loss

    def losses(logits, labels, _):
        return cross_entropy_loss(logits, labels, inplace_backward=True)[0], None

    return Peer(
        name="flash-attn Triton",
        version=found,
        notes="no entropy, temperature inside (scalar), in place, reads ignored rows",
        calls=calls_of(losses, has_entropy=False),
        sign=-1.0,
    )


def liger() -> Peer:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def sum_of_losses(logits, labels):
        return LigerCrossEntropyFunction.apply(logits, labels, None, -100, 0.0, 0.0, "sum", None, False)[0]

    def forward(logits: Tensor, given: Given) -> Found:
        with torch.no_grad():
            arguments = (given.labels, None, -100, 0.0, 0.0, "none", None, False)
            return LigerCrossEntropyFunction.apply(logits, *arguments)[0], None, None

    def backward(logits: Tensor, given: Given) -> Found:
        x = in_graph(logits)
        return None, None, torch.autograd.grad(sum_of_losses(x, given.labels), x)[0]

    def head(hidden, weight, labels, _):
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        arguments = (labels, None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32)
        loss = LigerFusedLinearCrossEntropyFunction.apply(h, w, *arguments)[0]
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    return Peer(
        name="Liger CE",
        version=version("liger-kernel"),
        notes="no entropy, no temperature, losses in the logits' dtype; the gradient is formed in forward, for the sum "
        "of the losses only; the head's weight gradient in float32",
        calls={LOGP: forward, LOGP_BACKWARD: backward},
        sign=-1.0,
        unit_gradient=True,
        head=head,
    )


def liger_grpo() -> Peer:
    from liger_kernel.ops.grpo_loss import GrpoLossFunction, fused_selective_log_softmax

    def forward(logits: Tensor, given: Given) -> Found:
        labels = given.labels[None, :-1]
        return fused_selective_log_softmax(logits[None], labels, 1.0, labels >= 0)[0], None, None

    def policy_loss(x: Tensor, given: Given) -> Tensor:
        def columns(tensor: Tensor) -> Tensor:
            return tensor.view(-1, POLICY_SEQUENCE)[:, :-1].contiguous()

        labels, proximal = columns(given.labels), columns(given.proximal)
        mask, advantages = labels >= 0, given.advantages.view(-1, POLICY_SEQUENCE)[:, 0].contiguous()
        low, high = POLICY_OPTIONS.clip_low, POLICY_OPTIONS.clip_high
        arguments = (proximal, None, labels, advantages, mask, 1.0, 0.0, low, high, True, "grpo", None, False)
        return GrpoLossFunction.apply(x.view(-1, POLICY_SEQUENCE, x.shape[-1]), *arguments)[0].sum()

    return Peer(
        name="Liger GRPO",
        version=version("liger-kernel"),
        notes="no entropy, temperature inside, in place; sequences of one length, one advantage each, the last row of "
        "each is left out; clip ratio only as statistics",
        calls={LOGP: forward, POLICY: policy_call(policy_loss)},
        least_rows=2,
    )


def liger_vocab_parallel() -> Peer:
    from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction

    def losses(logits, labels, _):
        arguments = (None, -100, 0.0, "pytorch", "global")
        return LigerVocabParallelCEFunction.apply(logits[:, None], labels[:, None], *arguments)[:, 0], None

    return Peer(
        name="Liger vocab-parallel",
        version=version("liger-kernel"),
        notes="one rank; keeps float32 [T, V]; no entropy, no temperature",
        calls=calls_of(losses, has_entropy=False),
        sign=-1.0,
        overwrites=(),
        is_slow=True,
    )


def quack() -> Peer:
    from quack import __version__ as found
    from quack.cross_entropy import cross_entropy

    def losses(logits, labels, _):
        return cross_entropy(logits, labels, reduction="none", inplace_backward=True), None

    def head(hidden, weight, labels, _):
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = chunked_linear_cross_entropy(h, w, labels, chunk_size=4096, reduction="sum", tuned=False)
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    return Peer(
        name="QuACK",
        version=found,
        notes="no entropy, no temperature, in place; the head in bf16 logits, its GEMM not autotuned (minutes)",
        calls=calls_of(losses, has_entropy=False),
        sign=-1.0,
        head=head,
    )


def quack_one_kernel() -> Peer:
    from quack import __version__ as found
    from quack.cross_entropy import cross_entropy_fwd

    def call(logits: Tensor, given: Given) -> Found:
        return *cross_entropy_fwd(logits, given.labels, return_dx=True, inplace_backward=True)[:1], None, logits

    return Peer(
        name="QuACK fwd+dx",
        version=found,
        notes="loss and gradient in one kernel, upstream gradient 1 only; no entropy, no temperature, in place",
        calls={LOGP_BACKWARD: call},
        sign=-1.0,
        unit_gradient=True,
    )


def megatron() -> Peer:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def losses(logits, labels, _):
        return fused_vocab_parallel_cross_entropy(logits[:, None], labels[:, None], dist.group.WORLD)[:, 0], None

    return Peer(
        name="Megatron fused CE",
        version=version("megatron-core"),
        notes="one rank; keeps the float32 softmax, gradient in bf16; no entropy, no temperature, no ignored rows",
        calls=calls_of(losses, has_entropy=False),
        sign=-1.0,
        is_slow=True,
        overwrites=MODES,  # float32 logits lose their maximum in forward
    )


def cut_cross_entropy() -> Peer:
    from cut_cross_entropy import linear_cross_entropy

    def head(hidden, weight, labels, _):
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = linear_cross_entropy(h, w, labels, reduction="sum")
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    return Peer(
        name="Apple CCE",
        version=version("cut-cross-entropy"),
        notes="head only; logits never stored, formed again in backward; small gradients are left out",
        calls={},
        head=head,
    )


LOADERS = (
    *(ours, torch_eager, torch_compile, flash_attention, liger, liger_grpo, liger_vocab_parallel),
    *(quack, quack_one_kernel, cut_cross_entropy, megatron),
)
NOT_CARRIED = {
    "Transformer Engine CE": "compiled for one torch; too large to carry",
    "apex xentropy": "no package on the index",
    "TRL, AReaL, slime, verl, NeMo-RL": "whole trainers, not carried; torch eager and torch.compile stand for them",
}


@dataclass(frozen=True)
class Peers:
    present: list[Peer]
    absent: dict[str, str] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        return {peer.name: {"version": peer.version, "notes": peer.notes} for peer in self.present}


def find_peers(loaders=LOADERS) -> Peers:
    """Every peer that can be imported here, and of every other one why not."""
    present, absent = [], dict(NOT_CARRIED)
    for load in loaders:
        try:
            present.append(load())
        except Exception as error:  # a package may fail in any way while it is imported; the table says how
            absent[load.__name__] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
    return Peers(present, absent)
