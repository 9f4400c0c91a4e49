"""Several updates in one step: one policy version, and proximal log-probs that are measured or interpolated."""

import pytest
import torch

from megatron_rl.algo.actor import PolicyActor
from megatron_rl.config import AlgorithmConfig, CorrectionConfig
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_model
from tests.kit.ranks import run_ranks

UPDATES, LOW, HIGH = 3, 0.8, 1.25


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("several") / "model"
    make_model("qwen3", path, layers=2)
    return path


def actor_of(folder, **options):
    engine = make_engine(folder, LAYOUTS["1"][1], lr=1e-5, tokens_per_microbatch=4096)
    return PolicyActor(engine, AlgorithmConfig(), temperature=0.8, correction=CorrectionConfig(**options))


def stale_batch(actor):
    """A batch of which each token is of one of the last three versions, by which its log-prob is; steps between them
    have UPDATES updates."""
    batch = make_batch(lengths=(9, 14, 11, 20, 17, 12))
    age = torch.arange(len(batch["input_ids"])) % 3
    for version in range(3):
        logprobs = actor.engine.forward(batch, temperature=actor.temperature)
        sampled = age == 2 - version
        batch.tokens["logprobs"] = torch.where(sampled, logprobs, batch["logprobs"])
        batch["versions"] = torch.where(sampled & batch["loss_mask"], version, batch["versions"])
        if version < 2:
            actor.update([batch] * UPDATES)
    return batch, age


def shares_of(batch):
    """Every update has the whole batch, so that the policy moves evenly, as far as it does."""
    return [batch.select(range(len(batch))) for _ in range(UPDATES)]


def expected_loss(logprobs, share, proximal):
    """Decoupled PPO of one update in float64; each argument is of all tokens."""
    trained = share["loss_mask"]
    logprobs, proximal, behavior, advantage = (
        column[trained].double() for column in (logprobs, proximal, share["logprobs"], share["advantages"])
    )
    ratio, weight = (logprobs - proximal).exp(), (proximal - behavior).exp()
    weight = torch.where((weight >= LOW) & (weight <= HIGH), weight, 0.0)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return float(-(weight * surrogate).mean())


def interpolated(folder):
    actor = actor_of(folder, proximal="loglinear", weight="mask", low=LOW, high=HIGH)
    batch, age = stale_batch(actor)
    batch.tokens["age"] = age
    shares = shares_of(batch)
    before = [actor.engine.forward(share, temperature=0.8) for share in shares]
    actor.compute_logprobs(shares)
    found = []
    for done, share in enumerate(shares):
        logprobs = actor.engine.forward(share, temperature=0.8)
        # Of the updates since the token was sampled, those that lie before the step: none since, and it is this policy.
        ages = UPDATES * share["age"].double()
        alpha = ages / (ages + done) if done else torch.ones(len(ages)).double()
        proximal = share["logprobs"].double() + alpha * (logprobs - share["logprobs"]).double()
        stats = actor.update([share])[0]
        measured = (before[done] - share["logprobs"])[share["loss_mask"]], share["age"][share["loss_mask"]]
        errors = {}
        for name, guess in {"interpolated": proximal, "behaviour": share["logprobs"], "trained": logprobs}.items():
            of_old = share["loss_mask"] & (share["age"] > 0)
            errors[name] = float((guess - before[done])[of_old].abs().mean())
        found.append((stats.loss, expected_loss(logprobs, share, proximal), errors, measured))
    return found


@pytest.mark.slow
def test_interpolated_proximal_policy_is_the_formula_in_every_update_of_the_step(folder):
    found = run_ranks(1, interpolated, folder)[0]
    for loss, expected, _, (moved, age) in found:
        assert loss == pytest.approx(expected, rel=1e-4)
        assert moved[age == 0].abs().max() < 1e-5 and moved[age > 0].abs().mean() > 1e-2
    assert found[0][2]["interpolated"] == pytest.approx(0, abs=1e-6), "before the first update it is the policy itself"
    for _, _, errors, _ in found[1:]:
        assert errors["interpolated"] < 0.4 * min(errors["behaviour"], errors["trained"])


def recomputed(folder):
    actor = actor_of(folder, weight="mask", low=LOW, high=HIGH)
    batch, _ = stale_batch(actor)
    shares = shares_of(batch)
    before = [actor.engine.forward(share, temperature=0.8) for share in shares]
    passes, forward = [], actor.engine.forward
    actor.engine.forward = lambda share, **options: (passes.append(len(share)), forward(share, **options))[1]
    actor.compute_logprobs(shares)
    count, found = len(passes), []
    for share, proximal in zip(shares, before, strict=True):
        logprobs = forward(share, temperature=0.8)
        stats = actor.update([share])[0]
        found.append((stats.loss, expected_loss(logprobs, share, proximal), stats.mean("ratio_deviation")))
    return count, found, actor.engine.get_version()


@pytest.mark.slow
def test_recomputed_proximal_policy_costs_the_first_update_no_pass(folder):
    passes, found, _ = run_ranks(1, recomputed, folder)[0]
    assert passes == UPDATES - 1
    for loss, expected, _ in found:
        assert loss == pytest.approx(expected, rel=1e-4)
    deviations = [deviation for _, _, deviation in found]
    assert deviations[0] == 0 and min(deviations[1:]) > 1e-3
