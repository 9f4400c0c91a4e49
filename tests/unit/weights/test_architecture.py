"""config.json as transformers reads it: a missing key has its class's default, and odd values are one-line errors."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from megatron_rl.weights.architecture import read_architecture
from tests.kit.models import FAMILIES

OF_EVERY_MODEL = PreTrainedConfig().to_dict().keys() | {"initializer_range", "use_cache", "attention_dropout"}
"""Keys that say nothing of one family's architecture."""


def written(folder, said):
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def found(folder, said):
    """Return the architecture, or the rule that refuses it."""
    try:
        return read_architecture(written(folder, said))
    except ValueError as error:
        return str(error).rpartition("config.json: ")[2]


def said_of(family):
    said = json.loads(FAMILIES[family].to_json_string(use_diff=False))
    return said | {"architectures": said["architectures"] or [CLASS_OF[said["model_type"]]]}


CLASS_OF = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
}

OFTEN = ("gemma3_text", "gpt_oss", "llama", "mistral", "qwen2", "qwen3_5_moe_text")


@pytest.mark.parametrize(
    "model_type",
    [it if it in OFTEN else pytest.param(it, marks=pytest.mark.thorough) for it in sorted(CLASS_OF)],
)
def test_a_key_that_is_not_there_has_the_value_that_transformers_gives_it(model_type, tmp_path):
    family = next(name for name, config in FAMILIES.items() if config.model_type == model_type)
    said = said_of(family)
    for key in said.keys() - OF_EVERY_MODEL:
        lacking = {name: value for name, value in said.items() if name != key}
        try:
            completed = AutoConfig.from_pretrained(written(tmp_path, lacking)).to_dict()
        except Exception:  # what transformers cannot complete
            assert isinstance(found(tmp_path, lacking), str), key
            continue
        assert found(tmp_path, lacking) == found(tmp_path, completed | {"architectures": said["architectures"]}), key


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        ({}, "max_positions", 2048),
        ({}, "kv_heads", 4),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 4096}, "rope_scaling",
         {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
          "original_max_position_embeddings": 4096}),
        ({"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}, "max_positions", 32768),
        ({"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4}, "head_dim", 128),
        ({"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2, "num_key_value_heads": 4}, "windows",
         (4096, 4096)),
        ({"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 4}, "rope_theta", 1e6),
        ({"architectures": ["Gemma3ForCausalLM"]}, "tied", True),
        ({"architectures": ["Phi3ForCausalLM"]}, "norm_eps", 1e-5),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_models_class(said, field, value, tmp_path):
    model_type = {name: kind for kind, name in CLASS_OF.items()}[(LLAMA | said)["architectures"][0]]
    assert getattr(read_architecture(written(tmp_path, LLAMA | {"model_type": model_type} | said)), field) == value


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize(("every", "dense"), [(1, []), (2, [1]), (3, []), (3, [2])])
def test_mixtures_stand_in_the_layers_in_which_transformers_has_them(family, every, dense, tmp_path):
    said = said_of(family) | {"num_hidden_layers": 7, "decoder_sparse_step": every, "mlp_only_layers": dense}
    said |= {"layer_types": ["full_attention"] * 7} if "layer_types" in said else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**said))
    theirs = tuple(hasattr(layer.mlp, "experts") for layer in model.model.layers)
    assert found(tmp_path, said).mixture.layers == theirs and any(theirs)


@pytest.mark.parametrize("flag", [False, True, None])
def test_a_mixture_of_qwen3_5_renormalises_its_router_whatever_the_config_says(flag, tmp_path):
    said = said_of(next(name for name, config in FAMILIES.items() if config.model_type == "qwen3_5_moe_text"))
    assert found(tmp_path, said | ({} if flag is None else {"norm_topk_prob": flag})).mixture.renormalised


ODD = [
    *(("num_hidden_layers", value) for value in (0, -1, 2.5, "2", None, [2], {}, True)),
    *(("num_attention_heads", value) for value in (0, -4, "four", None, [])),
    *(("hidden_size", value) for value in (0, "64", None, 1e400)),
    *(("num_key_value_heads", value) for value in (-2, "2", [2])),
    *(("vocab_size", value) for value in (0, None, "x")),
    *(("head_dim", value) for value in ("16", -16, [16])),
    *(("rms_norm_eps", value) for value in ("small", None, [], -1.0)),
    *(("rope_parameters", value) for value in (3, [], "x", {"rope_type": 3}, {"rope_type": "yarn"})),
    *(("rope_scaling", value) for value in (3, [1], "linear", {"type": ["linear"]})),
    *(("rope_theta", value) for value in ("big", [1], -1.0)),
    *(("architectures", value) for value in (3, "LlamaForCausalLM", [3], [["x"]], {"a": 1}, None)),
    *(("tie_word_embeddings", value) for value in ("yes", 3, [])),
    *(("layer_types", value) for value in (3, "full_attention")),
    *(("max_position_embeddings", value) for value in (0, "1k", None)),
    *(("hidden_act", value) for value in (3, ["silu"], None)),
    *(("id2label", value) for value in (3, [])),
]


@pytest.mark.parametrize(("key", "value"), ODD, ids=repr)
def test_an_odd_value_in_config_json_is_refused_in_one_line_with_the_file(key, value, tmp_path):
    said = LLAMA | {"num_hidden_layers": 2, "vocab_size": 16, "intermediate_size": 8, key: value}
    text = json.dumps(said).replace("Infinity", "1e400")
    (tmp_path / "config.json").write_text(text)
    try:
        read_architecture(tmp_path)
    except ValueError as error:
        assert f"{tmp_path}/config.json: " in str(error) and "\n" not in str(error) and len(str(error)) < 800
    else:
        assert (key, value) in TAKEN, "and transformers takes it too"


TAKEN = [
    ("rope_parameters", []),
    ("id2label", []),
    ("id2label", 3),
    ("layer_types", "full_attention"),
    ("layer_types", 3),
]
