"""ppo_loss against autograd of the plain definition in float64; and as the CUDA kernel's source on the CPU."""

import pytest
import torch
from torch.library import opcheck

from megatron_rl.ops import PPO_SUMS, PpoOptions, ppo_loss
from megatron_rl.ops.library import ops as library
from tests.kit import operators as reference

LENGTHS = (700, 0, 1, 1300, 47)
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)

OPTIONS = {
    "ppo": PpoOptions(),
    "clip higher, dual": PpoOptions(clip_low=0.1, clip_high=0.3, dual_clip=1.5),
    "cispo": PpoOptions(mode="cispo"),
    "sapo": PpoOptions(mode="sapo", sapo_negative=2.0),
    "reinforce": PpoOptions(mode="reinforce"),
    "gspo": PpoOptions(sequence_ratio=True, clip_low=0.01, clip_high=0.02),
    "gspo, clamped sequence weight": PpoOptions(
        sequence_ratio=True, behavior="clamp", behavior_by_sequence=True, behavior_low=0.99, behavior_high=1.01
    ),
    "decoupled, mask": PpoOptions(behavior="mask", behavior_low=0.8, behavior_high=1.2),
    "decoupled, clamp": PpoOptions(behavior="clamp", behavior_low=0.9, behavior_high=1.1),
    "k1": PpoOptions(kl_coefficient=0.1, kl_estimator="k1"),
    "k2": PpoOptions(kl_coefficient=0.1, kl_estimator="k2", entropy_coefficient=0.01),
    "k3": PpoOptions(kl_coefficient=0.1),
    "k3, weighted": PpoOptions(kl_coefficient=0.1, kl_weighted=True, mode="reinforce"),
}


def case(dtype=torch.float64, trained=0.7):
    generator = torch.Generator().manual_seed(0)
    count = int(CU_SEQLENS[-1])
    noise = torch.randn(5, count, generator=generator, dtype=dtype)
    logprobs = -noise[0].abs()
    proximal, behavior, ref = (logprobs + 0.3 * noise[i] for i in (1, 2, 3))
    mask = torch.rand(count, generator=generator) < trained
    entropy, weights = torch.rand(2, count, generator=generator, dtype=dtype)
    return logprobs, proximal, behavior, noise[4], mask, ref, entropy, weights


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("trained", "weighted"), [(0.0, False), (0.7, False), (0.7, True)])
def test_loss_and_gradient_equal_autograd(options, trained, weighted):
    logprobs, proximal, behavior, advantages, mask, ref, entropy, weights = case(trained=trained)
    for tensor in (logprobs, proximal, behavior, ref, weights):
        tensor[~mask] = float("-inf")  # what stands in rows that are not trained does not matter
    results = []
    for function in (lambda *a, **k: ppo_loss(*a, **k)[0], reference.ppo_loss):
        own, h = logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
        more = {"ref_logprobs": ref, "entropy": h, "cu_seqlens": CU_SEQLENS, "normalizer": 7.0}
        more |= {"row_weights": weights} if weighted else {}
        loss = function(own, proximal, behavior, advantages, mask, options, **more)
        gradients = torch.autograd.grad(2 * loss, (own, h), allow_unused=True, materialize_grads=True)
        results.append((loss.detach(), gradients[0].masked_fill(~mask, 0.0), gradients[1]))
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-12)


def test_statistics_by_hand():
    """Five rows: inside, clipped above, clipped below, dropped by its behaviour weight, not trained."""
    ratio = torch.tensor([1.1, 1.5, 0.5, 1.0, 9.0])
    weight = torch.tensor([1.0, 1.0, 0.5, 8.0, 1.0])
    proximal = torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0])
    options = PpoOptions(behavior="mask", behavior_high=5.0, kl_coefficient=1.0, kl_estimator="k1")
    loss, sums = ppo_loss(
        proximal + ratio.log(),
        proximal,
        proximal - weight.log(),
        advantages,
        torch.tensor([True, True, True, True, False]),
        options,
        ref_logprobs=proximal,
        entropy=torch.full((5,), 0.5),
    )
    log = ratio[:4].double().log()
    expected = {
        "loss": -1.1 - 1.2 + 0.5 * 0.8 + log.sum(),
        "tokens": 4,
        "clipped_tokens": 2,
        "dual_clipped_tokens": 0,
        "dropped_tokens": 1,
        "ratio": 4.1,
        "ratio_deviation": 0.1 + 0.5 + 0.5,
        "approx_kl": -log.sum(),
        "approx_kl_k2": (log.square() / 2).sum(),
        "approx_kl_k3": (log.exp() - 1 - log).sum(),
        "behavior_weight": 1 + 1 + 0.5,
        "behavior_mismatch": weight[:4].double().log().abs().sum(),
        "behavior_log_ratio": weight[:4].double().log().sum(),
        "reference_kl": log.sum(),
        "entropy": 2.0,
        "logprobs": (proximal[:4].double() + log).sum(),
        "clipped_logprobs": (proximal[1:3].double() + log[1:3]).sum(),
        "bounded_tokens": 0,
        "not_finite": 0,
        "squared_gradient": (1 - 1.1) ** 2 + 1 + 1 + 1,
    }
    assert tuple(expected) == PPO_SUMS
    for name, value in expected.items():
        torch.testing.assert_close(
            float(sums[name]), float(value), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert float(loss) == pytest.approx(float(sums["loss"]), rel=1e-6)


def test_without_proximal_logprobs_the_ratio_is_one():
    logprobs, _, _, advantages, mask, *_ = case()
    own = logprobs.requires_grad_()
    loss, sums = ppo_loss(own, None, None, advantages, mask, PpoOptions())
    loss.backward()
    torch.testing.assert_close(own.grad, (-advantages).masked_fill(~mask, 0.0))
    assert sums["ratio_deviation"] == 0 and sums["ratio"] == mask.sum()


def test_numbers_that_are_none_are_counted():
    logprobs, proximal, behavior, advantages, mask, *_ = case()
    mask[:3] = True
    behavior[0] = float("-inf")
    logprobs[1], proximal[1] = float("-inf"), float("-inf")
    loss, sums = ppo_loss(logprobs, proximal, behavior, advantages, mask, PpoOptions(behavior="clamp"))
    assert sums["not_finite"] == 2 and loss.isnan()


INF, NAN = float("inf"), float("nan")
WITHOUT_A_FINITE_WEIGHT = {  # log p(proximal), log p(behaviour), and the weight by mask and by clamp to [0.5, 2]
    "more likely than 0": (-1.0, -INF, 0.0, 2.0),
    "less likely than infinity": (-1.0, INF, 0.0, 0.5),
    "impossible before": (-INF, -1.0, 0.0, 0.5),
    "behaviour unknown": (-1.0, NAN, 0.0, 0.0),
    "proximal unknown": (NAN, -1.0, 0.0, 0.0),
    "impossible in both": (-INF, -INF, 0.0, 0.0),
    "far": (-1.0, -1000.0, 0.0, 2.0),
}


@pytest.mark.parametrize("function", [ppo_loss, reference.ppo_loss])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("behavior", ["mask", "clamp"])
@pytest.mark.parametrize("row", WITHOUT_A_FINITE_WEIGHT.values(), ids=WITHOUT_A_FINITE_WEIGHT)
def test_an_infinite_weight_is_bounded_and_one_that_is_nan_drops_its_token(row, behavior, dtype, function):
    """The second token is an ordinary one. -A log p: the slope is the weight."""
    before, sampled, *weights = row
    weight = weights[behavior == "clamp"]
    own = torch.full((2,), -1.0, dtype=dtype, requires_grad=True)
    proximal, sampler = torch.tensor([[before, -1.0], [sampled, -1.0]], dtype=dtype)
    options = PpoOptions(mode="reinforce", behavior=behavior, behavior_low=0.5, behavior_high=2.0)
    found = function(own, proximal, sampler, torch.ones(2).to(dtype), torch.ones(2).bool(), options)
    loss, sums = found if isinstance(found, tuple) else (found, None)
    assert torch.autograd.grad(loss, own)[0].tolist() == [-weight, -1.0] and loss.item() == weight + 1
    if sums is not None:
        counted = int(sampled != -1000.0)
        assert sums["dropped_tokens"] == 1 and sums["not_finite"] == counted and sums["behavior_weight"] == weight + 1


SEQUENCES_WITHOUT_A_FINITE_WEIGHT = {  # log weights, and the tokens' weights by clamp
    "one is infinite": ((INF, 0.0), (2.0, 2.0)),
    "one is infinitely small": ((0.0, -INF), (0.5, 0.5)),
    "both": ((INF, -INF, 0.0), (0.0, 0.0, 0.0)),
    "one is unknown": ((NAN, 0.1, 0.3), (0.0, 0.2, 0.2)),  # of the others the mean
    "all are unknown": ((NAN, NAN), (0.0, 0.0)),
}


@pytest.mark.parametrize("function", [ppo_loss, reference.ppo_loss])
@pytest.mark.parametrize("behavior", ["mask", "clamp"])
@pytest.mark.parametrize("case", SEQUENCES_WITHOUT_A_FINITE_WEIGHT.values(), ids=SEQUENCES_WITHOUT_A_FINITE_WEIGHT)
def test_an_infinite_weight_makes_its_sequences_weight_infinite(case, behavior, function):
    logs, weights = (torch.tensor(each, dtype=torch.float64) for each in case)
    if behavior == "mask":
        weights = weights.masked_fill((weights == 0.5) | (weights == 2.0), 0.0)
    weights = torch.where(weights == 0.2, torch.tensor(0.2).double().exp(), weights)
    own = torch.full((len(logs) + 1,), -1.0, dtype=torch.float64, requires_grad=True)
    proximal = own.detach().clone()
    sampler = proximal - torch.cat([logs, torch.zeros(1)])
    bounds, ones = torch.tensor([0, len(logs), len(logs) + 1]), torch.ones(len(own))
    options = PpoOptions(
        mode="reinforce", behavior=behavior, behavior_by_sequence=True, behavior_low=0.5, behavior_high=2.0
    )
    found = function(own, proximal, sampler, ones.double(), ones.bool(), options, cu_seqlens=bounds)
    loss = found[0] if isinstance(found, tuple) else found
    torch.testing.assert_close(torch.autograd.grad(loss, own)[0], -torch.cat([weights, torch.ones(1).double()]))


WILD = (0.0, 19.5, 20.5, 100.0, 1000.0, -19.5, -20.5, -100.0, -1000.0)


def wild_case(dtype):
    """Log ratios to the proximal, behaviour and reference policy of every size together, each with both signs of A."""
    logs = torch.cartesian_prod(*[torch.tensor(WILD, dtype=dtype)] * 3, torch.tensor([-1.0, 1.0], dtype=dtype))
    own = torch.full((len(logs),), -1.0, dtype=dtype)
    proximal, ref = own - logs[:, 0], own - logs[:, 2]
    behavior, entropy = proximal - logs[:, 1], torch.full_like(own, 0.5)
    bounds = torch.arange(len(logs) + 1)  # sequences of one token: what is by sequence is bounded there
    return logs, own, proximal, behavior, ref, entropy, bounds


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_token_of_a_wild_log_ratio_leaves_loss_and_gradient_finite(options, dtype):
    logs, own, proximal, behavior, ref, entropy, bounds = wild_case(dtype)
    mask, found = torch.ones(len(logs)).bool(), []
    for function, to in ((ppo_loss, dtype), (reference.ppo_loss, torch.float64)):
        leaf, *columns = (column.to(to) for column in (own, proximal, behavior, logs[:, 3]))
        more = {"ref_logprobs": ref.to(to), "entropy": entropy.to(to), "cu_seqlens": bounds}
        result = function(leaf.requires_grad_(), *columns, mask, options, **more)
        loss, sums = result if function is ppo_loss else (result, {})
        found.append((loss, torch.autograd.grad(loss, leaf)[0], sums))
    (loss, gradient, sums), (right, right_gradient, _) = found
    assert gradient.isfinite().all() and loss.isfinite() and sums["not_finite"] == 0
    assert all(value.isfinite() for value in sums.values())
    torch.testing.assert_close(gradient.double(), right_gradient, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=1e-12)
    beyond = [logs[:, 0].abs() > 20]
    beyond += [logs[:, 1].abs() > 20] if options.behavior != "off" else []
    beyond += [logs[:, 2] < -20] if options.kl_coefficient and options.kl_estimator == "k3" else []
    assert sums["bounded_tokens"] == torch.stack(beyond).any(0).sum()


def test_what_overflows_where_it_is_stored_is_counted():
    """The CPU adds in double, and a float is what the gradient becomes."""
    own = torch.full((3,), -1.0)
    proximal = own - torch.tensor([15.0, 0.0, 15.0])
    _, sums = ppo_loss(own, proximal, None, torch.tensor([-1e34, -1e34, 1.0]), torch.ones(3).bool(), PpoOptions())
    assert sums["not_finite"] == 1


def mean_slope(own, proximal, advantages, mask, options):
    """GSPO as its first formula has it: the ratio of the sequence with the gradient of the mean. float64."""
    log_ratio = reference.mean_of_sequence((own - proximal).masked_fill(~mask, 0.0), mask, CU_SEQLENS)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return torch.maximum(-advantages * ratio, -advantages * clipped).masked_fill(~mask, 0.0).sum()


def test_gspo_is_the_papers_where_a_sequence_has_one_advantage():
    logprobs, proximal, _, advantages, mask, *_ = case()
    advantages = advantages[: len(LENGTHS)].repeat_interleave(torch.tensor(LENGTHS))
    found = []
    for function in (lambda *a: ppo_loss(*a[:2], None, *a[2:], cu_seqlens=CU_SEQLENS)[0], mean_slope):
        own = logprobs.clone().requires_grad_()
        loss = function(own, proximal, advantages, mask, OPTIONS["gspo"])
        found.append((loss.detach(), torch.autograd.grad(loss, own)[0]))
    assert found[0][1].count_nonzero() > 0
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-12)


def test_gspo_moves_each_token_by_its_own_advantage_and_weight():
    """A critic's advantages add up to 0 over a sequence, and one token's behaviour weight drops it."""
    ratio = torch.tensor([1.1, 1.0, 0.95, 1.0], dtype=torch.float64)
    own = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    proximal = own.detach() - ratio.log()
    advantages, bounds = torch.tensor([1.0, 0.0, 0.5, -1.0], dtype=torch.float64), torch.tensor([0, 4])
    behavior = proximal - torch.tensor([1.0, 1.0, 9.0, 1.0], dtype=torch.float64).log()
    options = PpoOptions(sequence_ratio=True, behavior="mask", behavior_high=2.0)
    everything = torch.ones(4).bool()
    loss, _ = ppo_loss(own, proximal, behavior, advantages, everything, options, cu_seqlens=bounds)
    gradient = torch.autograd.grad(loss, own)[0]
    expected = -ratio.log().mean().exp() * torch.tensor([1.0, 0.0, 0.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)


def test_gspo_clips_a_token_by_its_sequence_and_the_sign_of_its_own_advantage():
    own = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    proximal, bounds = own.detach() - 1.0, torch.tensor([0, 4])
    advantages = torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=torch.float64)
    options = PpoOptions(sequence_ratio=True)
    loss, sums = ppo_loss(own, proximal, None, advantages, torch.ones(4).bool(), options, cu_seqlens=bounds)
    gradient = torch.autograd.grad(loss, own)[0]
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.0, 0.0, 2.0], dtype=torch.float64) * torch.e)
    assert sums["clipped_tokens"] == 2


def test_a_small_divergence_keeps_its_digits():
    own, ref = torch.tensor([-1.0]), torch.tensor([-1.0 - 2.0**-12])
    _, sums = ppo_loss(
        own, None, None, torch.zeros(1), torch.ones(1).bool(), PpoOptions(kl_coefficient=1.0), ref_logprobs=ref
    )
    d = 2.0**-12
    assert float(sums["reference_kl"]) == pytest.approx(d * d / 2 - d**3 / 6, rel=1e-6)


def test_bits_repeat_with_any_number_of_threads():
    logprobs, proximal, behavior, advantages, mask, ref, entropy, weights = case(torch.float32)
    arguments = (logprobs, proximal, behavior, advantages, mask, ref, entropy, weights, None, PpoOptions().packed(1.0))
    once, threads = library.ppo_loss(*arguments), torch.get_num_threads()
    torch.set_num_threads(2)
    again = library.ppo_loss(*arguments)
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.slow
def test_obeys_torchs_rules_and_compiles_without_a_break():
    logprobs, proximal, behavior, advantages, mask, ref, entropy, weights = case(torch.float32)
    own, h = logprobs.requires_grad_(), entropy.requires_grad_()
    options = OPTIONS["k2"]
    arguments = (own, proximal, behavior, advantages, mask, ref, h, weights, None, options.packed(1.0))
    opcheck(library.ppo_loss.default, arguments)

    def loss(own):
        return ppo_loss(own, proximal, behavior, advantages, mask, options, ref_logprobs=ref, entropy=h)[0]

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(own), own)[0], torch.autograd.grad(loss(own), own)[0])


def test_bad_input_is_named():
    logprobs, proximal, behavior, advantages, mask, *_ = case()
    with pytest.raises(ValueError, match="ref_logprobs is missing"):
        ppo_loss(logprobs, proximal, behavior, advantages, mask, OPTIONS["k3"])
    with pytest.raises(ValueError, match="cu_seqlens is missing"):
        ppo_loss(logprobs, proximal, behavior, advantages, mask, OPTIONS["gspo"])
    with pytest.raises(ValueError, match="advantages is torch.float32"):
        ppo_loss(logprobs, proximal, behavior, advantages.float(), mask, OPTIONS["ppo"])
    with pytest.raises(ValueError, match="mask torch.float64"):
        ppo_loss(logprobs, proximal, behavior, advantages, mask.double(), OPTIONS["ppo"])
    with pytest.raises(ValueError, match="PpoOptions.mode is ppo"):
        PpoOptions(mode="ppo")
