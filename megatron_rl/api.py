"""The interfaces a researcher implements or calls. Signatures follow AReaL-lite's; implementations live elsewhere."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

if TYPE_CHECKING:  # importing megatron_rl.api must stay cheap
    from pathlib import Path

    import torch
    from tensordict import TensorDict
    from torch import Tensor

    from megatron_rl.types import FinetuneSpec, LLMRequest, LLMResponse, StepStats, Trajectory, TrajectoryBatch

    LossFn = Callable[[Tensor, TensorDict], Tensor]
    LossWeightFn = Callable[[TensorDict], Tensor]

Item = TypeVar("Item")
T = TypeVar("T")


class RequestRefused(ValueError):
    """The server understood the request and refused it (4xx); sending it again would be refused again."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ContextOutgrown(RequestRefused):
    """A prompt leaves no room for a reply: of a dialogue that has replies, this is the end."""


class InfrastructureFailure(RuntimeError):
    """A sample has lost what it runs on, such as a server, a container, a service or a worker process.

    It is no fault of the policy and never a reward. The sample is tried again, a metric counts the failures by kind,
    and a run with too many of them stops (rollout.max_infrastructure_failures).

    For example, in a reward, a tool or an environment of your own:

        raise InfrastructureFailure("the compiler at build7 gives no answer", kind="compiler")
    """

    KIND: ClassVar[str] = "other"

    def __init__(self, message: str = "", *, kind: str = "") -> None:
        """kind: one word, of the metric's name rollout/infrastructure_failures/KIND."""
        super().__init__(message)
        self.kind = kind or self.KIND


def infrastructure_in(error: BaseException | None) -> InfrastructureFailure | None:
    """Return the infrastructure's failure that an error is, or the first one in a group of errors."""
    if isinstance(error, BaseExceptionGroup):
        found = map(infrastructure_in, error.exceptions)
        return next((failure for failure in found if failure is not None), None)
    return error if isinstance(error, InfrastructureFailure) else None


class RolloutWorkflow(abc.ABC):
    """The episode of one prompt: the data that is generated for it.

    For example:

        class OneReply(RolloutWorkflow):
            async def arun_episode(self, engine, data):
                reply = await engine.agenerate(LLMRequest(rid=new_rid(), input_ids=self.prompt_ids(data)))
                return [Trajectory.from_reply(reply, reward=self.score(reply.text, data))]
    """

    IMPORT_PATHS: ClassVar[tuple[str, ...]] = ()
    """Arguments of its constructor that a config gives as an import path, or as a mapping from import paths: it is
    called with the objects that these name."""

    @classmethod
    def evaluating(cls, **arguments: Any) -> RolloutWorkflow:
        """Build what answers held-out prompts, from the arguments of the constructor: the same, unless a workflow
        chooses by reward what it returns."""
        return cls(**arguments)

    @abc.abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | list[Trajectory] | None:
        """Generate the trajectories of one prompt: all of them are one group.

        Return trajectories, or a padded `[n, L]` TensorDict with `input_ids`, `attention_mask`, `loss_mask`, `rewards`
        (`[n]` or `[n, L]`) and optionally `logprobs` and `versions`; None rejects the prompt. Exceptions go to the
        executor, which retries the episode and counts it.
        """


class KeptSteps(Protocol):
    """The steps that an unfinished episode's world did, in this process and in the one that was killed before it."""

    def take_step(self, name: str) -> dict[str, Any] | None:
        """Return what an earlier process kept under that name."""

    def keep_step(self, name: str, step: dict[str, Any]) -> None: ...


class Sampler(abc.ABC):
    """The engine as a workflow meets it: replies, and the version of the policy that gives them."""

    steps: KeptSteps | None = None
    """Where the steps of this episode's worlds are kept, if they are."""

    @abc.abstractmethod
    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Generate one reply; an interrupted one is continued from its partial output."""

    @abc.abstractmethod
    def get_version(self) -> int: ...

    def samples(
        self, make: Callable[[Sampler, Item], Awaitable[T]], items: Iterable[Item]
    ) -> Coroutine[Any, Any, list[T]]:
        """Await `make(sampler, item)` for each item at the same time, and return what they give, in order.

        Inside an episode each sample that fails is tried again alone, with the replies that it had: so `make` asks the
        sampler that it is given, and not this one.
        """
        return together([make(self, item) for item in items])


class InferenceEngine(Sampler):
    """The rollout servers as workflows and the training loop see them.

    For example:

        engine.initialize(["http://127.0.0.1:30000"])
        batch = engine.rollout_batch([{"messages": [{"role": "user", "content": "2 + 2?"}]}], workflow)
    """

    @abc.abstractmethod
    def initialize(self, addr: str | list[str] | None = None, ft_spec: FinetuneSpec | None = None) -> None: ...

    @abc.abstractmethod
    def destroy(self) -> None: ...

    @abc.abstractmethod
    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode; its trajectories come back from `wait`."""

    @abc.abstractmethod
    def wait(self, count: int, timeout_s: float | None = None) -> TrajectoryBatch:
        """Return the first `count` groups to finish, older versions first. TimeoutError leaves them where they are."""

    @abc.abstractmethod
    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TrajectoryBatch:
        """Run one episode per prompt and return the groups in the order of `data` (rejected ones left out)."""

    @abc.abstractmethod
    def evaluate(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> Future[TrajectoryBatch]:
        """Run the episodes in the slots that training's episodes leave; the caller need not wait for the future."""

    @abc.abstractmethod
    def prepare_batch(
        self, prompts: Iterable[Any], workflow: RolloutWorkflow, count: int | None = None
    ) -> TrajectoryBatch:
        """Keep episodes in flight as staleness allows and return the next `count` groups.

        prompts: gives rows, or lists of rows as a DataLoader does. One that can be begun anew, as a list, is endless.
        count: where none is given, batch.prompts_per_step of the engine's TrainConfig, or the DataLoader's batch_size.
        """

    @abc.abstractmethod
    def pause(self) -> None:
        """Stop generation on all servers. Requests in flight are interrupted and continue after `resume`."""

    @abc.abstractmethod
    def resume(self) -> None: ...

    @abc.abstractmethod
    def set_version(self, version: int) -> None: ...

    @abc.abstractmethod
    def update_weights(self, path: str | Path, version: int) -> None:
        """Load a HF safetensors folder into all servers. Updates over a process group: `TrainEngine.update_weights`."""


class NoServerLeft(RuntimeError):
    """Not one rollout server holds the weights that were to be published."""


SGLANG_DELTA_LOADER = "megatron_rl.weights.sglang_loaders.load_changes"
SGLANG_ROUND_LOADER = "megatron_rl.weights.sglang_loaders.load_round"
"""Functions that SGLang is started with, as its --custom-weight-loader, to take changes, and several senders' buckets
at the same time."""


@dataclass(frozen=True)
class HeldWeights:
    """A server's word on its own weights."""

    version: str | None
    """None where it does not say."""
    checksums: dict[str, str]
    """Tensor -> checksum in the server's `ChecksumForm`; empty where it cannot say."""


@dataclass(frozen=True)
class ChecksumForm:
    """A server's way of taking checksums, so that the trainer can take them of what it sends in the same way."""

    kind: str
    """`embedded`: update_group.checksum of each HF tensor. `sglang_cpu`, `sglang_gpu`: of what each rank of SGLang
    keeps (weights/sglang_checksums.py)."""
    dtype: str | None
    """The dtype that the server holds the weights in, such as bfloat16; None: the dtype that is sent."""
    ranks: int = 1
    """Its tensor-parallel ranks."""
    kv_heads: int | None = None
    """Of the model, where several ranks share them and it is known."""
    experts: int | None = None
    """Of each of the model's mixtures, where the server keeps them as they are sent and it is known."""
    expert_ranks: int = 1
    """The groups of ranks that share a mixture's experts out; the ranks of a group each have a part of every one."""

    def name_on(self, name: str, rank: int) -> str:
        """Return the name of the checksum of a rank's part of a tensor."""
        return name if self.ranks == 1 else f"{name} (rank {rank})"


class WeightReceiver(Protocol):
    """The rollout servers as the publisher sees them, each known by its URL.

    A call addresses every server that takes part. A call that waits drops those that fail and is well if another is
    left; the others give a future for each server. A publication, as weights/publish.py makes it:

        receiver.pause()
        receiver.begin_weight_update(version=7)
        loads = receiver.load_bucket(names=..., dtypes=..., shapes=..., group="weights", version=7)  # URL -> future
        receiver.end_weight_update(version=7)
        receiver.finish_update(version=7)  # after held_weights() has shown the same checksums
        receiver.resume()
    """

    @property
    def membership(self) -> int:
        """Changes with the set of servers that take part; a weight group made under another number no longer fits."""

    @property
    def server_ranks(self) -> dict[str, int]:
        """The ranks that each server brings to a weight-update group, in their order there, after rank 0."""

    def trainer_address(self) -> str:
        """The trainer's host as the servers reach it."""

    def drop(self, server: str, reason: str) -> None:
        """Leave a server out until a later publication: it failed, or holds other weights than were sent."""

    def unreachable(self) -> dict[str, str]:
        """Ask every server for a sign of life; return those that give none, with what happened instead."""

    def pause(self) -> None: ...

    def resume(self) -> None:
        """Let the servers go on. After an update that was not finished they end what they were generating and get
        nothing more."""

    def begin_weight_update(self, version: int) -> None:
        """Open a weight session where the server's protocol has them."""

    def end_weight_update(self, version: int) -> None:
        """Close the session."""

    def join_weight_group(self, *, address: str, port: int, name: str, backend: str) -> dict[str, Future[None]]:
        """Ask the servers to join a group; the trainer is its rank 0 and hosts it at `address:port`."""

    def leave_weight_group(self, *, name: str) -> dict[str, Future[None]]: ...

    def load_bucket(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group: str,
        version: int,
        flattened: bool = True,
    ) -> dict[str, Future[None]]:
        """Ask the servers to receive a bucket from rank 0: in one broadcast of all bytes, or one for each tensor."""

    def load_round(self, buckets: list[dict[str, Any]], version: int, pickled: str) -> dict[str, Future[None]]:
        """Ask the servers to receive buckets of several groups, each given as to `load_bucket`: at the same time where
        they can, and in this order where they cannot. pickled: the same for SGLANG_ROUND_LOADER."""

    def shared_memory_forms(self, at_hand: Sequence[str] = ()) -> dict[str, str | None]:
        """Return how each server takes a bucket in shared memory, `handle` or `pickle`; None for one on another host.

        at_hand: URLs of servers that are known to have a source of buckets on their own host.
        """

    def load_shared(
        self, *, names: list[str], dtypes: list[str], shapes: list[list[int]], buckets: dict[str, Any], version: int
    ) -> dict[str, Future[None]]:
        """Ask the servers to read one flat bucket; buckets: what each is told of it, a handle or a pickle per rank."""

    def change_forms(self) -> dict[str, str | None]:
        """Return how each server takes changes: `body`, or `pickle` for an SGLang with SGLANG_DELTA_LOADER; None for
        one that takes none."""

    def load_changes(self, bodies: dict[str, bytes | list[str]], version: int) -> dict[str, Future[None]]:
        """Ask the servers to change the weights that they hold; bodies: each one's changes (delta_code.py), or a pickle
        for each of its ranks."""

    def load_folder(self, path: str | Path, version: int) -> dict[str, Future[None]]:
        """Ask the servers to load a HF folder, which they must be able to read."""

    def load_adapters(self, path: str | Path, version: int) -> dict[str, Future[None]]:
        """Ask the servers to compute with the adapters of a folder in PEFT's format, which they must be able to read,
        in place of those before."""

    def checksum_forms(self) -> dict[str, ChecksumForm | None]:
        """Return how each server takes checksums; None where the trainer cannot do the same."""

    def held_weights(self) -> dict[str, Future[HeldWeights]]: ...

    def finish_update(self, version: int) -> None:
        """Every server that takes part has proved that it holds `version`: from here on new tokens are its."""


class LogitsTerm(Protocol):
    """A term of a loss that whole logits are needed for; `ops.TeacherTargets` is one."""

    def of(
        self, rows: TensorDict, device: torch.device
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor], Tensor]]:
        """Return the term of a microbatch, whose rows are on the host, for a model on the device.

        (logits `[c, V_local]`, their places among the rows) -> the loss's part, its sums, and its gradient by the
        logits, which stay as they are. The engine calls it with some trained rows at a time.
        """


@dataclass(frozen=True)
class LogprobLoss:
    """A loss that needs log-probabilities only, so that the engine never forms `[T, V]` logits for it.

    fn(logprobs, entropy, data) -> (loss_sum, sums): logprobs and entropy are `[T]` float32 (0 in rows that are not
    trained), data is the microbatch's rows; `loss_sum` is a sum over trained rows, not a mean; `sums` maps names to
    0-dim tensors that are added over microbatches and ranks.

        def negative_log_likelihood(logprobs, entropy, rows):
            return -logprobs.sum(), {"entropy": entropy.detach().sum()}

        stats = engine.train_batch(batch, LogprobLoss(negative_log_likelihood, by_row=True))
    """

    fn: Callable[[Tensor, Tensor, TensorDict], tuple[Tensor, dict[str, Tensor]]]
    temperature: float = 1.0
    """Divides the logits, as the sampler did."""
    by_row: bool = False
    """`fn` is a sum over rows without a look at their neighbours: the engine may call it with some trained rows at a
    time, where data holds no `cu_seqlens`, and forms the gradient together with the loss, which saves forming the
    logits twice."""
    beside: LogitsTerm | None = None
    """Added to the loss."""


@dataclass(frozen=True)
class ValueLoss:
    """The loss of an engine with a value head.

    fn(values, data) -> (loss_sum, sums): values are `[T]` float32, row t's the value of the state in which `labels[t]`
    is chosen (0 in rows that are not trained); the rest is as in LogprobLoss.

        def squared_error(values, rows):
            return (values - rows["returns"]).square().masked_fill(rows["labels"] < 0, 0.0).sum(), {}

        stats = critic_engine.train_batch(batch, ValueLoss(squared_error))
    """

    fn: Callable[[Tensor, TensorDict], tuple[Tensor, dict[str, Tensor]]]


class TrainEngine(abc.ABC):
    """One model, its layout and its optimizer.

    All ranks call every method, with their data-parallel share of the data.

        engine.initialize(ft_spec=spec)
        stats = engine.train_batch(batch, LogprobLoss(lambda logprobs, entropy, rows: (-logprobs.sum(), {})))
        engine.step_lr_scheduler()
        engine.update_weights(receiver, version=engine.get_version())
    """

    @abc.abstractmethod
    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None: ...

    @abc.abstractmethod
    def destroy(self) -> None: ...

    @abc.abstractmethod
    def train(self, mode: bool = True) -> TrainEngine: ...

    @abc.abstractmethod
    def eval(self) -> TrainEngine: ...

    @abc.abstractmethod
    def train_batch(
        self,
        data: TrajectoryBatch | TensorDict,
        loss_fn: LossFn | LogprobLoss | ValueLoss,
        loss_weight_fn: LossWeightFn | None = None,
    ) -> StepStats:
        """Apply one optimizer step to `data`.

        `loss_fn(logits, rows)` returns a mean that weighs `loss_weight_fn(rows)` (an integer count of rows on the host,
        by default the trained ones); the gradient is that of the weighted mean over all microbatches and ranks,
        whatever the layout or split. A `LogprobLoss` returns sums, and so does a `ValueLoss`, the one that an engine
        with a value head takes.

        Where the loss or the gradient's norm is not finite on any rank, nothing changes: weights, optimizer and version
        stay, `applied` is False and `fault` says why.
        """

    @abc.abstractmethod
    def eval_batch(
        self,
        data: TrajectoryBatch | TensorDict,
        loss_fn: LossFn | LogprobLoss | ValueLoss,
        loss_weight_fn: LossWeightFn | None = None,
    ) -> StepStats:
        """Return what `train_batch` would, without gradient or step."""

    @abc.abstractmethod
    def forward(
        self,
        data: TrajectoryBatch | TensorDict,
        post_hook: Callable[[Tensor, TensorDict], Tensor] | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> Tensor:
        """Return log p of each trained token, or `post_hook(logits, rows)`'s `[T]` rows, as `[N]` float32 by token.

        entropy: in place of log p, the entropy in nats of the distribution that each was sampled from. An engine with a
        value head returns the value of the state in which each trained token was chosen.
        """

    @abc.abstractmethod
    def step_lr_scheduler(self) -> None:
        """Advance the schedule by an update. Behind one that was skipped it does nothing."""

    @abc.abstractmethod
    def get_version(self) -> int:
        """Return the number that the policy is published under: train_batch raises it where it changes the weights.

        A loop that publishes after several of them sets it, so that versions count what servers have been sent.
        """

    @abc.abstractmethod
    def set_version(self, version: int) -> None: ...

    @abc.abstractmethod
    def save(self, path: str | Path, *, with_optimizer: bool = False) -> None:
        """Write a HF safetensors folder, or with the optimizer a resumable checkpoint."""

    @abc.abstractmethod
    def load(self, path: str | Path, *, with_optimizer: bool = False) -> None: ...

    @abc.abstractmethod
    def update_weights(self, receiver: WeightReceiver | None, version: int) -> None:
        """Publish the weights to rollout servers. All ranks call it; global rank 0 gives the receiver, others None.

        Servers that fail are left out; NoServerLeft on global rank 0 where that leaves none.
        """

    @abc.abstractmethod
    def hf_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Stream the full HF tensors, gathered one by one. All ranks iterate; only global rank 0 is given tensors."""


async def together(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Await all at once and return their results in order.

    If one fails the others are cancelled, and have ended when its error is raised. (asyncio.gather would let them go
    on, and asyncio.TaskGroup before Python 3.13 leaves its own task marked as cancelled.)
    """
    failures: list[BaseException] = []

    def note(task: asyncio.Future[T]) -> None:
        if task.cancelled():  # which is a failure, too
            failures.append(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            failures.append(error)

    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    for task in tasks:
        task.add_done_callback(note)
    try:
        pending = set(tasks)
        while pending and not failures:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if failures:
            raise failures[0]  # the first in time, not in order: those after it may be its consequences
        return [task.result() for task in tasks]
    finally:
        under_way = [task for task in tasks if not task.done()]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)  # nothing of this call runs on when it has ended
