"""An engine that waits in host memory between its phases computes the same bits as one that stays on its device."""

import pytest
import torch
from test_gradients import user_loss, user_weight

from megatron_rl.config import EngineConfig, ModelConfig, OptimizerConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.offload import SharedDevice, tensors_of
from tests.kit import models
from tests.kit.examples import IS_THOROUGH
from tests.kit.models import LAYOUTS, make_batch, make_model, share_of
from tests.kit.ranks import run_each, run_ranks

PLAIN, DISTRIBUTED = {}, {"distributed": True}
OVERLAPPED = DISTRIBUTED | {"overlap": True}


def start(folder, layout, dtype="float32", kind=PLAIN, **options):
    config = EngineConfig(
        model=ModelConfig(path=str(folder), dtype=dtype),
        parallel=LAYOUTS[layout][1],
        optimizer=OptimizerConfig(lr=1e-3, **kind),
    )
    return models.start(MegatronEngine(config, **options))


def device_bytes(engine):
    return sum(tensor.untyped_storage().nbytes() for part in tensors_of(engine) for tensor in part)


def phases(engine, batch, between):
    """Forward, train, export and forward again, with something between every two of them."""
    results = []
    for _ in range(2):
        results.append(engine.eval().forward(batch))
        between()
        stats = engine.train().train_batch(batch, user_loss, user_weight)
        results.append(torch.tensor([stats.loss, stats.grad_norm]))
        between()
        results += [tensor.clone() for _, tensor in engine.hf_tensors()]
        between()
    return results


def bytes_by_part(engine):
    return [
        sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in part}.values())
        for part in tensors_of(engine)
    ]


def offload_between_phases(folder, layout, dtype, kind):
    engine = start(folder, layout, dtype, kind)
    batch = share_of(make_batch(), engine)
    out, had = [], []

    def between():
        before, by_part = device_bytes(engine), bytes_by_part(engine)
        engine.offload(keeps_weights=True)
        assert bytes_by_part(engine) == [by_part[0], 0, 0]
        engine.export()  # needs the weights alone
        assert bytes_by_part(engine) == [by_part[0], 0, 0]
        engine.offload()
        engine.offload()  # once more changes nothing
        out.append((before, device_bytes(engine)))
        had.append(by_part)

    apart = phases(engine, batch, between)
    together = phases(start(folder, layout, dtype, kind, groups=engine.groups), batch, lambda: None)
    assert all(map(min, (had[1], had[4]))), "after an update there are weights, states and gradients"
    return [torch.equal(a, b) for a, b in zip(apart, together, strict=True)], out


# Tensor and pipeline ranks, chunks, gradients of replicas, DDP's parameter buffers, float32 main parameters, and
# weights of which an update leaves other ranks' parts stale.
KINDS = {
    1: [("1", "bfloat16", PLAIN)],
    2: [
        ("tp2_sp", "float32", PLAIN),
        ("pp2_vpp2", "float32", PLAIN),
        ("dp2", "float32", DISTRIBUTED),
        ("dp2", "bfloat16", OVERLAPPED),
        *([("dp2", "bfloat16", DISTRIBUTED)] if IS_THOROUGH else []),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", KINDS)
def test_offloading_between_phases_changes_no_bit_and_empties_the_device(ranks, tmp_path):
    make_model("qwen3", tmp_path / "2", layers=2)
    make_model("qwen3", tmp_path / "4")
    cases = {str(kind): (tmp_path / ("4" if kind[0] == "pp2_vpp2" else "2"), *kind) for kind in KINDS[ranks]}
    for kind, found in run_each(ranks, offload_between_phases, cases).items():
        for same, out in found:
            assert same and all(same), kind
            assert len(out) == 6 and all(before > 0 and after == 0 for before, after in out), kind


def take_turns(folder, checkpoint):
    shared_device = SharedDevice()
    policy = start(folder, "tp2_sp", shared_device=shared_device)
    reference = start(folder, "tp2_sp", shared_device=shared_device, groups=policy.groups, trainable=False)
    batch = make_batch()
    there = []
    for _ in range(2):
        for engine in (policy, reference):
            engine.eval().forward(batch)
            there.append([device_bytes(e) > 0 for e in (policy, reference)])
        policy.train().train_batch(batch, user_loss, user_weight)
    reference.forward(batch)
    policy.save(checkpoint, with_optimizer=True)
    trained = [parameter.clone() for parameter in policy.parameters()]
    reference.copy_weights(policy)
    policy.train_batch(batch, user_loss, user_weight)
    reference.forward(batch)
    copied = [torch.equal(a, b) for a, b in zip(reference.parameters(), trained, strict=True)]
    policy.load(checkpoint, with_optimizer=True)
    loaded = [torch.equal(a, b) for a, b in zip(policy.parameters(), trained, strict=True)]
    return there, copied, loaded


@pytest.mark.slow
def test_engines_that_share_a_device_are_there_one_at_a_time(tmp_path):
    make_model("llama", tmp_path / "model", layers=2)
    for there, copied, loaded in run_ranks(2, take_turns, tmp_path / "model", tmp_path / "checkpoint"):
        assert there == [[True, False], [False, True]] * 2
        assert all(copied) and all(loaded)
