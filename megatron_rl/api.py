"""Interfaces that a researcher implements or calls. Signatures follow AReaL-lite's; implementations live elsewhere."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:  # importing megatron_rl.api must stay cheap
    from pathlib import Path

    import torch
    from tensordict import TensorDict
    from torch import Tensor

    from megatron_rl.types import FinetuneSpec, LLMRequest, LLMResponse, StepStats, Trajectory, TrajectoryBatch

    LossFn = Callable[[Tensor, TensorDict], Tensor]
    LossWeightFn = Callable[[TensorDict], Tensor]

P = ParamSpec("P")
T = TypeVar("T")


class RequestRefused(ValueError):
    """The server refused the request (4xx), and would refuse it again if it were repeated."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ContextOutgrown(RequestRefused):
    """The prompt leaves no room for a reply. A dialogue that already has replies ends at this point."""


class InfrastructureFailure(RuntimeError):
    """A sample lost something that it depends on, such as a server, a container, a service or a worker process.

    The policy is not at fault, so the sample is retried instead of getting a reward. A metric counts the failures by
    kind, and too many of them stop the run (rollout.max_infrastructure_failures). Your reward, tool or environment may:

        raise InfrastructureFailure("the compiler at build7 gives no answer", kind="compiler")
    """

    KIND: ClassVar[str] = "other"

    def __init__(self, message: str = "", *, kind: str = "") -> None:
        """kind: one word. The failures of this kind are counted in the metric rollout/infrastructure_failures/KIND."""
        super().__init__(message)
        self.kind = kind or self.KIND


def infrastructure_in(error: BaseException | None) -> InfrastructureFailure | None:
    """Return `error` if it is an infrastructure failure, or the first one in an exception group; else None."""
    if isinstance(error, BaseExceptionGroup):
        found = map(infrastructure_in, error.exceptions)
        return next((failure for failure in found if failure is not None), None)
    return error if isinstance(error, InfrastructureFailure) else None


class RolloutWorkflow(abc.ABC):
    """Generates the training data of one prompt. Doing so is called an episode.

    class OneReply(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            reply = await engine.agenerate(LLMRequest(rid=new_rid(), input_ids=self.prompt_ids(data)))
            return [Trajectory.from_reply(reply, reward=self.score(reply.text, data))]
    """

    IMPORT_PATHS: ClassVar[tuple[str, ...]] = ()
    """Names of the constructor arguments that the config gives as import paths. The constructor receives the imported
    objects."""

    @classmethod
    def evaluating(cls, **arguments: Any) -> RolloutWorkflow:
        """Build the workflow that answers held-out prompts, from the constructor's arguments.

        Override this if the training workflow selects its trajectories by reward.
        """
        return cls(**arguments)

    @abc.abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | list[Trajectory] | None:
        """Generate the trajectories of one prompt, which form one group. Return None to reject the prompt.

        A returned TensorDict has padded tensors `[n, L]`: `input_ids`, `attention_mask`, `loss_mask`, `rewards` (`[n]`
        or `[n, L]`) and optionally `logprobs` and `versions`. If this method raises an exception, the executor counts
        it and retries the episode.
        """


class KeptSteps(Protocol):
    """Store of an unfinished episode's environment steps, which survive a crash of the process."""

    def take_step(self, name: str) -> dict[str, Any] | None:
        """Return the step that an earlier process kept under `name`, or None."""

    def keep_step(self, name: str, step: dict[str, Any]) -> None: ...


class Sampler(abc.ABC):
    """The part of the engine that a workflow uses: it generates replies and knows the policy version."""

    steps: KeptSteps | None = None
    """Store of this episode's environment steps; None if they are not kept."""

    @abc.abstractmethod
    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Generate one reply. An interrupted reply is continued from its partial output."""

    @abc.abstractmethod
    def get_version(self) -> int: ...

    async def sample(
        self, make: Callable[Concatenate[Sampler, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of `make(sampler, *args, **kwargs)`, which generates one of an episode's samples.

        If `make` raises an exception, only this sample is tried again, and its replies are reused. For that, `make`
        must use the sampler that it receives.
        """
        return await make(self, *args, **kwargs)


class InferenceEngine(Sampler):
    """The rollout servers as workflows and the training loop see them.

    engine.initialize(["http://127.0.0.1:30000"])
    batch = engine.rollout_batch([{"messages": [{"role": "user", "content": "2 + 2?"}]}], workflow)
    """

    @abc.abstractmethod
    def initialize(self, addr: str | list[str] | None = None, ft_spec: FinetuneSpec | None = None) -> None: ...

    @abc.abstractmethod
    def destroy(self) -> None: ...

    @abc.abstractmethod
    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode. `wait` returns its trajectories."""

    @abc.abstractmethod
    def wait(self, count: int, timeout_s: float | None = None) -> TrajectoryBatch:
        """Return the first `count` groups to finish, older versions first.

        After a TimeoutError all groups stay available.
        """

    @abc.abstractmethod
    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TrajectoryBatch:
        """Run one episode per prompt and return the groups in the order of `data`, without the rejected ones."""

    @abc.abstractmethod
    def evaluate(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> Future[TrajectoryBatch]:
        """Run one episode per prompt, in slots that training leaves free. The caller need not wait for the future."""

    @abc.abstractmethod
    def prepare_batch(
        self, prompts: Iterable[Any], workflow: RolloutWorkflow, count: int | None = None
    ) -> TrajectoryBatch:
        """Keep as many episodes in flight as staleness allows, and return the next `count` groups.

        prompts: rows, or lists of rows such as a DataLoader yields. They are repeated without end. count: None means
        batch.prompts_per_step of the engine's TrainConfig, or the DataLoader's batch_size.
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
        """Load a HF safetensors folder into all servers. See also `TrainEngine.update_weights`."""


class NoServerLeft(RuntimeError):
    """No rollout server holds the published weights."""


SGLANG_DELTA_LOADER = "megatron_rl.weights.sglang_loaders.load_changes"
SGLANG_ROUND_LOADER = "megatron_rl.weights.sglang_loaders.load_round"
SGLANG_FOLDER_LOADER = "megatron_rl.weights.sglang_loaders.load_folder"
"""Import paths of functions for SGLang's --custom-weight-loader. They load changes, buckets of several senders, and a
draft head's folder."""
DRAFT_FOLDER = "draft"
"""Name of the subfolder of a model's folder that has its draft head."""
DRAFT_PREFIX = "draft."
"""Prefix of a draft head's tensors in a publication, and in the names of SGLang's checksums."""


@dataclass(frozen=True)
class HeldWeights:
    """The weights that a server reports to hold."""

    version: str | None
    checksums: dict[str, str]
    """Tensor name -> checksum in the server's `ChecksumForm`. Empty if the server cannot compute checksums."""


@dataclass(frozen=True)
class ChecksumForm:
    """How a server computes checksums. The trainer computes the checksums of the tensors it sends in the same way."""

    kind: str
    """`embedded`: update_group.checksum of each HF tensor. `sglang_cpu`, `sglang_gpu`: checksums of the tensors that
    each SGLang rank keeps (weights/sglang_checksums.py)."""
    dtype: str | None
    """Dtype in which the server holds the weights, such as bfloat16. None: the dtype that is sent."""
    ranks: int = 1
    """Number of the server's tensor-parallel ranks."""
    kv_heads: int | None = None
    """Number of the model's key/value heads, if the server has several ranks and the number is known."""
    experts: int | None = None
    """Number of experts in each MoE layer, if the server keeps them as they are sent and the number is known."""
    expert_ranks: int = 1
    """Number of groups of ranks among which a layer's experts are divided. Each rank of a group holds a part of each of
    the group's experts."""

    def name_on(self, name: str, rank: int) -> str:
        """Return the checksum's name for the part of tensor `name` that a rank holds."""
        return name if self.ranks == 1 else f"{name} (rank {rank})"


class WeightReceiver(Protocol):
    """The rollout servers as the weight publisher sees them, each identified by its URL.

    A call is for every participating server. Some calls return a future per server. The others wait. They drop servers
    that fail, and succeed if at least one is left. One publication, as weights/publish.py does it:

        receiver.pause()
        receiver.begin_weight_update(version=7)
        loads = receiver.load_bucket(names=..., dtypes=..., shapes=..., group="weights", version=7)  # URL -> future
        receiver.end_weight_update(version=7)
        receiver.finish_update(version=7)  # after held_weights() has shown the same checksums
        receiver.resume()
    """

    @property
    def membership(self) -> int:
        """A number that changes whenever the set of participating servers does.

        Weight-update groups are created for one such set.
        """

    @property
    def server_ranks(self) -> dict[str, int]:
        """{server's URL: number of its ranks in a weight-update group}.

        The group's ranks after rank 0 belong to the servers in the order of this dict.
        """

    def trainer_address(self) -> str:
        """Return the trainer's address as the servers reach it."""

    def drop(self, server: str, reason: str) -> None:
        """Exclude a server until a later publication, because it failed or holds other weights than were sent."""

    def unreachable(self) -> dict[str, str]:
        """Ping every server. Return the servers that do not respond, each with its error."""

    def pause(self) -> None: ...

    def resume(self) -> None:
        """Resume generation. After an incomplete update, abort the servers' requests instead, and send no new ones."""

    def begin_weight_update(self, version: int) -> None:
        """Open a weight-update session, if the server's protocol has one."""

    def end_weight_update(self, version: int) -> None:
        """Close the weight-update session."""

    def join_weight_group(self, *, address: str, port: int, name: str, backend: str) -> dict[str, Future[None]]:
        """Ask the servers to join a process group. The trainer is rank 0 and hosts the group at `address:port`."""

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
        """Ask the servers to receive a bucket of tensors from rank 0 of the process group `group`.

        flattened: the bucket is sent as one flat tensor in one broadcast; otherwise, each tensor is broadcast alone.
        """

    def load_round(self, buckets: list[dict[str, Any]], version: int, pickled: str) -> dict[str, Future[None]]:
        """Ask the servers to receive buckets from several groups, if possible concurrently.

        Each bucket has the arguments of `load_bucket`. pickled: the same buckets, pickled for SGLANG_ROUND_LOADER.
        """

    def shared_memory_forms(self, at_hand: Sequence[str] = ()) -> dict[str, str | None]:
        """Return how each server accepts a bucket in shared memory: `handle`, `pickle`, or None on another host.

        at_hand: URLs of servers that are known to run on the same host as a sender of buckets.
        """

    def load_shared(
        self, *, names: list[str], dtypes: list[str], shapes: list[list[int]], buckets: dict[str, Any], version: int
    ) -> dict[str, Future[None]]:
        """Ask the servers to read one flat bucket from shared memory.

        buckets: for each server, a handle or a pickle per rank.
        """

    def change_forms(self) -> dict[str, str | None]:
        """Return how each server accepts changes of weights: `pickle`, `body`, or None if it does not.

        For `pickle`, SGLANG_DELTA_LOADER loads a pickle of the changes. For `body`, they are the body of a request.
        """

    def load_changes(self, bodies: dict[str, bytes | list[str]], version: int) -> dict[str, Future[None]]:
        """Ask the servers to apply changes of weights.

        bodies: for each server, the changes as encoded by delta_code.py, or a list with one pickle for each of its
        ranks.
        """

    def load_folder(self, path: str | Path, version: int) -> dict[str, Future[None]]:
        """Ask the servers to load a HF folder, which they must be able to read."""

    def load_adapters(self, path: str | Path, version: int) -> dict[str, Future[None]]:
        """Ask the servers to replace their adapters by those in a PEFT folder, which they must be able to read."""

    def checksum_forms(self) -> dict[str, ChecksumForm | None]:
        """Return how each server computes checksums; None for a server whose checksums the trainer cannot compute."""

    def held_weights(self) -> dict[str, Future[HeldWeights]]: ...

    def finish_update(self, version: int) -> None:
        """Declare that all participating servers hold `version`. From now on, new tokens are attributed to it."""


class LogitsTerm(Protocol):
    """A loss term that needs full logits, such as `ops.TeacherTargets`."""

    def of(
        self, rows: TensorDict, device: torch.device
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor], Tensor]]:
        """Return a function that computes the loss term of one microbatch, for a model on `device`.

        The rows are on the host. The function gets the logits `[c, V_local]` of a few trained rows, which it must not
        modify, and these rows' indices. It returns the rows' part of the loss, its sums, and its gradient with respect
        to the logits.
        """


@dataclass(frozen=True)
class LogprobLoss:
    """A loss that needs only log-probabilities, so that the engine never forms `[T, V]` logits for it.

    fn(logprobs, entropy, data) -> (loss_sum, sums). logprobs and entropy are `[T]` float32, 0 in untrained rows. data
    is the microbatch's rows. `loss_sum` is a sum over trained rows. `sums` has 0-dim tensors by name, which are added
    over microbatches and ranks.

        def negative_log_likelihood(logprobs, entropy, rows):
            return -logprobs.sum(), {"entropy": entropy.detach().sum()}

        stats = engine.train_batch(batch, LogprobLoss(negative_log_likelihood, by_row=True))
    """

    fn: Callable[[Tensor, Tensor, TensorDict], tuple[Tensor, dict[str, Tensor]]]
    temperature: float = 1.0
    """Temperature that divides the logits, as in the sampler."""
    by_row: bool = False
    """True if `fn` is a sum over independent rows. The engine may then call it with a few trained rows at a time, whose
    data has no `cu_seqlens`, and compute the gradient along with the loss, so that it forms the logits only once."""
    beside: LogitsTerm | None = None
    """Another loss term that is added to this loss."""


@dataclass(frozen=True)
class ValueLoss:
    """The loss of an engine with a value head.

    fn(values, data) -> (loss_sum, sums). values are `[T]` float32: row t is the value of the state in which `labels[t]`
    is chosen, or 0 in rows that are not trained. The rest is as in LogprobLoss.

        def squared_error(values, rows):
            return (values - rows["returns"]).square().masked_fill(rows["labels"] < 0, 0.0).sum(), {}

        stats = critic_engine.train_batch(batch, ValueLoss(squared_error))
    """

    fn: Callable[[Tensor, TensorDict], tuple[Tensor, dict[str, Tensor]]]


class TrainEngine(abc.ABC):
    """One model with its parallel layout and its optimizer.

    Collective: every rank calls every method, with its data-parallel share of the data.

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
        """Take one optimizer step on `data`.

        `loss_fn(logits, rows)` returns a mean over rows. Its weight is `loss_weight_fn(rows)`, an integer count of rows
        on the host; by default, the trained rows are counted. The gradient is that of the weighted mean over all
        microbatches and ranks. A `LogprobLoss`, or the `ValueLoss` that an engine with a value head takes, returns sums
        instead.

        If the loss or the gradient norm is not finite on any rank, nothing changes, and `applied` is False.
        """

    @abc.abstractmethod
    def eval_batch(
        self,
        data: TrajectoryBatch | TensorDict,
        loss_fn: LossFn | LogprobLoss | ValueLoss,
        loss_weight_fn: LossWeightFn | None = None,
    ) -> StepStats:
        """Return the statistics that `train_batch` would return, without computing a gradient or taking a step."""

    @abc.abstractmethod
    def forward(
        self,
        data: TrajectoryBatch | TensorDict,
        post_hook: Callable[[Tensor, TensorDict], Tensor] | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> Tensor:
        """Return the log-probability of each trained token, `[N]` float32.

        An engine with a value head returns the value of each trained token's state instead. post_hook(logits, rows):
        returns `[T]` values, one per row, which replace the log-probabilities. entropy: return instead the entropy, in
        nats, of the distribution from which each token was sampled.
        """

    @abc.abstractmethod
    def step_lr_scheduler(self) -> None:
        """Advance the learning-rate schedule by one update. Does nothing after a skipped update."""

    @abc.abstractmethod
    def get_version(self) -> int:
        """Return the version under which the policy is published. `train_batch` increases it if the weights change.

        A loop that publishes only after several updates sets the version itself, so that it counts publications.
        """

    @abc.abstractmethod
    def set_version(self, version: int) -> None: ...

    @abc.abstractmethod
    def save(self, path: str | Path, *, with_optimizer: bool = False) -> None:
        """Write a HF safetensors folder or, if `with_optimizer`, a checkpoint from which training can resume."""

    @abc.abstractmethod
    def load(self, path: str | Path, *, with_optimizer: bool = False) -> None: ...

    @abc.abstractmethod
    def update_weights(self, receiver: WeightReceiver | None, version: int) -> None:
        """Publish the weights to the rollout servers. Global rank 0 passes the receiver, other ranks None.

        Servers that fail are dropped. Raises NoServerLeft on global rank 0 if none is left.
        """

    @abc.abstractmethod
    def hf_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the full HF tensors, which are gathered one by one.

        All ranks iterate, but only global rank 0 gets the tensors.
        """


async def together(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Await all awaitables concurrently, and return their results in order.

    If one fails, cancel the others and raise its error. asyncio.gather would let the others continue. TaskGroup before
    Python 3.13 leaves the calling task marked as cancelled.
    """
    failures: list[BaseException] = []
    settled = asyncio.get_running_loop().create_future()  # asyncio.wait would look at all tasks whenever one is done
    left = 0

    def note(task: asyncio.Future[T]) -> None:
        nonlocal left
        left -= 1
        if task.cancelled():  # counts as a failure
            failures.append(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            failures.append(error)
        if not settled.done() and (failures or not left):
            settled.set_result(None)

    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    left = len(tasks)
    for task in tasks:
        task.add_done_callback(note)
    try:
        if tasks:
            await settled
        if failures:
            raise failures[0]  # the first in time, not in order: later ones may be its consequences
        return [task.result() for task in tasks]
    finally:
        under_way = [task for task in tasks if not task.done()]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)  # no task outlives this call
