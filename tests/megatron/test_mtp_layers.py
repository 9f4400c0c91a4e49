"""Multi-token-prediction layers of the model's folder: carried where they are not trained, and trained as a draft."""

import json
import logging.handlers

import pytest
import torch
from drafted import DEEP_MTP, EAGLE, MTP, SFT, UPDATES, assert_alike, assert_same_policy, by_autograd, head_of, train
from gathered import relative_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_rl import platform
from megatron_rl.config import DraftConfig, EngineConfig, LoraConfig, ModelConfig, ParallelConfig
from megatron_rl.engine.mtp_head import layer_config
from megatron_rl.tools.convert import convert_folder
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.draft_files import check_draft
from megatron_rl.weights.mapping import mtp_names
from megatron_rl.weights.mtp_layers import mtp_source
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_groups, make_model
from tests.kit.mtp import add_mtp_layer, assert_same_bytes, in_shards, mtp_tensors
from tests.kit.ranks import run_ranks

COUNTS = {"glm4_moe": "num_nextn_predict_layers", "qwen3_5": "mtp_num_hidden_layers"}
"""A family of each naming, and the key with which it counts its layers."""


def train_and_save(folder, target, lora):
    options = {} if lora is None else {"lora": LoraConfig(rank=lora)}
    engine = make_engine(folder, ParallelConfig(), **options)
    engine.train().train_batch(make_batch(), SFT)
    engine.save(target / "exported")
    engine.save(target / "checkpoint", with_optimizer=True)
    if lora is None:
        convert_folder(target / "checkpoint", target / "converted")


# -- carried -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, lora",
    [("glm4_moe", None), pytest.param("qwen3_5", None, marks=pytest.mark.slow),
     pytest.param("glm4_moe", 2, marks=pytest.mark.thorough), pytest.param("qwen3_5", 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_trained_model_is_saved_with_its_layer_byte_for_byte(family, lora, tmp_path):
    folder = tmp_path / "model"
    make_model(family, folder, layers=2)
    # In bfloat16, next to a model in float32: what is carried keeps its own dtype.
    expected = add_mtp_layer(folder, torch.bfloat16)
    in_shards(folder)
    run_ranks(1, train_and_save, folder, tmp_path, lora)
    for name in ("exported",) if lora else ("exported", "converted"):
        assert_same_bytes(mtp_tensors(tmp_path / name, expected), expected)
        assert json.loads((tmp_path / name / "config.json").read_text())[COUNTS[family]] == 1
    trained, first = (mtp_tensors(path, {"model.norm.weight": None}) for path in (tmp_path / "exported", folder))
    assert lora or not torch.equal(trained["model.norm.weight"], first["model.norm.weight"])


def published_twice(folder, publication):
    said = logging.handlers.BufferingHandler(1000)
    logging.getLogger("megatron_rl.engine").addHandler(said)
    engine = make_engine(folder, ParallelConfig())
    engine.config.publication = publication
    said.buffer.clear()
    for version in (1, 2):
        engine.update_weights(None, version)
    return [record.getMessage() for record in said.buffer]


@pytest.mark.slow
def test_a_publication_that_does_not_send_the_layer_says_so_once(tmp_path):
    make_model("qwen3_5", tmp_path, layers=2)
    add_mtp_layer(tmp_path)
    (said,) = run_ranks(1, published_twice, tmp_path, "group")[0]
    assert "rollout.publication = group does not send these tensors of model.path" in said
    assert "mtp.fc.weight" in said and "rollout.publication=disk writes them" in said
    assert run_ranks(1, published_twice, tmp_path, "disk")[0] == []


# -- trained -----------------------------------------------------------------------------------------------------------

FAMILIES = ("glm4_moe", "qwen3_5", "deepseek_v3", "qwen3_next", "qwen3_5_moe")
EACH_FAMILY = [*FAMILIES[:2], *(pytest.param(family, marks=pytest.mark.thorough) for family in FAMILIES[2:])]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of each family, with a random layer in its folder."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_model(family, folder / family, layers=2)
        add_mtp_layer(folder / family)
    return folder


@pytest.fixture(scope="module")
def alone(models):
    """Function that returns the results of training a model in one process. It trains each model once."""
    made = {}

    def of(family, draft=MTP, make=make_batch):
        case = family, draft.kind, make
        if case not in made:
            made[case] = run_ranks(1, train, models / family, "1", draft, make)[0]
        return made[case]

    return of


@pytest.mark.parametrize("make", [make_batch, make_groups], ids=["sequences", "trees"])
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_the_policy_is_the_same_to_the_bit_with_and_without_the_layer(alone, family, make):
    found, expected = alone(family, MTP, make), alone(family, DraftConfig(), make)
    assert_same_policy(found, expected)
    changed = [name for name, tensor in found["draft"].items() if not torch.equal(found["first"][name], tensor)]
    fixed = {name for name in found["draft"] if name.endswith("e_score_correction_bias")}
    assert set(changed) == found["draft"].keys() - fixed


def by_transformers(folder, batch, depths=1):
    """Metrics of the first update, by float64 autograd over transformers' layer of the same kind."""
    policy = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").double()
    arch, config = read_architecture(folder), json.loads((folder / "config.json").read_text())
    names, own = mtp_names(arch.mtp_layer()), load_file(folder / "model.safetensors")
    # The layer as the only one of a model: it has attention, and a mixture if the family has one.
    alone = {name.replace(names.layer, "model.layers.0."): own[name] for name in own if name.startswith(names.layer)}
    alone |= {"model.norm.weight": own[names.final_norm].clone()}
    alone |= {name: own[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in own}
    target = folder.parent / f"{folder.name}-layer"
    target.mkdir(exist_ok=True)
    save_file(alone, target / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
    config |= {"first_k_dense_replace": 0}
    (target / "config.json").write_text(json.dumps(config))
    layer = AutoModelForCausalLM.from_pretrained(target, experts_implementation="eager").double().model
    layer.embed_tokens.requires_grad_(False)
    parts = torch.nn.ParameterDict(
        {part: own[getattr(names, part)].double() for part in ("input_proj", "token_norm", "hidden_norm")}
    )

    def norm(x, name):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], parts[name] + arch.norm_offset, arch.norm_eps)

    def states_of(hidden, embedded):
        both = torch.cat([norm(embedded, "token_norm"), norm(hidden, "hidden_norm")], -1)
        return layer(inputs_embeds=(both @ parts["input_proj"].T)[None]).last_hidden_state[0]

    return by_autograd(policy, states_of, (layer, parts), batch, depths)


@pytest.mark.parametrize("make", [make_batch, make_groups], ids=["sequences", "trees"])
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_loss_and_gradient_are_those_of_transformers_layer(models, alone, family, make):
    first, *_, last = alone(family, MTP, make)["metrics"]
    assert first == pytest.approx(by_transformers(models / family, make()), rel=1e-4)
    assert last["draft/loss"] < first["draft/loss"]


# The smallest layout that can break each axis, of a model that is not tied: its last stage has no embedding.
QUICK = {"tp2_sp": ("glm4_moe", make_groups), "pp2": ("qwen3_5", make_batch), "cp2_ep2": ("glm4_moe", make_groups)}
THOROUGH = {
    "tp2": ("qwen3_5", make_groups),
    "dp2": ("qwen3_next", make_batch),
    "ep2": ("deepseek_v3", make_batch),
    "etp2": ("glm4_moe", make_batch),
    "tp2_etp2": ("qwen3_5_moe", make_groups),
    "cp2_tp2": ("deepseek_v3", make_groups),
    "tp2_ep2_etp2": ("glm4_moe", make_groups),
    "tp2_pp2_ep2": ("deepseek_v3", make_groups),
    "tp2_pp2_dp2_ep2": ("glm4_moe", make_batch),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*QUICK, *(pytest.param(layout, marks=pytest.mark.thorough) for layout in THOROUGH)])
def test_the_layer_of_every_layout_is_that_of_one_process(models, alone, layout):
    family, make = (QUICK | THOROUGH)[layout]
    ranks = run_ranks(LAYOUTS[layout][0], train, models / family, layout, MTP, make)
    assert_alike(ranks[0], alone(family, MTP, make))
    assert all(rank["metrics"] == ranks[0]["metrics"] for rank in ranks)
    last = [rank for rank in ranks if rank["own"]]
    for one in last:  # replicas may not drift
        for other in last:
            if one["place"] == other["place"]:
                assert all(torch.equal(other["own"][name], tensor) for name, tensor in one["own"].items())


@pytest.fixture(scope="module")
def deep(models):
    """Results of training a layer for three consecutive guesses in one process."""
    return run_ranks(1, train, models / "glm4_moe", "1", DEEP_MTP, make_groups)[0]


def test_consecutive_guesses_are_learned_from_the_layers_own_states(models, alone, deep):
    assert_same_policy(deep, alone("glm4_moe", DraftConfig(), make_groups))
    first, *_, last = deep["metrics"]
    assert first == pytest.approx(by_transformers(models / "glm4_moe", make_groups(), depths=3), rel=1e-4)
    assert all(last[f"draft/loss{behind}"] < first[f"draft/loss{behind}"] for behind in ("", "_2", "_3"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["tp2_sp", *(pytest.param(it, marks=pytest.mark.thorough) for it in ("cp2_ep2", "pp2", "tp2_ep2"))]
)
def test_consecutive_guesses_of_every_layout_are_those_of_one_process(models, deep, layout):
    assert_alike(run_ranks(2, train, models / "glm4_moe", layout, DEEP_MTP, make_groups)[0], deep)


@pytest.mark.thorough
def test_consecutive_guesses_do_not_need_sequence_parallelism(models):
    alone, found = (
        run_ranks(LAYOUTS[layout][0], train, models / "qwen3_5", layout, DEEP_MTP)[0] for layout in ("1", "tp2")
    )
    assert_alike(found, alone)


def train_bfloat16(folder):
    options = {"dtype": "bfloat16", "distributed": True}
    return train(folder, draft=MTP, **options), train(folder, draft=DraftConfig(), **options)


def train_adapters(folder):
    lora = LoraConfig(rank=2)
    return train(folder, draft=MTP, lora=lora), train(folder, draft=DraftConfig(), lora=lora)


@pytest.mark.thorough
@pytest.mark.parametrize("train_both", [train_bfloat16, train_adapters])
def test_the_policys_bits_stay_in_bfloat16_and_with_adapters(models, alone, train_both):
    found, expected = run_ranks(1, train_both, models / "glm4_moe")[0]
    assert_same_policy(found, expected)
    first, *_, last = found["metrics"]
    assert first["draft/loss"] == pytest.approx(alone("glm4_moe")["metrics"][0]["draft/loss"], rel=0.02)
    assert last["draft/loss"] < first["draft/loss"]


def train_with(folder, options):
    return train(folder, draft=MTP, make=make_groups, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"tokens_per_microbatch": 16},
        {"share_prompts": False},
        {"megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
    ],
    ids=str,
)
def test_the_layer_does_not_depend_on_the_microbatches(models, alone, options):
    assert_alike(run_ranks(1, train_with, models / "glm4_moe", options)[0], alone("glm4_moe", MTP, make_groups))


def train_moving(folder, draft):
    """Train with the engine on the host between all calls; what is left on the device there, and what is learned."""
    engine = make_engine(folder, LAYOUTS["1"][1], draft=draft)
    left = []

    def move_out(*, keeps_weights=False):
        engine.offload(keeps_weights=keeps_weights)
        state = [value for state in engine.draft.optimizer.state.values() for value in state.values()]
        left.append([sum(t.untyped_storage().nbytes() for t in part) for part in (engine.draft.movable()[0], state)])

    for _ in range(UPDATES):
        engine.train().train_batch(make_batch(), SFT)
        move_out(keeps_weights=True)
        engine._activate(with_states=False)
        head_of(engine)
        move_out()
    engine._activate()
    return left, head_of(engine)


@pytest.mark.slow
@pytest.mark.parametrize("draft, family", [(MTP, "glm4_moe"), (EAGLE, "qwen3")], ids=["mtp", "eagle"])
def test_a_head_leaves_the_device_with_its_engine_and_learns_the_same(models, tmp_path, draft, family):
    folder = models / family
    if draft is EAGLE:
        make_model(family, folder := tmp_path / family, layers=2)
    left, learned = run_ranks(1, train_moving, folder, draft)[0]
    for with_weights, alone in zip(left[::2], left[1::2], strict=True):
        assert with_weights[0] > 0 and with_weights[1] == 0 and alone == [0, 0]
    assert_equal(learned, run_ranks(1, train, folder, "1", draft)[0]["draft"])


def test_a_layer_has_no_layers_of_transformer_engine_where_the_model_has_none(models, monkeypatch):
    monkeypatch.setattr(platform, "uses_transformer_engine", lambda asked: asked != "local")
    arch = read_architecture(models / "qwen3_5")  # whose norms add 1 to their weights, and which has delta nets
    assert arch.mtp_layer().fits_transformer_engine and not arch.fits_transformer_engine
    config = EngineConfig(model=ModelConfig(path=str(models / "qwen3_5")), draft=MTP)
    assert layer_config(arch, config, {}).transformer_impl == "local"


# -- saved and sent ----------------------------------------------------------------------------------------------------


def save_and_continue(folder, target, layout):
    """Save after an update, continue in several ways; the head of each, and what the engine publishes to a disk."""

    def engine_with(draft=MTP):
        return make_engine(folder, LAYOUTS[layout][1], draft=draft)

    engine, batch = engine_with(), make_batch()
    engine.save(target / "untrained")
    engine.train().train_batch(batch, SFT)
    engine.save(target / "checkpoint", with_optimizer=True)
    engine.save(target / "exported")
    heads = {"saved": head_of(engine)}
    engine.train_batch(batch, SFT)
    other = engine_with()
    other.load(target / "checkpoint", with_optimizer=True)
    heads["resumed"] = head_of(other)
    other.train().train_batch(batch, SFT)
    heads |= {"continued": head_of(engine), "resumed and continued": head_of(other)}
    for name, path in {"weights": "checkpoint", "from the folder": "exported"}.items():
        loaded = engine_with()
        loaded.load(target / path)
        heads[name] = head_of(loaded)
    assert other.draft.optimizer.state
    other.load(target / "checkpoint")  # weights alone, over an optimizer that has learned
    assert not other.draft.optimizer.state and other.draft.updates == 0
    heads["weights of a head that learned"] = head_of(other)
    without = engine_with(DraftConfig())
    without.load(target / "checkpoint", with_optimizer=True)
    without.save(target / "without", with_optimizer=True)
    engine.load(target / "without", with_optimizer=True)  # a run without the layer leaves the layer as it is
    heads["kept"] = head_of(engine)
    return heads


def load_in_another_layout(folder, checkpoint, layout):
    engine = make_engine(folder, LAYOUTS[layout][1], draft=MTP)
    engine.load(checkpoint, with_optimizer=True)
    found = head_of(engine)
    engine.train().train_batch(make_batch(), SFT)
    return found, head_of(engine)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", pytest.param("qwen3_next", marks=pytest.mark.thorough)])
def test_the_layer_goes_along_in_checkpoints_and_folders(models, family, tmp_path):
    folder = models / family
    heads = run_ranks(1, save_and_continue, folder, tmp_path, "1")[0]
    for name in ("resumed", "weights", "weights of a head that learned", "from the folder"):
        assert_equal(heads[name], heads["saved"])
    assert_equal(heads["resumed and continued"], heads["continued"])
    assert_equal(heads["kept"], heads["continued"])
    before = load_file(folder / "model.safetensors")
    for name, path in {"untrained": "untrained", "exported": "exported"}.items():
        saved = load_file(tmp_path / path / "model.safetensors")
        assert saved.keys() == before.keys()
        config = json.loads((tmp_path / path / "config.json").read_text())
        assert [config.get(key) for key in COUNTS.values()].count(1) == 1
        if name == "untrained":
            assert_same_bytes(saved, before)
    assert_equal({name: saved[name] for name in heads["saved"]}, heads["saved"])
    # The copies that DeepSeek-V3's naming has are those of the trained model.
    for copy, original in mtp_names(read_architecture(folder).mtp_layer()).copies.items():
        assert torch.equal(saved[copy], saved[original]) and not torch.equal(saved[copy], before[copy])
    run_ranks(1, convert_folder, tmp_path / "checkpoint", tmp_path / "converted")
    assert_same_bytes(load_file(tmp_path / "converted" / "model.safetensors"), saved)


@pytest.mark.slow
def test_a_checkpoint_of_the_layer_resumes_in_any_layout(models, tmp_path):
    folder, layout = models / "glm4_moe", "tp2_ep2"
    heads = run_ranks(2, save_and_continue, folder, tmp_path, layout)[0]
    for other, count in {"1": 1, "pp2": 2}.items():
        found, continued = run_ranks(count, load_in_another_layout, folder, tmp_path / "checkpoint", other)[0]
        assert_equal(found, heads["saved"])
        for name, tensor in heads["continued"].items():
            before = heads["saved"][name]
            assert relative_error(continued[name] - before, tensor - before) < 2e-3, name


def save_adapters(folder, target):
    def engine_with_adapters():
        return make_engine(folder, LAYOUTS["1"][1], draft=MTP, lora=LoraConfig(rank=2))

    engine = engine_with_adapters()
    engine.train().train_batch(make_batch(), SFT)
    engine.save(target / "checkpoint", with_optimizer=True)
    engine.save(target / "exported")
    other = engine_with_adapters()
    other.load(target / "checkpoint", with_optimizer=True)
    return head_of(engine), head_of(other)


@pytest.mark.thorough
def test_the_layer_goes_along_with_adapters(models, tmp_path):
    saved, resumed = run_ranks(1, save_adapters, models / "glm4_moe", tmp_path)[0]
    assert_equal(resumed, saved)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert_equal({name: exported[name] for name in saved}, saved)
    assert exported.keys() == load_file(models / "glm4_moe" / "model.safetensors").keys()
    assert (tmp_path / "exported" / "adapter" / "adapter_config.json").is_file()


class OneDisk:
    """A receiver without servers. It notes the folder that a publication would have servers load."""

    def __init__(self):
        self.folder, self.server_ranks = None, ["none"]

    def __getattr__(self, name):
        return lambda *args, **kwargs: {}

    def load_folder(self, folder, version):
        self.folder = folder
        return {}


def publish_to_disk(folder, target, layout):
    engine = make_engine(folder, LAYOUTS[layout][1], draft=MTP)
    engine.config.publication, engine.config.publication_folder = "disk", str(target)
    engine.train().train_batch(make_batch(), SFT)
    engine.update_weights(OneDisk() if engine.groups.is_main else None, 3)
    return head_of(engine)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2_sp", marks=pytest.mark.thorough)])
def test_a_version_on_a_disk_has_the_trained_layer(models, layout, tmp_path):
    folder = models / "glm4_moe"
    head = run_ranks(2, publish_to_disk, folder, tmp_path, layout)[0]
    saved, before = load_file(tmp_path / "version-3" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert saved.keys() == before.keys()
    assert_equal({name: saved[name] for name in head}, head)
    copies = mtp_names(read_architecture(folder).mtp_layer()).copies
    assert len(copies) == 2
    for copy, original in copies.items():
        assert torch.equal(saved[copy], saved[original]) and not torch.equal(saved[copy], before[copy])


# -- refused -----------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_layer_that_can_be_trained_is_refused_by_name(models, tmp_path):
    make_model("llama", tmp_path / "llama", layers=2)
    with pytest.raises(ValueError, match="draft.kind = 'mtp': llama has no multi-token-prediction layer, and deepseek"):
        check_draft(read_architecture(tmp_path / "llama"), "mtp")
    with pytest.raises(ValueError, match="draft.kind = 'mtp': a reward model generates no tokens"):
        check_draft(read_architecture(models / "qwen3_5").with_head("value"), "mtp")
    make_model("qwen3_5", tmp_path / "plain", layers=2)
    arch = read_architecture(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"plain' has no multi-token-prediction layer \(mtp.fc.weight is missing\)"):
        mtp_source(tmp_path / "plain", arch)
    own = load_file(models / "qwen3_5" / "model.safetensors")
    path = tmp_path / "plain" / "model.safetensors"
    save_file(own | {"mtp.layers.1.input_layernorm.weight": torch.zeros(64)}, path)
    with pytest.raises(ValueError, match="mtp.layers.1.input_layernorm.weight in .* is no tensor of the one"):
        mtp_source(tmp_path / "plain", arch)
    save_file(own | {"mtp.fc.weight": own["mtp.fc.weight"].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ValueError, match="mtp.fc.weight in .* has dtype F8_E4M3: supported are F64"):
        mtp_source(tmp_path / "plain", arch)
