"""Low-rank adapters (LoRA): which matrices have them, their names, shards and initial values, and PEFT's files.

An adapter adds `scale * lora_B @ lora_A` to a matrix. HF files have one adapter per projection. In Megatron, a fused
matrix (QKV, or gate and up) has one adapter. Its lora_B has as many rows as the matrix, and its lora_A consists of the
lora_A of the projections, stacked by rows. So lora_B is sharded as the matrix's rows are, and lora_A as its columns.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.adapter_sums import check_sums, sum_of
from megatron_rl.config import LoraConfig, ModelConfig
from megatron_rl.weights.architecture import read_architecture
from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.hf_files import ADAPTER_FILE, HFFolder, generator_for
from megatron_rl.weights.mapping import hf_shapes, layer_rules
from megatron_rl.weights.peft_config import FILE, PEFT_PREFIX, PeftConfig, read_peft_config
from megatron_rl.weights.tensor_rules import Columns, Replicated, Rule, Shape, WeightSource

MODULE = "_lora"
"""Suffix that turns a matrix's Megatron name into the name of its adapter module, which is in the same layer."""
_MATRIX = re.compile(r".*\.(linear_[a-z0-9_]+|in_proj|out_proj)\.weight")
_PARAMETER = re.compile(rf"(.+){MODULE}\.(lora_[AB])")
_NUMBERS = re.compile(r"\.(\d+|\{\})(?=\.)")


class Stacked(Replicated):
    """Layout of a fused matrix's lora_A: the lora_A of its projections are stacked by rows.

    Every tensor-parallel rank holds all of them.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def load(self, source, names, shape, rank, size, arch):
        rows = shape[0] // len(names)
        return torch.cat([source.read(name, 0, 0, rows) for name in names])

    def export(self, shards: list[Tensor], arch: Architecture) -> list[Tensor]:
        return list(shards[0].chunk(self.count))


def is_adapter(name: str) -> bool:
    """Return True if `name` is that of an adapter parameter, in Megatron or in HF files."""
    return ".lora_" in name


def matrix_of(name: str) -> tuple[str, str]:
    """Return the Megatron name of the matrix to which an adapter parameter belongs, and `lora_A` or `lora_B`.

    name: the adapter parameter's Megatron name.
    """
    match = _PARAMETER.fullmatch(name)
    assert match, name
    return f"{match[1]}.weight", match[2]


def projections(arch: Architecture) -> list[str]:
    """Return the names of the projections that can have adapters, such as `self_attn.q_proj`.

    The names contain no layer or expert numbers.
    """
    rules = (rule for number in range(arch.layers) for rule in layer_rules(arch, number))
    everything = LoraConfig(rank=1)
    names = (_general(name) for rule in rules for name in adapted(rule, everything))
    return list(dict.fromkeys(names))


def _general(name: str) -> str:
    return _NUMBERS.sub("", name).removesuffix(".weight")


def adapted(rule: Rule, lora: LoraConfig) -> list[str]:
    """Return the names of the HF matrices of a rule that have an adapter.

    As in PEFT, experts stacked in one tensor have no adapter.
    """
    if rule.is_stacked or not _MATRIX.fullmatch(f".{rule.megatron}"):
        return []
    return [name for name in rule.hf if _is_target(_general(name), lora)]


def _is_target(general: str, lora: LoraConfig) -> bool:
    ends = f".{general}"
    return not lora.targets or any(ends.endswith(f".{target}") for target in lora.targets)


def check_adapters(arch: Architecture, lora: LoraConfig, model: ModelConfig) -> None:
    """Raise ValueError if the model lacks one of `lora.targets`, or if its settings do not allow adapters."""
    known = projections(arch)
    for target in lora.targets:
        if not any(f".{name}".endswith(f".{target}") for name in known):
            short = sorted({name.rpartition(".")[2] for name in known})
            raise ValueError(
                f"lora.targets = {lora.targets}: {target!r} is no projection of {arch.family}, which has "
                f"{', '.join(short)}; name some of these, or leave it out for all."
            )
    if arch.head == "value":
        raise ValueError(
            f"lora.rank = {lora.rank}: a value head starts at zero and is trained with its whole model; leave the "
            f"section out for critics and reward models."
        )
    if model.init == "random":
        raise ValueError(
            f"model.init = 'random': lora.rank = {lora.rank} would leave those weights as they were drawn; take a "
            f"model's own, or leave the section lora out."
        )
    if model.transformer_impl == "transformer_engine":
        raise ValueError(
            f"model.transformer_impl = 'transformer_engine': lora.rank = {lora.rank} adapts megatron.core's local "
            f"layers, as Transformer Engine's fuse norms and experts into their matrices; set it to auto or local."
        )


def adapted_experts(arch: Architecture, lora: LoraConfig) -> list[str]:
    """Return the names, in the form that `projections` returns, of the routed experts' projections with an adapter."""
    return [name for name in projections(arch) if ".experts." in name and _is_target(name, lora)]


def adapter_rule(rule: Rule, part: str, lora: LoraConfig) -> Rule:
    """Return the rule for one part, `lora_A` or `lora_B`, of a matrix's adapter. rule: the matrix's own rule.

    The lora_B of a fused matrix has the rows of all its projections. Rows of projections without an adapter stay zero.
    """
    names = adapted(rule, lora) if part == "lora_A" else list(rule.hf)
    is_cut_by_columns = isinstance(rule.layout, Columns)
    layout: Any = Replicated()
    if part == "lora_A" and not isinstance(rule.layout, Replicated):
        layout = Columns() if is_cut_by_columns else Stacked(len(names))
    elif part == "lora_B" and not is_cut_by_columns:
        layout = rule.layout
    hf = {_adapter_name(name, part): "" for name in names}
    return replace(rule, megatron=rule.megatron.removesuffix(".weight") + f"{MODULE}.{part}", hf=hf, layout=layout)


def _adapter_name(name: str, part: str) -> str:
    return f"{name.removesuffix('.weight')}.{part}.weight"


def adapter_shapes(arch: Architecture, lora: LoraConfig) -> dict[str, Shape]:
    """Return {name: shape} of all adapter tensors in HF files. The names lack PEFT's prefix."""
    known, shapes = set(projections(arch)), {}
    for name, (rows, *columns) in hf_shapes(arch).items():
        general = _general(name).removeprefix("model.layers.")
        if general in known and _is_target(general, lora):
            shapes[_adapter_name(name, "lora_A")] = (lora.rank, *columns)
            shapes[_adapter_name(name, "lora_B")] = (rows, lora.rank)
    return shapes


class FirstAdapters:
    """Initial adapters as in PEFT: lora_A is uniform in +-1/sqrt(columns), and lora_B is zero.

    A tensor depends only on its name and the seed, so every parallel layout starts from the same adapters.
    """

    def __init__(self, arch: Architecture, lora: LoraConfig, seed: int) -> None:
        self.shapes, self.seed, self.rank = adapter_shapes(arch, lora), seed, lora.rank

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        if name.endswith("lora_B.weight"):
            return torch.zeros(stop - start, self.rank)
        bound = 1 / math.sqrt(self.shapes[name][1])
        full = torch.empty(self.shapes[name]).uniform_(-bound, bound, generator=generator_for(name, self.seed))
        return full.narrow(dim, start, stop - start)


class PeftFolder:
    """The adapters in a folder in PEFT's format.

    The constructor raises ValueError if the adapters' rank, scale or targets differ from those in `lora`.
    """

    def __init__(self, folder: str | Path, arch: Architecture, lora: LoraConfig) -> None:
        found, self.source = read_peft_config(folder), HFFolder(folder, {}, file=ADAPTER_FILE)
        for module in found.modules((name, self.source.shape(name)[0]) for name in self.source.file_of):
            _check_scale(found, module, lora)
        self.shapes, self.rank = adapter_shapes(arch, lora), lora.rank
        for name, shape in self.shapes.items():
            named = PEFT_PREFIX + name
            if named not in self.source.file_of:
                raise ValueError(
                    f"lora.path: {folder} has no tensor {named}, which lora.targets asks for; leave its projection out "
                    f"there, or give the adapters of this model."
                )
            if (own := self.source.shape(named)) != shape:
                raise ValueError(
                    f"lora.path: {named} of {folder} has shape {own}, but the model needs {shape}; give the adapters "
                    f"of this model."
                )
            self.source.dtype(named)  # refuses integers and the like
        extra = {name for name in self.source.file_of if name.removeprefix(PEFT_PREFIX) not in self.shapes}
        if extra:
            raise ValueError(
                f"lora.targets = {lora.targets}: {folder} has {len(extra)} tensors of other matrices, such as "
                f"{min(extra)}; name their projections too."
            )

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        if name not in self.shapes:  # a projection of a fused matrix, without an adapter
            return torch.zeros(stop - start, self.rank)
        return self.source.read(PEFT_PREFIX + name, dim, start, stop)


def _check_scale(found: PeftConfig, module: str, lora: LoraConfig) -> None:
    rank, scale = found.rank_of(module), found.scale_of(module)
    if rank != lora.rank:
        by = "r" if rank == found.said.get("r", 8) else "rank_pattern"
        raise ValueError(
            f"lora.rank = {lora.rank}: {found.path} has {by} = {rank} for {module}; give the same value, which is one "
            f"for all adapters of a run."
        )
    if not math.isclose(scale, lora.alpha / lora.rank, rel_tol=1e-6):
        by = "lora_alpha" if found.alpha_of(module) == found.said.get("lora_alpha", 8) else "alpha_pattern"
        divided = "divided by the root of r (use_rslora)" if found.said.get("use_rslora") else "divided by r"
        raise ValueError(
            f"lora.alpha = {lora.alpha}: {found.path} has {by} = {found.alpha_of(module):g} for {module}, {divided}; "
            f"give {scale * rank:g}, which is one value for all adapters of a run."
        )


def merged_matrices(
    model_folder: str | Path, adapter_folder: str | Path, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each matrix that has an adapter in a PEFT folder, with the adapter merged into it.

    The merged matrix is in `dtype` and is computed as in `Adapter.merged`. Raises ValueError, before the first matrix,
    if an adapter does not fit the model or was changed since its publication.
    """
    config, adapters = read_peft_config(adapter_folder), HFFolder(adapter_folder, {}, file=ADAPTER_FILE)
    modules = config.modules((name, adapters.shape(name)[0]) for name in adapters.file_of)
    check_sums(adapter_folder, {name: sum_of(adapters.read(name, 0, 0, None)) for name in adapters.file_of})
    shapes = hf_shapes(read_architecture(model_folder))
    names = {f"{module}.weight": module for module in modules}
    if unknown := names.keys() - shapes.keys():
        raise ValueError(f"{adapter_folder}: adapts {min(unknown)}, which {model_folder} has not.")
    for name, module in names.items():
        (rows, *columns), rank = shapes[name], config.rank_of(module)
        for part, wanted in (("lora_A", (rank, *columns)), ("lora_B", (rows, rank))):
            found = adapters.shape(f"{PEFT_PREFIX}{module}.{part}.weight")
            if found != wanted:
                raise ValueError(
                    f"{adapter_folder}: {module}.{part}.weight has shape {found}, but {name} of {model_folder} needs "
                    f"{wanted}; give the adapter of this model."
                )
    for name, weight in plain_matrices(model_folder, names):
        parts = (f"{PEFT_PREFIX}{names[name]}.{part}.weight" for part in ("lora_A", "lora_B"))
        down, up = (adapters.read(part, 0, 0, None).float() for part in parts)
        merged = torch.add(weight.to(dtype).float(), up @ down, alpha=config.scale_of(names[name]))
        yield name, merged.to(dtype)


def plain_matrices(model_folder: str | Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    shapes = hf_shapes(read_architecture(model_folder))
    model = HFFolder(model_folder, shapes)
    return ((name, model.read(name, 0, 0, shapes[name][0])) for name in names)


def is_peft_folder(path: str | Path) -> bool:
    return (Path(path) / FILE).is_file()


def adapter_source(arch: Architecture, lora: LoraConfig, *, seed: int) -> WeightSource:
    """Return a run's initial adapters: those in the folder `lora.path`, or if it is empty, FirstAdapters."""
    if not lora.path:
        return FirstAdapters(arch, lora, seed)
    if not is_peft_folder(lora.path):
        raise ValueError(
            f"lora.path = {lora.path!r}: no adapter_config.json there; give a folder in PEFT's format, such as the "
            f"folder adapter in what a run with lora.rank has saved."
        )
    return PeftFolder(lora.path, arch, lora)


def last_parts(arch: Architecture, lora: LoraConfig) -> list[str]:
    """Return the last components, such as `q_proj`, of the names of the projections that have adapters."""
    return sorted({name.rpartition(".")[2] for name in projections(arch) if _is_target(name, lora)})


def peft_config(arch: Architecture, lora: LoraConfig, model_folder: str | Path) -> dict[str, Any]:
    """Return the content of adapter_config.json for the run's adapters. model_folder: the base model."""
    known, ends = projections(arch), last_parts(arch, lora)
    chosen = [name for name in known if _is_target(name, lora)]
    # PEFT adapts every module whose name ends with a target. If that is too many, give a pattern of whole names.
    targets: Any = ends
    if any(name.rpartition(".")[2] in ends and name not in chosen for name in known):
        whole = (re.escape(name).replace(r"experts\.", r"experts\.([0-9]+\.)?") for name in chosen)
        targets = rf".*\.({'|'.join(whole)})"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_folder),
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
    }


def write_peft_folder(
    folder: str | Path, tensors: dict[str, Tensor], arch: Architecture, lora: LoraConfig, model_folder: str | Path
) -> None:
    """Write adapters to `folder` in PEFT's format. Raises OSError if a file cannot be written.

    tensors: {HF name without PEFT's prefix: tensor}. model_folder: the base model.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = {PEFT_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / ADAPTER_FILE, metadata={"format": "pt"})
    (folder / ADAPTER_FILE).chmod(0o644)
    config = peft_config(arch, lora, Path(model_folder).absolute())
    (folder / FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
