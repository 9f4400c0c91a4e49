"""What a plan says of memory, against real engines of tiny models on CPU."""

import functools

import pytest
import torch

from megatron_rl.algo.loss import supervised
from megatron_rl.api import LogprobLoss
from megatron_rl.config import DraftConfig, EngineConfig, ModelConfig, OptimizerConfig
from megatron_rl.engine.delta_rule import Chunks
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.engine.offload import tensors_of
from megatron_rl.tools.plan.activations import Activations
from megatron_rl.tools.plan.draft_costs import draft_parameters, draft_state_bytes
from megatron_rl.tools.plan.memory import Model, head_bytes, states_of_stage
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import parameters_of_stage
from tests.kit.examples import IS_THOROUGH
from tests.kit.models import LAYOUTS, make_batch, make_engine, make_model, share_of, start
from tests.kit.mtp import add_mtp_layer
from tests.kit.ranks import run_each


def heads_of(name, layouts):
    """Return the heads to try in a layout: a value head only if there are stages, or if it is the family's first."""
    has_value = name == layouts[0] or LAYOUTS[name][1].pipeline > 1
    return ("policy", "value") if has_value else ("policy",)


def parameters_of_rank(folder, layouts):
    """{(layout, head): (stage, parameters)} of this rank."""
    found = {}
    for name in layouts:
        for head in heads_of(name, layouts):
            engine = make_engine(folder, LAYOUTS[name][1], head=head)
            found[name, head] = engine.groups.pipeline.rank, sum(p.numel() for p in engine.parameters())
    return found


# Every family and every way to cut: a padded vocabulary, fewer key-value heads than ranks, a tied embedding's second
# copy, experts with a tensor axis of their own.
CHUNKS = ["pp2_vpp2"] if IS_THOROUGH else []
CASES = {
    "llama": ["tp2", "pp2_vpp2"],
    "llama_tied": ["tp2", "pp2"],
    "qwen2": ["tp2_sp"],
    "qwen3_tied_one_kv_head": ["tp2_sp", "pp2"],
    "gemma3": ["tp2_sp", *CHUNKS],
    "qwen3_moe": ["ep2", "tp2_etp2", "tp2_ep2"],
    "mixtral": ["etp2", "pp2"],
    "deepseek_v3": ["tp2_sp", "ep2"],
    "qwen3_next": ["tp2_sp", *CHUNKS, "ep2"],
    "deepseek_v3_yarn_whole_queries": ["tp2_ep2"],
    "gpt_oss": ["ep2"],
}


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """By family: its folder, and what each rank has."""
    folders = {family: tmp_path_factory.mktemp(family) for family in CASES}
    for family, folder in folders.items():
        make_model(family, folder, layers=4 if "pp2_vpp2" in CASES[family] else 2)
    found = run_each(2, parameters_of_rank, {family: (folders[family], CASES[family]) for family in CASES})
    return {family: (folders[family], found[family]) for family in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_planned_parameters_are_an_engines_on_every_rank(family, parameters):
    folder, ranks = parameters[family]
    arch = read_architecture(folder)
    for found in ranks:
        assert len(found) > len(CASES[family])
        for (name, head), (stage, count) in found.items():
            planned = parameters_of_stage(arch.with_head(head), LAYOUTS[name][1], stage)
            assert planned.total == count, (name, head, stage)


def storage_bytes(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def started(config, megatron=None):
    return start(MegatronEngine(config, megatron=megatron)).train()


def state_bytes(config):
    """Bytes of weights and optimizer, of gradient buffers, and this rank's stage, after an update."""
    engine = started(config)
    engine.train_batch(share_of(make_batch(), engine), LogprobLoss(supervised))
    weights, states, gradients = tensors_of(engine)
    return engine.groups.pipeline.rank, storage_bytes(weights + states), storage_bytes(gradients)


STATES = [
    (family, layout, distributed, dtype)
    for dtype in ("float32", "bfloat16")
    for family, layout, distributed in (
        *(("qwen3", "1", False), ("llama_tied", "pp2", False), ("qwen3", "dp2", True)),
        ("qwen3_moe", "ep2", True),
    )
]


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """By case: its config, and what each rank holds."""
    configs = {}
    for family, layout, distributed, dtype in STATES:
        folder = tmp_path_factory.mktemp(family)
        make_model(family, folder, layers=2)
        configs[family, layout, distributed, dtype] = EngineConfig(
            model=ModelConfig(path=str(folder), dtype=dtype),
            parallel=LAYOUTS[layout][1],
            optimizer=OptimizerConfig(distributed=distributed),
        )
    return in_their_worlds(state_bytes, {case: (config,) for case, config in configs.items()})


def in_their_worlds(function, cases):
    """Run the cases, whose names have their layout second, in one world of each size; by case, its config and ranks."""
    found = {}
    for size in {LAYOUTS[layout][0] for _, layout, *_ in cases}:
        found |= run_each(size, function, {c: given for c, given in cases.items() if LAYOUTS[c[1]][0] == size})
    return {case: (cases[case][0], ranks) for case, ranks in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", STATES, ids=lambda case: "-".join(map(str, case)))
def test_planned_states_are_an_engines(case, states):
    (_, layout, distributed, _), (config, ranks) = case, states[case]
    model = Model("policy", read_architecture(config.model.path), config)
    for stage, kept, gradients in ranks:
        planned = states_of_stage(model, stage, LAYOUTS[layout][0])
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
        self.owners, self.sizes, self.total, self.peak = {}, {}, 0, 0

    def add(self, key, size):
        self.owners[key] = self.owners.get(key, 0) + 1
        self.total += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.total)

    def remove(self, key):
        self.owners[key] -= 1
        if not self.owners[key]:
            self.total -= self.sizes.pop(key)
            del self.owners[key]


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
QUICK = [
    # (family, changes, layout, dtype, megatron, tolerance)
    ("llama", {}, "1", "float32", {}, 0.005),
    ("qwen3", LARGER, "tp2_sp", "bfloat16", {}, 0.005),
    ("llama", LARGER, "pp2", "bfloat16", BLOCK, 0.005),
    ("qwen3_moe", {}, "tp2_ep2", "bfloat16", {}, 0.03),
    # Values as wide as keys: with others torch's attention for CPUs keeps all scores.
    ("deepseek_v3", {"v_head_dim": 24}, "1", "float32", {"recompute_granularity": "selective"}, 0.03),
    ("qwen3_5", {}, "1", "float32", {}, 0.02),
    ("qwen3_next", {}, "1", "float32", {}, 0.03),
    # Without what torch's attention for CPUs keeps of sinks.
    ("gpt_oss", {}, "tp2_sp", "bfloat16", {"recompute_granularity": "selective"}, 0.03),
]
"""Each kind of layer and most options that keep something of their own; on ranks, in the dtype of half the bytes."""
THOROUGH = [
    ("qwen3", {}, "tp2", "bfloat16", {"recompute_granularity": "selective"}, 0.005),
    ("llama", {}, "1", "float32", FULL, 0.005),
    ("qwen3_5", {}, "tp2_sp", "bfloat16", {}, 0.02),
    ("llama", LARGER, "1", "bfloat16", {"bias_activation_fusion": True}, 0.005),
    ("qwen3", {}, "pp2_vpp2", "bfloat16", {}, 0.005),
    ("llama", LARGER, "1", "float32", {}, 0.005),
    ("qwen3", {}, "1", "bfloat16", {}, 0.005),
    ("qwen3", {}, "pp2", "bfloat16", {}, 0.005),
    ("deepseek_v3", {"v_head_dim": 24}, "1", "float32", {}, 0.03),
    ("qwen3_5", {}, "1", "bfloat16", {}, 0.02),
    ("qwen3_5", {}, "tp2_sp", "float32", {}, 0.02),
    ("gpt_oss", {}, "1", "float32", {"recompute_granularity": "selective"}, 0.03),
]
ACTIVATIONS = QUICK + THOROUGH
LENGTHS = {False: (100,) * 2, True: (100,) * 4}
"""Lengths of the sequences, by whether the layout has stages: these keep several microbatches at a time."""


@pytest.fixture(scope="module")
def activations_kept(tmp_path_factory):
    """A function: number of the case -> its config, and what each rank keeps."""

    @functools.cache
    def kept(is_quick):
        cases = {}
        for number, (family, changes, layout, dtype, megatron, _) in enumerate(ACTIVATIONS):
            if (number < len(QUICK)) == is_quick:
                folder = tmp_path_factory.mktemp(family)
                # Loads of experts are more even over several layers.
                is_short = is_quick and megatron is not BLOCK and family != "qwen3_moe"
                make_model(family, folder, layers=2 if is_short else 4, **changes)
                model = ModelConfig(path=str(folder), dtype=dtype)
                config = EngineConfig(model=model, parallel=LAYOUTS[layout][1], tokens_per_microbatch=100)
                cases[number, layout] = config, megatron, LENGTHS[config.parallel.pipeline > 1]
        return {number: found for (number, _), found in in_their_worlds(kept_bytes, cases).items()}

    return lambda number: kept(number < len(QUICK))[number]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n < len(QUICK) else pytest.mark.thorough) for n in range(len(ACTIVATIONS))],
    ids=lambda n: "-".join(map(str, ACTIVATIONS[n])),
)
def test_planned_activations_are_what_autograd_keeps(number, activations_kept):
    *_, megatron, tolerance = ACTIVATIONS[number]
    config, ranks = activations_kept(number)
    count = len(LENGTHS[config.parallel.pipeline > 1])
    model = Model("policy", read_architecture(config.model.path), config)
    for stage, peak in ranks:
        rows = 99  # the last predicts nothing
        activations = Activations(model.arch, config, megatron, uses_kernel=False)
        kept, formed_again = activations.of_stage(stage, rows, count)
        if stage == config.parallel.pipeline - 1:
            kept += head_bytes(model, 67)[0]  # two thirds of the tokens are trained
        if model.arch.delta_net is None:  # what is formed again in these goes past autograd's hooks
            kept = max(kept, formed_again)
        assert kept == pytest.approx(peak, rel=tolerance)


def inside_delta_net(folder, dtype, rows):
    """Bytes that a delta net of the first layer keeps between its matrices, were they not formed again."""
    config = EngineConfig(model=ModelConfig(path=str(folder), dtype=dtype))
    net, live = started(config).chunks[0].decoder.layers[0].self_attention, Live()
    projected = torch.randn(
        rows, 1, net.linear_in.weight.shape[0], dtype=net.linear_in.weight.dtype, requires_grad=True
    )
    chunks = Chunks.of(torch.tensor([[0, rows, -1, 0]]))
    own = {x.untyped_storage().data_ptr() for x in (*net.parameters(), projected)}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor if tensor.untyped_storage().data_ptr() in own else Kept(tensor, live),
        lambda kept: kept,
    ):
        mixed = net._mix(projected, chunks)
    del mixed
    return config, live.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_bytes_inside_a_delta_net_are_what_autograd_would_keep(dtype, tmp_path):
    make_model("qwen3_5", tmp_path)
    ((config, peak),) = run_each(1, inside_delta_net, {dtype: (tmp_path, dtype, 256)})[dtype]
    planned = 256 * Activations(read_architecture(tmp_path), config).inside_delta_net()
    assert planned == pytest.approx(peak, rel=0.01)


def draft_of_rank(folder, layout, kind, dtype):
    """This rank's stage, the parameters of its draft head, and the bytes of its weights and optimizer."""
    engine = make_engine(folder, LAYOUTS[layout][1], draft=DraftConfig(kind=kind), dtype=dtype)
    engine.train().train_batch(share_of(make_batch(), engine), LogprobLoss(supervised))
    weights, states = engine.draft.movable()
    own = list(engine.draft.weights.values())
    held = {id(tensor): tensor for tensor in (*weights, *states)}.values()
    nbytes = storage_bytes([tensor for tensor in held if tensor.ndim])  # without step counts
    if engine._far_embedding is not None:
        nbytes += storage_bytes([engine._far_embedding])
    gradients = 4 * sum(weight.numel() for weight in own)
    return engine.groups.pipeline.rank, sum(weight.numel() for weight in own), nbytes + gradients


DRAFTS = [
    ("qwen3", "pp2", "eagle", "bfloat16"),
    ("glm4_moe", "tp2_ep2", "mtp", "bfloat16"),
    ("qwen3_5", "pp2", "mtp", "float32"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAFTS, ids=lambda case: "-".join(case))
def test_planned_parameters_and_states_of_a_draft_head_are_an_engines(case, tmp_path):
    family, layout, kind, dtype = case
    make_model(family, tmp_path, layers=2)
    if kind == "mtp":
        add_mtp_layer(tmp_path)
    arch = read_architecture(tmp_path)
    config = EngineConfig(
        model=ModelConfig(path=str(tmp_path), dtype=dtype), parallel=LAYOUTS[layout][1], draft=DraftConfig(kind=kind)
    )
    for stage, count, nbytes in run_each(2, draft_of_rank, {0: (tmp_path, layout, kind, dtype)})[0]:
        assert draft_parameters(arch, config, stage).total == count
        planned = draft_state_bytes(arch, config, stage, 2 if dtype == "bfloat16" else 4)
        assert planned == pytest.approx(nbytes, rel=0.01)  # storages are padded
        assert states_of_stage(Model("policy", arch, config), stage, 2).get("draft head", 0.0) == planned
