"""A model is the same model in HF and in every Megatron layout."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file
from test_gradients import assert_same_updates, two_updates
from transformers import AutoModelForCausalLM

from megatron_rl.config import ParallelConfig
from megatron_rl.ops import gather_logprobs
from megatron_rl.types import TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import check_layout
from megatron_rl.weights.mapping import rule_for
from megatron_rl.weights.update_group import TensorSpec
from tests.kit.models import FAMILIES, LAYOUTS, MIXTURES, VARIANTS, make_batch, make_engine, make_model, share_of
from tests.kit.ranks import run_each, run_ranks


def full_logits(logits, rows):
    """Collect the vocabulary over the tensor axis, a row of logits for each column as its label: by gather_logprobs."""
    rows, columns = len(logits), logits.shard.size
    return (
        gather_logprobs(logits.repeat(columns, 1), torch.arange(columns).repeat_interleave(rows)).view(columns, rows).T
    )


def by_sequence(ids: torch.Tensor, values: torch.Tensor, bounds: list[int]) -> dict[tuple[int, ...], torch.Tensor]:
    """Cut `[T, V]` values into sequences, named by their tokens: microbatches may come in any order."""
    return {tuple(ids[a:b].tolist()): values[a:b] for a, b in zip(bounds, bounds[1:], strict=False)}


def hf_logprobs(model, batch: TrajectoryBatch) -> dict[tuple[int, ...], torch.Tensor]:
    """`[length, V]` log-probabilities that transformers computes, one sequence at a time."""
    bounds = batch.cu_seqlens.tolist()
    with torch.no_grad():
        parts = [
            model(batch["input_ids"][a:b][None]).logits[0].log_softmax(-1)
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]
    return by_sequence(batch["input_ids"], torch.cat(parts), bounds)


def forward_and_export(folders, layout, batch, out):
    """Return by family the logits of this rank's rows by sequence, and of the tensors that this rank is given what they
    are and what was planned."""
    results, groups = {}, None
    for family, folder in folders.items():
        engine = make_engine(folder, LAYOUTS[layout][1], groups=groups)
        groups, collected = engine.groups, {}

        def keep(logits, rows, collected=collected):
            collected.update(by_sequence(rows["input_ids"], full_logits(logits, rows), rows["cu_seqlens"].tolist()))
            return torch.zeros(len(logits))

        engine.eval().forward(share_of(batch, engine), keep)
        engine.save(out / family)
        given = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in engine.hf_tensors()]
        results[family] = collected, given, engine.export().specs
    return results


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function: family, layout -> its folder, and the log-probabilities that transformers computes."""

    @functools.cache
    def make(family: str, layers: int):
        folder = tmp_path_factory.mktemp(family)
        return folder, hf_logprobs(make_model(family, folder, layers), make_batch())

    return lambda family, layout: make(family, layers_of(family, layout))


def layers_of(family, layout):
    """Two are enough to cut matrices; the window of one family begins in its third layer."""
    return 4 if LAYOUTS[layout][1].pipeline > 1 or family == "qwen2_half_windowed" else 2


@pytest.fixture(scope="module")
def run(made, tmp_path_factory):
    """Each family in each layout, run once for the tests below: one after the other on the ranks of the layout."""

    @functools.cache
    def run_all(layout: str, are_variants: bool):
        own = (family for family in FAMILIES if layout in layouts_of(family) and (family in VARIANTS) == are_variants)
        folders = {family: made(family, layout)[0] for family in own}
        out = tmp_path_factory.mktemp(f"out-{layout}")
        ranks = run_ranks(LAYOUTS[layout][0], forward_and_export, folders, layout, make_batch(), out)
        return {family: (out / family, [rank[family] for rank in ranks]) for family in folders}

    return lambda family, layout: run_all(layout, family in VARIANTS)[family]


DENSE = ("1", "tp2_sp", "pp2", "pp2_vpp2", "tp2_pp2")
SPARSE = ("1", "tp2_sp", "pp2_vpp2", "tp2_pp2", "ep2", "tp2_ep2", "tp2_ep2_etp2", "tp2_pp2_ep2")
FEW = ("1", "tp2_sp")


def layouts_of(family):
    if family == "gpt_oss":  # biases of experts are not divided
        return [layout for layout in SPARSE if LAYOUTS[layout][1].expert_tensor == 1]
    return FEW if family in VARIANTS else SPARSE if family in MIXTURES else DENSE


QUICK = ("1", "tp2_sp", "ep2")
"""Each way to cut a family's matrices and experts. test_theorems.py and test_uneven_pipelines.py cut its layers."""


def marks_of(family, layout):
    if layout in ("1", "ep2"):
        return ()
    return pytest.mark.slow if layout in QUICK and family not in VARIANTS else pytest.mark.thorough


EACH_IN_ITS_LAYOUTS = pytest.mark.parametrize(
    "family,layout",
    [
        pytest.param(family, layout, marks=marks_of(family, layout))
        for family in FAMILIES
        for layout in layouts_of(family)
    ],
)


@pytest.mark.proves("families", "{family}", "{layout}")
@EACH_IN_ITS_LAYOUTS
def test_logits_equal_transformers(family, layout, made, run):
    (_, expected), (_, ranks), seen = made(family, layout), run(family, layout), set()
    for collected, *_ in ranks:  # empty before the last pipeline stage; data-parallel ranks have a share each
        for sequence, logprobs in collected.items():
            torch.testing.assert_close(logprobs, expected[sequence], rtol=0, atol=1e-5)
        seen |= collected.keys()
    assert seen == expected.keys()


@pytest.mark.proves("families", "{family}", "{layout}")
@pytest.mark.proves("layouts", "{layout}", "HF round trip")
@EACH_IN_ITS_LAYOUTS
def test_hf_to_megatron_to_hf_returns_the_same_bytes(family, layout, made, run):
    (folder, _), (out, ranks) = made(family, layout), run(family, layout)
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    given, planned = [given for _, given, _ in ranks], [planned for *_, planned in ranks]
    assert sorted(spec.name for spec in given[0]) == sorted(before) and not any(given[1:]), "rank 0 alone gets tensors"
    assert all(plan == given[0] for plan in planned), "every rank knows beforehand what comes, and in which order"


def separate_and_packed(folder, batch):
    engine = make_engine(folder, LAYOUTS["1"][1]).eval()
    packed = engine.forward(batch)
    separate = torch.cat([engine.forward(batch.select([i])) for i in range(len(batch))])
    return packed, separate


def test_packed_forward_equals_separate_forwards(tmp_path):
    make_model("qwen3", tmp_path)
    batch = make_batch()
    packed, separate = run_ranks(1, separate_and_packed, tmp_path, batch)[0]
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-6)
    assert (packed[batch["loss_mask"]] < 0).all() and (packed[~batch["loss_mask"]] == 0).all()


def hf_gradients(folder, batch, stats):
    """Let transformers compute loss and gradients in float64, compare with an update's and return its model."""
    # Of its experts' implementations only the plain loop takes float64.
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").double()
    bounds, total = batch.cu_seqlens.tolist(), 0.0
    for a, b in zip(bounds, bounds[1:], strict=False):
        ids, mask, advantages = (batch[k][a:b] for k in ("input_ids", "loss_mask", "advantages"))
        logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        total = total - (logprobs * advantages[1:] * mask[1:]).sum()
    loss = total / batch["loss_mask"].sum()
    loss.backward()
    assert stats.loss == pytest.approx(loss.item(), abs=1e-6)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    return model


# Families whose gradients differ from those of test_gradients' model: windows, norms behind matrices, scaled rows,
# norms over the heads of all ranks, heads of which a part is rotated.
UPDATED = ["gemma3", "mistral_windowed", "olmo", "phi3_partly_rotated", "qwen2"]


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    """Folders of models to update; and a function: layout -> what its first rank finds, by family."""
    folders = {family: tmp_path_factory.mktemp(family) for family in UPDATED}
    for family, folder in folders.items():
        make_model(family, folder, layers=2)

    @functools.cache
    def run(layout: str):
        cases = {family: (folder, layout, make_batch(), "logits") for family, folder in folders.items()}
        return {family: ranks[0] for family, ranks in run_each(LAYOUTS[layout][0], two_updates, cases).items()}

    return folders, run


@pytest.mark.parametrize("family", UPDATED)
def test_gradient_equals_float64_autograd(family, updated):
    folders, run = updated
    stats, _ = run("1")[family]
    hf_gradients(folders[family], make_batch(), stats[0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", pytest.param("tp2_pp2", marks=pytest.mark.thorough), "cp2"])
@pytest.mark.parametrize("family", UPDATED)
def test_update_does_not_depend_on_the_layout(family, layout, updated):
    _, run = updated
    assert_same_updates(run(layout)[family], run("1")[family])


def random_init(folder, layout):
    from megatron_rl.config import EngineConfig, ModelConfig
    from megatron_rl.engine.megatron_engine import MegatronEngine

    config = EngineConfig(model=ModelConfig(path=str(folder), init="random"), parallel=LAYOUTS[layout][1], seed=3)
    engine = MegatronEngine(config)
    engine.initialize()
    return {name: tensor.clone() for name, tensor in engine.hf_tensors()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks,layouts",
    [
        (2, {"llama": "pp2_vpp2", "deepseek_v3": "tp2_ep2", "gemma3": "tp2_sp"}),
        pytest.param(
            *(4, {"llama": "tp2_pp2", "deepseek_v3": "tp2_pp2_ep2", "gemma3": "tp2_pp2"}), marks=pytest.mark.thorough
        ),
    ],
    ids=["two ranks", "four ranks"],
)
def test_random_initial_weights_do_not_depend_on_the_layout(ranks, layouts, tmp_path):
    for family in layouts:
        make_model(family, tmp_path / family)
    alone = run_each(1, random_init, {family: (tmp_path / family, "1") for family in layouts})
    split = run_each(ranks, random_init, {family: (tmp_path / family, layout) for family, layout in layouts.items()})
    for family in layouts:
        one, other = alone[family][0], split[family][0]
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert one["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.02, rel=0.1)
        assert (one["model.layers.1.input_layernorm.weight"] == (0.0 if family == "gemma3" else 1.0)).all()


def test_transformer_engine_names_lead_to_the_same_rules(tmp_path):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    make_model("deepseek_v3", tmp_path)
    arch = read_architecture(tmp_path)
    fused = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map
    assert len(fused) == 2
    names = {local + "weight": theirs + "weight" for local, theirs in fused.items()}
    for number in (0, 11):
        for fc in ("linear_fc1", "linear_fc2"):
            names[f"mlp.experts.local_experts.{number}.{fc}.weight"] = f"mlp.experts.{fc}.weight{number}"
    for local, theirs in names.items():
        assert rule_for(theirs, 1, arch) == rule_for(local, 1, arch)
    expert = rule_for("mlp.experts.linear_fc2.weight3", 1, arch)
    assert expert.names(first_expert=4) == ["model.layers.1.mlp.experts.7.down_proj.weight"]


KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "vocab_size": 163840,
}
MOONLIGHT = KIMI_K2 | {"q_lora_rank": None, "n_routed_experts": 64, "num_experts_per_tok": 6, "rope_scaling": None}


@pytest.mark.parametrize("config", [KIMI_K2, MOONLIGHT], ids=["Kimi-K2", "Moonlight"])
def test_models_of_deepseeks_shape_are_read_under_their_own_names(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = read_architecture(tmp_path)
    assert (arch.family, arch.mixture.experts, arch.mixture.groups) == ("deepseek_v3", config["n_routed_experts"], None)
    assert arch.latent.query_rank == config["q_lora_rank"] and arch.mixture.is_biased


@pytest.mark.parametrize(
    ("family", "changes", "share"),
    [
        ("minimax_m2", {"rotary_dim": 12, "rope_parameters": {"rope_theta": 1e4}}, 0.5),  # as its own files say it
        ("phi3", {"partial_rotary_factor": 0.75, "rope_parameters": {"rope_theta": 1e4}}, 0.75),
        ("phi3", {}, 1.0),
        ("llama", {"partial_rotary_factor": 0.75}, 1.0),  # transformers' Llama looks at none
    ],
)
def test_the_rotated_share_is_read_in_every_way_of_saying_it(family, changes, share, tmp_path):
    make_model(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert read_architecture(tmp_path).rotary_share == share


def test_heads_that_are_normed_together_are_not_shared_by_ranks(tmp_path):
    make_model("olmo", tmp_path)
    with pytest.raises(ValueError, match="parallel.tensor = 4: olmo normalizes its 2 key-value heads together"):
        check_layout(read_architecture(tmp_path), ParallelConfig(tensor=4), {})


def test_biases_of_experts_are_not_divided(tmp_path):
    make_model("gpt_oss", tmp_path)
    with pytest.raises(ValueError, match="parallel.expert_tensor = 2: gpt_oss's experts have biases"):
        check_layout(read_architecture(tmp_path), ParallelConfig(expert_tensor=2), {})


def test_a_scaled_rotation_beside_windows_is_refused(tmp_path):
    make_model("olmo", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps(config | rope))
    with pytest.raises(ValueError, match="rope type 'yarn': not supported beside layers with a window"):
        read_architecture(tmp_path)


def test_a_field_that_the_family_does_not_have_is_named(tmp_path):
    make_model("seed_oss", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_out_bias": True}))
    with pytest.raises(ValueError, match="attention_out_bias = True: only False is supported for seed_oss"):
        read_architecture(tmp_path)
