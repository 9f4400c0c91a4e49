"""Core data types: requests, replies, trajectories and batches. Nothing here uses a network or a GPU.

Entry t of every per-token tensor of a trajectory belongs to token t. Only `batch/packing.py` shifts these tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from megatron_rl import routes as route_columns
from megatron_rl import support as supports
from megatron_rl.config import GenerationConfig

if TYPE_CHECKING:  # slower to import than torch itself, and not needed by the rollout process
    from tensordict import TensorDict

TOKEN_KEYS = {"input_ids": torch.int32, "loss_mask": torch.bool, "logprobs": torch.float32, "versions": torch.int32}
"""Per-token tensors that every trajectory has, with their dtypes."""
WIDE_COLUMNS = (route_columns.COLUMN, supports.COLUMN, supports.ADJUSTMENT)
"""Names of the per-token columns that have several numbers per token."""


@dataclass(kw_only=True)
class LLMRequest:
    """Request for one reply: a prompt and its sampling parameters.

    `rid` names the episode. Requests with the same rid go to one server, to reuse its prefix cache. For example:

        request = LLMRequest(rid="episode-7", input_ids=tokenizer("2 + 2 =").input_ids)
        reply = await engine.agenerate(request)  # an LLMResponse
    """

    rid: str
    input_ids: list[int]
    gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    metadata: dict[str, Any] = field(default_factory=dict)
    begun: LLMResponse | None = None
    """Partial reply to continue. A streaming engine appends new tokens to it, so that a cancelled call loses none."""
    grammar: dict[str, str] | None = None
    """Constraint on the reply: {key: value} with one of SGLang's keys `json_schema`, `regex`, `ebnf` and
    `structural_tag`. Tokens are sampled only from the allowed ones, so the reply may be trained only if it has a
    `support`."""
    changed_size: int = 0
    """Maximum number of tokens whose logits penalties and biases change, if the reply is trained over the whole
    vocabulary. The reply then has an `adjustment`."""
    on_tokens: Callable[[list[int]], None] | None = field(default=None, repr=False, compare=False)
    """Called by a streaming engine, on its event loop, whenever tokens arrive. It gets all tokens of the reply so
    far."""

    def __post_init__(self) -> None:
        self.input_ids = token_list(self.input_ids)


def token_list(ids: Any) -> list[int]:
    """Convert a tokenizer's output for one prompt to a list of token ids. Raises ValueError.

    ids: a list, a tensor, a mapping with `input_ids`, or a batch of one.
    """
    found = ids["input_ids"] if isinstance(ids, Mapping) and "input_ids" in ids else ids
    found = found.tolist() if isinstance(found, Tensor | np.ndarray) else found
    if isinstance(found, list | tuple) and len(found) == 1 and isinstance(found[0], list | tuple | Tensor | np.ndarray):
        return token_list(found[0])
    kinds = set(map(type, found)) if isinstance(found, list | tuple) else None
    if kinds is None or not all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
        entries = "" if kinds is None else f" of {', '.join(sorted(kind.__name__ for kind in kinds))}"
        rule = "must be the token ids of one prompt, a list of int"
        way_out = "a tokenizer makes them with tokenize=True, in the entry 'input_ids' of what it returns"
        raise ValueError(f"LLMRequest.input_ids is a {type(ids).__name__}{entries}: {rule}; {way_out}.")
    # The usual case, a list of int, is returned without a copy: prompts may be long and requests many.
    return found if isinstance(found, list) and kinds <= {int} else [int(token) for token in found]


@dataclass(frozen=True)
class Runs:
    """Run-length encoded `[N]` integers, such as policy versions: 8 bytes per run instead of 4 per token.

    values: `[R]` int32. lengths: `[R]` int32, at least 1.

        runs = Runs.of(torch.tensor([3, 3, 3, 4]))  # values [3, 4], lengths [3, 1]
        runs.each()  # tensor([3, 3, 3, 4])
    """

    values: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, each: Tensor) -> Runs:
        """Encode `[N]` numbers. Raises ValueError if int32 cannot represent them exactly."""
        whole = each.to(torch.int32)
        if whole.dtype != each.dtype and bool((whole != each).any()):
            raise ValueError(f"versions hold {each[whole != each][0].item()}: must be whole numbers, torch.int32.")
        values, lengths = torch.unique_consecutive(whole, return_counts=True)
        return cls(values, lengths.to(torch.int32))

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[int, int]]) -> Runs:
        """Build the runs from (value, length) pairs."""
        columns = np.array([value for value, _ in pairs], np.int32), np.array([length for _, length in pairs], np.int32)
        return cls(*map(torch.from_numpy, columns))

    @classmethod
    def cat(cls, parts: Sequence[Runs]) -> Runs:
        return cls(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def __len__(self) -> int:
        return sum(self.lengths.tolist())

    def each(self) -> Tensor:
        """Decode to `[N]` int32."""
        return torch.repeat_interleave(self.values, self.lengths)

    def at(self, places: Tensor) -> Tensor:
        """Return the values at the positions `places` (`[n]` int64) of the decoded tensor, as `[n]` int32."""
        return self.values[torch.searchsorted(self.lengths.cumsum(0), places, right=True)]


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """Tokens that a server generated, stored in about 8 bytes each. They never change.

    ids: `[n]` int32. logprobs: `[n]` float32, at the sampling temperature. They are over the tokens that top-k, top-p
    and min-p kept if the server reports these, otherwise over the whole vocabulary. versions: policy version that
    sampled each token.
    """

    ids: Tensor
    logprobs: Tensor
    versions: Runs

    @classmethod
    def of(cls, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> SampledTokens:
        columns = torch.tensor(ids, dtype=torch.int32), torch.tensor(logprobs, dtype=torch.float32)
        return cls(*columns, Runs.of(torch.tensor(versions, dtype=torch.int32)))

    @classmethod
    def cat(cls, parts: Sequence[SampledTokens]) -> SampledTokens:
        ids, logprobs = torch.cat([part.ids for part in parts]), torch.cat([part.logprobs for part in parts])
        return cls(ids, logprobs, Runs.cat([part.versions for part in parts]))

    def __post_init__(self) -> None:
        tokens, logprobs, versions = len(self.ids), len(self.logprobs), len(self.versions)
        if not tokens == logprobs == versions:
            found = f"{tokens} tokens, {logprobs} log-probabilities, {versions} versions"
            raise ValueError(f"a reply has {found}: it needs one of each for every token.")

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampledTokens):
            return NotImplemented
        mine, theirs = ((it.ids, it.logprobs, it.versions.each()) for it in (self, other))
        return all(map(torch.equal, mine, theirs))

    __hash__ = None  # type: ignore[assignment]


NO_TOKENS = SampledTokens.of([], [], [])


@dataclass(kw_only=True, init=False, repr=False)
class LLMResponse:
    """One reply. `sampled` holds its tokens, including the end-of-sequence token.

        reply = await engine.agenerate(request)
        is_cut_off = reply.stop_reason == "length"
        oldest = min(reply.output_versions)  # several versions if a publication happened during the reply

    output_tokens, output_logprobs and output_versions are lists that are rebuilt at each access, so read them once. A
    custom engine may pass these lists to the constructor instead of `sampled`.
    """

    input_tokens: list[int]
    sampled: SampledTokens
    stop_reason: str
    """`stop`, `length`, or `abort` for an incomplete reply, for example because the client gave up resuming it."""
    text: str = ""
    """The decoded reply. Servers decode it in parts, so a character whose tokens are in two parts is garbled."""
    latency_s: float = 0.0
    interruptions: int = 0
    routes: Tensor | None = None
    """`[input_len + output_len - 1, layers, slots]`: the experts to which each token was routed, in the format of
    megatron_rl/routes.py. The last token has none, because the model has not read it. None if algo.routing_replay is
    off."""
    support: Tensor | None = None
    """`[output_len, W]` int32: the tokens from which each token was sampled, in the format of megatron_rl/support.py.
    `sampled.logprobs` are over these tokens. None if generation.top_k is -1."""
    adjustment: Tensor | None = None
    """`[output_len, W, P]` float32: how penalties and biases changed the logits of these tokens, in the format of
    megatron_rl/support.py. None if the request has no such option."""

    def __init__(
        self,
        *,
        input_tokens: list[int],
        output_tokens: Sequence[int] | None = None,
        output_logprobs: Sequence[float] | None = None,
        output_versions: Sequence[int] | None = None,
        stop_reason: str,
        text: str = "",
        latency_s: float = 0.0,
        interruptions: int = 0,
        sampled: SampledTokens | None = None,
        routes: Tensor | None = None,
        support: Tensor | None = None,
        adjustment: Tensor | None = None,
    ) -> None:
        self.input_tokens, self.stop_reason, self.text = input_tokens, stop_reason, text
        self.routes, self.support, self.adjustment = routes, support, adjustment
        self.latency_s, self.interruptions = latency_s, interruptions
        self.sampled = NO_TOKENS if sampled is None else sampled
        if not (output_tokens is None and output_logprobs is None and output_versions is None):
            self.sampled = SampledTokens.of(
                self.output_tokens if output_tokens is None else output_tokens,
                self.output_logprobs if output_logprobs is None else output_logprobs,
                self.output_versions if output_versions is None else output_versions,
            )

    @classmethod
    def nothing(cls, input_tokens: list[int]) -> LLMResponse:
        """Build a reply that has no tokens yet."""
        return cls(input_tokens=list(input_tokens), stop_reason="abort")

    def __repr__(self) -> str:
        return f"LLMResponse({self.input_len} tokens -> {self.output_len}, {self.stop_reason}, {self.text[:80]!r})"

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.sampled)

    @property
    def output_tokens(self) -> list[int]:
        return list(self.sampled.ids.tolist())

    @property
    def output_logprobs(self) -> list[float]:
        """Log p of each output token at the sampling temperature.

        It is over the token's `support` if the reply has one.
        """
        return list(self.sampled.logprobs.tolist())

    @property
    def output_versions(self) -> list[int]:
        """Policy version that sampled each output token."""
        return list(self.sampled.versions.each().tolist())


PART = "part/"
"""Name prefix of columns that hold one part of the reward."""
TURN_REWARDS = "turn_rewards"
"""Name of the per-token column that has each turn's reward on the last token of the turn's reply, and 0 elsewhere."""
REUSED = "is_reused"
"""Name of the per-trajectory column that is 1 for groups that an earlier step has trained, and 0 for fresh ones."""


class Reward(float):
    """A reward that is a weighted sum of named parts, and also stores these parts.

    Arithmetic on it returns plain floats. A workflow creates it from a reward function's dict of parts, or from several
    functions of rollout.recipe:

        Trajectory.from_reply(reply, Reward(1.0, {"right": 1.0, "tagged": 0.0}))  # sequence["part/right"] is 1.0
    """

    def __new__(cls, value: float, parts: Mapping[str, float] | None = None) -> Self:
        reward = super().__new__(cls, value)
        reward.parts = dict(parts or {})
        return reward

    parts: dict[str, float]


@dataclass(kw_only=True)
class Trajectory:
    """One finished sequence. Per-token fields are 1-D and equally long; entry t belongs to token t.

    reply = await engine.agenerate(request)
    Trajectory.from_reply(reply, reward=1.0)  # one turn: prompt tokens are not trained, the reply's are
    """

    input_ids: Tensor
    """int32 token ids. A batch converts this and the next three tensors to the dtypes that are stated here."""
    loss_mask: Tensor
    """bool: True if the token was generated and is trained."""
    logprobs: Tensor
    """float32 behavior log-probabilities; 0 for prompt tokens."""
    versions: Tensor
    """int32: the policy version that sampled each token; -1 for prompt tokens."""
    reward: float
    tokens: dict[str, Tensor] = field(default_factory=dict)
    """Further per-token tensors, such as `turn_rewards`, and `routes`, `support` and `adjustment` as in LLMResponse."""
    sequence: dict[str, float] = field(default_factory=dict)
    """Further numbers for the whole sequence, e.g. `greedy_reward` and the parts of a `Reward`."""
    is_cut_off: bool = False
    """True if the last reply or the dialogue hit a length limit. rollout.cut_off decides whether to train on it."""
    split: str = ""
    """Only for an agent's dialogue: the reason why it is a new dialogue and no continuation of an earlier one of its
    episode."""

    def __post_init__(self) -> None:
        if isinstance(self.reward, Reward):
            self.sequence = self.sequence | {f"{PART}{name}": value for name, value in self.reward.parts.items()}
            self.reward = float(self.reward)

    @classmethod
    def from_reply(cls, reply: LLMResponse, reward: float, **sequence: float) -> Trajectory:
        """Build the single-turn trajectory of one reply."""
        prompt, sampled = reply.input_len, reply.sampled
        length, runs = prompt + len(sampled), sampled.versions
        # By NumPy, which makes a small array in a quarter of torch's time.
        ids, logprobs = np.empty(length, np.int32), np.zeros(length, np.float32)
        ids[:prompt], ids[prompt:] = reply.input_tokens, sampled.ids.numpy()
        logprobs[prompt:] = sampled.logprobs.numpy()
        versions = np.full(length, -1, np.int32)
        versions[prompt:] = np.repeat(runs.values.numpy(), runs.lengths.numpy())
        return cls(
            input_ids=torch.from_numpy(ids),
            loss_mask=torch.from_numpy(np.arange(length) >= prompt),
            logprobs=torch.from_numpy(logprobs),
            versions=torch.from_numpy(versions),
            reward=reward if isinstance(reward, Reward) else float(reward),
            tokens=route_column(reply.routes, length) | supports.columns(reply.support, reply.adjustment, prompt),
            sequence=sequence,
            is_cut_off=reply.stop_reason == "length",
        )


def route_column(routes: Tensor | None, tokens: int) -> dict[str, Tensor]:
    """Return {"routes": column}, with a row for each of `tokens` tokens; {} if routes is None."""
    return {} if routes is None else {route_columns.COLUMN: route_columns.with_no_routes(routes, tokens)}


def prefix_sums(lengths: Tensor) -> Tensor:
    """Convert the lengths `[B]` of consecutive parts to their int64 offsets `[B + 1]`, from 0 to the sum."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


@dataclass
class TrajectoryBatch:
    """Trajectories of different lengths, stored without padding.

        batch["rewards"]                   # [B], one per trajectory
        batch["input_ids"]                 # [N], the tokens of all trajectories, concatenated
        batch.tokens["input_ids"][batch.cu_seqlens[2] : batch.cu_seqlens[3]]  # the third trajectory's

    tokens: `[N]` tensors over all trajectories' tokens, concatenated (`input_ids` int32, `loss_mask` bool, ...). Only
      `routes` is `[N, layers, slots]`, `support` `[N, W]`, and `adjustment` `[N, W, P]`.
    sequences: `[B]` tensors, one entry per trajectory (`rewards` float32, `group` int64: the prompt's number, ...).
    cu_seqlens: `[B + 1]` int64, prefix sums of the lengths.
    versions: policy version of each token, run-length encoded, -1 for tokens that no policy sampled. May also be given
      as a column of `tokens`. `batch["versions"]` decodes it to `[N]` int32.
    """

    tokens: dict[str, Tensor]
    sequences: dict[str, Tensor]
    cu_seqlens: Tensor
    versions: Runs | None = None

    def __post_init__(self) -> None:
        n, b = int(self.cu_seqlens[-1]), len(self.cu_seqlens) - 1
        for where, columns, size in (("tokens", self.tokens, n), ("sequences", self.sequences, b)):
            for key, value in columns.items():
                if value.shape[: value.dim() if key not in WIDE_COLUMNS else 1] != (size,):
                    raise ValueError(
                        f"{where}[{key!r}] has shape {tuple(value.shape)}: a batch of {b} trajectories with {n} tokens "
                        f"needs ({size},); pad nothing and give one entry per {where[:-1]}."
                    )
        if "versions" in self.tokens:
            self.versions = Runs.of(self.tokens["versions"])
            self.tokens = {key: value for key, value in self.tokens.items() if key != "versions"}
        assert self.versions is None or len(self.versions) == n, f"{len(self.versions)} versions for {n} tokens"

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def __getitem__(self, key: str) -> Tensor:
        if key == "versions" and key not in self.tokens and self.versions is not None:
            return self.versions.each()
        return self.tokens[key] if key in self.tokens else self.sequences[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        """Set a column. A value `[N]` is taken as per-token, a value `[B]` as per-trajectory.

        An existing column keeps its kind.

        Raises ValueError for any other shape, and for a new column if N = B makes it ambiguous.
        """
        n, b = int(self.cu_seqlens[-1]), len(self)
        if key == "versions" and value.shape == (n,):
            self.versions = Runs.of(value)
            return
        fitting = [columns for columns, size in ((self.tokens, n), (self.sequences, b)) if value.shape == (size,)]
        chosen = [columns for columns in fitting if key in columns or key not in self]  # none, one, or both if N = B
        if len(chosen) != 1:
            raise ValueError(
                f"batch[{key!r}] has shape {tuple(value.shape)}: a batch of {b} trajectories with {n} tokens takes "
                f"({n},) for tokens or ({b},) for sequences; if both are the same, set batch.tokens[{key!r}] or "
                f"batch.sequences[{key!r}]."
            )
        chosen[0][key] = value

    def __contains__(self, key: str) -> bool:
        return key in self.tokens or key in self.sequences or (key == "versions" and self.versions is not None)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each trajectory, `[B]` int64."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def sequence_ids(self) -> Tensor:
        """`[N]` int64: index of the trajectory that each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.cu_seqlens.diff())

    @property
    def samples(self) -> Tensor:
        """`[B]` int64: number of the sample that each trajectory belongs to, from 0 without gaps.

        Trajectories of a group that have the same value in the column `sample`, such as an agent's dialogues, are one
        sample.
        """
        if "sample" not in self.sequences:
            return torch.arange(len(self))
        # Workflows number samples only within their group. float64 holds both columns exactly, up to 2^53.
        named = torch.stack([self.sequences["group"].double(), self.sequences["sample"].double()], dim=1)  # [B, 2]
        numbers: Tensor = torch.unique(named, dim=0, return_inverse=True)[1]
        return numbers

    @property
    def is_reused(self) -> Tensor:
        """`[B]` bool: True for trajectories that an earlier step has trained and this step trains again."""
        return self[REUSED] != 0 if REUSED in self else torch.zeros(len(self), dtype=torch.bool)

    def fresh(self) -> TrajectoryBatch:
        """Return the batch without reused trajectories."""
        return self.select((~self.is_reused).nonzero()[:, 0].tolist()) if REUSED in self else self

    def means_of_samples(self, values: Tensor) -> Tensor:
        """Average values `[B]` of trajectories over each sample. The result is `[S]`."""
        if "sample" not in self.sequences:
            return values
        samples = self.samples
        totals = torch.zeros(int(samples.max()) + 1, dtype=torch.float64).index_add_(0, samples, values.double())
        return totals / torch.bincount(samples)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat values `[B]` of trajectories for each of their tokens. The result is `[N]`."""
        return values[self.sequence_ids]

    def sums_of_tokens(self, values: Tensor) -> Tensor:
        """Sum values `[N]` of tokens over each trajectory. The result is `[B]`, in the same dtype."""
        return self.completed(torch.zeros(len(self), dtype=values.dtype).index_add_(0, self.sequence_ids, values))

    # A step's batch has the numbers of all trajectories on every rank, but only the tokens that the rank's replica
    # trains. batch.step_batch.StepBatch overrides these methods for it, which every rank calls in the same order.

    def completed(self, values: Tensor) -> Tensor:
        """Complete `[B]` values by those of other ranks.

        Each rank knows the values of trajectories whose tokens it has.
        """
        return values

    def total(self, counts: Tensor) -> Tensor:
        """Sum integer counts over all replicas, each of which counted its own tokens."""
        return counts

    def own(self) -> TrajectoryBatch:
        """Return only the trajectories whose tokens are on this rank."""
        return self

    def shown(self, indices: list[int]) -> TrajectoryBatch:
        """Return the trajectories with these indices on the main rank.

        Other ranks may get only some of them, or none.
        """
        return self.select(indices)

    def to(self, device: torch.device | str) -> TrajectoryBatch:
        return TrajectoryBatch.from_columns({name: column.to(device) for name, column in self.columns().items()})

    def columns(self) -> dict[str, Tensor]:
        """Return all tensors by name (`tokens.KEY`, `sequences.KEY`, `versions.values`, ...), to write or send them."""
        found = {f"tokens.{key}": column for key, column in self.tokens.items()}
        found |= {f"sequences.{key}": column for key, column in self.sequences.items()}
        if self.versions is not None:
            found |= {"versions.values": self.versions.values, "versions.lengths": self.versions.lengths}
        return found | {"cu_seqlens": self.cu_seqlens}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Tensor]) -> TrajectoryBatch:
        """Build a batch from the result of `columns`."""
        parts: dict[str, dict[str, Tensor]] = {"tokens": {}, "sequences": {}, "versions": {}, "cu_seqlens": {}}
        for name, column in columns.items():
            where, _, key = name.partition(".")
            parts[where][key] = column
        versions = Runs(**parts["versions"]) if parts["versions"] else None
        return cls(parts["tokens"], parts["sequences"], parts["cu_seqlens"][""], versions)

    def select(self, indices: Iterable[int]) -> TrajectoryBatch:
        """Return the trajectories with these indices, in the given order."""
        order = torch.as_tensor(list(indices), dtype=torch.int64)
        lengths = self.cu_seqlens.diff()[order]
        cu_seqlens = prefix_sums(lengths)
        # Offset of each token: its trajectory's start here minus its start in the result.
        moves = torch.repeat_interleave(self.cu_seqlens[:-1][order] - cu_seqlens[:-1], lengths)
        rows = moves + torch.arange(int(cu_seqlens[-1]))  # [N of the result]
        return TrajectoryBatch(
            {k: v[rows] for k, v in self.tokens.items()},
            {k: v[order] for k, v in self.sequences.items()},
            cu_seqlens,
            None if self.versions is None else Runs.of(self.versions.at(rows)),
        )

    def with_one_more_token(self) -> tuple[TrajectoryBatch, Tensor]:
        """Append a token 0 to each sequence, and mark only it as trained.

        Return the batch, and these tokens' rows `[B]`. A model's result for this token is its result for the whole
        sequence. Per-token tensors other than `input_ids` and `loss_mask` are dropped.
        """
        ends = self.cu_seqlens + torch.arange(len(self.cu_seqlens))  # each sequence before has grown by one
        added = torch.zeros(int(ends[-1]), dtype=torch.bool)
        added[ends[1:] - 1] = True
        input_ids = torch.zeros(len(added), dtype=self.tokens["input_ids"].dtype)
        input_ids[~added] = self.tokens["input_ids"]
        tokens = {"input_ids": input_ids, "loss_mask": added}
        return TrajectoryBatch(tokens, self.sequences, ends), ends[1:] - 1

    @staticmethod
    def cat(batches: list[TrajectoryBatch]) -> TrajectoryBatch:
        """Concatenate batches that have the same keys."""
        first = batches[0]
        return TrajectoryBatch(
            {k: torch.cat([b.tokens[k] for b in batches]) for k in first.tokens},
            {k: torch.cat([b.sequences[k] for b in batches]) for k in first.sequences},
            prefix_sums(torch.cat([b.lengths for b in batches])),
            None if first.versions is None else Runs.cat([b.versions for b in batches if b.versions is not None]),
        )

    @classmethod
    def from_trajectories(cls, groups: list[list[Trajectory]]) -> TrajectoryBatch:
        """Join groups, each with all trajectories of one prompt. The column `group` numbers the groups from 0.

        Raises ValueError if there are no trajectories.
        """
        flat = [trajectory for group in groups for trajectory in group]
        if not flat:
            rule = "every episode of the batch was rejected or failed; see the rollout metrics"
            raise ValueError(f"no trajectories: {rule}.")
        tokens = {
            key: torch.cat([getattr(it, key).to(dtype) for it in flat])  # copies only another dtype
            for key, dtype in TOKEN_KEYS.items()
        }
        tokens |= {key: torch.cat([it.tokens[key] for it in flat]) for key in flat[0].tokens}
        numbers = [number for number, group in enumerate(groups) for _ in group]
        sequences = {
            "rewards": torch.tensor([it.reward for it in flat], dtype=torch.float32),
            "group": torch.tensor(numbers, dtype=torch.int64),
        }
        sequences |= {k: torch.tensor([it.sequence[k] for it in flat], dtype=torch.float32) for k in flat[0].sequence}
        return cls(tokens, sequences, prefix_sums(torch.tensor([len(it.input_ids) for it in flat])))

    @classmethod
    def of(cls, data: TrajectoryBatch | TensorDict) -> TrajectoryBatch:
        """Return `data` as a TrajectoryBatch. Padded tensors are converted."""
        return data if isinstance(data, TrajectoryBatch) else cls.from_padded(data)

    @classmethod
    def from_padded(cls, data: Mapping[str, Tensor] | TensorDict) -> TrajectoryBatch:
        """Convert padded tensors `[B, L]` into a ragged batch. They may be padded on either side.

        The mask `attention_mask` `[B, L]` is required. Tensors `[B, L]` become per-token columns, tensors `[B]`
        per-trajectory columns. Missing `logprobs`, `versions` and `group` become 0, -1 and the row number.
        """
        columns: dict[str, Any] = {str(key): value for key, value in data.items()}
        for required in ("input_ids", "attention_mask", "loss_mask"):
            if required not in columns:
                rule = "a padded batch needs it; return it from arun_episode"
                raise ValueError(f"{required!r} is missing from {sorted(columns)}: {rule}.")
        mask = columns["attention_mask"].bool()
        tokens: dict[str, Tensor] = {}
        sequences: dict[str, Tensor] = {}
        for key, value in columns.items():
            if key == "attention_mask":
                continue
            if value.shape == mask.shape or (key in WIDE_COLUMNS and value.shape[:2] == mask.shape):
                # Boolean indexing reads row by row: it drops padding on either side and gives the ragged order.
                tokens[key] = value[mask].to(TOKEN_KEYS.get(key, value.dtype))  # [B, L] -> [N]
            elif value.shape == mask.shape[:1]:
                sequences[key] = value
            else:
                shapes = f"per token {tuple(mask.shape)} or per sequence {tuple(mask.shape[:1])}"
                raise ValueError(
                    f"{key!r} has shape {tuple(value.shape)}: with attention_mask {tuple(mask.shape)} a tensor is "
                    f"{shapes}; reshape it in the workflow."
                )
        ids = tokens["input_ids"]
        tokens.setdefault("logprobs", torch.zeros_like(ids, dtype=torch.float32))
        tokens.setdefault("versions", torch.full_like(ids, -1))
        sequences.setdefault("group", torch.arange(len(mask)))
        return cls(tokens, sequences, prefix_sums(mask.sum(1)))


@dataclass(kw_only=True)
class MicroBatch:
    """One packed forward pass of one data-parallel rank.

    rows: TensorDict without batch dimensions. Row t of its `[T]` tensors describes the prediction made after reading
      token t: `input_ids` (the token read) and `labels` (the next token of the same sequence, or -100 if it is not
      trained), both int64; `loss_mask` and all other `tokens` of the batch, shifted to match `labels`. It also has
      `[B]` tensors per sequence, and `cu_seqlens` `[B + 1]` int32.
    positions: `[T]` int64, each token's index in its sequence (rotary position).
    source: `[T]` int64, the row of the TrajectoryBatch that `labels[t]` comes from (-1 at sequence ends).

    A model computes M rows, fewer than T if sequences share a prefix, or if their last rows are not needed:
    computed: `[M]` int64, for each computed row, the row of `rows` whose token it reads.
    read: `[T]` int64, for each row of `rows`, the computed row that makes its prediction.
    segments: `[S, 4]` int64 in the order of computed rows: first row, number of rows, parent segment (-1: none), total
      rows of all ancestors. A row attends to its own segment up to itself, and to all ancestors.
    routes: `[M, layers, slots]` of the tokens read, or None.
    """

    rows: TensorDict
    positions: Tensor
    source: Tensor
    computed: Tensor
    read: Tensor
    segments: Tensor
    routes: Tensor | None = None

    @property
    def tokens(self) -> int:
        return len(self.positions)


@dataclass(kw_only=True)
class StepStats:
    """Result of one optimizer step, summed over all microbatches and ranks.

    stats = engine.train_batch(batch, LogprobLoss(my_loss))
    if stats.applied:
        print(stats.loss, stats.mean("entropy"))  # both per trained token
    else:
        print(stats.fault)
    """

    loss: float
    """Loss divided by `weight`. This is the value whose gradient is applied."""
    weight: float
    """Sum of the loss weights, usually the number of trained tokens."""
    grad_norm: float
    """Gradient norm before clipping."""
    applied: bool
    """False if loss or gradient were NaN or infinite, and the update was therefore skipped."""
    lr: float
    sums: dict[str, float] = field(default_factory=dict)
    """Sums that the loss function returned. Divide them by `weight` or by one another."""
    fault: str = ""
    """If the update was skipped: what was NaN or infinite, and on which rank."""
    logprobs: Tensor | None = field(default=None, compare=False)
    """`[N]` float32: log p, before the update, of each trained token in this rank's share; 0 for other tokens. Set only
    for a LogprobLoss on MegatronEngine."""

    def mean(self, key: str) -> float:
        return self.sums[key] / max(self.weight, 1.0)


@dataclass(frozen=True, kw_only=True)
class FinetuneSpec:
    """Length of the training, which learning-rate schedules need."""

    total_updates: int
