"""From a YAML file and `key=value` overrides to a checked TrainConfig."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.experiment import TrainConfig
from megatron_rl.config.rules import as_part_of


def load_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Read an experiment file, apply `key=value` overrides and check everything. Raises ValueError."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"config = {str(path)!r}: no such file; give an experiment file such as configs/demo.yaml.")
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"config = {str(path)!r}: must hold sections such as model:, batch: and run:, not a list.")
    merged = loaded
    try:
        for override in overrides or []:
            key, equals, text = override.partition("=")
            if not equals:
                raise ValueError(f"override {override!r}: must be key=value, e.g. batch.prompts_per_step=32.")
            # Set and not merged, so that data.train_args={} empties it.
            value = OmegaConf.select(OmegaConf.from_dotlist([override]), key) if text else ""
            OmegaConf.update(merged, key, value, merge=False, force_add=True)
        refuse_unknown_keys(TrainConfig, merged, "")
        config = OmegaConf.merge(OmegaConf.structured(TrainConfig), merged)
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ValueError(
                f"{missing[0]}: has no value; set it in {path} or as {missing[0]}=... on the command line."
            )
        for name in (name for name in SECTIONS if "." in name):
            with as_part_of(name):
                OmegaConf.to_object(OmegaConf.select(config, name))
        checked = OmegaConf.to_object(config)
        assert isinstance(checked, TrainConfig)
        return checked
    except OmegaConfBaseException as error:
        key = str(error.full_key or error.key)
        found = OmegaConf.select(merged, key)
        reason = str(error).splitlines()[0]
        raise ValueError(f"{key} = {found!r}: {reason}; correct it in {path} or on the command line.") from error


def refuse_unknown_keys(schema: type, given: DictConfig, prefix: str) -> None:
    """Raise ValueError for the first key that the dataclass lacks, with the nearest one that it has."""
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for key in map(str, given):
        name = f"{prefix}{key}"
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"the keys here are {', '.join(fields)}."
            raise ValueError(f"{name} = {OmegaConf.select(given, str(key))!r}: unknown key; {hint}")
        section = SECTIONS.get(name)
        if section is not None:
            value = given[key]
            if not isinstance(value, DictConfig):
                raise ValueError(
                    f"{name} = {value!r}: must be a section with keys "
                    f"{', '.join(f.name for f in dataclasses.fields(section))}."
                )
            refuse_unknown_keys(section, value, f"{name}.")


def sections_of(schema: type, prefix: str = "") -> dict[str, type]:
    """Return the dataclass of each section and of the sections in it, by dotted name."""
    found: dict[str, type] = {}
    for name, kind in get_type_hints(schema).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= {f"{prefix}{name}": kind, **sections_of(kind, f"{prefix}{name}.")}
    return found


SECTIONS = sections_of(TrainConfig)
