"""A resumed engine continues as if it had never stopped, and a broken folder is named."""

import json

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_gradients import user_loss, user_weight
from tiny import LAYOUTS, make_batch, make_engine, make_model, share_of

from megatron_rl.platform import upstream


def train_and_save(folder, layout, target, options):
    engine = make_engine(folder, LAYOUTS[layout][1], **options).train()
    batch = share_of(make_batch(), engine)
    for _ in range(3):
        engine.train_batch(batch, user_loss, user_weight)
        engine.step_lr_scheduler()
    engine.save(target, with_optimizer=True)
    return one_more(engine, batch)


def load_and_train(folder, layout, target, options):
    engine = make_engine(folder, LAYOUTS[layout][1], **options).train()
    engine.load(target, with_optimizer=True)
    assert engine.get_version() == 3
    return one_more(engine, share_of(make_batch(), engine))


def one_more(engine, batch):
    stats = engine.train_batch(batch, user_loss, user_weight)
    return stats, {name: tensor.clone() for name, tensor in engine.hf_tensors()}


# The same layout, another one, and the distributed optimizer that upstream resumes wrongly by itself.
@pytest.mark.proves("layouts", "{before}", "checkpoint")
@pytest.mark.proves("layouts", "{after}", "checkpoint")
@pytest.mark.parametrize(
    "before,after,options",
    [
        ("1", "1", {"schedule": "linear"}),
        ("tp2_sp", "pp2", {}),
        ("pp2", "pp2_vpp2", {}),
        ("dp2", "dp2", {"distributed": True}),
    ],
)
def test_resume_continues_the_same_run(before, after, options, tmp_path):
    make_model("llama_tied", tmp_path / "model")
    target = tmp_path / "checkpoint"
    stats, weights = run_ranks(LAYOUTS[before][0], train_and_save, tmp_path / "model", before, target, options)[0]
    resumed_stats, resumed = run_ranks(LAYOUTS[after][0], load_and_train, tmp_path / "model", after, target, options)[0]
    assert resumed_stats.loss == pytest.approx(stats.loss, abs=1e-6) and resumed_stats.lr == stats.lr
    for name, tensor in weights.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=1e-5, msg=name)


def without_fix(folder, target):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Fixed

    Fixed._set_main_param_and_optimizer_states = Fixed._set_main_param_and_optimizer_states.__closure__[0].cell_contents
    return load_and_train(folder, "dp2", target, {"distributed": True})


def test_upstream_distributed_adam_still_needs_its_fix(tmp_path):
    make_model("llama_tied", tmp_path / "model")
    target = tmp_path / "checkpoint"
    run_ranks(2, train_and_save, tmp_path / "model", "dp2", target, {"distributed": True})
    with pytest.raises(AssertionError, match="KeyError: 'step'"):
        run_ranks(2, without_fix, tmp_path / "model", target)


def shared_step(folder, target):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Fixed

    Fixed.load_state_dict = next(
        c.cell_contents for c in Fixed.load_state_dict.__closure__ if c.cell_contents.__name__ == "load_state_dict"
    )
    engine = make_engine(folder, LAYOUTS["dp2"][1], distributed=True)
    with torch.no_grad():
        engine.load(target, with_optimizer=True)
    optimizer = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])[0].optimizer
    steps = [state["step"] for state in optimizer.state.values()]
    return len({step.data_ptr() for step in steps}), len(steps)


def test_upstream_adam_steps_are_shared_after_a_load_without_the_fix(tmp_path):
    make_model("llama_tied", tmp_path / "model")
    target = tmp_path / "checkpoint"
    run_ranks(2, train_and_save, tmp_path / "model", "dp2", target, {"distributed": True})
    distinct, parameters = run_ranks(2, shared_step, tmp_path / "model", target)[0]
    assert distinct == 1 < parameters


def router(with_fix):
    from megatron.core.transformer.moe import moe_utils

    if not with_fix:
        del moe_utils.te_general_gemm
    tokens, weight = torch.ones(3, 4), torch.ones(2, 4)
    gating = moe_utils.router_gating_linear
    return (
        gating(tokens, weight, None, torch.float32)
        if "bias" in gating.__code__.co_varnames
        else gating(tokens, weight, torch.float32)
    )


def test_moe_router_runs_without_transformer_engine_only_with_the_fix():
    assert run_ranks(1, router, True)[0].tolist() == [[4.0, 4.0]] * 3
    with pytest.raises(AssertionError, match="te_general_gemm"):
        run_ranks(1, router, False)


def test_every_fix_has_its_module():
    assert set(upstream.FIXES) == {
        "megatron.core.jit",
        "megatron.core.transformer.moe.moe_utils",
        "megatron.core.optimizer.distrib_optimizer",
        "megatron.core.tensor_parallel.mappings",
        "megatron.core.transformer.multi_latent_attention",
    }


@pytest.fixture
def folder(tmp_path):
    make_model("llama", tmp_path)
    return tmp_path


def start(folder):
    make_engine(folder, LAYOUTS["1"][1])


def refused(folder, *parts):
    with pytest.raises(ValueError) as error:
        start(folder)
    for part in parts:
        assert part in str(error.value)


def test_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    refused(folder, "model.path", "no config.json", "megatron-rl convert")


def test_unsupported_architecture_is_refused_with_the_supported_ones(folder):
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def test_missing_tensor_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "model.layers.1.mlp.up_proj.weight", "missing", "(96, 64)")


def test_misshapen_tensor_is_named_with_its_file_and_both_shapes(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "model.norm.weight", "model.safetensors", "(63,)", "(64,)")


def test_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "no *.safetensors", "model.init=random")


def test_truncated_safetensors_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    refused(folder, "model.safetensors", "unreadable safetensors file")


def world_of_three(folder):
    with pytest.raises(ValueError, match=r"tensor\(2\) x pipeline\(1\) x context\(1\) = 2 ranks.*world size 3"):
        make_engine(folder, LAYOUTS["tp2"][1])


def test_world_size_that_the_layout_does_not_divide_is_refused(folder):
    run_ranks(3, world_of_three, folder)
