"""A refused layout's message names a layout that the model can have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_rl.config import ParallelConfig
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import check_layout

CONFIGS = Path(__file__).parents[2] / "model_configs"
MODELS = [
    *("deepseek-v3", "gemma-3-27b-it", "glm-4.5-air", "gpt-oss-120b", "llama-3.1-405b-instruct", "minimax-m2"),
    *("mixtral-8x22b-instruct-v0.1", "phi-4", "qwen3-next-80b-a3b-instruct", "qwen3.8-2.4t-a95b"),
]
NAMED = re.compile(r"set it to (\d+)( or a divisor)?\.$")
STAGES = re.compile(r"set parallel\.pipeline=(\d+)(?: parallel\.virtual_pipeline=(\d+))?\.$")


def refusal(arch, layout):
    try:
        check_layout(arch, layout, {})
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", MODELS)
def test_every_size_that_a_refusal_names_is_taken(name):
    arch, refused = read_architecture(CONFIGS / name), 0
    for key in ("tensor", "expert", "expert_tensor", "context"):
        for size in (2, 3, 5, 6, 7, 12, 16, 24, 48, 64, 256, 1000):
            if (text := refusal(arch, ParallelConfig(**{key: size}))) is None:
                continue
            assert text.startswith(f"parallel.{key} = {size}: "), text
            if "leave it out" in text:
                assert arch.mixture is None and key.startswith("expert")
                continue
            found = NAMED.search(text)
            assert found and 1 <= int(found[1]) < size, text
            assert refusal(arch, ParallelConfig(**{key: int(found[1])})) is None, text
            refused += 1
    assert refused > 3


@pytest.mark.parametrize("name", MODELS)
def test_every_number_of_stages_that_a_refusal_names_is_taken(name):
    arch = read_architecture(CONFIGS / name)
    for pipeline in range(2, 70):
        for chunks in (1, 2, 3):
            layout = ParallelConfig(pipeline=pipeline, virtual_pipeline=chunks)
            if text := refusal(arch, layout):
                found = STAGES.search(text)
                assert found, text
                other = dataclasses.replace(layout, pipeline=int(found[1]), virtual_pipeline=int(found[2] or chunks))
                assert other.pipeline < pipeline and refusal(arch, other) is None, text
