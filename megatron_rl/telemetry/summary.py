"""What the page and the picture of a run both show, as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.telemetry.run_log import RunRecord

SCORES = {
    "accuracy": "accuracy",
    "greedy_reward": "greedy reward",
    "reward/mean": "reward",
    "reward": "reward",
}
"""Metrics that can be an evaluation's score, the best first, and what to call them."""
UNMEASURED = "outside the phases"


@dataclass(frozen=True)
class EvaluationCurve:
    """One evaluation's score over the run. `is_share` says that the score is a share of right answers."""

    label: str
    steps: list[int]
    scores: list[float]
    is_share: bool

    @property
    def change(self) -> str:
        """The first and the last score."""
        form = ".0%" if self.is_share else ".2f"
        return f"{self.scores[0]:{form}} → {self.scores[-1]:{form}}"


def evaluation_curves(run: RunRecord) -> list[EvaluationCurve]:
    """Return the scores of every evaluation that has one, by its name in order of appearance."""
    curves = []
    for name in dict.fromkeys(line["name"] for line in run.evaluations):
        lines = [line for line in run.evaluations if line["name"] == name]
        key = next((key for key in SCORES if any(line.get(key) is not None for line in lines)), None)
        if key is None:
            continue
        lines = [line for line in lines if line.get(key) is not None]
        is_share = key == "accuracy" or is_right_or_wrong(run, name)
        score = "accuracy" if is_share and key == "reward/mean" else SCORES[key]
        curves.append(
            EvaluationCurve(
                label=f"{name.replace('_', '-')} {score}",
                steps=[line["step"] for line in lines],
                scores=[line[key] for line in lines],
                is_share=is_share,
            )
        )
    return curves


def is_right_or_wrong(run: RunRecord, name: str) -> bool:
    """True where every reply of the evaluation got 0 or 1, so that their mean is a share of right answers."""
    rewards = [s["reward"] for (split, _), rows in run.samples.items() if split == name for s in rows]
    return bool(rewards) and set(rewards) <= {0.0, 1.0}


def phase_seconds(line: dict[str, Any]) -> dict[str, float]:
    """Return a step's seconds by phase, with what no phase accounts for."""
    phases = {k.removeprefix("time/"): v or 0.0 for k, v in line.items() if k.startswith("time/") and k != "time/step"}
    rest = (line.get("time/step") or 0.0) - sum(phases.values())
    return phases | ({UNMEASURED: rest} if rest > 0 else {})


def phases_by_size(seconds: list[dict[str, float]]) -> dict[str, float]:
    """Return the total of each phase over all steps, the largest first and the unmeasured rest last."""
    names = {name for phases in seconds for name in phases}
    totals = {name: sum(phases.get(name, 0.0) for phases in seconds) for name in names}
    return {name: totals[name] for name in sorted(totals, key=lambda name: (name == UNMEASURED, -totals[name], name))}


def column(lines: list[dict[str, Any]], key: str) -> list[float | None]:
    return [line.get(key) for line in lines]
