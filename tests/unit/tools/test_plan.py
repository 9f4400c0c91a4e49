"""The arithmetic of a plan, against what packing and the admission gate do and against counts by hand."""

import itertools
import json
import random
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_rl.algo.catalogue import find_loss
from megatron_rl.batch import packing
from megatron_rl.cli import main
from megatron_rl.config import (
    LOSSES,
    AlgorithmConfig,
    BatchConfig,
    CorrectionConfig,
    CriticConfig,
    DataConfig,
    GenerationConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TeacherConfig,
    TrainConfig,
    load_config,
)
from megatron_rl.launch import slurm
from megatron_rl.launch.local import arrange
from megatron_rl.launch.placement import Nodes, place
from megatron_rl.ops import head
from megatron_rl.rollout.staleness import AdmissionGate
from megatron_rl.tools.plan import devices
from megatron_rl.tools.plan.devices import DEVICES, FRAGMENTATION, GIB, RESERVED_BYTES
from megatron_rl.tools.plan.fit import ON_CPU, best_plan, nearest_plan, other_layouts, plans_of, refusal
from megatron_rl.tools.plan.memory import (
    ModelMemory,
    TrainerMemory,
    float32_copies,
    kv_bytes_per_token,
    memory_of,
    models_of,
    rows_of_chunk,
    rows_of_gradient,
    rows_of_microbatch,
    server_memory,
    trainer_memory,
)
from megatron_rl.tools.plan.plan import Cluster
from megatron_rl.tools.plan.step_sizes import (
    Bounds,
    PromptTokens,
    ReplyTokens,
    evaluation_count,
    plan_batch,
    usual_microbatches,
)
from megatron_rl.tools.plan.throughput import (
    SELECTING,
    causal_keys,
    forward_flops,
    forward_seconds,
    matrix_parameters,
    passes,
    product_efficiency,
    with_bubble,
)
from megatron_rl.tools.plan.traffic import RankTraffic, Traffic, publication_seconds
from megatron_rl.types import TrajectoryBatch
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import check_layout, parameters

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "configs" / "models" / "count_tiny")


def config_with(**sections):
    required = {"model": ModelConfig(path=MODEL), "data": DataConfig(train="x:y")}
    return TrainConfig(**required | {"generation": GenerationConfig(n_samples=4, max_new_tokens=20)} | sections)


def test_batch_algebra_by_hand():
    config = config_with(
        batch=BatchConfig(prompts_per_step=10, updates_per_step=2, tokens_per_microbatch=100, share_prompts=False),
        rollout=RolloutConfig(max_concurrent_episodes=3),
        run=RunConfig(steps=20, evaluate_every_steps=5),
        data=DataConfig(train="x:y", evaluation="x:z"),
    )
    plan = plan_batch(config, PromptTokens.of([4, 6, 8]), replicas=2)
    assert (plan.prompts, plan.trajectories, plan.requests) == (10, 40, 40)
    assert (plan.prompt_tokens, plan.most_reply_tokens, plan.longest_sequence) == (240, 800, 28)
    assert plan.computed_rows == 40 * (6 + 20)
    assert plan.trajectories_per_replica == Bounds(10, 10)
    # At best ten prompts of 4 tokens, whose replies are empty; at worst three sequences of 28 tokens fit together.
    assert plan.microbatches == Bounds(1, 4)
    assert (plan.groups_in_flight, plan.episodes_running, plan.replies_running) == (10, 6, 24)
    # Before the first step, after steps 5, 10 and 15, and after the last.
    assert (plan.evaluations, plan.all_requests) == (5, 20 * 40)
    assert plan.epochs == pytest.approx(200 / 3)


@pytest.mark.parametrize("steps,every", [(1, 0), (12, 0), (12, 1), (12, 5), (12, 12), (12, 30)])
def test_evaluations_are_those_of_the_loop(steps, every):
    config = config_with(run=RunConfig(steps=steps, evaluate_every_steps=every))
    due = [step for step in range(steps + 1) if step in (0, steps) or (every and step % every == 0)]
    assert evaluation_count(config) == len(due)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("concurrent", [2, 1000])
def test_groups_in_flight_are_what_the_gates_admit(staleness, concurrent):
    config = config_with(
        batch=BatchConfig(prompts_per_step=8),
        rollout=RolloutConfig(max_concurrent_episodes=concurrent, max_staleness=staleness),
    )
    plan = plan_batch(config, PromptTokens.of([5]), replicas=2)
    gates = [AdmissionGate(concurrent, staleness, groups_per_step=4) for _ in range(2)]
    assert plan.groups_in_flight == sum(gate.room(0) for gate in gates)
    assert plan.episodes_running == sum(gate.capacity(0) for gate in gates)


def test_oversampled_groups_are_what_the_gates_admit():
    config = config_with(batch=BatchConfig(prompts_per_step=9), rollout=RolloutConfig(oversample=1.5))
    gates = []
    for prompts, surplus in ((4, 2), (5, 3)):
        gates.append(AdmissionGate(100, 0))
        gates[-1].begin_step(prompts, 0, waiting=0, surplus=surplus)
    plan = plan_batch(config, PromptTokens.of([5]), replicas=2)
    assert plan.groups_in_flight == sum(gate.room(0) for gate in gates) == 14


def random_share(rng, prompts, replies, longest_prompt, longest_reply):
    """A replica's trajectories: whole groups, some of whose replies are equal or empty."""
    ids, lengths, groups = [], [], []
    for number in range(prompts):
        prompt = [rng.randrange(3) for _ in range(rng.randint(2, longest_prompt))]
        for _ in range(replies):
            reply = [rng.randrange(2) for _ in range(rng.randint(0, longest_reply))]
            ids += prompt + reply
            lengths.append(len(prompt) + len(reply))
            groups.append(number)
    tokens = {"input_ids": torch.tensor(ids), "loss_mask": torch.ones(len(ids), dtype=torch.bool)}
    return TrajectoryBatch(tokens, {"group": torch.tensor(groups)}, torch.tensor([0, *lengths]).cumsum(0))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("budget", [5, 30, 64, 400])
def test_packing_stays_within_the_planned_microbatches(shared, budget):
    rng = random.Random(budget)
    for _ in range(20):
        prompts, replies, prompt, reply = (rng.randint(1, most) for most in (6, 5, 12, 30))
        config = config_with(
            batch=BatchConfig(prompts_per_step=prompts, tokens_per_microbatch=budget, share_prompts=shared),
            generation=GenerationConfig(n_samples=replies + 1, max_new_tokens=reply),
        )
        plan = plan_batch(config, PromptTokens.of([2, prompt + 2]), replicas=1)
        share = random_share(rng, prompts, replies + 1, prompt + 2, reply)
        for final_rows in (False, True):
            parts = packing.units(share, budget, share_prompts=shared, final_rows=final_rows)
            count = packing.least_microbatches([unit.rows for unit in parts], budget)
            assert plan.microbatches.least <= count <= plan.microbatches.most


def test_interleaved_pipelines_take_whole_rounds_of_microbatches():
    config = config_with(
        batch=BatchConfig(prompts_per_step=3, tokens_per_microbatch=30, share_prompts=False),
        parallel=ParallelConfig(pipeline=4, virtual_pipeline=2),
    )
    # 12 sequences of up to 28 tokens, one to a microbatch.
    assert plan_batch(config, PromptTokens.of([8]), replicas=1).microbatches == Bounds(4, 12)


def test_more_replicas_than_prompts_are_refused():
    with pytest.raises(ValueError, match=r"batch.prompts_per_step = 2: each of the 4 .* raise it"):
        plan_batch(config_with(batch=BatchConfig(prompts_per_step=2)), PromptTokens.of([5]), replicas=4)


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
QWEN_30B_A3B = LLAMA_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
TOKENS = PromptTokens.of([9])
QWEN_NEXT_80B_A3B = LLAMA_8B | {
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def model_folder(folder, config):
    """A config.json with the tokenizer of the counting task; a plan needs no weights."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def large(folder, config=LLAMA_8B, **sections):
    batch = BatchConfig(prompts_per_step=64, tokens_per_microbatch=8192)
    path = model_folder(folder, config)
    generation = GenerationConfig(n_samples=4, max_new_tokens=1000)
    options = {"model": ModelConfig(path=path, dtype="bfloat16"), "batch": batch, "generation": generation} | sections
    return config_with(**options)


def cluster(gpus=8, nodes=1, device="h100"):
    return Cluster(nodes=nodes, gpus_per_node=gpus, device=DEVICES[device])


def test_parameters_of_known_models(tmp_path):
    assert parameters(read_architecture(model_folder(tmp_path / "a", LLAMA_8B))) == 8_030_261_248
    policy = models_of(large(tmp_path / "b", QWEN_30B_A3B))[0]
    assert policy.parameters == 30_532_122_624
    # A3B: 3.3 billion active parameters with embedding and head.
    assert matrix_parameters(policy) + 2 * 151936 * 2048 == pytest.approx(3.35e9, rel=0.01)


def test_keys_and_values_of_a_token():
    arch = read_architecture(MODEL)
    one = arch.layers * 2 * arch.kv_heads * arch.head_dim * 2
    assert kv_bytes_per_token(arch, 2) == one
    assert kv_bytes_per_token(arch, 2, gpus=2 * arch.kv_heads) == one / arch.kv_heads  # a head is never cut


def test_the_states_of_delta_nets_take_a_servers_memory_for_each_reply(tmp_path):
    config = large(tmp_path, QWEN_NEXT_80B_A3B)
    policy = replace(models_of(config)[0], megatron={})
    assert policy.parameters == 79_674_391_296
    config.rollout.server_args += ["--tp", "8"]
    memory = server_memory(policy, config, plan_batch(config, TOKENS, replicas=1), DEVICES["h100"])
    # 12 layers have keys and values; 36 have 32 heads' states of 128 x 128 and three rows of 8,192 before convolution.
    assert memory.kv_per_token == 12 * 2 * 1 * 256 * 2
    assert memory.state_per_reply == 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192) / 8
    assert memory.replies == int(memory.kv_room / (memory.state_per_reply + 1009 * memory.kv_per_token))


def test_replies_that_fit_a_server(tmp_path):
    config = large(tmp_path)
    batch = plan_batch(config, TOKENS, replicas=1)
    memory = server_memory(models_of(config)[0], config, batch, DEVICES["h100"])
    # 32 layers x 2 x 8 heads x 128 x 2 bytes a token, 1,009 tokens a reply, 85 % of the GPU less the weights.
    assert memory.kv_per_token == 131072
    assert memory.replies == int((0.85 * 79.6 * GIB - 2 * 8_030_261_248) // 131072 // 1009)
    config.rollout.server_args += ["--mem-fraction-static=0.5", "--tp", "2"]
    smaller = server_memory(models_of(config)[0], config, batch, DEVICES["h100"])
    assert (smaller.gpus, smaller.kv_per_token, smaller.weights) == (2, 65536, memory.weights / 2)
    assert smaller.kv_room == 0.5 * 79.6 * GIB - smaller.weights


def test_parts_sum_to_the_peak_and_offloaded_models_take_turns():
    policy = ModelMemory({"weights": 2.0, "optimizer": 8.0}, {"activations": 5.0}, {"optimizer step": 1.0})
    critic = ModelMemory({"weights": 4.0, "optimizer": 12.0}, {"activations": 1.0}, {"optimizer step": 3.0})
    reference = ModelMemory({"weights": 2.0})
    models = {"policy": policy, "critic": critic, "reference model": reference}

    together = TrainerMemory(models, offload=False, available=1.0)
    assert together.fullest_moment == "update"
    assert together.peak == pytest.approx((10 + 16 + 2 + 5) * (1 + FRAGMENTATION) + RESERVED_BYTES)
    apart = TrainerMemory(models, offload=True, available=1.0)
    assert apart.fullest_moment == "critic: optimizer step"
    assert apart.peak == pytest.approx((16 + 3) * (1 + FRAGMENTATION) + RESERVED_BYTES)
    lent = ModelMemory(policy.states, policy.update, policy.moments, {"publication": 40.0})  # beside its weights alone
    published = TrainerMemory(models | {"policy": lent}, offload=False, available=1.0)
    assert published.fullest_moment == "publication"
    assert published.peak == pytest.approx((2 + 40) * (1 + FRAGMENTATION) + RESERVED_BYTES)
    for memory in (together, apart, published):
        assert sum(memory.parts.values()) == memory.peak


def test_head_holds_the_logits_of_as_many_rows_as_planned():
    for columns in (33, 4_000, 75_968, 151_936, 1 << 20, 1 << 29):
        assert rows_of_chunk(columns) == head.rows_of_chunk(columns)
        assert rows_of_gradient(columns) == head.rows_of_gradient(columns)


def test_supports_and_what_changes_their_logits_are_counted():
    def planned(**generation):
        config = config_with(generation=GenerationConfig(n_samples=4, max_new_tokens=20, **generation))
        batch = plan_batch(config, TOKENS, replicas=1)
        memory = memory_of(models_of(config)[0], config, batch, TOKENS, world_size=1)
        return memory.update.get("supports", 0.0), rows_of_microbatch(config, batch)

    (nothing, rows), ids = planned(), 2 * 5
    assert nothing == 0.0 and rows > 4096
    # A row's ids and their numbers, 4 bytes each, in the microbatch and again in the head, which works with a chunk.
    for options, numbers in (
        ({}, 1),
        ({"presence_penalty": 0.5}, 2),
        ({"logit_bias": {5: 1.0}}, 2),
        ({"repetition_penalty": 1.1, "logit_bias": {5: 1.0}}, 4),
    ):
        assert planned(top_k=5, **options)[0] == rows * ids * 2 * 4 * numbers + 4096 * ids * 32


def test_a_reference_model_or_a_teacher_adds_its_weights(tmp_path):
    config = large(tmp_path)
    with_reference = large(tmp_path, algo=AlgorithmConfig(kl_coefficient=0.1))
    teachers = {"a": {"path": config.model.path}, "b": {"path": config.model.path, "hint": "so "}}
    teachers["c"] = {"path": "policy", "hint": "so "}
    taught = large(tmp_path, teacher=TeacherConfig(by_source=teachers))
    peaks = []
    for c in (config, with_reference, taught):
        batch = plan_batch(c, TOKENS, replicas=8)
        peaks.append(trainer_memory(models_of(c), c, batch, TOKENS, 8, DEVICES["h100"]).peak)
    assert peaks[1] - peaks[0] == pytest.approx(2 * 8_030_261_248 * (1 + FRAGMENTATION))
    assert peaks[2] == peaks[1] and [model.name for model in models_of(taught)] == ["policy", "teacher model"]
    # A third of the trajectories is the policy's own to score, before its update, and two thirds the teacher's.
    assert [passes(model, taught) for model in models_of(taught)] == pytest.approx([3 + 1 / 3, 2 / 3])


@pytest.mark.parametrize(
    "layout,words",
    [
        (ParallelConfig(pipeline=3), "does not divide the model's 32 layers"),
        (ParallelConfig(tensor=3), "parallel.tensor = 3: does not divide evenly with the model's 32 attention heads"),
        (ParallelConfig(expert=2), "llama has no experts"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(layout, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        check_layout(read_architecture(model_folder(tmp_path, LLAMA_8B)), layout, {})


def test_forward_flops_are_twice_the_parameters_and_grow_with_keys(tmp_path):
    model = models_of(large(tmp_path))[0]
    outside = 2 * 4096 * 128256
    assert matrix_parameters(model) == 8_030_261_248 - outside
    assert forward_flops(model, 1, 1, 0) == 2 * (8_030_261_248 - outside / 2)
    # Two products of 32 heads x 128 with each key in each of 32 layers.
    assert forward_flops(model, 10, 0, 100) - forward_flops(model, 10, 0, 0) == 10 * 2 * 2 * 4096 * 100 * 32


@pytest.mark.slow
def test_best_split_is_the_fastest_that_fits(tmp_path):
    for staleness in (0, 2):
        config = large(
            tmp_path,
            parallel=ParallelConfig(tensor=4),
            rollout=RolloutConfig(max_staleness=staleness),
        )
        best = best_plan(config, TOKENS, cluster(nodes=4))
        plans = plans_of(config, TOKENS, cluster(nodes=4))
        assert {plan.trainer_gpus for plan in plans} == set(range(4, 32, 4))
        assert all(plan.trainer_gpus + plan.servers == 32 for plan in plans)
        assert best.split.step_s == min(plan.split.step_s for plan in plans if plan.fits)
        for plan in plans:
            split = plan.split
            # What may be left out of the search, and what the parts of a step are.
            assert plan.least_s <= split.step_s * 1.01
            assert split.step_s == pytest.approx(split.wait_s + split.update_s + split.publish_s)
            assert 0 <= split.server_idle <= 1 and 0 <= split.trainer_idle <= 1
        # More trainers update faster, fewer servers have more to do.
        by_trainers = sorted(plans, key=lambda plan: plan.trainer_gpus)
        assert [p.split.update_s for p in by_trainers] == sorted((p.split.update_s for p in plans), reverse=True)
        waits = [p.split.wait_s for p in by_trainers]
        assert all(later >= 0.95 * earlier for earlier, later in itertools.pairwise(waits))


def test_half_the_peak_at_the_rows_and_the_width_that_say_so():
    wide = 1e12
    assert product_efficiency(wide, wide) == pytest.approx(devices.MATRIX_EFFICIENCY)
    assert product_efficiency(devices.HALF_SIZE, wide) == pytest.approx(devices.MATRIX_EFFICIENCY / 2)
    assert product_efficiency(wide, devices.HALF_SIZE) == pytest.approx(devices.MATRIX_EFFICIENCY / 2)


def test_a_microbatch_takes_its_products_and_a_fixed_time_for_each_layer(tmp_path):
    model = models_of(large(tmp_path))[0]
    one, two = (forward_seconds(model, rows, 0, 0, DEVICES["h100"], 1.0) for rows in (4096, 8192))
    # 2 FLOPs a parameter and row; 4,096 columns; the H100's 989 TFLOPS.
    products = 2 * matrix_parameters(model) * 4096 / product_efficiency(4096, 4096) / 989e12
    assert one == pytest.approx(products + 32 * devices.LAYER_S)
    assert one < two < 2 * one  # twice the rows: better products, and no more launches


def test_experts_wait_for_the_busiest_of_their_ranks_and_like_to_have_more_rows(tmp_path):
    def seconds(imbalance, **layout):
        config = large(tmp_path, QWEN_30B_A3B, parallel=ParallelConfig(**layout))
        return forward_seconds(models_of(config)[0], 4096, 0, 0, DEVICES["h100"], imbalance)

    even, uneven = (seconds(imbalance) for imbalance in (1.0, 2.0))
    # 48 layers x 8 experts x 3 matrices of 768 x 2048, with 4096 x 8 / 128 = 256 rows each.
    routed = 2 * 4096 * 48 * 8 * 3 * 768 * 2048 / product_efficiency(256, 768) / 989e12
    assert uneven - even == pytest.approx(routed)
    assert seconds(1.0, expert=8) < even  # eight ranks' rows come together


def test_links_of_a_node_and_between_nodes_carry_their_own_parts_of_an_axis(tmp_path):
    layout = ParallelConfig(tensor=2, expert=32)
    model = models_of(large(tmp_path, QWEN_30B_A3B, parallel=layout))[0]
    update = RankTraffic(model, rank=0, world_size=64, gpus_per_node=8).of_update(rows=65536, labels=60000)
    sent = {part.axis: part for part in update}
    assert {axis: part.link for axis, part in sent.items()} == {
        "tensor": "in a node",
        "expert": "between nodes",
        "data": "between nodes",
        "expert data": "between nodes",
    }
    # Of 31 other expert ranks 7 are on the node. 4 of the node's ranks send what leaves it for its rings of `data`.
    expert, data, inside = sent["expert"], sent["data"], sent["tensor"]
    assert expert.far_bytes == pytest.approx(expert.nbytes * 24 / 31) and data.far_bytes == data.nbytes / 4
    assert expert.seconds(DEVICES["h100"]) == pytest.approx(expert.nbytes * 24 / 31 / 50e9 / devices.LINK_SHARE)
    assert inside.far_bytes == 0
    for name, speed in {"a100": 300e9, "h100": 450e9, "h200": 450e9, "b200": 900e9}.items():
        alone_s = inside.nbytes / speed / devices.LINK_SHARE
        assert inside.seconds(DEVICES[name]) == pytest.approx(alone_s), "NVLink, one way, by the data sheet"
    assert sent["expert data"].far_bytes == sent["expert data"].nbytes  # one rank a node


def test_a_row_attends_to_half_of_its_sequence_and_long_sequences_have_more_rows():
    config = config_with(generation=GenerationConfig(n_samples=2, max_new_tokens=290))
    assert causal_keys(config, PromptTokens.of([10], ReplyTokens((90,)))) == 50
    # 100 rows attend to 50 keys on average, 300 rows to 150.
    assert causal_keys(config, PromptTokens.of([10], ReplyTokens((90, 290)))) == (100 * 50 + 300 * 150) / 400


@pytest.mark.parametrize("mean,longest", [(800, 4000), (3200, 4000), (500, 1000), (749, 16000)])
def test_reply_lengths_have_the_given_mean_and_maximum(mean, longest):
    replies = ReplyTokens.with_mean(mean, longest)
    assert replies.mean == pytest.approx(mean, rel=0.01)
    assert replies.lengths[-1] == longest and list(replies.lengths) == sorted(replies.lengths)
    assert replies.lengths.count(longest) / len(replies.lengths) >= devices.ENDLESS - 1e-3
    assert sum(replies.spread(64)) / 64 == pytest.approx(mean, rel=0.1)


# Sequences of 60 do not share 100 rows; of 50 two do. One of 90 leaves no room, and one of 10 joins it.
@pytest.mark.parametrize("replies,count", [((58,), 12), ((48,), 6), ((8, 88), 6), ((8, 48, 88), 6)])
def test_usual_microbatches_by_hand(replies, count):
    batch = BatchConfig(tokens_per_microbatch=100, share_prompts=False)
    tokens = PromptTokens.of([2], ReplyTokens(replies))
    assert usual_microbatches(config_with(batch=batch), tokens, 12) == count


def test_a_pipeline_idles_for_the_other_stages_microbatches(tmp_path):
    model = models_of(large(tmp_path, parallel=ParallelConfig(pipeline=4, virtual_pipeline=2)))[0]
    assert with_bubble(model, 6) == pytest.approx(1 + 3 / (2 * 6))


# 16.06 GB over one link of 50 or 450 GB/s; on shared GPUs a request for each of 7 matrices in 32 layers.
@pytest.mark.parametrize("nodes,link", [(1, 450e9), (2, 50e9)])
def test_a_publication_takes_the_models_way_over_a_link_and_a_fixed_time(nodes, link, tmp_path):
    wire = 2 * 8_030_261_248 / (link * devices.LINK_SHARE)
    model = models_of(large(tmp_path))[0]
    assert publication_seconds(model, nodes, DEVICES["h100"], []) == pytest.approx(devices.GROUP_S + wire)
    assert publication_seconds(model, nodes, DEVICES["h100"], [Traffic("tensor", 2, 1e15)]) > 1000
    turns = RolloutConfig(backend="sglang", colocated=True, publication="ipc")
    shared = models_of(large(tmp_path, rollout=turns))[0]
    tensors = 7 * 32 * devices.IPC_TENSOR_S
    assert publication_seconds(shared, nodes, DEVICES["h100"], []) == pytest.approx(devices.IPC_S + tensors + wire)


def test_rates_of_a_plan_by_hand(tmp_path):
    config = large(tmp_path, parallel=ParallelConfig(tensor=2), optimizer=OptimizerConfig(distributed=True))
    plan = best_plan(config, PromptTokens.of([9], ReplyTokens((400, 600))), cluster())
    step_s, trained_s = plan.split.step_s, plan.work["updates"].seconds + plan.work["optimizer"].seconds
    assert plan.tokens_per_s_of_gpu == pytest.approx(64 * 4 * (9 + 500) / step_s / 8)
    keys = (409**2 + 609**2) / (409 + 609) / 2
    flops = 3 * forward_flops(plan.models[0], 64 * (9 + 4 * 500), 64 * 4 * 500, keys)
    assert plan.mfu == pytest.approx(flops / trained_s / (plan.trainer_gpus * 989e12))
    assert plan.step_range_s[0] < step_s < plan.step_range_s[1]
    name, seconds = plan.bound
    assert name in ("the longest reply", "the servers' decoding") and seconds == plan.split.wait_s


@pytest.mark.slow
def test_other_layouts_are_those_that_the_config_accepts_and_that_fit(tmp_path):
    critic = CriticConfig(parallel=ParallelConfig(tensor=2), optimizer=OptimizerConfig(distributed=True))
    config = large(
        tmp_path,
        parallel=ParallelConfig(tensor=2),
        critic=critic,
        algo=AlgorithmConfig(advantage="gae"),
        optimizer=OptimizerConfig(distributed=True),
    )
    plan = best_plan(config, TOKENS, cluster(nodes=4))
    others = other_layouts(plan)
    assert plan.fits and 0 < len(others) <= 3
    rates = [other.tokens_per_s_of_gpu for _, other in others]
    assert rates == sorted(rates, reverse=True)
    for words, other in others:
        assert other.fits and other.trainer_gpus == plan.trainer_gpus
        changed = other.config
        assert changed.critic.parallel.tensor == changed.parallel.tensor
        assert f"parallel.tensor={changed.parallel.tensor}" in words or changed.parallel.tensor == 2
        assert all(f"critic.{word}" in words for word in words if word.startswith("parallel."))
    assert not any("parallel.tensor" in word for words, _ in other_layouts(plan, ["parallel.tensor"]) for word in words)


# Forward once, backward twice; and the tokens of all updates but the first once more, to measure the proximal policy.
@pytest.mark.parametrize("updates,proximal,count", [(1, "recompute", 3), (4, "recompute", 3.75), (4, "loglinear", 3)])
def test_passes_over_the_steps_tokens(updates, proximal, count):
    batch, correction = BatchConfig(updates_per_step=updates), CorrectionConfig(proximal=proximal)
    config = config_with(batch=batch, correction=correction)
    assert passes(models_of(config)[0], config) == count


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"high_entropy_share": 0.2}, 3 + 1 + 0.75),
        ({"loss": "m2po"}, 3 + 1),
        ({"kl_in": "reward", "kl_coefficient": 0.1}, 3 + 1),
        ({"kl_in": "reward", "kl_coefficient": 0.1, "high_entropy_share": 0.2}, 3 + 2),
    ],
)
def test_passes_before_the_updates_are_counted(options, count):
    config = config_with(batch=BatchConfig(updates_per_step=4), algo=AlgorithmConfig(**options))
    assert passes(models_of(config)[0], config) == count


def test_the_plan_knows_the_losses_that_choose_their_tokens():
    assert set(SELECTING) == {name for name in LOSSES if find_loss(name, {}).chooses}


# One node is enough with other settings, or it is not.
@pytest.mark.parametrize("gpus,wants_nodes", [(8, False), (4, True)])
def test_nearest_plan_fits_and_has_no_change_too_many(gpus, wants_nodes, tmp_path, capsys):
    folder = model_folder(tmp_path, LLAMA_8B)
    words = [str(ROOT / "configs" / "count_grpo.yaml"), f"model.path={folder}", "model.dtype=bfloat16"]
    words += ["batch.tokens_per_microbatch=65536", "generation.max_new_tokens=4000", f"--gpus-per-node={gpus}"]
    words += ["optimizer.megatron.optimizer_cpu_offload=false"]
    with pytest.raises(SystemExit) as refused:
        main(["plan", *words])
    message = str(refused.value)
    assert message.startswith("megatron-rl plan: does not fit: a trainer GPU needs") and "\n" not in message
    assert "of the 79.6 GiB of a H100" in message and "the largest part is backward pass" in message
    changes = shlex.split(message.partition("Nearest that fits: ")[2])
    assert (changes[0] == "--nodes=2") == wants_nodes
    main(["plan", *words, *changes])
    assert "at the fullest" in capsys.readouterr().out
    for left_out in (change for change in changes if not change.startswith("megatron.")):  # those come together
        with pytest.raises(SystemExit, match="does not fit|does not divide"):
            main(["plan", *words, *(change for change in changes if change != left_out)])


MODELS = ROOT / "tests" / "model_configs"


@pytest.mark.parametrize("given", ["rollout.server_args=[--tp,1]", "parallel.pipeline=1"])
def test_what_would_fit_but_for_the_command_line_is_named_and_fits(given, capsys):
    words = ["plan", str(ROOT / "configs" / "math_llama3_70b_8nodes.yaml"), f"--models={MODELS}", "--nodes=8", given]
    words += ["parallel.tensor=1", "optimizer.distributed=false", "optimizer.overlap=false", "optimizer.megatron={}"]
    with pytest.raises(SystemExit, match="Nothing near it fits with what the command line sets; add what") as refused:
        main(words)
    main([*words, *shlex.split(str(refused.value).partition("overrides it: ")[2])])
    assert "at the fullest" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["megatron.fp8=hybrid"], "megatron.fp8 = 'hybrid': not to be set"),
        (["megatron.bogus=1"], "megatron.bogus = 1: not a field of megatron.core's TransformerConfig; leave it out"),
        (["megatron.recompute_method=null"], "megatron = {.*: megatron.core refuses these .*recompute_method must be"),
        (["megatron.moe_grouped_gemm=true", "lora.rank=8"], "megatron.moe_grouped_gemm = True: needs"),
        (["optimizer.megatron.bogus=1"], "optimizer.megatron.bogus = 1: another option decides this"),
        (["optimizer.megatron.exp_avg_dtype=bfloat16"], "exp_avg_dtype = 'bfloat16': needs use_precision_aware"),
        (["lora.rank=8", "lora.targets=[w_proj]"], "'w_proj' is no projection of llama"),
        (["lora.rank=8", "model.transformer_impl=transformer_engine"], "adapts megatron.core's local layers"),
        (["algo.routing_replay=experts"], "algo.routing_replay = 'experts': llama has no experts; leave it out"),
        (["algo.advantage=gae", f"critic.model={MODELS}/qwen3-4b"], "critic.model = .*a vocabulary of 151936 tokens"),
        (["algo.advantage=gae", "critic.parallel.tensor=3"], "critic.parallel.tensor = 3: does not divide"),
        ([f"reward_model.path={MODELS}/llama-3.1-8b-instruct"], "reward_model.path = .*: has no scalar head"),
        ([f"teacher.path={MODELS}/qwen3-4b", "teacher.kl_in=loss"], "teacher.kl_in = 'loss': .*151936 and the policy"),
        (["generation.max_new_tokens=131072"], "generation.max_new_tokens = 131072: .* set it to 130048"),
        (
            ["batch.allow_longer_sequences=false", "batch.tokens_per_microbatch=4096"],
            "batch.tokens_per_microbatch = 4096: .* may have 16384 tokens, .*; set it to 16384",
        ),
    ],
)
def test_what_a_run_would_refuse_when_it_starts_the_plan_refuses(words, message):
    config = str(ROOT / "configs" / "math_llama3_70b_8nodes.yaml")
    with pytest.raises(SystemExit, match=message):
        main(["plan", config, f"--models={MODELS}", "--nodes=8", "rollout.max_uniform_resamples=0", *words])


def test_servers_that_run_already_are_not_judged_by_their_memory(capsys):
    config = str(ROOT / "configs" / "math_llama3_70b_8nodes.yaml")
    words = ["plan", config, f"--models={MODELS}", "--nodes=8", "rollout.server_args=[]"]
    main([*words, "rollout.servers=[http://a:1]"])
    assert "the servers run already, with more GPUs each" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="does not fit: a server has 0.0 GiB for keys and values"):
        main(words)


def nearest_words(config, given=(), gpus=8):
    words, plan = nearest_plan(config, TOKENS, cluster(gpus), given)
    assert plan.fits
    return words


def test_experts_are_shared_and_the_optimizer_moves_to_the_cpu_before_there_are_more_nodes(tmp_path):
    one_node = large(tmp_path, QWEN_30B_A3B, optimizer=OptimizerConfig(distributed=True))
    words = nearest_words(one_node, ["parallel.pipeline"])
    assert {"parallel.expert=4", *(f"optimizer.megatron.{name}=true" for name in ON_CPU)} <= set(words)
    moved = replace(one_node, optimizer=OptimizerConfig(distributed=True, megatron=ON_CPU))
    for memory in (plan.trainer.by_model["policy"] for plan in plans_of(moved, TOKENS, cluster())):
        assert memory.states["optimizer"] == memory.moments["optimizer step"] == 0 < memory.on_cpu


@pytest.mark.parametrize(
    "first,second,copies", [("float32", "float32", 0), ("bfloat16", "float32", 1), ("bfloat16", "bfloat16", 0)]
)
def test_moments_that_transformer_engine_updates_in_place_are_not_copied(first, second, copies, tmp_path):
    moments = {"use_precision_aware_optimizer": True, "exp_avg_dtype": first, "exp_avg_sq_dtype": second}
    config = large(tmp_path, optimizer=OptimizerConfig(distributed=True, megatron=moments))
    assert float32_copies(models_of(config)[0]) == copies


def test_stages_that_do_not_divide_the_layers_are_tried(tmp_path):
    config = large(tmp_path, LLAMA_8B | {"num_hidden_layers": 31})
    kept = ("parallel.tensor", "optimizer.megatron", "optimizer.distributed")
    words = nearest_words(config, kept)
    assert words[0] == "parallel.pipeline=4"
    assert words[-1] == "megatron.pipeline_model_parallel_layout=Et*7|(t*8|)*2t*8L"


def test_nothing_fits_a_layer_that_is_too_large(tmp_path):
    config = large(tmp_path, LLAMA_8B | {"hidden_size": 2**19, "num_hidden_layers": 1, "head_dim": 128})
    assert nearest_plan(config, TOKENS, cluster(gpus=1)) is None


def test_servers_and_trainer_take_turns_on_one_gpu():
    turns = RolloutConfig(colocated=True, publication="ipc")
    plan = best_plan(config_with(rollout=turns), TOKENS, cluster(gpus=1))
    assert plan.shares_gpus and plan.servers == plan.trainer_gpus == 1 and plan.fits
    split, memory = plan.split, plan.trainer
    assert split.step_s == pytest.approx(split.wait_s + split.update_s + split.publish_s + split.turns_s)
    # All but what is no tensor: the other side's are out.
    assert plan.server.kv_room == pytest.approx(min(0.85 * 79.6, 79.6 - 3) * GIB - plan.server.weights)
    assert memory.reserved == 2 * RESERVED_BYTES
    apart = best_plan(config_with(), TOKENS, cluster(gpus=2)).trainer.by_model["policy"].moments["publication"]
    assert memory.by_model["policy"].beside_weights["publication"] == apart + plan.server.weights


def test_too_few_gpus_for_both_are_refused_with_turns_as_the_way_out():
    config = config_with(rollout=RolloutConfig(max_staleness=2))
    plan = best_plan(config, TOKENS, cluster(gpus=1))
    nearest = nearest_plan(config, TOKENS, cluster(gpus=1))
    assert not plan.fits and nearest[1].fits
    assert refusal(plan, nearest) == (
        "does not fit: 1 GPU for the trainer and 1 for a server are more than the 1 there are. Nearest that fits: "
        "rollout.colocated=true rollout.publication=ipc rollout.max_staleness=0"
    )


# Models of three sizes in layouts, batches and clusters drawn at random: about half of them do not fit at first.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
def test_what_a_plan_recommends_passes_its_own_check_and_the_launchers(seed, tmp_path):
    chance, refused = random.Random(seed), 0
    for number in range(5):
        arch = chance.choice([LLAMA_8B, QWEN_30B_A3B, LLAMA_8B | {"num_hidden_layers": 8, "hidden_size": 2048}])
        words = {
            "model.path": model_folder(tmp_path / str(number), arch),
            "model.dtype": chance.choice(["bfloat16", "float32"]),
            "batch.tokens_per_microbatch": chance.choice([2048, 32768]),
            "generation.max_new_tokens": chance.choice([500, 4000]),
            "parallel.tensor": chance.choice([1, 1, 2, 8]),
            "optimizer.distributed": chance.choice(["true", "false"]),
            "algo.advantage": chance.choice(["group_norm", "gae"]),
            "rollout.max_staleness": chance.choice([0, 4]),
        }
        command = [f"{key}={value}" for key, value in words.items()]
        gpus, nodes = chance.choice([1, 2, 8]), 1
        path = ROOT / "configs" / "count_grpo.yaml"
        config = load_config(path, command)
        try:
            plan = best_plan(config, TOKENS, cluster(gpus))
        except ValueError:  # a layout that divides neither the model nor the GPUs
            continue
        if not plan.fits:
            refused += 1
            nearest = nearest_plan(config, TOKENS, cluster(gpus))
            if nearest is None:
                assert "Nothing near it fits" in refusal(plan, nearest)
                continue
            changes = shlex.split(refusal(plan, nearest).partition("Nearest that fits: ")[2])
            if changes[0].startswith("--nodes="):
                nodes = int(changes.pop(0).partition("=")[2])
            command += changes
            plan = best_plan(load_config(path, command), TOKENS, cluster(gpus, nodes))
        assert plan.fits and plan.trainer.peak <= plan.trainer.available and plan.server.replies >= 1
        assert plan.trainer_gpus + (0 if plan.shares_gpus else plan.servers * plan.server.gpus) <= nodes * gpus
        if nodes == 1:
            recommended = load_config(path, [*command, f"rollout.server_count={plan.servers}"])
            places = arrange(recommended, [str(gpu) for gpu in range(gpus)], plan.trainer_gpus)
            assert len(places.rank_gpus) == plan.trainer_gpus
            assert len(places.server_gpus) == plan.servers * plan.server.gpus
            assert plan.shares_gpus or not set(places.rank_gpus) & set(places.server_gpus)
    assert refused


def test_servers_that_run_already_leave_all_gpus_to_trainers():
    config = config_with(rollout=RolloutConfig(servers=["http://a:1", "http://b:1"]))
    plans = plans_of(config, TOKENS, cluster(gpus=2))
    assert {(plan.servers, plan.trainer_gpus, plan.shares_gpus) for plan in plans} == {(2, 1, False), (2, 2, False)}


@pytest.fixture
def count_words():
    return ["plan", str(ROOT / "configs" / "count_grpo.yaml"), f"model.path={MODEL}", "data.evaluation_args={}"]


def test_text_fits_on_a_screen_and_says_what_is_not_checked(count_words, capsys):
    main([*count_words, "--nodes", "2", "batch.prompts_per_step=16"])  # a key=value may stand behind an option
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 120
    text = "\n".join(lines)
    assert "none is measured" in " ".join(text.split()) and "128: 8 replies a prompt" in text and "2 x 8 H100" in text
    command = shlex.split(text.split("start it\n")[1].split("Assumed")[0].replace("\\\n", ""))
    assert command[:6] == ["sbatch", "--nodes", "2", "--gpus-per-node", "8", "scripts/train_grpo.sh"]
    servers, ranks = int(command[-3].removeprefix("rollout.server_count=")), int(command[-1])
    assert f"trainer            {ranks} GPU" in text and f"servers            {servers}, each on 1 GPU" in text
    assert command[6:-3] == [*count_words[1:], "batch.prompts_per_step=16"] and command[-2] == "--ranks"


@pytest.mark.slow
def test_prompts_are_as_long_as_the_config_lets_them_be_or_as_a_file_says(count_words, tmp_path, capsys):
    def prompts(*words):
        main([*count_words, "--json", *words])
        return json.loads(capsys.readouterr().out)["prompts"]

    room = 64 - 20  # the model's context, and the longest reply
    assert prompts("generation.max_new_tokens=20") == {"shortest": 1, "longest": room, "mean": room / 2, "count": 0}
    assert prompts("generation.max_new_tokens=20", "data.max_prompt_tokens=8")["longest"] == 8
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("9\n12 3\n\n6 1\n")
    assert prompts("--lengths", str(lengths)) == {"shortest": 6, "longest": 12, "mean": 9.0, "count": 3}
    bad = {
        "": "has no line",
        "9 x": "line 1: '9 x': must be the tokens of a prompt",
        "9\n1 2 3": "line 2: '1 2 3': must be",
        "0 3": "each at least 1",
        "9 21": "the reply exceeds generation.max_new_tokens = 20",
        "60": "with a reply of 20 more than the model's context of 64",
    }
    for text, message in bad.items():
        lengths.write_text(text)
        with pytest.raises(SystemExit, match=message):
            prompts("--lengths", str(lengths), "generation.max_new_tokens=20")
    with pytest.raises(SystemExit, match="the prompt exceeds data.max_prompt_tokens = 8"):
        prompts("--lengths", str(lengths), "data.max_prompt_tokens=8")


@pytest.mark.slow
def test_a_plan_reads_config_json_alone(tmp_path, monkeypatch, capsys):
    """No tokenizer, no weights, no data, and no hub."""
    (tmp_path / "qwen3-4b").mkdir()
    shutil.copy(Path(MODEL) / "config.json", tmp_path / "qwen3-4b")
    words = ["plan", str(ROOT / "configs" / "count_grpo.yaml"), "data.train=hf:nobody/nothing", "data.train_args={}"]
    main([*words, f"model.path={tmp_path}/qwen3-4b"])
    main([*words, f"model.path={tmp_path}/qwen3-4b/config.json"])
    main([*words, "model.path=Qwen/Qwen3-4B", "--models", str(tmp_path)])
    text = capsys.readouterr().out
    assert "at the fullest" in text and "first of all" not in text
    config = json.loads((tmp_path / "qwen3-4b" / "config.json").read_text())
    (tmp_path / "qwen3-4b" / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    main([*words, f"model.path={tmp_path}/qwen3-4b"])
    assert re.search("first of all .*quantized weights; write the model in bfloat16", capsys.readouterr().out)
    for models, nor in (([], ""), (["--models", str(tmp_path)], f", nor in {tmp_path}/qwen3-8b")):
        with pytest.raises(SystemExit) as error:
            main([*words, "model.path=Qwen/Qwen3-8B", *models])
        assert f"model.path = 'Qwen/Qwen3-8B': no config.json there{nor};" in str(error.value)
        assert "hf download Qwen/Qwen3-8B config.json --local-dir FOLDER/qwen3-8b" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    ["batch.tokens_per_microbatch=65536", "megatron.recompute_granularity=selective", "optimizer.distributed=false"],
)
def test_nothing_that_the_command_line_gave_is_changed(given, tmp_path):
    folder = model_folder(tmp_path, QWEN_30B_A3B)
    words = [str(ROOT / "configs" / "count_grpo.yaml"), f"model.path={folder}", "model.dtype=bfloat16"]
    words += ["generation.max_new_tokens=4000", "parallel.tensor=2", "--nodes=4", given]
    with pytest.raises(SystemExit) as refused:
        main(["plan", *words])
    changes = shlex.split(str(refused.value).partition("Nearest that fits: ")[2])
    assert changes and not {it.partition("=")[0] for it in changes} & {it.partition("=")[0] for it in words}
    main(["plan", *words, *changes])


@pytest.mark.slow
@pytest.mark.parametrize("nodes, gpus, server_args", [(2, 8, "[]"), (3, 4, "[--tp,2]"), (1, 4, "[]"), (2, 2, "[]")])
def test_a_slurm_job_places_what_the_plan_asks_for(nodes, gpus, server_args, count_words, capsys):
    settings = (f"rollout.server_args={server_args}", "batch.prompts_per_step=256")
    main([*count_words, f"--nodes={nodes}", f"--gpus-per-node={gpus}", *settings, "--json"])
    plan = json.loads(capsys.readouterr().out)
    args = slurm.parser().parse_intermixed_args(plan["command"][6:])
    config = load_config(args.config, args.overrides)
    own = Nodes(hosts=[f"n{number}" for number in range(nodes)], cpus=8, gpus=gpus)
    rollout = config.rollout
    placement = place(own, own, servers=rollout.server_count, ranks=args.ranks, gpus_per_server=rollout.gpus_per_server)
    taken = [(host, gpu) for server in placement.servers for host in server.hosts for gpu in server.gpus]
    assert len(set(taken)) == plan["servers"]["count"] * plan["servers"]["gpus_each"]
    assert sum(placement.ranks.values()) == plan["trainer"]["gpus"]
    for host, ranks in placement.ranks.items():
        assert ranks + sum(other == host for other, _ in taken) <= gpus


def test_few_gpus_are_shared_on_one_host_and_on_several(count_words, capsys):
    turns = ("rollout.colocated=true", "rollout.publication=ipc")
    main([*count_words, "--gpus-per-node=1", *turns])
    assert ".venv/bin/megatron-rl launch --ranks 1 " in capsys.readouterr().out
    main([*count_words, "--nodes=2", "--gpus-per-node=1", "parallel.tensor=2", *turns])
    told = capsys.readouterr().out
    assert "sbatch --nodes 2 --gpus-per-node 1 " in told and "rollout.server_count=2 --ranks 2" in told
    for words, message in (
        (["rollout.server_count=3"], "rollout.server_count = 3: .* each of 2 nodes of 4 GPUs starts as many"),
        (["rollout.server_args=[--tp,8]"], "rollout.server_count = 2: .*, so none is on several"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([*count_words, "--nodes=2", "--gpus-per-node=4", *words, *turns])


def test_json_has_the_same_plan(count_words, capsys):
    main([*count_words, "--json", "--device", "h200", "parallel.tensor=2"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["batch"]["trajectories"] == 256 and plan["cluster"]["device"]["name"].startswith("H200")
    traffic = plan["traffic"]
    assert [part["axis"] for part in traffic["update"]["policy"]][0] == "tensor"
    assert [part["axis"] for part in traffic["publication"]] == ["tensor"]
    assert traffic["update"]["policy"][0]["seconds"] == pytest.approx(
        traffic["update"]["policy"][0]["nbytes"] / (DEVICES["h200"].node_link * devices.LINK_SHARE)
    )
    assert plan["time"]["tokens_per_s_of_gpu"] > 0 < plan["time"]["mfu"] < 1 and plan["time"]["bound"]
    assert sum(plan["trainer"]["bytes"].values()) == pytest.approx(plan["trainer"]["peak_bytes"])
    assert plan["trainer"]["gpus"] + plan["servers"]["count"] * plan["servers"]["gpus_each"] == 8


@pytest.mark.parametrize(
    "words,message",
    [
        (["parallel.tensor=3"], "parallel.tensor = 3: does not divide evenly"),
        (["parallel.tensor=4", "--gpus-per-node", "2"], "does not divide the world size 2"),
        (["rollout.server_args=[--tp,12]"], "must be on one node, or on whole nodes of 8 GPUs; take 8"),
        (["optimiser.lr=1"], "did you mean optimizer"),
        (["generation.max_new_tokens=1000"], "more than the model's context of 64"),
        (["megatron={num_layers_in_first_pipeline_stage: 1}"], "cuts a pipeline, and no model has one"),
        (
            ["rollout.server_args=[--tp,4,--enable-dp-attention,--dp,3]"],
            "--dp-size 3: DP attention shares out the --tp 4 ranks",
        ),
    ],
)
def test_bad_input_is_one_line(words, message, count_words):
    with pytest.raises(SystemExit) as error:
        main([*count_words, *words])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "setting"), [("count_dpo", "preference.loss = 'dpo'"), ("count_sft", "supervised.answer = 'answer'")]
)
def test_training_on_data_is_refused_with_an_rl_run_that_can_be_planned(config, setting, capsys):
    words = ["plan", str(ROOT / "configs" / f"{config}.yaml"), f"model.path={MODEL}"]
    with pytest.raises(SystemExit, match=f"plan: {setting}: plans and rehearsals are of RL runs") as refused:
        main(words)
    main([*words, *str(refused.value).partition("; add ")[2].partition(" for ")[0].split()])
    assert "of up to 63 tokens" in (text := capsys.readouterr().out) and "at the fullest" in text


def test_a_server_count_on_the_command_line_is_never_changed(count_words, capsys):
    words = [*count_words, "--nodes=2", "batch.prompts_per_step=16", "--json"]
    main([*words, "rollout.server_count=3"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["servers"]["count"] == 3 and "rollout.server_count=3" in plan["command"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "rollout.server_count=16"])
    assert "rollout.server_count = 16: of 16 GPUs the trainer leaves room for 15 servers of 1" in str(ended.value)
