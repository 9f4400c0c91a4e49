"""Read and check PEFT's adapter_config.json. Each key is applied as in PEFT, refused, or known to have no effect."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.weights.json_files import read_object

FILE = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
"""Prefix of every tensor name in PEFT's files."""
REMEDY = "merge the adapter into its model by PEFT (merge_and_unload), and give the merged folder as model.path"
SAYS_NOTHING = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",  # how lora_A was drawn
        "inference_mode",
        "lora_dropout",  # affects training only
        "megatron_core",  # a package name, used with megatron_config
        "peft_version",
        "qalora_group_size",  # used with use_qalora, which is refused
        "revision",
        "runtime_config",
    }
)
"""Keys that have no effect on what the adapters compute."""
MUST_BE_OFF = {
    "alora_invocation_tokens": "the adapter counts after these tokens alone",
    "arrow_config": "several adapters are mixed",
    "corda_config": "the adapter belongs to other base weights than the model's",
    "ensure_weight_tying": "tied modules are trained besides the matrices",
    "fan_in_fan_out": "the matrices are transposed",
    "kasa_config": "adapters have singular values of their own",
    "layer_replication": "the model has more layers than its folder",
    "loftq_config": "the adapter belongs to other base weights than the model's",
    "lora_bias": "lora_B has a bias",
    "lora_ga_config": "the adapter belongs to other base weights than the model's",
    "megatron_config": "the adapted model is one of Megatron-Core",
    "modules_to_save": "whole modules are trained besides the matrices",
    "monteclora_config": "the adapter's weights are drawn at random",
    "target_parameters": "parameters are adapted that are no matrix of a module",
    "trainable_token_indices": "rows of the embedding are trained besides the matrices",
    "use_bdlora": "the adapters are block-diagonal",
    "use_dora": "each adapted row has a magnitude of its own",
    "use_qalora": "inputs are pooled in groups",
    "velora_config": "inputs are compressed",
}
"""{key that must be null, false or empty: why other values are refused, for the error message}."""
FIRST_VALUES = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base weights unchanged."""
_TENSOR = re.compile(rf"{re.escape(PEFT_PREFIX)}(.+)\.(lora_[AB])\.weight")


@dataclass(frozen=True)
class PeftConfig:
    """A checked adapter_config.json."""

    path: Path
    said: dict[str, Any]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter. module: a name such as `model.layers.0.self_attn.q_proj`."""
        return int(self._by_pattern("rank_pattern", module, self.said.get("r", 8)))

    def alpha_of(self, module: str) -> float:
        return float(self._by_pattern("alpha_pattern", module, self.said.get("lora_alpha", 8)))

    def scale_of(self, module: str) -> float:
        """Return the factor by which `lora_B @ lora_A` of a module's adapter is multiplied."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.said.get("use_rslora") else rank)

    def adapts(self, module: str) -> bool:
        """Return True if PEFT would give the module an adapter."""
        if _is_named(self.said.get("exclude_modules") or [], module):
            return False
        targets = self.said.get("target_modules")
        if targets is None or targets == "all-linear":  # PEFT chooses by model class, so trust the tensors
            return True
        if isinstance(targets, str) or module in targets:
            return _is_named(targets, module)
        return _is_named(targets, module) and self._is_in_chosen_layer(module)

    def _is_in_chosen_layer(self, module: str) -> bool:
        chosen, names = self.said.get("layers_to_transform"), self.said.get("layers_pattern") or [r"[^.]*"]
        if chosen is None or chosen == []:
            return True
        patterns = [names] if isinstance(names, str) else names
        starts = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module) for pattern in patterns)
        layer = next((int(start[1]) for start in starts if start), None)
        return layer in ([chosen] if isinstance(chosen, int) else chosen)

    def _by_pattern(self, key: str, module: str, default: Any) -> Any:
        patterns = self.said.get(key) or {}
        return next((value for name, value in patterns.items() if re.match(rf"(.*\.)?({name})$", module)), default)

    def modules(self, ranks: Iterable[tuple[str, int]]) -> list[str]:
        """Return the names of the modules that have an adapter.

        ranks: (name, size of the first dimension) of every tensor in the folder.

        Raises ValueError for a tensor that belongs to no adapter, a module with only one of lora_A and lora_B, or a
        module whose adapter contradicts this config.
        """
        parts: dict[str, dict[str, int]] = {}
        for name, rows in ranks:
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise ValueError(
                    f"{self.path.parent}: has the tensor {name}, which is no lora_A or lora_B of a matrix; {REMEDY}."
                )
            parts.setdefault(match[1], {})[match[2]] = rows
        for module, found in parts.items():
            if len(found) == 1:
                raise ValueError(f"{self.path.parent}: has {min(found)} of {module} alone; copy the folder again.")
            if not self.adapts(module):
                raise ValueError(
                    f"{self.path}: target_modules, exclude_modules and layers_to_transform leave out {module}, but the "
                    f"folder has its adapter; correct the keys, or remove the tensors."
                )
            if found["lora_A"] != self.rank_of(module):
                raise ValueError(
                    f"{self.path}: r and rank_pattern give {module} the rank {self.rank_of(module)}, and its lora_A "
                    f"has {found['lora_A']}; correct the keys."
                )
        return list(parts)


def read_peft_config(folder: str | Path) -> PeftConfig:
    """Read and check a folder's adapter_config.json.

    Raises ValueError, which names the file, the key, its value, the broken rule and the remedy.
    """
    path = Path(folder) / FILE
    said = read_object(path)

    def refuse(key: str, rule: str, remedy: str = REMEDY) -> None:
        raise ValueError(f"{path}: {key} = {said.get(key)!r:.200}: {rule}; {remedy}.")

    if said.get("peft_type") != "LORA":
        refuse("peft_type", "only LORA is supported")
    if said.get("task_type") not in (None, "CAUSAL_LM"):
        refuse("task_type", "only CAUSAL_LM is supported")
    for key, value in said.items():
        if key in MUST_BE_OFF and _is_on(value):
            refuse(key, f"{MUST_BE_OFF[key]}, which is not supported")
        if key not in MUST_BE_OFF.keys() | APPLIED | SAYS_NOTHING | {"bias"} and _is_on(value):
            refuse(key, "is no key that is known here, and may change what the adapters compute")
    if said.get("bias") not in (None, "none"):
        refuse("bias", "biases are trained besides the matrices, which is not supported")
    first = said.get("init_lora_weights")
    if not any(first is value or (isinstance(value, str) and first == value) for value in FIRST_VALUES):
        refuse("init_lora_weights", "the adapter may belong to other base weights than the model's")
    for key, (holds, rule) in VALUES.items():
        if key in said and not holds(said[key]):
            refuse(key, rule, "correct it")
    return PeftConfig(path, said)


def _is_on(value: Any) -> bool:
    return not (value is None or value is False or value in ([], {}, ""))


def _is_named(names: str | list[str], module: str) -> bool:
    """Return True if `names` selects the module.

    As in PEFT, a string is a regex that must match the module's full name, and a list contains endings of names.
    """
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def _are_names(value: Any) -> bool:
    return value is None or _is_pattern(value) or (isinstance(value, list) and all(isinstance(it, str) for it in value))


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except (re.error, RecursionError, OverflowError):
        return False


def _one_or_several(holds: Callable[[Any], bool], value: Any) -> bool:
    return value is None or (all(map(holds, value)) if isinstance(value, list) else holds(value))


def _by_patterns(holds: Callable[[Any], bool], value: Any) -> bool:
    is_map = isinstance(value, dict) and all(map(_is_pattern, value)) and all(map(holds, value.values()))
    return value is None or is_map


VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "must be a whole number of at least 1"),
    "lora_alpha": (_is_number, "must be a number"),
    "rank_pattern": (partial(_by_patterns, _is_rank), "must map patterns of modules to whole numbers of at least 1"),
    "alpha_pattern": (partial(_by_patterns, _is_number), "must map patterns of modules to numbers"),
    "target_modules": (_are_names, "must be a list of names, or a pattern"),
    "exclude_modules": (_are_names, "must be a list of names, or a pattern"),
    "layers_pattern": (partial(_one_or_several, _is_pattern), "must be a name, or a list of names"),
    "layers_to_transform": (
        partial(_one_or_several, lambda value: type(value) is int),
        "must be the number of a layer, or a list of them",
    ),
    "use_rslora": (lambda value: value is None or isinstance(value, bool), "must be true or false"),
}
"""{key that defines the adapters: (function that returns True for a valid value, the rule for the error message)}."""
APPLIED = VALUES.keys() | {"init_lora_weights", "peft_type", "task_type"}
"""Keys that are applied or checked: which matrices have an adapter, its rank and scale, and the folder's type."""
