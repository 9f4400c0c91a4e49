"""Engines without servers: they answer at random, by a script or in simulated time, and remember what was asked."""

from __future__ import annotations

import asyncio
import random

import torch

from megatron_rl.api import Sampler
from megatron_rl.types import LLMResponse, SampledTokens


class RecordingEngine(Sampler):
    """Replies of random ids, each token with a log-prob and a version of its own; `script` gives texts instead."""

    version = 5
    """No token has a later one."""

    def __init__(self, tokenizer, *, seed=0, script=None, ends=("stop", "length"), before=None):
        self.tokenizer, self.random, self.ends = tokenizer, random.Random(seed), ends
        self.before = before
        """Awaited with each request: its reply waits for it, and what it raises comes in place of the reply."""
        self.vocabulary = len(tokenizer)  # which takes a real tokenizer milliseconds
        self.script = script
        """Called with a request; returns the text of its reply."""
        self.served = []
        """(request, reply) in the order of their ends."""

    def get_version(self):
        return self.version

    async def agenerate(self, req):
        if self.before is not None:
            await self.before(req)
        stop_reason = self.random.choice(self.ends)
        if self.script is not None:
            stop_reason = "stop"
            output = self.tokenizer(self.script(req), add_special_tokens=False)["input_ids"]
        else:
            # Ids without text of their own, halves of characters and special tokens included.
            size = self.random.randint(1, min(6, req.gconfig.max_new_tokens))
            output = [self.random.randrange(self.vocabulary) for _ in range(size)]
            if stop_reason == "stop":
                output[-1] = self.tokenizer.eos_token_id
        reply = LLMResponse(
            input_tokens=list(req.input_ids),
            output_tokens=output,
            output_logprobs=[-self.random.random() for _ in output],
            output_versions=[self.random.randrange(5) for _ in output],
            stop_reason=stop_reason,
        )
        self.served.append((req, reply))
        return reply


class TimedEngine(Sampler):
    """Generates one token a second, `length(request)` of them, and knows which requests are under way.

    As the real one it goes on with what was begun, and leaves there what it had when it is cancelled.
    """

    def __init__(self, length=lambda req: 10, fault=lambda req: None):
        self.length, self.fault, self.version = length, fault, 0
        self.asked, self.continued, self.open, self.most_open, self.tokens = [], [], 0, 0, 0

    def get_version(self):
        return self.version

    async def agenerate(self, req):
        self.asked.append(req)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        reply = req.begun
        if reply.output_len:
            self.continued.append(req.input_ids[0])
        try:
            for _ in range(self.length(req) - reply.output_len):
                if (error := self.fault(req)) is not None:
                    raise error
                version = self.version
                await asyncio.sleep(1.0)
                self.tokens += 1
                reply.sampled = SampledTokens.cat([reply.sampled, SampledTokens.of([5], [-1.0], [version])])
        finally:
            self.open -= 1
        reply.stop_reason = "stop"
        return reply


def check_trajectory(trajectory, served):
    """Assert that a trajectory is what was served: the prompt and reply of every turn, nothing else. Returns its turns.

    `served` may hold other dialogues' turns.
    """
    ids, mask = trajectory.input_ids.tolist(), trajectory.loss_mask.tolist()
    turns = []
    for req, reply in served:
        whole = req.input_ids + reply.output_tokens
        logprobs = torch.tensor(reply.output_logprobs, dtype=torch.float32)
        if ids[: len(whole)] == whole and trajectory.logprobs[len(req.input_ids) : len(whole)].equal(logprobs):
            turns.append((req, reply))
    turns.sort(key=lambda turn: len(turn[0].input_ids))
    trained = [False] * len(ids)
    for req, reply in turns:
        start = len(req.input_ids)
        trained[start : start + reply.output_len] = [True] * reply.output_len
        assert trajectory.versions[start : start + reply.output_len].tolist() == reply.output_versions
    assert mask == trained, "the tokens of replies are trained, and no others"
    req, reply = turns[-1]
    assert ids == req.input_ids + reply.output_tokens, "it ends with the last reply"
    others = [t for t, is_trained in enumerate(trained) if not is_trained]
    assert trajectory.versions[others].tolist() == [-1] * len(others)
    assert trajectory.logprobs[others].tolist() == [0.0] * len(others)
    return turns
