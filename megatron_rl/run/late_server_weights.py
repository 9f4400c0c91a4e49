"""Leaves the published weights in a folder for servers that come late and can have them from no peer."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from megatron_rl.api import TrainEngine
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.process import RolloutProcess
from megatron_rl.weights.hf_files import write_hf_folder

logger = logging.getLogger(__name__)


def leave_weights(
    engine: TrainEngine, rollout: RolloutProcess | None, groups: ParallelGroups, folder: Path, model_folder: str
) -> None:
    """Write `folder`/version-N where a server is away that will need it, and tell the client; forget older ones.

    All ranks call it right after a publication; the main rank gives the client that published. Where the folder cannot
    be written, that server waits for the next publication.
    """
    is_wanted = groups.is_main and rollout is not None and rollout.wants_folder
    if not groups.any(is_wanted):
        return
    version = engine.get_version()
    target, tensors = folder.absolute() / f"version-{version}", iter(engine.hf_tensors())
    if groups.is_main and rollout is not None:
        try:
            write_hf_folder(target, tensors, model_folder=model_folder, dtype=None)
            rollout.offer_folder(str(target), version)
        except OSError as error:
            logger.warning("weights for servers that come late were not written: %s", error)
        for other in folder.glob("version-*"):
            if other != target:
                shutil.rmtree(other, ignore_errors=True)
    for _ in tensors:  # the stream is a collective
        pass
