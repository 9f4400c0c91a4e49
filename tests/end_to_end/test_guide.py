"""The guide's ReMax, written by a user, runs as written and does what its formula says."""

from pathlib import Path
from types import SimpleNamespace

import guide_remax
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config import EngineConfig, ModelConfig, OptimizerConfig, ParallelConfig, RolloutConfig
from megatron_rl.data.tasks import count_ones
from megatron_rl.servers.supervisor import start_servers
from megatron_rl.types import FinetuneSpec, GenerationConfig
from tests.kit.ranks import run_ranks
from tests.kit.waiting import LATE_S

MODEL = Path(__file__).parents[2] / "configs" / "models" / "count_tiny"


def reward(completion_ids, answer, **data):
    """A random model is hardly ever right, so that its rewards would say nothing of the formula: any number will do."""
    return float((sum(completion_ids) + int(answer)) % 7) / 7


def composed_loop(name: str, model: Path, folder: Path):
    torch.cuda.synchronize = lambda: None  # the guide's machine has a GPU
    engine = EngineConfig(
        model=ModelConfig(path=str(model)), parallel=ParallelConfig(), optimizer=OptimizerConfig(lr=1e-3)
    )
    with start_servers(model, folder, RolloutConfig(backend="embedded")) as served:
        config = SimpleNamespace(
            rollout=served,
            actor=engine,
            gconfig=GenerationConfig(max_new_tokens=3),
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        prompts = [
            {"messages": [{"role": "user", "content": p["prompt"]}], "answer": p["answer"]} for p in count_ones()
        ]
        spec = FinetuneSpec(total_updates=1)
        return guide_remax.main(config, spec, tokenizer, reward, [prompts[:8]], 1, getattr(guide_remax, name))


@pytest.fixture
def random_model(tmp_path):
    torch.manual_seed(0)
    from transformers import AutoConfig

    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("actor", ["FSDPReinforceActor", "MegatronReinforceActor"])
def test_guide_remax_takes_the_step_of_its_formula(actor, random_model, tmp_path):
    found = run_ranks(1, composed_loop, actor, random_model, tmp_path / "servers", timeout_s=LATE_S)[0]
    batch, stats, weights, exported = found
    assert list(exported) == ["time/rollout", "time/train_step", "time/update_weights", "time/step"]
    assert len(batch) == 8 and len(set(batch["rewards"].tolist())) > 2
    assert stats.applied and stats.weight == int(batch["loss_mask"].sum())
    model = AutoModelForCausalLM.from_pretrained(random_model)
    model.get_input_embeddings().padding_idx = None  # transformers drops the gradient of pad tokens, which were sampled
    total = 0.0
    bounds = batch.cu_seqlens.tolist()
    for a, b in zip(bounds, bounds[1:], strict=False):
        ids, mask, rewards = (batch[k][a:b] for k in ("input_ids", "loss_mask", "rewards"))
        logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        total = total - (logprobs * rewards[1:] * mask[1:]).sum()
    loss = total / batch["loss_mask"].sum()
    loss.backward()
    assert stats.loss == pytest.approx(loss.item(), abs=1e-5)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert any(not torch.equal(weights[name], p.detach()) for name, p in model.state_dict().items())
