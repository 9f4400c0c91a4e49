"""Trainer and server hold the same weights and compute the same log-probabilities: embedded and real SGLang."""

import json
import subprocess
import sys
import urllib.request

import pytest
import torch
from ranks import run_ranks
from tiny import LAYOUTS, make_engine
from training_runs import ROOT, environment, steps_of

from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss
from megatron_rl.batch import exchange
from megatron_rl.config import GenerationConfig, RolloutConfig
from megatron_rl.rollout.sglang import RemoteSGLangEngine
from megatron_rl.rollout.workflows import RLVRWorkflow
from megatron_rl.serving.supervisor import Supervisor
from megatron_rl.update_group import checksum
from megatron_rl.weights.hf_files import write_hf_folder

VERSION = 9
TEMPERATURE = 0.8


def post(url, endpoint, body):
    request = urllib.request.Request(
        f"{url}{endpoint}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def train_publish_and_sample(model, urls, layout, bucket_bytes):
    """Move the weights off the folder's, publish them, sample, and score the samples in the trainer."""
    engine = make_engine(model, LAYOUTS[layout][1], lr=1e-2)
    engine.config.bucket_bytes = bucket_bytes
    groups, rollout = engine.groups, None
    if groups.is_main:
        rollout = RemoteSGLangEngine(RolloutConfig(), seed=1)
        rollout.initialize(urls)
    workflow = RLVRWorkflow(
        lambda **_: 0.0,
        GenerationConfig(n_samples=4, max_new_tokens=24, temperature=TEMPERATURE, ignore_eos=True),
        tokenizer=None,
    )
    prompts = [{"input_ids": [5, 17, 300 + i]} for i in range(6)]
    engine.update_weights(rollout, VERSION - 1)
    batch = exchange.gather(rollout.rollout_batch(prompts, workflow) if rollout else None, groups)
    engine.train().train_batch(batch, LogprobLoss(supervised))
    engine.update_weights(rollout, VERSION)
    batch = exchange.gather(rollout.rollout_batch(prompts, workflow) if rollout else None, groups)
    ours = engine.eval().forward(batch, temperature=TEMPERATURE)
    weights = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    if rollout is not None:
        engine.publisher.close()
        rollout.destroy()
    return batch, ours, weights


def assert_same_logprobs(batch, ours):
    trained = batch["loss_mask"]
    assert trained.sum() == 6 * 4 * 24 and (batch["versions"][trained] == VERSION).all()
    difference = (ours - batch["logprobs"])[trained].abs()
    assert difference.mean() < 1e-5 and difference.max() < 1e-3


def greedy(url):
    """Tokens and log-probabilities of the most likely replies to some prompts."""
    params = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    bodies = [{"input_ids": [9, 30 * i], "sampling_params": params, "return_logprob": True} for i in range(4)]
    return [post(url, "/generate", body)["meta_info"]["output_token_logprobs"] for body in bodies]


# One process in one bucket, and four with every tensor of a layer in a bucket of its own.
@pytest.mark.parametrize("layout,bucket_bytes", [("1", 1 << 28), ("tp2_pp2", 40_000)])
def test_embedded_servers_hold_the_trainers_weights_bit_for_bit(
    tiny_model, embedded_servers, layout, bucket_bytes, tmp_path
):
    try:
        result = run_ranks(
            LAYOUTS[layout][0], train_publish_and_sample, tiny_model, embedded_servers, layout, bucket_bytes
        )
        batch, ours, weights = result[0]
        assert_same_logprobs(batch, ours)
        for url in embedded_servers:
            held = post(url, "/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
            assert held == {name: checksum(tensor) for name, tensor in weights.items()}
        write_hf_folder(tmp_path / "trained", weights.items(), model_folder=tiny_model, dtype=torch.float32)
        with Supervisor(RolloutConfig(backend="embedded"), tmp_path / "trained", tmp_path / "fresh") as fresh:
            assert greedy(embedded_servers[0]) == greedy(embedded_servers[1]) == greedy(fresh.urls[0])
    finally:
        for url in embedded_servers:
            post(url, "/update_weights_from_disk", {"model_path": str(tiny_model), "weight_version": "0"})


def test_real_sglang_answers_as_after_loading_the_trainers_weights_from_disk(tiny_model, real_sglang, tmp_path):
    try:
        result = run_ranks(4, train_publish_and_sample, tiny_model, [real_sglang], "tp2_pp2", 40_000)
        batch, ours, weights = result[0]
        assert_same_logprobs(batch, ours)
        published = greedy(real_sglang)
        write_hf_folder(tmp_path / "trained", weights.items(), model_folder=tiny_model, dtype=torch.float32)
        body = {"model_path": str(tmp_path / "trained"), "weight_version": "10"}
        assert post(real_sglang, "/update_weights_from_disk", body)["success"]
        assert greedy(real_sglang) == published, "the same tokens and log-probabilities to the last bit"
    finally:
        post(real_sglang, "/update_weights_from_disk", {"model_path": str(tiny_model), "weight_version": "0"})
    assert greedy(real_sglang) != published, "the folder's own weights answer otherwise"


def prefers_low_ids(prompt, completions, prompt_ids, completion_ids, **data):
    """A reward that a random model can earn at once: the share of tokens from the lower half of the vocabulary."""
    return sum(token < 256 for token in completion_ids) / len(completion_ids)


@pytest.mark.slow
def test_five_grpo_steps_against_real_sglang(tiny_model, real_sglang, tmp_path):
    arguments = [
        "configs/count_grpo.yaml",
        f"model.path={tiny_model}",
        "model.init=hf",
        "warm_start.updates=0",
        f"rollout.servers=[{real_sglang}]",
        "rollout.reward=test_agreement:prefers_low_ids",
        "generation.max_new_tokens=8",
        "optimizer.lr=3e-3",
        "batch.prompts_per_step=8",
        "data.evaluation=''",
        "run.steps=5",
        "run.save_at_end=false",
        f"run.folder={tmp_path}/run",
    ]
    env = environment() | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/servers:{ROOT}/tests/megatron:{ROOT}/tests/end_to_end"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_rl.train", *arguments],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        steps = steps_of(tmp_path / "run")
        assert len(steps) == 5
        for number, step in enumerate(steps):
            assert step["policy/version"] == 2 * (number + 1), "two updates a step"
            assert step["mismatch/mean"] < 1e-4 and step["policy/first_ratio_deviation"] < 1e-5
        assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.1
    finally:
        post(real_sglang, "/update_weights_from_disk", {"model_path": str(tiny_model), "weight_version": "0"})
