"""Low-rank adapters: those of one process are PEFT's, and every layout's are those of one process."""

from functools import cache

import pytest
import torch
from gathered import relative_error
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss
from megatron_rl.config import EngineConfig, LoraConfig, ModelConfig
from megatron_rl.engine.fsdp_engine import FSDPEngine
from megatron_rl.engine.model import transformer_config
from megatron_rl.weights.adapter_rules import adapter_shapes, write_peft_folder
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import adapters_of_stage
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_model, share_of
from tests.kit.optional import later
from tests.kit.ranks import run_each, run_ranks

peft = later("peft", reason="needs the package peft; make installs it")
SFT = LogprobLoss(supervised)
LORA = dict(rank=3, alpha=8.0)
TOLERANCE = 1e-4
"""A product of two small matrices has more rounding than one matrix."""
LR, EPS = 2e-3, 1e-3
"""Of Adam: rounding in small gradients is not to become whole steps."""
UPDATES = 2
GENTLE = {"eps": EPS, "lr": LR}


def make_adapted(folder, layout="1", lora=LORA, **options):
    return make_engine(folder, LAYOUTS[layout][1], lora=LoraConfig(**lora), **options)


def copied(stream):
    return {name: tensor.clone() for name, tensor in stream}


def train(folder, layout="1", lora=LORA, **options):
    """Two updates from the adapters beside the model; what rank 0 has of them."""
    engine = make_adapted(folder, layout, lora, **{"weight_decay": 0.1, "eps": EPS, "lr": LR} | options)
    engine.load(folder / "adapter")
    held = sum(part.numel() for part in engine.parameters() if part.requires_grad)
    found = {
        "held": (engine.groups.pipeline.rank, held),
        "start": copied(engine.hf_tensors()),
        "adapters": copied(engine.adapter_tensors()),
        "stats": [],
    }
    batch = share_of(make_batch(), engine)
    for _ in range(UPDATES):
        stats = engine.train().train_batch(batch, SFT)
        found["stats"].append((stats.loss, stats.grad_norm))
    return found | {"trained": copied(engine.adapter_tensors()), "merged": copied(engine.hf_tensors())}


def write_adapters(folder, lora=LORA):
    """Random adapters beside a model, so large that a mix-up shows."""
    arch, lora = read_architecture(folder), LoraConfig(**lora)
    generator = torch.Generator().manual_seed(3)
    shapes = adapter_shapes(arch, lora)
    tensors = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    write_peft_folder(folder / "adapter", tensors, arch, lora, folder)


def train_by_peft(model, folder):
    """The same updates by float64 autograd over transformers' model with PEFT's adapters, and torch's AdamW."""
    folder = folder / "adapter"
    model = peft.PeftModel.from_pretrained(model.double(), folder, is_trainable=True, autocast_adapter_dtype=False)
    own = {name: part for name, part in model.named_parameters() if part.requires_grad}
    optimizer = torch.optim.AdamW(own.values(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)
    batch, stats = make_batch(), []
    lengths = batch.lengths.tolist()
    for _ in range(UPDATES):
        loss, count = 0.0, 0
        for tokens, mask in zip(batch["input_ids"].split(lengths), batch["loss_mask"].split(lengths), strict=True):
            logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
            picked = logprobs.gather(1, tokens[1:, None])[:, 0]
            loss, count = loss - picked[mask[1:]].sum(), count + int(mask[1:].sum())
        optimizer.zero_grad()
        (loss / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
        stats.append((loss.item() / count, norm.item()))
        optimizer.step()
    trained = {
        name.removeprefix("base_model.model.").replace(".default", ""): part.detach() for name, part in own.items()
    }
    return {"stats": stats, "trained": trained, "merged": model.merge_and_unload().state_dict()}


def assert_trained_alike(found, expected):
    """Losses and gradient norms are equal, and so are the adapters to a part of what they have changed by."""
    torch.testing.assert_close(torch.tensor(found["stats"]), torch.tensor(expected["stats"]), rtol=TOLERANCE, atol=0)
    assert found["trained"].keys() == expected["trained"].keys()
    for name, tensor in expected["trained"].items():
        before = found["adapters"][name].double()
        assert relative_error(found["trained"][name] - before, tensor - before) < TOLERANCE, name
    for name, tensor in found["merged"].items():
        torch.testing.assert_close(tensor, expected["merged"][name].float(), rtol=1e-5, atol=1e-5)


def trained_by_one(models, families, layers=2):
    """Make models and adapters of these families, and train them in one process, one after the other."""
    made = {family: make_model(family, models / family, layers) for family in families}
    for family in families:
        write_adapters(models / family)
    return made, run_each(1, train, {family: (models / family,) for family in families})


PEFT = ("qwen2_tied", "llama", "gemma3", "olmo", "phi3", "qwen3_5")


@pytest.fixture(scope="module")
def beside_peft(tmp_path_factory):
    """The folder of the models of PEFT, the models, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("peft")
    return folder, *trained_by_one(folder, PEFT)


@pytest.mark.parametrize("family", PEFT)
def test_losses_and_updates_are_those_of_peft(family, beside_peft):
    folder, models, found = beside_peft
    assert_trained_alike(found[family][0], train_by_peft(models[family], folder / family))


DISTRIBUTED = {"distributed": True}
OVERLAP = DISTRIBUTED | {"overlap": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DENSE, MIXTURE, LATENT, NORMED = "qwen3_tied_one_kv_head", "qwen3_moe", "deepseek_v3", "gemma3"
# Each axis, each kind of matrix on it, and each kind of optimizer.
GRID = {
    "tp2": ("tp2", DENSE, {}),  # two ranks share the one key-value head
    "tp2_sp": ("tp2_sp", DENSE, DISTRIBUTED),
    "tp2_sp_qkv_bias": ("tp2_sp", "qwen2", {}),
    "tp2_sp_norms_behind": ("tp2_sp", NORMED, {}),
    "tp2_sp_one_tensor_each": ("tp2_sp", "phi3", {}),
    "tp2_sp_delta_nets": ("tp2_sp", "qwen3_5", {}),
    "tp2_sp_stacked_experts": ("tp2_sp", "gpt_oss", {}),
    "pp2_tied": ("pp2", DENSE, {}),
    "pp2_vpp2": ("pp2_vpp2", DENSE, {}),
    "dp2_overlap": ("dp2", DENSE, OVERLAP),
    "cp2": ("cp2", DENSE, {}),
    "tp2_pp2_dp2": ("tp2_pp2_dp2", DENSE, DISTRIBUTED),
    "ep2": ("ep2", MIXTURE, {}),
    "etp2": ("etp2", MIXTURE, DISTRIBUTED),
    "tp2_ep2": ("tp2_ep2", MIXTURE, DISTRIBUTED),
    "tp2_etp2": ("tp2_etp2", MIXTURE, {}),
    "tp2_pp2_ep2": ("tp2_pp2_ep2", MIXTURE, {}),
    "tp2_latent": ("tp2_sp", LATENT, {}),
    "tp2_ep2_delta_net": ("tp2_ep2", "qwen3_next", {}),
    "recomputed": ("1", DENSE, {"megatron": RECOMPUTED}),
    "small_microbatches": ("1", DENSE, {"tokens_per_microbatch": 16}),
}
THOROUGH = ("pp2_tied", "tp2_pp2_dp2", "tp2_etp2", "tp2_pp2_ep2", "tp2_ep2_delta_net", "small_microbatches")
THOROUGH += ("tp2_ep2", "tp2_sp", "tp2_sp_qkv_bias", "tp2_sp_norms_behind", "dp2_overlap")
QUICK = GRID.keys() - THOROUGH
"""Each axis and each kind of matrix once, on two ranks: enough for `make test`."""


def layers_of(line):
    return 4 if LAYOUTS[GRID[line][0]][1].virtual_pipeline > 1 else 2


def save_trained(folder, layout, lora):
    engine = make_adapted(folder, layout, lora, lr=LR)
    engine.load(folder / "adapter")
    engine.train().train_batch(share_of(make_batch(), engine), SFT)
    engine.write_weights(folder / "trained")


# peft 0.21 joins the adapters of a layer's experts, and leaves out those of dense layers beside such layers and of
# shared experts, which it takes for these.
@pytest.mark.slow
@pytest.mark.parametrize(
    "family,layout,targets",
    [
        ("qwen2", "tp2_sp", []),
        pytest.param("qwen2", "tp2_pp2_dp2", [], marks=pytest.mark.thorough),
        ("qwen3_moe_raw_weights", "tp2_ep2", []),
        pytest.param("mixtral", "etp2", [], marks=pytest.mark.thorough),
        ("deepseek_v3", "ep2", ["o_proj", "q_b_proj", "experts.gate_proj", "experts.up_proj", "experts.down_proj"]),
    ],
)
def test_saved_weights_are_merged_and_beside_them_adapters_that_peft_loads(tmp_path, family, layout, targets):
    base, lora = make_model(family, tmp_path, layers=2), LORA | {"targets": targets}
    write_adapters(tmp_path, lora)
    run_ranks(LAYOUTS[layout][0], save_trained, tmp_path, layout, lora)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "trained" / "adapter")
    tokens = make_batch()["input_ids"][None, :24]
    with adapted.disable_adapter():
        before = adapted(input_ids=tokens).logits
    logits = adapted(input_ids=tokens).logits
    assert (logits - before).abs().max() > 0.1
    torch.testing.assert_close(logits, merged(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def train_with(folder, layout, options):
    return train(folder, layout, **options)


@pytest.fixture(scope="module")
def trained(models):
    """A function: line -> the model's folder, what one process makes of it, and what the line's ranks do."""

    @cache
    def alone(layers, is_quick):
        own = (line for line in GRID if (layers_of(line), line in QUICK) == (layers, is_quick))
        folder = models / f"{layers} layers, quick {is_quick}"
        return folder, trained_by_one(folder, {GRID[line][1] for line in own}, layers)[1]

    def folder_of(line):
        return alone(layers_of(line), line in QUICK)[0] / GRID[line][1]

    @cache
    def run(ranks, is_quick):
        own = [line for line in GRID if (LAYOUTS[GRID[line][0]][0], line in QUICK) == (ranks, is_quick)]
        return run_each(ranks, train_with, {line: (folder_of(line), GRID[line][0], GRID[line][2]) for line in own})

    def of(line):
        layout, family, _ = GRID[line]
        one = alone(layers_of(line), line in QUICK)[1][family][0]
        return folder_of(line), one, run(LAYOUTS[layout][0], line in QUICK)[line]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=() if line in QUICK else pytest.mark.thorough) for line in GRID]
)
def test_every_layout_trains_the_same_adapters(line, trained):
    layout, _, _ = GRID[line]
    folder, expected, ranks = trained(line)
    arch = read_architecture(folder)
    for stage, count in (rank["held"] for rank in ranks):
        assert adapters_of_stage(arch, LoraConfig(**LORA), LAYOUTS[layout][1], stage).total == count
    found = ranks[0]
    for name, tensor in expected["adapters"].items():
        assert torch.equal(found["adapters"][name], tensor), name
    for name, tensor in expected["start"].items():
        torch.testing.assert_close(found["start"][name], tensor)
    assert_trained_alike(found, expected)


def begin_with(folder, layout, path):
    lora = LORA | {"path": str(path)}
    engine = make_adapted(folder, layout, lora)
    begun = copied(engine.adapter_tensors())
    batch = share_of(make_batch(), engine)
    stats = engine.train().train_batch(batch, SFT)
    return begun, stats.loss


@pytest.mark.slow
def test_a_run_begins_with_the_adapters_of_its_path(tmp_path):
    make_model("qwen2", tmp_path, layers=2)
    write_adapters(tmp_path)
    loaded, (begun, loss) = (
        run_ranks(1, train, tmp_path)[0],
        run_ranks(2, begin_with, tmp_path, "tp2_sp", tmp_path / "adapter")[0],
    )
    assert begun.keys() == loaded["adapters"].keys()
    assert all(torch.equal(tensor, loaded["adapters"][name]) for name, tensor in begun.items())
    assert loss == pytest.approx(loaded["stats"][0][0], rel=1e-6), "the first loss is theirs, and not the model's"
    with pytest.raises(Exception, match="lora.path = .*no adapter_config.json there; give a folder in PEFT's format"):
        run_ranks(1, begin_with, tmp_path, "1", tmp_path)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["o_proj", "mlp.up_proj"]])
def test_matrices_that_are_no_targets_stay_as_they_are(tmp_path, targets):
    """Also within a fused matrix, of which other parts are targets."""
    make_model("qwen2", tmp_path, layers=2)
    lora = LORA | {"targets": targets}
    write_adapters(tmp_path, lora)
    found = run_ranks(2, train_with, tmp_path, "tp2_sp", {"lora": lora})[0]
    ends = tuple(target.rpartition(".")[2] for target in targets)
    before = load_file(tmp_path / "model.safetensors")
    changed = {name for name, tensor in found["merged"].items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.split(".")[-2] in ends and name.endswith(".weight")}
    assert {name.split(".")[-3] for name in found["trained"]} == set(ends)


def first_state(folder, layout):
    """The adapters before any update; the policy's log-probs, the reference's, and those after an update."""
    engine = make_adapted(folder, layout)
    batch = share_of(make_batch(), engine)
    adapters, first = copied(engine.adapter_tensors()), engine.eval().forward(batch)
    engine.train().train_batch(batch, SFT)
    reference, after = engine.eval().base.forward(batch), engine.forward(batch)
    sizes = {id(part): part.numel() for part in engine.parameters() if part.requires_grad}
    buffers = [buffer for chunk in engine.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    main = [
        part
        for inner in engine.optimizer.chained_optimizers
        for group in inner.param_groups
        for part in group["params"]
    ]
    held = sum(sizes.values()), sum(buffer.numel_unpadded for buffer in buffers), sum(part.numel() for part in main)
    return adapters, first, reference, after, held, sum(part.numel() for part in engine.parameters())


@pytest.mark.slow
def test_the_frozen_weights_are_the_reference_and_have_neither_gradients_nor_an_optimizer(tmp_path):
    make_model("llama", tmp_path, layers=2)
    adapters, first, reference, after, held, all_of_them = run_ranks(1, first_state, tmp_path, "1")[0]
    assert torch.equal(first, reference) and not torch.allclose(first, after, atol=1e-4)
    # Per layer: 3 x (64 + 64), 2 x (64 + 32), 64 + 64, twice 64 + 96 and 96 + 64, by a rank of 3.
    assert held == (2 * 3 * (2 * 128 + 2 * 96 + 3 * 160),) * 3 and all_of_them > 10 * held[0]
    for name, tensor in adapters.items():
        if "lora_B" in name:
            assert not tensor.any()
        else:  # uniform, as PEFT's
            bound = tensor.shape[1] ** -0.5
            assert tensor.abs().max() <= bound and tensor.std() == pytest.approx(bound / 3**0.5, rel=0.15)
    of_four = run_ranks(4, first_state, tmp_path, "tp2_pp2")[0][0]
    assert all(torch.equal(of_four[name], tensor) for name, tensor in adapters.items())


def resume_and_save(folder, layout, source, target, options):
    engine = make_adapted(folder, layout, **GENTLE | options)
    if source is not None:
        engine.load(source, with_optimizer=True)
    loaded = copied(engine.adapter_tensors())
    engine.train().train_batch(share_of(make_batch(), engine), SFT)
    engine.save(target, with_optimizer=True)
    return loaded, copied(engine.adapter_tensors())


def uninterrupted(folder, updates):
    engine, trained = make_adapted(folder, **GENTLE), []
    for _ in range(updates):
        engine.train().train_batch(make_batch(), SFT)
        trained.append(copied(engine.adapter_tensors()))
    return trained


@pytest.mark.slow
@pytest.mark.parametrize(
    "family,links",
    [
        (MIXTURE, [("tp2_ep2", DISTRIBUTED), ("etp2", {})]),
        pytest.param(DENSE, [("1", {}), ("dp2", DISTRIBUTED), ("pp2_vpp2", {})], marks=pytest.mark.thorough),
        pytest.param(DENSE, [("1", {}), ("tp2_pp2", {}), ("dp2", DISTRIBUTED)], marks=pytest.mark.thorough),
        pytest.param(MIXTURE, [("1", {}), ("tp2_ep2", DISTRIBUTED)], marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint_holds_adapters_alone_and_continues_in_any_layout(family, links, tmp_path):
    make_model(family, tmp_path / "model", 4 if "pp2_vpp2" in dict(links) else 2)
    expected = run_ranks(1, uninterrupted, tmp_path / "model", len(links))[0]
    source, saved = None, None
    for number, (layout, options) in enumerate(links):
        target = tmp_path / f"checkpoint-{number}"
        ranks = LAYOUTS[layout][0]
        loaded, trained = run_ranks(ranks, resume_and_save, tmp_path / "model", layout, source, target, options)[0]
        for name, tensor in (saved or {}).items():
            assert torch.equal(loaded[name], tensor), name
        for name, tensor in trained.items():
            torch.testing.assert_close(tensor, expected[number][name], rtol=1e-4, atol=1e-6)
        source, saved = target, trained
    saved_tensors = FileSystemReader(target).read_metadata().state_dict_metadata
    assert all(".lora_" in key for key in saved_tensors if "weight" in key or "lora" in key or "optimizer" in key)


@pytest.fixture(scope="module")
def saved(models):
    """A model with two checkpoints beside it, one of adapters."""
    make_model("llama", models / "saved")
    run_ranks(1, save_both, models / "saved")
    return models / "saved"


def save_both(folder):
    make_adapted(folder).save(folder / "adapted", with_optimizer=True)
    make_engine(folder, LAYOUTS["1"][1]).save(folder / "whole", with_optimizer=True)


def load_checkpoint(folder, checkpoint, lora):
    make_adapted(folder, lora=lora).load(checkpoint, with_optimizer=True)


@pytest.mark.parametrize(
    "checkpoint,lora,message",
    [
        ("whole", LORA, "holds a whole model, without adapters; set lora.rank=0."),
        ("adapted", {}, "holds adapters alone; set lora.rank=3."),
        ("adapted", LORA | {"alpha": 4.0}, "lora.alpha = 4.0: the checkpoint .* has 8.0; give the same value."),
        ("adapted", LORA | {"targets": ["q_proj"]}, "lora.targets = .* has \\[\\]; give the same value."),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(saved, checkpoint, lora, message):
    with pytest.raises(AssertionError, match=message):
        run_ranks(1, load_checkpoint, saved, saved / checkpoint, lora)


def test_adapters_of_another_model_are_refused(saved, models):
    other = make_model("llama", models / "other")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 0.01
    other.save_pretrained(models / "other")
    with pytest.raises(AssertionError, match="model.path = .*holds other weights than the adapters"):
        run_ranks(1, load_checkpoint, models / "other", saved / "adapted", LORA)


@pytest.mark.parametrize(
    "lora,change,message",
    [
        (dict(rank=-1), {}, "lora.rank = -1: must be at least 0; 0 trains the whole model."),
        (dict(rank=2, alpha=0.0), {}, "lora.alpha = 0.0: must be above 0."),
        (dict(rank=2, targets=["q_proj", "w1"]), {}, "lora.targets = .*'w1' is no projection of llama, which has "),
        (dict(rank=2), {"init": "random"}, "model.init = 'random': lora.rank = 2 would leave those weights"),
        (dict(rank=2), {"transformer_impl": "transformer_engine"}, "lora.rank = 2 adapts megatron.core's local"),
    ],
)
def test_options_that_do_not_go_with_adapters_are_refused(tmp_path, lora, change, message):
    make_model("llama", tmp_path)
    with pytest.raises(ValueError, match=message):
        config = EngineConfig(model=ModelConfig(path=str(tmp_path), **change), lora=LoraConfig(**lora))
        transformer_config(read_architecture(tmp_path), config, {})


def test_critics_and_the_other_backend_have_no_adapters(tmp_path):
    make_model("llama", tmp_path)
    config = EngineConfig(model=ModelConfig(path=str(tmp_path)), lora=LoraConfig(rank=2))
    with pytest.raises(ValueError, match="lora.rank = 2: a value head starts at zero"):
        transformer_config(read_architecture(tmp_path).with_head("value"), config, {})
    with pytest.raises(ValueError, match="lora.rank = 2: FSDPEngine trains whole models; use MegatronEngine"):
        FSDPEngine(config)


def in_bfloat16(folder, layout):
    engine = make_adapted(folder, layout, dtype="bfloat16", lr=LR)
    engine.load(folder / "adapter")
    base = engine.adapters._base
    before = [weight.clone() for weight, _ in base]
    losses = [engine.train().train_batch(share_of(make_batch(), engine), SFT).loss for _ in range(8)]
    assert all(torch.equal(weight, kept) for (weight, _), kept in zip(base, before, strict=True))
    return losses, copied(engine.hf_tensors()), copied(engine.adapter_tensors())


@pytest.mark.slow
def test_a_merged_matrix_in_bfloat16_is_rounded_once(models):
    make_model("qwen2", models / "bf16", layers=2)
    write_adapters(models / "bf16")
    losses, merged, adapters = run_ranks(2, in_bfloat16, models / "bf16", "tp2_sp")[0]
    assert losses[-1] < losses[0] - 0.05
    whole = load_file(models / "bf16" / "model.safetensors")
    for name, tensor in merged.items():
        exact = whole[name].bfloat16().double()
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in adapters:
            a, b = (adapters[f"{stem}.lora_{part}.weight"] for part in "AB")
            assert a.dtype == tensor.dtype == torch.bfloat16
            exact = exact + 8.0 / 3 * b.double() @ a.double()
        # Half of bfloat16's last place, of which it has 8, and what float32 sums leave of it.
        assert ((tensor.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-7).all(), name
