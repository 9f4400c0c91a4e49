"""Engines of Transformer Engine's layers are the models that those of megatron.core's own are.

Its own Python runs, on the CPU. Kernels of torch compute in place of its libraries.
"""

import functools
import pickle
import sys
import warnings
from pathlib import Path

import pytest
import torch
from gathered import relative_error
from safetensors.torch import load_file

from megatron_rl.engine.rope import Rope
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.families import FAMILIES
from tests.kit.forks import check_end
from tests.kit.models import LAYOUTS, MIXTURES, make_model
from tests.kit.mtp import add_mtp_layer
from tests.kit.ranks import fork

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
QUICK = [("qwen3_moe", "1"), ("phi3_partly_rotated", "1")]
QUICK += [("qwen3", "tp2_sp"), ("qwen3_moe", "tp2_etp2"), ("deepseek_v3", "tp2_ep2")]
"""Each kind of layer and each axis: enough for `make test`."""
ALONE = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "glm4_moe", "minimax_m2", "seed_oss")
ALONE += ("deepseek_v3", "deepseek_v3_yarn_whole_queries")
THOROUGH = [("qwen2", "tp2"), *((family, "1") for family in ALONE)]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH)]
MIXED = [case for case in CASES if (case.values if hasattr(case, "values") else case)[0] in MIXTURES]
FEWER = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
IMPLS = ("transformer_engine", "local")
ROUNDED = 1e-5
"""A hundredth of an update: they sum in another order, which Adam's eps of 1e-6 magnifies near a gradient of zero."""
# Model: the layers of the engine that saves and of the one that resumes, and whether their optimizers are distributed.
RESUMED = {
    "qwen3_moe": (("local", "transformer_engine"), (False, False)),
    "deepseek_v3": (("transformer_engine", "local"), (True, True)),
}
RESUMED_MORE = {"qwen2": (("transformer_engine", "transformer_engine"), (False, True))}
# Windows, keys that are shared by replies and by heads, gathered from another rank, and wider than values.
ATTENDED = {
    ("mistral_windowed", "cp2"): {(3, 0)},
    ("gemma3", "1"): {(3, 0), (-1, 0)},
    ("deepseek_v3", "cp2_ep2"): {(-1, 0)},
}
ATTENDED_MORE = {("qwen3", "1"): {(-1, 0)}, ("deepseek_v3", "1"): {(-1, 0)}}
DRAFTED, DRAFTED_MORE = [("glm4_moe", "1")], [("deepseek_v3", "tp2_ep2")]
"""Families whose multi-token-prediction layer is trained."""
KERNELS = ("TE", "torch")


def with_more(some, more):
    return [*some, *(pytest.param(*(it if isinstance(it, tuple) else [it]), marks=pytest.mark.thorough) for it in more)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {family: tmp_path_factory.mktemp(family) for family, _ in QUICK + THOROUGH}
    for family, folder in folders.items():
        make_model(family, folder, **FEWER)
    return folders


def cases_of(folders, updated, attended, resumed, drafted, make):
    """By name, the number of ranks and what `te_cases.run` is given there; `make`: makes a folder."""
    found = {}
    for family, layout in updated:
        for impl in IMPLS:
            found[family, layout, impl] = LAYOUTS[layout][0], ("updated", folders[family], layout, impl)
    for family, layout in attended:
        make_model(family, folder := make(family), layers=2)
        for kernel in KERNELS:
            found[family, layout, kernel] = LAYOUTS[layout][0], ("attended", folder, layout, kernel)
    for family, how in resumed.items():
        found[family, "resumed"] = 1, ("resumed", folders[family], make("checkpoint") / "1", *how)
    for family, layout in drafted:
        make_model(family, folder := make(family), layers=2)
        add_mtp_layer(folder)
        checkpoint = make("checkpoint") / "1"
        for impl in ("local", "transformer_engine"):  # in this order, as the second reads the first's checkpoint
            found[family, layout, "drafted", impl] = LAYOUTS[layout][0], ("drafted", folder, layout, impl, checkpoint)
    return found


@pytest.fixture(scope="module")
def seen(folders, tmp_path_factory):
    """A function: name of a case -> what the first rank finds there.

    Cases of `make test` run together if they have as many ranks, so that nobody waits for all; so do the others.
    """
    make = tmp_path_factory.mktemp
    quick = cases_of(folders, QUICK, ATTENDED, RESUMED, DRAFTED, make)
    quick["accumulated",] = 1, ("updated", folders["qwen3_moe"], "1", "transformer_engine", True)

    @functools.cache
    def more():
        return cases_of(folders, THOROUGH, ATTENDED_MORE, RESUMED_MORE, DRAFTED_MORE, make)

    @functools.cache
    def run(is_quick, size):
        cases = quick if is_quick else more()
        own = {case: arguments for case, (ranks, arguments) in cases.items() if ranks == size}
        folder = make("cases")
        check_end([fork(with_transformer_engine, (size, own, folder / "found"), folder / "log")], folder / "log")
        return {case: ranks[0] for case, ranks in pickle.loads((folder / "found").read_bytes()).items()}

    def found(*case):
        is_quick = case in quick
        size, _ = (quick if is_quick else more())[case]
        return run(is_quick, size)[case]

    return found


@pytest.fixture(scope="module")
def updated(seen):
    """A function: family, layout -> what the first rank finds with either kind of layers."""
    return lambda family, layout: [seen(family, layout, impl) for impl in IMPLS]


def with_transformer_engine(given):
    """Run cases in this fork, which imports anew what has looked for Transformer Engine before it is there.

    All but the fake kernels: torch takes the definitions of operators once.
    """
    operators = "megatron_rl.tools.rehearsal.te_kernels"
    for name, module in list(sys.modules.items()):
        is_here = Path(getattr(module, "__file__", None) or "/").parent == HERE
        if (is_here or name.partition(".")[0] in ("megatron", "megatron_rl", "tests")) and name != operators:
            del sys.modules[name]
    warnings.simplefilter("ignore")
    from tests.kit.transformer_engine import load_on_cpu

    load_on_cpu()
    import te_cases

    te_cases.run_all(*given)


@pytest.mark.parametrize("family,layout", CASES)
def test_layers_of_transformer_engine_make_the_same_model(family, layout, updated, folders):
    found, local = updated(family, layout)
    source = load_file(folders[family] / "model.safetensors")
    assert found["loaded"].keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(found["loaded"][name].view(torch.uint8), tensor.view(torch.uint8)), name
    torch.testing.assert_close(found["logprobs"], local["logprobs"], rtol=0, atol=1e-6)
    for name, gradient in local["gradients"].items():
        # A key's bias hardly changes the attention: its gradient is what rounding leaves of larger ones that cancel.
        size = max(gradient.norm(), 1e-3 * local["stats"].grad_norm)
        assert (found["gradients"][name] - gradient).norm() < 1e-6 * size, name
    assert found["stats"].grad_norm == pytest.approx(local["stats"].grad_norm, rel=1e-5)
    assert found["stats"].applied
    for name, tensor in local["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=0, atol=ROUNDED, msg=name)


def test_every_family_that_has_such_layers_is_tried(folders):
    architectures = [read_architecture(folder) for folder in folders.values()]
    assert all(arch.fits_transformer_engine for arch in architectures)
    assert FAMILIES.keys() - {arch.family for arch in architectures} == {
        *("gemma3", "olmo"),  # which have norms behind
        *("qwen3_5", "qwen3_next"),  # which have delta nets
        "gpt_oss",  # whose attention has sinks
    }


@pytest.mark.parametrize("family,layout", CASES)
def test_gradients_reach_every_parameter(family, layout, updated):
    found, local = (of_impl["gradients"] for of_impl in updated(family, layout))
    idle = {name for name, gradient in local.items() if not gradient.any()}  # experts that no token chose
    assert {name for name, gradient in found.items() if not gradient.any()} == idle and len(idle) < 0.2 * len(found)


@pytest.mark.parametrize("family,layout", CASES)
def test_marks_of_parameters_are_those_of_local_layers(family, layout, updated):
    found, local = (of_impl["marks"] for of_impl in updated(family, layout))
    assert found == local


@pytest.mark.parametrize("family,layout", CASES)
def test_every_norm_is_transformer_engines(family, layout, updated):
    found, local = updated(family, layout)
    assert found["own_norms"] == 0 < local["own_norms"]
    assert not local["fused"] and not local["launches"]["rms_norm"] and found["launches"]["rms_norm"]


@pytest.mark.parametrize("family,layout", CASES)
def test_rows_are_rotated_by_one_kernel(family, layout, updated, folders):
    rotated = updated(family, layout)[0]["launches"]["rotate"]
    # Its kernel knows no attention factor. Queries and keys of each layer.
    factor = Rope.of(read_architecture(folders[family])).attention_factor
    assert rotated % (2 * 2) == 0 and bool(rotated) == (factor == 1.0)


@pytest.mark.parametrize("family,layout", with_more(ATTENDED, ATTENDED_MORE))
def test_transformer_engines_attention_gives_the_same_gradients(family, layout, seen):
    found, torchs = (seen(family, layout, kernel) for kernel in KERNELS)
    assert found["windows"] == (ATTENDED | ATTENDED_MORE)[family, layout] and not torchs["windows"]
    assert found["stats"].loss == pytest.approx(torchs["stats"].loss, rel=1e-5)
    for name, gradient in torchs["gradients"].items():
        assert relative_error(found["gradients"][name], gradient) < 1e-5, name


def test_gradients_that_the_layers_accumulate_are_the_same(seen):
    plain, accumulated = seen("qwen3_moe", "1", "transformer_engine"), seen("accumulated")
    for name, gradient in plain["gradients"].items():
        torch.testing.assert_close(accumulated["gradients"][name], gradient, rtol=0, atol=1e-6, msg=name)
    assert accumulated["fused"] and all(accumulated["fused"])


@pytest.mark.parametrize("family", with_more(RESUMED, RESUMED_MORE))
def test_a_run_continues_under_the_other_kind_of_layers(family, seen):
    uninterrupted, resumed, steps = seen(family, "resumed")
    for name, tensor in uninterrupted.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=ROUNDED, msg=name)
    assert set(steps) == {2}, "as many updates as both runs together"


@pytest.mark.parametrize("family,layout", with_more(DRAFTED, DRAFTED_MORE))
def test_a_multi_token_prediction_layer_learns_the_same_and_continues_under_the_other_kind_of_layers(
    family, layout, seen
):
    local, found = (seen(family, layout, "drafted", impl) for impl in ("local", "transformer_engine"))
    assert found["fused"] > 0 == local["fused"]
    for step, other in zip(found["metrics"], local["metrics"], strict=True):
        assert step == pytest.approx(other, rel=1e-4)
    for kind in ("draft", "continued"):
        for name, tensor in local[kind].items():
            torch.testing.assert_close(found[kind][name], tensor, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("family,layout", MIXED)
def test_experts_of_a_rank_are_one_product_and_tokens_are_sorted_by_a_kernel(family, layout, updated):
    found, _ = updated(family, layout)
    first = next(name for name in found["parameters"] if name.endswith("mlp.experts.linear_fc1.weight0"))
    assert first.replace("weight0", "weight1") in found["parameters"] and "local_experts" not in str(
        found["parameters"]
    )
    launched = {name for name, count in found["launches"].items() if count}
    assert {"grouped_product_into_", "permute_mask_map_fwd", "unpermute_mask_map_fwd"} <= launched
