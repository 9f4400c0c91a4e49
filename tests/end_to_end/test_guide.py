"""The guide's ReMax, written by a user, runs as written and does what its formula says."""

from pathlib import Path

import pytest
import torch
from guide_remax import MegatronReinforceActor, ReMaxRLVRWorkflow
from ranks import run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config import EngineConfig, ModelConfig, OptimizerConfig, ParallelConfig, RolloutConfig
from megatron_rl.rollout.rewards import exact_match
from megatron_rl.rollout.sglang import RemoteSGLangEngine
from megatron_rl.rollout.tasks import count_ones
from megatron_rl.serving.supervisor import start_servers
from megatron_rl.types import FinetuneSpec, GenerationConfig

MODEL = Path(__file__).parents[2] / "configs" / "models" / "count_tiny"


def composed_loop(model: Path, folder: Path):
    """The guide's third step: compose rollout, actor and workflow; returns the batch, the stats and the new weights."""
    config = RolloutConfig(backend="embedded")
    ft_spec = FinetuneSpec(total_updates=1)
    actor = MegatronReinforceActor(
        config=EngineConfig(
            model=ModelConfig(path=str(model)), parallel=ParallelConfig(), optimizer=OptimizerConfig(lr=1e-3)
        )
    )
    actor.initialize(None, ft_spec)
    with start_servers(model, folder, config) as served:
        rollout = RemoteSGLangEngine(served, seed=1)
        rollout.initialize(ft_spec=ft_spec)
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        workflow = ReMaxRLVRWorkflow(
            reward_fn=exact_match, gconfig=GenerationConfig(max_new_tokens=3), tokenizer=tokenizer
        )
        prompts = [
            {"messages": [{"role": "user", "content": p["prompt"]}], "answer": p["answer"]} for p in count_ones()
        ]
        batch = rollout.rollout_batch(prompts[:8], workflow=workflow).to(actor.device)
        # A random model is hardly ever right; the formula is what is tested, so give the differences by hand.
        batch["rewards"] = torch.linspace(-1, 1, 8)[batch.sequence_ids]
        stats = actor.train_reinforce(batch)
        actor.step_lr_scheduler()
        actor.update_weights(rollout, actor.get_version())
        rollout.destroy()
    return batch, stats, {name: tensor.clone() for name, tensor in actor.hf_tensors()}


@pytest.fixture
def random_model(tmp_path):
    torch.manual_seed(0)
    from transformers import AutoConfig

    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def test_guide_remax_takes_the_step_of_its_formula(random_model, tmp_path):
    batch, stats, weights = run_ranks(1, composed_loop, random_model, tmp_path / "servers")[0]
    assert len(batch) == 8 and stats.applied and stats.weight == int(batch["loss_mask"].sum())
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
