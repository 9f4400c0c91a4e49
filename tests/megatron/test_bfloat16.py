"""bfloat16 compute with float32 main parameters: near float32, trains, and exports bfloat16."""

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss
from megatron_rl.config import EngineConfig, ModelConfig, OptimizerConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.types import FinetuneSpec
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_model
from tests.kit.ranks import run_ranks


def train_in_bfloat16(folder, layout, target):
    config = EngineConfig(
        model=ModelConfig(path=str(folder), dtype="bfloat16"),
        parallel=LAYOUTS[layout][1],
        optimizer=OptimizerConfig(lr=3e-3, eps=1e-6),
    )
    engine = MegatronEngine(config)
    engine.initialize(None, FinetuneSpec(total_updates=10))
    batch = make_batch()
    before = engine.eval().forward(batch)
    engine.train()
    stats = [engine.train_batch(batch, LogprobLoss(supervised)) for _ in range(8)]
    engine.save(target)
    return before, stats


def float32_logprobs(folder):
    return make_engine(folder, LAYOUTS["1"][1]).eval().forward(make_batch())


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A model's folder, and the log-probabilities that it has in float32."""
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3", folder, layers=2)
    return folder, run_ranks(1, float32_logprobs, folder)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "tp2_sp", pytest.param("tp2_pp2", marks=pytest.mark.thorough)])
def test_bfloat16_is_near_float32_and_trains(layout, exact, tmp_path):
    folder, exact_logprobs = exact
    before, stats = run_ranks(LAYOUTS[layout][0], train_in_bfloat16, folder, layout, tmp_path / "out")[0]
    assert (before - exact_logprobs).abs().max() < 0.05
    assert all(s.applied for s in stats) and stats[-1].loss < stats[0].loss - 0.3
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
