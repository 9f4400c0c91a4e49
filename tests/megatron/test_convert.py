"""megatron-rl convert returns the same bits both ways, in little memory, and every layout loads what it writes."""

import functools
import hashlib
import json
import logging.handlers
import os
import shutil
import threading
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.cli import main
from megatron_rl.engine.manifest import CheckpointError
from megatron_rl.tools import convert
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.hf_files import HFFolder, RandomWeights, write_hf_folder
from megatron_rl.weights.mapping import hf_shapes
from tests.kit.models import LAYOUTS, make_engine, make_model
from tests.kit.ranks import run_each, run_ranks

COUNT_TINY = Path(__file__).parents[2] / "configs/models/count_tiny"
MIDDLING = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 8}
"""With its vocabulary of 8,192 about 340 MB in float32, of which a layer is 14 MB and the embedding 17 MB."""


def convert_both_ways(model, checkpoint, folder):
    return [convert.convert_folder(model, checkpoint), convert.convert_folder(checkpoint, folder)]


# A tied model and an untied one, with odd vocabularies, and both dtypes; experts, their routers' biases and multi-head
# latent attention.
CONVERTED = {
    "qwen2_tied": torch.float32,
    "qwen3": torch.bfloat16,
    "qwen3_moe": torch.bfloat16,
    "deepseek_v3": torch.bfloat16,
}
FURTHER = {  # as they follow the last layer in DeepSeek-V3's files; no parameter is made of them
    "model.layers.2.eh_proj.weight": torch.randn(64, 128).bfloat16(),
    "model.layers.2.enorm.weight": torch.randn(64),
    "model.layers.2.mlp.gate.weight": torch.randn(3, 5).to(torch.float8_e4m3fn),
}
"""Tensors of a multi-token-prediction layer, in three dtypes."""


def add_further(folder):
    save_file(load_file(folder / "model.safetensors") | FURTHER, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def assert_same_bytes(found, expected):
    assert found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """By family: the folder of model, checkpoint and way back, what was said, and the weights that four ranks load."""
    folders = {family: tmp_path_factory.mktemp(family) for family in CONVERTED}
    for family, folder in folders.items():
        make_model(family, folder / "model", layers=2).to(CONVERTED[family]).save_pretrained(folder / "model")
    add_further(folders["deepseek_v3"] / "model")
    there = {family: (folder / "model", folder / "checkpoint") for family, folder in folders.items()}
    said = run_each(1, convert_both_ways, {family: (*there[family], folders[family] / "back") for family in CONVERTED})
    loaded = run_each(4, load_converted, there)
    return {family: (folders[family], said[family][0], loaded[family][0]) for family in CONVERTED}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3"])
def test_there_and_back_again_returns_the_same_bytes_and_loads_in_any_layout(family, converted):
    folder, said, weights = converted[family]
    assert said == [f"{folder}/checkpoint: checkpoint", f"{folder}/back: Hugging Face folder"]
    for name in ("model.safetensors", "config.json"):
        assert (folder / "back" / name).read_bytes() == (folder / "model" / name).read_bytes()
    for name, tensor in load_file(folder / "model" / "model.safetensors").items():
        assert torch.equal(weights[name], tensor.float()), name


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_mixture_of_experts_returns_with_the_same_bits_and_loads_in_any_layout(family, converted):
    folder, _, weights = converted[family]
    back = load_file(folder / "back" / "model.safetensors")
    original = load_file(folder / "model" / "model.safetensors")
    further = FURTHER if family == "deepseek_v3" else {}
    assert back.keys() == original.keys() == weights.keys() | further.keys()
    for name, tensor in original.items():
        if name in further:
            assert_same_bytes(back[name], tensor)
            continue
        assert back[name].dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)
        assert torch.equal(back[name].float(), tensor.float()) and torch.equal(weights[name], tensor.float()), name
    counted = json.loads((folder / "back" / "config.json").read_text()).get("num_nextn_predict_layers", 0)
    assert counted == bool(further)


def load_converted(folder, checkpoint):
    engine = make_engine(folder, LAYOUTS["tp2_pp2"][1])
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.zero_()
    engine.load(checkpoint)
    with pytest.raises(ValueError, match="holds weights only"):
        engine.load(checkpoint, with_optimizer=True)
    return {name: tensor.clone() for name, tensor in engine.hf_tensors()}


def save_both(folder, checkpoint, exported):
    said = logging.handlers.BufferingHandler(1000)
    logging.getLogger("megatron_rl.engine").addHandler(said)
    engine = make_engine(folder, LAYOUTS["tp2_pp2"][1])
    engine.save(checkpoint, with_optimizer=True)
    engine.save(exported)
    engine.groups.on_main((folder / "model.safetensors").unlink)
    for path, with_optimizer in ((checkpoint, True), (exported, False)):
        with pytest.raises(CheckpointError, match=rf"{folder}.*no \*.safetensors there|a writer failed \(rank 0 says"):
            engine.save(path, with_optimizer=with_optimizer)
    return [record.getMessage() for record in said.buffer]


@pytest.mark.slow
def test_a_training_checkpoint_becomes_what_the_engine_exports_and_transformers_loads_it(tmp_path):
    model = make_model("qwen3", tmp_path / "model", layers=2)
    add_further(tmp_path / "model")
    for path in COUNT_TINY.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "model")
    said = run_ranks(4, save_both, tmp_path / "model", tmp_path / "checkpoint", tmp_path / "exported")
    in_shards = functools.partial(convert.convert_folder, shard_bytes=100_000)
    run_ranks(1, in_shards, tmp_path / "checkpoint", tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    for folder in ("exported", "hf"):
        found = HFFolder(tmp_path / folder, {})
        for name, tensor in FURTHER.items():
            assert_same_bytes(found.whole(name), tensor)
        assert json.loads((tmp_path / folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert "3 tensors are not trained, as no parameter is made of them: model.layers.*.eh_proj.weight" in said[0][0]
    assert said[1:] == [[]] * 3, "one rank of four says so"
    for folder in ("hf", "exported"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        for name, parameter in model.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter), name
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").decode([3, 4]) == (
        AutoTokenizer.from_pretrained(COUNT_TINY).decode([3, 4])
    )


def write_middling_model(folder, shard_bytes):
    sizes = MIDDLING | {"num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 128}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6, **sizes}
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps(config))
    shapes = hf_shapes(read_architecture(folder / "config"))
    source = RandomWeights(shapes, seed=0)
    tensors = ((name, source.read(name, 0, 0, shape[0])) for name, shape in shapes.items())
    write_hf_folder(
        folder / "model", tensors, model_folder=folder / "config", dtype=torch.float32, shard_bytes=shard_bytes
    )
    return sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))


def anonymous_bytes(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def convert_in_little_memory(folder, shard_bytes):
    """Return the peak growth of memory that is no file's, over this process and its writers."""
    convert_both_ways(folder / "tiny", folder / "tiny_checkpoint", folder / "tiny_back")  # what any model costs
    before, peak, done = anonymous_bytes(os.getpid()), 0, threading.Event()

    def watch():
        nonlocal peak
        me = psutil.Process()
        while not done.wait(0.002):
            mine = anonymous_bytes(me.pid)
            grown = mine - before
            for child in me.children(recursive=True):
                try:  # a fork starts with its parent's pages, which it shares
                    grown += max(0, anonymous_bytes(child.pid) - mine)
                except FileNotFoundError:
                    continue
            peak = max(peak, grown)

    watcher = threading.Thread(target=watch)
    watcher.start()
    convert.convert_folder(folder / "model", folder / "checkpoint", shard_bytes=shard_bytes)
    there, peak = peak, 0
    convert.convert_folder(folder / "checkpoint", folder / "back", shard_bytes=shard_bytes)
    done.set()
    watcher.join()
    return there, peak


def digests(folder):
    """Of each tensor: which file it is in depends on the order of writing."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {k: hashlib.sha256(v.view(torch.uint8).numpy()).hexdigest() for k, v in load_file(path).items()}
    return tensors


@pytest.mark.thorough
def test_conversion_never_holds_half_of_the_model_in_memory(tmp_path):
    make_model("llama", tmp_path / "tiny")
    size = write_middling_model(tmp_path, 16_000_000)
    there, back = run_ranks(1, convert_in_little_memory, tmp_path, 16_000_000)[0]
    print(f"{size / 1e6:.0f} MB: {there / 1e6:.0f} MB held to a checkpoint, {back / 1e6:.0f} MB back")
    assert size > 300e6 and there < size / 2 and back < size / 2
    assert digests(tmp_path / "back") == digests(tmp_path / "model")
    assert (tmp_path / "back" / "model.safetensors.index.json").is_file()


def refusal(source, target):
    with pytest.raises((ValueError, RuntimeError)) as error:
        convert.convert_folder(source, target)
    return str(error.value)


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    make_model("llama", tmp_path / "model")
    (tmp_path / "other").mkdir()
    assert "no such folder" in refusal(tmp_path / "none", tmp_path / "target")
    assert "neither a Hugging Face folder" in refusal(tmp_path / "other", tmp_path / "target")
    assert "exists already; remove it" in refusal(tmp_path / "model", tmp_path / "other")
    (tmp_path / "other" / "manifest.json").write_text("{}")
    assert f"is a run's checkpoint, which may hold several models; give {tmp_path}/other/policy" in refusal(
        tmp_path / "other", tmp_path / "target"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    message = run_ranks(1, refusal, tmp_path / "model", tmp_path / "target")[0]
    assert "1.1 MB are needed" in message and "1.0 MB are free" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]


def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["convert", str(tmp_path / "none"), str(tmp_path / "target")])
    assert str(stopped.value).startswith("megatron-rl convert: source = ") and "\n" not in str(stopped.value)


def test_the_command_says_what_it_converts(tmp_path, capfd):
    make_model("llama", tmp_path / "model")
    run_ranks(1, main, ["convert", str(tmp_path / "model"), str(tmp_path / "checkpoint")])
    said = capfd.readouterr().out
    assert said == f"converting llama with 135,872 parameters, 0.5 MB\n{tmp_path}/checkpoint: checkpoint\n"
