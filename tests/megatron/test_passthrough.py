"""What the `megatron:` section may not say, refused before there is a process group."""

import dataclasses
import importlib.metadata
import sys
import types

import pytest
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a

import tests.kit.ranks  # noqa: F401  megatron.core is imported as the engine wants it
from megatron_rl import platform
from megatron_rl.config import EngineConfig, ModelConfig, load_config
from megatron_rl.engine import megatron_overrides, model
from megatron_rl.engine.model import transformer_config
from megatron_rl.run.checks import check
from megatron_rl.weights.architecture import read_architecture
from tests.kit.models import LAYOUTS, make_engine, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3", path)
    return path


@pytest.fixture(scope="module")
def config_with(folder):
    """Return a function: (megatron section, layout) -> TransformerConfig."""
    arch = read_architecture(folder)

    def make(megatron, layout="1"):
        config = EngineConfig(model=ModelConfig(path=str(folder)), parallel=LAYOUTS[layout][1])
        return transformer_config(arch, config, megatron)

    return make


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_model_parallel_size": 2}, "megatron.tensor_model_parallel_size = 2: parallel.tensor decides this"),
        ({"sequence_parallel": True}, "megatron.sequence_parallel = True: parallel.sequence decides this; set that"),
        ({"expert_model_parallel_size": 2}, "parallel.expert decides this; set that instead"),
        ({"bf16": True}, "megatron.bf16 = True: model.dtype decides this"),
        ({"fp16": True}, "megatron.fp16 = True: model.dtype decides this"),
        ({"transformer_impl": "transformer_engine"}, "model.transformer_impl decides this"),
        ({"calculate_per_token_loss": False}, "divided once, by the global sum of loss_weight_fn; leave it out"),
        (
            {"hidden_dropout": 0.1},
            "megatron.hidden_dropout = 0.1: not to be set, the trainer's log-probabilities would",
        ),
        ({"attention_dropout": 0.1}, "differ from the rollouts' at random; leave it out"),
        ({"batch_p2p_comm": False}, "batched sends between two stages are mixed up silently"),
        ({"variable_seq_lengths": False}, "pipeline stages exchange packed rows"),
        ({"num_layers": 3}, "megatron.num_layers = 3: not to be set, it follows from the model's config.json and the"),
        ({"window_size": [128, 0]}, "the packed attention does not read it"),
        ({"cross_entropy_loss_fusion": True}, "the engine's own head computes the loss"),
        ({"moe_aux_loss_coeff": 0.01}, "adds a gradient beside loss_fn's"),
        ({"moe_expert_capacity_factor": 1.0}, "which tokens an expert drops would depend on the microbatch split"),
        ({"moe_input_jitter_eps": 0.1}, "routing would differ from the rollouts' at random"),
        ({"moe_token_dispatcher_type": "allgather"}, "= 'allgather': must be alltoall or flex, as microbatches differ"),
        (
            {"moe_token_dispatcher_type": "flex"},
            "= 'flex': every rank has all experts, .*raise parallel.expert, or leave",
        ),
        # From 0.17 on there is no such field.
        (
            {"moe_use_legacy_grouped_gemm": True},
            "its experts' weights lie in another way|: not a field of megatron.core",
        ),
        ({"fp8": "hybrid"}, "only float32 and bfloat16 have"),
        ({"gradient_accumulation_fusion": True}, "it is on where apex's kernel for it is installed and off elsewhere"),
        ({"recompute_everything": True}, "megatron.recompute_everything = True: not a field of megatron.core's Tr"),
    ],
)
def test_field_that_would_be_silently_wrong_is_refused(given, message, config_with):
    with pytest.raises(ValueError, match=message):
        config_with(given)


def test_every_field_that_the_engine_sets_is_its_own(config_with, monkeypatch):
    ours = {}
    monkeypatch.setattr(model, "check_passed_through", lambda given, fields, upstream: ours.update(fields))
    config_with({})
    assert len(ours) > 30 and ours.keys() >= megatron_overrides.MAY_BE_SET
    for key in ours.keys() - megatron_overrides.MAY_BE_SET:
        with pytest.raises(ValueError, match=f"^megatron.{key} = 'another'"):
            megatron_overrides.check_passed_through({key: "another"}, ours)
        megatron_overrides.check_passed_through({key: ours[key]}, ours)


def test_field_that_says_what_holds_anyway_is_let_through(config_with):
    holds = {"hidden_dropout": 0.0, "sequence_parallel": True, "tensor_model_parallel_size": 2, "fp16": False}
    assert config_with(holds, "tp2_sp").sequence_parallel
    assert config_with({"recompute_granularity": "selective"}).recompute_granularity == "selective"


def test_the_flex_dispatcher_is_let_through_where_deepep_is(tmp_path, monkeypatch):
    make_model("qwen3_moe", tmp_path)
    config = EngineConfig(model=ModelConfig(path=str(tmp_path)), parallel=LAYOUTS["ep2"][1])
    arch, flex = read_architecture(tmp_path), {"moe_token_dispatcher_type": "flex"}
    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", False)
    # As SGLang's: the name is there, but Megatron-Core cannot import what it needs.
    monkeypatch.setitem(sys.modules, "deep_ep", types.ModuleType("deep_ep"))
    with pytest.raises(ValueError, match="needs DeepEP's package deep_ep, and .* found none that it can load"):
        transformer_config(arch, config, flex)
    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", True)
    assert transformer_config(arch, config, flex).moe_token_dispatcher_type == "flex"
    assert transformer_config(arch, config, {}).moe_token_dispatcher_type == "alltoall"


def test_reasons_name_fields_of_upstream(config_with):
    known = {field.name for field in dataclasses.fields(type(config_with({})))}
    unknown = (megatron_overrides.REASONS.keys() | megatron_overrides.OUR_KEYS.keys()) - known
    if importlib.metadata.version("megatron-core").startswith("0.16."):
        assert not unknown
    assert len(unknown) < 5, "later versions dropped a few"


def test_refusal_comes_before_a_process_group(folder):
    with pytest.raises(ValueError, match="parallel.tensor decides this"):
        make_engine(folder, LAYOUTS["1"][1], megatron={"tensor_model_parallel_size": 2})
    assert not dist.is_initialized()


def test_check_of_a_run_refuses_it_too():
    config = load_config("configs/count_grpo.yaml", ["megatron.hidden_dropout=0.1"])
    with pytest.raises(ValueError, match="^megatron.hidden_dropout = 0.1: not to be set, the trainer's log-prob"):
        check(config)


@pytest.mark.skipif(platform.has_cuda(), reason="needs a machine without CUDA")
def test_transformer_engine_without_cuda_is_refused(folder):
    config = EngineConfig(model=ModelConfig(path=str(folder), transformer_impl="transformer_engine"))
    with pytest.raises(ValueError, match="there is no CUDA device; install .* set model.transformer_impl=local"):
        transformer_config(read_architecture(folder), config, {})


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package of Transformer Engine's name that must not be imported."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)


def test_transformer_engine_is_taken_where_it_is_and_only_looked_for(installed, monkeypatch):
    # Without CUDA it is of no use; `local` never takes it.
    for has_cuda, expected in ((False, {"auto": False, "local": False}), (True, {"auto": True, "local": False})):
        monkeypatch.setattr(platform, "has_cuda", lambda has_cuda=has_cuda: has_cuda)
        assert {impl: platform.uses_transformer_engine(impl) for impl in expected} == expected
    assert platform.uses_transformer_engine("transformer_engine")
    assert "transformer_engine" not in sys.modules


def test_transformer_engine_demanded_and_absent_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: None)
    assert not platform.uses_transformer_engine("auto") and not platform.has_gradient_accumulation_kernel()
    with pytest.raises(ValueError, match=r"transformer_engine is not installed; install transformer_engine\[pytorch\]"):
        platform.uses_transformer_engine("transformer_engine")
