"""Builds a checked TrainConfig from a YAML file and `key=value` overrides."""

from __future__ import annotations

import dataclasses
import difflib
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.other_names import PAGE, ours
from megatron_rl.config.rules import as_part_of, refuse
from megatron_rl.config.train_config import TrainConfig

MOST_NODES = 100_000
"""Maximum number of values in a YAML text. Ten lines with nested aliases could expand to billions of values."""
KEY_OF_CONFIG = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")


def load_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Read a config file, apply `key=value` overrides and check everything. Raises ValueError."""
    path = Path(path)
    merged = read_sections(path)
    with naming_keys(merged, f"in {path} or on the command line"):
        for override in overrides or []:
            key, equals, text = override.partition("=")
            if not (equals and all(key.split("."))):
                raise ValueError(f"override {override!r}: must be key=value, e.g. batch.prompts_per_step=32.")
            # Set, not merged, so that data.train_args={} empties it.
            value = text if is_text(key, text) else value_of(text, override)
            OmegaConf.update(merged, key, value, merge=False, force_add=True)
        return checked(merged, missing=f"set it in {path} or as KEY=... on the command line")


def config_of(sections: Mapping[str, Any]) -> TrainConfig:
    """Build a config from Python, e.g. `{"optimizer": {"lr": 1e-5}}` or `{"optimizer.lr": 1e-5}`. Raises ValueError."""
    merged = OmegaConf.create({})
    with naming_keys(merged, "in the arguments"):
        for key, value in sections.items():
            OmegaConf.update(merged, key, value, merge=True, force_add=True)
        return checked(merged, missing="give it as an argument, KEY=...")


@contextmanager
def naming_keys(merged: DictConfig, place: str) -> Iterator[None]:
    """Turn OmegaConf's errors into ValueErrors that name the key and its value.

    place: where the user can correct the value.
    """
    try:
        yield
    except OmegaConfBaseException as error:
        key = str(error.full_key or error.key)
        found = member(OmegaConf.to_container(merged, resolve=False), key)
        reason = str(error).splitlines()[0]
        raise ValueError(f"{key} = {found!r}: {reason}; correct it {place}.") from error


def checked(merged: DictConfig, *, missing: str) -> TrainConfig:
    """Check the merged sections and build the config.

    missing: advice if an option has no value; KEY in it is replaced.
    """
    # Order matters: nothing is interpolated before it is known to be harmless; only known keys have types.
    refuse_computed_values(merged)
    refuse_unknown_keys(TrainConfig, merged, "")
    wrap_single_values(TrainConfig, merged)
    take_from_policy(merged)
    config = OmegaConf.merge(defaults(), merged)
    if keys := sorted(OmegaConf.missing_keys(config)):
        raise ValueError(f"{keys[0]}: has no value; {missing.replace('KEY', keys[0])}.")
    # Nested sections first, under their full names: critic.parallel shares parallel's class, and so its errors.
    for name in SECTIONS:
        if "." in name:
            with as_part_of(name):
                OmegaConf.to_object(OmegaConf.select(config, name))
    found = OmegaConf.to_object(config)
    assert isinstance(found, TrainConfig)
    return found


def take_from_policy(merged: DictConfig) -> None:
    """Copy the policy's layout and optimizer options to the critic and the reward model.

    An option that these set themselves is not overwritten.
    """
    wanted = ["critic.parallel", "critic.optimizer"] if OmegaConf.select(merged, "algo.advantage") == "gae" else []
    wanted += ["reward_model.parallel"] if OmegaConf.select(merged, "reward_model.path") else []
    for name in wanted:
        own, given = OmegaConf.select(merged, name), merged.get(name.partition(".")[2])
        if isinstance(given, DictConfig) and (own is None or isinstance(own, DictConfig)):
            options = {str(key): given._get_node(key) for key in given if own is None or key not in own}
            for key, value in options.items():
                OmegaConf.update(merged, f"{name}.{key}", value, merge=False, force_add=True)


@cache
def defaults() -> DictConfig:
    """Return every option with its default. The result is cached, because OmegaConf is slow to build it."""
    config = OmegaConf.structured(TrainConfig)
    assert isinstance(config, DictConfig)
    return config


def changed_yaml(config: TrainConfig) -> str:
    """Return, as YAML, the options whose values differ from their defaults."""

    def changed(now: Any, usual: Any) -> Any:
        parts = {name: value for name, value in now.items() if name not in usual or value != usual[name]}
        both = [name for name, value in parts.items() if isinstance(value, dict) and isinstance(usual.get(name), dict)]
        return parts | {name: changed(parts[name], usual[name]) for name in both}

    usual = OmegaConf.to_container(defaults(), resolve=False)
    return OmegaConf.to_yaml(changed(OmegaConf.to_container(OmegaConf.structured(config)), usual))


def read_sections(path: Path) -> DictConfig:
    """Read a config file without resolving interpolations. Raises ValueError with the problem and its line."""
    if not path.is_file():
        raise ValueError(f"config = {str(path)!r}: no such file; give a config file such as configs/demo.yaml.")
    try:
        text = path.read_text(encoding="utf-8")
        # Count on the parsed tree, where an alias is still one node; OmegaConf expands each one.
        written = nodes_written(yaml.compose(text, Loader=yaml.SafeLoader), {})
        if written > MOST_NODES:
            raise ValueError(f"its aliases write out to {written:,} values, and {MOST_NODES:,} is the most")
        loaded = OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark, error.problem or error.context
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"config = {str(path)!r}{place}: not YAML ({problem}); correct that line.") from error
    except RecursionError as error:
        raise ValueError(f"config = {str(path)!r}: is nested too deeply to be read; make it flatter.") from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config = {str(path)!r}: cannot be read ({reason}); give a YAML file.") from error
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"config = {str(path)!r}: must hold sections such as model:, batch: and run:, not a list.")
    return loaded


def nodes_written(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Count the values of a node with all aliases expanded. A node that contains itself counts as more than MOST_NODES.

    known: counts of nodes so far, by id().
    """
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MOST_NODES + 1  # in case the node contains itself
        below = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(nodes_written(part, known) for part in below)
    return known[id(node)]


def is_text(key: str, text: str) -> bool:
    """Return True if an override's value is taken literally instead of parsed as YAML.

    That is so for options of type str, unless the value is quoted or null, and for values in which YAML would read a
    comment.
    """
    if not text.strip():
        return True
    if text.lstrip()[0] in "'\"" or text == "null":
        return False
    section, _, name = key.rpartition(".")
    if section in SECTIONS and get_type_hints(SECTIONS[section]).get(name) is str:
        return True
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return False
    return node is None or (isinstance(node, yaml.ScalarNode) and node.end_mark.index < len(text.rstrip()))


def value_of(text: str, override: str) -> Any:
    """Parse the value of an override as YAML."""
    try:
        # Uses OmegaConf's reader, as for files: plain YAML reads 1e-5 as a string.
        return member(OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False), "value")
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"override {override!r}: its value is not YAML ({reason}); quote it or correct it.") from error


def refuse_computed_values(given: DictConfig) -> None:
    """Raise ValueError for every interpolation except `${another.key}`, if that key's value is written out.

    OmegaConf would call resolvers, and insert environment variables, which may be secret, into a config that is stored.
    """
    written = OmegaConf.to_container(given, resolve=False)
    for key, text in leaves(written):
        if not (isinstance(text, str) and "${" in text):
            continue
        if "${" in KEY_OF_CONFIG.sub("", text):
            rule = "only another key of the config can stand in braces, as in ${run.folder}"
            way_out = f"write the value, or pass it as {key}=... on the command line"
            refuse(key, text, f"{rule}, and no environment variable or function; {way_out}")
        for name in KEY_OF_CONFIG.findall(text):
            if any("${" in str(below) for _, below in leaves(member(written, name))):
                refuse(key, text, f"{name} is itself made of another key; write its value there")


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value in nested dicts and lists that is neither."""
    if not isinstance(value, dict | list):
        yield prefix, value
        return
    for name, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(part, f"{prefix}.{name}" if prefix else str(name))


def member(written: Any, key: str) -> Any:
    """Return the value at a dotted key of nested dicts; None if there is none."""
    for name in key.split("."):
        written = written.get(name) if isinstance(written, dict) else None
    return written


def wrap_single_values(schema: type, given: DictConfig) -> None:
    """Wrap each single value in a list if its option is a list, as in run.import_from=my_rewards."""
    for name, kind in get_type_hints(schema).items():
        if name not in given:
            continue
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            wrap_single_values(kind, given[name])
        elif get_origin(kind) is list and type(given[name]) in get_args(kind):
            given[name] = [given[name]]


def refuse_unknown_keys(schema: type, given: DictConfig, prefix: str) -> None:
    """Raise ValueError for the first key that the dataclass lacks, and suggest the nearest known key."""
    fields = [f.name for f in dataclasses.fields(schema)]
    for key in map(str, given):
        name = f"{prefix}{key}"
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            for found, value in leaves(member(OmegaConf.to_container(given, resolve=False), key), name):
                # `optimizer.epsilon` is a longer name for a key of its own section, not another trainer's name.
                is_longer = bool(near) and key.startswith(near[0])
                if (here := ours(found)) and not (is_longer and prefix and not here.startswith(prefix)):
                    refuse(found, value, f"unknown key; here it is {here} ({PAGE})")
            hint = f"did you mean {prefix}{near[0]}?" if near else f"the keys here are {', '.join(fields)}."
            raise ValueError(f"{name} = {OmegaConf.select(given, key)!r}: unknown key; {hint}")
        if section := SECTIONS.get(name):
            value = given[key]
            if not isinstance(value, DictConfig):
                keys = ", ".join(f.name for f in dataclasses.fields(section))
                refuse(name, value, f"must be a section with keys {keys}")
            refuse_unknown_keys(section, value, f"{name}.")


def sections_of(schema: type, prefix: str = "") -> dict[str, type]:
    """Return the dataclass of each section and nested section, by its dotted name."""
    found: dict[str, type] = {}
    for name, kind in get_type_hints(schema).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= {f"{prefix}{name}": kind, **sections_of(kind, f"{prefix}{name}.")}
    return found


SECTIONS = sections_of(TrainConfig)
