"""A reply that was spoilt is refused, or gives what it gave before: of both protocols, in any of its fields."""

import base64
import copy
import dataclasses
import functools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.routes import RouteForm
from megatron_rl.servers import reply_check
from megatron_rl.servers.reply_check import KEPT_BACK, Asked, NoLogprob, check_reply, newest_of, read_reply
from megatron_rl.support import NO_TOKEN, Adjusting
from megatron_rl.tools.embedded_server.protocol import GenerateCall, generate_response
from megatron_rl.tools.embedded_server.request import Request
from megatron_rl.tools.embedded_server.sampling import SamplingParams
from tests.kit.examples import max_examples

PROMPT, OUTPUT = [5, 6, 7], [8, 9, 10, 11]
ASKED = Asked(
    rid="r-1", prompt_tokens=3, max_new_tokens=4, stop=("END",), version=3, weights="3", vocab_size=100, room=1000
)
SHORT = Asked(
    rid="r-1", prompt_tokens=3, max_new_tokens=9, stop=("END",), version=3, weights="3", vocab_size=100, room=1000
)


def read_both(content):
    """Read a reply as a short one and as a long one, and return what both give, or raise what both raise."""
    found = []
    for short_bytes in (2**30, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reply_check, "SHORT_BYTES", short_bytes)
            try:
                part = read_reply([content], ASKED)
                found.append((part, None, seen(part)))
            except ValueError as refusal:
                found.append((None, refusal, (type(refusal), str(refusal))))
    (part, refusal, short), (_, _, long) = found
    assert short == long
    if refusal is not None:
        raise refusal
    return part


def embedded(reason=None):
    """What the embedded server answers, by its own code."""
    request = Request(rid="r-1", prompt=PROMPT, params=SamplingParams(max_new_tokens=4))
    request.tokens += OUTPUT
    request.logprobs = [-0.5, -1.25, -0.125, -3.0]
    request.spans, request.weight_version = [("3", 2), ("4", 4)], "4"
    request.finish_reason = reason or {"type": "length", "length": 4}
    request.started, request.created_s, request.started_s, request.finished_s = True, 1.0, 2.0, 3.0
    shows = {"return_logprob": True, "return_text_in_logprobs": False, "return_prompt_token_ids": False}
    call = GenerateCall(requests=[request], single=True, stream=False, tells_weights=False, **shows)
    return json.loads(json.dumps(generate_response(request, call, "4", None)))


def sglang(reason=None):
    """What SGLang 0.5.21 answered, by facts of a run."""
    answer = embedded(reason)
    answer["meta_info"] |= {"e2e_latency": 0.07, "input_token_logprobs": [], "routed_dp_rank": None}
    del answer["meta_info"]["request_received_ts"]
    return answer


ENDS = {
    "length": (ASKED, {"type": "length", "length": 4}),
    "stop": (SHORT, {"type": "stop", "matched": 11}),
    "string": (SHORT, {"type": "stop", "matched": "END"}),
    "abort": (SHORT, {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}),
}


CALM = embedded()
"""The same whenever it is looked at; the time of the request is in it."""


def seen(part):
    sampled = part.sampled
    lists = sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.versions.each().tolist()
    return *lists, part.stop_reason, part.text


def taken(part, asked):
    """What a client makes of it to which version 4 was the last that was published."""
    if newest_of(part, asked) > 4:
        raise ValueError("newer than what was published")
    return seen(part)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        ["NaN", "-inf", "default", "incomplete", "3", "4", "-1", "999", "4.0", " 4", "٤", "", "stop", "END"]
    ),
    st.sampled_from(
        [math.nan, math.inf, -math.inf, -1e308, 1e308, 7.9, 0.5, 2**63, -(2**63), 10**30, -1, 0, 1, 2, 5, 99]
    ),
    st.sampled_from(
        [[], {}, [[]], [None], {"type": "stop"}, [[-0.5, 8, None]], [[[[[[[[[[]]]]]]]]]], [[-0.5, 8]] * 200]
    ),
    st.integers(100, 10**6),
)


def places(value, path=()):
    """Every place in a JSON value, itself included."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def is_told(path):
    """Whether a plausible value there cannot be told from the true one, by anybody: a log-probability, or the text."""
    return path == ("text",) or (len(path) == 4 and path[1] == "output_token_logprobs" and path[3] in (0, 2))


@pytest.mark.parametrize("make", [embedded, sglang])
@pytest.mark.parametrize("end", ENDS)
def test_reply_that_is_what_was_asked_for_is_taken(make, end):
    asked, reason = ENDS[end]
    part = check_reply(make(reason), asked)
    assert seen(part) == (OUTPUT, [-0.5, -1.25, -0.125, -3.0], [3, 3, 4, 4], reason["type"], "")
    assert part.spans == [("3", 2), ("4", 2)] and newest_of(part, asked) == 4


@settings(max_examples=max_examples(70, 200), deadline=None)
@given(st.sampled_from([embedded, sglang]), st.sampled_from(sorted(ENDS)), st.data())
def test_reply_spoilt_in_any_field_is_refused_or_is_what_it_was(make, end, data):
    asked, reason = ENDS[end]
    answer = make(reason)
    good = taken(check_reply(answer, asked), asked)
    path = data.draw(st.sampled_from(list(places(answer))))
    how = data.draw(st.sampled_from(["replace", "remove", "repeat"]))
    spoilt = copy.deepcopy(answer)
    if not path:
        spoilt = data.draw(ODD)
    else:
        holder = spoilt
        for key in path[:-1]:
            holder = holder[key]
        if how == "replace":
            holder[path[-1]] = data.draw(ODD)
        elif how == "remove":
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.insert(path[-1], copy.deepcopy(holder[path[-1]]))
    try:
        found = taken(check_reply(spoilt, asked), asked)
    except ValueError as refusal:
        assert len(str(refusal)) <= 1000
        return
    if is_told(path):
        texts, numbers = (found[:1] + found[2:4], good[:1] + good[2:4])
        assert texts == numbers and all(-1e4 <= logprob <= 1e-3 for logprob in found[1]) and type(found[4]) is str
    else:
        assert found == good, (path, how)


@settings(max_examples=max_examples(70, 200), deadline=None)
@given(st.data())
def test_body_spoilt_in_its_bytes_is_refused_or_is_what_it_was_but_for_its_digits(data):
    content = json.dumps(CALM).encode()
    place = data.draw(st.integers(0, len(content) - 1))
    spoilt = content[:place] + data.draw(st.binary(max_size=3)) + content[place + data.draw(st.integers(0, 40)) :]
    try:
        part = read_both(spoilt)
        taken(part, ASKED)
    except ValueError as refusal:
        assert len(str(refusal)) <= 1000
        return
    assert (seen(part)[0], seen(part)[3]) == (OUTPUT, "length")
    assert seen(part)[2] in ([3, 3, 4, 4], [3] * 4)  # of two spans a cut can make one that any reply may have


def with_meta(**fields):
    answer = embedded()
    answer["meta_info"] |= fields
    return answer


def with_entry(position, *values):
    answer = embedded()
    for place, value in values:
        answer["meta_info"]["output_token_logprobs"][position][place] = value
        if place == 1:
            answer["output_ids"][position] = value
    return answer


def with_spans(*spans):
    return with_meta(weight_versions=[{"version": v, "start": a, "end": b} for v, a, b in spans])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        *((with_entry(1, (0, bad)), "log-probability at position 1 = ") for bad in ("NaN", "-inf", -1e308, False, 0.5)),
        *((with_entry(1, (0, bad)), "log-probability at position 1 = ") for bad in (math.nan, -math.inf, None, [])),
        *((with_entry(2, (1, bad)), "token at position 2 = ") for bad in (7.9, True, "9", -1, 100, 2**70)),
        (embedded() | {"output_ids": [8, 9, 10, 12]}, r"output_ids = \[8, 9, 10, 12\]: must be the ids of"),
        (embedded() | {"output_ids": [8.0, 9, 10, 11]}, "output_ids = "),
        (with_meta(output_token_logprobs=[[-0.5, 8, None]] * 40), "40 entries: at most 4 were asked for"),
        (with_meta(output_token_logprobs=[[-0.5, 8, None]] * 200_000), "200000 entries: at most 4"),
        (with_meta(output_token_logprobs={}), "output_token_logprobs = {}: must be of type list"),
        (with_spans(("3", 0, 2), ("999", 2, 3)), "must cover all of 4 tokens"),
        (with_spans(("3", 0, 2), ("4", 3, 4)), r"weight_versions\[1\] = .*must begin at 2"),
        (with_spans(("3", 0, 9)), "must cover all of 4 tokens"),
        (with_spans(("4", 0, 2), ("3", 2, 4)), "must not go back"),
        (with_spans(("2", 0, 4)), "weight_versions = 2: 3 was published before"),
        *((with_spans((name, 0, 4)), "may have been started anew") for name in ("-1", "incomplete", "default", "٣")),
        (with_meta(weight_versions=[]), "weight_versions = None: weight_version = '4', and it was asked with '3'"),
        (with_meta(weight_versions=None, weight_version=None), "weight_version = None: the server called its weights"),
        (with_meta(prompt_tokens=4), "prompt_tokens = 4: 3 were sent"),
        (with_meta(cached_tokens=-1), "cached_tokens = -1"),
        (with_meta(completion_tokens=True), "completion_tokens = True: must be of type int"),
        (with_meta(id="r-2"), "id = r-2: the request's is 'r-1'"),
        (with_meta(finish_reason="length"), "finish_reason = length: must be of type dict"),
        (with_meta(finish_reason={"type": "tired"}), "must be of type stop, length or abort"),
        (with_meta(finish_reason={"type": "length", "length": 3}), "length must be that of the reply, 4"),
        (with_meta(finish_reason={"type": "stop", "matched": 8}), "what matched must be the last token, 11"),
        (with_meta(finish_reason={"type": "stop", "matched": "NaN happened"}), "logits that are not numbers"),
        (embedded() | {"text": None}, "text = None: must be of type str"),
        (embedded() | {"text": ["a"]}, "text = "),
        ([embedded()], "the reply = .*must be a JSON object"),
        ({"error": {"message": "busy"}}, "meta_info = missing: must be of type dict"),
    ],
)
def test_what_no_server_can_have_generated_is_named(answer, words):
    with pytest.raises(ValueError, match=words):
        check_reply(answer, ASKED)


@pytest.mark.parametrize(
    "body",
    [
        b'{"text": NaN}',
        b'{"text": Infinity}',
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"\xff\xfe",
        b"",
        json.dumps(embedded()).encode()[:-1] + b', "text": "twice"}',
        json.dumps(embedded())
        .encode()
        .replace(b'"completion_tokens": 4', b'"completion_tokens":4,"completion_tokens":4'),
        json.dumps(embedded()).replace("-0.5", "-1e999").encode(),
    ],
)
def test_body_that_json_does_not_know_or_that_says_something_twice_is_refused(body):
    compact = body.replace(b'": ', b'":')
    with pytest.raises(ValueError):
        read_both(compact)


@pytest.mark.parametrize("spelled", ["plain", "first letter", "all letters", "space before the colon"])
@pytest.mark.parametrize(
    "path",
    [
        *(("text",), ("output_ids",), ("meta_info",), ("meta_info", "output_token_logprobs"), ("meta_info", "id")),
        *(("meta_info", "finish_reason", "type"), ("meta_info", "weight_versions", 0, "end"), ("unknown",)),
    ],
    ids=str,
)
def test_a_key_that_is_there_twice_in_disguise_is_refused(path, spelled):
    """In escapes, or at any depth: which of the two values counts is for nobody to guess."""
    name, body = path[-1], embedded() | {"unknown": 1}
    place = functools.reduce(lambda found, step: found[step], path[:-1], body)
    place["TWICE"] = place[name]
    escaped = {"first letter": 1, "all letters": len(name)}.get(spelled, 0)
    again = "".join(f"\\u{ord(letter):04x}" for letter in name[:escaped]) + name[escaped:]
    gap = " " if spelled == "space before the colon" else ""
    content = json.dumps(body, separators=(",", ":")).replace('"TWICE":', f'"{again}"{gap}:')
    with pytest.raises(ValueError, match=f"{name} = two values: must be there once"):
        read_both(content.encode())


@settings(max_examples=max_examples(70, 200), deadline=None)
@given(st.recursive(st.none() | st.integers(-9, 9) | st.text(":\\\"a\u00e9", max_size=4),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(":ab", max_size=2), inner),
                    max_leaves=12), st.booleans())  # fmt: skip
def test_colons_are_counted_as_a_text_has_them_and_one_more_for_a_key_that_is_there_twice(value, is_spaced):
    text = json.dumps(value, ensure_ascii=is_spaced, indent=1 if is_spaced else None)
    assert reply_check.colons_in(json.loads(text)) == text.count(":")
    twice = f'{{"a": {text}, "b": 1, "a": {text}}}'
    assert reply_check.colons_in(json.loads(twice)) < twice.count(":")


def test_weights_of_the_start_stand_for_the_version_of_the_request_until_something_is_published():
    first = Asked(rid="r-1", prompt_tokens=3, max_new_tokens=4, version=0, weights="default", vocab_size=100)
    assert seen(check_reply(with_spans(("default", 0, 4)), first))[2] == [0] * 4
    # A publication went through it.
    assert seen(check_reply(with_spans(("default", 0, 3), ("1", 3, 4)), first))[2] == [
        0,
        0,
        0,
        1,
    ]
    with pytest.raises(ValueError, match="had 'default', and may have been started anew"):
        check_reply(with_spans(("none", 0, 4)), first)


def test_servers_before_0_5_19_give_one_name_for_a_reply_and_the_oldest_version_counts():
    old = Asked(rid="r-1", prompt_tokens=3, max_new_tokens=4, version=3, weights="3", gives_spans=False)
    for name, words in (("3", None), ("4", None), ("default", "started anew"), ("2", "3 was published before")):
        answer = with_meta(weight_version=name)
        del answer["meta_info"]["weight_versions"]
        if words is None:
            assert seen(check_reply(answer, old))[2] == [3] * 4
        else:
            with pytest.raises(ValueError, match=words):
                check_reply(answer, old)


def test_reply_may_end_early_where_the_server_has_no_more_room():
    asked = Asked(rid="r-1", prompt_tokens=3, max_new_tokens=99, version=3, weights="3")
    full = len(PROMPT) + len(OUTPUT) + KEPT_BACK
    for room in (8, full):
        assert check_reply(embedded(), dataclasses.replace(asked, room=room)).stop_reason == "length"
    with pytest.raises(ValueError, match="99 tokens were asked for, and the server has room for them"):
        check_reply(embedded(), dataclasses.replace(asked, room=full + 1))


ROUTES = RouteForm(total_layers=2, layers=(1,), slots=2, experts=4, has_weights=False)
ROUTED = Asked(
    rid="r-1", prompt_tokens=3, max_new_tokens=4, stop=("END",), version=3, weights="3", vocab_size=100, routes=ROUTES
)


def routed(rows, reason=None):
    """A reply with the map of so many rows: experts 0 and 1 for every token."""
    answer = sglang(reason)
    table = torch.tensor([[[0, 0], [0, 1]]] * rows, dtype=torch.int32).numpy()
    answer["meta_info"]["routed_experts"] = base64.b64encode(table.tobytes()).decode()
    return answer


def test_routes_are_those_of_every_row_but_the_last_tokens_which_nobody_has_read():
    assert check_reply(routed(6), ROUTED).routes.tolist() == [[[0, 1]]] * 6
    # Of a reply that goes on, the rows whose routes are known are not asked for again.
    assert check_reply(routed(2), dataclasses.replace(ROUTED, routes_from=4)).routes.tolist() == [[[0, 1]]] * 2
    assert check_reply(routed(6), ASKED).routes is None
    assert ROUTED.bytes_at_most - ASKED.bytes_at_most == 7 * ROUTES.wire_bytes_per_token


@pytest.mark.parametrize("rows", [5, 7, 0])
def test_routes_of_other_rows_than_were_asked_for_are_refused(rows):
    with pytest.raises(ValueError, match=f"routed_experts holds {rows * 16} bytes, {rows} rows .* for the 6 rows"):
        check_reply(routed(rows), ROUTED)


def test_a_reply_without_routes_is_refused_unless_it_was_aborted_and_goes_on():
    with pytest.raises(ValueError, match="routed_experts = missing"):
        check_reply(sglang(), ROUTED)
    goes_on = dataclasses.replace(ROUTED, max_new_tokens=9)
    assert check_reply(sglang(ENDS["abort"][1]), goes_on).routes is None


def with_supports(**meta):
    answer = sglang()
    answer["meta_info"] |= {"output_token_sampling_mask": [[8, 9], [8, 9], [10, 8], [11]]} | meta
    answer["meta_info"]["output_token_sampling_logprobs"] = [-0.5, -0.25, -1.0, 0.0]
    return answer


def test_penalties_of_a_reply_are_those_of_its_own_tokens_and_are_unknown_after_a_retraction():
    asked = dataclasses.replace(ASKED, support=4, adjusting=Adjusting(presence_penalty=0.5))
    part = check_reply(with_supports(num_retractions=0), asked)
    assert part.support[:, :2].tolist() == [[8, 9], [9, 8], [10, 8], [11, NO_TOKEN]]
    assert part.adjustment[:, :2, 0].tolist() == [[0, 0], [0, -0.5], [0, -0.5], [0, 0]]
    retracted = with_supports(num_retractions=2)
    assert torch.equal(check_reply(retracted, asked).adjustment, part.adjustment), "the embedded server keeps counts"
    of_sglang = dataclasses.replace(asked, keeps_counts=False)
    with pytest.raises(NoLogprob, match="num_retractions = 2: SGLang forgets .*set rollout.interruption=abort"):
        check_reply(retracted, of_sglang)
    assert check_reply(with_supports(num_retractions=0), of_sglang).adjustment is not None
    only_biased = dataclasses.replace(of_sglang, adjusting=Adjusting(logit_bias=((8, 1.0),)))
    assert check_reply(retracted, only_biased).adjustment[:, :2, 0].tolist() == [[1, 0], [0, 1], [0, 1], [0, 0]]
    assert check_reply(retracted, dataclasses.replace(of_sglang, adjusting=Adjusting())).adjustment is None
