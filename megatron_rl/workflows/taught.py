"""Teachers on servers. The rollout process asks them to score trajectories while it samples other trajectories."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_rl.api import InferenceEngine, RolloutWorkflow
from megatron_rl.config.teacher_section import Teacher
from megatron_rl.rewards.reward_servers import Servers
from megatron_rl.types import Trajectory
from megatron_rl.workflows.attempt import RunBroken, call_here
from megatron_rl.workflows.rendering import prompt_ids
from megatron_rl.workflows.scoring import with_hint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONCURRENT = 32  # requests per server


class TaughtWorkflow(RolloutWorkflow):
    """Wraps a workflow and adds `teacher_logprobs` from the servers of the prompt's teacher to its trajectories.

    If a teacher has no servers, the column is zero, and the trainer's engines compute the log-probabilities later. If a
    server fails or returns an invalid answer, this attempt at the episode fails; the next one reuses its replies.

        workflow = TaughtWorkflow(RLVRWorkflow(...), config.teacher.teachers, tokenizer)
        await workflow.close()
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        teachers: Mapping[str, Teacher],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        enable_thinking: bool = False,
        timeout_s: float = 60.0,
        token_file: str = "",
    ) -> None:
        """teachers: {a prompt's `source`: its teacher} (see TeacherConfig). timeout_s: time limit of one request."""
        self.workflow, self.teachers, self.tokenizer = workflow, teachers, tokenizer
        self.enable_thinking = enable_thinking
        self._known: set[str] = set()
        """Those sources (see `teachers`) whose teacher is known to have the policy's vocabulary."""
        self._servers = {
            source: Servers(
                [f"{url.rstrip('/')}/generate" for url in teacher.servers],
                concurrent=CONCURRENT,
                timeout_s=timeout_s,
                token_file=token_file,
            )
            for source, teacher in teachers.items()
            if teacher.servers
        }

    async def close(self) -> None:
        for servers in self._servers.values():
            await servers.close()

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory] | None:
        found = await self.workflow.arun_episode(engine, data)
        if found is None:
            return None
        if not isinstance(found, list):
            raise RunBroken(
                f"rollout.workflow: {type(self.workflow).__name__} returned {type(found).__name__}, and "
                f"teacher.servers score lists of Trajectory; return one, or take a teacher by teacher.path."
            )
        source = "" if "" in self.teachers else data["source"]
        scores = [torch.zeros(len(it.input_ids)) for it in found]
        if source in self._servers:
            with call_here():
                scores = await asyncio.gather(*(self._score(source, it, data) for it in found))
        for trajectory, column in zip(found, scores, strict=True):
            trajectory.tokens["teacher_logprobs"] = column
        return found

    async def _score(self, source: str, trajectory: Trajectory, data: dict[str, Any]) -> Tensor:
        """Return the teacher's log-probabilities, `[N]` float32; zero before the first token that the policy wrote."""
        ids, hint = trajectory.input_ids.tolist(), self.teachers[source].hint
        written = (trajectory.loss_mask | (trajectory.versions >= 0)).nonzero()
        first = int(written[0]) if len(written) else len(ids)
        row = with_hint(data, hint)
        prompt = prompt_ids(self.tokenizer, row, enable_thinking=self.enable_thinking) if hint else ids[:first]
        # SGLang returns no log-probability for the token at `start`, so the request starts one token early.
        asked, start = [*prompt, *ids[first:]], len(prompt) - 1
        texts = self.tokenizer is not None and source not in self._known
        body = {
            "input_ids": asked,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
            "return_text_in_logprobs": texts,
        }

        def read(answer: Any) -> list[tuple[float, str | None]]:
            entries = answer["meta_info"]["input_token_logprobs"][1:]
            if [entry[1] for entry in entries] != asked[start + 1 :]:
                raise ValueError(f"the log-probabilities of other tokens, {len(entries)} of {len(ids) - first}")
            scores = [(float(value), text) for value, _, text in entries]
            if not all(-math.inf < value <= 1e-3 for value, _ in scores):
                raise ValueError("a log-probability above 0, or that is not finite")
            return scores

        found = await self._servers[source].ask(body, read)
        if texts and self.tokenizer is not None:
            for token, (_, text) in zip(ids[first:], found, strict=True):
                if (own := self.tokenizer.decode([token])) != text:
                    raise RunBroken(
                        f"teacher.servers = {list(self.teachers[source].servers)}: their token {token} is {text!r}, "
                        f"and the policy's {own!r}; a teacher scores the policy's own tokens, so serve a model with "
                        f"the same tokenizer."
                    )
            self._known.add(source)
        return torch.tensor([0.0] * first + [value for value, _ in found])
