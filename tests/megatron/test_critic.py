"""A value model is the same model in HF and in every layout, and so are its updates."""

from functools import cache, partial

import pytest
import torch
from safetensors.torch import load_file
from test_gradients import assert_same_updates
from transformers import AutoModelForSequenceClassification

from megatron_rl import parallel
from megatron_rl.algo.loss import PolicyLoss, value_clip
from megatron_rl.api import LogprobLoss, ValueLoss
from megatron_rl.batch import exchange
from megatron_rl.config import AlgorithmConfig, EngineConfig, ModelConfig, ParallelConfig
from megatron_rl.engine.fsdp_engine import FSDPEngine
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.types import TrajectoryBatch
from tests.kit.models import (
    LAYOUTS,
    MIXTURES,
    make_batch,
    make_engine,
    make_groups,
    make_model,
    make_value_model,
    share_of,
)
from tests.kit.ranks import run_each, run_ranks

VALUE_LOSS = ValueLoss(partial(value_clip, clip=0.2))


def critic_batch(lengths: tuple[int, ...] = (5, 12, 7, 12, 3, 9)) -> TrajectoryBatch:
    """Trajectories with old values and returns as far apart as the clip takes effect."""
    batch = make_batch(lengths=lengths)
    generator = torch.Generator().manual_seed(5)
    for key in ("values", "returns"):
        batch.tokens[key] = torch.randn(len(batch["input_ids"]), generator=generator)
    return batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    make_value_model("qwen3_tied_one_kv_head", folder)
    return folder


def hf_values(model, batch: TrajectoryBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N]` the value after reading the token before each, 0 for first tokens, and `[B]` the pooled scores."""
    bounds, values, scores = batch.cu_seqlens.tolist(), [], []
    with torch.no_grad():
        for a, b in zip(bounds, bounds[1:], strict=False):
            ids = batch["input_ids"][a:b][None]
            values.append(torch.cat([torch.zeros(1), model.score(model.model(ids).last_hidden_state)[0, :-1, 0]]))
            scores.append(model(ids).logits[0, 0])
    return torch.cat(values), torch.stack(scores)


def values_and_scores(folder, layout, batch, share_prompts=True, groups=None):
    config = EngineConfig(
        model=ModelConfig(path=str(folder)),
        parallel=WORLDS[layout][1],
        tokens_per_microbatch=24,
        share_prompts=share_prompts,
    )
    backend = FSDPEngine if layout == "fsdp" else MegatronEngine
    engine = backend(config, trainable=False, head="value", groups=groups)
    engine.initialize()
    return engine.forward(batch), engine.score(batch)


def all_values_and_scores(folders, layout, batch):
    groups = parallel.start(WORLDS[layout][1], seed=1)
    return {family: values_and_scores(folder, layout, batch, groups=groups) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def value_models(tmp_path_factory):
    """By family: the values and scores that transformers computes, and its folder."""
    folders = {family: tmp_path_factory.mktemp(family) for family in VALUE_FAMILIES}
    return {
        family: hf_values(make_value_model(family, folder), make_batch()) for family, folder in folders.items()
    }, folders


@pytest.fixture(scope="module")
def ranks_of(value_models):
    """What each rank of a layout finds for all families, one after the other."""

    @cache
    def run(layout, is_quick):
        own = (family for at, family in VALUE_CASES if at == layout and ((at, family) in QUICK) == is_quick)
        folders = {family: value_models[1][family] for family in own}
        return run_ranks(WORLDS[layout][0], all_values_and_scores, folders, layout, make_batch())

    return lambda layout, family: run(layout, (layout, family) in QUICK)


VALUE_FAMILIES = ("llama", "qwen2_tied", "qwen3", "gemma3", "qwen3_moe")
WORLDS = LAYOUTS | {"fsdp": LAYOUTS["dp2"]}
VALUE_CASES = [
    (layout, family)
    for layout in ("1", "tp2_sp", "pp2_vpp2", "cp2", "tp2_pp2", "fsdp")
    for family in VALUE_FAMILIES
    if not (layout == "fsdp" and family in MIXTURES)
]
QUICK = {case for case in VALUE_CASES if case[0] in ("1", "tp2_sp") or case[1] == "llama" and case[0] != "tp2_pp2"}
"""All families where matrices are whole and where they are cut; behind other cuts the head is the same for all."""

FOUR_RANKS = pytest.param("tp2_pp2", marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("layout", "family"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.thorough) for case in VALUE_CASES],
)
def test_values_and_scores_equal_transformers(family, layout, value_models, ranks_of):
    batch = make_batch()
    values, scores = value_models[0][family]
    for ours, ours_scores in (found[family] for found in ranks_of(layout, family)):
        torch.testing.assert_close(ours, values * batch["loss_mask"], rtol=0, atol=1e-5)
        torch.testing.assert_close(ours_scores, scores, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "cp2"])
def test_values_and_scores_of_groups_that_share_their_prompts_are_the_same(layout, folder):
    batch = make_groups()
    shared, scores = run_ranks(LAYOUTS[layout][0], values_and_scores, folder, layout, batch)[0]
    alone, scores_alone = run_ranks(1, values_and_scores, folder, "1", batch, False)[0]
    torch.testing.assert_close(shared, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores, scores_alone, rtol=0, atol=1e-5)


def two_updates(folder, layout, batch, tokens_per_microbatch=64, options=None):
    engine = make_engine(
        folder, LAYOUTS[layout][1], tokens_per_microbatch=tokens_per_microbatch, head="value", **(options or {})
    )
    engine.train()
    stats = [engine.train_batch(share_of(batch, engine), VALUE_LOSS) for _ in range(2)]
    return stats, {name: tensor.clone() for name, tensor in engine.hf_tensors()}


@pytest.mark.slow
def test_update_does_not_depend_on_the_microbatch_split(folder):
    splits = (64, 1, 13, 1000)  # some together; every sequence alone; uneven; all in one
    found = run_each(1, two_updates, {tokens: (folder, "1", critic_batch(), tokens) for tokens in splits})
    for tokens in splits[1:]:
        assert_same_updates(found[tokens][0], found[64][0])


def test_a_rank_without_trajectories_keeps_step(folder):
    alone = critic_batch(lengths=(9,))
    one = run_ranks(1, two_updates, folder, "1", alone)[0]
    assert_same_updates(run_ranks(2, two_updates, folder, "dp2", alone)[0], one)


def export(folder, layout, target):
    make_engine(folder, LAYOUTS[layout][1], head="value").save(target)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "tp2_sp", "pp2", FOUR_RANKS])
def test_hf_to_megatron_to_hf_returns_the_same_bytes(layout, tmp_path):
    folders = {family: tmp_path / family for family in ("llama", "qwen3_tied_one_kv_head")}
    models = {family: make_value_model(family, folder / "in", layers=2) for family, folder in folders.items()}
    cases = {family: (folder / "in", layout, folder / "out") for family, folder in folders.items()}
    run_each(LAYOUTS[layout][0], export, cases)
    for family, folder in folders.items():
        before, after = (load_file(folder / name / "model.safetensors") for name in ("in", "out"))
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
        again = AutoModelForSequenceClassification.from_pretrained(folder / "out")
        ids = make_batch()["input_ids"][None]
        assert torch.equal(again(ids).logits, models[family](ids).logits)


def critic_of_a_policy(policy_folder, target):
    engine = make_engine(policy_folder, LAYOUTS["tp2_sp"][1], head="value").train()
    start = engine.forward(make_batch())
    engine.train_batch(critic_batch(), VALUE_LOSS)
    engine.train_batch(critic_batch(), VALUE_LOSS)
    moved = engine.forward(make_batch())
    engine.save(target)
    engine.load(policy_folder)
    reset = engine.forward(make_batch())
    engine.load(target)
    return start, moved, reset, engine.forward(make_batch())


@pytest.mark.slow
def test_critic_from_a_policy_starts_at_zero_and_is_kept_as_a_classifier(tmp_path):
    folders = {family: tmp_path / family for family in ("llama", "qwen2_tied")}
    for family, folder in folders.items():
        make_model(family, folder / "policy", layers=2)
    cases = {family: (folder / "policy", folder / "critic") for family, folder in folders.items()}
    for family, ranks in run_each(2, critic_of_a_policy, cases).items():
        start, moved, reset, loaded = ranks[0]
        assert not start.any() and not reset.any()
        assert moved.abs().max() > 1e-3 and torch.equal(loaded, moved)
        model = AutoModelForSequenceClassification.from_pretrained(folders[family] / "critic")
        expected = hf_values(model, make_batch())[0] * make_batch()["loss_mask"]
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-5)


def save_checkpoint(folder, layout, target):
    engine = make_engine(folder, LAYOUTS[layout][1], head="value").train()
    engine.train_batch(share_of(critic_batch(), engine), VALUE_LOSS)
    engine.save(target, with_optimizer=True)
    return one_more(engine)


def load_checkpoint(folder, layout, target):
    engine = make_engine(folder, LAYOUTS[layout][1], head="value").train()
    engine.load(target, with_optimizer=True)
    return one_more(engine)


def one_more(engine):
    stats = engine.train_batch(share_of(critic_batch(), engine), VALUE_LOSS)
    return [stats], {name: tensor.clone() for name, tensor in engine.hf_tensors()}


@pytest.mark.slow
def test_critic_resumes_in_another_layout(folder, tmp_path):
    before = run_ranks(2, save_checkpoint, folder, "tp2_sp", tmp_path / "checkpoint")[0]
    assert_same_updates(run_ranks(2, load_checkpoint, folder, "pp2", tmp_path / "checkpoint")[0], before)


def both_models(policy_folder, critic_folder, policy_layout, critic_layout):
    """Two steps, policy and critic in turn, each in its own layout."""
    groups = parallel.start(policy_layout, seed=1)
    critic_groups = parallel.start(critic_layout, seed=1)
    policy = make_engine(policy_folder, policy_layout, groups=groups).train()
    critic = make_engine(critic_folder, critic_layout, groups=critic_groups, head="value").train()
    policy.reset_optimizer(10)  # as after a warm start, with the critic's layout the active one
    batch, values, policy_stats, critic_stats = critic_batch(), [], [], []
    for _ in range(2):
        values.append(exchange.by_token(batch, critic_groups, critic.forward))
        share, critic_share = (exchange.own_share(batch, layout) for layout in (groups, critic_groups))
        policy_stats.append(policy.train_batch(share, LogprobLoss(PolicyLoss(AlgorithmConfig()))))
        critic_stats.append(critic.train_batch(critic_share, VALUE_LOSS))
    weights = [{name: tensor.clone() for name, tensor in engine.hf_tensors()} for engine in (policy, critic)]
    return (policy_stats, weights[0]), (critic_stats, weights[1]), torch.stack(values)


@pytest.fixture(scope="module")
def both_in_one_process(folder, tmp_path_factory):
    """The policy's folder, and what both models of one process are."""
    policy_folder = tmp_path_factory.mktemp("policy")
    make_model("llama_tied", policy_folder, layers=2)
    return policy_folder, run_ranks(1, both_models, policy_folder, folder, ParallelConfig(), ParallelConfig())[0]


# Other axes on each side, and each side once with another number of data-parallel ranks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy_layout", "critic_layout"),
    [
        (ParallelConfig(tensor=2), ParallelConfig()),
        (ParallelConfig(), ParallelConfig(pipeline=2, virtual_pipeline=2)),
        pytest.param(ParallelConfig(pipeline=2), ParallelConfig(tensor=2), marks=pytest.mark.thorough),
    ],
    ids=["tp2_and_dp2", "dp2_and_pp2_vpp2", "pp2_and_tp2"],
)
def test_policy_and_critic_in_different_layouts_learn_as_in_one_process(
    policy_layout, critic_layout, folder, both_in_one_process
):
    policy_folder, one = both_in_one_process
    two = run_ranks(2, both_models, policy_folder, folder, policy_layout, critic_layout)
    assert_same_updates(two[0][0], one[0])
    assert_same_updates(two[0][1], one[1])
    for _, _, values in two:
        torch.testing.assert_close(values[0], one[2][0], rtol=0, atol=1e-5)
        torch.testing.assert_close(values[1], one[2][1], rtol=0, atol=1e-4)  # of weights that may be 2e-5 apart


def scores_of_all(folder, layout, batch):
    groups = parallel.start(layout, seed=1)
    config = EngineConfig(model=ModelConfig(path=str(folder)), parallel=layout, tokens_per_microbatch=24)
    engine = MegatronEngine(config, groups=groups, trainable=False, head="value")
    engine.initialize()
    own = batch if groups.is_main else batch.select([]) if groups.is_rollout_rank else None
    return exchange.share_out(own, groups, updates=1, seed=0, share_prompts=True).by_sequence(engine.score)


# Two replicas of two ranks each; and more replicas than trajectories, so that one computes nothing.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "count"), [(4, ParallelConfig(tensor=2), 12), (3, ParallelConfig(), 2)], ids=["dp2_tp2", "idle"]
)
def test_every_rank_gets_all_scores_in_the_batchs_order(ranks, layout, count, folder):
    batch = make_groups().select(range(count))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    _, expected = hf_values(model, batch)
    for scores in run_ranks(ranks, scores_of_all, folder, layout, batch):
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def wrong_head(folder):
    critic = make_engine(folder, LAYOUTS["1"][1], head="value")
    batch = critic_batch()
    with pytest.raises(ValueError, match="loss_fn: needs an engine with head='policy', and this one has 'value'"):
        critic.train_batch(batch, LogprobLoss(PolicyLoss(AlgorithmConfig())))
    with pytest.raises(ValueError, match="post_hook: needs an engine with head='policy'"):
        critic.forward(batch, lambda logits, rows: logits[:, 0])
    with pytest.raises(ValueError, match="ForSequenceClassification folder has a scalar head and no language-model"):
        make_engine(folder, LAYOUTS["1"][1])


def test_what_the_other_head_computes_is_refused(folder):
    run_ranks(1, wrong_head, folder)


def test_classifier_of_several_labels_is_refused(tmp_path):
    from megatron_rl.weights.architecture import read_architecture

    make_value_model("llama", tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"0": "LABEL_0"', '"0": "LABEL_0", "1": "LABEL_1"'))
    with pytest.raises(ValueError, match="num_labels = 2: a critic or reward model gives one number"):
        read_architecture(tmp_path)
