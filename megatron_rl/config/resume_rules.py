"""What a resumed run does with each option that was changed since the checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from megatron_rl.config.loading import SECTIONS
from megatron_rl.config.train_config import TrainConfig

ROWS, START, FIXED = "taken if the rows are the same", "only at the start", "refused if changed"
"""ROWS: the new value applies, provided that the data's rows and their order are unchanged. START: the option matters
only at the start of a run, so a new value has no effect. FIXED: a new value is refused."""
SCHEDULED = "refused if changed, unless optimizer.schedule is constant"
_SCHEDULE = "lr min_lr schedule warmup_updates weight_decay"
_OPTIONS = {
    ROWS: "data.train data.train_args data.max_prompt_tokens data.max_tokens data.success_rates data.success_band "
    "demonstrations.source demonstrations.source_args demonstrations.answer",
    START: "model.init lora.path critic.model",
    SCHEDULED: "batch.updates_per_step run.steps",
    FIXED: "model.dtype lora.rank lora.alpha lora.targets critic.warmup_steps preference.loss supervised.answer "
    "data.shuffle warm_start.updates warm_start.prompts_per_update warm_start.lr warm_start.stop_at_reward "
    "warm_start.check_every_updates warm_start.folder run.seed "
    + " ".join(f"{section}.{name}" for section in ("optimizer", "critic.optimizer") for name in _SCHEDULE.split()),
}
ON_RESUME: dict[str, str] = {key: rule for rule, keys in _OPTIONS.items() for key in keys.split()}
"""Dotted key of an option -> its rule. For options without a rule, the new value applies from the resumed step on."""
STEERED = {"algo.kl_coefficient": "kl_target", "algo.entropy_coefficient": "entropy_target"}
"""Coefficient -> the option whose value, if above 0, lets the run adapt the coefficient. The configured coefficient is
then only an initial value."""


def saved_form(config: TrainConfig) -> dict[str, Any]:
    """Return the config as JSON data, in the form that a checkpoint stores.

    A value that JSON cannot represent is replaced by the name of its type.
    """
    text = json.dumps(dataclasses.asdict(config), default=lambda value: type(value).__qualname__)
    return dict(json.loads(text))


def changes_at_resume(saved: dict[str, Any], config: TrainConfig, checkpoint: str) -> list[str]:
    """Return lines that list the options changed since a checkpoint. Raises ValueError if one of them may not change.

    saved: the checkpoint's config in its `saved_form`. Options missing in `saved` are newer than the checkpoint and
    count as unchanged.
    """
    before, now = dict(_options(saved)), dict(_options(saved_form(config)))
    changed = [key for key in now if key in before and before[key] != now[key]]
    for key in changed:
        if reason := _refusal(key, before, now):
            raise ValueError(
                f"{key} = {now[key]!r}: the checkpoint {checkpoint!r} has {before[key]!r}, and {reason}; give the same "
                f"value, or start a new run from its weights."
            )
    steered = {key for key, target in STEERED.items() if getattr(config.algo, target) > 0}
    idle = [key for key in changed if key in steered or ON_RESUME.get(key) == START]
    lists = {"": [key for key in changed if key not in idle], ", and without effect in a run that has begun": idle}
    return [
        f"changed since the checkpoint{effect}: "
        + ", ".join(f"{key} = {now[key]!r} (was {before[key]!r})" for key in keys)
        for effect, keys in lists.items()
        if keys
    ]


def _refusal(key: str, before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the reason why a changed option is refused; empty if the change is allowed.

    before, now: all options' values.
    """
    rule = ON_RESUME.get(key)
    if rule == FIXED:
        return "a run keeps it from its start to its end"
    if rule == SCHEDULED:
        schedules = {name: now[name] for name in ("optimizer.schedule", "critic.optimizer.schedule")}
        key = next((name for name, schedule in schedules.items() if schedule != "constant"), "")
        return f"{key} = {schedules[key]} was laid out for as many updates" if key else ""
    if key == "algo.advantage" and "gae" in (before[key], now[key]):
        return "only gae has a critic"
    return ""


def _options(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every option of a config's saved form."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if key in SECTIONS and isinstance(value, dict):
            yield from _options(value, f"{key}.")
        else:
            yield key, value
