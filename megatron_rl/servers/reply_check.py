"""The only checker of servers' replies: nothing of a reply is used before the whole reply was found valid.

A reply is checked against its request. Its counts, ids, log-probabilities, finish reason and weight versions must have
the right types and ranges, and must agree with each other. Otherwise ValueError names the field, its value and the
rule. The operator reply_tokens extracts and checks the tokens of long replies, and orjson parses everything else.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import orjson
import torch
from torch import Tensor

from megatron_rl import ops, support
from megatron_rl.routes import RouteForm
from megatron_rl.support import NOT_ADJUSTED, Adjusting
from megatron_rl.types import Runs, SampledTokens

SPANS_SINCE = (0, 5, 19)
"""First SGLang version that reports which weights sampled which tokens."""
HIGHEST_LOGPROB = 1e-3
"""Upper bound of log-probabilities. It is above 0, because a kernel may round log 1 to a slightly larger number."""
LOWEST_LOGPROB = -1e4
"""Lower bound of log-probabilities. No token that was sampled can be less likely."""
MOST_IDS = 2**31
"""Exclusive upper bound of token ids if the vocabulary size is unknown."""
KEPT_BACK = 64
"""Number of tokens of its context or cache that a server may keep free."""
SHORT_BYTES = 4 * 1024
"""Replies below this size are read by Python, which takes less time than one call of an operator."""
ESCAPED_COLON = b"\\u003"
"""Beginning of the JSON escape for a colon, and of the escapes for some other characters."""
NOT_FINITE = re.compile(rb"[\[,:\s](-?Infinity|NaN)(?=[\],}\s])")
VERSION = re.compile(r"[0-9]{1,15}")
REPLY_BYTES, TOKEN_BYTES, ID_BYTES = 2**20, 2**10, 12
"""Maximum size of a reply: REPLY_BYTES, plus TOKEN_BYTES per token, plus ID_BYTES per id in the tokens' supports."""
TIMING = ("request_received_ts", "queue_time", "first_token_latency", "e2e_latency")
"""Keys of times (in seconds) in a reply's meta_info. SGLang always sends the last one, and the others only if it was
started with --enable-metrics."""


@dataclass(kw_only=True, eq=False)  # not frozen, which would take twice as long for each request
class Asked:
    """The facts of a request against which its reply is checked. They must not be changed."""

    rid: str
    prompt_tokens: int
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    version: int
    """Policy version when the request was sent. No token can be sampled by an older one."""
    weights: str | None = None
    """Name of the server's weights when the request was sent.

    None if they had no name, or if a router chose the server.
    """
    is_routed: bool = False
    vocab_size: int | None = None
    room: int | None = None
    """Maximum number of tokens of prompt and reply together that fit on the server. None if unknown."""
    gives_spans: bool = True
    gives_text: bool = True
    late: int = 0
    """Number of tokens at the start of each span but the first that were sampled by the weights of the previous span.

    They were sampled before the server changed the name of its weights, but were recorded afterwards.
    """
    routes: RouteForm | None = None
    routes_from: int = 0
    support: int = 0
    """Maximum number of ids in a token's support (megatron_rl/support.py); 0 if supports were not requested."""
    adjusting: Adjusting = NOT_ADJUSTED
    changed: int = 0
    """Width of the rows that list the tokens whose logits `adjusting` changes (megatron_rl/support.py).

    It is set if the reply is trained over the whole vocabulary, else 0.
    """
    keeps_counts: bool = True
    """True if a server that retracts a request still knows which tokens penalties have counted. SGLang forgets them."""

    @property
    def ids_below(self) -> int:
        """Exclusive upper bound of token ids."""
        return MOST_IDS if self.vocab_size is None else self.vocab_size

    @property
    def bytes_at_most(self) -> int:
        rows = self.prompt_tokens + self.max_new_tokens - self.routes_from
        return_routes = 0 if self.routes is None else self.routes.wire_bytes_per_token * rows
        each = TOKEN_BYTES + ID_BYTES * self.support
        return REPLY_BYTES + each * self.max_new_tokens + return_routes


@dataclass(kw_only=True)
class ReplyPart:
    """The part of a reply that one HTTP call returned. An interrupted reply has several parts."""

    sampled: SampledTokens
    stop_reason: str
    """Why the part ended: `stop`, `length` or `abort`."""
    text: str
    cached_tokens: int
    spans: list[tuple[str, int]]
    """For each span: (name of the weights, number of tokens that they have sampled).

    Empty if the server reports no spans.
    """
    routes: Tensor | None = None
    """Expert routes `[rows, layers, slots]`, from the first requested row on.

    None if they were not requested, or if an aborted reply has none.
    """
    support: Tensor | None = None
    """For each token, the ids of its support, or the ids whose logits are changed: `[tokens, W]` (support.py).

    None if neither was requested.
    """
    adjustment: Tensor | None = None
    """Changes of the logits of the ids in `support`: `[tokens, W, P]` (support.py).

    None if the request has no penalties or biases, or if `support` is None.
    """
    guessed_passes: int = 0
    """Number of the model's passes that checked tokens which a draft head had guessed."""
    right_guesses: int = 0
    """Number of guessed tokens that became tokens of the reply."""
    timing: dict[str, float] = field(default_factory=dict)


class NoLogprob(ValueError):
    """The log-probability of a sampled token is missing, NaN or infinite.

    Healthy servers report this if the policy is nearly certain, so the server is not blamed for one such reply.
    """


class CountsLost(NoLogprob):
    """A server has forgotten which tokens penalties have counted, so later log-probabilities cannot be computed."""


def read_reply(pieces: Sequence[bytes], asked: Asked) -> ReplyPart:
    """Parse and check the body of a /generate answer. Raises ValueError if it is invalid. Callable from any thread."""
    content = bytearray().join(pieces)
    if len(content) < SHORT_BYTES:
        return check_reply(parsed(content), asked)
    bounds = {"lowest": LOWEST_LOGPROB, "highest": HIGHEST_LOGPROB}
    found = ops.reply_tokens(content, vocab_size=asked.ids_below, at_most=asked.max_new_tokens, **bounds)
    if found is not None:
        ids, logprobs, rest = found
        with contextlib.suppress(ValueError):  # raised below, with the original answer in the message
            return check_reply(parsed(rest), asked, ids, logprobs)
    return check_reply(parsed(content), asked)


def parsed(content: bytes | bytearray) -> Any:
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        if (found := NOT_FINITE.search(content)) is not None:
            rule = "JSON has no such number; most likely it is the log-probability of a token"
            raise NoLogprob(f"{bytes(found[1])!r} at byte {found.start(1)}: {rule}") from None
        raise ValueError(f"{bytes(content[:80])!r} is not JSON: {error}") from None
    try:
        # orjson silently keeps the last of duplicate keys. Then the answer has fewer colons than its text, in which
        # each key has one; no colon in a text may be written with an escape.
        if ESCAPED_COLON in content or colons_in(answer) != content.count(b":"):
            REPEATS.decode(content.decode())  # names the key
    except RecursionError:
        raise ValueError(f"{bytes(content[:80])!r} is nested too deep") from None
    return answer


def colons_in(value: Any) -> int:
    """Return the number of colons in the JSON text of a value, if no colon in it is written as an escape."""
    kind = type(value)
    if kind is dict:
        return len(value) + "".join(value).count(":") + sum(map(colons_in, value.values()))
    if kind is str:
        return int(value.count(":"))
    if kind is not list:
        return 0
    kinds = set(map(type, value))
    if kinds <= {int, float, bool, type(None)}:
        return 0
    if kinds == {list}:  # the tokens' triples: by far the most of a reply
        return colons_in(list(itertools.chain.from_iterable(value)))
    return sum(map(colons_in, value))


def without_repeats(pairs: list[tuple[str, Any]]) -> None:
    """Raise ValueError if the (key, value) pairs of a JSON object have a duplicate key."""
    seen = set()
    for name, _ in pairs:
        if name in seen:
            refuse(name, "two values", "must be there once")
        seen.add(name)


REPEATS = json.JSONDecoder(object_pairs_hook=without_repeats)


def check_reply(answer: Any, asked: Asked, ids: Tensor | None = None, logprobs: Tensor | None = None) -> ReplyPart:
    """Check a parsed /generate answer and convert it. Raises ValueError if it is no valid answer to this request.

    ids, logprobs: ids and log-probabilities of the answer's tokens, if they were already extracted and checked.
    """
    meta = member(as_object("the reply", answer), "meta_info", dict)
    kind, finish = finish_of(meta)  # first: an abort may lack the fields checked below
    entries = member(meta, "output_token_logprobs", list, optional=kind == "abort") or []
    if ids is None or logprobs is None:
        ids, logprobs = tokens_of(entries, asked)
    count = len(ids)
    if not count and kind != "abort":
        refuse("output_token_logprobs", entries, f"must hold tokens where finish_reason = {shown(finish)}")
    check_counts(answer, meta, ids, asked)
    check_finish(kind, finish, ids, asked)
    spans = spans_of(meta, count)
    names, lengths = [str(span["version"]) for span in spans], lengths_of(spans, count, late=asked.late)
    versions = list(zip(versions_of_names(names, asked), lengths, strict=True))
    if count and not spans:  # SGLang before 0.5.19, or a server whose weights did not change
        versions = [(pinned_version(meta, asked), count)]
    found = adjustment = None
    if asked.support:
        found, logprobs = support_of(meta, ids, asked)
        check_counted(meta, count, asked)
        adjustment = asked.adjusting.adjustments(found, ids)
    elif asked.changed:
        check_counted(meta, count, asked)
        found, adjustment = asked.adjusting.changed(ids, asked.changed)
    return ReplyPart(
        sampled=SampledTokens(ids, logprobs, runs_of(tuple(pair for pair in versions if pair[1]))),
        stop_reason=kind,
        # A request aborted in the queue has no text, and a server without a tokenizer never has.
        text=member(answer, "text", str, optional=not asked.gives_text or kind == "abort") or "",
        cached_tokens=member(meta, "cached_tokens", int, optional=True) or 0,
        spans=list(zip(names, lengths, strict=True)) if count else [],
        routes=routes_of(meta, count, kind, asked),
        support=found,
        adjustment=adjustment,
        **guesses_of(meta, count),
        timing={key: float(meta[key]) for key in TIMING if is_number(meta.get(key))},
    )


def guesses_of(meta: dict[str, Any], count: int) -> dict[str, int]:
    """Return the numbers of guessed tokens in a reply of `count` tokens, as fields of ReplyPart.

    Return {} if the server does not report them.
    """
    found = [meta.get(name) for name in ("spec_verify_ct", "spec_num_correct_drafts")]
    # They are for a metric only, so wrong numbers refuse no reply.
    if not all(type(number) is int and 0 <= number <= count for number in found):
        return {}
    return dict(zip(("guessed_passes", "right_guesses"), found, strict=True))


def routes_of(meta: dict[str, Any], count: int, kind: str, asked: Asked) -> Tensor | None:
    """Return the expert routes of all requested rows but the last token's, which was never an input.

    Return None if routes were not requested. An aborted reply may omit its routes, because they are requested again
    with the rest of the reply. kind: the reply's finish reason. count: its number of tokens.
    """
    if asked.routes is None:
        return None
    text = member(meta, "routed_experts", str, optional=kind == "abort")
    if text is None or not count:
        return None
    try:
        return asked.routes.read(text, asked.prompt_tokens + count - 1 - asked.routes_from)
    except ValueError as error:
        raise ValueError(f"routed_experts {error}") from None


def support_of(meta: dict[str, Any], ids: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """Return the tokens' supports, `[n, W]` int32, and log-probabilities over the supports, `[n]` float32."""
    names = ("output_token_sampling_mask", "output_token_sampling_logprobs")
    masks, logprobs = (member(meta, name, list, optional=not len(ids)) or [] for name in names)
    try:
        found = support.read(masks, ids, width=asked.support, vocab_size=asked.ids_below)
    except ValueError as error:
        raise ValueError(f"{names[0]} {error}") from None
    if len(logprobs) != len(ids):
        refuse(names[1], f"{len(logprobs)} entries", f"{len(ids)} tokens came")
    for place, logprob in enumerate(logprobs):
        if not is_number(logprob) or not LOWEST_LOGPROB <= logprob <= HIGHEST_LOGPROB:
            refuse(f"{names[1]}[{place}]", logprob, f"must be a number from {LOWEST_LOGPROB:g} to 0")
    return found, torch.tensor(logprobs, dtype=torch.float32)


def check_counted(meta: dict[str, Any], count: int, asked: Asked) -> None:
    """Raise CountsLost if a reply with penalties was retracted by a server that then forgets what they have counted."""
    if asked.keeps_counts or not asked.adjusting.counts or not count:
        return
    if times := member(meta, "num_retractions", int, optional=True):
        raise CountsLost(
            f"num_retractions = {times}: SGLang forgets which tokens a retracted reply has, so its later penalties are "
            f"unknown; give the server more memory or fewer requests, and set rollout.interruption=abort"
        )


def tokens_of(entries: list[Any], asked: Asked) -> tuple[Tensor, Tensor]:
    """Return the ids and log-probabilities, `[n]` int32 and float32, of a reply's (log-probability, id, text) triples.

    Raises ValueError if a triple is invalid.
    """
    if len(entries) > asked.max_new_tokens:
        refuse("output_token_logprobs", f"{len(entries)} entries", f"at most {asked.max_new_tokens} were asked for")
    above = asked.ids_below
    if (found := usual_tokens(entries, above)) is not None:
        return found
    tokens, logprobs = [], []
    for position, entry in enumerate(entries):
        if type(entry) is not list or len(entry) != 3:
            refuse(f"output_token_logprobs[{position}]", entry, "must be [log-probability, id, text or null]")
        logprob, token, text = entry
        # `type(...) is`, here and below, because JSON's true would pass for the number 1.
        if type(token) is not int or not 0 <= token < above:
            refuse(f"the token at position {position}", token, f"must be an id of the vocabulary of {above}")
        if logprob is None or (type(logprob) is float and not math.isfinite(logprob)):
            raise NoLogprob(f"the log-probability at position {position} = {logprob}: must be a finite number")
        if not is_number(logprob) or not LOWEST_LOGPROB <= logprob <= HIGHEST_LOGPROB:
            rule = f"must be a number from {LOWEST_LOGPROB:g} to 0, the log-probability of a token that was sampled"
            refuse(f"the log-probability at position {position}", logprob, rule)
        if text is not None and type(text) is not str:
            refuse(f"the text at position {position}", text, "must be text or null")
        tokens.append(token)
        logprobs.append(float(logprob))
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(logprobs, dtype=torch.float32)


def usual_tokens(entries: list[Any], above: int) -> tuple[Tensor, Tensor] | None:
    """Return the same as `tokens_of`, but None if an entry is invalid. It is faster, because it checks whole columns.

    above: exclusive upper bound of ids.
    """
    if set(map(type, entries)) != {list} or set(map(len, entries)) != {3}:
        return None
    logprobs, ids, texts = zip(*entries, strict=True)
    if set(map(type, ids)) != {int} or not set(map(type, logprobs)) <= {float, int}:
        return None
    if not (set(map(type, texts)) <= {type(None), str} and 0 <= min(ids) and max(ids) < above):
        return None
    is_between = LOWEST_LOGPROB <= min(logprobs) and max(logprobs) <= HIGHEST_LOGPROB
    if not (is_between and all(map(math.isfinite, logprobs))):  # NaN is neither the least nor the largest
        return None
    # By NumPy, which makes a small array in a quarter of torch's time.
    return torch.from_numpy(np.array(ids, np.int32)), torch.from_numpy(np.array(logprobs, np.float32))


def check_counts(answer: dict[str, Any], meta: dict[str, Any], ids: Tensor, asked: Asked) -> None:
    """Check the ids and counts that a reply repeats for itself and its prompt.

    Each may be missing, because replies to requests that were aborted in the queue lack some of them.
    """
    output, count = member(answer, "output_ids", list, optional=True), len(ids)
    if output is not None and (output != ids.tolist() or not set(map(type, output)) <= {int}):
        refuse("output_ids", output, f"must be the ids of output_token_logprobs, {shown(ids.tolist())}")
    for name in ("completion_tokens", "output_token_logprobs_length"):
        said = member(meta, name, int, optional=True)
        if said is not None and said != count:
            refuse(name, said, f"{count} tokens came")
    prompt = member(meta, "prompt_tokens", int, optional=True)
    if prompt is not None and prompt != asked.prompt_tokens:
        refuse("prompt_tokens", prompt, f"{asked.prompt_tokens} were sent; it answers another prompt")
    cached = member(meta, "cached_tokens", int, optional=True)
    # A retracted request finds its own tokens in the cache as well.
    if cached is not None and not 0 <= cached <= asked.prompt_tokens + count:
        refuse("cached_tokens", cached, f"must be of the {asked.prompt_tokens} tokens that were sent")
    rid = member(meta, "id", str, optional=True)
    if count and rid is not None and rid != asked.rid:  # without tokens nothing can be mixed up
        refuse("id", rid, f"the request's is {asked.rid!r}; it answers another one")


def finish_of(meta: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    finish = member(meta, "finish_reason", dict)
    kind = finish.get("type")
    if kind not in ("stop", "length", "abort"):
        refuse("finish_reason", finish, "must be of type stop, length or abort")
    if finish.get("matched") == "NaN happened":  # SGLang reports it as a normal stop
        refuse("finish_reason", "'NaN happened'", "the model gave logits that are not numbers")
    return kind, finish


def check_finish(kind: str, finish: dict[str, Any], ids: Tensor, asked: Asked) -> None:
    if kind == "stop":
        matched, last = finish.get("matched"), int(ids[-1])
        if not (type(matched) is int and matched == last) and not (type(matched) is str and matched in asked.stop):
            rule = f"what matched must be the last token, {last}, or one of stop = {shown(list(asked.stop))}"
            refuse("finish_reason", finish, rule)
    elif kind == "length":
        count = len(ids)
        if type(finish.get("length")) is not int or finish["length"] != count:
            refuse("finish_reason", finish, f"length must be that of the reply, {count}")
        is_full = asked.room is not None and asked.prompt_tokens + count >= asked.room - KEPT_BACK
        if count < asked.max_new_tokens and not is_full:
            rule = f"{asked.max_new_tokens} tokens were asked for, and the server has room for them"
            refuse("finish_reason", finish, rule)
    elif type(finish.get("message")) is not str:
        refuse("finish_reason", finish, "an abort has a message")


def spans_of(meta: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return a reply's version spans. Raises ValueError unless they are contiguous and cover all `count` tokens."""
    spans = member(meta, "weight_versions", list, optional=True) or []
    end = 0
    for number, span in enumerate(spans):
        at = f"weight_versions[{number}]"
        start, stop = (member(as_object(at, span), name, int) for name in ("start", "end"))
        member(span, "version", str)
        if start != end or stop < start or (stop == start and count > 0):  # an abort may have an empty span
            refuse(at, span, f"must begin at {end} and hold tokens")
        end = stop
    if spans and end != count:
        refuse("weight_versions", spans, f"must cover all of {count} tokens, and no more")
    return spans


def versions_of_names(names: list[str], asked: Asked) -> list[int]:
    """Return the policy version of each weight name of a reply's spans.

    Raises ValueError if a version is lower than the one before, if adjacent names are equal, or from `version_of`.
    """
    versions = [version_of(name, asked) for name in names]
    if versions != sorted(versions) or any(a == b for a, b in itertools.pairwise(names)):
        refuse("weight_versions", names, "must not go back, and differ")
    return versions


def version_of(name: str, asked: Asked) -> int:
    """Return the policy version that a weight name stands for.

    Before the first publication, the name of the server's initial weights stands for the request's version. Raises
    ValueError if the name cannot be that of weights which have answered the request.
    """
    if not asked.is_routed and name == asked.weights:
        return int(name) if VERSION.fullmatch(name) else asked.version
    if VERSION.fullmatch(name) is None:
        if not asked.is_routed and asked.weights is None:  # there is nothing to compare the name with
            return asked.version
        had = "the router chose" if asked.is_routed else f"had {asked.weights!r}"
        refuse(
            "weight_versions", name, f"must be a version; the server that {had}, and may have been started anew since"
        )
    if int(name) < asked.version:
        refuse("weight_versions", name, f"{asked.version} was published before the reply was asked for")
    return int(name)


def pinned_version(meta: dict[str, Any], asked: Asked) -> int:
    """Return the oldest version that can have sampled a token of a reply without spans.

    A server that reports spans may omit them if its weights did not change.
    """
    name = member(meta, "weight_version", str, optional=True)
    if asked.is_routed:
        refuse("weight_versions", name, "a reply through rollout.router must name them; SGLang 0.5.19 or later does")
    if name is None:
        if asked.weights is not None:
            refuse("weight_version", name, f"the server called its weights {asked.weights!r}")
        return asked.version
    version = version_of(name, asked)
    if asked.gives_spans and asked.weights is not None and name != asked.weights:
        refuse("weight_versions", None, f"weight_version = {name!r}, and it was asked with {asked.weights!r}")
    # With a newer name, the first tokens may still have the version at which the request was sent.
    return version if name == asked.weights else asked.version


def newest_of(part: ReplyPart, asked: Asked) -> int:
    """Return the newest version in a reply.

    Spans with the weights that the server had when the request was sent are ignored. If there are no other spans,
    return the request's version.
    """
    names = [name for name, _ in part.spans if asked.is_routed or name != asked.weights]
    return max((int(name) for name in names if VERSION.fullmatch(name)), default=asked.version)


def lengths_of(spans: list[dict[str, Any]], count: int, *, late: int) -> list[int]:
    """Return, for each span, how many of a reply's `count` tokens its weights have sampled.

    The first `late` tokens of each span but the first were sampled by the weights of the previous span (see Asked).
    """
    ends = [min(count, span["end"] + late) for span in spans]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


@functools.lru_cache(maxsize=256)
def runs_of(pairs: tuple[tuple[int, int], ...]) -> Runs:
    """Return (version, number of tokens) pairs as Runs.

    Replies share the result, because nothing changes its tensors.
    """
    return Runs.of_pairs(list(pairs))


# -- field types


def member(found: dict[str, Any], name: str, kind: type, *, optional: bool = False) -> Any:
    """Return the field `name` of a JSON object. Raises ValueError unless its type is exactly `kind` (a bool is no int).

    optional: if True, return None for a field that is missing or null.
    """
    value = found.get(name)
    if value is None and optional:
        return None
    if type(value) is not kind:
        refuse(name, value if name in found else "missing", f"must be of type {kind.__name__}")
    return value


def as_object(name: str, found: Any) -> dict[str, Any]:
    if type(found) is not dict:
        refuse(name, found, "must be a JSON object")
    return found


def is_number(value: Any) -> bool:
    """Return True for an int or float that is finite in float32. A bool is no number."""
    return type(value) in (int, float) and abs(value) < 3e38  # false for NaN


def refuse(name: str, value: Any, rule: str) -> NoReturn:
    # Truncated for logs and errors, because a server may have sent megabytes.
    raise ValueError(f"{name} = {value if type(value) is str else shown(value)}: {rule}"[:1000])


def shown(value: Any) -> str:
    """Return a short text for a value, which may be large or deeply nested."""
    return reprlib.repr(value)
