"""KL estimators and losses against values worked out by hand."""

import pytest
import torch
from tensordict import TensorDict

from megatron_rl.algo import loss
from megatron_rl.algo.actor import PolicyActor, proximal_share
from megatron_rl.config import AlgorithmConfig, CorrectionConfig
from megatron_rl.ops import PpoOptions, ppo_loss, reference
from megatron_rl.types import StepStats
from tests.kit.counting_engine import CountingEngine
from tests.unit.ragged import ragged_batch


def test_kl_estimators_are_right_in_expectation():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.25, 0.25, 0.5]).double()
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * reference.kl_k1(p.log(), q.log())).sum(), exact)
    torch.testing.assert_close((p * reference.kl_k3(p.log(), q.log())).sum(), exact)
    torch.testing.assert_close(reference.kl_k2(torch.tensor(0.5), torch.tensor(-0.5)), torch.tensor(0.5))
    assert (reference.kl_k3(p.log(), q.log()) >= 0).all()


def test_clip_removes_the_gradient_only_past_the_clip():
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5]).log().requires_grad_()
    advantages, trained = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.ones(4, dtype=torch.bool)
    total, sums = ppo_loss(logprobs, torch.zeros(4), None, advantages, trained, PpoOptions(clip_low=0.2, clip_high=0.3))
    total.backward()
    # A > 0: ratio 1.5 stops at 1.3, ratio 0.5 pulls up; A < 0: ratio 1.5 pulls down, ratio 0.5 stops at 0.8.
    torch.testing.assert_close(total.detach(), torch.tensor(-1.3 - 0.5 + 1.5 + 0.8))
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -0.5, 1.5, 0.0]))
    assert sums["clipped_tokens"] == 2


def test_masked_rows_cannot_overflow_into_the_gradient():
    logprobs = torch.tensor([0.0, 500.0]).requires_grad_()
    total, _ = ppo_loss(logprobs, torch.zeros(2), None, torch.ones(2), torch.tensor([True, False]), PpoOptions())
    total.backward()
    assert logprobs.grad.tolist() == [-1.0, 0.0] and total == -1.0


def rows(**more):
    base = {
        "labels": torch.tensor([4, -100, 2]),
        "advantages": torch.tensor([2.0, 9.0, -1.0]),
        "logprobs": torch.tensor([-1.0, 0.0, -2.0]),
    }
    return TensorDict(base | more)


def test_policy_loss_without_proximal_logprobs_has_ratio_one():
    logprobs = torch.tensor([-1.1, 0.0, -1.8]).requires_grad_()
    total, sums = loss.PolicyLoss(AlgorithmConfig())(logprobs, torch.zeros(3), rows())
    total.backward()
    assert total == -(2.0 - 1.0) and sums["ratio_deviation"] == 0
    assert logprobs.grad.tolist() == [-2.0, 0.0, 1.0]


def test_policy_loss_adds_kl_and_entropy_terms():
    options = AlgorithmConfig(loss="reinforce", kl_coefficient=0.1, kl_estimator="k1", entropy_coefficient=0.01)
    logprobs, entropy = torch.tensor([-1.0, 0.0, -2.0]), torch.tensor([3.0, 0.0, 5.0])
    data = rows(ref_logprobs=torch.tensor([-1.5, -7.0, -2.25]))
    total, sums = loss.PolicyLoss(options)(logprobs, entropy, data)
    torch.testing.assert_close(total, torch.tensor((2.0 - 2.0) + 0.1 * (0.5 + 0.25) - 0.01 * 8.0))
    torch.testing.assert_close(sums["reference_kl"].float(), torch.tensor(0.75))


def test_kl_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="kl_coefficient = 0.1.*reference engine"):
        PolicyActor(None, AlgorithmConfig(kl_coefficient=0.1), temperature=1.0)


def test_behavior_weight_by_hand():
    proximal, behavior = torch.tensor([2.0, 8.0, 0.5, 9.0]).log(), torch.tensor([1.0, 1.0, 1.0, 1.0]).log()
    trained = torch.tensor([True, True, True, False])
    options = PpoOptions(mode="reinforce", behavior="mask", behavior_high=5.0)
    total, sums = ppo_loss(torch.full((4,), -1.0), proximal, behavior, torch.ones(4), trained, options)
    assert sums["dropped_tokens"] == 1
    torch.testing.assert_close(sums["behavior_weight"].float(), torch.tensor(2.0 + 0.0 + 0.5))
    torch.testing.assert_close(total, torch.tensor(2.5))


def test_decoupled_ppo_weighs_tokens_but_not_the_ratio():
    # proximal = policy: ratio 1; behaviour differs by 0.1 and -0.2, as in rows()
    logprobs = torch.tensor([-1.1, 0.0, -1.8]).requires_grad_()
    policy_loss = loss.PolicyLoss(AlgorithmConfig(), CorrectionConfig(weight="mask"))
    total, _ = policy_loss(logprobs, torch.zeros(3), rows())
    total.backward()
    weights = torch.tensor([-0.1, 0.2]).exp()
    torch.testing.assert_close(total.detach(), -(2.0 * weights[0] - 1.0 * weights[1]))
    torch.testing.assert_close(logprobs.grad[[0, 2]], torch.stack([-2.0 * weights[0], weights[1]]))


def test_policy_loss_takes_the_logprobs_of_a_float64_model():
    logprobs = torch.tensor([-1.1, 0.0, -1.8], dtype=torch.float64).requires_grad_()
    total, _ = loss.PolicyLoss(AlgorithmConfig())(logprobs, torch.zeros(3).double(), rows())
    assert total == -(2.0 - 1.0) and total.dtype == torch.float64


def test_proximal_policy_is_the_behaviour_policy_or_lies_between():
    logprobs = torch.tensor([-1.1, 0.0, -1.8]).requires_grad_()
    plain = loss.PolicyLoss(AlgorithmConfig(), CorrectionConfig(proximal="behavior"))
    total, _ = plain(logprobs, torch.zeros(3), rows())
    ratio = torch.tensor([-0.1, 0.2]).exp()
    torch.testing.assert_close(total.detach(), -2.0 * ratio[0] + max(ratio[1], torch.tensor(0.8)))
    # A quarter of the way from the behaviour's -1.0 to -1.1 and from -2.0 to -1.8; the rest is the ratio's.
    share = torch.full((3,), 0.25)
    between = loss.PolicyLoss(AlgorithmConfig(), CorrectionConfig(proximal="loglinear", weight="clamp", high=1.01))
    total, sums = between(logprobs, torch.zeros(3), rows(proximal_share=share))
    ratio, weight = torch.tensor([-0.075, 0.15]).exp(), torch.tensor([-0.025, 0.05]).exp().clamp(max=1.01)
    torch.testing.assert_close(total.detach(), -2.0 * ratio[0] * weight[0] + ratio[1] * weight[1])
    assert sums["dropped_tokens"] == 1


def test_share_of_the_way_to_the_proximal_policy_by_updates():
    # Sampled at the step's beginning, the behaviour policy is the proximal one. Sampled 3 updates before, and 1 done:
    # three of four.
    age = torch.tensor([0, 3, -1])
    assert proximal_share(age, updates_done=1).tolist() == [0.0, 0.75, 0.0]
    assert proximal_share(age, updates_done=3).tolist() == [0.0, 0.5, 0.0]


def test_a_weight_by_sequence_masks_whole_sequences():
    behavior = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    drift = torch.tensor([0.5, -0.4, 0.9, 0.3])  # sequence means 0.05 and 0.6
    data = TensorDict(
        {
            "labels": torch.zeros(4, dtype=torch.int64),
            "advantages": torch.ones(4),
            "logprobs": behavior,
            "proximal_logprobs": behavior + drift,
            "cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32),
        }
    )
    masked = loss.PolicyLoss(
        AlgorithmConfig(loss="reinforce"), CorrectionConfig(weight="mask", level="sequence", high=1.2)
    )
    total, sums = masked(torch.full((4,), -1.0), torch.zeros(4), data)
    assert masked.by_sequence and sums["dropped_tokens"] == 2
    torch.testing.assert_close(total, 2 * torch.tensor(0.05).exp())


@pytest.mark.parametrize(
    ("applied", "version"), [([True], 8), ([True] * 4, 8), ([False, True], 8), ([False, False], 7), ([], 7)]
)
def test_updates_of_a_step_make_one_version_or_none_where_all_were_skipped(applied, version):
    actor = PolicyActor(CountingEngine(7), AlgorithmConfig(), temperature=1.0)
    assert [stats.applied for stats in actor.update(applied)] == applied
    assert actor.engine.version == version


def test_the_entropy_of_a_skipped_update_steers_no_coefficient():
    class Engine(CountingEngine):
        def train_batch(self, share, loss, weigh=None):
            applied, entropy = share
            sums = {"tokens": 1.0, "entropy": entropy}
            return StepStats(loss=0.0, weight=1, grad_norm=1.0, applied=applied, lr=0.0, sums=sums)

    options = AlgorithmConfig(entropy_coefficient=0.01, entropy_target=0.5, entropy_step=0.002)
    actor = PolicyActor(Engine(0), options, temperature=1.0)
    actor.update([(False, float("nan"))])
    assert actor.entropy.value == 0.01
    actor.update([(False, float("nan")), (True, 0.4)])
    assert actor.entropy.value == pytest.approx(0.012)


def test_log_probs_of_the_first_pass_are_not_computed_again():
    actor = PolicyActor(CountingEngine(7), AlgorithmConfig(loss="m2po"), temperature=1.0)  # it cannot run forward
    shares = [ragged_batch(seed) for seed in range(2)]
    before = [share["proximal_logprobs"].clone() for share in shares]
    actor.compute_logprobs(shares)
    assert all(torch.equal(share["proximal_logprobs"], own) for share, own in zip(shares, before, strict=True))
