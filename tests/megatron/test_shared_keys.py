"""Updates by the attention that CUDA has for dialogues that fork, with torch's own definitions in place of its kernels.

Keys that are copied before each segment, and keys that are read where they lie, against the update on a CPU.
"""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.attention.varlen as torch_varlen
from test_gradients import assert_same_updates, two_updates

from megatron_rl import platform
from megatron_rl.engine import attention, forks, packed_rows
from tests.kit.examples import IS_THOROUGH
from tests.kit.models import LAYOUTS, make_engine, make_groups, make_model
from tests.kit.ranks import run_each, run_ranks


def piece_by_piece(query, key, value, query_cu, key_cu, *longest, window_size, scale, **options):
    """torch's kernel of variable lengths: each piece's queries are the last of its keys."""
    out, bounds = [], zip(query_cu[:-1], query_cu[1:], key_cu[:-1], key_cu[1:], strict=True)
    for first, stop, first_key, stop_key in bounds:
        q, k, v = (x.transpose(0, 1) for x in (query[first:stop], key[first_key:stop_key], value[first_key:stop_key]))
        n, m = q.shape[1], k.shape[1]
        mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        if window_size[0] >= 0:
            mask = mask.triu(m - n - window_size[0])
        part = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        out.append(part.transpose(0, 1))
    return torch.cat(out)


def whole_scores(query, key, value, *, block_mask, scale, enable_gqa, return_aux):
    """FlexAttention by its definition. torch's own on a CPU traces each shape for seconds; `make test-all` runs it."""
    queries, keys = query.shape[2], key.shape[2]
    mask = flex.create_mask(block_mask.mask_mod, 1, 1, queries, keys, device=query.device)
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~mask, -torch.inf)
    sums = scores.float().logsumexp(-1)
    weights = (scores - sums.masked_fill(sums.isinf(), 0.0)[..., None]).exp()
    return weights.to(value.dtype) @ value, SimpleNamespace(lse=sums)


def as_on_cuda(folder, layout, shared_keys, tokens):
    """Two updates with the kernels of CUDA; of the microbatches, how many had keys that were read where they lie."""
    in_place = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (packed_rows, attention):
            patch.setattr(module, "has_varlen_kernel", lambda device, dtype: True)
        patch.setattr(torch_varlen, "varlen_attn", piece_by_piece)
        patch.setattr(attention, "takes_grouped_queries", lambda attend: True)
        patch.setattr(flex, "_validate_device", lambda *tensors: None)
        patch.setattr(forks, "compiled", lambda: forks.flex_attention if IS_THOROUGH else whole_scores)
        patch.setattr(platform, "check_shared_keys", lambda kernel: None)
        for kind in (attention.PackedAttention, attention.SinkAttention):
            attend = kind._in_place
            patch.setattr(kind, "_in_place", lambda *given, attend=attend: in_place.append(1) or attend(*given))
        options = {"shared_keys": shared_keys}
        return *two_updates(folder, layout, make_groups(), "logprobs", tokens, options), len(in_place)


@functools.cache
def on_a_cpu(folder):
    return run_ranks(1, two_updates, folder, "1", make_groups(), "logprobs", 200)[0]


WINDOWED = ("gemma3", "gpt_oss")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function: family, layout -> its folder. It has one layer of each kind, or those of chunks; each takes long.

    Keys that are read where they lie are Gemma 3's of a window, as others are DeepSeek-V3's.
    """

    def make(family, layout):
        return of_layers(family, 4 if layout == "pp2_vpp2" else 1 if family in FAMILIES else 2)

    @functools.cache
    def of_layers(family, layers):
        folder = tmp_path_factory.mktemp(family)
        kinds = ("sliding_attention" if family in WINDOWED else "full_attention", "full_attention")
        make_model(family, folder, num_hidden_layers=layers, layer_types=[*kinds, *kinds][:layers])
        return folder

    return make


BUDGETS = (40, 200)
"""Of tokens in a microbatch; at 40 there are several."""
# Only context ranks change which keys a rank has.
LAYOUTS_HERE = [pytest.param("cp2", BUDGETS[:1], marks=pytest.mark.slow)]
OTHERS = [("1", BUDGETS), ("cp2", BUDGETS[1:]), *((layout, BUDGETS) for layout in ("tp2_sp", "pp2_vpp2", "dp2"))]
LAYOUTS_HERE += [pytest.param(*case, marks=pytest.mark.thorough) for case in OTHERS]
FAMILIES = ("qwen3_tied_one_kv_head", "gemma3", "deepseek_v3")
SHARED_KEYS = [
    ("copied", FAMILIES[:1]),
    ("flex", FAMILIES[1:]),
    pytest.param("copied", FAMILIES[1:], marks=pytest.mark.thorough),
    pytest.param("flex", FAMILIES[:1], marks=pytest.mark.thorough),
]
"""Keys that are copied are of any family alike; where they lie, those of windows and latent ones are read otherwise."""


@pytest.mark.parametrize("shared_keys,families", SHARED_KEYS)
@pytest.mark.parametrize("layout,budgets", LAYOUTS_HERE)
def test_updates_by_the_kernels_of_cuda_are_those_of_a_cpu(layout, budgets, shared_keys, families, folder_of):
    cases = {
        (family, tokens): (folder_of(family, layout), layout, shared_keys, tokens)
        for family, tokens in itertools.product(families, budgets)
    }
    for (family, _), ranks in run_each(LAYOUTS[layout][0], as_on_cuda, cases).items():
        *updates, in_place = ranks[0]
        assert_same_updates(updates, on_a_cpu(folder_of(family, layout)))
        assert (in_place > 0) == (shared_keys == "flex")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("1", marks=pytest.mark.thorough), "cp2"])
def test_a_head_with_a_sink_has_its_share_of_the_sum(layout, folder_of):
    *updates, in_place = run_ranks(LAYOUTS[layout][0], as_on_cuda, folder_of("gpt_oss", layout), layout, "flex", 200)[0]
    assert_same_updates(updates, on_a_cpu(folder_of("gpt_oss", layout)))
    assert in_place > 0


def test_an_attention_that_tells_no_sums_is_refused_for_heads_with_sinks(folder_of):
    with pytest.raises(ValueError, match="model.flash_attention = 'TE': gpt_oss has attention sinks.*=torch."):
        make_engine(folder_of("gpt_oss", "1"), LAYOUTS["1"][1], flash_attention="TE")
