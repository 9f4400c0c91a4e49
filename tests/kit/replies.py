"""An engine that answers at random, or by a script, and remembers what it was asked."""

from __future__ import annotations

import random

import torch

from megatron_rl.types import LLMResponse


class RecordingEngine:
    """Replies of random ids, each token with a log-prob and a version of its own; `script` gives texts instead."""

    def __init__(self, tokenizer, *, seed=0, script=None, ends=("stop", "length")):
        self.tokenizer, self.random, self.ends = tokenizer, random.Random(seed), ends
        self.vocabulary = len(tokenizer)  # which takes a real tokenizer milliseconds
        self.script = script
        """Called with a request; returns the text of its reply."""
        self.served = []
        """(request, reply) in the order of their ends."""

    async def agenerate(self, req):
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
