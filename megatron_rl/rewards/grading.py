"""The question put to a judge about a reply, and the grade read from the judge's verdict.

The reply comes from a model that is optimised for the grade. So the reply must not be able to inject a grade of its
own, or placeholders that the question's template would fill.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from megatron_rl.rewards import gold

QUESTION = (
    "Question:\n{question}\n\nAnswer of a student:\n{reply}\n\n"
    "Judge the answer. End with its grade from 0 (wrong) to {best} (right and clear) as <score>grade</score>."
)
RUBRIC_QUESTION = (
    "Question:\n{question}\n\nAnswer of a student:\n{reply}\n\nCriteria:\n{criteria}\n\n"
    "For each criterion, whether it is good to meet it or bad, say whether the answer meets it. End with a line for "
    "each of them, its number and yes or no: <met>1: yes</met>"
)
PLACE = re.compile(r"\{(question|reply|answer|best|criteria)\}")
MET = re.compile(r"<met>\s*([0-9]{1,4})\s*:\s*(yes|no)\s*</met>", re.IGNORECASE)
GRADE = re.compile(r"<score>\s*([0-9]{1,4}(?:\.[0-9]{1,4})?)\s*</score>")
TAG = re.compile(
    r"<(?=\s*(?:/\s*)?(?:score|met\b)|[|\uff5c]|/?s>|/?(?:start|end)_of_turn>|[be]os>)|\[(?=/?(?:INST|SYS))",
    re.IGNORECASE,
)
"""Matches the start of grade tags, and of chat templates' control tokens that would end the reply's message."""


class NoVerdict(RuntimeError):
    """The judge gave no grade in any of its attempts."""


@dataclass(frozen=True, kw_only=True)
class Grading:
    """Grading of replies from 0 to `best`. The last grade in a verdict counts; a grade above `best` is not valid.

    grading = Grading(best=5)
    messages = grading.asked("2+2=", "It is 4.", {})  # for a judge
    grading.grade_of("Right. <score>4</score>")  # 0.8
    """

    question: str = QUESTION
    """Template with {reply}, and optionally {question}, {answer} (from the prompt's row) and {best}."""
    best: float = 10.0
    attempts: int = 3

    def __post_init__(self) -> None:
        for key, value, is_right, rule in (
            ("question", self.question, "{reply}" in self.question, "must have {reply}, where the judge reads it"),
            ("best", self.best, self.best > 0, "must be above 0"),
            ("attempts", self.attempts, self.attempts >= 1, "must be at least 1"),
        ):
            if not is_right:
                raise ValueError(f"{key} = {value!r}: {rule}.")

    def asked(self, prompt: str, reply: str, data: dict[str, Any]) -> list[dict[str, str]]:
        """Return the messages for a judge. ValueError if the template has {answer} but `data` has no answer.

        prompt: the question's text. It is not used if `data` has `messages`.
        """
        if "messages" in data:
            prompt = "\n".join(str(message["content"]) for message in data["messages"])
        shown = {
            "question": prompt,
            # Replace the first bracket of the reply's own grades and control tokens, so that they are plain text.
            "reply": TAG.sub(lambda tag: "[" if tag[0] == "<" else "(", reply),
            "best": f"{self.best:g}",
            "criteria": self.criteria_text,
        }
        if "{answer}" in self.question:
            shown["answer"] = gold(data)
        # In one pass, so that a placeholder inside the reply is not replaced.
        return [{"role": "user", "content": PLACE.sub(lambda place: shown[place[1]], self.question)}]

    @property
    def criteria_text(self) -> str:
        return "{criteria}"

    def grade_of(self, verdict: str) -> float | None:
        """Return a verdict's grade in [0, 1]; None if it has no valid grade."""
        found = GRADE.findall(verdict)
        grade = float(found[-1]) if found else self.best + 1
        return grade / self.best if grade <= self.best else None

    async def grade(self, verdict: Callable[[int], Awaitable[str]]) -> float:
        """Return the grade of the first verdict that has one, from `verdict(attempt)` of each attempt in turn.

        NoVerdict if none has.
        """
        for attempt in range(self.attempts):
            if (grade := self.grade_of(await verdict(attempt))) is not None:
                return grade
        raise NoVerdict(f"the judge {self.lacking} in {self.attempts} attempts.")

    @property
    def lacking(self) -> str:
        """What the judge failed to do, for the message of NoVerdict."""
        return f"gave no <score>0 to {self.best:g}</score>"


@dataclass(frozen=True, kw_only=True)
class RubricGrading(Grading):
    """Grading by criteria: the sum of the weights of criteria met, divided by the sum of positive weights.

    The grade is clipped to [0, 1]. A criterion with a negative weight lowers the grade if the reply meets it. The last
    verdict on each criterion counts. Every criterion needs a verdict.

        rubric = RubricGrading(criteria=(("names the river", 2.0), ("is rude", -1.0)))
        rubric.grade_of("<met>1: yes</met> <met>2: no</met>")  # 1.0
    """

    question: str = RUBRIC_QUESTION
    criteria: tuple[tuple[str, float], ...] = ()

    @property
    def criteria_text(self) -> str:
        return "\n".join(f"{number}. {text}" for number, (text, _) in enumerate(self.criteria, start=1))

    def grade_of(self, verdict: str) -> float | None:
        found = {int(number): word.lower() == "yes" for number, word in MET.findall(verdict)}
        if not all(number in found for number in range(1, len(self.criteria) + 1)):
            return None
        met = sum(weight for number, (_, weight) in enumerate(self.criteria, start=1) if found[number])
        return min(max(met / sum(weight for _, weight in self.criteria if weight > 0), 0.0), 1.0)

    @property
    def lacking(self) -> str:
        return f"said not of all {len(self.criteria)} criteria whether they are met"


def criteria_of(given: Any, where: str) -> tuple[tuple[str, float], ...]:
    """Return (text, weight) pairs from `[{criterion: text, weight: 1.0}]`. ValueError names the place `where`."""
    rule = "must be a list of {criterion: text, weight: a number that is not 0}, one weight at least above 0"
    found = []
    for entry in given if isinstance(given, list | tuple) else [given]:
        text, weight = (entry.get("criterion"), entry.get("weight", 1.0)) if isinstance(entry, dict) else (None, 0.0)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (isinstance(text, str) and text.strip() and is_number and isfinite(weight) and weight):
            raise ValueError(f"{where}: has {entry!r:.200}; {rule}.")
        found.append((text.strip(), float(weight)))
    if not any(weight > 0 for _, weight in found):
        raise ValueError(f"{where} = {given!r:.200}: {rule}.")
    return tuple(found)
