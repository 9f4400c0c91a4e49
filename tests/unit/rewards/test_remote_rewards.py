"""Scores over HTTP: in batches, from several servers, whichever of them fail."""

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web

from megatron_rl.api import InfrastructureFailure
from megatron_rl.config import GenerationConfig, RolloutConfig, TrainConfig
from megatron_rl.rewards import reward_servers
from megatron_rl.rewards.recipe import ingredients, reach
from megatron_rl.rewards.remote import RemoteReward
from megatron_rl.rewards.reward_servers import Circuit, RemoteFailure, RemoteRefusal
from megatron_rl.rollout.factory import configured_rewards
from tests.kit.waiting import until


class Scorer:
    """Scores a reply by its length. `answers` overrides what it says, one for each batch.

    together: so many batches of all servers that have it are answered at the same time, and none before.
    """

    def __init__(self, *answers, delay_s=0.0, together=None):
        self.answers, self.delay_s, self.together = list(answers), delay_s, together
        self.batches, self.at_once, self.most_at_once = [], 0, 0
        self.authorizations = set()

    async def start(self):
        app = web.Application()
        app.router.add_post("/score", self.score)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/score"

    async def score(self, request):
        items = (await request.json())["items"]
        self.authorizations.add(request.headers.get("Authorization"))
        self.batches.append(items)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.delay_s)
        if self.together is not None:
            await self.together.wait()
        self.at_once -= 1
        if self.answers and (answer := self.answers.pop(0)) is not None:
            return await answer(request) if callable(answer) else answer
        return web.json_response({"scores": [len(item["reply"]) for item in items]})


def run(scorers, test, **options):
    """Run `test(reward)` with a RemoteReward of these servers."""

    async def whole():
        reward = RemoteReward([await scorer.start() for scorer in scorers], **options)
        try:
            return await test(reward)
        finally:
            await reward.close()
            for scorer in scorers:
                await scorer.runner.cleanup()

    return asyncio.run(whole())


async def scores_of(reward, count):
    calls = [reward("p", "x" * size, [], [], answer="a") for size in range(count)]
    return await asyncio.gather(*calls)


def test_replies_go_in_batches_to_all_servers_at_the_same_time():
    together = asyncio.Barrier(4)
    scorers = [Scorer(together=together), Scorer(together=together)]
    scores = run(scorers, lambda reward: scores_of(reward, 32), most_items=4, concurrent=2)
    assert scores == list(range(32))
    sizes = [len(batch) for scorer in scorers for batch in scorer.batches]
    assert sizes == [4] * 8 and all(len(scorer.batches) == 4 for scorer in scorers)
    assert all(scorer.most_at_once == 2 for scorer in scorers)
    assert scorers[0].batches[0][1] == {"prompt": "p", "reply": "x", "answer": "a"}


def test_a_lone_reply_does_not_wait_for_a_full_batch():
    assert run([Scorer()], lambda reward: scores_of(reward, 1)) == [0]


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(status=503, text="busy"),
        lambda: web.Response(text="nonsense"),
        lambda: web.json_response({"scores": [1.0]}),
        lambda: web.Response(text='{"scores": [null, 1]}'),
    ],
)
def test_a_batch_without_scores_is_asked_again(answer):
    scorer = Scorer(answer())
    assert run([scorer], lambda reward: scores_of(reward, 2)) == [0, 1]
    assert len(scorer.batches) == 2


@pytest.fixture
def now(monkeypatch):
    """The time of the servers' rests, which passes where a test adds to `now[0]`."""
    now = [100.0]
    monkeypatch.setattr(reward_servers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(reward_servers, "FIRST_RETRY_S", 0.01)
    return now


def test_a_server_that_fails_again_and_again_is_left_alone_for_a_while(now):
    failures = reward_servers.FAILURES_TO_OPEN
    broken, sound = Scorer(*(web.Response(status=500) for _ in range(failures + 1))), Scorer(delay_s=0.02)

    async def test(reward):
        asked = []
        for rests in (1, 2, 0):
            assert await scores_of(reward, 12) == list(range(12))
            asked.append(len(broken.batches))
            now[0] += rests * reward_servers.FIRST_REST_S
        return asked

    first, second, third = run([broken, sound], test, most_items=1, concurrent=1)
    assert (first, second) == (failures, failures + 1), "it opens, and is tried once after its rest"
    assert third > second + 1, "it answers again, and is asked as before"


def test_an_answer_may_come_in_parts_and_has_a_bound(monkeypatch):
    async def slowly(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for part in (b'{"scores"', b": [7, ", b"8]}"):
            await response.write(part)
            await asyncio.sleep(0.02)
        return response

    monkeypatch.setattr(reward_servers, "MOST_ANSWER_BYTES", 100)
    scorer = Scorer(slowly, web.Response(text=" " * 200))
    assert run([scorer], lambda reward: scores_of(reward, 2)) == [7, 8]
    assert run([scorer], lambda reward: scores_of(reward, 1)) == [0] and len(scorer.batches) == 3


def test_what_a_server_refuses_is_not_asked_again_and_says_nothing_of_the_server():
    failures = reward_servers.FAILURES_TO_OPEN
    scorer = Scorer(*(web.Response(status=400, text="too long") for _ in range(failures + 1)))

    async def test(reward):
        for _ in range(failures + 1):
            with pytest.raises(RemoteRefusal, match="status 400: too long"):
                await scores_of(reward, 1)
        return await scores_of(reward, 1)

    assert run([scorer], test) == [0] and len(scorer.batches) == failures + 2


def test_a_reply_that_a_server_refuses_costs_the_others_of_its_batch_nothing():
    scorer = Scorer()
    score = scorer.score

    async def choosy(request):
        items = (await request.json())["items"]
        if any(len(item["reply"]) == 5 for item in items):
            return web.Response(status=413, text="too long")
        return await score(request)

    scorer.score = choosy

    async def test(reward):
        return await asyncio.gather(*(reward("p", "x" * size, [], []) for size in range(8)), return_exceptions=True)

    *scores, last = run([scorer], test)
    assert isinstance(scores.pop(5), RemoteRefusal) and [*scores, last] == [0, 1, 2, 3, 4, 6, 7]


def test_a_reply_that_cannot_be_written_as_json_costs_the_others_of_its_batch_nothing():
    async def test(reward):
        answers = ["a", 2**70, None]
        return await asyncio.gather(*(reward("p", "xx", [], [], answer=a) for a in answers), return_exceptions=True)

    first, wrong, last = run([Scorer()], test)
    assert (first, last) == (2, 2) and isinstance(wrong, TypeError)


def test_what_nobody_waits_for_any_more_is_not_sent_after_an_outage(now):
    failures = reward_servers.FAILURES_TO_OPEN
    scorer = Scorer(*(web.Response(status=500) for _ in range(failures)))

    async def test(reward):
        for _ in range(5):
            asked = asyncio.ensure_future(reward("p", "given up", [], []))
            await until(lambda: len(scorer.batches) == failures and not scorer.at_once)
            await asyncio.sleep(0.02)  # the server rests, however long this takes
            asked.cancel()
        assert len(scorer.batches) == failures
        now[0] += reward_servers.FIRST_REST_S
        return await reward("p", "wanted", [], [])

    assert run([scorer], test) == 6
    assert [item["reply"] for batch in scorer.batches[failures:] for item in batch] == ["wanted"]


def test_a_token_is_read_from_its_file(tmp_path):
    scorer, path = Scorer(), tmp_path / "token"
    path.write_text("a-token-of-this-server\n")
    path.chmod(0o600)
    run([scorer], lambda reward: scores_of(reward, 1), token_file=str(path))
    assert scorer.authorizations == {"Bearer a-token-of-this-server"}


def test_requests_that_fail_together_are_one_reason_to_rest(now):
    circuit = Circuit("http://a")
    for _ in range(reward_servers.FAILURES_TO_OPEN + 20):
        circuit.fail()
    assert circuit.is_open() and circuit.rests_until == now[0] + reward_servers.FIRST_REST_S
    now[0] = circuit.rests_until
    assert not circuit.is_open(), "a trial"
    circuit.fail()
    assert circuit.is_open() and circuit.rests_until == now[0] + 2 * reward_servers.FIRST_REST_S
    circuit.succeed()
    assert not circuit.is_open()


def test_one_that_nobody_answers_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(reward_servers, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(reward_servers, "FIRST_REST_S", 0.01)

    async def ask():
        reward = RemoteReward(["http://127.0.0.1:9/score"])
        try:
            await reward("p", "r", [], [])
        finally:
            await reward.close()

    with pytest.raises(RemoteFailure, match="http://127.0.0.1:9/score: .*is the server up"):
        asyncio.run(ask())


def test_columns_of_the_row_go_with_prompt_and_reply():
    scorer, rest = Scorer(), {"answer": "a", "tests": ["assert f"], "level": 3}
    run([scorer], lambda reward: reward("p", "r", [1], [2], **rest), columns=["tests", "level", "lacking"])
    assert scorer.batches == [[{"prompt": "p", "reply": "r", "tests": ["assert f"], "level": 3, "lacking": None}]]
    with pytest.raises(ValueError, match=r"args.columns = \['reply'\]: must list columns of the row"):
        RemoteReward(["http://a"], columns=["reply"])


def test_a_server_that_is_down_is_named_before_anything_is_asked():
    scorer = Scorer()

    async def test(reward):
        assert await reward.reach(0.0) and not scorer.batches
        (one,) = reward._servers._circuits
        one.url = "http://127.0.0.1:9/score"
        with pytest.raises(RemoteFailure, match="http://127.0.0.1:9/score: .*; start the server, or correct its URL"):
            await reward.reach(0.0)

    run([scorer], test)
    path = "megatron_rl.rewards.remote:RemoteReward"
    found = ingredients("rollout.recipe", [{"reward": path, "args": {"urls": ["http://127.0.0.1:9/score"]}}], None)
    with pytest.raises(InfrastructureFailure, match=f"reward {path}: http://127.0.0.1:9/score: "):
        asyncio.run(reach(found, 0.0))


def test_it_is_a_part_of_a_recipe():
    part = {"reward": "megatron_rl.rewards.remote:RemoteReward", "args": {"urls": ["http://a"]}}
    (found,) = ingredients("rollout.recipe", [part], None)
    assert found.is_awaited and found.name == "RemoteReward"
    with pytest.raises(ValueError, match=r"rollout.recipe\[0\].args = {}: .*'urls'"):
        ingredients("rollout.recipe", [{"reward": part["reward"]}], None)
    config = TrainConfig(generation=GenerationConfig(n_samples=2), rollout=RolloutConfig(reward=part["reward"]))
    with pytest.raises(ValueError, match="rollout.reward = .*'urls'; name it in rollout.recipe, which can give args"):
        configured_rewards(config)
    with pytest.raises(ValueError, match="args.urls = .*give at least one URL"):
        ingredients("rollout.recipe", [part | {"args": {"urls": []}}], None)
