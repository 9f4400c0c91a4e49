"""The publisher that an experiment asks for."""

from pathlib import Path

from megatron_rl.api import WeightReceiver
from megatron_rl.config import EngineConfig
from megatron_rl.weights.delta import DeltaPublisher
from megatron_rl.weights.ipc import IPCPublisher
from megatron_rl.weights.publish import DiskPublisher, GroupPublisher, WeightPublisher


def make_publisher(receiver: WeightReceiver | None, config: EngineConfig, *, backend: str) -> WeightPublisher:
    """Return the publisher of `config.publication`; `backend` is that of the trainer's own groups."""
    if config.publication == "disk":
        return DiskPublisher(receiver, folder=Path(config.publication_folder), model_folder=config.model.path)
    if config.publication == "ipc":
        return IPCPublisher(receiver, bucket_bytes=config.bucket_bytes)
    if config.publication == "delta":
        return DeltaPublisher(receiver)
    return GroupPublisher(receiver, bucket_bytes=config.bucket_bytes, backend=backend)
