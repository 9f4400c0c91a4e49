"""What a resumed run does with each option that was changed since the checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from megatron_rl.config.train_config import TrainConfig

TAKEN, ROWS, START, FIXED = "taken", "taken if the rows are the same", "only at the start", "refused if changed"
"""TAKEN: the new value applies from now on. ROWS: the new value applies, provided that the data's rows and their order
are unchanged. START: the option matters only at the start of a run, so a new value has no effect. FIXED: a new value is
refused."""
SCHEDULED = "refused if changed, unless optimizer.schedule is constant"

_OPTIMIZER = {
    TAKEN: "beta1 beta2 eps clip_grad distributed overlap megatron",
    FIXED: "lr min_lr schedule warmup_updates weight_decay",
}
_PARALLEL = {TAKEN: "tensor pipeline virtual_pipeline context expert expert_tensor sequence"}
_BY_SECTION: dict[str, dict[str, str]] = {
    "model": {TAKEN: "path transformer_impl flash_attention shared_keys delta_kernel", START: "init", FIXED: "dtype"},
    "parallel": _PARALLEL,
    "optimizer": _OPTIMIZER,
    "lora": {START: "path", FIXED: "rank alpha targets"},
    "draft": {TAKEN: "kind tokens tokens_per_pass depths lr"},
    "batch": {
        TAKEN: "prompts_per_step tokens_per_microbatch allow_longer_sequences share_prompts",
        SCHEDULED: "updates_per_step",
    },
    "generation": {
        TAKEN: "n_samples max_new_tokens min_new_tokens temperature top_p top_k min_p supports repetition_penalty "
        "frequency_penalty presence_penalty logit_bias greedy stop stop_token_ids ignore_eos seed"
    },
    "algo": {
        TAKEN: "advantage advantage_args advantage_mean advantage_std advantage_clip loss loss_args clip_low clip_high "
        "dual_clip aggregation aggregation_length high_entropy_share high_entropy_level kl_coefficient kl_estimator "
        "kl_in kl_target kl_horizon positive_weight positive_reward entropy_coefficient entropy_target entropy_step "
        "routing_replay"
    },
    "reward_shaping": {TAKEN: "cut_off_share overlong_buffer overlong_penalty per_token running clip"},
    "correction": {
        TAKEN: "proximal weight level low high negative_bound reject reject_level reject_bound alarm",
    },
    "critic": {
        TAKEN: "discount trace_decay level decoupled length_factor value_clip",
        START: "model",
        FIXED: "warmup_steps",
    },
    "critic.parallel": _PARALLEL,
    "critic.optimizer": _OPTIMIZER,
    "reward_model": {TAKEN: "path coefficient"},
    "reward_model.parallel": _PARALLEL,
    "teacher": {TAKEN: "path servers token_file hint by_source coefficient kl_in top_k"},
    "demonstrations": {TAKEN: "weight rows_per_step", ROWS: "source source_args answer"},
    "preference": {TAKEN: "loss_args", FIXED: "loss"},
    "supervised": {FIXED: "answer"},
    "rollout": {
        TAKEN: "workflow workflow_args reward recipe reward_workers servers registry router backend server_count exact "
        "server_restarts health_timeout_s server_args token_file devices colocated max_concurrent_episodes "
        "max_staleness stale cut_off max_uniform_resamples oversample interruption part_tokens max_cache_age "
        "request_timeout_s control_timeout_s start_timeout_s publication bucket_bytes episode_attempts "
        "max_infrastructure_failures journal_replies"
    },
    "reuse": {TAKEN: "groups_per_step buffer_groups max_age_steps solved_reward"},
    "data": {
        TAKEN: "evaluation evaluation_args template_args sampling least_chance",
        ROWS: "train train_args max_prompt_tokens max_tokens success_rates success_band",
        FIXED: "shuffle",
    },
    "eval": {TAKEN: "sets samples_per_prompt temperature top_p"},
    "warm_start": {FIXED: "updates prompts_per_update lr stop_at_reward check_every_updates folder"},
    "run": {
        TAKEN: "folder import_from evaluate_every_steps save_every_steps save_at_end checkpoint_every_steps "
        "keep_checkpoints grace_s phase_timeout_s most_skipped_updates threads_per_rank offload",
        SCHEDULED: "steps",
        FIXED: "seed",
    },
    "telemetry": {TAKEN: "loggers project prometheus samples_logged trace_steps record_steps"},
}
ON_RESUME: dict[str, str] = {
    f"{section}.{name}": rule
    for section, rules in _BY_SECTION.items()
    for rule, names in rules.items()
    for name in names.split()
} | {"megatron": TAKEN}
"""Rule of each option, by dotted key."""
STEERED = {"algo.kl_coefficient": "kl_target", "algo.entropy_coefficient": "entropy_target"}
"""Coefficients that the run adapts if the option after the colon is above 0. Their configured values are then only
initial values."""


def saved_form(config: TrainConfig) -> dict[str, Any]:
    """Return the config as JSON data, as stored in a checkpoint.

    Values that JSON cannot represent become their type's name.
    """
    text = json.dumps(dataclasses.asdict(config), default=lambda value: type(value).__qualname__)
    return dict(json.loads(text))


def changes_at_resume(saved: dict[str, Any], config: TrainConfig, checkpoint: str) -> list[str]:
    """List the options changed since a checkpoint, as lines to show. Raises ValueError if one of them may not change.

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
    words = {key: f"{key} = {now[key]!r} (was {before[key]!r})" for key in changed}
    idle = [key for key in changed if _rule(key, config) == START]
    taken = [key for key in changed if key not in idle]
    lines = [f"changed since the checkpoint: {', '.join(words[key] for key in taken)}"] if taken else []
    if idle:
        at_start = ", ".join(words[key] for key in idle)
        lines.append(f"changed since the checkpoint, and without effect in a run that has begun: {at_start}")
    return lines


def _rule(key: str, config: TrainConfig) -> str:
    if key in STEERED and getattr(config.algo, STEERED[key]) > 0:
        return START
    return ON_RESUME[key]


def _refusal(key: str, before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return why a changed option is refused; empty if it is allowed."""
    if ON_RESUME[key] == FIXED:
        return "a run keeps it from its start to its end"
    if ON_RESUME[key] == SCHEDULED:
        schedules = {name: now[name] for name in ("optimizer.schedule", "critic.optimizer.schedule")}
        key = next((name for name, schedule in schedules.items() if schedule != "constant"), "")
        return f"{key} = {schedules[key]} was laid out for as many updates" if key else ""
    if key == "algo.advantage" and "gae" in (before[key], now[key]):
        return "only gae has a critic"
    return ""


def _options(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every option of a config's saved form with its dotted key."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if key in _BY_SECTION and isinstance(value, dict):
            yield from _options(value, f"{key}.")
        elif key in ON_RESUME:
            yield key, value
