"""MXFP4 weights against transformers' own reading of them, and in a model's folder."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.weights.architecture import quantization_fault
from megatron_rl.weights.hf_files import HFFolder, copy_model_files, dequantized

EXPERTS, INPUTS, OUTPUTS = 3, 64, 10


@pytest.fixture
def packed():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (EXPERTS, OUTPUTS, INPUTS // 32, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(100, 140, (EXPERTS, OUTPUTS, INPUTS // 32), generator=generator).to(torch.uint8)
    return {"experts.up_blocks": blocks, "experts.up_scales": scales}


def test_numbers_are_what_transformers_makes_of_them(packed):
    blocks, scales = packed.values()
    expected = convert_moe_packed_tensors(blocks, scales)
    assert expected.shape == (EXPERTS, INPUTS, OUTPUTS)
    assert torch.equal(dequantized(blocks, scales), expected)


def test_a_byte_has_two_numbers_and_a_block_one_scale():
    blocks, scales = torch.zeros(1, 1, 1, 16, dtype=torch.uint8), torch.tensor([[[129]]], dtype=torch.uint8)
    blocks[..., 0] = 0xF1  # 0.5 in the lower half, -6 in the upper one, times 2^2
    assert dequantized(blocks, scales)[0, :3, 0].tolist() == [2.0, -24.0, 0.0]


def test_a_folder_reads_them_an_expert_at_a_time(packed, tmp_path):
    save_file(packed, tmp_path / "model.safetensors")
    folder = HFFolder(tmp_path, {"experts.up": (EXPERTS, INPUTS, OUTPUTS)})
    assert folder.dtype("experts.up") is torch.bfloat16
    assert torch.equal(folder.read("experts.up", 0, 1, 2), dequantized(*packed.values())[1:2])
    with pytest.raises(ValueError, match=r"experts.up_blocks in .* has shape \(3, 10, 2, 16\), but config.json makes"):
        HFFolder(tmp_path, {"experts.up": (EXPERTS, 2 * INPUTS, OUTPUTS)})


def test_what_is_written_does_not_say_that_it_is_quantised(tmp_path):
    (tmp_path / "from").mkdir()
    config = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "from" / "config.json").write_text(json.dumps(config))
    copy_model_files(tmp_path / "from", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"architectures": ["GptOssForCausalLM"]}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, ""),
        ({"quant_method": "mxfp4"}, "(mxfp4), and servers .* by `megatron-rl convert` to a checkpoint"),
        ({"quant_method": "fp8"}, "(fp8), and servers .* by the script of its authors"),
        ({}, "(no quant_method), and servers"),
    ],
)
def test_servers_of_a_quantised_folder_take_no_updates(said, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({} if said is None else {"quantization_config": said}))
    fault = quantization_fault(tmp_path)
    assert bool(fault) == bool(words) and re.search(words.replace("(", r"\(").replace(")", r"\)"), fault)
