"""Converts JSON bodies of SGLang's `/generate` and OpenAI's chat to requests, and finished requests to JSON.

This module does no HTTP. An invalid body raises ValueError that names the field, the value and the rule, and the HTTP
layer responds with status 400.
"""

import time
import uuid
from base64 import b64encode
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.routes import experts_of
from megatron_rl.tools.embedded_server.fields import flag, shown
from megatron_rl.tools.embedded_server.reply_text import Text
from megatron_rl.tools.embedded_server.request import Request
from megatron_rl.tools.embedded_server.sampling import SamplingParams, derive_seed

# Unsupported fields of SGLang's GenerateReqInput, each with the values that are accepted because they have no effect.
_UNSUPPORTED = {
    "input_embeds": (None,),
    "image_data": (None, []),
    "audio_data": (None, []),
    "video_data": (None, []),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "return_hidden_states": (None, False),
    "sampling_logprobs_mode": (None, "selected"),
    "custom_logit_processor": (None,),
}
_CHAT_UNSUPPORTED = {
    "tools": (None, []),
    "stream": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "lora_path": (None,),
}
_CHAT_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
} | {
    name: name
    for name in (
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("logit_bias", "stop", "stop_token_ids", "ignore_eos", "no_stop_trim", "skip_special_tokens", "n"),
        *("stop_regex", "regex", "ebnf", "json_schema", "structural_tag"),
    )
}


MAX_SAMPLES = 4096
"""Maximum number of samples of one call, summed over its prompts."""
MAX_MESSAGES = 4096
MAX_DEPTH = 8
"""Maximum nesting of values inside a message."""
MAX_ID_LETTERS = 256
LETTERS_PER_TOKEN = 32
"""Assumed upper bound of characters per token. A longer text is refused before tokenization, which would be slow."""
MAX_SCALARS = 64
MOST_SUPPORT = 4096
"""Maximum top_k of a request with return_sampling_mask. SGLang's default for --sampling-mask-max-tokens."""


@dataclass(frozen=True)
class Limits:
    vocab_size: int
    context_length: int
    tells_routes: bool = False
    tells_weights: bool = False
    """True if returned expert routes include the router's weight for each expert."""

    @property
    def letters(self) -> int:
        """Maximum number of characters of all texts or messages of a call together."""
        return max(2**20, LETTERS_PER_TOKEN * self.context_length)


@dataclass(frozen=True)
class GenerateCall:
    """A checked `/generate` body."""

    requests: list[Request]
    single: bool
    """True if the response is one object instead of a list."""
    stream: bool
    return_logprob: bool
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool
    tells_weights: bool


@dataclass(frozen=True)
class ChatCall:
    """The validated fields of a chat body. The body itself, which may be large, is not kept."""

    prompt: list[int] | None
    """Token ids; None if `messages` must be rendered."""
    messages: list[dict[str, Any]]
    options: dict[str, Any]
    """Variables for the model's chat template."""
    params: SamplingParams
    rid: str | None
    logprobs: bool
    return_token_ids: bool
    return_prompt_token_ids: bool
    return_meta_info: bool


def is_text(body: Any) -> bool:
    """Return True if the body has text or messages, which are slow to tokenize."""
    return isinstance(body, dict) and (body.get("text") is not None or body.get("messages") is not None)


def parse_generate(body: Any, limits: Limits, text: Text | None, adapter: str | None = None) -> GenerateCall:
    """Check a `/generate` body. adapter: name of the adapter merged into the weights, which lora_path must match."""
    _check_object(body, _UNSUPPORTED)
    if (named := body.get("lora_path")) != adapter:
        has = "no adapter" if adapter is None else f"the adapter {adapter!r}, and answers with no other weights"
        raise ValueError(f"lora_path = {shown(named)}: this server has {has}; load or name it first")
    prompts, batch = _prompts(body, limits, text)
    stream, return_logprob = flag(body, "stream"), flag(body, "return_logprob")
    params = _per_prompt(body.get("sampling_params"), len(prompts), batch, "sampling_params")
    rids = _per_prompt(body.get("rid"), len(prompts), batch, "rid")
    start = body.get("logprob_start_len")
    start = -1 if start is None else start
    if type(start) is not int or start < -1:
        raise ValueError(f"logprob_start_len = {shown(start)}: must be an integer >= -1")
    routes_from = _routes_from(body, limits)
    requests = []
    for i, prompt in enumerate(prompts):
        _check_ids(prompt, limits)
        sampling = SamplingParams.parse(params[i], limits.vocab_size)
        if len(requests) + sampling.n > MAX_SAMPLES:
            raise ValueError(f"{len(prompts)} prompts: a call may ask for {MAX_SAMPLES} samples in all; send several")
        requests += make_requests(prompt, sampling, rids[i], limits, text, start if return_logprob else -1)
    tells_support = flag(body, "return_sampling_mask")
    for request in requests:
        request.routes_from, request.tells_support = routes_from, tells_support
        if tells_support and not 1 <= request.params.top_k <= MOST_SUPPORT:
            raise ValueError(
                f"return_sampling_mask: sampling_params.top_k = {request.params.top_k}: must be in "
                f"[1, {MOST_SUPPORT}], as with SGLang, or temperature 0"
            )
    single = not batch and len(requests) == 1
    if stream and not single:
        raise ValueError("stream: true needs one prompt and n = 1; send one request per sample")
    in_text = flag(body, "return_text_in_logprobs")
    if in_text and text is None:
        raise ValueError("return_text_in_logprobs: true needs a tokenizer, and the model folder has none")
    flags = flag(body, "return_prompt_token_ids"), limits.tells_weights
    return GenerateCall(requests, single, stream, return_logprob, in_text, *flags)


def _routes_from(body: dict[str, Any], limits: Limits) -> int | None:
    """Return the position from which on expert routes are requested; None if no routes are requested."""
    start = body.get("routed_experts_start_len", 0)
    if type(start) is not int or start < 0:
        raise ValueError(f"routed_experts_start_len = {shown(start)}: must be an integer >= 0")
    if not flag(body, "return_routed_experts"):
        return None
    if not limits.tells_routes:
        raise ValueError(
            "return_routed_experts: the server was started without it; start it with --enable-return-routed-experts "
            "and a model that has experts"
        )
    return start


def make_requests(
    prompt: list[int], params: SamplingParams, rid: Any, limits: Limits, text: Text | None, logprob_start: int
) -> list[Request]:
    """Make one request per sample. As in SGLang, the samples get generated ids instead of `rid` if n > 1."""
    _check_rid(rid)
    if params.stop and text is None:
        raise ValueError("sampling_params.stop needs a tokenizer, and the model folder has none; use stop_token_ids")
    if logprob_start > len(prompt):
        raise ValueError(f"logprob_start_len = {logprob_start}: must be at most the prompt's {len(prompt)} tokens")
    # As in SGLang, max_new_tokens beyond the context is no error: the reply ends at the context length.
    params = replace(params, max_new_tokens=min(params.max_new_tokens, limits.context_length - len(prompt)))
    requests = []
    for i in range(params.n):
        own = params
        # With a common seed, all samples would be identical.
        if params.n > 1 and params.sampling_seed is not None:
            own = replace(params, sampling_seed=derive_seed(params.sampling_seed, i))
        own_rid = rid if rid is not None and params.n == 1 else uuid.uuid4().hex
        start = logprob_start if 0 <= logprob_start < len(prompt) else None
        requests.append(Request(rid=own_rid, prompt=prompt, params=own, logprob_start=start))
    return requests


def generate_response(
    request: Request, call: GenerateCall, version: str, text: Text | None, tokens: int | None = None
) -> dict[str, Any]:
    """Return SGLang's response to one request. tokens: for a stream chunk, include only the first `tokens` tokens."""
    output = request.output[:tokens]
    finished = tokens is None
    response = {
        "text": reply_text(request, output, finished, text),
        "output_ids": output,
        "meta_info": meta_info(request, output, finished, version),
    }
    if finished and request.routes is not None:
        told = request.routes if call.tells_weights else experts_of(request.routes)
        response["meta_info"]["routed_experts"] = b64encode(told.cpu().numpy().tobytes()).decode()
    if request.tells_support:
        response["meta_info"] |= {
            "output_token_sampling_mask": request.supports[: len(output)],
            "output_token_sampling_logprobs": request.support_logprobs[: len(output)],
            "output_token_sampling_mask_length": len(output),
        }
    if call.return_prompt_token_ids:
        response["prompt_token_ids"] = request.prompt
    if call.return_logprob:
        named = text if call.return_text_in_logprobs else None
        start = len(request.prompt) if request.logprob_start is None else request.logprob_start
        # The first scored token has no prediction before it.
        scores = [None, *request.input_logprobs][: len(request.prompt) - start]
        response["meta_info"] |= {
            "input_token_logprobs": _triples(scores, request.prompt[start : start + len(scores)], named),
            "output_token_logprobs": _triples(request.logprobs[: len(output)], output, named),
            "output_token_logprobs_length": len(output),
        }
    return response


def meta_info(request: Request, output: list[int], finished: bool, version: str) -> dict[str, Any]:
    reason = request.finish_reason if finished else None
    version = request.weight_version or version
    info: dict[str, Any] = {"id": request.rid, "finish_reason": reason, "weight_version": version}
    # SGLang omits these for a request that was aborted before it ran.
    if request.started or reason is None or reason["type"] != "abort":
        cached = request.cached_tokens
        info |= {
            "prompt_tokens": len(request.prompt),
            "cached_tokens": cached,
            "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
            "num_retractions": request.retractions,
        }
    # The last tokens of a running request are in no closed span yet. Spans are clipped to the tokens in this chunk.
    spans, begin = [], 0
    for span_version, end in [*request.spans, (version, len(output))]:
        if min(end, len(output)) > begin:
            spans.append({"version": span_version, "start": begin, "end": min(end, len(output))})
            begin = spans[-1]["end"]
    info |= {"completion_tokens": len(output), "reasoning_tokens": 0, "weight_versions": spans, "dp_rank": None}
    if passes := request.guessed_passes:
        info |= {"spec_verify_ct": passes, "spec_num_correct_drafts": request.right_guesses}
        info["spec_accept_length"] = 1 + request.right_guesses / passes
    if finished:
        info |= timing(request)
    return info


def timing(request: Request) -> dict[str, float]:
    """Return a finished request's arrival time (wall clock) and latencies, all in seconds.

    SGLang returns the same fields if its metrics are enabled.
    """
    times = {
        # Durations are measured with the monotonic clock, which is never adjusted, and then converted to wall time.
        "request_received_ts": time.time() - (time.monotonic() - request.created_s),
        "queue_time": (request.started_s or request.finished_s) - request.created_s,
        "e2e_latency": request.finished_s - request.created_s,
    }
    if request.first_token_s:
        times["first_token_latency"] = request.first_token_s - request.created_s
    return times


UNDECODED = "\ufffd"
"""Replacement character: the decoder's output for bytes that are not valid UTF-8."""
MOST_BYTES = 4
"""Maximum number of bytes of a UTF-8 character. Each byte may be a separate token."""


def reply_text(request: Request, output: list[int], finished: bool, text: Text | None) -> str:
    """Decode the reply; "" without a tokenizer.

    Unless no_stop_trim is set, the stop token or stop string at the end is removed. A trailing incomplete UTF-8
    character of an unfinished reply is removed too.
    """
    if text is None:
        return ""
    params = request.params
    matched = request.finish_reason.get("matched") if finished and request.finish_reason else None
    trim = matched is not None and not params.no_stop_trim
    if trim and isinstance(matched, int):
        output = output[:-1]
    reply = text.decode(output, params.skip_special_tokens)
    if not finished and reply.endswith(UNDECODED):
        # The last tokens are an incomplete character. Decode fewer tokens, because the incomplete bytes can also turn
        # complete characters before them into replacement characters.
        shorter = (text.decode(output[:-held], params.skip_special_tokens) for held in range(1, MOST_BYTES))
        reply = next((it for it in shorter if not it.endswith(UNDECODED)), reply.rstrip(UNDECODED))
    # The stop string was found in the decoded last few tokens. The decoded whole may differ; then nothing is trimmed.
    return reply.partition(matched)[0] if trim and matched in params.stop and matched in reply else reply


def parse_chat(body: Any, limits: Limits, text: Text | None) -> ChatCall:
    """Check an OpenAI chat body. A body with `input_ids` instead of messages skips the chat template."""
    _check_object(body, _CHAT_UNSUPPORTED)
    prompt, messages = None, []
    if body.get("input_ids") is not None:
        prompts, batch = _prompts({"input_ids": body["input_ids"]}, limits, text)
        if batch:
            raise ValueError("input_ids: a chat takes one list of token ids")
        prompt = prompts[0]
        _check_ids(prompt, limits)
    else:
        messages = body.get("messages")
        _check_messages(messages, limits)
        if text is None:
            raise ValueError("messages: the model folder has no tokenizer; send input_ids")
    names = {theirs: ours for ours, theirs in _CHAT_SAMPLING.items() if body.get(ours) is not None}
    sampling = {theirs: body[ours] for theirs, ours in names.items()}
    sampling.setdefault("max_new_tokens", limits.context_length)
    _check_rid(body.get("rid"))
    for name in ("model", "user"):
        if not isinstance(body.get(name), str | None):
            raise ValueError(f"{name} = {shown(body[name])}: must be a string")
    return ChatCall(
        prompt=prompt,
        messages=messages,
        options=_template_options(body),
        params=SamplingParams.parse(sampling, limits.vocab_size, names),
        rid=body.get("rid"),
        logprobs=flag(body, "logprobs"),
        return_token_ids=flag(body, "return_token_ids"),
        return_prompt_token_ids=flag(body, "return_prompt_token_ids"),
        return_meta_info=flag(body, "return_meta_info"),
    )


def chat_requests(call: ChatCall, limits: Limits, text: Text | None) -> list[Request]:
    """Make the requests of a call. Messages are rendered with the model's own chat template."""
    prompt = call.prompt
    if prompt is None:
        assert text is not None  # parse_chat requires a tokenizer for messages
        prompt = text.render(call.messages, call.options)
        _check_ids(prompt, limits)
    return make_requests(prompt, call.params, call.rid, limits, text, -1)


def chat_response(
    requests: list[Request], call: ChatCall, version: str, model_name: str, now_s: int, text: Text | None
) -> dict[str, Any]:
    choices = []
    for index, request in enumerate(requests):
        reason, output = request.finish_reason, request.output
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": reply_text(request, output, True, text)},
            "finish_reason": reason["type"],
            "matched_stop": reason.get("matched"),
            "logprobs": None,
        }
        if call.logprobs:
            named = [(logprob, token or "") for logprob, _, token in _triples(request.logprobs, output, text)]
            choice["logprobs"] = {
                "content": [
                    {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                    for logprob, token in named
                ]
            }
        if call.return_token_ids:
            choice["token_ids"] = output
        if call.return_prompt_token_ids:
            choice["prompt_token_ids"] = request.prompt
        if call.return_meta_info:
            choice["meta_info"] = meta_info(request, output, True, version)
            choice["meta_info"]["output_token_logprobs"] = _triples(request.logprobs, output, None)
        choices.append(choice)
    generated = sum(len(r.output) for r in requests)
    prompt = len(requests[0].prompt)
    return {
        "id": requests[0].rid,
        "object": "chat.completion",
        "created": now_s,
        "model": model_name,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
        "metadata": {
            "weight_version": requests[-1].weight_version,
            "weight_versions": meta_info(requests[0], requests[0].output, True, version)["weight_versions"],
        },
    }


def _check_object(body: Any, unsupported: dict[str, tuple]) -> None:
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    for name, harmless in unsupported.items():
        if name in body and body[name] not in harmless:
            raise ValueError(f"{name} is not supported by the embedded server; leave it out")


def _check_rid(rid: Any) -> None:
    if rid is not None and (not isinstance(rid, str) or not 0 < len(rid) <= MAX_ID_LETTERS):
        raise ValueError(f"rid = {shown(rid)}: must be a non-empty string of at most {MAX_ID_LETTERS} letters")


def _template_options(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("chat_template_kwargs")
    options = {} if options is None else options
    if not isinstance(options, dict) or len(options) > MAX_SCALARS:
        raise ValueError(f"chat_template_kwargs = {shown(options)}: must be an object of at most {MAX_SCALARS} fields")
    for name, value in options.items():
        is_word = isinstance(value, str) and len(value) <= MAX_ID_LETTERS
        if not (is_word or type(value) in (bool, int, float, type(None))):
            raise ValueError(
                f"chat_template_kwargs.{name[:100]} = {shown(value)}: must be true, false, null, a number or a string "
                f"of at most {MAX_ID_LETTERS} letters"
            )
    return options


def _check_messages(messages: Any, limits: Limits) -> None:
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages: must be a non-empty list of objects with role and content")
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"messages: has {len(messages)}; must have at most {MAX_MESSAGES}")
    letters = 0
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not 0 < len(role) <= MAX_ID_LETTERS:
            raise ValueError(f"messages[{i}].role = {shown(role)}: must be a name such as user")
        if isinstance(content, list):
            for part in content:
                if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                    raise ValueError(f"messages[{i}].content: {shown(part)} must be an object of type text with a text")
        elif not isinstance(content, str | None):
            raise ValueError(f"messages[{i}].content = {shown(content)}: must be a string or a list of texts")
        letters += _letters(message, f"messages[{i}]", MAX_DEPTH)
        if letters > limits.letters:
            raise ValueError(f"messages: must have at most {limits.letters:,} letters in all")


def _letters(value: Any, name: str, depth: int) -> int:
    """Count the characters of all keys and strings in a value, at any depth.

    Each part counts as at least 1, so the number of empty parts is limited too.
    """
    if isinstance(value, str):
        return len(value) + 1
    if not isinstance(value, dict | list):
        return 1
    if not depth:
        raise ValueError(f"{name}: is nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        return 1 + sum(len(key) + _letters(inner, name, depth - 1) for key, inner in value.items())
    return 1 + sum(_letters(inner, name, depth - 1) for inner in value)


def _prompts(body: dict[str, Any], limits: Limits, text: Text | None) -> tuple[list[list[int]], bool]:
    """Return the prompts as token ids (range not checked yet), and True if the caller sent a batch."""
    ids, texts = body.get("input_ids"), body.get("text")
    if (ids is None) == (texts is None):
        raise ValueError("exactly one of input_ids and text must be given")
    if ids is None:
        if text is None:
            raise ValueError("text: the model folder has no tokenizer; send input_ids")
        batch = isinstance(texts, list)
        texts = texts if batch else [texts]
        if not texts or not all(isinstance(t, str) and t for t in texts):
            raise ValueError("text: must be a non-empty string or a list of such")
        if len(texts) > MAX_SAMPLES:
            raise ValueError(f"{len(texts)} prompts: a call may ask for {MAX_SAMPLES} samples in all; send several")
        longest, letters = max(map(len, texts)), sum(map(len, texts))
        if longest > LETTERS_PER_TOKEN * limits.context_length or letters > limits.letters:
            raise ValueError(
                f"text: has {longest:,} letters, {letters:,} in all; must have at most {LETTERS_PER_TOKEN} for each "
                f"token of the model's context length ({limits.context_length} tokens), and {limits.letters:,} in all"
            )
        return [text.encode(t) for t in texts], batch
    if not isinstance(ids, list) or not ids:
        raise ValueError("input_ids: must be a non-empty list of token ids, or a list of such lists")
    batch = isinstance(ids[0], list)
    return (ids if batch else [ids]), batch


def _check_ids(ids: Any, limits: Limits) -> None:
    if not isinstance(ids, list) or not ids:
        raise ValueError("input_ids: must be a non-empty list of token ids")
    if len(ids) >= limits.context_length:  # clients may match SGLang's message
        raise ValueError(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({limits.context_length} tokens)."
        )
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            raise ValueError(f"input_ids[{i}] = {shown(token)}: must be an integer in [0, {limits.vocab_size})")


def _per_prompt(value: Any, count: int, batch: bool, name: str) -> list[Any]:
    if not isinstance(value, list):
        if batch and count > 1 and isinstance(value, str):
            raise ValueError(f"{name} = {shown(value)}: a batch of {count} prompts needs a list of {count}")
        return [value] * count
    if not batch or len(value) != count:
        raise ValueError(f"{name}: a list of {len(value)} does not fit {count} prompt(s)")
    return value


def _triples(logprobs: list[float | None], ids: list[int], text: Text | None) -> list[list[Any]]:
    return [
        [logprob, token, None if text is None else text.decode([token], False)]
        for logprob, token in zip(logprobs, ids, strict=True)
    ]
