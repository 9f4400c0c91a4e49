"""Estimators that compare turns and agents, by loops over their definitions, turn by turn."""

from dataclasses import dataclass
from statistics import mean, stdev

import torch


@dataclass
class Turn:
    """A reply of which something is trained."""

    trajectory: int
    number: int
    """Replies of the model before it."""
    tokens: list[int]
    """Its trained ones."""
    reward: float
    observation: tuple[int, ...]
    history: tuple[int, ...]
    returned: float = 0.0


def turns_of_batch(batch, rewards, discount):
    """rewards: `[N]`, of trained tokens. A reply is a run of tokens that are trained or have a version."""
    found, bounds = [], batch.cu_seqlens.tolist()
    ids, mask, versions = (batch[name].tolist() for name in ("input_ids", "loss_mask", "versions"))
    for trajectory, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        runs = []
        for t in range(start, stop):
            if mask[t] or versions[t] >= 0:
                if runs and runs[-1][-1] == t - 1:
                    runs[-1].append(t)
                else:
                    runs.append([t])
        own = []
        for number, run in enumerate(runs):
            tokens = [t for t in run if mask[t]]
            since = runs[number - 1][-1] + 1 if number else start
            seen = tuple(ids[since : run[0]]), tuple(ids[start : run[0]])
            if tokens:
                own.append(Turn(trajectory, number, tokens, sum(float(rewards[t]) for t in tokens), *seen))
        after = 0.0
        for turn in reversed(own):
            turn.returned = after = turn.reward + discount * after
        found += own
    return found


def against(value, values, std=True):
    """values: all that it is compared with, itself included."""
    if len(set(values)) < 2:
        return 0.0
    return (value - mean(values)) / (stdev(values) + 1e-6 if std else 1.0)


def agent_of(batch, i):
    return float(batch["agent"][i]) if "agent" in batch else 0.0


def is_compared(batch, i, j):
    return batch["group"][i] == batch["group"][j] and agent_of(batch, i) == agent_of(batch, j)


def by_turn(batch, turns, value_of):
    result = torch.zeros(len(batch["input_ids"])).double()
    for turn in turns:
        result[turn.tokens] = value_of(turn)
    return result


def turn_norm(batch, rewards, discount=1.0, std=True):
    turns = turns_of_batch(batch, rewards, discount)

    def value_of(turn):
        there = [t for t in turns if t.number == turn.number and is_compared(batch, t.trajectory, turn.trajectory)]
        return against(turn.returned, [t.returned for t in there], std)

    return by_turn(batch, turns, value_of)


def gigpo(batch, rewards, scores, discount=0.95, weight=1.0, std=True, anchor="observation"):
    turns = turns_of_batch(batch, rewards, discount)

    def value_of(turn):
        group = [j for j in range(len(batch)) if is_compared(batch, turn.trajectory, j)]
        same = [t.returned for t in turns if t.trajectory in group and getattr(t, anchor) == getattr(turn, anchor)]
        whole = against(scores[turn.trajectory], [scores[j] for j in group], std)
        return whole + weight * against(turn.returned, same, std)

    return by_turn(batch, turns, value_of)


def agent_norm(batch, scores, std=True):
    return [
        against(scores[i], [scores[j] for j in range(len(batch)) if is_compared(batch, i, j)], std)
        for i in range(len(batch))
    ]
