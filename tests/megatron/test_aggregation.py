"""Every aggregation and every loss by sequence on both backends, against float64 autograd over transformers' model."""

from functools import cache

import pytest
import torch
from gathered import as_hf_tensors, record_gradients, relative_error
from test_fsdp_referee import make_fsdp
from transformers import AutoModelForCausalLM

from megatron_rl import parallel
from megatron_rl.algo.actor import PolicyActor
from megatron_rl.algo.reward_shaping import RewardShaper
from megatron_rl.batch import exchange
from megatron_rl.config import AlgorithmConfig, CorrectionConfig, RewardShapingConfig
from megatron_rl.run.step_metrics import batch_metrics
from tests.kit.examples import IS_THOROUGH
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_model, share_of
from tests.kit.ranks import run_ranks
from tests.unit.loss_definitions import defined_loss

TEMPERATURE, TOLERANCE = 0.7, 1e-5
KL = {"kl_coefficient": 0.05, "entropy_coefficient": 0.1}
CASES = {
    "token mean": (AlgorithmConfig(loss="dppo", loss_args={"bound": 0.01}, kl_estimator="unbiased", **KL), {}),
    "sequence mean": (AlgorithmConfig(aggregation="sequence_mean", dual_clip=1.2, **KL), {}),
    "sequence sum": (AlgorithmConfig(aggregation="sequence_sum", loss="sapo", kl_estimator="k2", **KL), {}),
    "constant": (AlgorithmConfig(aggregation="constant", aggregation_length=9, loss="cispo", **KL), {}),
    "by sequence: gspo": (
        AlgorithmConfig(aggregation="sequence_mean", loss="gspo", **KL),
        {"weight": "clamp", "level": "sequence", "low": 0.5, "high": 1.2},
    ),
    "by sequence: weights of a loss in torch": (
        AlgorithmConfig(aggregation="sequence_sum", loss="cpgd", loss_args={"drift": 0.5}, **KL),
        {"weight": "mask", "level": "sequence", "low": 0.5, "high": 1.2},
    ),
}
CASES_OF_FSDP = ("token mean",)
"""The actor weighs losses in one place for both backends: enough for `make test`."""


def batch():
    """Seven trajectories, one of them without a trained token; ratios and weights about 1."""
    found = make_batch(lengths=(5, 12, 7, 12, 3, 9, 8))
    generator = torch.Generator().manual_seed(7)
    noise = 0.2 * torch.randn(3, len(found["input_ids"]), generator=generator)
    near = -torch.full_like(found["logprobs"], 97.0).log()  # of a random policy over 97 tokens
    columns = dict(zip(("logprobs", "proximal_logprobs", "ref_logprobs"), near + noise, strict=True))
    found.tokens |= columns
    found.tokens["loss_mask"][found.cu_seqlens[4] : found.cu_seqlens[5]] = False
    return found


def updates(backend, folder):
    """Return the entropies of the rank's share; and for each case the update's statistics and gradient."""
    options = {"clip_grad": 0.0}
    if backend == "fsdp":
        engine = make_fsdp(folder, **options)
    else:
        engine = make_engine(folder, LAYOUTS["tp2_pp2"][1], tokens_per_microbatch=24, **options)
    results = {"entropies": engine.eval().forward(share_of(batch(), engine), temperature=TEMPERATURE, entropy=True)}
    engine.train()
    gradients = record_gradients(engine)
    for name in CASES if backend == "megatron" or IS_THOROUGH else CASES_OF_FSDP:
        algo, correction = CASES[name]
        engine.load(folder)
        engine.reset_optimizer(10)
        arguments = {"correction": CorrectionConfig(**correction), "reference": engine}
        (stats,) = PolicyActor(engine, algo, temperature=TEMPERATURE, **arguments).update([share_of(batch(), engine)])
        results[name] = stats, as_hf_tensors(engine, gradients[-1])
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_model("llama", path, layers=2)
    return path


@cache
def ranks_of(backend, folder):
    return run_ranks({"megatron": 4, "fsdp": 2}[backend], updates, backend, folder)


def float64_policy(folder):
    """transformers' model, the batch, and the log-prob and entropy of each token, 0 for a sequence's first."""
    model, data = AutoModelForCausalLM.from_pretrained(folder).double(), batch()
    logprobs, entropies = [], []
    for a, b in zip(data.cu_seqlens[:-1].tolist(), data.cu_seqlens[1:].tolist(), strict=True):
        ids = data["input_ids"][a:b]
        distribution = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        first = torch.zeros(1, dtype=torch.float64)
        logprobs += [first, distribution[:-1].gather(-1, ids[1:, None])[:, 0]]
        entropies += [first, -(distribution.exp() * distribution).sum(-1)[:-1]]
    return model, data, torch.cat(logprobs), torch.cat(entropies)


@cache
def float64_update(name, folder):
    """Loss, gradient and number of tokens."""
    options, correction = CASES[name]
    model, data, logprobs, entropies = float64_policy(folder)
    loss = defined_loss(options, CorrectionConfig(**correction), data, logprobs, entropies)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}, int(data["loss_mask"].sum())


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(
            backend, name, marks=() if backend == "megatron" or name in CASES_OF_FSDP else pytest.mark.thorough
        )
        for backend in ("megatron", "fsdp")
        for name in CASES
    ],
)
def test_update_is_that_of_the_definition_in_float64(backend, name, folder):
    loss, gradients, tokens = float64_update(name, folder)
    ranks = [results[name] for results in ranks_of(backend, folder)]
    stats, found = ranks[0]
    assert all(other[0].loss == stats.loss for other in ranks), "every rank reports the same step"
    assert stats.sums["tokens"] == tokens and stats.weight == (tokens if name == "token mean" else 6)
    assert stats.loss == pytest.approx(loss, rel=TOLERANCE, abs=1e-6)
    for parameter, gradient in gradients.items():
        error = relative_error(found[parameter], gradient)
        assert error <= TOLERANCE, f"{parameter} differs by {error:.1e}"


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_entropies_are_those_of_float64(backend, folder):
    _, data, _, entropies = float64_policy(folder)
    data.tokens["entropies"] = entropies.detach().masked_fill(~data["loss_mask"], 0.0).float()
    replicas = {"megatron": 1, "fsdp": 2}[backend]
    for rank, results in enumerate(ranks_of(backend, folder)):
        share = data.select(range(rank % replicas, len(data), replicas))
        torch.testing.assert_close(results["entropies"], share["entropies"], rtol=1e-5, atol=1e-5)


def advantages_of_a_step(layout):
    """Each rollout rank has its own prompts; all trajectories are compared, and each replica has its share of them."""
    groups = parallel.start(LAYOUTS[layout][1], seed=1)
    heads, own = groups.data.size, None
    if groups.is_rollout_rank:
        mine = [i for i, prompt in enumerate((0, 0, 1, 1, 2, 2)) if prompt * heads // 3 == groups.data.rank]
        own = compared_batch().select(mine)
    step = exchange.share_out(own, groups, updates=2, seed=0)
    found, metrics = [], []
    for options, shaping in COMPARED:
        shaper = RewardShaper(RewardShapingConfig(**shaping), options, longest_reply=6)
        actor = PolicyActor(None, options, temperature=1.0, shaper=shaper, reference=object())
        for _ in range(2):  # what adapts from step to step does so alike
            actor.compute_advantages(step)
        found.append(step.own().select(range(len(step.own()))))  # the columns as they are now
        metrics.append(actor.metrics | batch_metrics(step, version=3))
    return found, metrics


def compared_batch():
    """With columns of the passes that a step may make before its updates, and numbers that several tokens share."""
    batch, generator = make_batch(), torch.Generator().manual_seed(5)
    batch.sequences["number"] = torch.arange(len(batch))
    batch.sequences["sample"] = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    for name in ("proximal_logprobs", "ref_logprobs", "cold_logprobs", "values", "entropies"):
        batch.tokens[name] = torch.randint(-8, 0, (len(batch["logprobs"]),), generator=generator) / 7
    # Dialogues of two agents: every fourth token is another's, and says the same.
    batch.tokens["input_ids"] = torch.zeros_like(batch["input_ids"])
    others = (torch.arange(len(batch["loss_mask"])) - batch.cu_seqlens[batch.sequence_ids]) % 4 == 0
    batch.tokens["loss_mask"] = batch["loss_mask"] & ~others
    batch["versions"] = torch.where(batch["loss_mask"], 0, -1)
    batch.sequences["agent"] = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    batch.tokens["turn_rewards"] = torch.rand(len(batch["loss_mask"]), generator=generator) * batch["loss_mask"]
    batch.sequences["rewards"] = batch.sums_of_tokens(batch["turn_rewards"])
    batch.sequences["part/a"] = torch.arange(len(batch)).float().sin()
    batch.sequences["part/b"] = batch["rewards"] - batch["part/a"]
    batch.tokens["entropies"] = batch["entropies"].round()  # so few that the last one kept is one of several like it
    return batch


KL_IN_REWARD = {"kl_coefficient": 0.1, "kl_in": "reward", "kl_target": 0.05}
COMPARED = (
    (AlgorithmConfig(advantage="reinforce++"), {}),
    (AlgorithmConfig(advantage_std="batch"), {"overlong_buffer": 4, "running": "mean_std"}),
    (AlgorithmConfig(advantage="reinforce++-baseline", **KL_IN_REWARD), {"per_token": True}),
    (AlgorithmConfig(advantage="gae", advantage_std="group"), {}),
    (AlgorithmConfig(advantage="opo", high_entropy_share=0.3), {}),
    (AlgorithmConfig(advantage="rloo", loss="m2po"), {}),
    (AlgorithmConfig(advantage="gdpo"), {}),
    (AlgorithmConfig(advantage="otb", positive_weight=0.1, positive_reward=0.0), {}),
    (AlgorithmConfig(advantage="turn_norm", advantage_args={"discount": 0.9}), {"per_token": True}),
    (AlgorithmConfig(advantage="gigpo"), {"running": "std"}),
    (AlgorithmConfig(advantage="agent_norm"), {}),
    (AlgorithmConfig(loss="clip_cov", loss_args={"share": 0.1, "low": 0.01}), {}),
    (AlgorithmConfig(loss="kl_cov", loss_args={"share": 0.2}), {}),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(layout, marks=pytest.mark.thorough) for layout in ("tp2_dp2", "tp2_pp2_dp2"))]
)
def test_a_batch_is_that_of_all_data_parallel_ranks_to_the_last_bit(layout):
    ((one, metrics),) = run_ranks(1, advantages_of_a_step, "1")
    assert all(batch["advantages"].count_nonzero() > 5 for batch in one)
    assert all("policy/high_entropy_share" in metrics[4] and "policy/selected_share" in metrics[5] for _ in one)
    for found, same in run_ranks(LAYOUTS[layout][0], advantages_of_a_step, layout):
        assert same == metrics
        for ours, alone in zip(found, one, strict=True):
            expected = alone.select(ours["number"].tolist())
            assert 0 < len(ours) < len(alone)
            assert torch.equal(ours["advantages"], expected["advantages"])
            for name in ("marked", "positive_weights"):
                assert name not in ours or torch.equal(ours[name], expected[name])
