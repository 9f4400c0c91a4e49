"""A generative judge: another model's grade of the reply, from servers that speak OpenAI's chat completions.

SGLang, vLLM and `megatron-rl serve` do. They are no servers of the run: nobody sends them weights, so that the judge
stays what it is. They apply the chat template of their own model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.rewards.grading import QUESTION, Grading
from megatron_rl.rewards.recipe import AwaitedReward
from megatron_rl.rewards.reward_servers import Servers

ENDPOINT = "/v1/chat/completions"


class Judge(AwaitedReward):
    """A part of rollout.recipe with `args: {urls: [http://host:port]}`: the grade / best, in [0, 1].

    A verdict without a grade is asked for again, with another seed; NoVerdict, a failed episode, after `attempts`.

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
        """question, best, attempts: as in Grading. max_tokens: longest verdict, thoughts and all. model: its name where
        the servers have several. concurrent: verdicts at a time of one server. timeout_s: of one verdict, below the
        workflow's reward_timeout_s, which holds for all attempts together: a server that hangs counts as failed, and
        another is asked, before nobody waits any more. token_file: what the servers ask for.
        """
        self._grading = Grading(question=question, best=best, attempts=attempts)
        self._options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._options |= {"chat_template_kwargs": {"enable_thinking": enable_thinking}}
        self._servers = Servers(
            [url.rstrip("/") + ENDPOINT for url in urls],
            concurrent=concurrent,
            timeout_s=timeout_s,
            token_file=token_file,
        )
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
        body = {"messages": self._grading.asked(prompt, completions, data)} | self._options
        for attempt in range(self._grading.attempts):
            # The seed changes with the attempt: at one temperature and seed the same verdict would come again.
            verdict = await self._servers.ask(body | {"seed": attempt}, verdict_in)
            if (grade := self._grading.grade_of(verdict)) is not None:
                return grade
        raise self._grading.no_verdict

    async def close(self) -> None:
        await self._servers.close()


def verdict_in(answer: Any) -> str:
    """The first choice's text; empty where the server took all of it for thoughts."""
    content = answer["choices"][0]["message"]["content"]
    if not isinstance(content, str | None):
        raise TypeError(f"the content is {type(content).__name__}")
    return content or ""
