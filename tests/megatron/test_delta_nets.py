"""Delta nets in the engine: their state is a sequence's own, is forked by a group's replies, and is cut by heads."""

import json

import pytest
from ranks import run_each, run_ranks
from test_checkpoint import follow
from test_gradients import assert_same_updates, two_updates
from test_models import hf_gradients
from tiny import LAYOUTS, make_batch, make_groups, make_model

from megatron_rl.config import ParallelConfig
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import check_layout


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {family: tmp_path_factory.mktemp(family) for family in ("qwen3_5", "qwen3_next")}
    for family, folder in folders.items():
        make_model(family, folder)
    return folders


def of_groups(folders, layout, options):
    return {family: (folder, layout, make_groups(), "logprobs", 64, options) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def separate_prompts(folders):
    return run_each(1, two_updates, of_groups(folders, "1", {"share_prompts": False}))


@pytest.mark.parametrize("layout", ["1", "tp2_sp", pytest.param("tp2_pp2", marks=pytest.mark.slow)])
def test_replies_that_fork_the_state_of_their_prompt_give_the_same_update(layout, folders, separate_prompts):
    for family, ranks in run_each(LAYOUTS[layout][0], two_updates, of_groups(folders, layout, {})).items():
        assert_same_updates(ranks[0], separate_prompts[family][0])


def test_gradient_equals_float64_autograd(folders):
    batch = make_batch()
    for family, ranks in run_each(1, two_updates, {f: (p, "1", batch, "logits") for f, p in folders.items()}).items():
        hf_gradients(folders[family], batch, ranks[0][0][0])


def test_heads_are_divided_without_sequence_parallelism_too(folders, separate_prompts):
    ranks = run_ranks(2, two_updates, *of_groups(folders, "tp2", {})["qwen3_5"])
    assert_same_updates(ranks[0], separate_prompts["qwen3_5"][0])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "olmo", "gpt_oss"])
def test_parameters_that_ranks_have_a_part_of_continue_in_any_layout(family, tmp_path):
    follow(family, ["tp2_sp", "1", "tp2_pp2"], tmp_path)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types has .*sliding_attention"),
        ({"attn_output_gate": False}, "attn_output_gate = False: only True is supported for qwen3_5"),
    ],
)
def test_a_layer_that_is_neither_is_refused(change, message, folders, tmp_path):
    config = json.loads((folders["qwen3_5"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    "parallel,message",
    [
        ({"context": 2}, "parallel.context = 2: the state of qwen3_5's delta nets goes from row to row"),
        ({"tensor": 4}, "parallel.tensor = 4: qwen3_5 has gated attention, of which each rank needs key-value heads"),
    ],
)
def test_a_layout_that_would_cut_a_state_is_refused(parallel, message, folders):
    with pytest.raises(ValueError, match=message):
        check_layout(read_architecture(folders["qwen3_5"]), ParallelConfig(**parallel), {})
