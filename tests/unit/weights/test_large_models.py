"""Models of many gigabytes, in files without contents: that each file is opened once, and who reads which bytes."""

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import nn

from megatron_rl.config import load_config
from megatron_rl.parallel import Axis
from megatron_rl.tools.plan.plan_command import with_models
from megatron_rl.weights import hf_files, mapping, reshard, tensor_rules
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.layout import layers_of_stages
from megatron_rl.weights.mapping import hf_shapes, sizes, weight_source
from tests.kit.rehearsals import MODELS, few_layers

ROOT = Path(__file__).resolve().parents[3]
FILE_BYTES = 4 * 10**9
RANKS = {"math_qwen3_235b_a22b_16nodes": 64, "math_deepseek_v3_64nodes": 256, "math_llama3_70b_8nodes": 32}
"""How many train a config."""
WITH_ALL_LAYERS = [
    pytest.param(name, marks=() if "llama3" in name else pytest.mark.thorough)  # mixtures have 30,000 tensors
    for name in RANKS
]

pytestmark = pytest.mark.slow


def write_without_contents(model, folder):
    """Write a model's folder as it is published, with an index and files of a few GB, whose tensors are holes."""
    (folder / "config.json").write_text((MODELS / model / "config.json").read_text())
    files, size = [{}], 0
    for name, shape in hf_shapes(read_architecture(folder)).items():
        nbytes = 2 * torch.Size(shape).numel()
        if size + nbytes > FILE_BYTES:
            files, size = [*files, {}], 0
        files[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [size, size + nbytes]}
        size += nbytes
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    for path, header in zip(names, files, strict=True):
        written = json.dumps(header).encode()
        with (folder / path).open("wb") as file:
            file.write(len(written).to_bytes(8, "little") + written)
            file.truncate(8 + len(written) + max(end for _, end in (part["data_offsets"] for part in header.values())))
    of = {name: path for path, header in zip(names, files, strict=True) for name in header}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))
    return len(files)


class Ranks:
    """The layout of one rank of a world, as Megatron makes it: tensor ranks side by side, stages far apart."""

    def __init__(self, config, world, rank):
        layout = config.parallel
        of_stage = world // layout.pipeline
        stage, place = divmod(rank, of_stage)

        def axis(rank, size):
            return Axis(group=None, rank=rank, size=size)

        assert layout.context == layout.expert_tensor == 1
        self.tensor = axis(place % layout.tensor, layout.tensor)
        self.data_context = axis(place // layout.tensor, of_stage // layout.tensor)
        self.pipeline = axis(stage, layout.pipeline)
        self.expert_tensor = axis(0, 1)
        self.expert = axis(place % layout.expert, layout.expert)
        self.expert_data = axis(place // layout.expert, of_stage // layout.expert)


def shard_shape(rule, arch, split):
    words = sizes(arch)
    shapes = [tuple(words[word] for word in dims.split()) for dims in rule.hf.values()]
    rows = sum(shape[0] for shape in shapes)
    if isinstance(rule.layout, tensor_rules.Replicated):
        return shapes[0]
    if isinstance(rule.layout, tensor_rules.Columns):
        return shapes[0][0], shapes[0][1] // split
    return -(-rows // split), *shapes[0][1:]


def chunk_of(arch, config, groups):
    """What `load_shards` looks at of a model chunk: names and shapes of this rank's parameters, by layer."""
    numbers = list(itertools.chain(*layers_of_stages(arch, config.parallel, config.megatron)[groups.pipeline.rank]))
    embedding, norm, output = mapping.edges(arch)
    rules = [("", embedding)] if groups.pipeline.rank == 0 else []
    rules += [("", norm), ("", output)] if groups.pipeline.rank == groups.pipeline.size - 1 else []
    rules += [
        (f"decoder.layers.{n}.", rule) for n, number in enumerate(numbers) for rule in mapping.layer_rules(arch, number)
    ]
    found = []
    for prefix, rule in rules:
        is_expert = "{}" in rule.megatron
        shape = shard_shape(rule, arch, (groups.expert_tensor if is_expert else groups.tensor).size)
        experts = range(arch.mixture.experts // groups.expert.size) if is_expert else [None]
        for expert in experts:
            tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            found.append((prefix + rule.megatron.format(expert), nn.Parameter(tensor, requires_grad=False)))
    layers = [SimpleNamespace(layer_number=number + 1) for number in numbers]
    biases = [entry for entry in found if entry[0].endswith("expert_bias")]
    return SimpleNamespace(
        named_parameters=lambda: [entry for entry in found if entry not in biases],
        named_buffers=lambda: [(name, tensor.data) for name, tensor in biases],
        decoder=SimpleNamespace(layers=layers),
    )


class Counting:
    """Counts what is read, and reads nothing: tensors without memory take its place."""

    def __init__(self, shapes):
        self.shapes, self.parts = shapes, Counter()

    def read(self, name, dim, start, stop):
        self.parts[name, dim, start, stop] += 1
        shape = list(self.shapes[name])
        assert 0 <= start < stop <= shape[dim], (name, dim, start, stop)
        shape[dim] = stop - start
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def nbytes(self):
        return sum(
            2 * count * (torch.Size(self.shapes[name]).numel() // self.shapes[name][dim]) * (stop - start)
            for (name, dim, start, stop), count in self.parts.items()
        )


@pytest.fixture
def no_broadcast(monkeypatch):
    monkeypatch.setattr(reshard.dist, "broadcast", lambda *args, **kwargs: None)


def parts_and_bytes(name, words):
    """Let each rank load its shards; return the parts that were read and of which shapes, the layout, and by rank the
    bytes that it read."""
    config = load_config(ROOT / "configs" / f"{name}.yaml", words)
    arch = read_architecture(config.model.path)
    shapes, of_all, by_rank = hf_shapes(arch), Counter(), []
    for rank in range(RANKS[name]):
        groups, source = Ranks(config, RANKS[name], rank), Counting(shapes)
        reshard.load_shards([chunk_of(arch, config, groups)], source, arch, groups)
        of_all += source.parts
        by_rank.append(source.nbytes())
    return of_all, shapes, config.parallel, by_rank


@pytest.mark.parametrize("name", RANKS)
def test_all_ranks_together_read_each_byte_once(name, no_broadcast, tmp_path):
    of_all, shapes, layout, by_rank = parts_and_bytes(
        name, few_layers(ROOT / "configs" / f"{name}.yaml", tmp_path / "model")
    )
    # Each element is read: a tensor's parts cover it, side by side. What tensor ranks all hold whole, each reads whole.
    assert set(of_all.values()) <= {1, layout.tensor}
    parts = {tensor: list(keys) for tensor, keys in itertools.groupby(sorted(of_all), lambda key: key[0])}
    assert parts.keys() == shapes.keys()
    for tensor, keys in parts.items():
        ends = [stop for *_, stop in keys]
        assert len({dim for _, dim, _, _ in keys}) == 1 and [start for *_, start, _ in keys] == [0, *ends[:-1]]
        assert ends[-1] == shapes[tensor][keys[0][1]]
    total = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    assert total <= sum(by_rank) <= 1.01 * total


@pytest.mark.parametrize("name", WITH_ALL_LAYERS)
def test_each_rank_reads_as_much_as_the_others(name, no_broadcast):
    path = ROOT / "configs" / f"{name}.yaml"
    model = with_models(load_config(path), MODELS).model.path
    *_, by_rank = parts_and_bytes(name, [f"model.path={model}"])
    assert max(by_rank) <= 1.25 * sum(by_rank) / len(by_rank)


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["qwen3-235b-a22b", "deepseek-v3"])
def test_each_of_hundreds_of_files_is_opened_once(model, tmp_path, monkeypatch):
    count, opened = write_without_contents(model, tmp_path), Counter()

    def counted(path, **options):
        opened[path] += 1
        return safe_open(path, **options)

    monkeypatch.setattr(hf_files, "safe_open", counted)
    arch = read_architecture(tmp_path)
    source = weight_source(tmp_path, arch)  # each tensor's shape and dtype is compared
    assert count > 100 and len(source.file_of) == len(hf_shapes(arch)) > 30_000
    assert len(opened) == count and set(opened.values()) == {1}
    name = "model.layers.3.mlp.experts.5.gate_proj.weight"
    assert not source.read(name, 0, 8, 16).any() and source.read(name, 0, 8, 16).shape == (8, arch.hidden)
    (tmp_path / f"model-00007-of-{count:05}.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00007-of.*copy the model folder again"):
        weight_source(tmp_path, arch)
