"""What is exchanged between ranks arrives as it was, on every rank."""

import torch
from ranks import run_ranks
from tiny import LAYOUTS, make_batch, make_groups

from megatron_rl import parallel
from megatron_rl.batch import exchange
from megatron_rl.types import TrajectoryBatch


def gathered(layout):
    groups = parallel.start(LAYOUTS[layout][1], seed=1)
    own = [make_groups(), make_batch(lengths=(7, 0, 1))][groups.data.rank] if groups.is_rollout_rank else None
    return exchange.gather(own, groups)


def test_every_rank_gets_every_heads_trajectories():
    first, second = make_groups(), make_batch(lengths=(7, 0, 1))
    second.sequences["group"] = second["group"] + first["group"].max() + 1
    expected = TrajectoryBatch.cat([first, second])
    for whole in run_ranks(8, gathered, "tp2_pp2_dp2"):
        assert whole.tokens.keys() == expected.tokens.keys() and whole.sequences.keys() == expected.sequences.keys()
        assert torch.equal(whole.cu_seqlens, expected.cu_seqlens)
        for key in (*expected.tokens, *expected.sequences):
            assert whole[key].dtype == expected[key].dtype and torch.equal(whole[key], expected[key]), key
