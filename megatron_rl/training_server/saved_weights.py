"""Weights that clients have saved by name: their folders, and what was noted about each.

models/MODEL/model.json                          the model's tenant
models/MODEL/{weights,sampler_weights}/NAME      a checkpoint, or what rollout servers load
models/MODEL/{weights,sampler_weights}/NAME.json its facts; the weights exist for clients as soon as this file does
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.training_server.client_sessions import Refused

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""Pattern of the names of saved weights, which are also names of folders."""
TINKER = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")
MODEL = re.compile(r"[0-9a-f]{32}:train:\d{1,9}")


def check_name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        rule = "must have 1 to 128 letters, digits, dots, hyphens and underscores, and no dot or hyphen first"
        raise ValueError(f"name = {name!r}: {rule}.")
    return name


class SavedWeights:
    """The saved weights in `folder`, which has a subfolder for each model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def folder_of(self, model: str) -> Path:
        """Return a model's folder. Raises Refused if the id does not have the form of a model's id."""
        if not MODEL.fullmatch(model):
            raise Refused(f"{model!r}: is no model of this server.", 404)
        return self.folder / model.replace(":", "-")

    def find(self, tenant: str, path: Any, *kinds: str) -> Path:
        """Return the folder of saved weights that belong to the tenant.

        path: tinker path of the weights. kinds: allowed kinds, `weights` or `sampler_weights`. Raises Refused if the
        tenant has no such weights.
        """
        match = TINKER.fullmatch(path) if isinstance(path, str) else None
        if match and match[2] in kinds and NAME.fullmatch(match[3]):
            folder = self.folder_of(match[1])
            said = json.loads(file.read_text()) if (file := folder / "model.json").is_file() else {"tenant": None}
            if said["tenant"] == tenant and facts_of(found := folder / match[2] / match[3]):
                return found
        raise Refused(f"path = {path!r}: there are no such {' or '.join(kinds)}; give what a save has returned.", 404)

    def listed(self, tenant: str, model: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (tinker path, facts) of each of the tenant's saved weights.

        model: id of the only model whose weights to list; '' lists those of all.
        """
        for file in sorted(self.folder.glob("*/model.json")):
            said = json.loads(file.read_text())
            if said["tenant"] != tenant or model not in ("", said["id"]):
                continue
            for facts in sorted([*file.parent.glob("weights/*.json"), *file.parent.glob("sampler_weights/*.json")]):
                yield f"tinker://{said['id']}/{facts.parent.name}/{facts.stem}", json.loads(facts.read_text())

    def delete(self, tenant: str, path: str) -> None:
        folder = self.find(tenant, path, "weights", "sampler_weights")
        folder.with_name(f"{folder.name}.json").unlink()
        shutil.rmtree(folder, ignore_errors=True)


def facts_of(folder: Path) -> dict[str, Any]:
    """Return the facts that `note_facts` has written about saved weights; {} if there are none."""
    file = folder.with_name(f"{folder.name}.json")
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def note_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write the facts about saved weights, and the size of their files. From then on the weights exist for clients."""
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    write_whole(folder.with_name(f"{folder.name}.json"), facts | {"size_bytes": size})


def write_whole(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, so that no reader finds a part of it."""
    aside = file.with_name(f".{file.name}")
    aside.write_text(json.dumps(content))
    aside.replace(file)
