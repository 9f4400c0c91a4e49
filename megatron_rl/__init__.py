"""Megatron-native reinforcement learning for large language models. Public names are imported when first used."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "EngineConfig": "config",
    "GenerationConfig": "config",
    "ModelConfig": "config",
    "OptimizerConfig": "config",
    "ParallelConfig": "config",
    "RolloutConfig": "config",
    "TrainConfig": "config",
    "load_config": "config",
    "FinetuneSpec": "types",
    "LLMRequest": "types",
    "LLMResponse": "types",
    "StepStats": "types",
    "Trajectory": "types",
    "TrajectoryBatch": "types",
    "InferenceEngine": "api",
    "LogprobLoss": "api",
    "RolloutWorkflow": "api",
    "TrainEngine": "api",
    "together": "api",
    "FSDPEngine": "engine.fsdp_engine",
    "MegatronEngine": "engine.megatron_engine",
    "RemoteSGLangEngine": "rollout.sglang_engine",
    "gather_logprobs": "ops",
    "start_servers": "servers.supervisor",
    "stats_tracker": "telemetry.stats_tracker",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    home = importlib.import_module(f"{__name__}.{_HOME[name]}")
    return home if home.__name__.endswith(f".{name}") else getattr(home, name)
