"""Pipelines whose stages have different numbers of layers: an update is that of one process, wherever the cuts are."""

import dataclasses
import functools
import itertools
import re

import pytest
import torch
from gathered import as_hf_tensors, record_gradients
from safetensors.torch import load_file
from test_gradients import user_loss, user_weight
from test_theorems import assert_close
from transformers import DeepseekV3Config, Qwen3MoeConfig

from megatron_rl.config import EngineConfig, ModelConfig, ParallelConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.model import transformer_config
from megatron_rl.parallel import cut_by_upstream
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import check_layout, layers_of_stages, parameters, parameters_of_stage
from tests.kit.models import make_batch, make_engine, make_model, share_of, start
from tests.kit.ranks import run_each, run_ranks

pytestmark = pytest.mark.slow

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"
FEW_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
MODELS = {
    "dense": ("llama_tied", {"num_hidden_layers": 5}),
    # Its dense layers end within a stage.
    "mixture": ("deepseek_v3", {"num_hidden_layers": 7, "first_k_dense_replace": 2} | FEW_EXPERTS),
}


def chunked(pipeline):
    return ParallelConfig(pipeline=pipeline, virtual_pipeline=2)


TWO, THREE = ParallelConfig(pipeline=2), ParallelConfig(pipeline=3)
# Model, layout, fields of upstream; layers by stage and chunk.
CASES = {
    "embedding_counts": ("dense", TWO, {EMBEDDING: True}, [[2], [3]]),
    "layout_of_chunks": ("dense", chunked(2), {LAYOUT: "Et|tt|t|tL"}, [[1, 1], [2, 1]]),
    "no_pipeline": ("dense", ParallelConfig(tensor=2), {FIRST: 3}, [[5]]),
    "dense_layers_alone": ("mixture", TWO, {FIRST: 2}, [[2], [5]]),
    "loss_counts_among_chunks": ("mixture", chunked(2), {LOSS: True}, [[2, 2], [2, 1]]),
    "edges_alone": ("dense", THREE, {LAYOUT: "E|t*5|L"}, [[0], [5], [0]]),
    "first_and_last": ("mixture", THREE, {FIRST: 2, LAST: 2}, [[2], [3], [2]]),
    "head_alone_in_a_chunk": ("mixture", chunked(3), {LAYOUT: "Et|tt|t|(tt|)*1t|L"}, [[1, 2], [2, 1], [1, 0]]),
}
DISTRIBUTED = ("dense_layers_alone", "edges_alone", "head_alone_in_a_chunk")
"""Cases with the distributed optimizer."""
RESUMED = {
    "no_pipeline": "layout_of_chunks",
    "edges_alone": "layout_of_chunks",
    # The first stage of the two that are resumed has no experts.
    "loss_counts_among_chunks": "dense_layers_alone",
    "first_and_last": "dense_layers_alone",
    "head_alone_in_a_chunk": "first_and_last",
}
"""Cases that resume the checkpoint of another, after its update."""


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.hf_tensors()}


def start_and_update(folder, layout, megatron, distributed=False):
    """Return an engine after an update; and weights as loaded, log-probabilities, its loss and whole gradients."""
    options = {"tokens_per_microbatch": 24, "eps": 1e-4, "distributed": distributed}
    engine = make_engine(folder, layout, megatron=megatron, **options)
    gradients, loaded, batch = record_gradients(engine), weights_of(engine), share_of(make_batch(), engine)
    logprobs = engine.eval().forward(batch)
    stats = engine.train().train_batch(batch, user_loss, user_weight)
    return engine, (loaded, logprobs, stats.loss, stats.grad_norm, as_hf_tensors(engine, gradients[0]))


def alone(folder):
    """Update one process three times; return the weights after each."""
    engine, found = start_and_update(folder, ParallelConfig(), {})
    weights = [weights_of(engine)]
    for _ in range(2):
        engine.train_batch(make_batch(), user_loss, user_weight)
        weights.append(weights_of(engine))
    return found, weights


def continued(folder, layout, megatron, distributed, source, target):
    """Update once in a layout; or resume a checkpoint there, then update it. Save that to `target`, if any."""
    engine, found = start_and_update(folder, layout, megatron, distributed)
    own = [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in engine.chunks]
    place = engine.groups.pipeline.rank, own, sum(parameter.numel() for parameter in engine.parameters())
    resumed = None
    if source is not None:
        engine.load(source, with_optimizer=True)
        resumed = weights_of(engine)
        engine.train_batch(share_of(make_batch(), engine), user_loss, user_weight)
    if target is not None:
        engine.save(target, with_optimizer=True)
    return found, place, resumed, weights_of(engine)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The models' folders, what one process does with each, and a function: case -> what the ranks of it and of those
    before it do, one after the other."""
    root = tmp_path_factory.mktemp("uneven")
    for model, (family, sizes) in MODELS.items():
        make_model(family, root / model, **sizes)
    one = run_each(1, alone, {model: (root / model,) for model in MODELS})

    @functools.cache
    def on(count):
        todo = {}
        for name in (name for name in CASES if ranks_of(name) == count):
            model, layout, megatron, _ = CASES[name]
            source = root / RESUMED[name] if name in RESUMED else None
            target = root / name if name in RESUMED.values() else None
            todo[name] = root / model, layout, megatron, name in DISTRIBUTED, source, target
        return (on(2) if count == 3 else {}) | run_each(count, continued, todo)

    return root, one, lambda name: on(ranks_of(name))


def ranks_of(name):
    return CASES[name][1].tensor * CASES[name][1].pipeline


def each_of(names):
    """Two stages are enough for `make test`: cuts behind the first and before the last, and between chunks."""
    return [pytest.param(name, marks=pytest.mark.thorough if ranks_of(name) == 3 else ()) for name in names]


@pytest.mark.parametrize("name", each_of(CASES))
def test_an_uneven_cut_computes_what_one_process_does(name, runs):
    root, one, run = runs
    found = run(name)
    model, layout, megatron, sizes = CASES[name]
    arch = read_architecture(root / model)
    planned = layers_of_stages(arch, layout, megatron)
    assert [[len(chunk) for chunk in stage] for stage in planned] == sizes
    (_, logprobs, loss, norm, gradients), after = one[model][0]
    saved = load_file(root / model / "model.safetensors")
    for ours, (stage, own, count), *_ in found[name]:
        assert own == [list(chunk) for chunk in planned[stage]]
        assert parameters_of_stage(arch, layout, stage, megatron).total == count
        torch.testing.assert_close(ours[1], logprobs, rtol=0, atol=1e-5)
        assert ours[2:4] == pytest.approx((loss, norm), rel=1e-5)
    (loaded, *_, ours), _, resumed, updated = found[name][0]
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert_close(ours, gradients, name)
    number, source = 0, name
    while source := RESUMED.get(source):
        number += 1
    for key, tensor in after[number].items():
        torch.testing.assert_close(updated[key], tensor, rtol=0, atol=2e-6, msg=key)


@pytest.mark.parametrize("name", each_of(RESUMED))
def test_a_checkpoint_of_one_cut_resumes_in_another(name, runs):
    found = runs[2](name)
    resumed, saved = found[name][0][2], found[RESUMED[name]][0][3]
    assert resumed.keys() == saved.keys() and all(torch.equal(resumed[key], saved[key]) for key in saved)


def resume_in_bfloat16(folder, target):
    """Return the weights of an engine that has saved, and those of one that resumed, each an update later."""
    found = []
    for _ in range(2):
        config = EngineConfig(model=ModelConfig(path=str(folder), dtype="bfloat16"), parallel=TWO)
        engine = start(MegatronEngine(config, megatron={FIRST: 2})).train()
        if found:
            engine.load(target, with_optimizer=True)
        else:
            engine.train_batch(make_batch(), user_loss, user_weight)
            engine.save(target, with_optimizer=True)
        engine.train_batch(make_batch(), user_loss, user_weight)
        found.append(weights_of(engine))
    return found


def test_main_weights_of_experts_resume_where_the_first_stage_has_none(runs, tmp_path):
    saved, resumed = run_ranks(2, resume_in_bfloat16, runs[0] / "mixture", tmp_path / "checkpoint")[0]
    assert saved.keys() == resumed.keys() and all(torch.equal(saved[key], resumed[key]) for key in saved)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Qwen3-235B and DeepSeek-V3 by their number of layers; from a config.json alone."""
    qwen = Qwen3MoeConfig(
        num_hidden_layers=94,
        hidden_size=4096,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        moe_intermediate_size=1536,
        vocab_size=151936,
        architectures=["Qwen3MoeForCausalLM"],
    )
    found = {}
    for config in (qwen, DeepseekV3Config(num_hidden_layers=61, architectures=["DeepseekV3ForCausalLM"])):
        folder = tmp_path_factory.mktemp("large")
        config.save_pretrained(folder)
        found[config.num_hidden_layers] = read_architecture(folder)
    return found


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "megatron", "sizes"),
    [
        (94, 4, 1, {FIRST: 23, LAST: 23}, [23, 24, 24, 23]),
        (94, 4, 1, {EMBEDDING: True, LOSS: True}, [23, 24, 24, 23]),
        (94, 8, 1, {FIRST: 11, LAST: 11}, [11, *[12] * 6, 11]),
        (94, 8, 2, {EMBEDDING: True, LOSS: True}, [5, *[6] * 14, 5]),
        (61, 16, 1, {FIRST: 3, LAST: 2}, [3, *[4] * 14, 2]),
        (61, 16, 2, {LAYOUT: "Et*3|(tt|)*28t|t|L"}, [3, *[2] * 28, 1, 1, 0]),
        (61, 8, 1, {FIRST: 7, LAST: 6}, [7, *[8] * 6, 6]),
    ],
)
def test_an_uneven_cut_has_every_layer_once(layers, pipeline, virtual, megatron, sizes, large):
    layout = ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual)
    stages = layers_of_stages(large[layers], layout, megatron)
    in_order = [stage[chunk] for chunk in range(virtual) for stage in stages]
    assert [len(chunk) for chunk in in_order] == sizes
    assert list(itertools.chain(*in_order)) == list(range(layers))
    # Neither model is tied, so that no parameter is on two stages.
    found = [parameters_of_stage(large[layers], layout, stage, megatron).total for stage in range(pipeline)]
    assert sum(found) == parameters(large[layers])


@pytest.mark.parametrize(("layers", "pipeline", "virtual"), [(8, 2, 1), (8, 2, 2), (36, 3, 4), (94, 47, 2), (24, 4, 3)])
def test_an_even_cut_is_upstreams(layers, pipeline, virtual, large):
    arch = dataclasses.replace(large[94], layers=layers)
    layout = ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual)
    assert layers_of_stages(arch, layout, {}) == cut_by_upstream(layers, pipeline, virtual, "{}")


@pytest.mark.parametrize(
    ("layout", "megatron", "message"),
    [
        (
            ParallelConfig(pipeline=4),
            {},
            r"^parallel: pipeline\(4\) x virtual_pipeline\(1\) does not divide the model's 94 layers; set "
            r"megatron.pipeline_model_parallel_layout='Et\*23\|\(t\*24\|\)\*2t\*23L' alone, or set parallel.pi.*=2.$",
        ),
        (
            ParallelConfig(pipeline=4),
            {FIRST: 23},
            rf"^megatron.{FIRST} = 23: pipeline\(4\) .*layers at middle stage: 71",
        ),
        (TWO, {FIRST: 40, LAST: 40}, rf"^megatron.{FIRST} = 40, megatron.{LAST} = 40: .*14 middle layers remaining"),
        (TWO, {FIRST: 0}, rf"megatron.{FIRST} = 0: .*must be larger than 0"),
        (TWO, {FIRST: 47, LOSS: True}, "cannot be ?set at the same time"),
        (TWO, {LAYOUT: "Et*93|L"}, "Number of decoder layers 93 ?must match num_layers 94"),
        (TWO, {LAYOUT: "Et*94|x"}, "Invalid layer character: x"),
        (TWO, {LAYOUT: "Et*24|t*24|t*23|t*23L"}, "it has 2 model chunks a stage"),
        (THREE, {LAYOUT: "Et*47||t*47L"}, "a chunk between the first and the last would have no layer"),
        (chunked(48), {}, "does not divide the model's 94 layers; set megatron.*'Et\\*0.*L' alone"),
        (
            chunked(64),
            {},
            "does not divide the model's 94 layers; set parallel.pipeline=47( parallel.virtual_pipeline=1)?.$",
        ),
    ],
)
def test_a_cut_that_cannot_be_is_refused_with_one_that_can(layout, megatron, message, large):
    with pytest.raises(ValueError, match=message):
        check_layout(large[94], layout, megatron)


@pytest.mark.parametrize("layers", [61, 94])
def test_every_cut_that_a_refusal_names_is_taken(layers, large):
    named = 0
    for pipeline, virtual in itertools.product((2, 4, 7, 16), (1, 3)):
        layout = ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual)
        try:
            check_layout(large[layers], layout, {})
        except ValueError as error:
            words = re.search(r"layout='(.*)' alone", str(error))[1]
            stages = layers_of_stages(large[layers], layout, {LAYOUT: words})
            sizes = [len(chunk) for stage in stages for chunk in stage]
            assert max(sizes) - min(sizes) == 1
            named += 1
    assert named >= 7


def test_a_model_without_a_pipeline_leaves_the_cut_of_anothers_alone(runs):
    folder = runs[0] / "dense"
    config = EngineConfig(model=ModelConfig(path=str(folder)))
    made = transformer_config(read_architecture(folder), config, {FIRST: 60, "recompute_granularity": "selective"})
    assert made.num_layers_in_first_pipeline_stage is None and made.recompute_granularity == "selective"
