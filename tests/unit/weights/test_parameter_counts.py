"""Models of every family have as many parameters as their authors say."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import parameters
from tests.kit.models import FAMILIES, config_of

CONFIGS = Path(__file__).parents[2] / "model_configs"
ROW = re.compile(r"^\| ([\w.-]+) \| ([\d,]+) \| \S", re.MULTILINE)
COUNTS = {name: int(count.replace(",", "")) for name, count in ROW.findall((CONFIGS / "README.md").read_text())}
"""Published config.json -> the number of its parameters, by the table that says with what each file was compared."""


def sizes(hidden, intermediate, layers, heads, kv_heads, vocab, *, experts=0, **more):
    more |= {"num_local_experts": experts} if experts else {}
    named = dict(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, vocab_size=vocab)
    return named | dict(num_attention_heads=heads, num_key_value_heads=kv_heads) | more


UNTIED = dict(tie_word_embeddings=False)
GPT_OSS = dict(head_dim=64, num_experts_per_tok=4) | UNTIED
QWEN3_NEXT = dict(head_dim=256, moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512)
QWEN3_NEXT |= dict(num_experts_per_tok=10, linear_num_key_heads=16, linear_num_value_heads=32) | UNTIED
PUBLISHED = {
    "Qwen2.5-7B": ("qwen2", sizes(3584, 18944, 28, 28, 4, 152064, **UNTIED), 7_615_616_512),
    "Mistral-7B-v0.3": ("mistral", sizes(4096, 14336, 32, 32, 8, 32768, **UNTIED), 7_248_023_552),
    "Mixtral-8x7B": ("mixtral", sizes(4096, 14336, 32, 32, 8, 32000, experts=8, **UNTIED), 46_702_792_704),
    "Phi-4": ("phi3", sizes(5120, 17920, 40, 40, 10, 100352, pad_token_id=0, **UNTIED), 14_659_507_200),
    "OLMo-2-7B": ("olmo2", sizes(4096, 11008, 32, 32, 32, 100352, **UNTIED), 7_298_617_344),
    "Gemma-3-1B": ("gemma3_text", sizes(1152, 6912, 26, 4, 1, 262144, head_dim=256), 999_885_952),
    "Seed-OSS-36B": ("seed_oss", sizes(5120, 27648, 64, 80, 8, 155136, head_dim=128, **UNTIED), 36_151_104_512),
    "GPT-OSS-120B": ("gpt_oss", sizes(2880, 2880, 36, 64, 8, 201088, experts=128, **GPT_OSS), 116_829_156_672),
    "GPT-OSS-20B": ("gpt_oss", sizes(2880, 2880, 24, 64, 8, 201088, experts=32, **GPT_OSS), 20_914_757_184),
    "Qwen3-Next-80B": ("qwen3_next", sizes(2048, 5120, 48, 16, 2, 151936, **QWEN3_NEXT), 79_674_391_296),
    "MiniMax-M2": (
        "minimax_m2",
        sizes(3072, 1536, 62, 48, 8, 200064, head_dim=128, experts=256, num_experts_per_tok=8, **UNTIED),
        228_689_748_992,
    ),
}
"""Model -> its type, what its config.json says, and the number of its parameters."""


def test_the_table_of_published_configs_says_with_what_each_was_compared():
    assert list(COUNTS) == sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))


@pytest.mark.parametrize("name", COUNTS)
def test_a_published_config_has_as_many_parameters_as_the_model(name):
    assert parameters(read_architecture(CONFIGS / name)) == COUNTS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_of_published_sizes_has_as_many_parameters(name, tmp_path):
    kind, fields, count = PUBLISHED[name]
    config = AutoConfig.for_model(kind, **fields)
    named = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]}
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | named))
    assert parameters(read_architecture(tmp_path)) == count


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_parameters_of_transformers_model(family, tmp_path):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family, None))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    assert parameters(read_architecture(tmp_path)) == sum(part.numel() for part in model.parameters())
