"""Every option of a run, checked before any process group or GPU is touched; one dataclass per YAML section.

`load_config` refuses an unknown key, a wrong type and a value out of range with the key, the value, the rule and the
remedy. `described_options` returns every option with its type, default, rule and text, for pages and commands that list
them. Importing this package imports no torch, and OmegaConf only once a config is loaded: a worker of rewards needs
`config.import_path` alone and stays small.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_rl.config.algorithm_section import (
    COMPARE_GROUP,
    ESTIMATORS,
    LOSSES,
    PAIR_LOSSES,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    PreferenceConfig,
    RewardModelConfig,
    RewardShapingConfig,
    SupervisedConfig,
)
from megatron_rl.config.data_section import MIXTURE, DataConfig, EvalConfig, WarmStartConfig
from megatron_rl.config.model_section import BatchConfig, EngineConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_rl.config.rollout_section import GenerationConfig, RolloutConfig
from megatron_rl.config.run_section import RunConfig, TelemetryConfig
from megatron_rl.config.train_config import TrainConfig

if TYPE_CHECKING:
    from megatron_rl.config.loading import SECTIONS, load_config
    from megatron_rl.config.option_records import DescribedOption, described_options

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "COMPARE_GROUP",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "DescribedOption",
    "ESTIMATORS",
    "EngineConfig",
    "EvalConfig",
    "GenerationConfig",
    "LOSSES",
    "MIXTURE",
    "ModelConfig",
    "OptimizerConfig",
    "PAIR_LOSSES",
    "ParallelConfig",
    "PreferenceConfig",
    "RewardModelConfig",
    "RewardShapingConfig",
    "RolloutConfig",
    "RunConfig",
    "SECTIONS",
    "SupervisedConfig",
    "TelemetryConfig",
    "TrainConfig",
    "WarmStartConfig",
    "described_options",
    "load_config",
]


# These import YAML and OmegaConf, which whoever needs the sections alone does without.
_LATER = {
    "DescribedOption": "option_records",
    "SECTIONS": "loading",
    "described_options": "option_records",
    "load_config": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = found  # so that this is not asked for the name again
    return found
