"""Archives with all that a replay needs, to attach to a report and to replay elsewhere.

An archive has the records of the steps to take, the model's config and tokenizer and, with weights, the checkpoint
before these steps. Its name ends in .tar.gz, or in .tar.zst, which needs pyarrow.
"""

from __future__ import annotations

import contextlib
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.replay.records import read_record
from megatron_rl.replay.replay import path_to
from megatron_rl.run.run_checkpoints import FOLDER as CHECKPOINTS
from megatron_rl.run.step_records import FOLDER as RECORDS
from megatron_rl.weights.hf_files import WEIGHTS

MODEL = "model"
ENDINGS = (".tar.gz", ".tar.zst")


def write_replay_file(run: Path, step: int, target: Path, *, with_weights: bool, checkpoint: Path | None = None) -> str:
    """Write the archive `target`, and return a line about it.

    Raises ValueError if the step cannot be replayed from here.
    """
    first, start = path_to(run, step, checkpoint)
    config = yaml.safe_load(read_record(run / RECORDS / f"step-{step}").facts["config"])
    model = Path(config["model"]["path"])
    if not model.is_dir():
        raise ValueError(f"model.path = {str(model)!r}: is not here; run this where the run's model folder is.")
    needs_model = start is None and config["model"]["init"] == "hf"
    aside = target.with_name(f".{target.name}.partial")
    with _opened(aside, target.name, "w") as archive:
        for number in range(first, step + 1):
            archive.add(run / RECORDS / f"step-{number}", f"{RECORDS}/step-{number}")
        for path in sorted(model.iterdir()):
            if path.is_file() and (not path.name.endswith(WEIGHTS) or (needs_model and with_weights)):
                archive.add(path.resolve(), f"{MODEL}/{path.name}")
        if with_weights and start is not None:
            archive.add(start, f"{CHECKPOINTS}/step-{first}")
    aside.replace(target)
    lacks = needs_model or start is not None
    of = f"the weights of {model}" if start is None else f"the checkpoint of step {first}"
    about = f"without {of}, which a replay needs" if lacks and not with_weights else "complete"
    return f"{target}: {target.stat().st_size / 1e6:.2f} MB, {about}"


def unpack(file: Path, folder: Path) -> Path:
    """Unpack an archive into an empty folder, and return this folder, which then has the layout of a run's folder.

    Raises ValueError if the file is no such archive. No member of it can be written outside the folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with _opened(file, file.name, "r") as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(
            f"run = {str(file)!r}: cannot be unpacked ({error}); give a run's folder or a file of --export."
        ) from error
    return folder


def model_of(unpacked: Path, overrides: list[str]) -> list[str]:
    """Return the setting of model.path to the model in the archive, in a list; [] if the overrides set model.path."""
    return [] if any(it.startswith("model.path=") for it in overrides) else [f"model.path={unpacked / MODEL}"]


@contextlib.contextmanager
def _opened(path: Path, name: str, mode: str) -> Iterator[tarfile.TarFile]:
    if not name.endswith(ENDINGS):
        raise ValueError(f"{name!r}: must end in {' or '.join(ENDINGS)}.")
    options: dict[str, Any] = {"name": path, "mode": f"{mode}:gz"}
    with contextlib.ExitStack() as open_files:
        if name.endswith(".zst"):
            try:
                import pyarrow
            except ModuleNotFoundError as error:
                raise ValueError(
                    f"{name!r}: .zst needs pyarrow; install the extra `data`, or take a name that ends in .tar.gz."
                ) from error
            make = pyarrow.CompressedOutputStream if mode == "w" else pyarrow.CompressedInputStream
            options = {"fileobj": open_files.enter_context(make(str(path), "zstd")), "mode": f"{mode}|"}
        yield open_files.enter_context(tarfile.open(**options))
