"""Delta nets in the engine: their state is a sequence's own, is forked by a group's replies, and is cut by heads."""

import json

import pytest
import torch
import torch.nn.functional as F
from test_checkpoint import follow
from test_gradients import assert_same_updates, two_updates
from test_models import hf_gradients

from megatron_rl import platform
from megatron_rl.config import ParallelConfig
from megatron_rl.engine import delta_kernels
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import check_layout
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_groups, make_model
from tests.kit.ranks import run_each, run_ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {family: tmp_path_factory.mktemp(family) for family in ("qwen3_5", "qwen3_next")}
    for family, folder in folders.items():
        make_model(family, folder, layers=2)
    return folders


def of_groups(folders, layout, options):
    return {family: (folder, layout, make_groups(), "logprobs", 64, options) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def separate_prompts(folders):
    return run_each(1, two_updates, of_groups(folders, "1", {"share_prompts": False}))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "tp2_sp", pytest.param("tp2_pp2", marks=pytest.mark.thorough)])
def test_replies_that_fork_the_state_of_their_prompt_give_the_same_update(layout, folders, separate_prompts):
    for family, ranks in run_each(LAYOUTS[layout][0], two_updates, of_groups(folders, layout, {})).items():
        assert_same_updates(ranks[0], separate_prompts[family][0])


def convolved(x, weight, *, initial_state, activation, cu_seqlens, chunk_indices):
    """flash-linear-attention's convolution, of one sequence after the other."""
    assert activation == "silu" and len(chunk_indices) >= len(cu_seqlens) - 1
    outputs = []
    for number, (first, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        own, width = x[:, first:stop].transpose(1, 2), weight.shape[1]
        before = own.new_zeros(1, len(weight), width) if initial_state is None else initial_state[number, None]
        rows = torch.cat([before[..., 1:], own], dim=-1)
        outputs.append(F.silu(F.conv1d(rows, weight[:, None], groups=len(weight))).transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def row_by_row(
    q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, chunk_indices
):
    """flash-linear-attention's gated delta rule, as a recurrence."""
    assert use_qk_l2norm_in_kernel and len(chunk_indices) >= len(cu_seqlens) - 1
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for x in (q * q.shape[-1] ** -0.5, k))
    outputs, finals = [], []
    for number, (first, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        state = v.new_zeros(v.shape[2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state[number]
        for row in range(first, stop):
            state = state * g[0, row].exp()[:, None, None]
            missed = v[0, row] - torch.einsum("hkv,hk->hv", state, k[0, row])
            state = state + torch.einsum("hk,hv->hkv", k[0, row], beta[0, row, :, None] * missed)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[0, row]))
        finals.append(state)
    return torch.stack(outputs)[None], torch.stack(finals) if output_final_state else None


def by_kernels(folder, layout):
    """Two updates with the package's functions on a CPU; tests/unit/engine/fla_cases.py runs its real kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "check_delta_kernel", lambda kernel, dtype: None)
        patch.setattr(delta_kernels, "kernels", lambda: (convolved, row_by_row))
        return two_updates(folder, layout, make_groups(), "logprobs", 64, {"delta_kernel": "fla"})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", pytest.param("tp2_sp", marks=pytest.mark.thorough)])
def test_kernels_that_take_packed_sequences_and_states_give_the_same_update(layout, folders, separate_prompts):
    for family in folders if layout == "1" else ["qwen3_next"]:
        ranks = run_ranks(LAYOUTS[layout][0], by_kernels, folders[family], layout)
        assert_same_updates(ranks[0], separate_prompts[family][0])


@pytest.mark.skipif(platform.has_cuda(), reason="needs a machine without CUDA")
def test_kernels_without_a_device_are_refused_before_any_work(folders):
    with pytest.raises(ValueError, match="model.delta_kernel = 'fla': there is no CUDA device"):
        make_engine(folders["qwen3_5"], ParallelConfig(), delta_kernel="fla")


def test_gradient_equals_float64_autograd(folders):
    batch = make_batch()
    for family, ranks in run_each(1, two_updates, {f: (p, "1", batch, "logits") for f, p in folders.items()}).items():
        hf_gradients(folders[family], batch, ranks[0][0][0])


@pytest.mark.slow
def test_heads_are_divided_without_sequence_parallelism_too(folders, separate_prompts):
    ranks = run_ranks(2, two_updates, *of_groups(folders, "tp2", {})["qwen3_5"])
    assert_same_updates(ranks[0], separate_prompts["qwen3_5"][0])


@pytest.mark.slow
@pytest.mark.parametrize("links", [["tp2_sp", "1"], pytest.param(["1", "tp2_pp2"], marks=pytest.mark.thorough)])
def test_parameters_that_ranks_have_a_part_of_continue_in_any_layout(links, tmp_path):
    follow(["qwen3_5", "olmo", "gpt_oss"], links, tmp_path, layers=2)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types has .*sliding_attention"),
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
        ({"tensor": 4}, "parallel.tensor = 4: qwen3_5 has gated attention with .* key-value heads, and each rank"),
    ],
)
def test_a_layout_that_would_cut_a_state_is_refused(parallel, message, folders):
    with pytest.raises(ValueError, match=message):
        check_layout(read_architecture(folders["qwen3_5"]), ParallelConfig(**parallel), {})
