"""What else an update promises: recomputation, schedules, idle ranks, frozen models. Layouts: test_theorems.py."""

import functools

import pytest
import torch

from megatron_rl import parallel
from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import AlgorithmConfig
from megatron_rl.engine import schedule
from megatron_rl.ops import gather_logprobs
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_groups, make_model, share_of
from tests.kit.ranks import run_each, run_ranks

# What a layout does to rows that are computed once is seen on context ranks; test_theorems.py has trees in all layouts.
OTHERS = [pytest.param(layout, marks=pytest.mark.thorough) for layout in ("tp2_sp", "pp2", "dp2", "cp2_tp2_pp2")]


def user_loss(logits, data):
    """A mean over trained rows from logits, with the guide's rolled labels."""
    logprobs = gather_logprobs(logits, torch.roll(data["input_ids"], shifts=-1, dims=-1))
    loss = torch.where(data["loss_mask"].bool(), -logprobs * data["advantages"], 0.0)
    return loss.sum() / data["loss_mask"].count_nonzero()


def user_weight(data):
    return data["loss_mask"].count_nonzero()


def two_updates(folder, layout, batch, kind, tokens_per_microbatch=64, options=None):
    engine = make_engine(folder, LAYOUTS[layout][1], tokens_per_microbatch=tokens_per_microbatch, **(options or {}))
    engine.train()
    if kind == "logits":
        step = functools.partial(engine.train_batch, loss_fn=user_loss, loss_weight_fn=user_weight)
    else:
        loss = PolicyLoss(AlgorithmConfig(entropy_coefficient=0.01, kl_coefficient=0.0))
        step = functools.partial(engine.train_batch, loss_fn=LogprobLoss(loss, temperature=0.7))
    stats = [step(share_of(batch, engine)) for _ in range(2)]
    engine.step_lr_scheduler()
    return stats, {name: tensor.clone() for name, tensor in engine.hf_tensors()}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3_tied_one_kv_head", folder, layers=2)
    return folder


def assert_same_updates(result, expected):
    (stats, weights), (stats_one, weights_one) = result, expected
    for ours, one in zip(stats, stats_one, strict=True):
        assert ours.applied and ours.weight == one.weight
        assert ours.loss == pytest.approx(one.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        assert ours.sums == pytest.approx(one.sums, rel=1e-4, abs=1e-3)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, weights_one[name], rtol=0, atol=2e-5, msg=name)


def shared_prompts(folder, layout, cases):
    """Return by case, which is (kind, tokens per microbatch, whether prompts are shared), the updates and the number of
    rows that were computed."""
    counted, results, groups = [], {}, parallel.start(LAYOUTS[layout][1], seed=1)
    engine_rows = schedule.own_rows
    schedule.own_rows = lambda m, *a, **k: counted.append(len(m.computed)) or engine_rows(m, *a, **k)
    for kind, tokens, share in cases:
        counted.clear()
        options = {"share_prompts": share, "groups": groups}
        results[kind, tokens, share] = two_updates(folder, layout, make_groups(), kind, tokens, options), sum(counted)
    return results


@functools.cache
def all_shared_prompts(folder, layout):
    """All cases one after the other on the ranks of the layout; what the first rank found."""
    cases = [(kind, tokens, True) for kind in KINDS for tokens in BUDGETS]
    if layout == "1":
        cases += [(kind, BUDGETS[-1], False) for kind in KINDS]
    return run_ranks(LAYOUTS[layout][0], shared_prompts, folder, layout, cases)[0]


KINDS = ("logits", "logprobs")
BUDGETS = (16, 200)
"""At 16 families are cut, and their parts compute the prompt again."""


@pytest.mark.slow
@pytest.mark.parametrize("tokens", BUDGETS)
@pytest.mark.parametrize("layout", ["1", "cp2", *OTHERS])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_computed_once_give_the_same_update(kind, layout, tokens, model_folder):
    plain, all_rows = all_shared_prompts(model_folder, "1")[kind, 200, False]
    result, rows = all_shared_prompts(model_folder, layout)[kind, tokens, True]
    assert_same_updates(result, plain)
    if layout == "1":
        assert rows < (0.7 if tokens == 200 else 0.95) * all_rows


def logprobs_of_an_update(folder, layout, by_row):
    engine = make_engine(folder, LAYOUTS[layout][1])
    share = share_of(make_groups(), engine)
    before = engine.eval().forward(share, temperature=0.7)
    loss = LogprobLoss(PolicyLoss(AlgorithmConfig()), temperature=0.7, by_row=by_row)
    return before, engine.train().train_batch(share, loss).logprobs


@pytest.mark.parametrize("layout", ["1", "cp2", OTHERS[-1]])
def test_an_update_tells_the_logprobs_it_was_computed_from(layout, model_folder):
    cases = {by_row: (model_folder, layout, by_row) for by_row in (False, True)}
    for ranks in run_each(LAYOUTS[layout][0], logprobs_of_an_update, cases).values():
        for before, found in ranks:
            assert before.count_nonzero() > 10
            torch.testing.assert_close(found, before, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_rank_without_trajectories_keeps_step(model_folder):
    alone = make_batch(lengths=(9,))
    one = run_ranks(1, two_updates, model_folder, "1", alone, "logits")[0]
    two = run_ranks(2, two_updates, model_folder, "dp2", alone, "logits")[0]
    assert_same_updates(two, one)


def softmax_of_split_logits(folder):
    engine = make_engine(folder, LAYOUTS["tp2"][1])
    try:
        engine.forward(make_batch(), lambda logits, rows: logits.log_softmax(-1)[:, 0])
    except ValueError as error:
        return str(error)


def test_softmax_over_one_ranks_columns_is_refused(model_folder):
    assert "use megatron_rl.gather_logprobs" in run_ranks(2, softmax_of_split_logits, model_folder)[0]


def fractional_weight(folder):
    engine = make_engine(folder, LAYOUTS["1"][1])
    with pytest.raises(ValueError, match="loss_weight_fn returned 0.5: weights are integer counts"):
        engine.train_batch(make_batch(), user_loss, lambda data: torch.tensor(0.5))


def frozen(folder):
    from megatron_rl.config import EngineConfig, ModelConfig
    from megatron_rl.engine.megatron_engine import MegatronEngine

    policy = make_engine(folder, LAYOUTS["tp2_pp2"][1]).train()
    config = EngineConfig(model=ModelConfig(path=str(folder)), parallel=LAYOUTS["tp2_pp2"][1])
    reference = MegatronEngine(config, groups=policy.groups, trainable=False)
    reference.initialize()
    batch = make_batch()
    before = reference.forward(batch)
    same = policy.forward(batch)
    policy.train_batch(batch, user_loss, user_weight)
    return before, same, reference.forward(batch), policy.forward(batch)


@pytest.mark.slow
def test_reference_stays_while_the_policy_moves(model_folder):
    for before, same, after, moved in run_ranks(4, frozen, model_folder):
        assert torch.equal(before, same) and torch.equal(before, after)
        assert (moved - before).abs().max() > 1e-3


def evaluate(folder, layout):
    engine = make_engine(folder, LAYOUTS[layout][1])
    batch = share_of(make_batch(), engine)
    before = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    evaluated = engine.eval().eval_batch(batch, user_loss, user_weight)
    after = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    trained = engine.train().train_batch(batch, user_loss, user_weight)
    return evaluated, trained, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "tp2_pp2", "dp2"])
def test_eval_batch_returns_the_loss_and_changes_nothing(layout, model_folder):
    for evaluated, trained, unchanged in run_ranks(LAYOUTS[layout][0], evaluate, model_folder, layout):
        assert evaluated.loss == pytest.approx(trained.loss, abs=1e-6) and evaluated.weight == trained.weight
        assert unchanged and not evaluated.applied and trained.applied


def learning_rates(folder, schedule):
    options = {"lr": 1.0, "min_lr": 0.1, "schedule": schedule, "warmup_updates": 2}
    engine = make_engine(folder, LAYOUTS["1"][1], **options)  # 10 updates in all
    rates = []
    for _ in range(12):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.step_lr_scheduler()
    return rates


def test_learning_rate_follows_the_schedule(model_folder):
    # After a warm-up of 2 updates the remaining 8 fall from 1 to 0.1; the value of update 6 is half way.
    half_way = {"constant": 1.0, "linear": 0.55, "cosine": 0.55}
    found = run_each(1, learning_rates, {name: (model_folder, name) for name in half_way})
    for name, (rates,) in found.items():
        assert rates[:3] == pytest.approx([0.0, 0.5, 1.0]) and rates[6] == pytest.approx(half_way[name])
        assert rates[10:] == pytest.approx([1.0, 1.0] if name == "constant" else [0.1, 0.1])


MEGATRON = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
    "fusions": {"bias_activation_fusion": True, "bias_dropout_fusion": True},
}


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep")
    make_model("qwen3_tied_one_kv_head", folder)
    return folder


@pytest.fixture(scope="module")
def deep_update(deep_folder):
    return run_ranks(1, two_updates, deep_folder, "1", make_batch(), "logprobs")[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "tp2_sp", "pp2_vpp2"])
def test_recomputed_activations_and_fused_functions_give_the_same_update(layout, deep_folder, deep_update):
    given = (deep_folder, layout, make_batch(), "logprobs", 64)
    cases = {section: (*given, {"megatron": megatron}) for section, megatron in MEGATRON.items()}
    for ranks in run_each(LAYOUTS[layout][0], two_updates, cases).values():
        assert_same_updates(ranks[0], deep_update)


def sequence_above_the_budget(folder):
    engine = make_engine(folder, LAYOUTS["1"][1], tokens_per_microbatch=8)
    engine.config.allow_longer_sequences = False
    with pytest.raises(ValueError, match="tokens_per_microbatch = 8: a sequence .* has 12 tokens.*Raise it to 12"):
        engine.train_batch(make_batch(), user_loss, user_weight)


def test_fractional_loss_weights_and_where_the_config_says_so_sequences_above_the_budget_are_refused(model_folder):
    run_ranks(1, lambda: (fractional_weight(model_folder), sequence_above_the_budget(model_folder)))
