"""The package `tinker` as tests use it: clients of a training server, data for each loss, and what comes back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.training_server.wire import Datum
from tests.kit.models import VOCAB
from tests.kit.optional import later

WHY = "needs the package tinker; make installs it"
tinker = later("tinker", reason=WHY)
types = later("tinker.types", reason=WHY)
client_parts = later("tinker.lib.internal_client_holder", reason=WHY)
POLICY = ("logprobs", "advantages")
INPUTS = {
    "cross_entropy": ("weights",),
    "importance_sampling": POLICY,
    "ppo": POLICY,
    "cispo": POLICY,
    "dro": POLICY,
    "gspo": (*POLICY, "sequence_ratio_mask"),
}
LENGTHS = (5, 12, 7)


@contextmanager
def quiet_clients() -> Iterator[None]:
    """Close the clients in the end, which give signs of life until then.

    They report their errors to their server, where nobody reads them.
    """
    holders = client_parts.InternalClientHolder
    made, start = [], holders.__init__

    def start_noted(holder: Any, *args: Any, **options: Any) -> None:
        made.append(holder)
        start(holder, *args, **options)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setattr(holders, "__init__", start_noted)
        yield
        for holder in made:
            holder.close()


def client_of(url: str, key_file: Path) -> Any:
    return tinker.ServiceClient(base_url=url, api_key=key_file.read_text().strip())


def some_data(loss: str, seed: int = 0) -> tuple[list[Any], list[Datum]]:
    """Return the same data twice: as the client's, and as the engine's."""
    generator, own, data = torch.Generator().manual_seed(seed), [], []
    for length in LENGTHS:
        ids = torch.randint(0, VOCAB, (length + 1,), generator=generator)
        every = {name: torch.randn(length, generator=generator) for name in ("weights", "advantages", "logprobs")}
        every["logprobs"] = every["logprobs"] * 0.1 - 4.5
        every["sequence_ratio_mask"] = (torch.arange(length) >= 2).float()
        inputs = {"target_tokens": ids[1:]} | {name: every[name] for name in INPUTS[loss]}
        own.append(Datum(ids[:-1], inputs))
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs))
    return data, own


def logprobs_in(output: Any) -> Tensor:
    return torch.cat([datum["logprobs"].to_torch() for datum in output.loss_fn_outputs])


def saved(folder: Path, path: str) -> Path:
    """Return the folder of saved weights on the server's disk. folder: as in tests/kit/training_servers.py."""
    name, kind, own = path.removeprefix("tinker://").split("/")
    return folder / "run" / "training_server" / "models" / name.replace(":", "-") / kind / own


def adapters_in(folder: Path) -> dict[str, Tensor]:
    prefix = "base_model.model."
    return {name.removeprefix(prefix): part for name, part in load_file(folder / "adapter_model.safetensors").items()}
