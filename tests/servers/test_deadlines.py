"""A server that takes requests and answers none keeps no call for longer than the call's own deadline."""

import asyncio
from concurrent.futures import Future

import pytest

from megatron_rl.config import GenerationConfig
from megatron_rl.servers import pool, weight_receiver
from megatron_rl.types import LLMRequest
from tests.kit.waiting import LATE_S, LIMIT_S

SHORT_S = 0.3
"""A deadline that is not kept would show as that of another setting, or end the test."""
BUCKET = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]], "version": 1}
REQUEST = LLMRequest(rid="r", input_ids=[1, 2], gconfig=GenerationConfig(max_new_tokens=4))

CALLS = {
    "generate": lambda engine: asyncio.run(engine.agenerate(REQUEST)),
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "begin": lambda engine: engine.begin_weight_update(1),
    "end": lambda engine: engine.end_weight_update(1),
    "join": lambda engine: engine.join_weight_group(address="127.0.0.1", port=1, name="g", backend="gloo"),
    "leave": lambda engine: engine.leave_weight_group(name="g"),
    "bucket": lambda engine: engine.load_bucket(**BUCKET, group="g"),
    "shared": lambda engine: engine.load_shared(**BUCKET, buckets=dict.fromkeys(engine.server_ranks, {})),
    "changes": lambda engine: engine.load_changes(dict.fromkeys(engine.server_ranks, b""), 1),
    "folder": lambda engine: engine.load_folder("/nowhere", 1),
    "held": lambda engine: engine.held_weights(),
    "unreachable": lambda engine: engine.unreachable(),
    "disk": lambda engine: engine.update_weights("/nowhere", 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_to_a_server_that_hangs_ends_by_its_deadline(name, scripted, connect, monkeypatch):
    monkeypatch.setattr(weight_receiver, "SIGN_OF_LIFE_S", SHORT_S)
    server = scripted()
    deadlines = {f"{what}_timeout_s": SHORT_S for what in ("request", "control", "start")}
    engine = connect(server.url, **deadlines, health_timeout_s=LATE_S)
    server.hangs = True
    try:
        answer = CALLS[name](engine)
    except RuntimeError as error:
        answer = {server.url: str(error)}
    (said,) = answer.values()
    said = str(said.exception(LIMIT_S)) if isinstance(said, Future) else said
    assert f"no answer within {SHORT_S:g} s" in said or f"request_timeout_s = {SHORT_S:g} s" in said, said


def test_a_server_that_hangs_when_a_run_begins_is_named(scripted, connect, monkeypatch):
    monkeypatch.setattr(pool, "PROBE_TIMEOUT_S", SHORT_S)
    server = scripted()
    server.hangs = True
    with pytest.raises(RuntimeError, match=rf"{server.url}/server_info: no answer within {SHORT_S:g} s"):
        connect(server.url)
