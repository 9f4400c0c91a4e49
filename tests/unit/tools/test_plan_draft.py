"""What a plan counts for a draft head, by hand, and in a whole plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import (
    DataConfig,
    DraftConfig,
    EngineConfig,
    GenerationConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from megatron_rl.ops import head
from megatron_rl.tools.plan import draft_costs
from megatron_rl.tools.plan.devices import DEVICES
from megatron_rl.tools.plan.draft_costs import draft_flops_of_row, draft_parameters, draft_state_bytes
from megatron_rl.tools.plan.fit import plans_of
from megatron_rl.tools.plan.plan import Cluster
from megatron_rl.tools.plan.plan_text import as_dict, as_text
from megatron_rl.tools.plan.step_sizes import PromptTokens
from megatron_rl.weights.architecture import read_architecture

CONFIGS = Path(__file__).parents[2] / "model_configs"


def engine(folder, kind, **parallel):
    return EngineConfig(
        model=ModelConfig(path=str(folder)), parallel=ParallelConfig(**parallel), draft=DraftConfig(kind=kind)
    )


def test_an_eagle_head_by_hand():
    folder = CONFIGS / "qwen3-4b"
    arch = read_architecture(folder)
    hidden, ffn, queries, keys = 2560, 9728, 32 * 128, 8 * 128
    norms, biases = 5 * hidden, queries + 2 * keys
    matrices = 2 * hidden * hidden + 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * ffn
    for stage in range(2):  # every rank has all of it
        own = engine(folder, "eagle", tensor=2, pipeline=2)
        assert draft_parameters(arch, own, stage).total == norms + biases + matrices
        assert draft_state_bytes(arch, own, stage, 2) == 16 * (norms + biases + matrices)  # tied: no copy
    whole = 2 * (norms + biases + matrices) + 4 * queries * 100
    assert draft_flops_of_row(arch, engine(folder, "eagle"), 100) == whole
    assert draft_flops_of_row(arch, engine(folder, "eagle", tensor=4), 100) == 4 * whole


def test_glms_layer_by_hand():
    folder = CONFIGS / "glm-4.5-air"
    arch = read_architecture(folder)
    hidden, queries, keys, expert = 4096, 96 * 128, 8 * 128, 3 * 4096 * 1408
    attention = 2 * hidden * queries + 2 * hidden * keys
    tensor = expert + attention  # the shared expert, and attention, which tensor ranks divide
    others = 2 * hidden * hidden + 5 * hidden + 128 * hidden  # projection, norms, router
    biases = queries + 2 * keys
    own = engine(folder, "mtp", tensor=4, expert=8, pipeline=2)
    assert draft_parameters(arch, own, 0).total == 0 and draft_state_bytes(arch, own, 0, 2) == 0
    count = draft_parameters(arch, own, 1)
    assert (count.dense, count.expert) == ((tensor + biases) // 4 + others, 128 * expert // 8)
    # Modules in bfloat16, float32 weights, gradients and moments, and a copy of the first stage's embedding.
    assert draft_state_bytes(arch, own, 1, 2) == 18 * count.total + 2 * 151552 // 4 * hidden
    used = tensor + biases + others + 8 * expert
    assert draft_flops_of_row(arch, own, 100) == 2 * used + 2 * 96 * 2 * 128 * 100
    plain = engine(folder, "none")
    assert draft_parameters(arch, plain, 0).total == 0 and draft_state_bytes(arch, plain, 0, 2) == 0


def test_chunks_are_those_of_the_operator():
    assert draft_costs.CHUNKS_OF_TERM == head.CHUNKS_OF_TERM


@pytest.mark.parametrize("kind, model", [("eagle", "qwen3-4b"), ("mtp", "glm-4.5-air")])
def test_a_plan_has_the_heads_parameters_memory_and_time(kind, model):
    parallel = ParallelConfig(tensor=4, expert=4) if kind == "mtp" else ParallelConfig()
    config = TrainConfig(
        model=ModelConfig(path=str(CONFIGS / model), dtype="bfloat16"),
        data=DataConfig(train="x:y"),
        parallel=parallel,
        generation=GenerationConfig(n_samples=4, max_new_tokens=1000),
        rollout=RolloutConfig(backend="embedded"),
    )
    cluster = Cluster(nodes=2, gpus_per_node=8, device=DEVICES["h100"])
    tokens = PromptTokens.of([100, 200])
    plain, drafting = (
        plans_of(replace(config, draft=DraftConfig(kind=name)), tokens, cluster)[0] for name in ("none", kind)
    )
    own = engine(CONFIGS / model, kind, tensor=parallel.tensor, expert=parallel.expert)
    arch = read_architecture(CONFIGS / model)
    before, after = (plan.trainer.by_model["policy"] for plan in (plain, drafting))
    assert after.states == before.states | {"draft head": draft_state_bytes(arch, own, 0, 2)}
    assert after.update["draft head's pass"] > 0 and after.peak > before.peak
    assert drafting.work["updates"].seconds > plain.work["updates"].seconds
    assert drafting.work["optimizer"].seconds > plain.work["optimizer"].seconds
    draft = DraftConfig(kind=kind, depths=3)
    deep = plans_of(replace(config, draft=draft), tokens, cluster)[0]
    more, once = (plan.work["updates"].seconds - plain.work["updates"].seconds for plan in (deep, drafting))
    assert more == pytest.approx(3 * once)
    assert deep.trainer.by_model["policy"].states == after.states
    assert deep.trainer.by_model["policy"].update["draft head's pass"] > after.update["draft head's pass"]
    assert drafting.work["passes before"].seconds == plain.work["passes before"].seconds
    count = draft_parameters(arch, own, 0, ParallelConfig()).total
    assert as_dict(drafting)["model"]["draft_parameters"] == count and as_dict(plain)["model"]["draft_parameters"] == 0
    json.dumps(as_dict(drafting))
    assert f"{kind}, " in as_text(drafting, []).split("GPUs")[0] and "draft head" not in as_text(plain, [])
