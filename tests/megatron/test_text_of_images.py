"""Models that read images are refused by name, and the page's way to their language model gives the same logits."""

import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers

from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.hf_files import HFFolder
from megatron_rl.weights.mapping import carried_tensors, hf_shapes
from tests.kit.models import DELTA, EXPERTS, HALF_ROTATED, NO_TOKENS, SIZES

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
ROPE = HALF_ROTATED | {"mrope_section": [1, 1, 2], "mrope_interleaved": True}
TOWER = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, num_position_embeddings=16)
SIGLIP = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
QWEN = SIZES | DELTA | NO_TOKENS | {"rope_parameters": ROPE}
MODELS = {
    "Qwen3_5": dict(text_config=QWEN, vision_config=TOWER),
    "Qwen3_5Moe": dict(text_config=QWEN | EXPERTS | {"shared_expert_intermediate_size": 48}, vision_config=TOWER),
    "Gemma3": dict(
        text_config=SIZES | {"head_dim": 16, "pad_token_id": None},
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        image_token_index=96,
        boi_token_index=95,
        eoi_token_index=94,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_reads_images_is_refused_and_its_language_model_is_read(name, tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    drafts = {"mtp.fc.weight": torch.randn(4, 8), "mtp.layers.0.mlp.gate.weight": torch.randn(3)}
    whole.save_pretrained(tmp_path / "whole", state_dict=whole.state_dict() | drafts)
    refusal = rf"architectures = \['{name}ForConditionalGeneration'\]: reads images too.*{name}ForCausalLM"
    with pytest.raises(ValueError, match=refusal):
        read_architecture(tmp_path / "whole")

    monkeypatch.setattr(sys, "argv", ["way.py", tmp_path / "whole", tmp_path / "text", f"{name}ForCausalLM"])
    exec(way_of_the_page(), {})
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    HFFolder(tmp_path / "text", hf_shapes(read_architecture(tmp_path / "text")))  # all tensors, in their shapes
    assert {name: tensor.tolist() for name, tensor in carried_tensors(tmp_path / "text")} == {
        name: tensor.tolist() for name, tensor in drafts.items()
    }
    tokens = torch.randint(0, 90, (1, 9))
    torch.testing.assert_close(text(tokens).logits, whole(tokens).logits, rtol=0, atol=1e-6)


def way_of_the_page() -> str:
    section = PAGE.read_text(encoding="utf-8").split("reads images too")[1].partition("\n### ")[0]
    return textwrap.dedent("\n".join(line for line in section.splitlines() if line.startswith("      ")))
