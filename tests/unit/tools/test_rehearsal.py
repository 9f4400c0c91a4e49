"""`megatron-rl rehearse` on a tiny model: what it finds by itself, and the faults that it names."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.tools.plan.devices import DEVICES, RESERVED_BYTES
from megatron_rl.tools.rehearsal.matching import differences
from megatron_rl.tools.rehearsal.rehearsal import Rehearsal, RehearsalError, check
from tests.unit.tools.rehearse_cases import rehearsed

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
    "logits_in_float32": "engine/megatron_engine.py",
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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / "megatron_rl" / "_C_rehearsal.so").exists(), reason="a torch with CUDA has no place for the shim"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="module")
def cases(model, tmp_path_factory):
    """By case and rank: what it found, or the text of the fault that ended it."""
    folder = tmp_path_factory.mktemp("cases")
    order = {"world_size": 8, "gpus_per_node": 8, "memory_bytes": 80 << 30, "config": str(ROOT / CONFIG)}
    order["overrides"] = [f"model.path={model}", *SMALL, *STAGES]
    faults = {"sound": [], "waits": list(WAITS), "memory": list(MEMORY)} | {name: [name] for name in [*FAILS, *APART]}
    ranks = {name: [7, 4, 0] if name == "sound" else [4, 0] if name in APART else [7] for name in faults}
    return rehearsed(
        folder,
        {
            case: {"faults": names, "orders": [order | {"rank": rank} for rank in ranks[case]]}
            | ({} if case == "sound" else {"hears": "sound"})
            for case, names in faults.items()
        },
    )


def syncs(found):
    return found["phases"]["update"]["syncs"]


def test_a_sound_job_has_no_fault_and_no_sync_of_its_own_in_a_microbatch(cases):
    found = cases["sound"]
    assert all(isinstance(part, dict) for part in found.values()), found
    assert differences(found) == []
    for rank, part in found.items():
        own = {what: count for what, count in syncs(part).items() if "megatron_rl/" in what}
        assert sum(own.values()) <= 3, (rank, own)
        assert all(count == 1 for count in own.values()), (rank, own)


@pytest.mark.parametrize("case", FAILS)
def test_a_tensor_in_the_wrong_place_ends_the_rehearsal_with_its_line(case, cases):
    text = cases[case][7]
    assert isinstance(text, str) and FAILS[case] in text.lower(), text
    assert "megatron" in text.partition(":")[0]


@pytest.mark.parametrize("case", WAITS)
def test_a_place_where_the_host_waits_is_listed_with_its_line(case, cases):
    usual, found = syncs(cases["sound"][7]), syncs(cases["waits"][7])
    more = {what: count for what, count in found.items() if count > usual.get(what, 0)}
    assert any(WAITS[case] in what.partition(" at ")[0] for what in more), more
    assert all(" at megatron" in what for what in more)


@pytest.mark.parametrize("case", MEMORY)
def test_memory_that_is_kept_stands_at_the_peak_with_its_line(case, cases):
    usual, found = cases["sound"][7], cases["memory"][7]
    assert found["peak_bytes"] > usual["peak_bytes"] + 150_000
    more = {line: nbytes - usual["peak_by_line"].get(line, 0) for line, nbytes in found["peak_by_line"].items()}
    assert any(MEMORY[case] in line and nbytes > 50_000 for line, nbytes in more.items()), more


@pytest.mark.parametrize("case", APART)
def test_ranks_that_would_wait_for_each_other_are_named_with_both_lines(case, cases):
    found = cases[case]
    if all(isinstance(part, dict) for part in found.values()):
        faults = differences(found)
        assert faults, case
        assert APART[case] in " ".join(faults), faults
        assert "rank 0" in " ".join(faults) and " at megatron" in " ".join(faults)
    else:  # what does not fit ends a rank by itself
        assert case in ("another_shape_between_stages", "a_microbatch_more_on_one_stage"), found
        text = " ".join(part for part in found.values() if isinstance(part, str))
        assert " at megatron" in text and ("shape" in text or "size" in text), text


def test_the_command_says_what_each_rank_takes_and_writes_it_down(model, tmp_path, capsys):
    words = ["rehearse", CONFIG, f"model.path={model}", *SMALL, *STAGES, "--folder", str(tmp_path / "found")]
    cli.main([*words, "--nodes", "1", "--ranks", "first"])
    text = capsys.readouterr().out
    assert "rank 0" in text and "rank 3" in text and "GiB at most" in text and "host syncs by line" in text
    written = json.loads((tmp_path / "found" / "rehearsal.json").read_text())
    assert set(written["ranks"]) == {"0", "3"} and written["trainer_ranks"] == 4
    rows = [row for row in written["ranks"]["0"]["traffic"] if row["kind"] == "send"]
    assert rows and rows[0]["link"] == "in a node" and rows[0]["bytes"] > 0


@pytest.mark.parametrize(
    "words, named",
    [
        (["--ranks", "some"], "--ranks some"),
        (["rollout.server_count=8"], "take all of the 8 GPUs"),
        (["parallel.tensor=3"], "3"),
        (["model.path=nowhere"], "no config.json there"),
    ],
)
def test_a_job_that_cannot_be_rehearsed_is_refused_before_anything_runs(words, named, model, tmp_path):
    with pytest.raises(SystemExit, match=named):
        cli.main(["rehearse", CONFIG, f"model.path={model}", *words, "--folder", str(tmp_path / "found")])
    assert not (tmp_path / "found").exists()


def test_a_job_without_room_is_refused_with_rank_phase_and_line(cases):
    device = replace(DEVICES["h100"], memory=RESERVED_BYTES + 1e6)
    with pytest.raises(RehearsalError) as refused:
        check(Rehearsal(None, None, device, cases["sound"]))
    text = str(refused.value)
    assert "needs 0.0 GiB" in text and "in update, at megatron" in text and "recompute" in text
