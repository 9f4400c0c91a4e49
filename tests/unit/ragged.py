"""Ragged random batches for the catalogue's tests, and what a workflow would have put into them."""

import torch

from megatron_rl.types import TrajectoryBatch

LENGTHS = (5, 9, 1, 7, 12, 3, 8, 6, 10)
GROUPS = (4, 7, 4, 4, 0, 7, 9, 0, 0)  # not in order; 9 has one trajectory
AGENTS = (0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0)
UNTRAINED = 5
"""This trajectory's tokens are all masked, as where they were too old; its reward still counts for its group."""


def ragged_batch(seed: int = 0, binary: bool = False) -> TrajectoryBatch:
    """Trajectories of several turns; about half of the tokens are trained, never a first one.

    What is said between them has two words, so that turns often begin in the same state.
    """
    generator = torch.Generator().manual_seed(seed)
    count, starts = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = torch.rand(count, generator=generator) < 0.6
    mask[starts[1:] - 1] = True
    mask[starts[:-1]] = False
    mask[starts[UNTRAINED] : starts[UNTRAINED + 1]] = False
    noise = torch.randn(6, count, generator=generator)
    rewards = torch.randn(len(LENGTHS), generator=generator)
    tokens = {
        "input_ids": torch.arange(count) % 2,
        "loss_mask": mask,
        "logprobs": -noise[0].abs() * mask,
        "ref_logprobs": -noise[1].abs() * mask,
        "proximal_logprobs": (-noise[0].abs() + 0.2 * noise[2]) * mask,
        "cold_logprobs": cold_logprobs((-noise[0].abs() + 0.2 * noise[2]).clamp_max(-0.01), noise[5].sigmoid()),
        "values": noise[3],
        "entropies": noise[4].abs(),
        "versions": torch.where(mask, 0, -1),
    }
    sequences = {
        "rewards": (rewards > 0).float() if binary else rewards,
        "greedy_reward": torch.rand(len(LENGTHS), generator=generator),
        "greedy_tokens": torch.randint(1, 12, (len(LENGTHS),), generator=generator).float(),
        "group": torch.tensor(GROUPS),
        "agent": torch.tensor(AGENTS),
    }
    sequences["part/right"] = torch.rand(len(LENGTHS), generator=generator).round(decimals=1)
    sequences["part/form"] = sequences["rewards"] - sequences["part/right"]
    return TrajectoryBatch(tokens, sequences, starts)


def cold_logprobs(logprobs: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """log p at half the temperature, where the others' squared probabilities are that share of the most they can be."""
    p = logprobs.exp()
    return 2 * logprobs - (p.square() + share * (1 - p).square()).log()


def parts_of(batch: TrajectoryBatch) -> list[slice]:
    """The rows of each trajectory."""
    bounds = batch.cu_seqlens.tolist()
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
