"""The operator that reads replies and the general reader agree on any bytes; it is the faster one by far."""

import time

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl import ops
from megatron_rl.servers import reply_check
from megatron_rl.servers.reply_check import Asked, check_reply, parsed, read_reply
from tests.kit.examples import max_examples


@pytest.fixture(autouse=True, scope="module")
def short_replies_are_read_by_the_operator():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reply_check, "SHORT_BYTES", 0)
        yield


LIMITS = {"vocab_size": 100, "at_most": 6, "lowest": -1e4, "highest": 1e-3}
ASKED = Asked(rid="r-1", prompt_tokens=3, max_new_tokens=6, stop=("END",), version=3, weights="3", vocab_size=100)
LONG = 32_768

PLAIN = st.one_of(st.floats(-1e4, 1e-3), st.floats(-20, 0, width=32), st.floats(-1e-300, 0)).map(repr)
NUMBERS = st.one_of(
    PLAIN,
    st.sampled_from(["0", "-0", "-0.0", "-1", "0.001", "0.0010000000000000001", "0.00100000000000000021"]),
    st.sampled_from(["-1e4", "-10000", "-10000.000000000001", "-1E-2", "-2.5e+1", "-1e-320", "-1e-400", "1e400"]),
    st.sampled_from(["-6.235912322998047", "-0.30000001192092896", "-1.00000005960464477539062500001"]),
    st.sampled_from(["NaN", "-Infinity", "null", "true", "-", "-.5", "-5.", "-01", "+1", "-1e", "--1", "- 1", '"-1"']),
    st.sampled_from(["-" + "9" * 30, "-0." + "3" * 60, "-1" + "0" * 400, "-1e99999999999"]),
)
IDS = st.one_of(
    st.integers(0, 99).map(str),
    st.sampled_from(
        ["-1", "-0", "00", "7.0", "7e0", "100", "2147483648", "9" * 11, "18446744073709551616", "true", ""]
    ),
)
SPACE = st.sampled_from(["", "", "", " ", "\n\t ", "\r", "\x0b", "\x00"])


@st.composite
def bodies(draw):
    """A reply of few tokens, in any spelling that may be sent: mostly plain, seldom odd, sometimes spoilt."""

    def seldom(odd, usual):
        return draw(odd) if draw(st.integers(0, 15)) == 0 else usual

    space = draw(SPACE)
    count = draw(st.integers(0, 5))
    ids = [seldom(IDS, str(number)) for number in range(3, 3 + count)]
    texts = [seldom(st.sampled_from(['"a\\"]["', "NULL", "nul", "{}", '"\\ud800"']), "null") for _ in ids]
    entries = [
        f"[{space}{seldom(NUMBERS, draw(PLAIN))},{one}{space}, {text}]" for one, text in zip(ids, texts, strict=True)
    ]
    entries = seldom(st.sampled_from([["[-1.0,3]"], ["[]"], [*entries, "[-1.0,3,null,null]"], [*entries, ""]]), entries)
    said = seldom(st.sampled_from([ids[1:], [*ids, "3"], ["3.0"], ["null"], [" "]]), ids)
    tokens_key = seldom(st.sampled_from(["output\\u005ftoken_logprobs", "other"]), "output_token_logprobs")
    ends = [f'{{"type":"length","length":{len(entries)}}}', '{"type":"abort","message":"Aborted"}']
    meta = [f'"finish_reason":{draw(st.sampled_from(ends))}', f'"{tokens_key}"{space}:[{",".join(entries)}]{space}']
    meta += [f'"completion_tokens":{count}', '"weight_version":"3"', '"id":"r-1"', '"prompt_tokens":3']
    inside = '"output_token_logprobs":[[-1.0,3,null]]'
    odd = [inside, f'"inner":{{{inside}}}', f'"inner":[{{{inside}}}]', '"output_token_logprobs" : null', '"x":[']
    meta += seldom(st.sampled_from(odd).map(lambda one: [one]), [])
    root = [f'"text":{draw(st.sampled_from(STRINGS))}', f'"output_ids":[{f",{space}".join(said)}]']
    root += [f'"meta_info":{{{",".join(draw(st.permutations(meta)))}}}']
    root += seldom(
        st.sampled_from(['"output_ids":null', '"meta_info":{}', '"more":[1,{"a":[]}]', "1", f"{inside}"]).map(
            lambda o: [o]
        ),
        [],
    )
    root = seldom(st.just([part for part in root if not part.startswith('"output_ids')]), root)
    body = f"{{{','.join(draw(st.permutations(root)))}}}{space}".encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(body)))
        body = body[:place] + draw(st.binary(max_size=2)) + body[place + draw(st.integers(0, 3)) :]
    return body


STRINGS = [
    '""',
    '"a"',
    '"\\"output_token_logprobs\\":[["',
    '"\\\\"',
    '"ä\\u00e4\\ud83d\\ude00"',
    '"\\',
    '"\\x"',
    '"\ud800"',
]


def outcome(read):
    """What a reader made of it, to the bit, or None where it was refused."""
    try:
        part = read()
    except ValueError:
        return None
    sampled = part.sampled
    rest = (part.stop_reason, part.text, part.cached_tokens, part.spans, sampled.versions.each().tolist())
    return (*rest, sampled.ids.tolist(), sampled.ids.dtype, sampled.logprobs.view(torch.int32).tolist())


@pytest.mark.slow
@settings(max_examples=max_examples(70, 200), deadline=None)
@given(bodies())
def test_both_readers_take_the_same_replies_to_the_bit_and_refuse_the_same(body):
    assert outcome(lambda: read_reply([body], ASKED)) == outcome(lambda: check_reply(parsed(body), ASKED))


@pytest.mark.slow
@settings(max_examples=max_examples(70, 200), deadline=None)
@given(bodies())
def test_what_is_left_is_json_exactly_where_the_whole_was_and_says_the_same(body):
    found = ops.reply_tokens(bytearray(body), **LIMITS)
    if found is None:
        return
    ids, logprobs, rest = found
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(rest)
        return
    meta = answer.get("meta_info", {})
    entries = meta.get("output_token_logprobs") or []
    assert ids.tolist() == [token for _, token, _ in entries] and all(text is None for _, _, text in entries)
    wanted = np.array([logprob for logprob, _, _ in entries], dtype=np.float64).astype(np.float32)
    assert logprobs.numpy().tobytes() == wanted.tobytes()
    assert answer.get("output_ids") in (None, ids.tolist())
    for holder, name, instead in ((answer, "output_ids", None), (meta, "output_token_logprobs", [])):
        if holder.get(name) is not None:
            holder[name] = instead
    assert orjson.loads(rest) == answer


@settings(max_examples=max_examples(70, 200), deadline=None)
@given(st.lists(st.tuples(PLAIN, st.integers(0, 99)), max_size=6), st.sampled_from(["", " ", "\n"]))
def test_a_plain_reply_is_never_left_to_the_slow_reader(entries, space):
    listed = f",{space}".join(f"[{logprob},{space}{token},null]" for logprob, token in entries)
    ids = ",".join(str(token) for _, token in entries)
    body = f'{{"text":"a","output_ids":[{ids}],"meta_info":{{"id":"r","output_token_logprobs":{space}[{listed}]}}}}'
    found = ops.reply_tokens(bytearray(body.encode()), **LIMITS)
    assert found is not None
    assert (
        found[2]
        == f'{{"text":"a","output_ids":null,"meta_info":{{"id":"r","output_token_logprobs":{space}[]}}}}'.encode()
    )


def long_body():
    logprobs = (-torch.rand(LONG, generator=torch.Generator().manual_seed(0)) * 8).tolist()
    ids = torch.arange(LONG).mul(7919).remainder(150_000).tolist()
    meta = {"finish_reason": {"type": "length", "length": LONG}, "completion_tokens": LONG, "weight_version": "3"}
    meta |= {"output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]}
    return bytearray(orjson.dumps({"text": "word " * LONG, "output_ids": ids, "meta_info": meta}))


def test_a_reply_of_32k_tokens_is_read_five_times_as_fast_as_by_the_general_reader():
    asked, body = Asked(rid="r", prompt_tokens=3, max_new_tokens=LONG, version=3, weights="3"), long_body()
    readers = {"operator": lambda: read_reply([body], asked), "general": lambda: check_reply(parsed(body), asked)}
    seconds = {name: [] for name in readers}
    for _ in range(5):
        for name, read in readers.items():
            begin = time.thread_time()  # which others on this machine do not add to
            read()
            seconds[name].append(time.thread_time() - begin)
    assert min(seconds["general"]) > 5 * min(seconds["operator"]), seconds
