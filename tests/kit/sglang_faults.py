"""Faults that are planted for the doctor with real SGLang on the CPU. Nobody can look into its layers.

A fault is in SGLang's own arguments, in what is published to it, or in what it is asked. Mixtures of experts are left
out: on a CPU, SGLang's log-probs of these tiny ones are not those of transformers.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config import ParallelConfig, RolloutConfig, TrainConfig, load_config
from megatron_rl.engine.megatron_engine import MegatronEngine
from megatron_rl.rollout.sglang_engine import RemoteSGLangEngine
from megatron_rl.servers import generate
from megatron_rl.servers.client import ServerClient
from megatron_rl.servers.supervisor import Supervisor
from megatron_rl.tools.doctor import doctor
from tests.kit.doctors_faults import PAGE, table
from tests.kit.models import make_engine, make_model
from tests.kit.ranks import run_ranks
from tests.kit.run_tokens import TOKEN_FILE
from tests.kit.runs import COUNT
from tests.kit.servers import NEVER_LATE, SGLANG_ARGUMENTS
from tests.kit.tokenizers import make_tokenizer

PROMPTS = [[(7 * place * place + 3 * number) % 90 for place in range(24)] for number in range(4)]
LARGER = 3.0
"""Factor of the tiny models' random matrices. With their own sizes, no token depends on another one's position."""
Plant = Callable[[MegatronEngine, Any], None]


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server and the faults that are planted while it runs. arguments: its own, in addition to the usual ones."""

    family: str
    arguments: tuple[str, ...] = ()
    faults: dict[str, tuple[Plant, tuple[str, ...]]] = field(default_factory=dict)
    """Name -> what plants it, and the words that name it rightly."""


def nothing(engine: MegatronEngine, patch: Any) -> None:
    """The server's arguments alone are wrong, or nothing is."""


def published(change: Callable[[dict[str, torch.Tensor]], None]) -> Plant:
    """Publish other weights in the end. change: gets the engine's parameters by name."""

    def plant(engine: MegatronEngine, patch: Any) -> None:
        update = engine.update_weights

        def wrong(rollout: Any, version: int) -> Any:
            if version != 2:
                return update(rollout, version)
            named = {name: parameter.data for name, parameter in engine.chunks[0].named_parameters()}
            kept = {name: weight.clone() for name, weight in named.items()}
            change(named)
            result = update(rollout, version)
            for name, weight in kept.items():
                named[name].copy_(weight)
            return result

        patch.setattr(engine, "update_weights", wrong)

    return plant


def stale_layer(named: dict[str, torch.Tensor]) -> None:
    for name, weight in named.items():
        if name.startswith("decoder.layers.1."):
            weight.mul_(1.1)


def bad_shard(named: dict[str, torch.Tensor]) -> None:
    named["decoder.layers.1.self_attention.linear_proj.weight"][32:] = 0.0


def gate_and_up(named: dict[str, torch.Tensor]) -> None:
    for name, weight in named.items():
        if name.endswith("mlp.linear_fc1.weight"):
            weight.copy_(weight.roll(len(weight) // 2, 0))


def kept_keys(engine: MegatronEngine, patch: Any) -> None:
    """The last publication flushes nothing."""
    update, pause = engine.update_weights, ServerClient.pause

    async def without_flush(self: ServerClient, mode: str, *, flush: bool, timeout_s: float) -> None:
        await pause(self, mode, flush=False, timeout_s=timeout_s)

    def update_weights(rollout: Any, version: int) -> Any:
        if version == 2:
            patch.setattr(ServerClient, "pause", without_flush)
        return update(rollout, version)

    patch.setattr(engine, "update_weights", update_weights)


def asked(**changed: Any) -> Plant:
    """Ask for samples with other parameters than the config's."""

    def plant(engine: MegatronEngine, patch: Any) -> None:
        params = generate.sampling_params
        patch.setattr(generate, "sampling_params", lambda *args, **options: params(*args, **options) | changed)

    return plant


def overridden(**changed: Any) -> tuple[str, ...]:
    return "--json-model-override-args", json.dumps(changed)


ROPE = "log-probs", "the rope's base is 500000"
SERVED = (
    Served(
        family="llama",
        faults={
            "nothing": (nothing, ()),
            "one layer stale": (published(stale_layer), ("layer 1: ", "it is stale")),
            "one bad shard": (
                published(bad_shard),
                ("layers.1.self_attn.o_proj.weight", "rows 32 to 63 of 64 are zero"),
            ),
            "gate and up in the wrong order": (published(gate_and_up), ("gate and up are swapped",)),
            "keys kept over an update": (kept_keys, ("keys of earlier weights are in the KV cache",)),
            "another top_p": (asked(top_p=0.5), ("sampling", "as with top_p = 0.")),
            "another temperature": (asked(temperature=1.5), ("those of temperature 1.5",)),
            "a stop token that does not stop": (asked(ignore_eos=True), ("does not end it",)),
        },
    ),
    Served(
        family="llama",
        arguments=overridden(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
        faults={"rope with another base": (nothing, ROPE)},
    ),
    Served(
        family="llama",
        arguments=overridden(rms_norm_eps=1e-2),
        faults={"eps of the norms": (nothing, ("eps is 0.01",))},
    ),
    Served(
        family="llama3_rope",
        arguments=overridden(rope_parameters={"rope_theta": 1e4, "rope_type": "default"}),
        faults={"rope without its scaling": (nothing, ("scaling (llama3) is left out",))},
    ),
    Served(
        family="llama",
        arguments=overridden(tie_word_embeddings=True),
        faults={"head that is the embedding": (nothing, ("the head is the embedding",))},
    ),
)


def enlarged(family: str, folder: Path) -> None:
    make_model(family, folder, 2)
    make_tokenizer().save_pretrained(folder)  # SGLang loads one, though it is sent tokens
    path = folder / "model.safetensors"
    weights = load_file(path)
    larger = {name: it * LARGER if it.dim() > 1 else it for name, it in weights.items()}
    # Numbers that bfloat16 has, so that a server of either dtype has the trainer's weights.
    save_file({name: it.bfloat16().float() for name, it in larger.items()}, path, {"format": "pt"})


@contextlib.contextmanager
def started(served: Served, folder: Path) -> Iterator[tuple[TrainConfig, Any]]:
    """Start the server. Yields a config, and a function that connects to the server."""
    model = folder / "model"
    enlarged(served.family, model)
    own = [f"model.path={model}", f"run.folder={folder / 'run'}"]
    config = load_config(COUNT, [*own, "generation.max_new_tokens=16", "generation.temperature=0.8"])
    arguments = [*SGLANG_ARGUMENTS, *served.arguments]
    options = RolloutConfig(backend="sglang", server_args=arguments, token_file=TOKEN_FILE, **NEVER_LATE)
    with Supervisor(options, model, folder / "servers", dtype="float32") as supervisor:

        def connect() -> RemoteSGLangEngine:
            rollout = RemoteSGLangEngine(options, seed=1)
            rollout.initialize(supervisor.urls)
            return rollout

        yield config, connect


def all_found(folder: Path, place: int) -> dict[str, list[str]]:
    """Start one server of SERVED, plant each of its faults, and return what the doctor says of it."""
    served, found = SERVED[place], {}
    with started(served, folder) as (config, connect):
        for name, (plant, _) in served.faults.items():
            rollout = connect()
            engine = make_engine(folder / "model", ParallelConfig())
            with pytest.MonkeyPatch.context() as patch:
                plant(engine, patch)
                try:
                    found[name] = list(map(str, doctor.of_rollouts(config, rollout, engine, folder / "model", PROMPTS)))
                finally:
                    engine.close_publisher()
                    rollout.destroy()
    return found


def words_of(name: str) -> tuple[str, ...]:
    return next(served.faults[name][1] for served in SERVED if name in served.faults)


def planted() -> list[str]:
    """Names of all faults. Those of `nothing` are sound servers."""
    return [name for served in SERVED for name in served.faults]


TABLE = re.compile(r"(<!-- doctor: sglang -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def write(folder: Path) -> None:
    """Write the table of what the doctor says of each fault into the page."""
    found: dict[str, list[str]] = {}
    for place in range(len(SERVED)):
        found |= run_ranks(1, all_found, folder / str(place), place)[0]
        print(found, flush=True)
    text = table({name: said for name, said in found.items() if words_of(name)})
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda match: match[1] + text + match[3], page), encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
