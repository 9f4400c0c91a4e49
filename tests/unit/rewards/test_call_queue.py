"""Calls that are sent to a worker together fail alone."""

import asyncio
import errno

import pytest

from megatron_rl.rewards import call_queue, worker_pool
from megatron_rl.rewards.reward_service import RewardFailed, RewardLost, RewardService, RewardTimeout
from megatron_rl.rewards.worker_pool import Worker
from tests.kit.waiting import LATE_S

TRYING = "tests.unit.trying_rewards"


@pytest.fixture
def serve(monkeypatch):
    """Start services that take all rewards for short ones once they know one."""
    monkeypatch.setattr(call_queue, "TOGETHER_S", LATE_S)
    started = []

    def start(name, room=TRYING, **args):
        started.append(RewardService([(name, f"{room}:{name}", args)], workers=1))
        return started[-1]

    yield start
    for service in started:
        service.close()


@pytest.fixture
def messages(monkeypatch):
    """The bytes of each message to a worker."""
    sent, send = [], Worker.send

    async def noted(worker, frames):
        sent.append(frames)
        await send(worker, frames)

    monkeypatch.setattr(Worker, "send", noted)
    return sent


async def values(service, calls):
    """Return the value of each call, or its error. The first call is made alone."""
    first = await service.call(calls[0], LATE_S)
    rest = (service.call(call, call.get("timeout_s", LATE_S)) for call in calls[1:])
    return [one if isinstance(one, Exception) else one[0].value for one in
            [first, *await asyncio.gather(*rest, return_exceptions=True)]]  # fmt: skip


def test_short_calls_are_sent_together_and_each_has_its_own_answer(serve, messages):
    given = {"prompt": "", "completions": "", "prompt_ids": []}
    calls = [given | {"completion_ids": [1] * length} for length in range(1, 50)]
    service = serve("length", "megatron_rl.rewards", most=64)
    assert asyncio.run(values(service, calls)) == [length / 64 for length in range(1, 50)]
    assert len(messages) == 1 + 1 + 1, "the first call alone, then 32 together, then the others"


def test_a_call_of_unknown_length_is_sent_alone_and_so_are_long_ones(serve, messages, monkeypatch):
    service, calls = serve("half"), [{"completions": "a", "prompt_ids": [], "completion_ids": []}] * 5

    async def at_once():
        return await asyncio.gather(*(service.call(call, LATE_S) for call in calls))

    asyncio.run(at_once())
    assert messages[0] == service.pool.frame(calls[0])
    messages.clear()
    monkeypatch.setattr(call_queue, "TOGETHER_S", 0.0)
    asyncio.run(values(service, calls))
    assert len(messages) == 5
    monkeypatch.setattr(call_queue, "TOGETHER_S", LATE_S)
    monkeypatch.setattr(call_queue, "MOST_TOGETHER_BYTES", 100)
    messages.clear()
    asyncio.run(values(service, calls))
    assert len(messages) == 5


@pytest.mark.parametrize(
    ("what", "error"),
    [("start a process and hang", RewardTimeout), ("die", RewardLost), ("raise", RewardFailed)],
)
def test_one_of_several_calls_that_fails_fails_alone(serve, messages, tmp_path, what, error):
    bad = {"completions": what, "path": str(tmp_path / "pid"), "timeout_s": 0.25 if error is RewardTimeout else LATE_S}
    right = {"completions": "right"}
    service = serve("misbehaves")
    found = asyncio.run(values(service, [right, right, bad, right, bad, right]))
    assert [type(one) for one in found] == [float, float, error, float, error, float]
    assert len(messages) == (2 if what == "raise" else 4)
    assert asyncio.run(values(service, [right])) == [1.0]


def test_a_cancelled_call_that_has_not_begun_costs_no_worker(serve, messages, tmp_path):
    service, over = serve("process_id"), tmp_path / "over"

    async def cancelled():
        worker = (await service.call({}, LATE_S))[0].value
        calls = [asyncio.create_task(service.call(data, LATE_S)) for data in ({"until": str(over)}, {}, {})]
        while len(messages) < 2:
            await asyncio.sleep(0)
        calls[1].cancel()
        await asyncio.wait([calls[1]])
        over.touch()
        return worker, (await calls[0])[0].value, (await calls[2])[0].value, (await service.call({}, LATE_S))[0].value

    assert len(set(asyncio.run(cancelled()))) == 1


def test_a_worker_that_says_more_than_it_was_asked_for_is_not_used_again(serve):
    service = serve("process_id")

    async def forged():
        first = (await service.call({}, LATE_S))[0].value
        (worker,) = service.pool._idle
        worker._received += b"more"
        with pytest.raises(RewardFailed):
            await service.call({}, LATE_S)
        return first, (await service.call({}, LATE_S))[0].value

    first, second = asyncio.run(forged())
    assert first != second


def test_calls_behind_one_that_hangs_are_computed_by_other_workers(tmp_path):
    service, over = RewardService([("process_id", f"{TRYING}:process_id", {})], workers=3), tmp_path / "over"

    async def beside():
        first = (await service.call({}, LATE_S))[0].value
        service._queues[asyncio.get_running_loop()]._longest_s = 1e-6  # surely short on any machine
        hanging = asyncio.create_task(service.call({"until": str(over)}, LATE_S))
        others = await asyncio.gather(*(service.call({}, LATE_S) for _ in range(40)))
        later = [(await service.call({}, LATE_S))[0].value for _ in range(3)]
        assert not hanging.done()
        over.touch()
        return first, (await hanging)[0].value, {one[0].value for one in others} | set(later)

    try:
        first, hung, others = asyncio.run(beside())
    finally:
        service.close()
    assert first == hung and hung not in others


def test_a_worker_that_cannot_be_started_fails_one_call_and_loses_none(serve, monkeypatch):
    service = serve("process_id")

    async def starved():
        before = (await service.call({}, LATE_S))[0].value
        (worker,) = service.pool._idle
        service.pool._idle.clear()
        service.pool.discard(worker)
        with monkeypatch.context() as patch:
            patch.setattr(worker_pool.socket, "socketpair", out_of_files)
            calls = [asyncio.create_task(service.call({}, LATE_S)) for _ in range(5)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        found = await asyncio.gather(*calls, return_exceptions=True)
        return before, found

    def out_of_files(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    before, found = asyncio.run(starved())
    failed = [one for one in found if isinstance(one, Exception)]
    assert failed and all("Too many open files" in str(one) for one in failed)
    assert all(one[0].value != before for one in found if not isinstance(one, Exception))
    assert asyncio.run(values(service, [{}]))[0] > 0, "the pool has its slot still"
