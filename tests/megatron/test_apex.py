"""What apex's kernels do where apex is installed, by a stand-in: accumulate weight gradients, and no norm."""

import pytest
import torch
from gathered import as_hf_tensors, record_gradients
from test_gradients import user_loss, user_weight

from megatron_rl import platform
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_model, share_of
from tests.kit.ranks import run_each

CASES = [("gemma3", "1"), ("deepseek_v3", "1"), ("qwen2", "tp2_sp"), ("qwen3_moe", "tp2_sp")]


class AccumulationKernel:
    """apex's fused_weight_gradient_mlp_cuda, in torch."""

    def __init__(self):
        self.calls = 0

    def wgrad_gemm_accum_fp32(self, inputs, grad_outputs, main_grad):
        assert inputs.dtype is grad_outputs.dtype and main_grad.dtype is torch.float32
        assert all(tensor.is_contiguous() for tensor in (inputs, grad_outputs, main_grad))
        main_grad.add_(grad_outputs.flatten(0, -2).t() @ inputs.flatten(0, -2))
        self.calls += 1


class NotBuilt:
    def __init__(self, *args, **kwargs):
        raise AssertionError("no norm of ours is apex's")


def gradients(folder, layout, has_apex):
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import layers

    kernel = AccumulationKernel()
    if has_apex:
        layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = kernel, True
        gpt_layer_specs.LNImpl, gpt_layer_specs.HAVE_APEX = NotBuilt, True
    platform.has_gradient_accumulation_kernel = lambda: has_apex
    engine = make_engine(folder, LAYOUTS[layout][1], tokens_per_microbatch=16).train()
    recorded = record_gradients(engine)
    stats = engine.train_batch(share_of(make_batch(), engine), user_loss, user_weight)
    return as_hf_tensors(engine, recorded[0]), stats, kernel.calls


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    by_size = {}
    for family, layout in CASES:
        folder = tmp_path_factory.mktemp(family)
        make_model(family, folder, layers=2)
        cases = by_size.setdefault(LAYOUTS[layout][0], {})
        cases |= {(family, layout, has_apex): (folder, layout, has_apex) for has_apex in (False, True)}
    return {
        case: ranks[0] for size, cases in by_size.items() for case, ranks in run_each(size, gradients, cases).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("family,layout", CASES)
def test_gradients_that_apex_accumulates_are_the_same(family, layout, found):
    (plain, stats, none), (fused, fused_stats, calls) = (found[family, layout, has_apex] for has_apex in (False, True))
    assert none == 0 and calls >= 4 * 4, "each microbatch, each matrix of a layer"
    for name, gradient in plain.items():
        torch.testing.assert_close(fused[name], gradient, rtol=0, atol=1e-6, msg=name)
    assert fused_stats.grad_norm == pytest.approx(stats.grad_norm, rel=1e-6)
