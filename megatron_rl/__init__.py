"""Megatron-native reinforcement learning for large language models. Public names are imported when first used.

`train_on(rows, model, reward)` is a whole run. `examples/own_task/train.py` writes out the loop with the other names.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "AlgorithmConfig": "config",
    "CorrectionConfig": "config",
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
    "InfrastructureFailure": "api",
    "LogprobLoss": "api",
    "RolloutWorkflow": "api",
    "TrainEngine": "api",
    "together": "api",
    "Run": "python_run",
    "train_on": "python_run",
    "PolicyActor": "algo.actor",
    "PromptIterator": "data.prompts",
    "load_prompts": "data.prompts",
    "load_tokenizer": "data.tokens",
    "FSDPEngine": "engine.fsdp_engine",
    "MegatronEngine": "engine.megatron_engine",
    "RemoteSGLangEngine": "rollout.sglang_engine",
    "mean_reward": "rollout.groups",
    "gather_logprobs": "ops",
    "start_servers": "servers.supervisor",
    "log_metric": "telemetry.stats_tracker",
    "stats_tracker": "telemetry.stats_tracker",
    "AgentWorkflow": "agents",
    "BestOfNWorkflow": "workflows",
    "DebateWorkflow": "workflows",
    "JudgedWorkflow": "workflows",
    "MultiTurnWorkflow": "workflows",
    "RLVRWorkflow": "workflows",
    "ReMaxWorkflow": "workflows",
    "ToolUseWorkflow": "workflows",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    home = importlib.import_module(f"{__name__}.{_HOME[name]}")
    return home if home.__name__.endswith(f".{name}") else getattr(home, name)
