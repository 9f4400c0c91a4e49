"""The cause of a server's wrong log-probs is found from its replies alone, without a look at its layers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.tools.doctor.doctor import load_reference
from megatron_rl.tools.doctor.elimination import explain
from tests.kit.sglang_faults import enlarged

TEMPERATURE = 0.8


def weights_of(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def config_of(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def stale(part, rows=None, factor=1.1):
    def change(weights):
        for name in weights:
            if part in name:
                weights[name][rows or slice(None)] *= factor

    return lambda folder: weights_of(folder, change)


def swapped(*pairs):
    def change(weights):
        for name in list(weights):
            for one, other in pairs:
                if one in name:
                    partner = name.replace(one, other)
                    weights[name], weights[partner] = weights[partner].clone(), weights[name].clone()

    return lambda folder: weights_of(folder, change)


def untied(folder):
    weights_of(folder, lambda weights: weights.pop("lm_head.weight"))
    config_of(tie_word_embeddings=True)(folder)


NONE = {"rope_type": "default", "rope_theta": 1e4}
CASES = {
    "layer": ("llama", stale("layers.1."), "layer 1: all its weights are those of the publication before: it is stale"),
    "all": ("llama", stale(""), "all weights are those of the publication before"),
    "tensor": ("qwen3", stale("1.mlp.up_proj"), "model.layers.1.mlp.up_proj.weight: is that of the publication before"),
    "shard": ("qwen3", stale("0.self_attn.o_proj", slice(32, 64), 0.0), "rows 32 to 63 of 64 are zero: a bad shard"),
    "gate": ("llama", swapped(("gate_proj", "up_proj")), "gate and up are swapped"),
    "gate of one": ("llama", swapped(("1.mlp.gate_proj", "1.mlp.up_proj")), "layer 1: gate and up are swapped"),
    "experts": ("qwen3_moe", swapped(("experts.1.", "experts.3.")), "experts 1 and 3 are swapped"),
    "shares": ("qwen3_moe", config_of(norm_topk_prob=False), "the chosen experts are (not) rescaled to sum to 1"),
    "base": ("llama", config_of(rope_parameters=NONE | {"rope_theta": 5e5}), "the rope's base is 500000, and"),
    "scaling": ("llama3_rope", config_of(rope_parameters=NONE), "the rope's scaling (llama3) is left out"),
    "eps": ("qwen2", config_of(rms_norm_eps=1e-2), "the norms' eps is 0.01, and rms_norm_eps = 1e-06"),
    "head": ("llama", untied, "the head is the embedding, though they are not tied"),
    "unknown": ("llama", stale("1.mlp.up_proj", factor=1.7), ""),
}


QUICK = ("layer", "gate of one", "base")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.thorough) for case in CASES]
)
@torch.no_grad()
def test_the_error_that_gives_a_servers_logprobs_is_named(case, tmp_path):
    family, plant, expected = CASES[case]
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    enlarged(family, right)
    shutil.copytree(right, wrong)
    plant(wrong)
    server, replies = load_reference(wrong), []
    for number in range(6):
        ids = torch.randint(90, (20,), generator=torch.Generator().manual_seed(number))
        rows = (server(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        told = torch.cat([torch.zeros(1), rows[:-1].gather(1, ids[1:, None])[:, 0]])
        replies.append((ids.tolist(), torch.arange(20) >= 12, told))
    found = explain(right, replies, TEMPERATURE, 1e-3)
    assert expected in found and bool(found) == bool(expected), found
