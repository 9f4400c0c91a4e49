"""The replies that an episode already has: their names, their store, and requests that continue partial ones."""

from __future__ import annotations

import copy
import hashlib
import json
from array import array

from megatron_rl.api import RequestRefused
from megatron_rl.config import MOST_REPORTED, UNADJUSTED, GenerationConfig
from megatron_rl.types import LLMRequest, LLMResponse


class KeptReplies:
    """Complete and partial replies of one episode, kept until the episode has returned its group."""

    def __init__(self) -> None:
        self._replies: dict[str, LLMResponse] = {}
        self.since = 0
        """Policy version at the time of the first request for which a reply is kept."""

    def __len__(self) -> int:
        return len(self._replies)

    def begin(self, name: str, req: LLMRequest, *, version: int, oldest_allowed: int) -> LLMResponse:
        """Return the reply kept under `name`, or else `req.begun`. An unfinished reply has the stop reason `abort`.

        If there is neither, or if a version below `oldest_allowed` sampled one of its tokens, return an empty
        unfinished reply.
        """
        if not self._replies:
            self.since = version
        reply = self._replies.get(name, req.begun)
        if reply is None or (reply.output_len and int(reply.sampled.versions.values.min()) < oldest_allowed):
            reply = LLMResponse.nothing(req.input_ids)
        elif reply.stop_reason == "abort":  # copy it: an earlier attempt may still append to the original
            reply = copy.copy(reply)
            if reply.output_len >= req.gconfig.max_new_tokens:  # it was aborted at its last token
                reply.stop_reason = "length"
        self._replies[name] = reply
        return reply

    def newest(self, count: int) -> list[LLMResponse]:
        """Return the last `count` replies in the order in which they were begun."""
        return list(self._replies.values())[-count:]

    def keep(self, name: str, reply: LLMResponse) -> None:
        self._replies[name] = reply

    def clear(self) -> None:
        self._replies.clear()


def check_sampling(req: LLMRequest, trained_as: GenerationConfig | None = None) -> None:
    """Raise RequestRefused for a request whose replies could not be trained.

    That is a request that excludes tokens from the vocabulary, or changes logits, without a report of the supports.
    Greedy replies are not trained, so they pass. If the trainer computes supports, the request's options must be those
    of the run, `trained_as`.
    """
    options = req.gconfig
    if options.greedy or options.support_size:
        return
    if options.computed_size or (trained_as is not None and trained_as.computed_size):
        check_cut(options, trained_as or options)
        return
    for name, everything in {"top_k": -1, "top_p": 1.0, "min_p": 0.0}.items():
        if (value := getattr(options, name)) != everything:
            raise RequestRefused(
                f"gconfig.{name} = {value}: the reply would be sampled from a part of the vocabulary, and trained with "
                f"log-probabilities over all of it; set gconfig.top_k from 2 to {MOST_REPORTED} too, so that servers "
                f"report which tokens they sampled from, or set it to {everything}."
            )
    known = trained_as or options
    if known.adjustment_size == options.adjustment_size:
        return
    for name, nothing in UNADJUSTED.items():
        if ((value := getattr(options, name)) != nothing) != ((run := getattr(known, name)) != nothing):
            raise RequestRefused(
                f"gconfig.{name} = {value}: either all requests of a run use penalties or biases, or none does, and "
                f"generation.{name} = {run}; set both, or set both to {nothing}."
            )


def check_cut(options: GenerationConfig, trained_as: GenerationConfig) -> None:
    """Raise RequestRefused if a request excludes other tokens than the trainer assumes.

    trained_as: the run's options.
    """
    for name in ("supports", "temperature", "top_k", "top_p", "min_p"):
        if (value := getattr(options, name)) != (known := getattr(trained_as, name)):
            raise RequestRefused(
                f"gconfig.{name} = {value}: with generation.supports = computed, every request must use the run's "
                f"sampling options; set it to generation.{name} = {known}."
            )
    for name, nothing in {"min_new_tokens": 0, **UNADJUSTED}.items():
        if (value := getattr(options, name)) != nothing:
            raise RequestRefused(
                f"gconfig.{name} = {value}: with generation.supports = computed the trainer computes only what top_k, "
                f"top_p and min_p exclude; set it to {nothing}."
            )


def continuing(req: LLMRequest, begun: LLMResponse) -> LLMRequest:
    """Return a request for the rest of the partial reply `begun`."""
    req = copy.copy(req)  # dataclasses.replace would check the prompt's tokens again
    req.begun = begun
    return req


SORTED_JSON = json.JSONEncoder(sort_keys=True)


def request_name(req: LLMRequest) -> str:
    """Return a hash of everything that determines how a reply is sampled, including the `sample_key` of its sample."""
    options = [vars(req.gconfig), req.metadata.get("sample_key")]
    options += [] if req.grammar is None else [req.grammar]
    digest = hashlib.sha256(SORTED_JSON.encode(options).encode())
    digest.update(array("q", req.input_ids).tobytes())
    return digest.hexdigest()[:32]
