"""What `optimizer.megatron` says to megatron.core, and what it may not say."""

import dataclasses
import itertools

import pytest
import torch
from test_checkpoint import train, weights_of

from megatron_rl import platform
from megatron_rl.config import EngineConfig, ModelConfig, OptimizerConfig
from megatron_rl.engine import optimizer
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.offload import SharedDevice
from megatron_rl.tools.plan.memory import Model, states_of_stage
from megatron_rl.weights.architecture import read_architecture
from tests.kit.models import make_model, start
from tests.kit.ranks import run_ranks

AWARE = {"use_precision_aware_optimizer": True}
OFFLOAD = AWARE | {"optimizer_cpu_offload": True}


def engine_config(given, *, path="nowhere", dtype="bfloat16", distributed=True):
    options = OptimizerConfig(
        lr=3e-3, eps=1e-6, weight_decay=0.1, clip_grad=0.0, distributed=distributed, megatron=given
    )
    return EngineConfig(model=ModelConfig(path=str(path), dtype=dtype, transformer_impl="local"), optimizer=options)


@pytest.mark.parametrize(
    ("given", "others", "message"),
    [
        (
            {"lr": 1.0},
            {},
            "lr = 1.0: another option decides this, or it is none; take one of bucket_size, exp",
        ),
        ({"grad_reduce_in_fp32": "no"}, {}, "grad_reduce_in_fp32 = 'no': must be True or False"),
        (AWARE | {"exp_avg_dtype": "fp8"}, {}, "exp_avg_dtype = 'fp8': must be float32 or bfloat16 or float16"),
        ({"exp_avg_dtype": "bfloat16"}, {}, "exp_avg_dtype = 'bfloat16': needs use_precision_aware_optimizer"),
        (OFFLOAD | {"main_params_dtype": "float16"}, {}, "whose Adam keeps float32"),
        ({"pin_cpu_grads": False}, {}, "says how to offload; set optimizer_cpu_offload=true too"),
        ({"optimizer_cpu_offload": True}, {}, "set use_precision_aware_optimizer=true too"),
        (
            OFFLOAD | {"optimizer_offload_fraction": 0.0},
            {},
            "must be a number above 0; leave it out",
        ),
        (OFFLOAD, {"distributed": False}, "needs optimizer.distributed=true and model.dtype=bfloat16; set them"),
        (OFFLOAD, {"dtype": "float32"}, "needs optimizer.distributed=true and model.dtype=bfloat16; set them"),
        (OFFLOAD | {"optimizer_offload_fraction": 1.5}, {}, r"fraction = 1.5: must be in \(0, 1\]"),
        (AWARE, {}, "needs Transformer Engine 2.1 or later; install it, or leave this out"),
        ({"bucket_size": "large"}, {}, "bucket_size = 'large': must be a number above 0"),
    ],
)
@pytest.mark.skipif(platform.has_cuda(), reason="needs a machine without CUDA")
def test_an_option_of_upstreams_optimizer_that_cannot_hold_is_refused(given, others, message):
    with pytest.raises(ValueError, match=f"^optimizer.megatron.*{message}"):
        optimizer.check_passed_through(engine_config(given, **others))


def test_every_offered_option_is_a_field_of_upstream():
    classes = optimizer.MegatronOptimizerConfig, optimizer.DistributedDataParallelConfig
    known = {field.name for upstream in classes for field in dataclasses.fields(upstream)}
    assert optimizer.OFFERED.keys() <= known


def test_options_of_memory_reach_upstream_with_their_dtypes(monkeypatch):
    found = []
    monkeypatch.setattr(optimizer, "MegatronOptimizerConfig", lambda **options: found.append(options))
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda *_, **__: 1 / 0)
    for given in (AWARE | {"exp_avg_dtype": "bfloat16"}, OFFLOAD | {"overlap_cpu_optimizer_d2h_h2d": True}):
        with pytest.raises(ZeroDivisionError):
            optimizer.build_optimizer(engine_config(given).optimizer, [], torch.bfloat16)
    aware, offload = found
    assert aware["use_precision_aware_optimizer"] and aware["exp_avg_dtype"] is torch.bfloat16
    assert not aware["store_param_remainders"], "a checkpoint would hold half of a main weight"
    assert offload["optimizer_cpu_offload"] and offload["overlap_cpu_optimizer_d2h_h2d"]
    assert offload["optimizer_offload_fraction"] == 1.0, "upstream's 0 would offload nothing"


def gradient_bytes(folder):
    engines = [start(MegatronEngine(engine_config(it, path=folder))) for it in ({}, {"grad_reduce_in_fp32": False})]
    sizes = [sum(buffer.grad_data.nbytes for buffer in engine.wrapped[0].buffers) for engine in engines]
    for engine in engines:
        train(engine)
    return sizes, [weights_of(engine) for engine in engines]


def test_gradients_in_bfloat16_take_half_the_memory(tmp_path):
    make_model("llama", tmp_path)
    (exact, rounded), (expected, weights) = run_ranks(1, gradient_bytes, tmp_path)[0]
    assert exact == 2 * rounded
    for name, tensor in expected.items():
        assert (weights[name] - tensor).float().norm() < 0.02 * tensor.float().norm(), name


def test_a_plan_counts_what_is_kept(tmp_path):
    make_model("llama", tmp_path)
    moments = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    settings = ({}, {"grad_reduce_in_fp32": False}, AWARE | moments, OFFLOAD | {"optimizer_offload_fraction": 0.75})
    models = [Model("policy", read_architecture(tmp_path), engine_config(it, path=tmp_path)) for it in settings]
    planned = [states_of_stage(model, 0, 2) for model in models]
    assert [states["gradients"] / states["weights"] for states in planned] == [2.0, 1.0, 2.0, 2.0]
    # Of 12 bytes by each of two ranks.
    assert [states["optimizer"] / states["weights"] for states in planned] == [3.0, 3.0, 2.0, 0.75]


class Host(torch.Tensor):
    """Host memory beside a device that is the host's too: megatron.core asks `is_cpu` here where it means `is_cuda`."""

    is_cpu = property(lambda self: False)

    def __getitem__(self, place):
        return super().__getitem__(place).as_subclass(torch.Tensor)


def offload_in_part(folder, target):
    """Weights after three updates with all states on the device, and with half of them on the host: the third one by
    the engine itself, by one that resumed, and by one that resumed without offloading."""
    from megatron.core.optimizer import optimizer_config

    torch.Tensor.pin_memory = lambda tensor: tensor.as_subclass(Host)
    optimizer_config.is_te_min_version = lambda version: False  # asked of Transformer Engine also where it does nothing
    platform.uses_transformer_engine = lambda impl: impl == "auto"
    given = OFFLOAD | {"optimizer_offload_fraction": 0.5, "pin_cpu_grads": False}
    whole, offloaded, again = (start(MegatronEngine(engine_config(it, path=folder))) for it in ({}, given, given))
    before = weights_of(offloaded)
    offloaded.save(target, with_optimizer=True)  # which no update has given moments yet
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(offloaded).items())
    for part in offloaded.optimizer.chained_optimizers:
        assert part.optimizer.cpu_optimizers and part.optimizer.gpu_optimizer
    offloaded.load(target, with_optimizer=True)
    train(whole, updates=2)
    train(offloaded, updates=2)
    offloaded.save(target, with_optimizer=True)
    again.load(target, with_optimizer=True)
    train(offloaded), train(again), train(whole)
    found = [weights_of(engine) for engine in (whole, offloaded, again)]
    whole.load(target, with_optimizer=True)
    train(whole)
    return [*found, weights_of(whole)]


@pytest.mark.slow
def test_adam_on_the_host_gives_the_same_update_and_resumes(tmp_path):
    make_model("llama", tmp_path / "model", layers=2)
    for expected, *others in run_ranks(2, offload_in_part, tmp_path / "model", tmp_path / "checkpoint")[:1]:
        for (number, weights), (name, tensor) in itertools.product(enumerate(others), expected.items()):
            torch.testing.assert_close(weights[name], tensor, rtol=1e-2, atol=1e-4, msg=f"{number} {name}")


def test_offloading_beside_engines_that_share_the_device_is_refused_before_a_process_group(tmp_path, monkeypatch):
    make_model("llama", tmp_path)
    monkeypatch.setattr(platform, "uses_transformer_engine", lambda impl: impl == "auto")
    with pytest.raises(ValueError, match="optimizer_cpu_offload = True: the engine shares its GPU"):
        start(MegatronEngine(engine_config(OFFLOAD, path=tmp_path), shared_device=SharedDevice()))
