"""Advantage estimators that compare single turns of dialogues, and trajectories of one agent.

A turn is a reply of which something is trained. Turns are compared over the whole step, whichever ranks have their
tokens: what is needed of each goes into one table of numbers, which every rank gets and computes the same from.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algo.normalize import group_numbers, normalize, shares_of
from megatron_rl.algo.registry import estimator
from megatron_rl.algo.reward_shaping import written_tokens
from megatron_rl.algo.turns import first_of_turn, turns_of
from megatron_rl.ops import packed_discounted_returns
from megatron_rl.types import TrajectoryBatch, prefix_sums

DISCOUNT = {"discount": (lambda value: 0 < value <= 1, "must be in (0, 1]; 1 discounts nothing")}
STD = {"std": (lambda value: isinstance(value, bool), "must be true or false")}
GIGPO = {
    "weight": (lambda value: value >= 0, "must be at least 0; 0 compares whole trajectories alone"),
    "anchor": (lambda value: value in ("observation", "history"), "must be observation or history"),
}


@estimator("turn_norm", compares_group=True, rules=DISCOUNT | STD)
def turn_norm(batch: TrajectoryBatch, *, discount: float = 1.0, std: bool = True) -> Tensor:
    """(G_k - mean) / std over the k-th turns of the group, G_k = sum over k' >= k of discount^(k' - k) r_k'.

    r_k is what a turn's tokens have earned. A turn is compared with those that have as many replies of the model before
    them; one that no other trajectory has reached gets 0. Where trajectories name their `agent`, with that agent's
    alone. std = False leaves the division out.
    Source: arXiv 2511.14846; by agent arXiv 2510.11062
    """
    turns = Turns.of(batch, discount=discount)
    cell = cells(by_agent(batch)[turns.trajectory], turns.number)
    shares = shares_of(cells(batch.samples[turns.trajectory], cell))
    scale = "group" if std else "none"
    return turns.spread(normalize(turns.returns, cell, mean="group", std=scale, shares=shares), batch)


@estimator("gigpo", compares_group=True, rules=DISCOUNT | STD | GIGPO)
def gigpo(
    batch: TrajectoryBatch,
    *,
    discount: float = 0.95,
    weight: float = 1.0,
    std: bool = True,
    anchor: str = "observation",
) -> Tensor:
    """(r - mean) / std over the group + weight (G_k - mean) / std over the group's turns that begin in the same state.

    G_k is as in turn_norm. The state is what the environment has shown since the reply before (anchor = observation),
    for a first turn the prompt, or all tokens before the reply (history). States are the same where their tokens are.
    Each turn counts once, also of one trajectory; a state that no other turn begins in gives 0. Where trajectories name
    their `agent`, they are compared with that agent's alone. std = False leaves both divisions out.
    Source: arXiv 2505.10978
    """
    turns, members = Turns.of(batch, discount=discount, anchor=anchor), by_agent(batch)
    scale = "group" if std else "none"
    episodes = normalize(batch["scores"], members, mean="group", std=scale, shares=shares_by_agent(batch))
    state = cells(members[turns.trajectory], *turns.state)
    steps = normalize(turns.returns, state, mean="group", std=scale)
    return batch.spread(episodes) + weight * turns.spread(steps, batch)


@estimator("agent_norm", compares_group=True, rules=STD)
def agent_norm(batch: TrajectoryBatch, *, std: bool = True) -> Tensor:
    """(r - mean) / std over the group's trajectories of the same agent.

    Agents of different roles need not earn alike: none is the other's baseline. std = False leaves the division out.
    Source: arXiv 2510.11062
    """
    if "agent" not in batch.sequences:
        raise ValueError(
            f"algo.advantage = agent_norm: the trajectories carry {sorted(batch.sequences)} and no agent; use a "
            f"workflow that says whose each is, in sequence['agent'], e.g. megatron_rl.workflows:DebateWorkflow."
        )
    scale = "group" if std else "none"
    return normalize(batch["scores"], by_agent(batch), mean="group", std=scale, shares=shares_by_agent(batch))


def by_agent(batch: TrajectoryBatch) -> Tensor:
    """`[B]` int64: a number for each trajectory's group and, where trajectories name one, its agent."""
    if "agent" not in batch.sequences:
        return group_numbers(batch["group"])
    return cells(batch["group"], group_numbers(batch["agent"]))


def shares_by_agent(batch: TrajectoryBatch) -> Tensor:
    """`[B]` float64: each trajectory's share of what its sample has of its agent."""
    return shares_of(cells(batch.samples, by_agent(batch)))


def cells(*columns: Tensor) -> Tensor:
    """Return a number from 0, without gaps, for each row that is not the same, `[K]` int64, of columns `[K]` int64."""
    if not len(columns[0]):
        return torch.zeros(0, dtype=torch.int64)
    numbers: Tensor = torch.unique(torch.stack(columns, dim=1), dim=0, return_inverse=True)[1]
    return numbers


@dataclass(frozen=True)
class Turns:
    """All S turns of a step of which something is trained, trajectory by trajectory, the same on every rank.

    trajectory: `[S]` int64, whose each is. number: `[S]` int64, replies that the model wrote there before it. returns:
    `[S]` float64, discounted over turns. state: two `[S]` int64, a hash of what it begins in; zeros without an anchor.
    place: `[N]` int64, the turn of each token here that is trained, -1 for others.

    For example:

        turns = Turns.of(batch, discount=0.9)
        turns.spread(turns.returns, batch)  # each token's return
    """

    trajectory: Tensor
    number: Tensor
    returns: Tensor
    state: tuple[Tensor, Tensor]
    place: Tensor

    @classmethod
    def of(cls, batch: TrajectoryBatch, *, discount: float, anchor: str = "") -> Turns:
        """Collective: every rank calls it. anchor: observation or history, where the states are asked for."""
        mask = batch["loss_mask"].bool()
        written, bounds = turns_of(written_tokens(batch), batch.cu_seqlens)
        is_trained = torch.zeros(int(bounds[-1]), dtype=torch.bool)  # [replies here]
        is_trained[written[mask]] = True
        whose = torch.repeat_interleave(torch.arange(len(batch)), bounds.diff())  # [replies here]
        counts = batch.completed(torch.zeros(len(batch), dtype=torch.int64).index_add_(0, whose, is_trained.long()))
        ends = prefix_sums(counts)
        # The trained turns here lie in the trajectories' order, and of each trajectory all or none are here.
        own = torch.repeat_interleave(torch.arange(len(batch)), counts)  # [S]
        is_here = torch.zeros(len(batch), dtype=torch.bool).index_fill_(0, whose, True)[own]
        here = is_here.nonzero()[:, 0]
        place = torch.full_like(written, -1)
        place[mask] = here[(is_trained.cumsum(0) - 1)[written[mask]]]
        table = torch.zeros(4, int(ends[-1]), dtype=torch.int64)
        table[0, here] = (torch.arange(len(whose)) - bounds[whose])[is_trained]
        earned = torch.zeros(int(ends[-1]), dtype=torch.float64)
        earned.index_add_(0, place[mask], batch["token_rewards"][mask].double())
        table[1] = earned.view(torch.int64)  # a turn is on one rank, so that the sum of these bits is that number
        if anchor:
            table[2:, here] = states(batch, written, anchor)[:, is_trained]
        table = batch.total(table)
        earned = table[1].contiguous().view(torch.float64)
        all_of_them = torch.ones(len(earned), dtype=torch.bool)
        returns = packed_discounted_returns(earned, all_of_them, ends, discount=discount)
        return cls(own, table[0], returns, (table[2], table[3]), place)

    def spread(self, values: Tensor, batch: TrajectoryBatch) -> Tensor:
        """`[S]` numbers of turns -> `[N]`, for each trained token here, 0 for others."""
        result = values.new_zeros(len(batch["loss_mask"]))
        trained = self.place >= 0
        result[trained] = values[self.place[trained]]
        return result


def states(batch: TrajectoryBatch, written: Tensor, anchor: str) -> Tensor:
    """`[2, replies here]` int64: 128 bits of a hash of the tokens before each reply, by which alone they are compared.

    written: `[N]`, each token's reply, -1 for what the model did not write. anchor: observation leaves out what is
    there up to the end of the reply before.
    """
    first = first_of_turn(written)
    begin = batch.cu_seqlens[batch.sequence_ids[first]]
    if anchor == "observation" and len(first):
        last = prefix_sums(torch.bincount(written[written >= 0]))  # written tokens up to each reply's end
        ends = (written >= 0).nonzero()[:, 0][last[1:] - 1] + 1
        begin = torch.cat([begin[:1], torch.maximum(begin[1:], ends[:-1])])
    ids = batch["input_ids"].int().numpy()
    found = torch.zeros(2, len(first), dtype=torch.int64)
    for number, (start, stop) in enumerate(zip(begin.tolist(), first.tolist(), strict=True)):
        digest = hashlib.blake2b(ids[start:stop].tobytes(), digest_size=16).digest()
        found[:, number] = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    return found
