"""All options of a run, one dataclass per YAML section, checked before any process group or GPU is used.

`load_config` rejects unknown keys, wrong types and out-of-range values; errors name the key, the value, the rule and
the fix. Importing this package does not import torch, and imports OmegaConf only when a config is loaded, which keeps
reward workers small.
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
    DraftConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from megatron_rl.config.rollout_section import (
    MOST_REPORTED,
    UNADJUSTED,
    GenerationConfig,
    ReuseConfig,
    RolloutConfig,
)
from megatron_rl.config.run_section import RunConfig, TelemetryConfig
from megatron_rl.config.teacher_section import TeacherConfig
from megatron_rl.config.train_config import TrainConfig

if TYPE_CHECKING:
    from megatron_rl.config.loading import config_of, load_config


def __getattr__(name: str) -> Any:
    if name not in ("config_of", "load_config"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported late: it pulls in YAML and OmegaConf, which code that needs only the sections does without.
    from megatron_rl.config import loading

    globals()[name] = getattr(loading, name)  # so that the next access does not come here
    return globals()[name]
