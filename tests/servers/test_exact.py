"""Trainer and embedded server compute the same bits with rollout.exact."""

import dataclasses

import pytest
import torch

from megatron_rl.algo.loss import PolicyLoss
from megatron_rl.api import LogprobLoss
from megatron_rl.config import (
    AlgorithmConfig,
    GenerationConfig,
    LoraConfig,
    ParallelConfig,
    RolloutConfig,
    load_config,
)
from megatron_rl.engine.model import transformer_config
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.train import train
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.workflows import RLVRWorkflow
from tests.kit.examples import IS_THOROUGH
from tests.kit.models import LAYOUTS, make_engine, make_groups, make_model, share_of
from tests.kit.ranks import run_ranks
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.runs import steps_of
from tests.kit.servers import NEVER_LATE
from tests.kit.waiting import LATE_S

COUNT = "configs/count_grpo.yaml"
LAYOUTS_TRIED = ["1", "pp2", "dp2"] if IS_THOROUGH else ["1"]


def logprobs(folder, batch, layout, is_exact, tokens_per_microbatch, share_prompts):
    engine = make_engine(
        folder,
        LAYOUTS[layout][1],
        exact=is_exact,
        tokens_per_microbatch=tokens_per_microbatch,
        share_prompts=share_prompts,
    ).eval()
    own = share_of(batch, engine)
    return engine.forward(own, temperature=0.9), own["logprobs"], own["loss_mask"]


@pytest.fixture(params=["qwen3", *(pytest.param(it, marks=pytest.mark.thorough) for it in ("llama", "qwen2"))])
def model(request, tiny_model, tmp_path):
    if request.param == "qwen3":
        return tiny_model
    make_model(request.param, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("prompt_tokens", [3, pytest.param(40, marks=pytest.mark.thorough)])
def test_the_trainers_logprobs_are_the_servers_to_the_bit(connect, model, tmp_path, prompt_tokens):
    config = RolloutConfig(backend="embedded", exact=True, token_file=TOKEN_FILE, **NEVER_LATE)
    gconfig = GenerationConfig(n_samples=3, max_new_tokens=40, temperature=0.9, ignore_eos=True)
    prompts = [{"input_ids": [5, 17, *range(i, i + prompt_tokens - 2)]} for i in range(4)]
    with Supervisor(config, model, tmp_path) as supervisor:
        batch = connect(supervisor.urls, seed=1).rollout_batch(
            prompts, RLVRWorkflow(lambda **_: 0.0, gconfig, tokenizer=None)
        )
    for rows, shares in ((1 << 14, True), (64, False)):
        for layout in LAYOUTS_TRIED:
            arguments = model, batch, layout, True, rows, shares
            for ours, theirs, mask in run_ranks(LAYOUTS[layout][0], logprobs, *arguments):
                assert torch.equal(ours[mask], theirs[mask]), (layout, rows)
    ((ours, theirs, mask),) = run_ranks(1, logprobs, model, batch, "1", False, 1 << 14, True)
    assert not torch.equal(ours[mask], theirs[mask]), "a server and a trainer that agree by themselves prove nothing"
    assert (ours - theirs)[mask].abs().max() < 1e-4


BIAS = {300: 1.0, 301: -2.0, 5: 0.3, **{token: 0.7 for token in range(40, 200)}}
ADJUSTED = {
    "cut": {"top_k": 20, "top_p": 0.9},
    "no top-k": {"logit_bias": BIAS, "frequency_penalty": 0.37, "repetition_penalty": 0.8},
    "bias and penalties": {"top_k": 64, "logit_bias": BIAS, "frequency_penalty": 0.37, "presence_penalty": -0.11},
    "all": {"top_k": 64, "logit_bias": BIAS, "frequency_penalty": 0.37, "repetition_penalty": 1.3, "min_p": 0.01},
}


def logprobs_of_each(folder, batches):
    engine = make_engine(folder, LAYOUTS["1"][1], exact=True).eval()
    return {name: engine.forward(batch, temperature=0.3) for name, batch in batches.items()}


def test_logprobs_over_supports_with_penalties_and_biases_are_the_servers_to_the_bit(connect, tiny_model, tmp_path):
    config = RolloutConfig(backend="embedded", exact=True, token_file=TOKEN_FILE, **NEVER_LATE)
    prompts = [{"input_ids": [5, 17, 300 + i]} for i in range(4)]
    with Supervisor(config, tiny_model, tmp_path) as supervisor:
        engine = connect(supervisor.urls, seed=1)
        batches = {}
        for name, options in ADJUSTED.items():
            gconfig = GenerationConfig(n_samples=3, max_new_tokens=40, temperature=0.3, ignore_eos=True, **options)
            workflow = RLVRWorkflow(lambda **_: 0.0, gconfig, tokenizer=None)
            batches[name] = engine.rollout_batch(prompts, workflow)
    (found,) = run_ranks(1, logprobs_of_each, tiny_model, batches)
    for name, batch in batches.items():
        mask = batch["loss_mask"]
        assert batch["logprobs"][mask].min() < -0.5
        assert torch.equal(found[name][mask], batch["logprobs"][mask]), name


def train_exactly(arguments):
    train(load_config(COUNT, arguments))


@pytest.mark.parametrize("publication", ["group", pytest.param("ipc", marks=pytest.mark.thorough)])
def test_every_token_of_a_run_has_equal_logprobs(tiny_model, tmp_path, publication):
    arguments = [f"model.path={tiny_model}", "model.init=hf", "warm_start.updates=0", "data.evaluation="]
    arguments += ["rollout.exact=true", f"rollout.publication={publication}", "run.steps=3", "run.save_at_end=false"]
    arguments += [f"run.folder={tmp_path}/run", "generation.max_new_tokens=24", "optimizer.lr=1e-3"]
    run_ranks(1, train_exactly, arguments, timeout_s=LATE_S)
    steps = steps_of(tmp_path / "run")
    assert [step["mismatch/equal"] for step in steps] == [1.0] * 3


def gradient(folder, is_exact):
    engine = make_engine(folder, LAYOUTS["1"][1], exact=is_exact, weight_decay=0.0, lr=0.1, eps=1.0)
    stats = engine.train_batch(make_groups(), LogprobLoss(PolicyLoss(AlgorithmConfig())))
    return stats.grad_norm, {name: tensor.clone() for name, tensor in engine.hf_tensors()}


def test_the_gradient_is_that_of_the_ordinary_layers(tiny_model):
    (norm, weights), (plain_norm, plain_weights) = (
        run_ranks(1, gradient, tiny_model, is_exact)[0] for is_exact in (True, False)
    )
    assert norm == pytest.approx(plain_norm, rel=1e-5)
    for name, tensor in weights.items():
        assert (tensor - plain_weights[name]).abs().max() < 1e-6, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": ParallelConfig(tensor=2)}, "parallel.tensor = 2, which adds up parts of sums; set it to 1"),
        ({"lora": LoraConfig(rank=4)}, "lora.rank = 4; set it to 0"),
    ],
)
def test_layouts_that_cannot_be_exact_are_refused(tiny_model, changes, message):
    config = load_config(COUNT, [f"model.path={tiny_model}", "model.init=hf", "rollout.exact=true"]).actor
    with pytest.raises(ValueError, match=f"rollout.exact = true: does not work with {message}"):
        transformer_config(
            read_architecture(tiny_model).with_head("policy"), dataclasses.replace(config, **changes), {}
        )


def test_servers_of_others_are_refused():
    with pytest.raises(ValueError, match="rollout.exact = True: needs embedded servers that the run starts"):
        RolloutConfig(exact=True, servers=["http://127.0.0.1:1"])
    with pytest.raises(ValueError, match="rollout.exact = True: .* rollout.backend = sglang"):
        RolloutConfig(exact=True, backend="sglang")
