"""Weight updates of an SGLang server that decodes ahead with a draft head.

Such a server holds two models, which its weight endpoints call `target` and `draft`. A publication sends both, but each
bucket has tensors of only one of them.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.api import DRAFT_FOLDER, DRAFT_PREFIX, SGLANG_FOLDER_LOADER
from megatron_rl.servers.client import ServerClient
from megatron_rl.servers.server_http import CommandRefused


def is_of_draft(names: Sequence[str]) -> bool:
    """Return True if the tensors of a bucket are a draft head's. Raises ValueError if only some of them are.

    names: the names of the bucket's tensors.
    """
    kinds = {name.startswith(DRAFT_PREFIX) for name in names}
    if len(kinds) > 1:
        raise ValueError(f"a bucket from {names[0]} to {names[-1]} has tensors of both the policy and its draft head")
    return True in kinds


def for_models_of(server: ServerClient, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a weight update, completed by the model of SGLang's into which the bucket is loaded.

    body: body that describes one bucket and has its tensors' `names`. Raises CommandRefused if the bucket is a draft
    head's and the server is too old to load it into the head alone.
    """
    info = server.info
    if info is None or info.is_embedded:
        return body
    if is_of_draft(body["names"]):
        if not info.has_sessions:
            raise CommandRefused(f"{server.url}: takes no draft head before SGLang 0.5.21; set draft.kind=none.")
        return body | {"selector": "draft", "names": [name.removeprefix(DRAFT_PREFIX) for name in body["names"]]}
    return body | {"selector": "target"} if info.has_draft else body


async def load_folder_into(server: ServerClient, path: str | Path, version: str, *, timeout_s: float) -> None:
    """Have a server load the model in a folder, and the draft head there if both the folder and the server have one.

    version: name of the weights in the folder.
    """
    body = {"model_path": str(path), "weight_version": version, "flush_cache": False}
    await server.command("/update_weights_from_disk", body, timeout_s=timeout_s)
    info, head = server.info, head_in(path)
    if info is None or not info.has_draft or head is None:
        return
    if SGLANG_FOLDER_LOADER not in info.weight_loaders:
        raise CommandRefused(
            f"{server.url}: loads the draft head in {head} only if it was started with --custom-weight-loader "
            f"{SGLANG_FOLDER_LOADER}; start it so, or set rollout.publication=group."
        )
    await server.command("/begin_weight_update", {"selector": "draft"}, timeout_s=timeout_s)
    try:
        update = head_update(head, info.ranks) | {"weight_version": version}
        await server.command("/update_weights_from_tensor", update, timeout_s=timeout_s)
    finally:
        await server.command("/end_weight_update", {}, timeout_s=timeout_s)


def head_in(folder: str | Path) -> Path | None:
    """Return the folder of the draft head of the model in `folder`, or None if it has none."""
    draft = Path(folder) / DRAFT_FOLDER
    return draft if any(draft.glob("*.safetensors")) else None


def head_update(head: Path, ranks: int) -> dict[str, Any]:
    """Return the body of the request that makes each of a server's ranks load a draft head from the folder `head`.

    The folder must be on a disk that all ranks can read. ranks: number of the server's ranks.
    """
    import torch  # only here, because most commands that talk to servers do without it

    told = base64.b64encode(pickle.dumps([(str(head), torch.empty(0))])).decode()
    message = {"load_format": SGLANG_FOLDER_LOADER, "serialized_named_tensors": [told] * ranks}
    return message | {"selector": "draft", "flush_cache": False}
