"""What is under way is known at any time; what ended is kept where it is recorded, and bounded."""

import asyncio
import threading
import time

import pytest

from megatron_rl.life.hang_report import in_words
from megatron_rl.telemetry.spans import SPANS_REMEMBERED, Spans, copied, span_here
from tests.kit.waiting import wait_until


def test_spans_nest_through_tasks_and_threads():
    spans = Spans()
    spans.record()

    def verify():
        with span_here("rewards", "exact"):
            time.sleep(0.001)

    async def episode():
        async def reply(name):
            with spans("replies", name):
                await asyncio.sleep(0.001)

        with spans("episodes", "prompt 7"):
            await asyncio.gather(reply("a"), reply("b"))
            await asyncio.to_thread(verify)

    asyncio.run(episode())
    found = {span.name: span for span in spans.take()}
    assert found.keys() == {"a", "b", "exact", "prompt 7"}
    for name in ("a", "b", "exact"):
        child, parent = found[name], found[name].parent
        assert parent is found["prompt 7"]
        assert parent.begin_s <= child.begin_s <= child.end_s <= parent.end_s
    assert spans.open() == []


def test_code_outside_of_all_spans_leaves_none():
    with span_here("rewards", "alone") as span:
        assert span is None


def test_without_a_recording_only_the_last_ones_are_remembered():
    spans = Spans()
    for number in range(2 * SPANS_REMEMBERED):
        with spans("replies", str(number)):
            pass
    assert [span.name for span in spans.last()] == [str(n) for n in range(SPANS_REMEMBERED, 2 * SPANS_REMEMBERED)]
    assert spans.take() == []


def test_a_recording_is_bounded_and_counts_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr("megatron_rl.telemetry.spans.SPANS_RECORDED", 3)
    spans = Spans()
    spans.record()
    with spans("episodes", "long"):
        for number in range(4):
            with spans("replies", str(number)):
                pass
        recorded = spans.take()
    assert [span.name for span in recorded] == ["0", "1", "2"]
    assert spans.left_out == 2, "one that ended and the one under way"
    assert [span.parent for span in recorded] == [None] * 3, "whose parent is not among them"
    spans.record()
    assert spans.left_out == 0


def test_a_recording_ends_with_what_is_under_way_and_does_not_follow_it_further():
    spans = Spans()
    spans.record()
    with spans("episodes", "long") as original:
        (taken,) = spans.take()
        assert taken is not original and taken.end_s is None
    assert taken.end_s is None and original.end_s is not None
    assert copied([original])[0].end_s == original.end_s


def test_an_error_is_noted_and_the_span_ends():
    spans = Spans()
    with pytest.raises(KeyError), spans("rewards", "exact"):
        raise KeyError("answer")
    (span,) = spans.last()
    assert span.args["error"] == "KeyError: 'answer'" and spans.open() == []


def test_the_oldest_of_what_is_under_way_is_named_with_its_prompt_and_server():
    spans, told = Spans(), threading.Event()

    def reward():
        with spans("episodes", "prompt 0/4"), spans("rewards", "my.verifier:check"):
            told.wait()

    thread = threading.Thread(target=reward)
    thread.start()
    try:
        wait_until(lambda: len(spans.open()) == 2)
        with (
            spans("episodes", "prompt 0/5"),
            spans("replies", "prompt 0/5/3"),
            spans("replies", "generate", rid="r-17", server="http://n1:30000"),
        ):
            words = in_words(spans.open(), spans.open()[0].begin_s + 61.0)
    finally:
        told.set()
        thread.join()
    assert words.startswith("episodes: 2, rewards: 1, replies: 1, requests: 1; the oldest: reward my.verifier:check")
    first, second = words.split(": reward ")[1].split("; ")
    assert first.startswith("my.verifier:check (of prompt 0/4) for 61.0 s")
    assert second.startswith("request r-17 to http://n1:30000 (of prompt 0/5/3) for ")
    assert in_words([], 0.0) == "nothing is under way"
