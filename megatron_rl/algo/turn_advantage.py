"""Advantage estimators that compare single turns of dialogues, or trajectories of one agent.

A turn is a reply with at least one trained token. Each rank fills in a table, with a few numbers per turn, for the
turns whose tokens it has. The tables are summed, so all ranks compute the same results.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algo.normalize import group_numbers, normalize, shares_of
from megatron_rl.algo.registry import estimator
from megatron_rl.algo.reward_shaping import written_tokens
from megatron_rl.algo.turns import first_of_turn, spread_over_turns, turns_of
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

    r_k is the sum of a turn's token rewards. k counts the replies that the model wrote earlier in the trajectory. A
    turn that no other trajectory of the group has reached gets 0. If trajectories name their `agent`, only turns of the
    same agent are compared. std = False omits the division.
    Source: arXiv 2511.14846; by agent arXiv 2510.11062
    """
    turns = Turns.of(batch, discount=discount)
    cell = group_numbers(by_agent(batch)[turns.trajectory], turns.number)
    shares = shares_of(group_numbers(batch.samples[turns.trajectory], cell))
    scale = "group" if std else "none"
    values = normalize(turns.returns, cell, mean="group", std=scale, shares=shares)
    return spread_over_turns(values, turns.place)


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

    G_k is as in turn_norm. With anchor = observation, the state is what the environment has shown since the previous
    reply, which for a first turn is the prompt. With anchor = history, it is all tokens before the reply. States are
    equal if their tokens are. Each turn counts once, even if several begin in the same state in one trajectory. The
    second term is 0 for a turn whose state occurs only once. If trajectories name their `agent`, only those of the same
    agent are compared. std = False omits both divisions.
    Source: arXiv 2505.10978
    """
    turns, members = Turns.of(batch, discount=discount, anchor=anchor), by_agent(batch)
    scale = "group" if std else "none"
    episodes = normalize(batch["scores"], members, mean="group", std=scale, shares=shares_by_agent(batch))
    state = group_numbers(members[turns.trajectory], *turns.state)
    steps = normalize(turns.returns, state, mean="group", std=scale)
    return batch.spread(episodes) + weight * spread_over_turns(steps, turns.place)


@estimator("agent_norm", compares_group=True, rules=STD)
def agent_norm(batch: TrajectoryBatch, *, std: bool = True) -> Tensor:
    """(r - mean) / std over the group's trajectories of the same agent.

    Agents of different roles may earn different rewards, so one agent's rewards are no baseline for another's. std =
    False omits the division.
    Source: arXiv 2510.11062
    """
    if "agent" not in batch.sequences:
        raise ValueError(
            f"algo.advantage = agent_norm: the trajectories have the columns {sorted(batch.sequences)}, but not agent; "
            f"use a workflow that sets each trajectory's sequence['agent'], e.g. megatron_rl.workflows:DebateWorkflow."
        )
    scale = "group" if std else "none"
    return normalize(batch["scores"], by_agent(batch), mean="group", std=scale, shares=shares_by_agent(batch))


def by_agent(batch: TrajectoryBatch) -> Tensor:
    """Return the number of each trajectory's group, `[B]` int64.

    If trajectories name their agent, the trajectories of each agent in a group form a group of their own.
    """
    if "agent" not in batch.sequences:
        return group_numbers(batch["group"])
    return group_numbers(batch["group"], group_numbers(batch["agent"]))


def shares_by_agent(batch: TrajectoryBatch) -> Tensor:
    """Return for each trajectory 1 / (number of trajectories with its sample and agent), `[B]` float64."""
    return shares_of(group_numbers(batch.samples, by_agent(batch)))


@dataclass(frozen=True)
class Turns:
    """All S trained turns of a step, trajectory by trajectory. All fields but `place` are the same on every rank.

    trajectory: `[S]` int64, the index of the turn's trajectory.
    number: `[S]` int64, how many replies the model wrote earlier in this trajectory.
    returns: `[S]` float64, the sum of the rewards of this and later turns, discounted per turn.
    state: two tensors `[S]` int64, the halves of a hash of the state in which the turn begins; zeros without an anchor.
    place: `[N]` int64, the turn of each trained token on this rank; -1 for other tokens.
    """

    trajectory: Tensor
    number: Tensor
    returns: Tensor
    state: tuple[Tensor, Tensor]
    place: Tensor

    @classmethod
    def of(cls, batch: TrajectoryBatch, *, discount: float, anchor: str = "") -> Turns:
        """Build the table of turns. anchor: as in `gigpo`; '' computes no states. Collective: every rank calls it."""
        mask = batch["loss_mask"].bool()
        written, bounds = turns_of(written_tokens(batch), batch.cu_seqlens)
        is_trained = torch.zeros(int(bounds[-1]), dtype=torch.bool)  # [replies on this rank]
        is_trained[written[mask]] = True
        whose = torch.repeat_interleave(torch.arange(len(batch)), bounds.diff())  # each reply's trajectory
        counts = batch.completed(torch.zeros(len(batch), dtype=torch.int64).index_add_(0, whose, is_trained.long()))
        ends = prefix_sums(counts)
        # Trained turns on this rank lie in the trajectories' order, and a trajectory has all of its turns here or none.
        own = torch.repeat_interleave(torch.arange(len(batch)), counts)  # [S]
        is_here = torch.zeros(len(batch), dtype=torch.bool).index_fill_(0, whose, True)[own]
        here = is_here.nonzero()[:, 0]
        place = torch.full_like(written, -1)
        place[mask] = here[(is_trained.cumsum(0) - 1)[written[mask]]]
        table = torch.zeros(4, int(ends[-1]), dtype=torch.int64)
        table[0, here] = (torch.arange(len(whose)) - bounds[whose])[is_trained]
        earned = torch.zeros(int(ends[-1]), dtype=torch.float64)
        earned.index_add_(0, place[mask], batch["token_rewards"][mask].double())
        # each turn is on one rank only, so the sum of these bits over the ranks is the number itself
        table[1] = earned.view(torch.int64)
        if anchor:
            table[2:, here] = states(batch, written, anchor)[:, is_trained]
        table = batch.total(table)
        earned = table[1].contiguous().view(torch.float64)
        all_of_them = torch.ones(len(earned), dtype=torch.bool)
        returns = packed_discounted_returns(earned, all_of_them, ends, discount=discount)
        return cls(own, table[0], returns, (table[2], table[3]), place)


def states(batch: TrajectoryBatch, written: Tensor, anchor: str) -> Tensor:
    """Return a 128-bit hash of the state before each reply on this rank, `[2, replies]` int64.

    written: `[N]`, the reply that each token belongs to; -1 for tokens that the model did not write. anchor:
    `observation` hashes only the tokens after the previous reply, `history` all tokens of the trajectory before this
    reply.
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
