"""Converts sampling options to SGLang's fields, and rejects requests that a server could not serve."""

from __future__ import annotations

from typing import Any

from megatron_rl.api import ContextOutgrown, RequestRefused
from megatron_rl.config import UNADJUSTED, GenerationConfig
from megatron_rl.config.rollout_section import COUNTS_LATE, FORGETS_COUNTS, NO_ORDER
from megatron_rl.servers.client import ServerClient
from megatron_rl.support import NOT_ADJUSTED, Adjusting

SUPPORTS_SINCE = (0, 5, 19)
"""First SGLang version that is known to return each token's sampling mask: the ids from which it was sampled."""


def sampling_params(gconfig: GenerationConfig, *, generated: int, seed: int | None) -> dict[str, Any]:
    """Return the sampling options as SGLang's fields, for a request that continues a reply of `generated` tokens."""
    params: dict[str, Any] = {
        # Temperature 0 makes SGLang decode greedily; it then reports log-probabilities at temperature 1.
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": 1.0 if gconfig.greedy else gconfig.top_p,
        "top_k": 1 if gconfig.greedy else gconfig.top_k,
        "max_new_tokens": gconfig.max_new_tokens - generated,
        "min_new_tokens": max(0, gconfig.min_new_tokens - generated),
        "ignore_eos": gconfig.ignore_eos,
        "skip_special_tokens": False,
    }
    if gconfig.min_p and not gconfig.greedy:
        params["min_p"] = gconfig.min_p
    if gconfig.adjustment_size:
        params |= {
            name: getattr(gconfig, name) for name, nothing in UNADJUSTED.items() if getattr(gconfig, name) != nothing
        }
    if gconfig.logit_bias:  # JSON has only texts as keys
        params["logit_bias"] = {str(token): bias for token, bias in gconfig.logit_bias.items()}
    if gconfig.stop:
        params["stop"] = list(gconfig.stop)
    if gconfig.stop_token_ids:
        params["stop_token_ids"] = list(gconfig.stop_token_ids)
    if seed is not None and not gconfig.greedy:
        params["sampling_seed"] = seed
    return params


def adjusting_of(gconfig: GenerationConfig) -> Adjusting:
    """Return those of the sampling options that change logits: penalties and biases."""
    if not gconfig.adjustment_size:
        return NOT_ADJUSTED
    penalties = {name: getattr(gconfig, name) for name in UNADJUSTED if name != "logit_bias"}
    return Adjusting(**penalties, logit_bias=tuple(gconfig.logit_bias.items()))


def check_request(server: ServerClient, tokens: list[int], max_new_tokens: int, support: int = 0) -> None:
    """Raise RequestRefused if the server could not serve a request.

    tokens: ids of the prompt and the reply so far. support: maximum size of a token's support; 0 if supports are not
    requested. Ids are checked because one beyond the vocabulary would crash SGLang on a CPU.
    """
    if not tokens:
        raise RequestRefused("input_ids = []: a prompt needs at least one token.")
    info = server.info
    if info is None:
        return
    # Such an id would crash SGLang on a CPU.
    if info.vocab_size is not None and not 0 <= min(tokens) <= max(tokens) < info.vocab_size:
        wrong = max(tokens) if max(tokens) >= info.vocab_size else min(tokens)
        raise RequestRefused(
            f"input_ids hold {wrong}: {server.url} has a vocabulary of {info.vocab_size} ids from 0; "
            "use the tokenizer of the served model."
        )
    if support and info.version < SUPPORTS_SINCE:
        since, version = (".".join(map(str, number)) for number in (SUPPORTS_SINCE, info.version))
        raise RequestRefused(
            f"generation.top_k: {server.url} is SGLang {version}, which does not tell which tokens it sampled from; "
            f"use SGLang {since} or later, or set generation.top_k=-1."
        )
    if info.context_length is not None and len(tokens) + max_new_tokens > info.context_length:
        raise ContextOutgrown(
            f"{len(tokens)} tokens of prompt + {max_new_tokens} of generation.max_new_tokens exceed the context of "
            f"{info.context_length} of {server.url}. Lower max_new_tokens, drop long prompts, or start the server with "
            "a larger --context-length."
        )


def check_counting(server: ServerClient, gconfig: GenerationConfig, interruption: str) -> None:
    """Raise RequestRefused if the request has penalties that the server may not apply exactly.

    The server may count a reply's tokens too late, forget the counts, or mix penalties in an unknown order.
    interruption: value of rollout.interruption.
    """
    info = server.info
    if info is None or info.is_embedded or not gconfig.counts_tokens:
        return
    name = next(name for name, nothing in UNADJUSTED.items() if getattr(gconfig, name) != nothing)
    key = f"generation.{name} = {getattr(gconfig, name)}: {server.url}"
    if info.counts_late:
        raise RequestRefused(
            f"{key}: {COUNTS_LATE}; start it with --disable-overlap-schedule, in rollout.server_args if the run starts "
            f"it, and without --speculative-algorithm."
        )
    if gconfig.mixes_penalties:
        raise RequestRefused(f"{key}: {NO_ORDER}; set it to 1, or the others to 0.")
    if interruption == "retract":
        raise RequestRefused(f"{key}: {FORGETS_COUNTS}; set rollout.interruption=abort.")
