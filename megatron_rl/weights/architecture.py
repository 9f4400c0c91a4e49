"""Read and check a Hugging Face `config.json`. The resulting `Architecture` has the same fields for all families."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

from megatron_rl.weights.decoder import Architecture
from megatron_rl.weights.families import FAMILIES
from megatron_rl.weights.family import DEMANDS, Config, Family, rope_of, windows_by_kind
from megatron_rl.weights.json_files import read_object
from megatron_rl.weights.published_models import how_to_fetch

FAMILY_OF: dict[str, Family] = {name: family for family in FAMILIES.values() for name in family.classes}
SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
}
"""The Architecture fields that are sizes, with their keys in config.json."""
LONGEST_REASON = 300
CLASSIFIERS = {
    classifier: causal
    for family in FAMILIES.values()
    for classifier, causal in zip(
        family.classifiers or [name.replace("ForCausalLM", "ForSequenceClassification") for name in family.classes],
        family.classes,
        strict=True,
    )
}
"""transformers' classifier class -> language model class with the same trunk. A classifier's head returns one number
per token."""


def read_architecture(folder: str | Path) -> Architecture:
    """Read and check `folder/config.json`.

    Raises ValueError, which names the key, its value, the broken rule and the remedy.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(
            f"model.path = {str(folder)!r}: no config.json there; give a Hugging Face model folder (config.json, "
            f"safetensors, tokenizer), made by megatron-rl convert or fetched: {how_to_fetch(str(folder))}."
        )
    said = read_object(path, "copy the model folder again")
    head, names = _head(said, path)
    of_text = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in names]
    if of_text != names and of_text[0] in FAMILY_OF:
        raise ValueError(
            f"{path}: architectures = {names}: reads images too, and only text is trained; write its language model, "
            f"{of_text[0]}, to a folder of its own (docs/troubleshooting.md shows how) and give that one."
        )
    if len(names) != 1 or names[0] not in FAMILY_OF:
        raise ValueError(
            f"{path}: architectures = {names}: supported are {', '.join(FAMILY_OF)}; convert or pick one of these."
        )
    family = FAMILY_OF[names[0]]
    config = _as_transformers_has_it(said, names[0], family, path)
    try:
        heads, hidden, own = config["num_attention_heads"], config["hidden_size"], family.read(config)
        fields: dict[str, Any] = dict(
            family=family.name,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            ffn=own["ffn"] if "ffn" in own else config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,  # absent or null in models without grouped queries
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope_of(config).get("rope_theta", config.get("rope_theta", 10_000.0)),
            rope_scaling=_scaling(config, path),
            max_positions=config.get("max_position_embeddings", 4096),
            windows=_windows(config),
        )
        arch = Architecture(**fields | own).with_head(head)
    except KeyError as error:
        raise _damaged(path, f"key {error} is missing") from error
    except (TypeError, AttributeError, ArithmeticError, IndexError) as error:
        raise _damaged(path, f"a key has a value of another kind than transformers writes ({error})") from error
    _refuse_wrong_numbers(arch, path)
    _refuse_unsupported(config, arch, family, path)
    return arch


def _damaged(path: Path, fault: str) -> ValueError:
    return ValueError(f"{path}: {fault}; copy config.json of the original model again.")


def quantization_fault(folder: str | Path) -> str:
    """Return why servers that load this model folder could not accept new weights, and the remedy; '' if they can.

    They cannot if config.json has quantization_config, because they would quantize the weights that they receive.
    """
    said = read_object(Path(folder) / "config.json", "copy the model folder again").get("quantization_config")
    if said is None:
        return ""
    method = said.get("quant_method", "no quant_method") if isinstance(said, dict) else said
    remedy = "the script of its authors"
    if method == "mxfp4":
        remedy = "`megatron-rl convert` to a checkpoint, and that to a folder"
    return (
        f"config.json has quantization_config ({method}), and servers cannot be sent updates of quantized weights; "
        f"write the model in bfloat16 by {remedy}"
    )


def _as_transformers_has_it(said: Config, name: str, family: Family, path: Path) -> Config:
    """Return the config completed by transformers' config class: defaults filled in, rotary settings in one format.

    Raises ValueError if the class refuses the config.
    """
    import transformers  # imported here because it takes seconds

    stem = name.removesuffix("ForCausalLM")
    # Families with image models have a separate config class for text.
    class_name = f"{stem}TextConfig" if family.classifiers else f"{stem}Config"
    try:
        config = getattr(transformers, class_name).from_dict(copy.deepcopy(said)).to_dict()
    except Exception as error:
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        raise _damaged(path, f"transformers' {class_name} refuses it ({reason})") from error
    return dict(config)


def _refuse_wrong_numbers(arch: Architecture, path: Path) -> None:
    """Raise ValueError if a size or constant is not a positive number, or if not every layer has a layer type."""
    for field, key in SIZES.items():
        value = getattr(arch, field)
        if type(value) is not int or value < 1:
            raise _damaged(path, f"{key} = {value!r:.100}: must be a whole number of at least 1")
    for key, value in {"rms_norm_eps": arch.norm_eps, "rope_theta": arch.rope_theta}.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise _damaged(path, f"{key} = {value!r:.100}: must be a number above 0")
    if len(arch.windows) != arch.layers:
        raise _damaged(path, f"layer_types has {len(arch.windows)} entries and num_hidden_layers = {arch.layers}")


def with_value_head(config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a model's config.json changed to that of a classifier with one label.

    Critics and reward models are saved in this form.
    """
    classifier_of = {causal: name for name, causal in CLASSIFIERS.items()}
    names = [classifier_of.get(name, name) for name in config["architectures"]]
    # transformers saves id2label only and counts its entries; other readers expect num_labels.
    labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config | {"architectures": names} | labels


def _head(config: Config, path: Path) -> tuple[str, list[str]]:
    """Return the model's head, `policy` or `value`, and its `architectures`.

    In `architectures`, names of classifier classes are replaced by those of the matching language model classes.
    """
    names = config.get("architectures") or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise _damaged(path, f"architectures = {names!r:.100}: must be a list of names")
    if not any(name in CLASSIFIERS for name in names):
        return "policy", names
    named = config.get("id2label")
    labels = len(named) if named and isinstance(named, dict) else config.get("num_labels", 2)  # 2: its default
    if labels != 1:
        raise ValueError(
            f"{path}: num_labels = {labels}: a critic or reward model gives one number; pick a model with one label."
        )
    return "value", [CLASSIFIERS.get(name, name) for name in names]


ROPE_SCALINGS = ("linear", "llama3", "yarn")


def _scaling(config: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the RoPE scaling in transformers 5's format, or None if there is none.

    Raises ValueError for kinds of scaling that are not supported, such as those that depend on the batch.
    """
    rope = dict(rope_of(config))
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))  # early versions wrote `type`
    if kind == "default":
        return None
    if kind not in ROPE_SCALINGS:
        supported = ", ".join(("default", *ROPE_SCALINGS))
        raise ValueError(f"{path}: rope type {kind!r}: supported are {supported}; pick a model with one of these.")
    return rope


def _windows(config: Config) -> tuple[int | None, ...]:
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if (windows := windows_by_kind(config)) is not None:
        return windows
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    return tuple(None if layer < config["max_window_layers"] else window for layer in range(layers))


def _refuse_unsupported(config: Config, arch: Architecture, family: Family, path: Path) -> None:
    # A missing key counts as supported: the supported values are also transformers' defaults.
    demands = {key: value for key, value in DEMANDS.items() if key not in family.may_say} | dict(family.demands)
    for key, supported in demands.items():
        value = config.get(key, supported)
        if value != supported:
            raise ValueError(
                f"{path}: {key} = {value!r}: only {supported!r} is supported for {arch.family}; pick another model."
            )
    if reason := family.check(config, arch):
        raise ValueError(f"{path}: {reason}")
    mixture = arch.mixture
    if mixture is not None and mixture.per_token == 1 and mixture.renormalised:
        raise ValueError(
            f"{path}: num_experts_per_tok = 1 with norm_topk_prob: the single expert's weight is always 1, which "
            f"megatron.core does not compute; choose another model."
        )
    if arch.heads % arch.kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads = {arch.heads}: must be a multiple of num_key_value_heads = {arch.kv_heads}; "
            f"correct config.json."
        )
