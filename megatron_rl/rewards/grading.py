"""The question that a judge is asked of a reply, and the grade that its verdict says.

The reply is a model's under optimisation: it cannot bring a grade of its own in, or fill the question's other places.
"""

from __future__ import annotations

import re
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
"""Marks of a grade, or of the control tokens of chat templates, which would end the message that shows the reply."""


class NoVerdict(RuntimeError):
    """The judge gave no grade in any of its attempts. A judge that says nothing has judged nothing."""


@dataclass(frozen=True, kw_only=True)
class Grading:
    """The grading of replies, from 0 to `best`. The last grade of a verdict counts, and one past the best is none.

    grading = Grading(best=5)
    messages = grading.asked("2+2=", "It is 4.", {})  # for a judge
    grading.grade_of("Right. <score>4</score>")  # 0.8
    """

    question: str = QUESTION
    """With {reply}, and {question}, {answer} (the prompt's own) and {best} where they are wanted."""
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
        """Return the messages for a judge. ValueError where the question wants an answer and the prompt has none.

        prompt: its text, which is shown where the data have no `messages`.
        """
        if "messages" in data:
            prompt = "\n".join(str(message["content"]) for message in data["messages"])
        shown = {
            "question": prompt,
            # The reply's own grades and control tokens lose their first bracket, and read on as text.
            "reply": TAG.sub(lambda tag: "[" if tag[0] == "<" else "(", reply),
            "best": f"{self.best:g}",
            "criteria": self.criteria_text,
        }
        if "{answer}" in self.question:
            shown["answer"] = gold(data)
        # All at once: a place that the reply names stays what it is.
        return [{"role": "user", "content": PLACE.sub(lambda place: shown[place[1]], self.question)}]

    @property
    def criteria_text(self) -> str:
        return "{criteria}"

    def grade_of(self, verdict: str) -> float | None:
        """Return a verdict's grade in [0, 1]; None where it has none."""
        found = GRADE.findall(verdict)
        grade = float(found[-1]) if found else self.best + 1
        return grade / self.best if grade <= self.best else None

    @property
    def no_verdict(self) -> NoVerdict:
        return NoVerdict(f"the judge gave no <score>0 to {self.best:g}</score> in {self.attempts} attempts.")


@dataclass(frozen=True, kw_only=True)
class RubricGrading(Grading):
    """The grading by criteria, each met or not: the weights of those met over the sum of the positive ones, in [0, 1].

    A criterion with a negative weight is one that is bad to meet. The last verdict on each counts, and one must be
    there.

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
    def no_verdict(self) -> NoVerdict:
        return NoVerdict(
            f"the judge said not of all {len(self.criteria)} criteria whether they are met in {self.attempts} attempts."
        )


def criteria_of(given: Any, where: str) -> tuple[tuple[str, float], ...]:
    """Return (text, weight) of `[{criterion: text, weight: 1.0}]`. ValueError names `where` they are."""
    rule = "must be a list of {criterion: text, weight: a number that is not 0}, one weight at least above 0"
    found = []
    for entry in given if isinstance(given, list | tuple) else [given]:
        text, weight = (entry.get("criterion"), entry.get("weight", 1.0)) if isinstance(entry, dict) else (None, 0.0)
        is_weight = (
            isinstance(weight, int | float) and not isinstance(weight, bool) and isfinite(weight) and weight != 0
        )
        if not (isinstance(text, str) and text.strip() and is_weight):
            raise ValueError(f"{where}: has {entry!r:.200}; {rule}.")
        found.append((text.strip(), float(weight)))
    if not any(weight > 0 for _, weight in found):
        raise ValueError(f"{where} = {given!r:.200}: {rule}.")
    return tuple(found)
