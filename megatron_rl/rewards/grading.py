"""The question that a judge is asked of a reply, and the grade that its verdict says.

The reply is a model's under optimisation: it cannot bring a grade of its own in, or fill the question's other places.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megatron_rl.rewards import gold

QUESTION = (
    "Question:\n{question}\n\nAnswer of a student:\n{reply}\n\n"
    "Judge the answer. End with its grade from 0 (wrong) to {best} (right and clear) as <score>grade</score>."
)
PLACE = re.compile(r"\{(question|reply|answer|best)\}")
GRADE = re.compile(r"<score>\s*([0-9]{1,4}(?:\.[0-9]{1,4})?)\s*</score>")
TAG = re.compile(
    r"<(?=\s*(?:/\s*)?score|[|\uff5c]|/?s>|/?(?:start|end)_of_turn>|[be]os>)|\[(?=/?(?:INST|SYS))", re.IGNORECASE
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
        }
        if "{answer}" in self.question:
            shown["answer"] = gold(data)
        # All at once: a place that the reply names stays what it is.
        return [{"role": "user", "content": PLACE.sub(lambda place: shown[place[1]], self.question)}]

    def grade_of(self, verdict: str) -> float | None:
        """Return a verdict's grade in [0, 1]; None where it has none."""
        found = GRADE.findall(verdict)
        grade = float(found[-1]) if found else self.best + 1
        return grade / self.best if grade <= self.best else None

    @property
    def no_verdict(self) -> NoVerdict:
        return NoVerdict(f"the judge gave no <score>0 to {self.best:g}</score> in {self.attempts} attempts.")
