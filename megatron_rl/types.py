"""The data that travels: requests, replies, trajectories and batches of them. Nothing here talks to a network or a GPU.

Alignment: entry t of every per-token tensor of a trajectory belongs to token t. Only `batch/packing.py` shifts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from megatron_rl import routes as route_columns
from megatron_rl.config import GenerationConfig

if TYPE_CHECKING:  # it takes longer to import than torch itself, and the rollout process needs none
    from tensordict import TensorDict

TOKEN_KEYS = {"input_ids": torch.int32, "loss_mask": torch.bool, "logprobs": torch.float32, "versions": torch.int32}
"""Per-token tensors that every trajectory has, with their dtypes."""


@dataclass(kw_only=True)
class LLMRequest:
    """One prompt for one reply. `rid` names the episode: requests of one rid go to one server, for its prefix cache.

    For example:

        request = LLMRequest(rid="episode-7", input_ids=tokenizer("2 + 2 =").input_ids)
        reply = await engine.agenerate(request)  # an LLMResponse
    """

    rid: str
    input_ids: list[int]
    gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    metadata: dict[str, Any] = field(default_factory=dict)
    begun: LLMResponse | None = None
    """The reply as far as it was generated before, to be continued. An engine that can adds to it as the tokens come,
    so that they are there also where the call is cancelled."""
    grammar: dict[str, str] | None = None
    """One of SGLang's `json_schema`, `regex`, `ebnf` and `structural_tag`, which the reply must obey. Its tokens were
    drawn among those that the grammar allows, by other probabilities than the policy's: do not train them."""
    on_tokens: Callable[[list[int]], None] | None = field(default=None, repr=False, compare=False)
    """Called on the engine's event loop with all tokens of the reply so far, as they come; an engine that cannot tell
    does not call it. They will be the reply's, unless the call fails."""

    def __post_init__(self) -> None:
        self.input_ids = token_list(self.input_ids)


def token_list(ids: Any) -> list[int]:
    """Return the token ids of one prompt in whatever form a tokenizer gave them: a mapping, a tensor, a batch of one.

    ValueError for what is not one prompt's whole numbers.
    """
    found = ids["input_ids"] if isinstance(ids, Mapping) and "input_ids" in ids else ids
    found = found.tolist() if isinstance(found, Tensor | np.ndarray) else found
    if isinstance(found, list | tuple) and len(found) == 1 and isinstance(found[0], list | tuple | Tensor | np.ndarray):
        return token_list(found[0])
    kinds = set(map(type, found)) if isinstance(found, list | tuple) else None
    if kinds is None or not all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
        entries = "" if kinds is None else f" of {', '.join(sorted(kind.__name__ for kind in kinds))}"
        raise ValueError(
            f"LLMRequest.input_ids is a {type(ids).__name__}{entries}: must be the token ids of one prompt, a list of "
            f"int; a tokenizer makes them with tokenize=True, in the entry 'input_ids' of what it returns."
        )
    # A list of int, the usual case, is handed on as it is: prompts may be long, and requests are many.
    return found if isinstance(found, list) and kinds <= {int} else [int(token) for token in found]


@dataclass(frozen=True)
class Runs:
    """`[N]` whole numbers that come in runs, as the policy versions of tokens do: 8 bytes a run instead of 4 a token.

    values: `[R]` int32. lengths: `[R]` int32, how many entries of that value follow on one another, at least one.

    For example:

        runs = Runs.of(torch.tensor([3, 3, 3, 4]))  # values [3, 4], lengths [3, 1]
        runs.each()  # tensor([3, 3, 3, 4])
    """

    values: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, each: Tensor) -> Runs:
        """ValueError for what int32 does not hold."""
        whole = each.to(torch.int32)
        if whole.dtype != each.dtype and bool((whole != each).any()):
            raise ValueError(f"versions hold {each[whole != each][0].item()}: must be whole numbers, torch.int32.")
        values, lengths = torch.unique_consecutive(whole, return_counts=True)
        return cls(values, lengths.to(torch.int32))

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[int, int]]) -> Runs:
        """Build them of (value, length) pairs."""
        values, lengths = [value for value, _ in pairs], [length for _, length in pairs]
        return cls(torch.tensor(values, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32))

    @classmethod
    def cat(cls, parts: Sequence[Runs]) -> Runs:
        return cls(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def each(self) -> Tensor:
        """Return the numbers one by one, `[N]` int32."""
        return torch.repeat_interleave(self.values, self.lengths)

    def at(self, places: Tensor) -> Tensor:
        """Return the numbers at `places` (`[n]` int64), `[n]` int32."""
        return self.values[torch.searchsorted(self.lengths.cumsum(0), places, right=True)]


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """Tokens that a server generated, 8 bytes each, from where its reply is parsed on. Nobody changes them.

    ids: `[n]` int32. logprobs: `[n]` float32, log p under the distribution at the temperature used, before top-p/top-k
    cuts. versions: the policy version that sampled each.
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
        sizes = {"tokens": len(self.ids), "log-probabilities": len(self.logprobs), "versions": len(self.versions)}
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{count} {name}" for name, count in sizes.items())
            raise ValueError(f"a reply has {found}: it needs one of each for every token.")

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampledTokens):
            return NotImplemented
        pairs = [(self.ids, other.ids), (self.logprobs, other.logprobs)]
        return all(torch.equal(a, b) for a, b in [*pairs, (self.versions.each(), other.versions.each())])

    __hash__ = None  # type: ignore[assignment]


@dataclass(kw_only=True, init=False, repr=False)
class LLMResponse:
    """One reply. `sampled` holds its tokens; the end-of-sequence token is included.

    For example:

        reply = await engine.agenerate(request)
        is_cut_off = reply.stop_reason == "length"
        oldest = min(reply.output_versions)  # a reply that went on through a publication has several

    output_tokens, output_logprobs and output_versions are lists of `output_len` entries, made anew at each use: take
    them once. An engine of your own may give lists in place of `sampled`.
    """

    input_tokens: list[int]
    sampled: SampledTokens
    stop_reason: str
    """`stop`, `length`, or `abort`: it is not whole, as where the client gave up resuming."""
    text: str = ""
    """As the servers have decoded each part of it: a character of several tokens is broken where two parts meet."""
    latency_s: float = 0.0
    interruptions: int = 0
    routes: Tensor | None = None
    """`[input_len + output_len - 1, layers, slots]`: the experts of each row, as megatron_rl/routes.py has them; None
    without algo.routing_replay. The last token was read by nobody."""

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
    ) -> None:
        self.input_tokens, self.stop_reason, self.text, self.routes = input_tokens, stop_reason, text, routes
        self.latency_s, self.interruptions = latency_s, interruptions
        self.sampled = SampledTokens.of([], [], []) if sampled is None else sampled
        if not (output_tokens is None and output_logprobs is None and output_versions is None):
            self.sampled = SampledTokens.of(
                self.output_tokens if output_tokens is None else output_tokens,
                self.output_logprobs if output_logprobs is None else output_logprobs,
                self.output_versions if output_versions is None else output_versions,
            )

    @classmethod
    def nothing(cls, input_tokens: list[int]) -> LLMResponse:
        """Build the reply of which there is no token yet."""
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
        """Log p of each output token under the distribution at the temperature used, before top-p/top-k cuts."""
        return list(self.sampled.logprobs.tolist())

    @property
    def output_versions(self) -> list[int]:
        """Policy version that sampled each output token."""
        return list(self.sampled.versions.each().tolist())


PART = "part/"
"""Begins the name of a column with a part of the reward."""
TURN_REWARDS = "turn_rewards"
"""The column of tokens with the rewards of a dialogue where they arose: each on the last token of the reply that earned
it, 0 elsewhere. A trajectory's add up to its reward."""
REUSED = "is_reused"
"""The column of a batch with groups that an earlier step has trained: 1 for theirs, 0 for fresh ones."""


class Reward(float):
    """A reward that knows the parts, by name, whose weighted sum it is. What is computed from it is a plain number.

    A reward function of a run gives its parts in a dict, or is one of several of rollout.recipe. Here, a workflow's:

        Trajectory.from_reply(reply, Reward(1.0, {"right": 1.0, "tagged": 0.0}))  # sequence["part/right"] is 1.0
    """

    def __new__(cls, value: float, parts: Mapping[str, float] | None = None) -> Self:
        reward = super().__new__(cls, value)
        reward.parts = dict(parts or {})
        return reward

    parts: dict[str, float]


@dataclass(kw_only=True)
class Trajectory:
    """One finished sequence. Per-token fields are 1-D of one length; entry t belongs to token t.

    For example:

        reply = await engine.agenerate(request)
        Trajectory.from_reply(reply, reward=1.0)  # one turn: prompt tokens are not trained, the reply's are
    """

    input_ids: Tensor
    """int32; ids of another integer type are converted where groups are joined, here as below."""
    loss_mask: Tensor
    """bool: True where the token was generated and is trained."""
    logprobs: Tensor
    """float32 behaviour log-probabilities; 0 for prompt tokens."""
    versions: Tensor
    """int32 policy version that sampled the token; -1 for prompt tokens."""
    reward: float
    tokens: dict[str, Tensor] = field(default_factory=dict)
    """Further per-token tensors, such as `turn_rewards` and `routes`, `[n, layers, slots]` (megatron_rl/routes.py)."""
    sequence: dict[str, float] = field(default_factory=dict)
    """Further numbers of the whole sequence, e.g. `greedy_reward`; the parts of a `Reward` come to them."""
    is_cut_off: bool = False
    """It ended for want of room, its last reply or the dialogue: rollout.cut_off says whether it is trained."""
    split: str = ""
    """Why it does not continue another trajectory of its episode, though its prompt holds that one's replies."""

    def __post_init__(self) -> None:
        if isinstance(self.reward, Reward):
            self.sequence = self.sequence | {f"{PART}{name}": value for name, value in self.reward.parts.items()}
            self.reward = float(self.reward)

    @classmethod
    def from_reply(cls, reply: LLMResponse, reward: float, **sequence: float) -> Trajectory:
        """Build the single-turn trajectory of one reply."""
        prompt, sampled = reply.input_len, reply.sampled
        return cls(
            input_ids=torch.cat([torch.tensor(reply.input_tokens, dtype=torch.int32), sampled.ids]),
            loss_mask=torch.arange(prompt + len(sampled)) >= prompt,
            logprobs=torch.cat([torch.zeros(prompt), sampled.logprobs]),
            versions=torch.cat([torch.full((prompt,), -1, dtype=torch.int32), sampled.versions.each()]),
            reward=reward if isinstance(reward, Reward) else float(reward),
            tokens=route_column(reply.routes, prompt + len(sampled)),
            sequence=sequence,
            is_cut_off=reply.stop_reason == "length",
        )


def route_column(routes: Tensor | None, tokens: int) -> dict[str, Tensor]:
    """Return the column of a trajectory's routes, of rows without one at its end; none where there are no routes."""
    return {} if routes is None else {route_columns.COLUMN: route_columns.with_no_routes(routes, tokens)}


def prefix_sums(lengths: Tensor) -> Tensor:
    """`[B]` lengths -> `[B + 1]` int64: the bounds of parts that lie one after the other, from 0 on."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


@dataclass
class TrajectoryBatch:
    """Ragged, unpadded trajectories.

        batch["rewards"]                   # [B], one per trajectory
        batch["input_ids"]                 # [N], the tokens of all trajectories, one after the other
        batch.tokens["input_ids"][batch.cu_seqlens[2] : batch.cu_seqlens[3]]  # those of the third

    tokens: `[N]` tensors, the trajectories' tokens one after the other (`input_ids` int32, `loss_mask` bool, ...);
      `routes` alone is `[N, layers, slots]`.
    sequences: `[B]` tensors, one entry per trajectory (`rewards` float32, `group` int64: the prompt's number, ...).
    cu_seqlens: `[B + 1]` int64, prefix sums of the lengths.
    versions: the policy version of each token in runs, -1 where none sampled it; `batch["versions"]` is `[N]` int32. A
      column `versions` among the tokens becomes that: ids, mask, log-probabilities and versions are 9 bytes a token.
    """

    tokens: dict[str, Tensor]
    sequences: dict[str, Tensor]
    cu_seqlens: Tensor
    versions: Runs | None = None

    def __post_init__(self) -> None:
        n, b = int(self.cu_seqlens[-1]), len(self.cu_seqlens) - 1
        for where, columns, size in (("tokens", self.tokens, n), ("sequences", self.sequences, b)):
            for key, value in columns.items():
                if value.shape[: value.dim() if key != route_columns.COLUMN else 1] != (size,):
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
        """Set a column: `[N]` is one per token, `[B]` one per trajectory. One that is there stays what it is of.

        ValueError for another shape, and where N = B leaves open which is meant.
        """
        n, b = int(self.cu_seqlens[-1]), len(self)
        fitting = [columns for columns, size in ((self.tokens, n), (self.sequences, b)) if value.shape == (size,)]
        chosen = [columns for columns in fitting if key in columns or key not in self]  # none, one, or both if N = B
        if key == "versions" and value.shape == (n,):
            self.versions = Runs.of(value)
            return
        if len(chosen) != 1:
            raise ValueError(
                f"batch[{key!r}] has shape {tuple(value.shape)}: a batch of {b} trajectories with {n} tokens takes "
                f"({n},) for tokens or ({b},) for sequences; where that is the same, set batch.tokens[{key!r}] or "
                f"batch.sequences[{key!r}]."
            )
        chosen[0][key] = value

    def __contains__(self, key: str) -> bool:
        return key in self.tokens or key in self.sequences or (key == "versions" and self.versions is not None)

    @property
    def lengths(self) -> Tensor:
        """`[B]` int64 lengths in tokens."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def sequence_ids(self) -> Tensor:
        """`[N]` int64: the trajectory that each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.cu_seqlens.diff())

    @property
    def samples(self) -> Tensor:
        """`[B]` int64: each trajectory's sample, numbered from 0 without gaps.

        Trajectories of one group with the same `sample`, such as the dialogues of one agent, are one. Without that
        column each is a sample of its own.
        """
        if "sample" not in self.sequences:
            return torch.arange(len(self))
        # Workflows number samples within their group only. float64 holds both columns exactly, up to 2^53.
        named = torch.stack([self.sequences["group"].double(), self.sequences["sample"].double()], dim=1)  # [B, 2]
        numbers: Tensor = torch.unique(named, dim=0, return_inverse=True)[1]
        return numbers

    @property
    def is_reused(self) -> Tensor:
        """`[B]` bool: the trajectories that an earlier step has trained, and this one trains again."""
        return self[REUSED] != 0 if REUSED in self else torch.zeros(len(self), dtype=torch.bool)

    def fresh(self) -> TrajectoryBatch:
        """Return the batch without what is reused."""
        return self.select((~self.is_reused).nonzero()[:, 0].tolist()) if REUSED in self else self

    def means_of_samples(self, values: Tensor) -> Tensor:
        """`[B]` numbers of trajectories -> `[S]`, each sample's mean."""
        if "sample" not in self.sequences:
            return values
        samples = self.samples
        totals = torch.zeros(int(samples.max()) + 1, dtype=torch.float64).index_add_(0, samples, values.double())
        return totals / torch.bincount(samples)

    def spread(self, values: Tensor) -> Tensor:
        """`[B]` numbers of trajectories -> `[N]`, for each of their tokens."""
        return values[self.sequence_ids]

    def sums_of_tokens(self, values: Tensor) -> Tensor:
        """`[N]` numbers of tokens -> `[B]`, each trajectory's sum, of the same dtype."""
        return self.completed(torch.zeros(len(self), dtype=values.dtype).index_add_(0, self.sequence_ids, values))

    # A step's batch has the numbers of all trajectories on every rank, and the tokens of those alone that the rank's
    # replica trains: batch.step_batch.StepBatch overrides what follows. Every rank calls these, in the same order.

    def completed(self, values: Tensor) -> Tensor:
        """`[B]` numbers that are right for the trajectories whose tokens are here -> those right for each of them."""
        return values

    def total(self, counts: Tensor) -> Tensor:
        """Add whole numbers counted over the tokens here to those of the others."""
        return counts

    def own(self) -> TrajectoryBatch:
        """Return the trajectories whose tokens are here, as a batch that has no others."""
        return self

    def shown(self, indices: list[int]) -> TrajectoryBatch:
        """Return the trajectories of `indices` on the main rank, whoever has their tokens; others may get none."""
        return self.select(indices)

    def to(self, device: torch.device | str) -> TrajectoryBatch:
        return TrajectoryBatch.from_columns({name: column.to(device) for name, column in self.columns().items()})

    def columns(self) -> dict[str, Tensor]:
        """Return all tensors by name, in the form in which they are written and sent; from_columns takes them.

        The names are `tokens.KEY`, `sequences.KEY`, `versions.values` and `versions.lengths` (`[R]`), and `cu_seqlens`.
        """
        found = {f"tokens.{key}": column for key, column in self.tokens.items()}
        found |= {f"sequences.{key}": column for key, column in self.sequences.items()}
        if self.versions is not None:
            found |= {"versions.values": self.versions.values, "versions.lengths": self.versions.lengths}
        return found | {"cu_seqlens": self.cu_seqlens}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Tensor]) -> TrajectoryBatch:
        """Build the batch that gave these `columns`."""
        parts: dict[str, dict[str, Tensor]] = {"tokens": {}, "sequences": {}, "versions": {}, "cu_seqlens": {}}
        for name, column in columns.items():
            where, _, key = name.partition(".")
            parts[where][key] = column
        versions = Runs(**parts["versions"]) if parts["versions"] else None
        return cls(parts["tokens"], parts["sequences"], parts["cu_seqlens"][""], versions)

    def select(self, indices: Iterable[int]) -> TrajectoryBatch:
        """Return the trajectories of `indices`, in that order."""
        order = torch.as_tensor(list(indices), dtype=torch.int64)
        lengths = self.cu_seqlens.diff()[order]
        cu_seqlens = prefix_sums(lengths)
        # By how much each token is moved: the start of its trajectory here, less its start in the result.
        moves = torch.repeat_interleave(self.cu_seqlens[:-1][order] - cu_seqlens[:-1], lengths)
        rows = moves + torch.arange(int(cu_seqlens[-1]))  # [N of the result]
        return TrajectoryBatch(
            {k: v[rows] for k, v in self.tokens.items()},
            {k: v[order] for k, v in self.sequences.items()},
            cu_seqlens,
            None if self.versions is None else Runs.of(self.versions.at(rows)),
        )

    def with_one_more_token(self) -> tuple[TrajectoryBatch, Tensor]:
        """Return the sequences, each followed by a trained token 0, and those tokens' rows `[B]`.

        A model's result for that token is what it makes of the whole sequence. Other per-token tensors are left out.
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
        """Join batches that have the same keys."""
        first = batches[0]
        return TrajectoryBatch(
            {k: torch.cat([b.tokens[k] for b in batches]) for k in first.tokens},
            {k: torch.cat([b.sequences[k] for b in batches]) for k in first.sequences},
            prefix_sums(torch.cat([b.lengths for b in batches])),
            None if first.versions is None else Runs.cat([b.versions for b in batches if b.versions is not None]),
        )

    @classmethod
    def from_trajectories(cls, groups: list[list[Trajectory]]) -> TrajectoryBatch:
        """Join the groups (all trajectories of one prompt each); `group` numbers them from 0 in the given order."""
        flat = [(number, t) for number, group in enumerate(groups) for t in group]
        if not flat:
            raise ValueError(
                "no trajectories: every episode of the batch was rejected or failed; see the rollout metrics."
            )
        first = flat[0][1]
        tokens = {k: torch.cat([getattr(t, k).to(dtype) for _, t in flat]) for k, dtype in TOKEN_KEYS.items()}
        tokens |= {k: torch.cat([t.tokens[k] for _, t in flat]) for k in first.tokens}
        sequences = {
            "rewards": torch.tensor([t.reward for _, t in flat], dtype=torch.float32),
            "group": torch.tensor([number for number, _ in flat], dtype=torch.int64),
        }
        sequences |= {k: torch.tensor([t.sequence[k] for _, t in flat], dtype=torch.float32) for k in first.sequence}
        return cls(tokens, sequences, prefix_sums(torch.tensor([len(t.input_ids) for _, t in flat])))

    @classmethod
    def of(cls, data: TrajectoryBatch | TensorDict) -> TrajectoryBatch:
        """Return ragged trajectories, converted from padded tensors where that is what the caller has."""
        return data if isinstance(data, TrajectoryBatch) else cls.from_padded(data)

    @classmethod
    def from_padded(cls, data: Mapping[str, Tensor] | TensorDict) -> TrajectoryBatch:
        """Convert `[B, L]` padded tensors (right or left) with an `attention_mask` `[B, L]` into a ragged batch.

        `[B, L]` keys become per-token, `[B]` keys per-sequence tensors. `loss_mask` becomes bool. Missing `logprobs`,
        `versions` and `group` are filled with 0, -1 and the row number.
        """
        columns: dict[str, Any] = {str(key): value for key, value in data.items()}
        for required in ("input_ids", "attention_mask", "loss_mask"):
            if required not in columns:
                raise ValueError(
                    f"{required!r} is missing from {sorted(columns)}: a padded batch needs it; return it from "
                    f"arun_episode."
                )
        mask = columns["attention_mask"].bool()
        tokens: dict[str, Tensor] = {}
        sequences: dict[str, Tensor] = {}
        for key, value in columns.items():
            if key == "attention_mask":
                continue
            if value.shape == mask.shape or (key == route_columns.COLUMN and value.shape[:2] == mask.shape):
                # A mask reads row by row, so that padding on either side falls away and the order is the ragged one.
                tokens[key] = value[mask].to(TOKEN_KEYS.get(key, value.dtype))  # [B, L] -> [N]
            elif value.shape == mask.shape[:1]:
                sequences[key] = value
            else:
                raise ValueError(
                    f"{key!r} has shape {tuple(value.shape)}: with attention_mask {tuple(mask.shape)} a tensor is "
                    f"per token {tuple(mask.shape)} or per sequence {tuple(mask.shape[:1])}; reshape it in the "
                    f"workflow."
                )
        tokens.setdefault("logprobs", torch.zeros(len(tokens["input_ids"]), dtype=torch.float32))
        tokens.setdefault("versions", torch.full((len(tokens["input_ids"]),), -1, dtype=torch.int32))
        sequences.setdefault("group", torch.arange(len(mask)))
        return cls(tokens, sequences, prefix_sums(mask.sum(1)))


@dataclass(kw_only=True)
class MicroBatch:
    """One packed forward pass of one data-parallel rank.

    rows: TensorDict without batch dimensions. `[T]` tensors where row t describes the prediction made after reading
      token t: `input_ids` (the token read), `labels` (the next token of the same sequence; -100 where it is not
      trained), both int64, `loss_mask` and every other of the batch's `tokens`, shifted to `labels`. `[B]` tensors per
      sequence, and `cu_seqlens` `[B + 1]` int32.
    positions: `[T]` int64, each token's index in its sequence (rotary position).
    routes: `[M, layers, slots]`, of the rows that a model computes; None where there are none. They are no label's and
      not shifted.
    source: `[T]` int64, the row of the TrajectoryBatch that `labels[t]` is (-1 at sequence ends).

    A model computes M rows, fewer than T where sequences share a prompt or nobody needs a sequence's last row:
    computed: `[M]` int64, the row above whose token it reads.
    read: `[T]` int64, the computed row that each row above takes its prediction from.
    segments: `[S, 4]` int64 in the order of computed rows: first row, rows, the number of the segment that it goes on
      from (-1: none), and the rows before it, of that segment and those which that one goes on from. A row attends to
      its segment up to itself, and to all of those.
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
    """The result of one optimizer step, summed over all microbatches and ranks.

    For example:

        stats = engine.train_batch(batch, LogprobLoss(my_loss))
        if stats.applied:
            print(stats.loss, stats.mean("entropy"))  # both for a trained token
        else:
            print(stats.fault)
    """

    loss: float
    """Loss averaged over the weight, the number whose gradient was applied."""
    weight: float
    """Sum of the loss weights, usually trained tokens."""
    grad_norm: float
    """Before clipping."""
    applied: bool
    """False where loss or gradient were not finite: the update was skipped, and the model is as it was."""
    lr: float
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of the loss function's statistics; divide by `weight` or by one another."""
    fault: str = ""
    """Of an update that was skipped: what was not finite, and on which rank."""
    logprobs: Tensor | None = field(default=None, compare=False)
    """Log p of each trained token of this rank's share before the update, `[N]` float32, 0 elsewhere.

    From a LogprobLoss on MegatronEngine, where they are a by-product.
    """

    def mean(self, key: str) -> float:
        return self.sums[key] / max(self.weight, 1.0)


@dataclass(frozen=True, kw_only=True)
class FinetuneSpec:
    """The length of the training; LR schedules need it."""

    total_updates: int
