"""Packed GAE against the plain recursion, whatever the lengths and masks; rewards, whitening and the value loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo import loss
from megatron_rl.algo.actor import PolicyActor
from megatron_rl.algo.normalize import normalize
from megatron_rl.algo.reward_shaping import at_the_end
from megatron_rl.config import AlgorithmConfig
from megatron_rl.ops import packed_gae
from megatron_rl.types import TrajectoryBatch
from tests.kit.examples import max_examples


def recursion(rewards, values, mask, cu_seqlens, discount, trace_decay, bootstrap):
    """Right to left through every token in float64; masked ones hand on what the next trained one left."""
    advantages, returns = torch.zeros(len(values)).double(), torch.zeros(len(values)).double()
    for number, (start, stop) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        next_value, advantage = float(bootstrap[number]), 0.0
        for t in reversed(range(start, stop)):
            if mask[t]:
                delta = float(rewards[t]) + discount * next_value - float(values[t])
                advantage = delta + discount * trace_decay * advantage
                next_value = float(values[t])
                advantages[t], returns[t] = advantage, advantage + next_value
    return advantages.float(), returns.float()


share = st.floats(0.0, 1.0)
# Lengths of 0 and 1 and masks without a trained token are among them; 40 is past five doublings.
sequences = st.lists(st.lists(st.booleans(), max_size=40), min_size=1, max_size=8)


@settings(max_examples=max_examples(50, 150), deadline=None, derandomize=True, database=None)
@given(sequences, share, share, st.integers(0, 2**31))
def test_gae_equals_the_recursion_on_ragged_masks(masks, discount, trace_decay, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([trained for part in masks for trained in part], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, *map(len, masks)]).cumsum(0)
    rewards, values = torch.randn(2, len(mask), generator=generator)
    bootstrap = torch.randn(len(masks), generator=generator)
    options = {"discount": discount, "trace_decay": trace_decay}
    for after in (None, bootstrap):
        found = packed_gae(rewards, values, mask, cu_seqlens, **options, bootstrap=after)
        known = bootstrap if after is not None else torch.zeros(len(masks))
        expected = recursion(rewards, values, mask, cu_seqlens.tolist(), discount, trace_decay, known)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_gae_by_hand_skips_what_a_tool_said():
    # Two turns with a tool's two tokens between them; the reward is 1 at the end. discount 0.5, lambda 0.5.
    values, rewards = torch.tensor([9.0, 0.4, 7.0, 7.0, 0.6]), torch.tensor([0.0, 0.0, 5.0, 0.0, 1.0])
    mask = torch.tensor([False, True, False, False, True])
    advantages, returns = packed_gae(rewards, values, mask, torch.tensor([0, 5]), discount=0.5, trace_decay=0.5)
    # Last token: 1 - 0.6 = 0.4. First turn: 0.5 * 0.6 - 0.4 + 0.25 * 0.4 = 0.
    torch.testing.assert_close(advantages, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.4]))
    torch.testing.assert_close(returns, torch.tensor([0.0, 0.4, 0.0, 0.0, 1.0]))


def test_returns_are_the_reward_where_nothing_is_discounted():
    batch = two_trajectories()
    PolicyActor(None, AlgorithmConfig(advantage="gae"), temperature=1.0).compute_advantages(batch)
    torch.testing.assert_close(batch["returns"], torch.tensor([0.0, 3.0, 3.0, 0.0, 0.0, -1.0]))
    trained = batch["advantages"][batch["loss_mask"]]
    # 3 - 0.5, 3 - 1, -1 - 2, whitened: mean 0.5, population deviation sqrt((4 + 2.25 + 12.25) / 3)
    torch.testing.assert_close(trained, torch.tensor([2.0, 1.5, -3.5]) / (18.5 / 3) ** 0.5)
    assert not batch["advantages"][~batch["loss_mask"]].any()


def two_trajectories():
    """The second one's last token is not trained."""
    return TrajectoryBatch(
        {
            "input_ids": torch.arange(6),
            "loss_mask": torch.tensor([False, True, True, False, False, True]),
            "values": torch.tensor([7.0, 0.5, 1.0, 7.0, 7.0, 2.0]),
        },
        {"rewards": torch.tensor([3.0, -1.0]), "group": torch.tensor([0, 1])},
        torch.tensor([0, 4, 6]),
    )


def test_decoupled_targets_are_the_returns_without_a_trace_decay():
    for level in ("token", "turn"):
        found = []
        for args in ({"trace_decay": 0.5}, {"trace_decay": 0.5, "decoupled": True}, {"trace_decay": 1.0}):
            batch = two_trajectories()
            args |= {"discount": 0.9, "level": level}
            actor = PolicyActor(None, AlgorithmConfig(advantage="gae"), temperature=1.0, advantage_args=args)
            actor.compute_advantages(batch)
            found.append((batch["advantages"], batch["returns"]))
        (short, _), (policy, targets), (_, whole) = found
        torch.testing.assert_close(policy, short)
        torch.testing.assert_close(targets, whole)


def test_reward_is_put_on_the_last_trained_token():
    batch = two_trajectories()
    assert at_the_end(batch["rewards"], batch).tolist() == [0.0, 0.0, 3.0, 0.0, 0.0, -1.0]
    batch.tokens["loss_mask"] = torch.tensor([False] * 5 + [True])
    found = at_the_end(batch["rewards"], batch)
    assert found.tolist() == [0.0] * 5 + [-1.0], "without a trained token a reward reaches nobody"


def test_whitening_of_nothing_and_of_equal_advantages_is_zero():
    for count in (0, 3):
        group = torch.arange(count)
        assert normalize(torch.full((count,), 0.1), group, mean="batch", std="batch").tolist() == [0.0] * count


def value_clip(values, old, returns, trained, *, clip):
    rows = {"values": old, "returns": returns, "labels": torch.where(trained, 0, -100)}
    return loss.value_clip(values, rows, clip=clip)


def test_value_clip_stops_a_value_that_has_moved_far_enough():
    values = torch.tensor([1.0, 1.0, 0.1, 5.0]).requires_grad_()
    old, returns = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([2.0, 0.0, 0.5, 0.0])
    trained = torch.tensor([True, True, True, False])
    total, sums = value_clip(values, old, returns, trained, clip=0.2)
    total.backward()
    # Toward its return and past the bound (clipped 0.2): no gradient. Away from it: the plain loss is the greater.
    torch.testing.assert_close(total.detach(), torch.tensor(0.5 * (1.8**2 + 1.0**2 + 0.4**2)))
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 1.0, -0.4, 0.0]))
    assert sums["clipped_values"] == 1


def test_value_within_its_bounds_is_not_counted_as_clipped():
    generator = torch.Generator().manual_seed(0)
    old, values, returns = (0.2 * torch.randn(2_000, generator=generator) for _ in range(3))
    _, sums = value_clip(values, old, returns, torch.ones(2_000, dtype=torch.bool), clip=0.2)
    moved, error = values.double() - old.double(), returns.double() - values.double()
    assert ((moved.abs() - 0.2).abs() > 1e-6).all(), "none is clipped or not by rounding alone"
    # Past its bound on the way to the return, a value has left the bound's greater error behind.
    was_farther = (error + moved - 0.2 * moved.sign()).abs() > error.abs()
    assert sums["clipped_values"] == ((moved.abs() > 0.2) & was_farther).sum() > 100


def test_value_loss_without_a_bound_is_half_the_squared_error():
    values = torch.tensor([1.0, 3.0])
    total, sums = value_clip(values, torch.zeros(2), torch.zeros(2), torch.ones(2, dtype=torch.bool), clip=0.0)
    assert total == 5.0 and "clipped_values" not in sums


def test_explained_variance_of_two_ranks_is_that_of_all_their_tokens():
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(50, generator=generator)
    values = 0.7 * returns + 0.3 * torch.randn(50, generator=generator) + 0.4  # an offset is no unexplained variance
    mask = torch.rand(50, generator=generator) < 0.8
    parts = [slice(0, 13), slice(13, 50)]
    sums = [value_clip(values[p], values[p], returns[p], mask[p], clip=0.2)[1] for p in parts]
    together = {key: float(sums[0][key] + sums[1][key]) for key in sums[0]}
    expected = 1 - (returns - values)[mask].var() / returns[mask].var()
    assert loss.explained_variance(together, float(mask.sum())) == pytest.approx(float(expected), abs=1e-5)


def test_explained_variance_of_equal_returns_is_zero():
    ones, mask = torch.ones(4), torch.ones(4, dtype=torch.bool)
    sums = value_clip(torch.zeros(4), ones, ones, mask, clip=0.2)[1]
    assert loss.explained_variance({key: float(value) for key, value in sums.items()}, 4.0) == 0.0
