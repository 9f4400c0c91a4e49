"""Computes the numbers that report.html and report.svg both show."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from megatron_rl.telemetry.run_log import RunRecord, is_number


@dataclass(frozen=True, kw_only=True)
class Aim:
    """The main metric of a run, with its display name and number format."""

    metric: str
    name: str
    form: str = ".2f"
    lower_is_better: bool = False

    @property
    def label(self) -> str:
        return f"train {self.name}" + LOWER_IS_BETTER * self.lower_is_better


LOWER_IS_BETTER = " (lower is better)"
AIMS = (
    Aim(metric="reward/mean", name="reward"),
    Aim(metric="preference/accuracy", name="accuracy", form=".0%"),
    Aim(metric="supervised/loss", name="loss", form=".3f", lower_is_better=True),
)
"""Candidates for a run's main metric. The first one that the run logs is chosen."""
SCORES = {
    "accuracy": "accuracy",
    "greedy_reward": "greedy reward",
    "reward/mean": "reward",
    "reward": "reward",
    "loss": f"loss{LOWER_IS_BETTER}",
}
"""{metric: display name}. An evaluation's score is the first of these metrics that the evaluation logs."""
UNMEASURED = "outside the phases"


@dataclass(frozen=True)
class EvaluationCurve:
    """One evaluation's score over the run, with the format of its numbers."""

    label: str
    steps: list[int]
    scores: list[float]
    form: str

    @property
    def change(self) -> str:
        """First and last score as text, such as `0.25 → 0.50`."""
        return f"{self.scores[0]:{self.form}} → {self.scores[-1]:{self.form}}"


def aim_of(run: RunRecord) -> Aim | None:
    """Return the run's main metric; None before its first step, or if the run logs none of AIMS."""
    return next((aim for aim in AIMS if has_values(column(run.steps, aim.metric))), None)


def tenth_of(run: RunRecord, aim: Aim) -> int:
    """Return a tenth of the number of steps with this metric, at least 1."""
    return max(1, sum(value is not None for value in column(run.steps, aim.metric)) // 10)


def change_of(run: RunRecord, aim: Aim) -> str | None:
    """Return the metric's means over the first and over the last tenth of steps, as text; None if no step has it."""
    values = [value for value in column(run.steps, aim.metric) if value is not None]
    if not values:
        return None
    count = tenth_of(run, aim)
    first, last = statistics.fmean(values[:count]), statistics.fmean(values[-count:])
    return f"{first:{aim.form}} → {last:{aim.form}}"


def evaluation_curves(run: RunRecord) -> list[EvaluationCurve]:
    """Return the curves of all evaluations that have a score, in order of appearance."""
    curves = []
    for name in dict.fromkeys(line["name"] for line in run.evaluations):
        lines = [line for line in run.evaluations if line["name"] == name]
        key = next((key for key in SCORES if any(is_number(line.get(key)) for line in lines)), None)
        if key is None:
            continue
        lines = [line for line in lines if is_number(line.get(key))]
        # A mean of 0/1 rewards is an accuracy. Label it so, because readers look for an accuracy.
        is_share = key == "accuracy" or is_right_or_wrong(run, name)
        score = "accuracy" if is_share and key == "reward/mean" else SCORES[key]
        curves.append(
            EvaluationCurve(
                label=f"{name.replace('_', '-')} {score}",
                steps=[line["step"] for line in lines],
                scores=[line[key] for line in lines],
                form=".0%" if is_share else ".3f" if key == "loss" else ".2f",
            )
        )
    return curves


def is_right_or_wrong(run: RunRecord, name: str) -> bool:
    """Return True if every logged reward of the evaluation is 0 or 1, so that the mean reward is an accuracy."""
    rewards = [s["reward"] for (split, _), rows in run.samples.items() if split == name for s in rows]
    return bool(rewards) and set(rewards) <= {0.0, 1.0}


def phase_seconds(line: dict[str, Any]) -> dict[str, float]:
    """Return a step's seconds by phase. The rest of the step's time has the key UNMEASURED."""
    times = {k.removeprefix("time/"): v for k, v in line.items() if k.startswith("time/") and is_number(v)}
    whole = times.pop("step", 0.0)
    # Phases never overlap (telemetry.timers), so the rest was spent outside of them.
    rest = whole - sum(times.values())
    return times | ({UNMEASURED: rest} if rest > 0 else {})


def phases_by_size(seconds: list[dict[str, float]]) -> dict[str, float]:
    """Return each phase's total over all steps, largest first, with UNMEASURED last."""
    names = {name for phases in seconds for name in phases}
    totals = {name: sum(phases.get(name, 0.0) for phases in seconds) for name in names}
    return {name: totals[name] for name in sorted(totals, key=lambda name: (name == UNMEASURED, -totals[name], name))}


def numbers(lines: list[dict[str, Any]]) -> list[int]:
    """Return the steps' numbers counted from 1, as in the terminal and in evaluations. The files count from 0."""
    return [line["step"] + 1 for line in lines]


def has_values(values: list[float | None]) -> bool:
    return any(value is not None for value in values)


def column(lines: list[dict[str, Any]], key: str) -> list[float | None]:
    """Return a metric's value in each line; None if it is missing or not a number."""
    return [line[key] if is_number(line.get(key)) else None for line in lines]
