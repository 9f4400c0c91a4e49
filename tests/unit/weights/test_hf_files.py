"""A folder is replaced whole or not at all, wherever the process is killed."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.hf_files import HFFolder, copy_model_files, recover_folder, replace_folder, write_hf_folder
from megatron_rl.weights.mapping import carried_tensors, hf_shapes, weight_source, without_rule_text


def killed_at(call: int, aside: Path, folder: Path) -> bool:
    """Run replace_folder in a fork that dies just before its `call`-th change to the disk; False if it lives."""
    pid = os.fork()
    if pid == 0:
        calls = 0

        def counted(function):
            def run(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls > call:
                    os._exit(9)
                return function(*args, **kwargs)

            return run

        Path.rename, shutil.rmtree = counted(Path.rename), counted(shutil.rmtree)
        replace_folder(aside, folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("call", range(6))
def test_a_folder_is_the_old_or_the_new_one_wherever_its_replacement_is_killed(call, tmp_path):
    folder, aside = tmp_path / "checkpoint", tmp_path / ".checkpoint.partial"
    for path, text in ((folder, "old"), (aside, "new")):
        path.mkdir()
        (path / "file").write_text(text)
    was_killed = killed_at(call, aside, folder)
    recover_folder(folder)
    # Its changes: remove an older leftover, move the old one away, move the new one in, remove the old one.
    assert was_killed == (call < 4)
    assert (folder / "file").read_text() == ("old" if call < 3 else "new")
    if aside.exists():
        replace_folder(aside, folder)
    assert (folder / "file").read_text() == "new"


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "model.bin", "/dev/zero"]
)
def test_index_does_not_lead_out_of_its_folder(file, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": file}}))
    with pytest.raises(ValueError, match="index.json: has 'a.weight' in .*must be a .safetensors file of this folder"):
        HFFolder(tmp_path, {"a.weight": (1,)})


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"weight_map": {"a": 1}}', '{"weight_map": 3}', "[" * 100_000])
def test_index_that_is_none_is_named(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="model.safetensors.index.json: .*copy the model folder again"):
        HFFolder(tmp_path, {"a.weight": (1,)})


def test_quantised_weights_are_refused_when_the_folder_is_opened(tmp_path):
    """They have the shapes that config.json promises, and would pass for weights without their scales."""
    save_file({"a.weight": torch.ones(1).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"a.weight in .* has dtype F8_E4M3: supported are .* convert quantised"):
        HFFolder(tmp_path, {"a.weight": (1,)})


SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}


def tiny_llama(folder, extra=(), **changes):
    """Write a model folder with random weights and further tensors; return its weights."""
    folder.mkdir(exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6} | SIZES | changes
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in hf_shapes(read_architecture(folder)).items()}
    save_file(tensors | dict(extra), folder / "model.safetensors")
    return tensors


EXTRA = {
    "model.layers.1.eh_proj.weight": torch.randn(8, 16).bfloat16(),
    "model.layers.1.shared_head.head.weight": torch.randn(16, 8),
    "mtp.fc.weight": torch.randn(3).to(torch.float8_e4m3fn),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(4),
}


def exported(folder, target, tensors, **options):
    carried = carried_tensors(folder)
    write_hf_folder(
        target, tensors.items(), model_folder=folder, dtype=torch.bfloat16, carried=carried, shard_bytes=500, **options
    )
    return {k: v for file in target.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("head", ["policy", "value"])
def test_tensors_that_no_parameter_is_made_of_are_in_the_export_byte_for_byte(head, tmp_path):
    tensors = tiny_llama(tmp_path / "model", EXTRA, num_nextn_predict_layers=1)
    if head == "value":
        tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        tensors["score.weight"] = torch.zeros(1, 8)
    found = exported(tmp_path / "model", tmp_path / "out", tensors, head=head)
    assert found.keys() == tensors.keys() | EXTRA.keys()
    for name, tensor in EXTRA.items():
        assert found[name].dtype == tensor.dtype and torch.equal(
            found[name].view(torch.uint8), tensor.view(torch.uint8)
        )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("extra", [{}, {name: EXTRA[name] for name in EXTRA if name.endswith("inv_freq")}])
def test_config_json_counts_no_further_layers_if_the_folder_has_none(extra, tmp_path):
    tensors = tiny_llama(tmp_path / "model", extra, num_nextn_predict_layers=1, use_mtp=True)
    exported(tmp_path / "model", tmp_path / "out", tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0 and config["use_mtp"] is False


@pytest.mark.parametrize("name", ["model.layers.1.eh_proj.weight", "mtp.fc.weight"])
def test_config_json_counts_the_layers_of_either_naming(name, tmp_path):
    tensors = tiny_llama(tmp_path / "model", {name: EXTRA[name]}, num_nextn_predict_layers=1)
    exported(tmp_path / "model", tmp_path / "out", tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_sizes_of_tensors_are_those_of_their_bytes_in_every_dtype(tmp_path):
    further = EXTRA | {"a": torch.zeros(5, dtype=torch.bool), "b": torch.zeros((), dtype=torch.float64)}
    tiny_llama(tmp_path / "model", further)
    source = HFFolder(tmp_path / "model", {})
    assert {name: source.nbytes(name) for name in further} == {name: one.nbytes for name, one in further.items()}


def test_a_load_lists_the_tensors_that_it_ignores(tmp_path):
    tiny_llama(tmp_path / "model", EXTRA)
    text = without_rule_text(tmp_path / "model")
    assert "4 tensors are not trained" in text and "model.layers.*.eh_proj.weight" in text and "mtp.fc.weight" in text
    tiny_llama(tmp_path / "plain")
    assert without_rule_text(tmp_path / "plain") == ""


def test_a_carried_tensor_of_a_dtype_that_torch_lacks_is_refused_by_name(tmp_path):
    tiny_llama(tmp_path / "model", {"mtp.fc.weight": torch.zeros(24)})
    path = tmp_path / "model" / "model.safetensors"
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header["mtp.fc.weight"] |= {"dtype": "F6_E2M3", "shape": [128]}  # six bits instead of 32
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[begin:])
    with pytest.raises(OSError, match=r"mtp.fc.weight in .*model.safetensors has dtype F6_E2M3, which torch"):
        list(carried_tensors(tmp_path / "model"))


def test_weights_of_another_format_in_the_folder_are_not_carried(tmp_path):
    """As Mistral's folders have them: transformers reads model.safetensors alone."""
    tensors = tiny_llama(tmp_path / "model")
    save_file({"layers.0.attention.wq.weight": torch.zeros(3)}, tmp_path / "model" / "consolidated.safetensors")
    assert exported(tmp_path / "model", tmp_path / "out", tensors).keys() == tensors.keys()


KEPT = (
    *("tokenizer.json", "tekken.json", "spiece.model", "qwen.tiktoken", "chat_template.json", "README.md", "LICENSE"),
    *("additional_chat_templates/tools.jinja", "modeling_x.py", "generation_config.json", "preprocessor_config.json"),
)
LEFT_OUT = (
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors.index.json", "optimizer.pt", ".hidden"),
    *("original/params.json", "original/consolidated.00.pth", "adapter/adapter_config.json", "adapter_config.json"),
    *("adapter/adapter_model.safetensors", ".cache/x.json", "checkpoint-5/deep/a.bin", "checkpoint-5/trainer.json"),
)


def test_every_file_of_the_folder_that_holds_no_weights_goes_along(tmp_path):
    folder, target = tmp_path / "model", tmp_path / "model" / "runs" / "final"
    for name in (*KEPT, *LEFT_OUT, "runs/metrics.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "config.json").write_text("{}")
    (folder / "config.json").chmod(0o444)  # as in a folder that many share
    (tmp_path / "blob").write_text("of a link")
    (folder / "linked.json").symlink_to(tmp_path / "blob")
    (folder / "broken.json").symlink_to(tmp_path / "nowhere")
    (folder / "loop").mkdir()
    (folder / "loop" / "again").symlink_to(folder)
    target.mkdir(parents=True)
    copy_model_files(folder, target, head="policy")
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == {*KEPT, "config.json", "linked.json"}
    assert (target / "linked.json").read_text() == "of a link" and not (target / "linked.json").is_symlink()
    (target / "config.json").write_text("{}")


def test_an_index_that_names_the_wrong_file_is_named_with_tensor_and_file(tmp_path):
    save_file({"a.weight": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b.weight": torch.zeros(1)}, tmp_path / "two.safetensors")
    for file, words in (
        ("two.safetensors", "a.weight: not in .*/two.safetensors, though .*index.json says so; copy"),
        ("three.safetensors", r"three.safetensors: .*No such file.*index.json has a.weight; copy"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": file}}))
        with pytest.raises(ValueError, match=words):
            HFFolder(tmp_path, {"a.weight": (1,)})


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path):
    head = {"lm_head.weight": torch.randn(16, 8)}
    tiny_llama(tmp_path / "model", head, tie_word_embeddings=True)
    arch = read_architecture(tmp_path / "model")
    with pytest.raises(ValueError, match="lm_head.weight is not model.embed_tokens.weight, and tie_word_embeddings = "):
        weight_source(tmp_path / "model", arch)
    weight_source(tmp_path / "model", arch.with_head("value"))  # which has a head of its own
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        tmp_path / "model" / "model.safetensors",
    )
    weight_source(tmp_path / "model", arch)
    assert without_rule_text(tmp_path / "model") == ""
