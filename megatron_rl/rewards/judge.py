"""A generative judge: the question put to it about a reply, its grade, and judges on servers with OpenAI's chat API.

The reply comes from a model that is optimised for the grade. So the reply must not be able to inject a grade of its
own, or placeholders that the question's template would fill.

The servers (SGLang, vLLM, `megatron-rl serve`) apply their own model's chat template. They are not part of the run:
they get no weight updates, so the judge does not change.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from megatron_rl.api import InfrastructureFailure
from megatron_rl.rewards import gold
from megatron_rl.rewards.recipe import AwaitedReward
from megatron_rl.rewards.reward_servers import Servers

ENDPOINT = "/v1/chat/completions"
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
"""Matches the start of grade tags, and of those control tokens of chat templates that would end the reply's message."""


class NoVerdict(RuntimeError):
    """The judge gave no grade in any of its attempts."""


class JudgeFailed(NoVerdict, InfrastructureFailure):
    """A judge on servers of its own gave no grade in any of its attempts. The policy is not at fault."""

    KIND = "judge"


@dataclass(frozen=True, kw_only=True)
class Grading:
    """Grading of replies from 0 to `best`. The last grade in a verdict counts; a grade above `best` is not valid.

    grading = Grading(best=5)
    messages = grading.asked("2+2=", "It is 4.", {})  # for a judge
    grading.grade_of("Right. <score>4</score>")  # 0.8
    """

    question: str = QUESTION
    """Template that contains {reply}, and optionally {question}, {answer} (of the prompt's row) and {best}."""
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
        """Return the messages to send to a judge. prompt: text used as the question if `data` has no `messages`.

        ValueError if the template has {answer} but `data` has no answer.
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
        """Call `verdict(attempt)` until a verdict has a grade, and return that. NoVerdict if no attempt yields one."""
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


class Judge(AwaitedReward):
    """A part of rollout.recipe with `args: {urls: [http://host:port]}`. The reward is grade / best, in [0, 1].

    If a verdict has no grade, the judge is asked again with another seed. After `attempts` verdicts without a grade,
    JudgeFailed is raised, and the sample is retried.

        judge = Judge(["http://127.0.0.1:31000"], best=5)
        score = await judge("2+2=", "It is 4.", [], [])  # 0.8 for a verdict that ends with <score>4</score>
        await judge.close()
    """

    def __init__(
        self,
        urls: Sequence[str],
        question: str = QUESTION,
        best: float = 10.0,
        attempts: int = 3,
        max_tokens: int = 1024,
        temperature: float = 0.6,
        enable_thinking: bool = False,
        model: str = "default",
        concurrent: int = 32,
        timeout_s: float = 30.0,
        token_file: str = "",
    ) -> None:
        """question, best, attempts: as in Grading. urls, concurrent, timeout_s, token_file: as in Servers.

        max_tokens: maximum number of tokens of a verdict, including thoughts.
        model: name of the judge, if the servers have several models.
        timeout_s must be below the workflow's reward_timeout_s, which limits all attempts together. Otherwise a server
        that hangs would use up all the time, and no other server would be asked.
        """
        self._grading = Grading(question=question, best=best, attempts=attempts)
        self._options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._options |= {"chat_template_kwargs": {"enable_thinking": enable_thinking}}
        places = [url.rstrip("/") + ENDPOINT for url in urls]
        self._servers = Servers(places, concurrent=concurrent, timeout_s=timeout_s, token_file=token_file)
        self._timeout_s = timeout_s

    def check_deadline(self, timeout_s: float) -> None:
        if self._timeout_s >= timeout_s:
            raise ValueError(
                f"rollout.recipe: args.timeout_s = {self._timeout_s:g} of the judge: must be below the workflow's "
                f"reward_timeout_s = {timeout_s:g}, or a server that hangs takes all the time; lower it, or raise "
                f"reward_timeout_s."
            )

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float:
        grading = self._grading_by(data)
        body = {"messages": grading.asked(prompt, completions, data)} | self._options
        try:
            # The seed changes with the attempt, or the same verdict would be generated again.
            return await grading.grade(lambda attempt: self._servers.ask(body | {"seed": attempt}, verdict_in))
        except NoVerdict as error:
            raise JudgeFailed(str(error)) from error

    def _grading_by(self, data: dict[str, Any]) -> Grading:
        """Return the Grading for a prompt. data: columns of the prompt's row."""
        return self._grading

    async def reach(self, patience_s: float) -> bool:
        await self._servers.reach(patience_s)
        return True

    async def close(self) -> None:
        await self._servers.close()


class Rubric(Judge):
    """A judge that decides for each criterion whether the reply meets it. RubricGrading computes the grade.

    A part of rollout.recipe with `args: {urls: [...], criteria: [{criterion: "names the river", weight: 2.0}]}`.
    Criteria in the prompt's column `rubric`, in the same form, are appended. The template has {criteria} in addition to
    the placeholders of Grading.

        criteria = [{"criterion": "Is polite."}, {"criterion": "Rambles.", "weight": -0.5}]
        rubric = Rubric(["http://127.0.0.1:31000"], criteria)
        score = await rubric("2+2=", "It is 4, sir.", [], [])  # 1.0 for <met>1: yes</met> and <met>2: no</met>
    """

    def __init__(
        self,
        urls: Sequence[str],
        criteria: Sequence[dict[str, Any]] = (),
        question: str = RUBRIC_QUESTION,
        attempts: int = 3,
        **options: Any,
    ) -> None:
        """criteria: criteria for every prompt. options: further arguments of Judge."""
        super().__init__(urls, attempts=attempts, **options)
        if "{criteria}" not in question:
            raise ValueError(f"question = {question!r}: must have {{criteria}}, where the judge reads them.")
        own = criteria_of(list(criteria), "args.criteria") if criteria else ()
        self._rubric = RubricGrading(question=question, attempts=attempts, criteria=own)

    def _grading_by(self, data: dict[str, Any]) -> RubricGrading:
        own = criteria_of(data["rubric"], "the prompt's column rubric") if data.get("rubric") else ()
        if not (criteria := self._rubric.criteria + own):
            raise ValueError(
                "rubric: the prompt has no column rubric and the reward no args.criteria; give one of them."
            )
        return replace(self._rubric, criteria=criteria)


def verdict_in(answer: Any) -> str:
    """Return the text of the answer's first choice; empty if the server classified all of its text as reasoning."""
    content = answer["choices"][0]["message"]["content"]
    if not isinstance(content, str | None):
        raise TypeError(f"the content is {type(content).__name__}")
    return content or ""
