"""What a checkpoint takes of the host's memory: a copy of what a rank writes, and nothing of what others write."""

import ctypes
import re
from pathlib import Path

import pytest

from megatron_rl.config import ParallelConfig
from megatron_rl.engine.checkpoint import start_adam
from megatron_rl.tools.plan.memory import Model, checkpoint_bytes
from megatron_rl.weights.layout import parameters_of_stage
from tests.kit.models import make_engine, make_model
from tests.kit.ranks import run_each

FIXED_BYTES = 24e6
"""Of everything else that happens meanwhile: plans of what is written, modules, threads."""
# Replicas that share the writing, of a plain optimizer and of one whose parts they have; experts with fewer replicas;
# and stages, of which each has its own layers.
LAYOUTS = {
    "plain_dp2": ({}, ParallelConfig()),
    "distributed_dp2": ({"distributed": True}, ParallelConfig()),
    "distributed_ep2": ({"distributed": True}, ParallelConfig(expert=2)),
    "distributed_pp2": ({"distributed": True}, ParallelConfig(pipeline=2)),
}


def resident(kind):
    """Bytes of memory that this process has (VmRSS), or had at most since `forget_peak` (VmHWM)."""
    return int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def forget_peak():
    ctypes.CDLL(None).malloc_trim(0)  # else what was free before would be used again, and not count
    Path("/proc/self/clear_refs").write_text("5")


def saved(folder, target, options, layout):
    """Save twice; return by how much a rank's memory rose in each, what it wrote, and what the plan says of it."""
    engine = make_engine(folder, layout, **options)
    start_adam(engine.optimizer)
    rises = []
    for number in range(2):
        forget_peak()
        before = resident("VmRSS")
        engine.save_async(target / str(number), in_background=True)
        engine.finish_saves()
        rises.append(resident("VmHWM") - before)
    groups = engine.groups
    written = sum(path.stat().st_size for path in (target / "1").glob(f"__{groups.rank}_*"))
    shares = parameters_of_stage(engine.arch, layout, groups.pipeline.rank)
    return rises, written, checkpoint_bytes(Model("policy", engine.arch, engine.config), shares, groups.world_size)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    # Large beside what else a process does: 10 million parameters, of which most are experts'.
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 8}
    make_model("qwen3_moe", folder / "model", vocab_size=2048, num_hidden_layers=4, **sizes)

    return run_each(2, saved, {name: (folder / "model", folder / name, *case) for name, case in LAYOUTS.items()})


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_takes_one_copy_of_what_a_rank_writes_again_and_again_the_same(name, found):
    for rises, written, planned in found[name]:
        assert written == pytest.approx(planned, rel=0.01)
        assert max(rises) < 1.05 * written + FIXED_BYTES, (rises, written)
