"""A generative judge: another model grades the reply, on servers with OpenAI's chat completions API.

SGLang, vLLM and `megatron-rl serve` provide that API. The servers are not part of the run: they get no weight updates,
so the judge does not change. They apply their own model's chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.api import InfrastructureFailure
from megatron_rl.rewards.grading import QUESTION, RUBRIC_QUESTION, Grading, NoVerdict, RubricGrading, criteria_of
from megatron_rl.rewards.recipe import AwaitedReward
from megatron_rl.rewards.reward_servers import Servers

ENDPOINT = "/v1/chat/completions"


class JudgeFailed(NoVerdict, InfrastructureFailure):
    """A judge on servers of its own gave no grade in any of its attempts. The policy is not at fault."""

    KIND = "judge"


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

        max_tokens: limit of a verdict, including thoughts.
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
                f"reward_timeout_s = {timeout_s:g}, or a judge that hangs is never known for it; lower it, or raise "
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
        """Return the grading for a prompt whose columns are `data`."""
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
        """criteria: those applied to every prompt. options: further options of Judge."""
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
