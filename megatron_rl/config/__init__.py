"""Every option of a run, checked before any process group or GPU is touched; one dataclass per YAML section.

`load_config` refuses an unknown key, a wrong type and a value out of range with the key, the value, the rule and the
remedy. `option_records` has every option with its type, default, rule and text, for pages and commands that list them.
Importing this package imports no torch, and OmegaConf only once a config is loaded: a worker of rewards needs
`config.import_path` alone and stays small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_rl.config.algorithm_section import (
    COMPARE_GROUP,
    ESTIMATORS,
    LOSSES,
    PAIR_LOSSES,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    DemonstrationsConfig,
    PreferenceConfig,
    RewardModelConfig,
    RewardShapingConfig,
    SupervisedConfig,
)
from megatron_rl.config.data_section import MIXTURE, DataConfig, EvalConfig, WarmStartConfig
from megatron_rl.config.model_section import (
    PIPELINE_CUTS,
    BatchConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from megatron_rl.config.rollout_section import GenerationConfig, ReuseConfig, RolloutConfig
from megatron_rl.config.run_section import RunConfig, TelemetryConfig
from megatron_rl.config.teacher_section import TeacherConfig
from megatron_rl.config.train_config import TrainConfig

if TYPE_CHECKING:
    from megatron_rl.config.loading import config_of, load_config

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "COMPARE_GROUP",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "DemonstrationsConfig",
    "ESTIMATORS",
    "EngineConfig",
    "EvalConfig",
    "GenerationConfig",
    "LOSSES",
    "LoraConfig",
    "MIXTURE",
    "ModelConfig",
    "OptimizerConfig",
    "PAIR_LOSSES",
    "PIPELINE_CUTS",
    "ParallelConfig",
    "PreferenceConfig",
    "ReuseConfig",
    "RewardModelConfig",
    "RewardShapingConfig",
    "RolloutConfig",
    "RunConfig",
    "SupervisedConfig",
    "TeacherConfig",
    "TelemetryConfig",
    "TrainConfig",
    "WarmStartConfig",
    "config_of",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in ("config_of", "load_config"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # It imports YAML and OmegaConf, which whoever needs the sections alone does without.
    from megatron_rl.config import loading

    globals()[name] = getattr(loading, name)  # so that this is not asked for it again
    return globals()[name]
