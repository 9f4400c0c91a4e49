"""Dialogues as tokens: exactly the ids that the server received and generated, never retokenized.

Other roles' messages are tokenized once (rendering.py), and replies are kept as generated. A trajectory is therefore
exactly the last prompt that a server received, followed by the server's reply.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl import support as supports
from megatron_rl.api import InfrastructureFailure, Sampler
from megatron_rl.config import GenerationConfig
from megatron_rl.types import TURN_REWARDS, LLMRequest, LLMResponse, Reward, Trajectory, route_column


class Conversation:
    """The tokens of one dialogue so far. Entry t of `ids` and of each tensor belongs to token t.

    talk = Conversation(template.opening({"messages": messages}))
    reply = await talk.ask(engine, gconfig, max_tokens=2048, rid=rid, key=None)
    talk.earn(0.5)  # this reply's own reward, if the dialogue's replies have such rewards
    talk.add(template.following([{"role": "user", "content": "Are you sure?"}], reply.output_tokens))
    trajectory = talk.trajectory(reward=0.5)
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: list[int] = []
        self.loss_mask = torch.empty(0, dtype=torch.bool)
        self.logprobs = torch.empty(0)
        self.versions = torch.empty(0, dtype=torch.int32)
        self.routes: Tensor | None = None
        """MoE routes (the experts chosen per layer) of the dialogue's first tokens, as far as servers have reported
        them."""
        self.support: Tensor | None = None
        """Supports: the tokens that each token was sampled from (megatron_rl/support.py). None if no reply has
        supports."""
        self.adjustment: Tensor | None = None
        """How penalties and biases changed the logits of these tokens. None if no reply has adjustments."""
        self.earned: list[tuple[int, float]] | None = None
        """Pairs (position of a reply's last token, its reward). None if only the whole dialogue has a reward."""
        self.last_reply: list[int] = []
        self.is_cut_off = False
        """True if the dialogue had no room for the rest of its last reply, or for a further reply."""
        self.replies = 0
        self.add(prompt)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not write (environment, tool, template). These tokens are not trained."""
        self.is_cut_off = False
        self._append(ids, torch.zeros(len(ids)), torch.full((len(ids),), -1, dtype=torch.int32), is_trained=False)

    def _append(
        self, ids: Sequence[int], logprobs: Tensor, versions: Tensor, *, is_trained: bool,
        support: Tensor | None = None, adjustment: Tensor | None = None,
    ) -> None:  # fmt: skip
        if support is not None and self.support is None:
            self.support = supports.whole(len(self), support.shape[1])
        if self.support is not None:
            own = supports.whole(len(ids), self.support.shape[1]) if support is None else support
            self.support = torch.cat([self.support, own])
        if adjustment is not None and self.adjustment is None:
            self.adjustment = supports.unchanged(len(self), adjustment)
        if self.adjustment is not None:
            changes = supports.unchanged(len(ids), self.adjustment) if adjustment is None else adjustment
            self.adjustment = torch.cat([self.adjustment, changes])
        self.ids += ids
        self.loss_mask = torch.cat([self.loss_mask, torch.full((len(ids),), is_trained)])
        self.logprobs = torch.cat([self.logprobs, logprobs])
        self.versions = torch.cat([self.versions, versions])

    async def ask(
        self, engine: Sampler, gconfig: GenerationConfig, *, max_tokens: int, rid: str, key: str | None
    ) -> LLMResponse:
        """Generate the next reply and append it. The dialogue may then have at most `max_tokens` tokens.

        rid: the dialogue's request id, by which a router finds the server that has its prefix in the KV cache.
        key: the dialogue's sample key (`rlvr.sample_key`), from which the reply's sampling seed derives.
        """
        metadata = {"sample_key": f"{key}/{self.replies}"} if key is not None else {}
        # Copy the ids: the conversation's list grows, and the reply is compared with what the request asked.
        ids, options = list(self.ids), within(gconfig, max_tokens - len(self))
        reply = await engine.agenerate(LLMRequest(rid=rid, input_ids=ids, gconfig=options, metadata=metadata))
        self.take(reply)
        return reply

    def take(self, reply: LLMResponse, *, is_trained: bool = True) -> None:
        """Append a reply, whose prompt must be exactly `ids`.

        If the reply was aborted, InfrastructureFailure is raised, so that the episode is retried.
        is_trained: False for a reply that a grammar constrained, unless its supports tell which tokens the grammar
        allowed.
        """
        # Otherwise the trainer would compute log-probabilities under another context than the server saw.
        if reply.input_tokens != self.ids:
            raise RuntimeError(
                f"the reply is to {reply.input_len} tokens that are not the conversation's {len(self)}: the workflow "
                f"sent something else; send Conversation.ids as they are."
            )
        if reply.stop_reason == "abort":
            words = f"the reply was aborted after {reply.output_len} tokens and not continued."
            raise InfrastructureFailure(words, kind="server")
        self.last_reply, self.is_cut_off = reply.output_tokens, reply.stop_reason == "length"
        columns = reply.sampled.logprobs, reply.sampled.versions.each()
        rest = {"support": reply.support, "adjustment": reply.adjustment}
        self._append(self.last_reply, *columns, is_trained=is_trained, **rest)
        if reply.routes is not None:  # keep the known rows: they are the routes with which tokens were sampled
            known = reply.routes[:0] if self.routes is None else self.routes
            self.routes = torch.cat([known, reply.routes[len(known) :]])
        self.replies += 1

    def earn(self, reward: float, *, end: int | None = None) -> None:
        """Add a reward on the last trained token, which is the last token of a reply.

        end: if given, only the first `end` tokens are considered. If none of the tokens is trained, nothing is added.
        """
        self.earned = self.earned or []
        trained = self.loss_mask[:end].nonzero()
        if len(trained):
            self.earned.append((int(trained[-1]), reward))

    def fork(self, length: int) -> Conversation:
        """Return an independent copy of the first `length` tokens. The copy's count of replies starts at 0."""
        # The list and the mask are copied: the same dialogue may continue in two ways at once.
        forked = copy.copy(self)
        forked.ids, forked.loss_mask = list(self.ids), self.loss_mask.clone()
        forked.last_reply, forked.is_cut_off, forked.replies = [], False, 0
        forked.take_back(length)
        return forked

    def take_back(self, length: int) -> None:
        """Remove everything after the first `length` tokens, which must end with a reply."""
        del self.ids[length:]
        self.loss_mask, self.logprobs = self.loss_mask[:length], self.logprobs[:length]
        self.versions = self.versions[:length]
        self.routes = None if self.routes is None else self.routes[:length]
        self.support = None if self.support is None else self.support[:length]
        self.adjustment = None if self.adjustment is None else self.adjustment[:length]
        self.earned = None if self.earned is None else [entry for entry in self.earned if entry[0] < length]

    def leave_out_before(self, length: int) -> None:
        """Exclude the first `length` tokens from training, and drop their rewards.

        Call this if another trajectory trains these tokens and has their rewards.
        """
        self.loss_mask[:length] = False
        self.earned = None if self.earned is None else [entry for entry in self.earned if entry[0] >= length]

    def trajectory(self, reward: float, **sequence: float) -> Trajectory:
        """Return the dialogue so far as a trajectory.

        reward: the whole dialogue's reward. If replies have rewards of their own, it must be the sum of these.
        """
        return Trajectory(
            input_ids=torch.tensor(self.ids, dtype=torch.int32),
            loss_mask=self.loss_mask.clone(),
            logprobs=self.logprobs,
            versions=self.versions,
            reward=reward if isinstance(reward, Reward) else float(reward),
            tokens=(
                route_column(self.routes, len(self))
                | supports.columns(self.support, self.adjustment, prompt=0)
                | self._turn_rewards()
            ),
            sequence=sequence,
            is_cut_off=self.is_cut_off,
        )

    def _turn_rewards(self) -> dict[str, Tensor]:
        if self.earned is None:
            return {}
        column = torch.zeros(len(self), dtype=torch.float64)
        for place, reward in self.earned:
            column[place] += reward
        return {TURN_REWARDS: column.float()}


def within(gconfig: GenerationConfig, room: int) -> GenerationConfig:
    """Return the generation options for one reply of at most `room` tokens. room must be at least 1."""
    longest = min(gconfig.max_new_tokens, room)
    # GenerationConfig rejects min_new_tokens above max_new_tokens.
    return gconfig.new(n_samples=1, max_new_tokens=longest, min_new_tokens=min(gconfig.min_new_tokens, longest))
