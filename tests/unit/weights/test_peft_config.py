"""Each key of PEFT's adapter_config.json is applied as PEFT does, or refused by name."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config import LoraConfig
from megatron_rl.weights.adapter_rules import PeftFolder, merged_matrices
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.peft_config import APPLIED, FILE, MUST_BE_OFF, SAYS_NOTHING, read_peft_config
from tests.kit.models import make_model
from tests.kit.optional import later

peft = later("peft", reason="needs the package peft; make installs it")
ADAPTED = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_model("llama", folder)


def write_adapter(model, folder, **options):
    """Save adapters with random values as PEFT saves them."""
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTED | options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(folder)
    adapted.unload()


def change(folder, **changes):
    path = folder / FILE
    said = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not ...}))


def test_every_option_of_peft_is_applied_or_refused_or_says_nothing():
    known = set(APPLIED) | SAYS_NOTHING | MUST_BE_OFF.keys() | {"bias"}
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= known
    assert len(known) == len(APPLIED) + len(SAYS_NOTHING) + len(MUST_BE_OFF) + 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.0\.mlp\.down_proj": 16}},
        {"rank_pattern": {"^model.layers.1.self_attn.q_proj": 8, "q_proj": 2}, "use_rslora": True},
        {"target_modules": r".*\.(q|up)_proj", "lora_dropout": 0.1},
        {"exclude_modules": ["layers.1.mlp.down_proj"]},
        {"layers_to_transform": [1], "layers_pattern": "layers", "init_lora_weights": "gaussian"},
        {"r": 8, "lora_alpha": 8},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_merged_matrices_are_those_that_peft_merges(options, model, tmp_path):
    folder, base = model
    write_adapter(base, tmp_path, **options)
    if options.get("r") == 8:
        change(tmp_path, r=..., lora_alpha=...)  # PEFT's own defaults
    merged = dict(merged_matrices(folder, tmp_path, torch.float32))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path)
    theirs.merge_adapter()
    layers = {name: layer for name, layer in theirs.named_modules() if hasattr(layer, "lora_A")}
    expected = {f"{name.removeprefix('base_model.model.')}.weight": it.base_layer.weight for name, it in layers.items()}
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name].detach(), msg=name)
    theirs.unmerge_adapter()
    theirs.unload()


ON = {
    **dict.fromkeys(MUST_BE_OFF, True),
    "bias": "all",
    "init_lora_weights": "pissa_niter_4",
    "task_type": "SEQ_CLS",
    "an_option_of_tomorrow": 1,
    "r": 0,
    "lora_alpha": "16",
    "rank_pattern": {"q_proj": 2.5},
    "alpha_pattern": ["q_proj"],
    "target_modules": "*q_proj",
    "exclude_modules": [3],
    "layers_to_transform": "1",
    "layers_pattern": {"layers": 1},
    "use_rslora": "yes",
}


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(model[1], folder)
    return folder


def copied(folder, target):
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("key", [*ON, "peft_type"])
def test_a_key_that_cannot_be_applied_is_refused_with_file_and_value(key, model, adapter, tmp_path):
    folder = copied(adapter, tmp_path)
    for value in ["ADALORA", "LOHA", "IA3", None] if key == "peft_type" else [ON[key]]:
        change(folder, **{key: value})
        with pytest.raises(ValueError, match=rf"{FILE}: {key} = .*; .*\.$"):
            next(merged_matrices(model[0], folder, torch.float32))
        with pytest.raises(ValueError, match=rf"{FILE}: {key} = .*; .*\.$"):
            PeftFolder(folder, read_architecture(model[0]), LoraConfig(rank=4, alpha=6.0))


@pytest.mark.parametrize("way", ["loftq", "pissa", "olora", "corda", "lora_ga", "mica"])
def test_adapters_that_belong_to_other_base_weights_are_refused(way, adapter, tmp_path):
    change(copied(adapter, tmp_path), init_lora_weights=way)
    with pytest.raises(ValueError, match="the adapter may belong to other base weights than the model's"):
        read_peft_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "lora", "message"),
    [
        ({}, {"rank": 2}, "lora.rank = 2: .* has r = 4 for model.layers.0"),
        ({}, {"alpha": 3.0}, "lora.alpha = 3.0: .* has lora_alpha = 6 for .*, divided by r; give 6,"),
        ({"use_rslora": True}, {}, r"lora_alpha = 6 for .* \(use_rslora\); give 12,"),
        ({"alpha_pattern": {"down_proj": 9}}, {}, "alpha_pattern = 9 for model.layers.0.mlp.down_proj, .* give 9,"),
        ({"target_modules": ["q_proj"]}, {}, "leave out model.layers.0.mlp.down_proj, but the folder has its adapter"),
        ({"exclude_modules": ".*q_proj"}, {}, "leave out model.layers.0.self_attn.q_proj, but the folder has"),
        ({"layers_to_transform": 0}, {}, "leave out model.layers.1"),
        ({"rank_pattern": {"q_proj": 2}}, {}, "give model.layers.0.self_attn.q_proj the rank 2, and its lora_A has 4"),
    ],
)
def test_a_folder_of_another_scale_rank_or_extent_is_refused(changes, lora, message, model, adapter, tmp_path):
    change(copied(adapter, tmp_path), **changes)
    lora = LoraConfig(**{"rank": 4, "alpha": 6.0, "targets": ["q_proj", "down_proj"]} | lora)
    with pytest.raises(ValueError, match=message):
        PeftFolder(tmp_path, read_architecture(model[0]), lora)


def test_an_adapter_scaled_by_the_root_of_its_rank_is_taken_by_the_alpha_that_gives_the_same(model, adapter, tmp_path):
    change(copied(adapter, tmp_path), use_rslora=True)
    lora = LoraConfig(rank=4, alpha=12.0, targets=["q_proj", "down_proj"])
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    found = PeftFolder(tmp_path, read_architecture(model[0]), lora).read(name, 0, 0, 4)
    assert torch.equal(found, load_file(tmp_path / "adapter_model.safetensors")[f"base_model.model.{name}"])


@pytest.mark.parametrize("part, dim", [("lora_A", 1), ("lora_B", 0), ("lora_B", 1)])
@pytest.mark.parametrize("longer", [1, -1])
def test_an_adapter_of_a_larger_or_smaller_model_is_refused_and_not_cut(part, dim, longer, model, adapter, tmp_path):
    file = copied(adapter, tmp_path) / "adapter_model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.1.mlp.down_proj.{part}.weight"
    shape = list(tensors[f"base_model.model.{name}"].shape)
    shape[dim] += longer
    save_file(tensors | {f"base_model.model.{name}": torch.ones(shape)}, file)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} has shape \({shape[0]}, {shape[1]}\), but .* needs "):
        next(merged_matrices(model[0], tmp_path, torch.float32))
    lora = LoraConfig(rank=4, alpha=6.0, targets=["q_proj", "down_proj"])
    if not (part == "lora_B" and dim == 1):  # its columns are the rank, of which lora_A speaks
        with pytest.raises(ValueError, match=rf"lora.path: .*{re.escape(name)} of {tmp_path} has shape .* this model"):
            PeftFolder(tmp_path, read_architecture(model[0]), lora)


def test_a_projection_that_the_folder_does_not_adapt_is_named(model, adapter):
    lora = LoraConfig(rank=4, alpha=6.0, targets=["q_proj", "down_proj", "v_proj"])
    with pytest.raises(ValueError, match="lora.path: .* no tensor .*v_proj.lora_A.weight, which lora.tar"):
        PeftFolder(adapter, read_architecture(model[0]), lora)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.lora_embedding_A", "{q}.lora_magnitude_vector"])
def test_tensors_that_are_no_part_of_an_adapter_are_refused_and_not_left_out(name, model, adapter, tmp_path):
    file = copied(adapter, tmp_path) / "adapter_model.safetensors"
    name = f"base_model.model.{name.format(q='model.layers.0.self_attn.q_proj')}"
    save_file(load_file(file) | {name: torch.zeros(4)}, file)
    with pytest.raises(ValueError, match=f"has the tensor {name}, which is no lora_A or lora_B of a matrix"):
        next(merged_matrices(model[0], tmp_path, torch.float32))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"[1]", "holds a list, and must hold an object"),
        (b"null", "holds a NoneType, and must hold an object"),
        (b'{"r": 4', "not JSON"),
        (b'{"r": 4, "r": 8}', "not JSON .an object has 'r' twice"),
        (b'{"lora_alpha": NaN}', "not JSON .NaN is no JSON"),
        (b'{"lora_alpha": -Infinity}', "not JSON .-Infinity is no JSON"),
        (b'{"a":' * 100_000, "not JSON .it is nested too deeply"),
        (b'{"r": "\xff"}', "not JSON .'utf-8' codec can't decode"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"r": ' + b"9" * 5000 + b"}", "not JSON"),
        (None, "cannot be read .Is a directory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("file", [FILE, "config.json"])
def test_an_odd_json_file_is_refused_in_one_line_with_its_name(file, text, fault, tmp_path):
    (tmp_path / file).mkdir() if text is None else (tmp_path / file).write_bytes(text)
    with pytest.raises(ValueError, match=rf"{file}: {fault}") as caught:
        read_peft_config(tmp_path) if file == FILE else read_architecture(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
