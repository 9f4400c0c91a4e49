"""A draft head that learns next to the policy: the policy's bits stay, and the head is the same in every layout."""

import pytest
import torch
from drafted import DEEP_EAGLE, EAGLE, SFT, assert_alike, assert_same_policy, by_autograd, copied, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Model

from megatron_rl.batch.packing import to_microbatch
from megatron_rl.config import DraftConfig, EngineConfig, ModelConfig, ParallelConfig
from megatron_rl.engine.draft_head import DraftHead, draft_rows, soft_cross_entropy
from megatron_rl.engine.fsdp_engine import FSDPEngine
from megatron_rl.ops import VocabShard
from megatron_rl.parallel import Axis
from megatron_rl.tools.convert import convert_folder
from megatron_rl.tools.embedded_server.decoder_config import DecoderConfig
from megatron_rl.tools.embedded_server.drafting_decoder import DraftingDecoder
from megatron_rl.tools.embedded_server.transformer import KVCache
from megatron_rl.types import TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.draft_files import check_draft, read_draft, shapes_for, write_draft
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_groups, make_model
from tests.kit.ranks import run_each, run_ranks

TIED, UNTIED = "qwen3_tied_one_kv_head", "qwen2"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models, each with a random head in its folder."""
    folder = tmp_path_factory.mktemp("models")
    for family in (TIED, UNTIED):
        make_model(family, folder / family, layers=2)
        arch, generator = read_architecture(folder / family), torch.Generator().manual_seed(5)
        shapes = shapes_for(arch).items()
        tensors = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes}
        write_draft(folder / family, tensors, arch)
    return folder


@pytest.fixture(scope="module")
def alone(models):
    """What one process makes of each, with and without a head."""
    cases = {
        (family, draft.kind, make): (models / family, "1", draft, make)
        for family in (TIED, UNTIED)
        for draft in (EAGLE, DraftConfig())
        for make in (make_batch, make_groups)
    }
    return {case: found[0] for case, found in run_each(1, train, cases).items()}


@pytest.mark.parametrize("make", [make_batch, make_groups], ids=["sequences", "trees"])
@pytest.mark.parametrize("family", [TIED, UNTIED])
def test_the_policy_is_the_same_to_the_bit_with_and_without_a_head(alone, family, make):
    found, expected = alone[family, "eagle", make], alone[family, "none", make]
    assert_same_policy(found, expected)
    assert any(not torch.equal(found["first"][name], tensor) for name, tensor in found["draft"].items())


def by_transformers(folder, batch, depths=1):
    """Loss, acceptance and gradient norm of a head, by float64 autograd over transformers' models."""
    policy = AutoModelForCausalLM.from_pretrained(folder).double()
    layer = Qwen2Model(Qwen2Config.from_pretrained(folder / "draft")).double()
    hidden_size, eps = policy.config.hidden_size, policy.config.rms_norm_eps
    fc = torch.nn.Linear(2 * hidden_size, hidden_size, bias=False).double()
    norms = torch.nn.ModuleDict({name: torch.nn.RMSNorm(hidden_size, eps=eps) for name in ("hidden", "token")}).double()
    own = load_file(folder / "draft" / "model.safetensors")
    own = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in own.items()}
    fc.load_state_dict({"weight": own.pop("input_proj.weight")})
    norms.load_state_dict({f"{name}.weight": own.pop(f"{name}_layernorm.weight") for name in norms})
    layer.norm.load_state_dict({"weight": own.pop("final_layernorm.weight")})
    layer.layers[0].load_state_dict(own)  # its names are those of a layer of Qwen2
    layer.embed_tokens.requires_grad_(False)

    def states_of(hidden, embedded):
        inputs = fc(torch.cat([norms["hidden"](hidden), norms["token"](embedded)], -1))
        return layer(inputs_embeds=inputs[None]).last_hidden_state[0]

    return by_autograd(policy, states_of, (layer, fc, norms), batch, depths, knows_first=False)


@pytest.mark.parametrize("make", [make_batch, make_groups], ids=["sequences", "trees"])
@pytest.mark.parametrize("family", [TIED, UNTIED])
def test_loss_and_gradient_are_those_of_transformers_layer(models, alone, family, make):
    first, *_, last = alone[family, "eagle", make]["metrics"]
    assert first == pytest.approx(by_transformers(models / family, make()), rel=1e-4)
    assert last["draft/loss"] < first["draft/loss"]


@pytest.fixture(scope="module")
def deep(models):
    """Results of training a head for three consecutive guesses in one process."""
    return run_ranks(1, train, models / TIED, "1", DEEP_EAGLE, make_groups)[0]


def test_consecutive_guesses_are_learned_from_the_heads_own_states(models, alone, deep):
    assert_same_policy(deep, alone[TIED, "none", make_groups])
    first, *_, last = deep["metrics"]
    assert first == pytest.approx(by_transformers(models / TIED, make_groups(), depths=3), rel=1e-4)
    assert first["draft/loss"] == alone[TIED, "eagle", make_groups]["metrics"][0]["draft/loss"]
    assert all(last[f"draft/loss{behind}"] < first[f"draft/loss{behind}"] for behind in ("", "_2", "_3"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", *(pytest.param(it, marks=pytest.mark.thorough) for it in ("tp2_sp", "pp2"))])
def test_consecutive_guesses_of_every_layout_are_those_of_one_process(models, deep, layout):
    assert_alike(run_ranks(2, train, models / TIED, layout, DEEP_EAGLE, make_groups)[0], deep)


# The smallest layout that can break each axis; a head of one process in the others.
QUICK = {"tp2_sp": (TIED, make_groups), "pp2": (TIED, make_batch), "cp2": (UNTIED, make_groups)}
THOROUGH = {
    "tp2": (UNTIED, make_batch),
    "tp2_pp2": (UNTIED, make_groups),
    "dp2": (UNTIED, make_batch),
    "cp2_tp2": (UNTIED, make_groups),
    "cp2_tp2_pp2": (TIED, make_groups),
    "tp2_pp2_dp2": (TIED, make_batch),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*QUICK, *(pytest.param(layout, marks=pytest.mark.thorough) for layout in THOROUGH)])
def test_the_head_of_every_layout_is_that_of_one_process(models, alone, layout):
    family, make = (QUICK | THOROUGH)[layout]
    found = run_ranks(LAYOUTS[layout][0], train, models / family, layout, EAGLE, make)
    assert_alike(found[0], alone[family, "eagle", make])
    for other in found[1:]:  # replicas may not drift
        assert all(torch.equal(other["draft"][name], tensor) for name, tensor in found[0]["draft"].items())


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"tokens_per_microbatch": 16}, {"share_prompts": False}], ids=str)
def test_the_head_does_not_depend_on_the_microbatches(models, alone, options):
    found = run_ranks(1, train_with, models / TIED, options)[0]
    assert_alike(found, alone[TIED, "eagle", make_groups])


def train_with(folder, options):
    return train(folder, make=make_groups, **options)


def train_bfloat16(folder):
    return train(folder, dtype="bfloat16", distributed=True), train(
        folder, draft=DraftConfig(), dtype="bfloat16", distributed=True
    )


@pytest.mark.thorough
def test_bfloat16_and_the_distributed_optimizer_keep_the_policys_bits(models, alone):
    found, expected = run_ranks(1, train_bfloat16, models / TIED)[0]
    assert found["stats"] == expected["stats"]
    assert all(torch.equal(found["policy"][name], tensor) for name, tensor in expected["policy"].items())
    first = alone[TIED, "eagle", make_batch]["metrics"][0]
    assert found["metrics"][0]["draft/loss"] == pytest.approx(first["draft/loss"], rel=0.02)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found["draft"].values())


# -- parts, by hand ----------------------------------------------------------------------------------------------------


def test_rows_are_those_whose_prediction_the_policy_is_trained_on():
    # a b C D e F | G | h I J, of which the capital letters are trained.
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 1, 0, 1, 1]).bool()
    tokens = {"input_ids": torch.arange(10), "loss_mask": mask, "versions": mask.long() - 1, "logprobs": -1.0 * mask}
    batch = TrajectoryBatch(tokens, {"rewards": torch.zeros(3)}, torch.tensor([0, 6, 7, 10]))
    microbatch = to_microbatch(batch, [0, 1, 2], final_rows=False)
    rows, second, third = draft_rows(microbatch, Axis(None, 1, 0), depths=3)
    # The head predicts C after (a, b), D after (b, C), not e, F after (D, e), and J after (h, I).
    assert rows.reads.tolist() == [0, 1, 2, 3, 7] and rows.lengths == [4, 1]
    assert rows.learned.tolist() == [0, 1, 3, 4]
    # The second guess is D after (a, b, C), not e, F after (C, D, e), and nothing in the short sequence.
    assert second.reads.tolist() == second.before.tolist() == [0, 1, 2] and second.lengths == [3]
    assert second.learned.tolist() == [0, 2]
    assert third.reads.tolist() == [0, 1] and third.learned.tolist() == [1], "F after (b, C, D, e)"
    halves = [draft_rows(microbatch, Axis(None, 2, rank))[0] for rank in (0, 1)]
    assert [half.reads.tolist() for half in halves] == [[0, 1, 2, 3, 7], []], "the first and third, and the second"
    assert halves[1].lengths == [] and not len(halves[1].learned)


@pytest.mark.parametrize("chunk", [3, 100])
def test_gradient_of_the_soft_cross_entropy_is_autograds(chunk):
    generator = torch.Generator().manual_seed(0)
    states, taught, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 5), (7, 5), (13, 5))
    )
    states.requires_grad_()
    sums, gradient = soft_cross_entropy(states, taught, weight, VocabShard(0, 11, 11), chunk)  # two rows are padding
    p, log_q = (taught @ weight[:11].T).softmax(-1), (states @ weight[:11].T).log_softmax(-1)
    loss = -(p * log_q).sum()
    loss.backward()
    torch.testing.assert_close(gradient, states.grad)
    overlap = torch.minimum(p, log_q.exp()).sum()
    torch.testing.assert_close(sums, torch.stack([loss.detach(), overlap.detach(), torch.tensor(7.0)]).double())


def states_of_both(folder, ids):
    """The states of a head by trainer and server, over the same states and tokens."""
    engine = make_engine(folder, ParallelConfig(), draft=EAGLE)
    head, arch = engine.draft, engine.arch
    assert isinstance(head, DraftHead)
    decoder = DraftingDecoder(
        DecoderConfig.read(folder), dtype=torch.float32, device=torch.device("cpu"), context_length=64
    )
    decoder.load(folder)
    hidden = torch.randn(len(ids), arch.hidden, generator=torch.Generator().manual_seed(1))
    cache = KVCache(decoder.config, torch.float32, torch.device("cpu"), has_draft=True)
    cache.resize(1, 64, [])
    with torch.no_grad():
        served = decoder.draft(ids, hidden, [0], [0], cache, width=len(ids))
        embedded = decoder.embedding[torch.tensor(ids)]
        return head.states(hidden, embedded, torch.arange(len(ids)), [len(ids)]), served


@pytest.mark.parametrize("family", [TIED, UNTIED])
def test_trainer_and_server_compute_the_same_head(models, family):
    ours, served = run_ranks(1, states_of_both, models / family, list(range(20, 40)))[0]
    torch.testing.assert_close(ours, served, rtol=1e-5, atol=1e-5)


# -- saved and sent ----------------------------------------------------------------------------------------------------


def resume(folder, target):
    def engine_with(draft=EAGLE):
        return make_engine(folder, ParallelConfig(), draft=draft)

    engine, batch = engine_with(), make_batch()
    engine.train().train_batch(batch, SFT)
    engine.save(target / "checkpoint", with_optimizer=True)
    engine.save(target / "exported")
    saved = copied(engine.draft.tensors())
    engine.train_batch(batch, SFT)
    other = engine_with(DraftConfig(kind="eagle", lr=EAGLE.lr))
    other.load(target / "checkpoint", with_optimizer=True)
    resumed = copied(other.draft.tensors())
    other.train().train_batch(batch, SFT)
    weights_only = engine_with()
    weights_only.load(target / "checkpoint")
    exported = engine_with()
    exported.load(target / "exported")
    without = engine_with(DraftConfig())
    without.load(target / "checkpoint", with_optimizer=True)
    without.train().train_batch(batch, SFT)
    heads = {"resumed": resumed, "weights": weights_only.draft.tensors(), "exported": exported.draft.tensors()}
    continued = {"one": copied(engine.draft.tensors()), "other": copied(other.draft.tensors())}
    policies = {"one": copied(engine.hf_tensors()), "without": copied(without.hf_tensors())}
    without.save(target / "without", with_optimizer=True)
    engine.load(target / "without", with_optimizer=True)  # a run without a head leaves the head as it is
    kept = copied(engine.draft.tensors())
    return saved, {name: copied(head.items() if isinstance(head, dict) else head) for name, head in heads.items()}, {
        "continued": continued, "policies": policies, "kept": kept,
    }  # fmt: skip


def convert(source, target):
    convert_folder(source, target)


@pytest.mark.slow
def test_a_head_goes_along_in_checkpoints_and_folders(models, tmp_path):
    saved, heads, rest = run_ranks(1, resume, models / TIED, tmp_path)[0]
    for where, head in heads.items():
        assert all(torch.equal(head[name], tensor) for name, tensor in saved.items()), where
    one, other = rest["continued"].values()
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items()), "the optimizer's state goes along"
    assert all(torch.equal(rest["kept"][name], tensor) for name, tensor in one.items())
    with_head, without = rest["policies"].values()
    assert all(torch.equal(without[name], tensor) for name, tensor in with_head.items())
    run_ranks(1, convert, tmp_path / "checkpoint", tmp_path / "converted")
    arch = read_architecture(models / TIED)
    for folder in ("exported", "converted"):
        found = read_draft(tmp_path / folder, arch)
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.items()), folder
    run_ranks(1, convert, tmp_path / "without", tmp_path / "headless")
    assert not (tmp_path / "headless" / "draft").exists()


def sent(folder, layout):
    engine = make_engine(folder, LAYOUTS[layout][1], draft=EAGLE)
    export = engine._export_for_servers()
    whole = copied(export.stream())
    stage = copied(export.stream_of_stage())
    return whole, [spec.name for spec in export.specs], stage, copied(engine.draft.published())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [pytest.param("1", marks=pytest.mark.thorough), "pp2", pytest.param("tp2_pp2", marks=pytest.mark.thorough)],
)
def test_a_publication_ends_each_stage_with_its_tensors_and_has_the_head_once(models, layout):
    ranks = run_ranks(LAYOUTS[layout][0], sent, models / TIED, layout)
    whole, names, _, head = ranks[0]
    assert list(whole) == names and len(set(names)) == len(names)
    assert {name for name in names if name.startswith("draft.")} == head.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in head.items())
    by_stage = [name for _, _, stage, _ in ranks for name in stage]
    assert sorted(by_stage) == sorted(names), "each tensor is sent by one head of a stage"


# -- refused -----------------------------------------------------------------------------------------------------------


def test_what_has_no_head_is_refused_by_name(models, tmp_path):
    make_model("gemma3", tmp_path / "gemma3", layers=2)
    with pytest.raises(ValueError, match="draft.kind = 'eagle': .*qwen3_moe, not gemma3; set draft.kind=none"):
        check_draft(read_architecture(tmp_path / "gemma3"), "eagle")
    with pytest.raises(ValueError, match="draft.kind = 'eagle': a reward model generates no tokens"):
        make_engine(models / TIED, ParallelConfig(), draft=EAGLE, head="value")
    with pytest.raises(ValueError, match="draft.kind = 'eagle': FSDPEngine trains no draft head; use MegatronEngine"):
        FSDPEngine(EngineConfig(model=ModelConfig(path=str(models / TIED)), draft=EAGLE))


def test_a_head_of_other_sizes_is_refused_with_its_shapes(models, tmp_path):
    own = load_file(models / TIED / "draft" / "model.safetensors")
    arch = read_architecture(models / TIED)
    write_draft(tmp_path, own | {"model.mtp_layers.0.final_layernorm.weight": torch.zeros(3)}, arch)
    with pytest.raises(ValueError, match=r"final_layernorm.weight in .* has shape \(3,\), but .* makes it \(64,\)"):
        read_draft(tmp_path, arch)
