"""What a plan says of memory, against real engines of tiny models on CPU."""

import pytest
import torch

from megatron_rl import parallel
from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss
from megatron_rl.config import EngineConfig, ModelConfig, OptimizerConfig
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.offload import tensors_of
from megatron_rl.tools.plan.activations import Activations
from megatron_rl.tools.plan.memory import Model, head_bytes, states_of_stage
from megatron_rl.types import FinetuneSpec
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import parameters_of_stage
from tests.megatron.ranks import run_ranks
from tests.megatron.tiny import LAYOUTS, make_batch, make_engine, make_model, share_of


def parameters_of_rank(folder, layouts):
    """{(layout, head): (stage, parameters)} of this rank."""
    found = {}
    for name in layouts:
        groups = parallel.start(LAYOUTS[name][1], seed=1)
        for head in ("policy", "value"):
            engine = make_engine(folder, LAYOUTS[name][1], groups=groups, head=head)
            found[name, head] = groups.pipeline.rank, sum(p.numel() for p in engine.parameters())
    return found


# Every family and every way to cut: a padded vocabulary, fewer key-value heads than ranks, a tied embedding's second
# copy, experts with a tensor axis of their own.
CASES = {
    "llama": ["tp2", "pp2_vpp2"],
    "llama_tied": ["tp2", "pp2"],
    "qwen2": ["tp2_sp"],
    "qwen3_tied_one_kv_head": ["tp2_sp", "pp2"],
    "gemma3": ["tp2_sp", "pp2_vpp2"],
    "qwen3_moe": ["ep2", "tp2_etp2", "tp2_ep2"],
    "mixtral": ["etp2", "pp2"],
    "deepseek_v3": ["tp2_sp", "ep2"],
    "deepseek_v3_yarn_whole_queries": ["tp2_ep2"],
}


@pytest.mark.parametrize("family", CASES)
def test_planned_parameters_are_an_engines_on_every_rank(family, tmp_path):
    make_model(family, tmp_path)
    arch = read_architecture(tmp_path)
    for found in run_ranks(2, parameters_of_rank, tmp_path, CASES[family]):
        assert len(found) == 2 * len(CASES[family])
        for (name, head), (stage, count) in found.items():
            planned = parameters_of_stage(arch.with_head(head), LAYOUTS[name][1], stage)
            assert planned.total == count, (name, head, stage)


def storage_bytes(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def started(config, megatron=None):
    engine = MegatronEngine(config, megatron=megatron)
    engine.initialize(None, FinetuneSpec(total_updates=2))
    engine.train()
    return engine


def state_bytes(config):
    """Bytes of weights and optimizer, of gradient buffers, and this rank's stage, after an update."""
    engine = started(config)
    engine.train_batch(share_of(make_batch(), engine), LogprobLoss(supervised))
    kept, gradients = tensors_of(engine)
    return engine.groups.pipeline.rank, storage_bytes(kept), storage_bytes(gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family,layout,distributed",
    [("qwen3", "1", False), ("llama_tied", "pp2", False), ("qwen3", "dp2", True), ("qwen3_moe", "ep2", True)],
)
def test_planned_states_are_an_engines(family, layout, distributed, dtype, tmp_path):
    make_model(family, tmp_path)
    world_size, parallel = LAYOUTS[layout]
    config = EngineConfig(
        model=ModelConfig(path=str(tmp_path), dtype=dtype),
        parallel=parallel,
        optimizer=OptimizerConfig(distributed=distributed),
    )
    model = Model("policy", read_architecture(tmp_path), config)
    for stage, kept, gradients in run_ranks(world_size, state_bytes, config):
        planned = states_of_stage(model, stage, world_size)
        # Adam's step counters, and what upstream pads buffers with to divide them over ranks.
        padding = 1.02 if distributed else 1.001
        assert planned["gradients"] <= gradients <= planned["gradients"] * padding
        both = planned["weights"] + planned["optimizer"]
        assert both <= kept <= both * padding


class Kept:
    """A tensor that autograd keeps, and the bytes of the storages that are kept at one time."""

    def __init__(self, tensor, live):
        self.tensor, self.live, self.key = tensor, live, tensor.untyped_storage().data_ptr()
        live.add(self.key, tensor.untyped_storage().nbytes())

    def __del__(self):
        self.live.remove(self.key)


class Live:
    def __init__(self):
        self.owners, self.sizes, self.peak = {}, {}, 0

    def add(self, key, size):
        self.owners[key] = self.owners.get(key, 0) + 1
        self.sizes[key] = size
        self.peak = max(self.peak, sum(self.sizes.values()))

    def remove(self, key):
        self.owners[key] -= 1
        if not self.owners[key]:
            del self.owners[key], self.sizes[key]


def kept_bytes(config, megatron, lengths):
    """Most bytes that autograd keeps at one time on this rank in an update of one sequence to a microbatch."""
    engine, live = started(config, megatron), Live()
    own = {p.untyped_storage().data_ptr() for p in engine.parameters()}

    def pack(tensor):
        return tensor if tensor.untyped_storage().data_ptr() in own else Kept(tensor, live)

    def unpack(kept):
        return kept.tensor if isinstance(kept, Kept) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        engine.train_batch(make_batch(lengths=lengths), LogprobLoss(supervised, by_row=True))
    return engine.groups.pipeline.rank, live.peak


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = FULL | {"recompute_method": "block", "recompute_num_layers": 2}
LARGER = {"hidden_size": 128, "intermediate_size": 320}


# The tolerance is what row numbers and scores take, which are left out; experts' loads are uneven in mixtures.
@pytest.mark.parametrize(
    "family,changes,layout,dtype,megatron,tolerance",
    [
        ("llama", {}, "1", "float32", {}, 0.005),
        ("llama", LARGER, "1", "float32", {}, 0.005),
        ("qwen3", {}, "1", "bfloat16", {}, 0.005),
        ("qwen3", LARGER, "tp2_sp", "bfloat16", {}, 0.005),
        ("qwen3", {}, "tp2", "bfloat16", {"recompute_granularity": "selective"}, 0.005),
        ("qwen3", {}, "pp2", "bfloat16", {}, 0.005),
        ("qwen3", {}, "pp2_vpp2", "bfloat16", {}, 0.005),
        ("llama", {}, "1", "float32", FULL, 0.005),
        ("llama", LARGER, "pp2", "bfloat16", BLOCK, 0.005),
        ("llama", LARGER, "1", "bfloat16", {"bias_activation_fusion": True}, 0.005),
        ("qwen3_moe", {}, "tp2_ep2", "bfloat16", {}, 0.03),
        # Values as wide as keys: with others torch's attention for CPUs keeps all scores.
        ("deepseek_v3", {"v_head_dim": 24}, "1", "float32", {}, 0.03),
    ],
)
def test_planned_activations_are_what_autograd_keeps(family, changes, layout, dtype, megatron, tolerance, tmp_path):
    make_model(family, tmp_path, **changes)
    world_size, parallel = LAYOUTS[layout]
    lengths = (100,) * 4
    config = EngineConfig(
        model=ModelConfig(path=str(tmp_path), dtype=dtype), parallel=parallel, tokens_per_microbatch=100
    )
    model = Model("policy", read_architecture(tmp_path), config)
    for stage, peak in run_ranks(world_size, kept_bytes, config, megatron, lengths):
        rows = 99  # the last predicts nothing
        activations = Activations(model.arch, config, megatron, uses_kernel=False)
        kept, formed_again = activations.of_stage(stage, rows, len(lengths))
        if stage == parallel.pipeline - 1:
            kept += head_bytes(model, 67)[0]  # two thirds of the tokens are trained
        assert max(kept, formed_again) == pytest.approx(peak, rel=tolerance)
