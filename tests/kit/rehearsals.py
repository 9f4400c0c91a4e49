"""Rehearsals of ranks on a device without memory, as `megatron-rl rehearse` has them, by one process of a session."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config import load_config
from megatron_rl.tools.plan.plan_command import with_models
from megatron_rl.tools.rehearsal import rehearsal
from megatron_rl.weights.architecture import read_architecture
from tests.kit.waiting import LATE_S

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests" / "model_configs"
PROGRAM = Path(__file__).with_name("rehearsal_process.py")
MOST_RESIDENT_KB = 2_500_000
FLA = Path(sys.prefix) / "share" / "fla"  # where `make` puts it
HAS_FLA = (FLA / "fla").is_dir() and importlib.util.find_spec("triton") is not None
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"

Found = dict[int, dict[str, Any] | str]
"""By rank what it found, or the text of the fault that ended it."""


def order_of(config: str | Path, ranks: int, overrides: Sequence[str], **more: Any) -> dict[str, Any]:
    """Return the order of a rank on nodes of 8 GPUs of 80 GiB; more: its fields, `rank` among them."""
    order = {"world_size": ranks, "gpus_per_node": 8, "memory_bytes": 80 << 30, "config": str(ROOT / config)}
    return order | {"overrides": list(overrides)} | more


def write_shape(folder: Path, name: str, **changes: Any) -> str:
    """Write a published config.json (tests/model_configs) with other sizes to a new folder; return its setting."""
    published = json.loads((MODELS / name / "config.json").read_text())
    published.pop("quantization_config", None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published | changes))
    return f"model.path={folder}"


def write_tiny(folder: Path, family: str, **changes: Any) -> None:
    """Write the config.json of one of tests.kit.models' tiny models, with a long context and with these changes."""
    # Late, because transformers' models and megatron.core take seconds to import.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tests.kit.models import config_of

    config = config_of(family, None)
    config.update({"max_position_embeddings": 4096})
    named = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | named | changes))


def few_layers(path: Path, folder: Path) -> list[str]:
    """Write the model's config.json with one layer of each kind on a stage; return the settings for it.

    Dense layers before mixtures all stay, on the first stage. Of a config that recomputes some layers of a stage, the
    layer that is recomputed comes with one that is not.
    """
    config = with_models(load_config(path), MODELS)
    mixture = read_architecture(config.model.path).mixture
    dense, given = mixture.layers.index(True) if mixture else 0, config.megatron
    is_half = given.get("recompute_method") == "block"
    each, sizes = 1 + is_half, {FIRST: dense + 1 + is_half, LAST: 1 + is_half}
    layers = dense + each * config.parallel.pipeline
    model = write_shape(folder, Path(config.model.path).name, num_hidden_layers=layers)
    cuts = [f"megatron.{key}={size}" for key, size in sizes.items() if key in given]
    return [model, *cuts, *(["megatron.recompute_num_layers=1"] if is_half else [])]


ONE_DELTA_NET = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
"""For `write_tiny`: torch launches 6,000 kernels for each delta net and microbatch, so one of them is enough."""


class Rehearsals:
    """Asks the process, which starts with the first rehearsal."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._process: subprocess.Popen[str] | None = None

    def of(
        self, folder: Path, orders: Sequence[dict[str, Any]], *, faults: Sequence[str] = (), hears: Path | None = None
    ) -> Found:
        """Rehearse ranks one after the other, with faults of tests.kit.planted_faults in the engine's code.

        They hear what those before them said, and those of `hears`, which is the folder of another rehearsal.
        """
        resident_kb = self._ask(folder=folder, orders=list(orders), faults=list(faults), hears=hears or "")
        assert resident_kb < MOST_RESIDENT_KB, "large tensors have no memory"
        return {order["rank"]: _result(folder / str(order["rank"])) for order in orders}

    def run_programs(self, folder: Path) -> dict[str, list[dict[str, int]]]:
        """Return the faults of streams in each program of tests.kit.stream_programs, and in its mended form."""
        self._ask(folder=folder, programs=True)
        return json.loads((folder / "found.json").read_text())

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let `megatron-rl rehearse` ask this process where it would start one of its own."""

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            assert command[-2] == str(rehearsal.PROGRAM)
            self._ask(folder=command[-1])
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(rehearsal, "subprocess", SimpleNamespace(run=run))

    def _ask(self, **asked: Any) -> int:
        if self._process is None:
            with self.output.open("w") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(PROGRAM)],
                    env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *([str(FLA)] if HAS_FLA else [])])},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                )
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(asked, default=str) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self.output.read_text()[-2000:]
        return int(answer)

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=LATE_S)


def _result(place: Path) -> dict[str, Any] | str:
    if (place / "found.json").exists():
        return json.loads((place / "found.json").read_text())
    return (place / "fault.txt").read_text()


@pytest.fixture(scope="session")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsals]:
    found = Rehearsals(tmp_path_factory.mktemp("rehearsals") / "output.txt")
    yield found
    found.close()
