"""A multi-token-prediction layer of random weights for the tiny models, in their folders as their families have it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.hf_files import HFFolder
from megatron_rl.weights.mapping import hf_shapes, mtp_names


def add_mtp_layer(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write a random layer next to the model of one file in `folder`; return its tensors, copies included."""
    arch, generator = read_architecture(folder), torch.Generator().manual_seed(5)
    layer, tensors = arch.mtp_layer(), {}
    for name, shape in hf_shapes(layer).items():
        drawn = torch.randn(shape, generator=generator) * 0.1
        is_norm = len(shape) == 1 and "norm" in name
        tensors[name] = (drawn + 1.0 - arch.norm_offset * is_norm if is_norm else drawn).to(dtype)
    own = load_file(folder / "model.safetensors")
    tensors |= {name: own[original].clone() for name, original in mtp_names(layer).copies.items()}
    save_file(own | tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    count = "num_nextn_predict_layers" if mtp_names(layer).copies else "mtp_num_hidden_layers"
    (folder / "config.json").write_text(json.dumps(config | {count: 1}))
    return tensors


def in_shards(folder: Path, count: int = 3) -> None:
    """Split the model's one file into several with an index."""
    own = load_file(folder / "model.safetensors")
    files = {
        name: f"model-{number % count + 1:05}-of-{count:05}.safetensors" for number, name in enumerate(sorted(own))
    }
    for file in set(files.values()):
        save_file({name: own[name] for name in own if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "model.safetensors").unlink()


def mtp_tensors(folder: Path, names: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the named tensors that a folder has."""
    found = HFFolder(folder, {})
    return {name: found.whole(name) for name in names if name in found.file_of}


def assert_same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
