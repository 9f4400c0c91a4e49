"""Every policy loss, weight and aggregation against float64 sums over tokens and trajectories, gradients included."""

import math
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from megatron_rl.algo import registry
from megatron_rl.algo.actor import EntropyController, PolicyActor
from megatron_rl.algo.aggregation import set_positive_weights, set_row_weights, trained_sequences
from megatron_rl.algo.catalogue import find_estimator, find_loss
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.algo.selection import but_covariant, covariances, high_entropy, highest_covariance, second_moment
from megatron_rl.batch import packing
from megatron_rl.config import LOSSES, AlgorithmConfig, CorrectionConfig
from megatron_rl.config.rules import ENTERED
from megatron_rl.types import TrajectoryBatch
from tests.kit.examples import max_examples
from tests.unit.loss_definitions import defined_loss, is_rejected
from tests.unit.ragged import LENGTHS, UNTRAINED, parts_of, ragged_batch

AGGREGATIONS = {"token_mean": 0, "sequence_mean": 0, "sequence_sum": 0, "constant": 7}


def policy_batch(seed=0):
    """A ragged batch with advantages, and a trained policy's log-probs and entropies `[N]`, near the proximal ones."""
    batch = ragged_batch(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    noise = torch.randn(3, len(batch["input_ids"]), generator=generator, dtype=torch.float64)
    batch.tokens["advantages"] = noise[0].float()
    batch.tokens["marked"] = highest_covariance(batch, share=0.3)
    policy = (batch["proximal_logprobs"].double() + 0.3 * noise[1]).clamp_max(-0.01)
    return batch, policy, noise[2].abs()


def packed(batch, order, values):
    """The trajectories in `order` as one microbatch: its rows, and `[N]` values by row, 0 where nothing is trained."""
    microbatch = packing.to_microbatch(batch, list(order))
    rows, source = microbatch.rows, microbatch.source
    return rows, [torch.where(rows["labels"] >= 0, v[source.clamp_min(0)], 0.0) for v in values]


WHOLE = (tuple(range(len(LENGTHS))),)


def run(options, correction=None, *, splits=WHOLE, seed=0):
    """Loss and gradients `[N]` by log-prob and entropy of the batch's mean, over any split into microbatches."""
    batch, policy, entropies = policy_batch(seed)
    weigh = None
    if options.aggregation != "token_mean":
        set_row_weights(batch, options)
        weigh = trained_sequences
    own, h = policy.clone().requires_grad_(), entropies.clone().requires_grad_()
    loss, weight = torch.zeros((), dtype=torch.float64), 0
    for split in splits:
        rows, (logprobs, entropy) = packed(batch, split, (own, h))
        part, _ = PolicyLoss(options, correction or CorrectionConfig())(logprobs, entropy, rows)
        loss = loss + part
        weight += int(weigh(rows)) if weigh else int((rows["labels"] >= 0).sum())
    gradients = torch.autograd.grad(loss / weight, (own, h), allow_unused=True, materialize_grads=True)
    return (loss / weight).detach(), *gradients


def by_definition(options, correction=None, *, seed=0):
    """The same as `run` by loops over trajectories and tokens."""
    batch, policy, entropies = policy_batch(seed)
    own, h = policy.clone().requires_grad_(), entropies.clone().requires_grad_()
    loss = defined_loss(options, correction or CorrectionConfig(), batch, own, h)
    gradients = torch.autograd.grad(loss, (own, h), allow_unused=True, materialize_grads=True)
    return loss.detach(), *gradients


def assert_same(found, right):
    for mine, true in zip(found, right, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-6, atol=1e-8)  # columns of a batch are float32


OPTIONS = {
    **{name: {"loss": name} for name in LOSSES},
    "clip-higher, dual clip": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.3},
    "gspo, tight": {"loss": "gspo", "clip_low": 0.01, "clip_high": 0.02},
    "sapo, uneven": {"loss": "sapo", "loss_args": {"positive": 0.5, "negative": 3.0}},
    "cpgd, drift": {"loss": "cpgd", "loss_args": {"drift": 0.7, "drift_cap": 1.0}},
    "dppo, tight": {"loss": "dppo", "loss_args": {"bound": 0.02, "most": 1.1}},
    "gmpo, tight": {"loss": "gmpo", "loss_args": {"width": 0.1}},
    **{k: {"kl_coefficient": 0.1, "kl_estimator": k} for k in ("k1", "k2", "k3", "unbiased")},
    "cpgd, kl and entropy": {"loss": "cpgd", "kl_coefficient": 0.2, "entropy_coefficient": 0.3},
    "entropy": {"entropy_coefficient": 0.3, "loss": "cispo"},
}


def with_aggregations():
    """Each of OPTIONS with each aggregation; `make test` has all of those with three losses, and one with the others.

    The three are fused by row, fused by sequence, and in plain torch: to the rest the aggregation is the same.
    """
    for number, name in enumerate(OPTIONS):
        for other, aggregation in enumerate(AGGREGATIONS):
            is_kept = name in ("ppo_clip", "gspo", "cpgd") or other == number % len(AGGREGATIONS)
            yield pytest.param(name, aggregation, marks=() if is_kept else pytest.mark.thorough)


@pytest.mark.parametrize(("name", "aggregation"), with_aggregations())
def test_loss_and_gradients_are_those_of_the_definition(name, aggregation):
    options = AlgorithmConfig(**OPTIONS[name], aggregation=aggregation, aggregation_length=AGGREGATIONS[aggregation])
    assert_same(run(options), by_definition(options))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("weight", [0.1, 2.0])
def test_the_term_of_positive_trajectories_is_their_mean_nll(aggregation, weight):
    common = {"aggregation": aggregation, "aggregation_length": AGGREGATIONS[aggregation], "loss": "reinforce"}
    plain = AlgorithmConfig(**common)
    options = AlgorithmConfig(**common, positive_weight=weight, positive_reward=0.2)
    batch, policy, _ = policy_batch()
    share = set_positive_weights(batch, batch["rewards"], options)
    set_row_weights(batch, plain)
    found = []
    for chosen in (plain, options):
        own, total, divisor = policy.clone().requires_grad_(), 0.0, 0
        for split in ((0, 3, 4), (5, 1, 2, 7), (6, 8)):
            rows, (logprobs, entropy) = packed(batch, split, (own, torch.zeros_like(own)))
            if aggregation == "token_mean":
                del rows["row_weights"]
            total = total + PolicyLoss(chosen, CorrectionConfig())(logprobs, entropy, rows)[0]
            divisor += int(trained_sequences(rows)) if aggregation != "token_mean" else int((rows["labels"] >= 0).sum())
        found.append(total / divisor)
    good = [i for i in range(len(batch)) if batch["rewards"][i] >= 0.2]
    own = policy.clone().requires_grad_()
    nll = [[-own[t] for t in range(*part.indices(10**9)) if batch["loss_mask"][t]] for part in parts_of(batch)]
    good = [i for i in good if nll[i]]
    length = {"sequence_mean": None, "sequence_sum": 1, "constant": AGGREGATIONS["constant"]}
    if aggregation == "token_mean":
        mean = sum(sum(nll[i]) for i in good) / sum(len(nll[i]) for i in good)
        assert share == sum(len(nll[i]) for i in good) / sum(map(len, nll))
    else:
        mean = sum(sum(nll[i]) / (length[aggregation] or len(nll[i])) for i in good) / len(good)
        assert share == len(good) / sum(bool(tokens) for tokens in nll)
    torch.testing.assert_close(found[1] - found[0], weight * mean, rtol=1e-6, atol=1e-8)
    (gradient,) = torch.autograd.grad(weight * mean, own)
    assert gradient.count_nonzero() > 5
    found = [run_positive(batch, policy, chosen, aggregation) for chosen in (plain, options)]
    torch.testing.assert_close(found[1] - found[0], gradient, rtol=1e-6, atol=1e-8)


def run_positive(batch, policy, options, aggregation):
    """The gradient `[N]` of the batch's loss in one microbatch."""
    own = policy.clone().requires_grad_()
    rows, (logprobs, entropy) = packed(batch, WHOLE[0], (own, torch.zeros_like(own)))
    if aggregation == "token_mean":
        del rows["row_weights"]
    loss = PolicyLoss(options, CorrectionConfig())(logprobs, entropy, rows)[0]
    divisor = int(trained_sequences(rows)) if aggregation != "token_mean" else int((rows["labels"] >= 0).sum())
    return torch.autograd.grad(loss / divisor, own)[0]


def test_a_step_without_a_positive_trajectory_has_no_such_term():
    batch, options = ragged_batch(), AlgorithmConfig(positive_weight=0.1, positive_reward=99.0)
    actor = PolicyActor(None, options, temperature=1.0)
    actor.compute_advantages(batch)
    assert not batch["positive_weights"].any() and actor.metrics["policy/positive_share"] == 0


CORRECTIONS = {
    "plain PPO": CorrectionConfig(proximal="behavior"),
    "far and negative": CorrectionConfig(negative_bound=0.01),
    "far and negative, clamped": CorrectionConfig(negative_bound=0.01, weight="clamp", low=0.9, high=1.1),
    **{
        f"{weight} by {level}": CorrectionConfig(weight=weight, level=level, low=0.9, high=1.1)
        for weight in ("mask", "clamp")
        for level in ("token", "sequence", "product")
    },
    **{
        f"{estimate} by {level}": CorrectionConfig(reject=estimate, reject_level=level, reject_bound=bound)
        for estimate, bound in (("k1", 0.12), ("k2", 0.02), ("k3", 0.02))
        for level in ("token", "mean", "sum", "max")
    },
    "k3 and a clamped product": CorrectionConfig(reject="k3", reject_bound=0.05, weight="clamp", level="product"),
}


# a fused loss by row and one by sequence; one in plain torch
@pytest.mark.parametrize(
    "loss", ["ppo_clip", "gspo", "cpgd", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("sapo", "gmpo"))]
)
@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
def test_behaviour_weights_are_those_of_the_definition(loss, correction):
    options = AlgorithmConfig(loss=loss, aggregation="sequence_mean", entropy_coefficient=0.1)
    assert_same(run(options, correction), by_definition(options, correction))


def summed_gradient(options, correction, *, untrained=(), **columns):
    """The gradient `[T]` of the loss of the batch as one microbatch, and its statistics."""
    batch, policy, entropies = policy_batch()
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, entropies))
    for name, values in columns.items():
        for row, value in values.items():
            rows[name][row] = value
    for row in untrained:
        rows["labels"][row] = -100
    own = logprobs.clone().requires_grad_()
    loss, sums = PolicyLoss(options, correction)(own, entropy, rows)
    return torch.autograd.grad(loss, own)[0], sums


COMPARING = {name: it for name, it in CORRECTIONS.items() if it.weight != "off" or it.leaves_out}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("loss", ["ppo_clip", "cpgd"])
@pytest.mark.parametrize("correction", COMPARING.values(), ids=COMPARING)
def test_an_infinite_behaviour_log_prob_acts_as_a_very_large_one(loss, correction, sign):
    options, row = AlgorithmConfig(loss=loss), 7
    far, _ = summed_gradient(options, correction, logprobs={row: sign * 1e6})
    found, sums = summed_gradient(options, correction, logprobs={row: sign * math.inf})
    torch.testing.assert_close(found, far)
    assert sums["not_finite"] == 1 and found.isfinite().all()


@pytest.mark.parametrize("name", ["logprobs", "proximal_logprobs"])
@pytest.mark.parametrize("loss", ["ppo_clip", "cpgd"])
@pytest.mark.parametrize("correction", COMPARING.values(), ids=COMPARING)
def test_a_token_whose_weight_is_nan_trains_as_if_it_were_not_there(loss, correction, name):
    options, row = AlgorithmConfig(loss=loss), 7
    without, plain = summed_gradient(options, correction, untrained=[row])
    found, sums = summed_gradient(options, correction, **{name: {row: math.nan}})
    torch.testing.assert_close(found, without)
    assert sums["not_finite"] == 1 and sums["tokens"] == plain["tokens"] + 1
    for counted in {"dropped_tokens", "left_out_tokens"} & sums.keys():
        assert sums[counted] == plain[counted] + 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_unknown_behaviour_log_prob_leaves_topr_finite(value):
    found, _ = summed_gradient(AlgorithmConfig(loss="topr"), CorrectionConfig(), logprobs={7: value})
    assert found.isfinite().all() and found.any()


def test_between_an_infinite_behaviour_log_prob_and_the_policys_nothing_lies():
    batch, policy, entropies = policy_batch()
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, entropies))
    del rows["proximal_logprobs"]
    rows["proximal_share"] = torch.full_like(rows["logprobs"], 0.25)
    rows["logprobs"][7] = -math.inf
    own = logprobs.clone().requires_grad_()
    loss, _ = PolicyLoss(AlgorithmConfig(), CorrectionConfig(proximal="loglinear", weight="mask"))(own, entropy, rows)
    assert loss.isfinite() and torch.autograd.grad(loss, own)[0][7] == 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "dppo", "topr"])
def test_the_split_into_microbatches_and_the_order_change_nothing(loss, aggregation):
    length = AGGREGATIONS[aggregation]
    options = AlgorithmConfig(loss=loss, aggregation=aggregation, aggregation_length=length, kl_coefficient=0.1)
    whole = run(options)
    for splits in (((8, 1, 0, 5), (3, 7), (2, 6, 4)), ((5,), (), (7, 6, 8), (0, 1, 2, 3, 4))):
        assert_same(run(options, splits=splits), whole)


@pytest.mark.parametrize("loss", ["ppo_clip", "dppo"])
def test_what_is_far_and_negative_does_not_train_and_is_counted(loss):
    batch, policy, entropies = policy_batch()
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, entropies))
    fallen = [(batch["logprobs"].double() - policy)[part][batch["loss_mask"][part]] for part in parts_of(batch)]
    means = torch.stack([part.mean() if len(part) else torch.tensor(0.0).double() for part in fallen])
    bound = float(means.clamp_min(0).median())
    correction = CorrectionConfig(negative_bound=bound)
    own = logprobs.clone().requires_grad_()
    loss, sums = PolicyLoss(AlgorithmConfig(loss=loss), correction)(own, entropy, rows)
    (gradient,) = torch.autograd.grad(loss, own)
    left_out = torch.zeros(len(policy), dtype=torch.bool)
    for part, mean in zip(parts_of(batch), means, strict=True):
        trained = batch["loss_mask"][part]
        left_out[part] = trained & bool(mean > bound and batch["advantages"][part][trained].sum() < 0)
    (by_row,) = packed(batch, range(len(batch)), (left_out.double(),))[1]
    assert sums["left_out_tokens"] == by_row.sum() > 0
    assert not gradient[by_row > 0].any() and gradient[(by_row == 0) & (rows["labels"] >= 0)].any()


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cpgd"])
@pytest.mark.parametrize("advantages", [(1.0, -3.0, 0.5), (1.0, -3.0, 4.0), (-1.0, -1.0, -1.0), (0.0, 0.0, 0.0)])
def test_a_sequence_of_mixed_signs_is_masked_whole_or_not_at_all(advantages, loss):
    rows = TensorDict({"labels": torch.ones(3).long(), "advantages": torch.tensor(advantages)})
    rows["logprobs"], rows["cu_seqlens"] = torch.tensor([0.5, -1.0, -0.7]), torch.tensor([0, 3])
    rows["proximal_logprobs"] = torch.full((3,), -1.0)
    own = torch.full((3,), -1.0, requires_grad=True)
    options = AlgorithmConfig(loss=loss, loss_args={"drift": 0.0} if loss == "cpgd" else {})
    found, sums = PolicyLoss(options, CorrectionConfig(negative_bound=0.5))(own, own.detach(), rows)
    is_masked = sum(advantages) < 0
    assert sums["left_out_tokens"] == 3 * is_masked
    assert torch.autograd.grad(found, own)[0].tolist() == [0.0 if is_masked else -a for a in advantages]


def test_a_sequence_without_trained_tokens_does_not_count():
    batch, *_ = policy_batch()
    rows, _ = packed(batch, (0, UNTRAINED, 1), ())
    assert trained_sequences(rows) == 2
    idle, _ = packed(batch, (), ())
    assert trained_sequences(idle) == 0


def test_a_first_token_that_is_marked_as_trained_is_not_counted():
    """Nothing predicts it."""
    batch, *_ = policy_batch()
    marked = batch.select(range(len(batch)))
    marked.tokens["loss_mask"] = batch["loss_mask"].clone()
    marked.tokens["loss_mask"][0] = True
    for each in (batch, marked):
        set_row_weights(each, AlgorithmConfig(aggregation="sequence_mean"))
    assert torch.equal(marked["row_weights"], batch["row_weights"])


def test_decoupled_ppo_whose_proximal_policy_is_the_behaviour_policy_is_ppo():
    batch, policy, _ = policy_batch()
    batch.tokens["proximal_logprobs"] = batch["logprobs"]
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, policy))
    decoupled = PolicyLoss(AlgorithmConfig(), CorrectionConfig(weight="mask"))(logprobs, entropy, rows)[0]
    plain = PolicyLoss(AlgorithmConfig(), CorrectionConfig(proximal="behavior"))(logprobs, entropy, rows)[0]
    assert decoupled == plain != 0


def test_gspo_on_sequences_of_one_token_is_ppo():
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(3, 16, generator=generator, dtype=torch.float64)
    names = ("advantages", "logprobs", "proximal_logprobs")
    rows = TensorDict(dict(zip(names, columns, strict=True)))
    rows["labels"] = torch.where(torch.arange(16) % 2 == 0, 1, -100)
    rows["cu_seqlens"] = torch.arange(0, 17, 2)
    policy = columns[2] + 0.3 * torch.randn(16, generator=generator, dtype=torch.float64)
    results = []
    for name in ("gspo", "ppo_clip"):
        own = policy.clone().requires_grad_()
        loss, _ = PolicyLoss(AlgorithmConfig(loss=name))(own, torch.zeros(16).double(), rows)
        results.append((loss.detach(), *torch.autograd.grad(loss, own)))
    assert_same(*results)


def test_k3_and_the_policy_drift_are_never_negative():
    distance = torch.cat([torch.linspace(-3, 3, 61, dtype=torch.float64), torch.tensor([1e-9, -1e-5]).double()])
    zeros = torch.zeros(len(distance))
    names = ("advantages", "logprobs", "proximal_logprobs", "ref_logprobs")
    rows = TensorDict(dict.fromkeys(names, zeros) | {"labels": zeros.long()})
    divergence = PolicyLoss(AlgorithmConfig(kl_coefficient=1.0, loss="reinforce"))
    drift = PolicyLoss(AlgorithmConfig(loss="cpgd", loss_args={"drift": 1.0}))
    for loss in (divergence, drift):
        each = [float(loss(d[None], d[None] * 0, rows.apply(lambda v: v[:1]))[0]) for d in distance]
        assert min(each) >= 0 and each[0] > 1
    own = distance.clone().requires_grad_()
    slope = torch.autograd.grad(drift(own, own * 0, rows)[0], own)[0]
    torch.testing.assert_close(slope, (distance.exp() - 1).clamp_max(0.2), rtol=1e-6, atol=1e-9)


def test_the_unbiased_kl_has_the_gradient_of_the_divergence():
    """Over all tokens of a small vocabulary, weighed by the proximal policy's chance of sampling them."""
    generator = torch.Generator().manual_seed(0)
    logits, ref, old = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy, ref, old = (x.log_softmax(0) for x in (logits, ref, old))
    exact = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)[0]
    rows = TensorDict(
        {
            "labels": torch.ones(5, dtype=torch.int64),
            "advantages": torch.zeros(5),
            "logprobs": old,
            "proximal_logprobs": old,
            "ref_logprobs": ref,
            "row_weights": old.exp(),
        }
    )
    options = AlgorithmConfig(kl_coefficient=1.0, kl_estimator="unbiased")
    loss, _ = PolicyLoss(options)(policy, torch.zeros(5).double(), rows)
    torch.testing.assert_close(torch.autograd.grad(loss, logits, retain_graph=True)[0], exact)
    biased, _ = PolicyLoss(AlgorithmConfig(kl_coefficient=1.0))(policy, torch.zeros(5).double(), rows)
    assert (torch.autograd.grad(biased, logits)[0] - exact).abs().max() > 0.01


# -- which tokens count -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["sequence", "batch"])
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_the_highest_entropies_are_kept(level, share):
    batch = ragged_batch()
    kept = high_entropy(batch, share=share, level=level)
    parts = parts_of(batch) if level == "sequence" else [slice(0, len(kept))]
    for part in parts:
        mask, own, entropy = batch["loss_mask"][part], kept[part], batch["entropies"][part]
        assert int(own.sum()) == math.ceil(round(share * int(mask.sum()), 6)) and not (own & ~mask).any()
        if own.any() and (mask & ~own).any():
            assert entropy[own].min() >= entropy[mask & ~own].max()


def test_of_equal_entropies_as_many_are_kept():
    batch = ragged_batch()
    batch.tokens["entropies"] = torch.ones_like(batch["entropies"])
    kept = high_entropy(batch, share=0.5, level="batch")
    assert int(kept.sum()) == math.ceil(int(batch["loss_mask"].sum()) / 2)


def test_the_second_moment_of_the_kept_tokens_is_within_its_bound():
    batch = ragged_batch()
    square = (batch["proximal_logprobs"] - batch["logprobs"]).double().square()
    mask = batch["loss_mask"]
    kept = second_moment(batch, bound=0.02)
    assert 0 < kept.sum() < mask.sum() and not (kept & ~mask).any()
    assert square[kept].mean() <= 0.02
    dropped = mask & ~kept
    assert square[dropped].min() >= square[kept].max()
    one_more = torch.cat([square[kept], square[dropped].min()[None]])
    assert one_more.mean() > 0.02, "no fewer than needed"
    assert torch.equal(second_moment(batch, bound=10.0), mask)


@pytest.mark.parametrize("reject", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "mean", "sum", "max"])
def test_what_is_rejected_and_products_outside_their_bounds_are_counted(reject, level):
    batch, policy, entropies = policy_batch()
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, entropies))
    correction = CorrectionConfig(reject=reject, reject_level=level, reject_bound=0.02, weight="mask", level="product")
    _, sums = PolicyLoss(AlgorithmConfig(), correction)(logprobs, entropy, rows)
    rejected, weights, outside = 0, 0.0, 0
    for part in parts_of(batch):
        own = batch["loss_mask"][part]
        log_weights = (batch["proximal_logprobs"] - batch["logprobs"])[part][own].double()
        if len(log_weights):
            rejected += sum(is_rejected(correction, log_weights.tolist()))
            weight = float(log_weights.sum().exp())
            weights += weight * len(log_weights) * (weight <= 5)
            outside += len(log_weights) * (weight > 5)
    assert sums["left_out_tokens"] == rejected > 0
    assert sums["dropped_tokens"] == outside and float(sums["behavior_weight"]) == pytest.approx(weights, rel=1e-5)


def covariance_of_each(batch):
    """By a loop over the trained tokens, float64."""
    trained = batch["loss_mask"].nonzero()[:, 0].tolist()
    p, a = batch["proximal_logprobs"].tolist(), batch["advantages"].tolist()
    mean_p, mean_a = sum(p[t] for t in trained) / len(trained), sum(a[t] for t in trained) / len(trained)
    return {t: (p[t] - mean_p) * (a[t] - mean_a) for t in trained}


@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_the_highest_covariances_are_chosen(share):
    batch, *_ = policy_batch()
    by_hand = covariance_of_each(batch)
    found = covariances(batch)
    assert all(float(found[t]) == pytest.approx(c, rel=1e-9, abs=1e-12) for t, c in by_hand.items())
    assert (found[~batch["loss_mask"]] == -math.inf).all()
    falling = sorted(by_hand, key=lambda t: -by_hand[t])[: math.ceil(round(share * len(by_hand), 9))]
    assert highest_covariance(batch, share=share).nonzero()[:, 0].tolist() == sorted(falling)


def test_tokens_of_a_covariance_in_the_band_are_drawn_by_what_they_are():
    batch, *_ = policy_batch()
    by_hand = covariance_of_each(batch)
    band = {t for t, c in by_hand.items() if 0.05 <= c <= 0.5}
    all_out = but_covariant(batch, share=1.0, low=0.05, high=0.5)
    assert set((batch["loss_mask"] & ~all_out).nonzero()[:, 0].tolist()) == band and len(band) > 4
    some = but_covariant(batch, share=0.08, low=0.05, high=0.5)
    drawn = set((batch["loss_mask"] & ~some).nonzero()[:, 0].tolist())
    assert drawn < band and len(drawn) == math.ceil(0.08 * len(by_hand))
    # Trajectories in another order lose the same tokens, and other log-probs others.
    order = list(reversed(range(len(batch))))
    turned = batch.select(order)
    lost = turned["input_ids"][turned["loss_mask"] & ~but_covariant(turned, share=0.08, low=0.05, high=0.5)]
    assert sorted(lost.tolist()) == sorted(batch["input_ids"][list(drawn)].tolist())
    draws = set()
    for _ in range(8):
        batch.tokens["logprobs"] = batch["logprobs"] - 0.01
        kept = but_covariant(batch, share=0.08, low=0.05, high=0.5)
        draws.add(tuple((batch["loss_mask"] & ~kept).nonzero()[:, 0].tolist()))
    assert len(draws) > 4


def test_a_log_prob_that_is_no_number_has_no_part_in_the_covariances():
    batch, *_ = policy_batch()
    place = int(batch["loss_mask"].nonzero()[3, 0])
    without = batch.select(range(len(batch)))
    without.tokens["loss_mask"] = batch["loss_mask"].clone()
    without.tokens["loss_mask"][place] = False
    batch.tokens["proximal_logprobs"][place] = math.nan
    assert torch.equal(covariances(batch), covariances(without))


def test_marked_tokens_keep_their_advantage_and_reach_the_loss():
    batch, policy, entropies = policy_batch()
    plain = batch.select(range(len(batch)))
    options = AlgorithmConfig(loss="kl_cov", loss_args={"share": 0.1, "weight": 2.0})
    actor = PolicyActor(None, options, temperature=1.0)
    assert actor.columns_needed == ["proximal_logprobs"]
    actor.compute_advantages(batch)
    PolicyActor(None, AlgorithmConfig(), temperature=1.0).compute_advantages(plain)
    assert torch.equal(batch["advantages"], plain["advantages"])
    assert torch.equal(batch["marked"], highest_covariance(plain, share=0.1))
    assert actor.metrics["policy/marked_share"] == pytest.approx(4 / 35) and batch["marked"].sum() == 4
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, entropies))
    found, _ = PolicyLoss(options)(logprobs, entropy, rows)
    mask, log_ratio = batch["loss_mask"], policy - batch["proximal_logprobs"].double()
    right = -(log_ratio.exp() * batch["advantages"].double())[mask].sum() + 2 * log_ratio[batch["marked"]].abs().sum()
    torch.testing.assert_close(found, right)


NUMBERS = st.sampled_from([0.0, -0.0, 1e-42, 0.1, 0.2, 0.30000001, 0.3, 2.0, 3e19, math.inf, math.nan])


@settings(max_examples=max_examples(60, 200), deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(st.tuples(NUMBERS, st.booleans()), max_size=9), max_size=6), st.floats(0.01, 1.0))
def test_tokens_are_selected_as_by_sorting_all_of_them(sequences, share):
    flat = [token for sequence in sequences for token in sequence]
    values, mask = torch.tensor([v for v, _ in flat]).float(), torch.tensor([m for _, m in flat], dtype=torch.bool)
    tokens = {
        "entropies": values,
        "proximal_logprobs": -values,
        "logprobs": torch.zeros_like(values),
        "loss_mask": mask,
    }
    batch = TrajectoryBatch(tokens, {}, torch.tensor([0, *map(len, sequences)]).cumsum(0))
    trained = mask.nonzero()[:, 0]

    highest = trained[values[trained].argsort(descending=True, stable=True)]
    most = math.ceil(round(share * len(trained), 9))
    assert high_entropy(batch, share=share, level="batch").nonzero()[:, 0].tolist() == sorted(highest[:most].tolist())

    ascending = [n for n in trained[values[trained].argsort(stable=True)].tolist() if math.isfinite(values[n])]
    squares = [Fraction(float(values[n])) ** 2 for n in ascending]
    most = sum(total <= Fraction(share) * n for n, total in enumerate(accumulate(squares), 1))
    assert second_moment(batch, bound=share).nonzero()[:, 0].tolist() == sorted(ascending[:most])


def test_tokens_that_are_left_out_lose_their_advantage_and_stay_in_the_denominator():
    batch, policy, entropies = policy_batch()
    options = AlgorithmConfig(high_entropy_share=0.3, high_entropy_level="sequence", loss="m2po")
    actor = PolicyActor(None, options, temperature=1.0)
    assert actor.columns_needed == ["proximal_logprobs", "entropies"]
    actor.compute_advantages(batch)
    plain = batch.select(range(len(batch)))
    PolicyActor(None, AlgorithmConfig(), temperature=1.0).compute_advantages(plain)
    before = plain["advantages"]
    kept = high_entropy(batch, share=0.3, level="sequence") & second_moment(batch)
    assert torch.equal(batch["advantages"], before.masked_fill(~kept, 0.0)) and 0 < kept.sum()
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, entropies))
    loss, sums = PolicyLoss(options)(logprobs, entropy, rows)
    ratio = (policy - batch["proximal_logprobs"].double()).exp()
    torch.testing.assert_close(loss, -(ratio * before.double())[kept].sum())
    assert sums["tokens"] == batch["loss_mask"].sum()


# -- adaptive entropy, a user's own loss, names -----------------------------------------------------------------------


def test_the_entropy_bonus_follows_its_target():
    options = AlgorithmConfig(entropy_coefficient=0.01, entropy_target=0.5, entropy_step=0.002)
    control, seen = EntropyController(options), []
    for entropy in (0.4, 0.45, 0.9, 0.9, 0.3):
        control.update(entropy)
        again = EntropyController(options)
        again.load_state_dict(control.state_dict())
        control = again
        seen.append((round(control.value, 6), round(control.coefficient, 6)))
    # grows below the target; above it shrinks and is not applied
    assert seen == [(0.012, 0.012), (0.014, 0.014), (0.012, 0.0), (0.01, 0.0), (0.012, 0.012)]
    fixed = EntropyController(AlgorithmConfig(entropy_coefficient=0.01))
    fixed.update(9.0)
    assert fixed.coefficient == 0.01


def test_a_fixed_entropy_bonus_is_the_configs_after_a_resume_with_another():
    control = EntropyController(AlgorithmConfig(entropy_coefficient=0.02))
    control.load_state_dict(EntropyController(AlgorithmConfig(entropy_coefficient=0.01)).state_dict())
    assert control.coefficient == 0.02


def squared(rows, options, *, factor=1.0):
    """Pull u to 1 + A."""
    return factor * (rows.log_ratio.exp() - 1 - rows.advantages).square()


@registry.torch_loss(by_sequence=True)
def summed(rows, options):
    """-A times the sequence's summed log p."""
    lengths = rows.cu_seqlens.diff()
    parts = torch.stack([part.sum() for part in rows.logprobs.split(lengths.tolist())])
    return -rows.advantages * parts.repeat_interleave(lengths)


def test_a_users_own_loss_is_found_by_its_import_path():
    batch, policy, entropies = policy_batch()
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, entropies))
    mask = batch["loss_mask"]
    plain = PolicyLoss(AlgorithmConfig(loss=f"{__name__}:squared", loss_args={"factor": 2.0}))
    loss, _ = plain(logprobs, entropy, rows)
    ratio = (policy - batch["proximal_logprobs"].double()).exp()
    torch.testing.assert_close(loss, 2 * (ratio - 1 - batch["advantages"].double())[mask].square().sum())
    assert not plain.by_sequence
    whole = PolicyLoss(AlgorithmConfig(loss=f"{__name__}:summed"))
    wanted = sum(-batch["advantages"].double()[p][mask[p]].sum() * policy[p][mask[p]].sum() for p in parts_of(batch))
    torch.testing.assert_close(whole(logprobs, entropy, rows)[0], wanted)
    assert whole.by_sequence


def without_a_column(rows, options):
    return rows.columns["bonus"] * rows.logprobs


def test_a_loss_that_raises_is_told_by_its_name_and_its_line(monkeypatch):
    monkeypatch.setitem(registry.LOSSES, "mine", registry.TorchLoss(without_a_column))
    line = without_a_column.__code__.co_firstlineno
    batch, policy, entropies = policy_batch()
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, entropies))
    options = AlgorithmConfig(loss=f"{__name__}:without_a_column")
    options.loss = "mine"
    words = rf"without_a_column \({__file__}:{line}\) raised KeyError: 'bonus' \({__file__}:{line + 1}\); the columns"
    with pytest.raises(ValueError, match=f"algo.loss = 'mine': {words} of its rows are .*advantages"):
        PolicyLoss(options)(logprobs, entropy, rows)


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda rows: (-rows.advantages * rows.ratio)[:, None], r"a tensor \[61, 1\]"),
        (lambda rows: (-rows.advantages * rows.ratio).sum(), r"a tensor \[\]"),
        (lambda rows: (-rows.advantages * rows.ratio)[rows.trained], r"a tensor \[35\]"),
        (lambda rows: None, "NoneType"),
        (lambda rows: 0.5, "float"),
        (lambda rows: (rows.ratio, {}), "tuple"),
    ],
)
def test_a_loss_of_a_wrong_shape_is_refused_with_the_shape_found_and_the_one_wanted(returned, found, monkeypatch):
    batch, policy, entropies = policy_batch()
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, entropies))
    monkeypatch.setitem(registry.LOSSES, "wrong", registry.TorchLoss(lambda rows, options: returned(rows)))
    options = AlgorithmConfig(loss=f"{__name__}:squared")
    options.loss = "wrong"
    words = (
        rf"algo.loss = 'wrong': .*<lambda> \(.*test_losses.py:\d+\) returned {found} for the T = {len(logprobs)} rows"
    )
    with pytest.raises(ValueError, match=f"{words} of a microbatch; must be \\[T\\], each row's own loss"):
        PolicyLoss(options)(logprobs, entropy, rows)


@pytest.mark.parametrize(
    ("decorate", "catalogue", "key"),
    [
        (registry.torch_loss, registry.LOSSES, "loss"),
        (registry.fused_loss, registry.LOSSES, "loss"),
        (registry.estimator, registry.ESTIMATORS, "advantage"),
    ],
)
def test_a_name_that_a_decorator_has_entered_is_a_name_of_the_config(decorate, catalogue, key):
    with pytest.raises(ValueError, match=f"algo.{key} = 'mine': must be one of"):
        AlgorithmConfig(**{key: "mine"})
    entry = decorate("mine")(lambda rows, *_: rows)
    try:
        options = AlgorithmConfig(**{key: "mine"})
        found = find_loss(options.loss, {}) if key == "loss" else find_estimator(options.advantage, {})
        assert found is entry
    finally:
        del catalogue["mine"]
        ENTERED[{"loss": "loss", "advantage": "estimator"}[key]].discard("mine")


def hurried(rows, options):
    """-A log p, less for what took long to say; a line that a dialogue has marked counts twice."""
    return -rows.advantages * rows.logprobs * rows.columns["haste"] * (1 + rows.columns["line"])


def test_tokens_of_a_trajectory_reach_a_users_loss():
    batch, policy, entropies = policy_batch()
    count = len(batch["input_ids"])
    batch.tokens["haste"] = torch.linspace(0.5, 1.5, count)
    batch.tokens["line"] = torch.arange(count) % 2
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, entropies))
    loss, _ = PolicyLoss(AlgorithmConfig(loss=f"{__name__}:hurried"))(logprobs, entropy, rows)
    each = -batch["advantages"].double() * policy * batch["haste"].double() * (1 + batch["line"])
    torch.testing.assert_close(loss, each[batch["loss_mask"]].sum())


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="algo.loss_args = {'cap': 1}: .*are drift=0.01, drift_cap=0.2"):
        find_loss("cpgd", {"cap": 1})
    for name, args, message in (
        ("sapo", {"negative": 0}, "negative = 0: must be above 0"),
        ("m2po", {"bound": -0.04}, "bound = -0.04: must be above 0"),
        ("cpgd", {"drift_cap": -2.0}, "drift_cap = -2.0: must be above 0"),
        ("cpgd", {"drift": "a"}, "drift = 'a': must be at least 0"),
        ("dppo", {"most": 0.5}, "most = 0.5: must be at least 1"),
        ("clip_cov", {"share": 0}, r"share = 0: must be in \(0, 1\]"),
        ("kl_cov", {"weight": -1}, "weight = -1: must be at least 0"),
    ):
        with pytest.raises(ValueError, match=f"algo.loss_args.{message}"):
            find_loss(name, args)
    with pytest.raises(ValueError, match="algo.loss_args = {'cap': 1}: .*the arguments of algo.loss are none"):
        find_loss("ppo_clip", {"cap": 1})
    with pytest.raises(ValueError, match="algo.loss = 'dpo': must be one of ppo_clip"):
        find_loss("dpo", {})


def test_the_config_knows_the_catalogues_names():
    assert set(registry.LOSSES) == set(LOSSES)


def test_a_loss_that_is_no_number_in_an_untrained_row_is_not_read():
    batch, policy, _ = policy_batch()
    rows, (logprobs, entropy) = packed(batch, range(len(batch)), (policy, policy))
    own = logprobs.detach().requires_grad_()
    right = torch.autograd.grad(PolicyLoss(AlgorithmConfig(loss="cpgd"))(own, entropy, rows)[0], own)[0]
    untrained = rows["labels"] < 0
    for name in ("advantages", "logprobs", "proximal_logprobs"):
        rows[name] = rows[name].masked_fill(untrained, float("inf"))
    for loss in ("cpgd", "dppo"):
        found = torch.autograd.grad(PolicyLoss(AlgorithmConfig(loss=loss))(own, entropy, rows)[0], own)[0]
        assert found.isfinite().all() and not found[untrained].any()
        if loss == "cpgd":
            assert torch.equal(found, right)
