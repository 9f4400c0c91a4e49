"""The engine on CUDA with torch's variable-length attention: the same model as Hugging Face's, float32 and bfloat16."""

import pytest
import torch

from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_groups, make_model

pytestmark = pytest.mark.gpu


def reference(model, batch, temperature=1.0):
    """`[N]` log-probabilities of the trained tokens in the model's dtype, one sequence at a time."""
    parts, bounds = [], batch.cu_seqlens.tolist()
    for a, b in zip(bounds, bounds[1:], strict=False):
        ids = batch["input_ids"][a:b].cuda()
        with torch.no_grad():
            logprobs = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)
        parts.append(torch.cat([torch.zeros(1, device="cuda"), logprobs[:-1].gather(-1, ids[1:, None])[:, 0]]))
    return torch.cat(parts).cpu() * batch["loss_mask"]


FAMILIES = ["llama", "qwen2_tied", "qwen3", "mistral_windowed", "gemma3", "mixtral", "deepseek_v3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logprobs_equal_transformers(family, tmp_path):
    model, batch = make_model(family, tmp_path).cuda(), make_batch()
    ours = make_engine(tmp_path, LAYOUTS["1"][1]).eval().forward(batch, temperature=0.8)
    torch.testing.assert_close(ours, reference(model, batch, 0.8), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logprobs_are_as_near_to_float32_as_transformers(family, tmp_path):
    from megatron_rl.config import EngineConfig, ModelConfig
    from megatron_rl.engine.megatron_engine import MegatronEngine

    model, batch = make_model(family, tmp_path).cuda(), make_batch(lengths=(40, 100, 64, 7))
    truth = reference(model, batch)
    theirs = (reference(model.bfloat16(), batch) - truth).abs().mean()
    engine = MegatronEngine(EngineConfig(model=ModelConfig(path=str(tmp_path), dtype="bfloat16")))
    engine.initialize()
    ours = (engine.eval().forward(batch) - truth).abs().mean()
    assert ours <= 2 * theirs + 1e-4, f"mean error {ours:.2e}, transformers' {theirs:.2e}"


def test_an_offloaded_engine_leaves_the_device_and_trains_on_where_it_was(tmp_path):
    make_model("qwen3", tmp_path / "model")
    batch = make_batch()

    def train(engine, updates):
        for _ in range(updates):
            engine.train_batch(batch, LogprobLoss(supervised))

    torch._C._cuda_clearCublasWorkspaces()  # 32 MB each, which stay: they are no engine's
    empty = torch.cuda.memory_allocated()
    engine = make_engine(tmp_path / "model", LAYOUTS["1"][1]).train()
    train(engine, 1)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated() - empty
    engine.offload()
    assert torch.cuda.memory_allocated() - empty < 0.1 * before
    train(engine, 1)
    engine.save_async(tmp_path / "checkpoint")
    train(engine, 2)
    engine.finish_saves()
    expected = [parameter.clone() for parameter in engine.parameters()]
    engine.load(tmp_path / "checkpoint", with_optimizer=True)
    train(engine, 2)
    for ours, theirs in zip(engine.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_shared_keys_that_are_read_where_they_lie_give_the_update_of_copied_ones(family, tmp_path):
    make_model(family, tmp_path)
    copied, flex = (
        make_engine(tmp_path, LAYOUTS["1"][1], dtype="bfloat16", shared_keys=kind, tokens_per_microbatch=200)
        .train()
        .train_batch(make_groups(), LogprobLoss(supervised))
        for kind in ("copied", "flex")
    )
    assert flex.loss == pytest.approx(copied.loss, rel=1e-2)
    assert flex.grad_norm == pytest.approx(copied.grad_norm, rel=3e-2)


def test_training_lowers_the_loss(tmp_path):
    make_model("qwen3", tmp_path)
    engine, batch = make_engine(tmp_path, LAYOUTS["1"][1]).train(), make_batch()
    losses = [engine.train_batch(batch, LogprobLoss(supervised)).loss for _ in range(10)]
    assert losses[-1] < losses[0] - 0.5
