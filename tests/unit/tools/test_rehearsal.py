"""`megatron-rl rehearse` on a tiny model: what it finds by itself, and the faults that it names.

Of faults of one kind `make test` keeps those that the rehearsal finds in ways of its own.
"""

import copy
import functools
import importlib.util
import json
from dataclasses import fields, replace
from html import escape, unescape
from pathlib import Path

import pytest
import torch

from megatron_rl import cli
from megatron_rl.batch import exchange
from megatron_rl.config import load_config
from megatron_rl.config.algorithm_section import ESTIMATORS
from megatron_rl.parallel import Axis, ParallelGroups
from megatron_rl.tools.plan.devices import DEVICES, RESERVED_BYTES
from megatron_rl.tools.rehearsal.device_ledger import Ledger
from megatron_rl.tools.rehearsal.device_memory import kept_by
from megatron_rl.tools.rehearsal.matching import differences
from megatron_rl.tools.rehearsal.rehearsal import Rehearsal, RehearsalError, World, check
from megatron_rl.tools.rehearsal.rehearsal_page import page_of
from megatron_rl.tools.rehearsal.rehearsal_text import as_dict, as_text
from megatron_rl.tools.rehearsal.rehearsed_rank import config_of
from tests.kit.examples import IS_THOROUGH
from tests.kit.rehearsals import HAS_FLA, ONE_DELTA_NET, order_of, write_tiny

ROOT = Path(__file__).resolve().parents[3]
TINY = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_act="silu",
    head_dim=16,
    hidden_size=64,
    intermediate_size=128,
    max_position_embeddings=4096,
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
    vocab_size=512,
)
CONFIG = "configs/gsm8k_qwen3_4b.yaml"
SMALL = ("batch.tokens_per_microbatch=1024", "generation.max_new_tokens=128", "data.max_prompt_tokens=64")
SOUND, CUDNN = "sound", "attention by cuDNN"
STAGES = ("parallel.pipeline=2",)  # beside the config's two tensor ranks: 0 and 4 are the first of both stages
FAILS = {
    "a_mask_left_on_the_host": "at least two devices",
    "a_mask_on_another_gpu": "at least two devices",
    "positions_left_on_the_host": "at least two devices",
}
WAITS = {
    "a_number_read_in_the_loss": "a number read",
    "a_branch_on_a_tensor": "a number read",
    "rows_chosen_by_a_mask": "an index by a mask",
    "places_looked_up_on_the_device": "nonzero",
    "the_device_waited_for": "the device waited for",
    "logprobs_copied_to_the_host": "a blocking copy to host",
    "a_column_copied_from_pageable_memory": "a blocking copy to device",
}
MEMORY = {
    "logits_in_float32": "engine/microbatch_engine.py",
    "activations_kept_from_one_microbatch_to_the_next": "transformer/transformer_layer.py",
    "weights_kept_twice": "algo/actor.py",
}
APART = {
    "a_collective_missing_on_one_stage": "barrier",
    "another_shape_between_stages": "message 1 from rank",
    "another_dtype_on_one_rank": "bfloat16",
    "two_collectives_in_another_order": "broadcast",
    "a_gather_in_the_wrong_group": "allgather",
    "a_broadcast_from_another_rank": "broadcast",
    "a_microbatch_more_on_one_stage": "nothing",
}
TOLD_APART = (
    "a_collective_missing_on_one_stage",  # by the number of calls
    "another_shape_between_stages",  # of messages, by their size
    "a_broadcast_from_another_rank",
)

pytestmark = pytest.mark.slow


def case_of(name, *kept):
    """A parameter of `make test` if it is one of these, else of `make test-all`."""
    return pytest.param(name, marks=() if name in kept else pytest.mark.thorough)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="module")
def rehearsed(model, rehearsals, tmp_path_factory):
    """Rehearse a case, once: by rank what it found, or the text of the fault that ended it."""
    folder = tmp_path_factory.mktemp("cases")
    faults, ranks = {SOUND: [], CUDNN: [], "waits": list(WAITS), "memory": list(MEMORY)}, {SOUND: [7, 4, 0]}
    faults |= {"memory": [*MEMORY, "collectives_that_nobody_waits_for"]}
    ranks |= dict.fromkeys(APART, [4, 0]) | {"a_collective_missing_on_one_stage": [4]}  # rank 0 is sound there

    @functools.cache
    def rehearse(case):
        hears = None
        if case != SOUND:
            rehearse(SOUND)
            hears = folder / SOUND
        attention = f"model.flash_attention={'TE' if case == CUDNN else 'torch'}"
        words = [f"model.path={model}", *SMALL, *STAGES, attention]
        orders = [order_of(CONFIG, 8, words, rank=rank) for rank in ranks.get(case, [7])]
        return rehearsals.of(folder / case, orders, faults=faults.get(case, [case]), hears=hears)

    return rehearse


def syncs(found):
    return found["phases"]["update"]["syncs"]


def test_a_sound_job_has_no_fault_and_no_sync_of_its_own_in_a_microbatch(rehearsed):
    found = rehearsed(SOUND)
    assert all(isinstance(part, dict) for part in found.values()), found
    assert differences(found) == []
    for rank, part in found.items():
        own = {what: count for what, count in syncs(part).items() if "megatron_rl/" in what}
        assert sum(own.values()) <= 3, (rank, own)
        assert all(count == 1 for count in own.values()), (rank, own)
        assert part["unordered"] == {}, rank


def test_a_bucket_that_is_used_before_its_collective_was_waited_for_is_named_with_both_lines(rehearsed):
    texts = " ".join(rehearsed("memory")[7]["unordered"])
    for kind in ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"):
        assert f"by {kind} at megatron/core/distributed/param_and_grad_buffer.py:" in texts, texts
    assert "on the default stream, in no order with the write by" in texts
    result = Rehearsal(None, World(1, 8, 8, 2), DEVICES["h100"], {7: rehearsed("memory")[7]})
    for report in (as_text(result), page_of(as_dict(result), title="")):
        assert "uses of memory in no order between streams" in report
        assert any(text in unescape(report) for text in rehearsed("memory")[7]["unordered"])


@pytest.mark.parametrize("case", [case_of(name, "a_mask_left_on_the_host") for name in FAILS])
def test_a_tensor_in_the_wrong_place_ends_the_rehearsal_with_its_line(case, rehearsed):
    text = rehearsed(case)[7]
    assert isinstance(text, str) and FAILS[case] in text.lower(), text
    assert "megatron" in text.partition(":")[0]


@pytest.mark.parametrize("case", WAITS)
def test_a_place_where_the_host_waits_is_listed_with_its_line(case, rehearsed):
    usual, found = syncs(rehearsed(SOUND)[7]), syncs(rehearsed("waits")[7])
    more = {what: count for what, count in found.items() if count > usual.get(what, 0)}
    assert any(WAITS[case] in what.partition(" at ")[0] for what in more), more
    assert all(" at megatron" in what for what in more)


@pytest.mark.parametrize("case", MEMORY)
def test_memory_that_is_kept_stands_at_the_peak_with_its_line(case, rehearsed):
    usual, found = rehearsed(SOUND)[7], rehearsed("memory")[7]
    assert found["peak_bytes"] > usual["peak_bytes"] + 150_000
    more = {line: nbytes - usual["peak_by_line"].get(line, 0) for line, nbytes in found["peak_by_line"].items()}
    assert any(MEMORY[case] in line and nbytes > 50_000 for line, nbytes in more.items()), more


def test_memory_is_of_the_parts_that_it_serves(rehearsed):
    for rank, part in rehearsed(SOUND).items():
        # Of a stage with one of two layers on one of two tensor ranks; both ends have 256 of 512 columns.
        layer = (4 + 2 * 2) * 16 * 64 // 2 + 64 * 64 // 2 + 3 * 64 * 128 // 2 + 2 * 64 + 2 * 16
        count = layer + 512 * 64 // 2 + (64 if rank >= 4 else 0)
        by_part = part["peak_by_part"]
        assert by_part["weights"] == pytest.approx(2 * count, rel=0.05)
        assert by_part["gradients"] == pytest.approx(4 * count, rel=0.05)
        assert by_part["optimizer"] == pytest.approx(12 * count / 2, rel=0.05)
        assert sum(by_part.values()) == part["peak_bytes"]
        assert part["extra_bytes"] == by_part["head"] + by_part["exchange"] + by_part["other"]
        assert (by_part["head"] > 0) == (rank >= 4), "the second stage alone has logits"
        points = part["timeline"]["points"]
        assert max(sum(point[2:]) for point in points) == part["peak_bytes"] and len(points) <= 2000
        assert [point[0] for point in points] == sorted(point[0] for point in points)
    usual, found = (rehearsed(case)[7]["peak_by_part"] for case in (SOUND, "memory"))
    assert found["activations"] < 1.1 * usual["activations"], "what only the code keeps, autograd does not"
    assert found["other"] > usual["other"] + 150_000


def test_attention_by_cudnn_keeps_what_flash_attention_keeps_and_launches_more(rehearsed):
    usual, found = rehearsed(SOUND)[7], rehearsed(CUDNN)[7]
    assert isinstance(found, dict), found
    before, after = usual["phases"]["update"], found["phases"]["update"]
    assert after["flops"] == before["flops"] and after["syncs"] == before["syncs"]
    # Five launches and seven of a layer, for one each way and two zeros for what has no gradient.
    assert after["kernels"] - before["kernels"] == (5 + 7 - 4) * after["microbatches"]
    # A number for each row and each of two heads, as if there were 1,024 rows: some 800 in two microbatches under way.
    more = found["peak_by_part"]["activations"] - usual["peak_by_part"]["activations"]
    assert 0 < more < 2 * 4 * 2 * 300 and more % 512 == 0


def test_what_needs_a_package_that_is_not_here_is_replaced_and_a_line_says_so(model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = [f"model.path={model}", "model.delta_kernel=fla", "megatron.moe_token_dispatcher_type=flex"]
    order, ledger = order_of(CONFIG, 8, words), Ledger()
    config = config_of(order, ledger)
    assert config.model.delta_kernel == "torch" and config.megatron["moe_token_dispatcher_type"] == "alltoall"
    assert len(ledger.assumed) == 2 and all(line.endswith(" is not installed") for line in ledger.assumed)


@pytest.mark.skipif(not HAS_FLA, reason="the package fla is not installed")
def test_kernels_of_delta_nets_are_launched_by_their_packages_own_code(rehearsals, tmp_path):
    """It makes their results, so that memory is as on a GPU; plain torch launches a dozen of kernels for each chunk."""
    write_tiny(tmp_path, "qwen3_next", **ONE_DELTA_NET)
    words = [f"model.path={tmp_path}", *SMALL, "parallel.tensor=2"]
    orders = [order_of(CONFIG, 2, [*words, f"model.delta_kernel={kernel}"], rank=1) for kernel in ("fla", "torch")]
    fla, torch = (rehearsals.of(tmp_path / str(n), [order])[1] for n, order in enumerate(orders))
    assert isinstance(fla, dict) and isinstance(torch, dict), (fla, torch)
    assert fla["phases"]["update"]["kernels"] < torch["phases"]["update"]["kernels"]
    assert any("engine/delta_kernels.py" in line for line in fla["peak_by_line"])
    assert fla["phases"]["update"]["syncs"].keys() <= torch["phases"]["update"]["syncs"].keys()


def test_what_autograd_keeps_is_found_in_the_graph():
    weight = torch.ones(3, requires_grad=True)
    kept, passed = torch.full((3,), 2.0), torch.full((3,), 4.0)
    root = (weight * kept + passed).exp().sum()
    addresses = {tensor.data_ptr() for tensor in kept_by([root])}
    assert kept.data_ptr() in addresses and weight.data_ptr() not in addresses and passed.data_ptr() not in addresses
    assert len(addresses) == 2, "the factor, and the result of exp"


@pytest.mark.parametrize("case", [case_of(name, *TOLD_APART) for name in APART])
def test_ranks_that_would_wait_for_each_other_are_named_with_both_lines(case, rehearsed):
    found = {0: rehearsed(SOUND)[0]} | rehearsed(case)
    if all(isinstance(part, dict) for part in found.values()):
        faults = differences(found)
        assert faults, case
        assert APART[case] in " ".join(faults), faults
        assert "rank 0" in " ".join(faults) and " at megatron" in " ".join(faults)
    else:  # what does not fit ends a rank by itself
        assert case in ("another_shape_between_stages", "a_microbatch_more_on_one_stage"), found
        text = " ".join(part for part in found.values() if isinstance(part, str))
        assert " at megatron" in text and ("shape" in text or "size" in text), text


@pytest.mark.parametrize(
    ("field", "other"), [("kind", "barrier"), ("dtype", "int8"), ("sizes", [1, 2, 3]), ("peer", 7), ("on_device", None)]
)
def test_a_call_that_differs_in_one_thing_is_told_with_both(field, other, rehearsed):
    found = copy.deepcopy({rank: rehearsed(SOUND)[rank] for rank in (0, 4)})
    calls = [call for call in found[0]["collectives"] if {0, 4} <= set(found[0]["groups"][call["group"]][1])]
    call = next(call for call in calls if call["kind"] not in ("send", "recv"))
    assert {"bfloat16", "float32"} <= {call["dtype"] for call in found[0]["collectives"]}
    call[field] = other
    (fault,) = differences(found)
    assert fault.count(call["line"]) and "on rank 0 and " in fault and fault.endswith("on rank 4.")


def test_a_config_in_float32_is_rehearsed(rehearsals, tmp_path):
    """As docs/cluster.md does, on the device whose dense attention torch chooses by itself."""
    (found,) = rehearsals.of(tmp_path, [order_of("configs/count_grpo.yaml", 16, (), rank=15)]).values()
    assert isinstance(found, dict) and found["phases"]["update"]["flops"]["aten::bmm"] > 0, found


def test_a_rope_with_an_attention_factor_is_rehearsed(rehearsals, tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY | {"rope_scaling": yarn}))
    words = [f"model.path={tmp_path}/model", *SMALL]
    (found,) = rehearsals.of(tmp_path / "found", [order_of(CONFIG, 2, words, rank=1)]).values()
    assert isinstance(found, dict) and found["kernels_of_layers"]["transformer_engine"] > 0, found


@pytest.mark.parametrize("layout", ["critic.parallel.tensor=2", "parallel.tensor=2"])
def test_a_critic_that_warms_up_is_rehearsed_in_a_layout_of_its_own(layout, rehearsals, tmp_path):
    (found,) = rehearsals.of(tmp_path, [order_of("configs/count_ppo_critic.yaml", 2, [layout], rank=1)]).values()
    assert isinstance(found, dict), found
    assert all(sum(found["phases"][name]["flops"].values()) > 0 for name in ("values", "update", "critic")), found


def test_a_teacher_that_reads_the_policys_tokens_is_rehearsed(model, rehearsals, tmp_path):
    taught = [f"teacher.path={model}", "teacher.kl_in=advantage", "rollout.max_uniform_resamples=0"]
    order = order_of(CONFIG, 2, [f"model.path={model}", *SMALL, *taught], rank=1)
    (found,) = rehearsals.of(tmp_path, [order]).values()
    assert isinstance(found, dict) and sum(found["phases"]["teacher"]["flops"].values()) > 0, found


def test_the_command_says_what_each_rank_takes_and_writes_it_down(model, rehearsals, tmp_path, capsys, monkeypatch):
    if not IS_THOROUGH:  # the command's own process imports all anew
        rehearsals.take_over(monkeypatch)
    words = ["rehearse", CONFIG, f"model.path={model}", *SMALL, *STAGES, "--folder", str(tmp_path / "found")]
    cli.main([*words, "--nodes", "1", "--ranks", "first"])
    text = capsys.readouterr().out
    assert "rank 0" in text and "rank 3" in text and "GiB at most" in text and "host syncs by line" in text
    written = json.loads((tmp_path / "found" / "rehearsal.json").read_text())
    assert set(written["ranks"]) == {"0", "3"} and written["trainer_ranks"] == 4
    page, found = (tmp_path / "found" / "rehearsal.html").read_text(), written["ranks"]["0"]
    assert page.count("<svg") == 4 * 2 and found["peak_line"] in page and "://" not in page
    for part, nbytes in found["peak_by_part"].items():
        assert f"{part} {nbytes / 2**30:.2f}" in page and (f"{part} {nbytes / 2**30:.2f}" in text or not nbytes)
    assert all(escape(what) in page for what in found["phases"]["update"]["syncs"])
    rows = [row for row in written["ranks"]["0"]["traffic"] if row["kind"] == "send"]
    assert rows and rows[0]["link"] == "in a node" and rows[0]["bytes"] > 0


def test_a_plan_is_rehearsed_with_the_servers_and_ranks_that_it_chose(model, rehearsals, tmp_path, capsys, monkeypatch):
    rehearsals.take_over(monkeypatch)
    words = [CONFIG, f"model.path={model}", *SMALL, *STAGES, "--nodes", "1", "--folder", str(tmp_path / "found")]
    (tmp_path / "lengths").write_text("60 120\n7 9\n")
    cli.main(["plan", *words, "--lengths", str(tmp_path / "lengths"), "--rehearse", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["rehearsal"] == json.loads((tmp_path / "found" / "rehearsal.json").read_text())
    assert plan["prompts"]["mean"] == 33.5 and f"rollout.server_count={plan['servers']['count']}" in plan["command"]
    assert plan["rehearsal"]["trainer_ranks"] == plan["trainer"]["gpus"]
    assert set(plan["rehearsal"]["ranks"]) == {"0", str(plan["trainer"]["gpus"] - 1)}


def test_ranks_agree_on_the_number_of_microbatches_without_hearing_each_other(monkeypatch):
    from megatron_rl.tools.rehearsal.step import count_for_all_replicas, made_batch, rehearsed_batch

    config = load_config(ROOT / CONFIG, ["batch.tokens_per_microbatch=4096", "generation.max_new_tokens=2500"])
    batch, replicas = made_batch(config, 4, 512), range(4)
    alone = dict.fromkeys(field.name for field in fields(ParallelGroups))
    groups = [ParallelGroups(**alone | {"data": Axis(None, 4, rank)}) for rank in replicas]

    def counts():
        steps = [rehearsed_batch(batch, groups[rank], share_prompts=True) for rank in replicas]
        shares = [share for step in steps for share in (step.own(), *step.shares())]
        options = {"allow_longer": True, "share_prompts": True, "final_rows": True}
        return [exchange.least_alone(share, 4096, 1, **options) for share in shares]

    apart = counts()
    assert min(apart) < max(apart)
    monkeypatch.setattr(exchange, "least_alone", exchange.least_alone)  # which is put back afterwards
    count_for_all_replicas()
    assert counts() == [max(apart)] * 8


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("gae", "none")])
def test_a_made_batch_has_what_every_estimator_needs(name):
    """But for values of a critic, which the rehearsal computes."""
    from megatron_rl.algo.catalogue import find_estimator
    from megatron_rl.tools.rehearsal.step import made_batch, rehearsed_batch

    words = ["rollout.max_uniform_resamples=0", "batch.tokens_per_microbatch=512", *SMALL[1:], f"algo.advantage={name}"]
    config = load_config(ROOT / CONFIG, words)
    alone = dict.fromkeys(field.name for field in fields(ParallelGroups)) | {"data": Axis(None, 1, 0)}
    batch = rehearsed_batch(made_batch(config, 1, 512), ParallelGroups(**alone), share_prompts=True)
    scores = {"scores": batch["rewards"].double()}
    batch.sequences |= scores | ({"greedy_score": batch["greedy_reward"].double()} if name == "remax" else {})
    zeros = torch.zeros(len(batch.tokens["loss_mask"]))
    batch.tokens |= {"token_rewards": zeros.double(), "proximal_logprobs": zeros, "cold_logprobs": zeros}
    found = find_estimator(name, config.advantage_args).function(batch, **config.advantage_args)
    assert len(found) in (len(batch.sequences["rewards"]), len(batch.tokens["loss_mask"])) and found.isfinite().all()


def test_the_distinct_ranks_are_the_first_and_last_of_every_stage():
    world = World(nodes=2, gpus_per_node=8, ranks=12, stages=3)
    assert world.chosen("all-distinct") == [11, 8, 7, 4, 3, 0]
    assert world.chosen("stage-boundaries") == [11, 8, 4, 0]
    assert world.chosen("5,first") == [11, 5, 0]


def test_a_batch_has_the_lengths_of_a_file():
    from megatron_rl.tools.rehearsal.step import made_batch

    config = load_config(ROOT / CONFIG, ["generation.max_new_tokens=50", "batch.tokens_per_microbatch=4096"])
    lengths = [(10, 20), (300, 40), (7, 0)]
    batch = made_batch(config, 2, 512, lengths)
    prompts, replies = set(), set()
    for first, end, group in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.sequences["group"], strict=False):
        is_reply = batch.tokens["loss_mask"][first:end]
        prompts.add((int(group), int((~is_reply).sum())))
        replies.add(int(is_reply.sum()))
    assert {prompt for _, prompt in prompts} == {10, 300, 7} and len(prompts) == int(group) + 1, "a prompt for a group"
    assert {20, 40} < replies <= {20, 40, *range(12, 51)}
    assert int(batch.cu_seqlens[-1]) >= 0.9 * 2 * 2 * 4096


@pytest.mark.parametrize(
    "words, named",
    [
        (["--ranks", "some"], "--ranks some"),
        (["rollout.server_count=8"], "take all of the 8 GPUs"),
        (["parallel.tensor=3"], "3"),
        (["model.path=nowhere"], "no config.json there"),
        (["--lengths", "nowhere"], "--lengths nowhere: cannot be read"),
    ],
)
def test_a_job_that_cannot_be_rehearsed_is_refused_before_anything_runs(words, named, model, tmp_path):
    with pytest.raises(SystemExit, match=named):
        cli.main(["rehearse", CONFIG, f"model.path={model}", *words, "--folder", str(tmp_path / "found")])
    assert not (tmp_path / "found").exists()


def test_a_job_without_room_is_refused_with_rank_phase_and_line(rehearsed):
    device = replace(DEVICES["h100"], memory=RESERVED_BYTES + 1e6)
    with pytest.raises(RehearsalError) as refused:
        check(Rehearsal(None, None, device, rehearsed(SOUND)))
    text = str(refused.value)
    assert "needs 0.0 GiB" in text and "in update, at megatron" in text and "recompute" in text
