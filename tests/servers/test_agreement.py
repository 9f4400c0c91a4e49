"""Trainer and server hold the same weights and compute the same log-probabilities: embedded and real SGLang."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss
from megatron_rl.batch import exchange
from megatron_rl.config import GenerationConfig, LoraConfig, RolloutConfig, load_config
from megatron_rl.rollout.groups import join_groups, trained_versions
from megatron_rl.rollout.journal import SUFFIX, read_file
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.train import train
from megatron_rl.weights.adapter_rules import last_parts
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.hf_files import write_hf_folder
from megatron_rl.weights.update_group import checksum
from megatron_rl.workflows import RLVRWorkflow
from tests.kit.client_calls import post
from tests.kit.models import LAYOUTS, make_engine
from tests.kit.pace import slowed
from tests.kit.ranks import run_ranks
from tests.kit.reference import load_reference, logprobs_of, reference_logprobs, reference_logprobs_on_old_keys
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.runs import COUNT, ROOT, mean, steps_of
from tests.kit.servers import NEVER_LATE, SGLANG_ARGUMENTS
from tests.kit.waiting import LATE_S, LIMIT_S

VERSION = 9
TEMPERATURE = 0.8


def load_folder(url, folder, version="0"):
    """Let a server load a folder's weights.

    Not with `flush_cache` in the same call: where SGLang still counts the reply before, or a look at its health, as
    running, its scheduler dies of that.
    """
    body = {"model_path": str(folder), "weight_version": version, "flush_cache": False}
    assert post(url, "/update_weights_from_disk", body).json()["success"]
    assert post(url, f"/flush_cache?timeout={LIMIT_S:g}").status_code == 200


def train_publish_and_sample(model, urls, layout, bucket_bytes, lora=None, adapter_folder=None):
    """Move the weights off the folder's, publish them, sample, and score the samples in the trainer.

    adapter_folder: publishes adapters alone, over this folder.
    """
    engine = make_engine(model, LAYOUTS[layout][1], lr=1e-2, lora=lora)
    engine.config.bucket_bytes = bucket_bytes
    options = {"token_file": TOKEN_FILE}
    if adapter_folder is not None:
        engine.config.publication, engine.config.publication_folder = "adapters", str(adapter_folder)
        options |= {"publication": "adapters", "interruption": "abort"}
    groups, rollout = engine.groups, None
    if groups.is_main:
        rollout = RemoteSGLangEngine(RolloutConfig(**options), seed=1)
        rollout.initialize(urls)
    workflow = RLVRWorkflow(
        lambda **_: 0.0,
        GenerationConfig(n_samples=4, max_new_tokens=24, temperature=TEMPERATURE, ignore_eos=True),
        tokenizer=None,
    )
    prompts = [{"input_ids": [5, 17, 300 + i]} for i in range(4)]

    def sampled():
        own = rollout.rollout_batch(prompts, workflow) if rollout else None
        return exchange.share_out(own, groups, updates=1, seed=0).own()  # one replica: all of it

    engine.update_weights(rollout, VERSION - 1)
    batch = sampled()
    engine.train().train_batch(batch, LogprobLoss(supervised))
    engine.update_weights(rollout, VERSION)
    batch = sampled()
    ours = engine.eval().forward(batch, temperature=TEMPERATURE)
    weights = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    if rollout is not None:
        engine.publisher.close()
        rollout.destroy()
    return batch, ours, weights


def assert_same_logprobs(batch, ours):
    trained = batch["loss_mask"]
    assert trained.sum() == 4 * 4 * 24 and (batch["versions"][trained] == VERSION).all()
    difference = (ours - batch["logprobs"])[trained].abs()
    assert difference.mean() < 1e-5 and difference.max() < 1e-3


def greedy(url):
    """Tokens and log-probabilities of the most likely replies to some prompts."""
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    bodies = [{"input_ids": [9, 30 * i], "sampling_params": params, "return_logprob": True} for i in range(3)]
    return [post(url, "/generate", body).json()["meta_info"]["output_token_logprobs"] for body in bodies]


def assert_same_answers(found, expected):
    for own, other in zip(found, expected, strict=True):
        assert [token for _, token, *_ in own] == [token for _, token, *_ in other]
        assert [value for value, *_ in own] == pytest.approx([value for value, *_ in other], abs=1e-5)


# One process in one bucket, and four with every tensor of a layer in a bucket of its own; and with adapters, merged.
# The four without adapters publish to real SGLang below.
@pytest.mark.parametrize(
    "layout,bucket_bytes,lora",
    [
        ("1", 1 << 28, None),
        pytest.param("tp2_pp2", 40_000, None, marks=pytest.mark.thorough),
        ("tp2_pp2", 40_000, LoraConfig(rank=4)),
    ],
)
def test_embedded_servers_hold_the_trainers_weights_bit_for_bit(
    tiny_model, embedded_servers, layout, bucket_bytes, lora, tmp_path
):
    try:
        result = run_ranks(
            LAYOUTS[layout][0], train_publish_and_sample, tiny_model, embedded_servers, layout, bucket_bytes, lora
        )
        batch, ours, weights = result[0]
        assert_same_logprobs(batch, ours)
        for url in embedded_servers:
            held = post(url, "/weights_checker", {"action": "checksum"}).json()["ranks"][0]["checksums"]
            assert held == {name: checksum(tensor) for name, tensor in weights.items()}
        answers = [greedy(url) for url in embedded_servers]
        write_hf_folder(tmp_path / "trained", weights.items(), model_folder=tiny_model, dtype=torch.float32)
        load_folder(embedded_servers[1], tmp_path / "trained", "10")
        answers.append(greedy(embedded_servers[1]))
        # The checksums are of every bit; a CPU's matrix products may differ in their last one from call to call.
        tokens = [[[token for _, token, *_ in reply] for reply in answer] for answer in answers]
        assert tokens[0] == tokens[1] == tokens[2]
        logprobs = torch.tensor([[[logprob for logprob, *_ in reply] for reply in answer] for answer in answers])
        torch.testing.assert_close(logprobs, logprobs[-1:].expand_as(logprobs), rtol=0, atol=1e-5)
    finally:
        for url in embedded_servers:
            load_folder(url, tiny_model)


def test_real_sglang_answers_as_after_loading_the_trainers_weights_from_disk(tiny_model, real_sglang, tmp_path):
    try:
        result = run_ranks(4, train_publish_and_sample, tiny_model, [real_sglang], "tp2_pp2", 40_000)
        batch, ours, weights = result[0]
        assert_same_logprobs(batch, ours)
        published = greedy(real_sglang)
        write_hf_folder(tmp_path / "trained", weights.items(), model_folder=tiny_model, dtype=torch.float32)
        load_folder(real_sglang, tmp_path / "trained", "10")
        # Each bit of the weights was compared by checksums; a CPU's products may differ in their last one.
        assert_same_answers(greedy(real_sglang), published)
    finally:
        load_folder(real_sglang, tiny_model)
    assert greedy(real_sglang) != published, "the folder's own weights answer otherwise"


ADAPTERS = LoraConfig(rank=4, alpha=64.0)


# Of SGLang each test starts one.
@pytest.fixture(params=["embedded", pytest.param("sglang", marks=pytest.mark.thorough)])
def with_adapters(request, tiny_model, tmp_path):
    """A server that was started for adapters, and that no other test uses."""
    arguments = []
    if request.param == "sglang":
        request.getfixturevalue("needs_sglang")
        arguments = SGLANG_ARGUMENTS
    config = RolloutConfig(backend=request.param, server_args=arguments, token_file=TOKEN_FILE, **NEVER_LATE)
    (folder := tmp_path / "servers").mkdir()
    lora = replace(ADAPTERS, targets=last_parts(read_architecture(tiny_model), ADAPTERS))
    with Supervisor(config, tiny_model, folder, lora=lora) as supervisor:
        yield supervisor.urls[0]


def test_servers_compute_published_adapters_beside_weights_that_stay(tiny_model, with_adapters, tmp_path):
    arguments = tiny_model, [with_adapters], "tp2_pp2", 40_000, ADAPTERS, tmp_path / "published"
    batch, ours, weights = run_ranks(4, train_publish_and_sample, *arguments)[0]
    assert_same_logprobs(batch, ours)
    plain = load_file(tiny_model / "model.safetensors")
    changed = [name for name, tensor in weights.items() if not torch.equal(tensor, plain[name])]
    assert any("q_proj" in name for name in changed) and any("down_proj" in name for name in changed)
    (published,) = (tmp_path / "published").iterdir()
    files = {"adapter_config.json", "adapter_model.safetensors", "checksums.json"}
    assert {file.name for file in published.iterdir()} == files
    assert post(with_adapters, "/unload_lora_adapter", {"lora_name": "policy"}).json()["success"]
    refuses_adapters_that_are_not_what_was_written(with_adapters, published, tmp_path / "spoilt")
    load_folder(with_adapters, tiny_model)
    answers = [greedy(with_adapters)]
    write_hf_folder(tmp_path / "merged", weights.items(), model_folder=tiny_model, dtype=torch.float32)
    load_folder(with_adapters, tmp_path / "merged")
    assert greedy(with_adapters) != answers[0], "these adapters change what is answered"


def refuses_adapters_that_are_not_what_was_written(url, published, folder):
    """As a host that sees old pages of a shared file would have them."""
    shutil.copytree(published, folder)
    tensors = load_file(published / "adapter_model.safetensors")
    name = next(name for name in sorted(tensors) if "k_proj.lora_B" in name)
    tensors[name][-1, -1] += 1e-6
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    refusal = post(url, "/load_lora_adapter", {"lora_name": "policy", "lora_path": str(folder)})
    assert not refusal.ok and f"1 tensors are not what was published, the first is {name}" in refusal.text
    assert post(url, "/load_lora_adapter", {"lora_name": "policy", "lora_path": str(published)}).json()["success"]
    assert post(url, "/unload_lora_adapter", {"lora_name": "policy"}).json()["success"]


GRPO = (
    *("model.init=hf", "warm_start.updates=0", "data.evaluation=", "run.save_at_end=false"),
    *("run.import_from=[own_rewards]", "rollout.reward=own_rewards:prefers_low_ids", "optimizer.lr=3e-3"),
)


def train_with(arguments):
    os.chdir(ROOT)
    train(load_config(COUNT, [*GRPO, *arguments]))


def grpo(model, servers, folder, *arguments):
    """Train in a process of its own, against servers that get their first weights back afterwards."""
    arguments += (
        f"model.path={model}",
        f"rollout.servers={servers}",
        f"run.folder={folder}",
        f"rollout.token_file={TOKEN_FILE}",
    )
    try:
        run_ranks(1, train_with, arguments, timeout_s=LATE_S)
    finally:
        for url in servers:
            load_folder(url, model)
    return steps_of(folder)


def asynchronous(*arguments):
    """Two updates a step; replies that take longer than a step."""
    small = ("rollout.max_staleness=1", "correction.weight=mask", "batch.prompts_per_step=4", "optimizer.lr=1e-3")
    return (*small, "run.checkpoint_every_steps=100", *arguments)  # where checkpoints are, there is a journal


def trained_replies(folder, steps):
    """Do the books of a run by its journal: every prompt once, no token too old.

    Return the trained replies: (prompt, tokens, log-probs, versions), of tokens of the reply.
    """
    last, trained, replies = {}, [], []
    for path in sorted((folder / "journal").glob(f"*{SUFFIX}")):
        records, fault = read_file(path)
        assert not fault
        for record in records:
            if record.event["event"] == "accepted":
                last[record.event["prompt"]] = record
            if record.event["event"] == "consumed":
                trained += record.event["prompts"]
                group = join_groups([last[prompt].group() for prompt in record.event["prompts"]])
                ages = record.event["version"] - trained_versions(group)
                assert record.event["version"] == record.event["step"] and ages.min() >= 0 and ages.max() <= 1
                for reply in (group.select([number]) for number in range(len(group))):
                    own = reply["loss_mask"]
                    columns = (reply[name][own].tolist() for name in ("input_ids", "logprobs", "versions"))
                    replies.append((reply["input_ids"][~own].tolist(), *columns))
    assert len(trained) == len(set(trained)) == 4 * steps, "every prompt once"
    return replies


def met_by_new_weights(replies):
    """The replies that hold two versions."""
    return [reply for reply in replies if len(set(reply[-1])) > 1]


# One publication to it is held against the trainer above, and many to embedded servers below.
@pytest.mark.slow
@pytest.mark.thorough
def test_twenty_asynchronous_grpo_steps_against_real_sglang(tiny_model, real_sglang, tmp_path):
    # On a fast machine short replies are complete before any publication.
    for tokens in (24, 96, 192):
        folder = tmp_path / str(tokens)
        arguments = asynchronous("run.steps=20", f"generation.max_new_tokens={tokens}", "run.save_every_steps=1")
        steps = grpo(tiny_model, [real_sglang], folder, *arguments)
        replies = trained_replies(folder, 20)
        if len(met_by_new_weights(replies)) > 20:
            break
    assert len(met_by_new_weights(replies)) > 20
    assert [step["policy/version"] for step in steps] == list(range(1, 21))
    assert max(step["rollout/staleness_max"] for step in steps) == 1, "it ran ahead, and never further than it may"
    # What a server computes with the weights that a token names is what the trainer computes with them.
    assert max(step.get("mismatch/mean_age_0", 0.0) for step in steps) < 1e-4
    assert mean(step["reward/mean"] for step in steps[-5:]) > mean(step["reward/mean"] for step in steps[:5]) + 0.05
    models = [load_reference(each) for each in (tiny_model, *(folder / f"step-{v}" for v in range(1, 20)))]
    for prompt, tokens, logprobs, versions in replies:
        by_version = {version: logprobs_of(models[version], prompt, tokens) for version in set(versions)}
        expected = [by_version[version][place] for place, version in enumerate(versions)]
        assert logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
# What each mode does to one reply is in test_interruption.py.
@pytest.mark.parametrize(
    "mode,cache_age",
    [
        pytest.param("abort", 0, marks=pytest.mark.thorough),
        ("retract", 0),
        pytest.param("in_place", 1, marks=pytest.mark.thorough),
    ],
)
def test_every_trained_token_is_of_the_version_that_it_names(mode, cache_age, tiny_model, embedded_servers, tmp_path):
    arguments = (f"rollout.interruption={mode}", f"rollout.max_cache_age={cache_age}", "run.save_every_steps=1")
    arguments += ("generation.n_samples=4", "batch.updates_per_step=1")
    arguments = asynchronous(*arguments, "correction.proximal=loglinear", "generation.max_new_tokens=120")
    # Which replies meet new weights depends on the machine's speed, so a run without one is repeated with slower ones.
    for number in range(5):
        folder = tmp_path / str(number)
        with slowed(0.002 * 2**number):
            steps = grpo(tiny_model, embedded_servers, folder, *arguments, "run.steps=3")
        met = met_by_new_weights(trained_replies(folder, 3))
        if mode == "in_place":  # odd versions flush the cache all the same
            met = [reply for reply in met if reply[-1][-1] % 2 == 0]
        if met:
            break
    assert met and (mode != "abort" or sum(step["rollout/interruptions"] for step in steps) > 0)
    for prompt, tokens, logprobs, versions in met[:: len(met) // 4 + 1]:
        old, new = (folder / f"step-{v}" if v else tiny_model for v in (versions[0], versions[-1]))
        before = versions.count(versions[0])
        assert versions == [versions[0]] * before + [versions[0] + 1] * (len(versions) - before)
        if mode == "in_place":
            expected = reference_logprobs_on_old_keys(old, new, prompt, tokens, before)
        else:
            first, second = (reference_logprobs(weights, prompt, tokens) for weights in (old, new))
            expected = first[:before] + second[before:]
        assert logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.thorough  # the next test has a server compute published adapters
def test_every_trained_token_is_of_the_adapters_that_it_names(tiny_model, with_adapters, tmp_path):
    lora = ("lora.rank=4", "lora.alpha=64", "rollout.publication=adapters", "rollout.interruption=abort")
    arguments = asynchronous(*lora, "algo.kl_coefficient=0.01", "run.save_every_steps=1", "batch.updates_per_step=1")
    for number in range(5):
        folder = tmp_path / str(number)
        with slowed(0.002 * 2**number):
            steps = grpo(
                tiny_model, [with_adapters], folder, *arguments, "run.steps=6", "generation.max_new_tokens=200"
            )
        replies = trained_replies(folder, 6)
        if met_by_new_weights(replies):
            break
    assert met_by_new_weights(replies)
    assert max(step.get("mismatch/mean_age_0", 0.0) for step in steps) < 1e-4
    assert steps[0]["policy/reference_kl"] < 1e-6 < steps[-1]["policy/reference_kl"], "the reference has no adapters"
    models = [load_reference(each) for each in (tiny_model, *(folder / f"step-{v}" for v in range(1, 6)))]
    for prompt, tokens, logprobs, versions in replies[:: len(replies) // 16]:
        by_version = {version: logprobs_of(models[version], prompt, tokens) for version in set(versions)}
        expected = [by_version[version][place] for place, version in enumerate(versions)]
        assert logprobs == pytest.approx(expected, abs=1e-3)
