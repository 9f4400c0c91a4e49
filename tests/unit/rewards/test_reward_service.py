"""Rewards are computed in processes that end at their deadline, whatever happens in them."""

import asyncio
import contextlib
import gc
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megatron_rl import stats_tracker
from megatron_rl.config import GenerationConfig
from megatron_rl.rewards import worker_pool as pool_module
from megatron_rl.rewards.recipe import Recipe, ingredients
from megatron_rl.rewards.reward_service import RewardFailed, RewardService, RewardTimeout
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics, metrics_of
from megatron_rl.telemetry.spans import Spans
from megatron_rl.types import LLMResponse, Trajectory
from megatron_rl.workflows import RLVRWorkflow
from tests.kit.examples import IS_THOROUGH
from tests.kit.waiting import LATE_S, growing_deadlines, until, wait_until
from tests.unit.hostile_answers import EXPRESSIONS, PROGRAMS, TEXTS

TRYING = "tests.unit.trying_rewards"
REWARDS = "megatron_rl.rewards"
WORKERS = 2


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Start services whose workers have their folders in tmp_path/workers."""
    folder = tmp_path / "workers"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    started = []

    def start(*names, workers=WORKERS, **options):
        paths = [name if ":" in name else f"{TRYING}:{name}" for name in names]
        service = RewardService(
            [(path.partition(":")[2], path, options.pop("args", {})) for path in paths], workers=workers, **options
        )
        started.append(service)
        return service

    yield start
    for service in started:
        service.close()
    assert list(folder.iterdir()) == [], "a worker's folder is left"


def ask(service, completions="", timeout_s=LATE_S, **data):
    """The value of a service's only reward."""
    arguments = {"prompt": "", "completions": completions, "prompt_ids": [], "completion_ids": [], **data}
    return asyncio.run(service.call(arguments, timeout_s))[0].value


def has_written(path):
    """Whether a reward that hangs has started its process, and written its id there."""
    return path.exists() and path.read_text() != ""


def is_alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_what_a_reward_gives_to_log_metric_comes_out_of_its_process(serve):
    service = serve("logs", workers=1)
    stats_tracker.take()
    with pytest.raises(RewardFailed):
        ask(service, "raises")
    assert ask(service, "four") == 1.0
    assert stats_tracker.take() == {"length": (6.0, 2.0), "share": (0.5, 1.0)}
    assert ask(service, "nan") == 1.0
    assert math.isnan(stats_tracker.take()["share"][0])


def test_rewards_are_computed_at_the_same_time_by_at_most_so_many_workers(serve, tmp_path):
    service, folder = serve("workers_met"), tmp_path / "met"
    folder.mkdir()

    async def several():
        return [score[0].value for score in await asyncio.gather(*(service.call(arguments, LATE_S) for _ in range(6)))]

    arguments = {"folder": str(folder)}
    assert asyncio.run(several()) == [WORKERS] * 6
    assert not (folder / str(os.getpid())).exists()


def test_a_worker_imports_no_more_than_the_reward(own_interpreters, serve):
    assert ask(serve("heavy_modules")) == 0


def test_event_loops_of_several_threads_share_a_worker(serve):
    service = serve("misbehaves", workers=1)

    async def several():
        calls = [asyncio.create_task(service.call({"completions": "right"}, LATE_S)) for _ in range(20)]
        await asyncio.sleep(0)
        for call in calls[1::2]:  # most of them wait for the worker, which may be given to them at this moment
            call.cancel()
        return [found[0].value for found in await asyncio.gather(*calls, return_exceptions=True) if type(found) is list]

    with ThreadPoolExecutor(3) as threads:
        values = list(threads.map(lambda _: asyncio.run(several()), range(6)))
    assert all(len(found) >= 10 and set(found) == {1.0} for found in values)
    assert ask(service, "right") == 1.0, "the pool has lost its worker"


def test_a_late_reward_is_killed_with_what_it_started_and_replaced(serve, tmp_path):
    service, path = serve("misbehaves", workers=1), tmp_path / "pid"
    assert ask(service, "right") == 1.0
    for timeout_s in growing_deadlines(0.25):
        with pytest.raises(RewardTimeout, match=f"misbehaves: no reward within {timeout_s:g} s, and its worker was"):
            ask(service, "start a process and hang", timeout_s, path=str(path))
        if has_written(path):
            break
    wait_until(lambda: not is_alive(int(path.read_text())), "a process that the reward started is left")
    assert ask(service, "right") == 1.0


def test_a_cancelled_call_ends_its_worker(serve, tmp_path):
    service, path = serve("misbehaves", workers=1), tmp_path / "pid"

    async def cancel():
        data = {"completions": "start a process and hang", "path": str(path)}
        call = asyncio.create_task(service.call(data, LATE_S))
        await until(lambda: has_written(path), "it has not begun")
        second = asyncio.create_task(service.call({"completions": "right"}, LATE_S))
        third = asyncio.create_task(service.call({"completions": "right"}, LATE_S))
        await asyncio.sleep(0)
        second.cancel()  # while it waits for a worker
        call.cancel()
        return (await asyncio.gather(call, second, third, return_exceptions=True))[2]

    assert asyncio.run(cancel())[0].value == 1.0
    wait_until(lambda: not is_alive(int(path.read_text())), "it goes on")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", r"NoVerdict: no verdict on 'raise' \? \(reward misbehaves, .*trying_rewards.py:[0-9]+\)"),
        ("exit", r"SystemExit: 0"),
        ("hog", "MemoryError"),
        ("nan", "returned nan, of type float; must be a finite number"),
        ("huge", "ValueError: returned 1000.*must be a finite number"),
        ("a word", "returned .word., of type str; must be a finite number: it is called for one reply at a time"),
    ],
)
def test_what_a_reward_raises_is_no_reward(serve, what, message):
    with pytest.raises(RewardFailed, match=message) as raised:
        ask(serve("misbehaves"), what)
    assert "trying_rewards.py" in str(raised.value.__cause__) or "worker.py" in str(raised.value.__cause__)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value) and again.reward == "misbehaves", "the trainer is told the same"


@pytest.mark.parametrize("what", ["die", "crash"])
def test_a_worker_that_dies_is_no_reward_and_is_replaced(serve, what):
    service = serve("misbehaves", workers=1)
    with pytest.raises(RewardFailed, match="a worker died"):
        ask(service, what)
    assert ask(service, "right") == 1.0


def kill_the_forking_process(service):
    os.kill(service.pool.process.pid, signal.SIGKILL)
    service.pool.process.wait()


@pytest.mark.slow
def test_the_process_that_forks_workers_is_started_again_where_it_dies(serve, tmp_path, caplog):
    service, path = serve("misbehaves", workers=1), tmp_path / "pid"
    assert ask(service, "right") == 1.0

    async def killed_meanwhile():
        data = {"completions": "start a process and hang", "path": str(path)}
        call = asyncio.create_task(service.call(data, LATE_S))
        await until(lambda: has_written(path), "it has not begun")
        waiting = [asyncio.create_task(service.call({"completions": "right"}, LATE_S)) for _ in range(3)]
        await asyncio.sleep(0)
        kill_the_forking_process(service)
        return await asyncio.gather(call, *waiting, return_exceptions=True)

    lost, *others = asyncio.run(killed_meanwhile())
    assert isinstance(lost, RewardFailed) and "(exit code -9) died" in str(lost)
    os.kill(int(path.read_text()), signal.SIGKILL)  # what a reward started outlives only this
    assert [scores[0].value for scores in others] == [1.0] * 3
    assert "the reward service's process ended (exit code -9)" in caplog.text
    kill_the_forking_process(service)
    assert service.call_now({"completions": "right"})[0].value == 1.0
    assert service.pool._count == 1 and len(list((tmp_path / "workers").iterdir())) == 1


@pytest.mark.slow
def test_a_process_that_dies_again_and_again_is_not_started_for_ever(serve, monkeypatch):
    monkeypatch.setattr(pool_module, "MOST_QUICK_DEATHS", 1)
    monkeypatch.setattr(pool_module, "QUICK_S", LATE_S)
    service = serve("misbehaves")

    def is_replaced():
        kill_the_forking_process(service)
        return ask(service, "right") == 1.0

    assert is_replaced()
    monkeypatch.setattr(pool_module, "QUICK_S", 0.0)
    assert is_replaced(), "the one before lived long enough"
    monkeypatch.setattr(pool_module, "QUICK_S", LATE_S)
    assert is_replaced()
    with pytest.raises(RewardFailed, match=r"the service's process \(exit code -9\) died"):
        is_replaced()


def test_a_worker_has_a_folder_of_its_own_which_is_removed(serve, tmp_path):
    service = serve("misbehaves")
    assert ask(service, "write") == 1.0
    assert len(list((tmp_path / "workers").glob("*/*/here"))) == 1
    service.close()
    assert list((tmp_path / "workers").iterdir()) == []


def test_a_request_has_a_bound(serve, monkeypatch):
    monkeypatch.setattr(pool_module, "MOST_REQUEST_BYTES", 1000)
    with pytest.raises(ValueError, match="take .* bytes; they may take 1000"):
        ask(serve("misbehaves"), "a" * 1000)


def test_a_call_that_blocks_the_event_loop_does_not_wait_for_calls_of_that_loop(serve, tmp_path):
    service, over = serve("process_id", workers=1), tmp_path / "over"

    async def both():
        awaited = asyncio.create_task(service.call({"until": str(over)}, LATE_S))
        await asyncio.sleep(0)  # it has the only worker now, whose answer nobody can hear while the loop is blocked
        now = service.call_now({})
        over.touch()
        return (await awaited)[0].value, now[0].value, (await service.call({}, LATE_S))[0].value

    first, second, third = asyncio.run(both())
    assert first != second and third == first, "the one more is not kept"


def test_stacks_say_where_a_worker_is(serve, tmp_path):
    with open(tmp_path / "stacks", "a") as file:
        service = serve("misbehaves", stacks=file.fileno())

        async def hang():
            data = {"completions": "start a process and hang", "path": str(tmp_path / "pid")}
            call = asyncio.create_task(service.call(data, LATE_S))
            await until((tmp_path / "pid").exists, "it has not begun")
            service.show_stacks()
            await until(lambda: "in misbehaves" in (tmp_path / "stacks").read_text(), "no stack is shown")
            call.cancel()

        asyncio.run(hang())


OWNER = """
import asyncio, os, sys
from megatron_rl.rewards.reward_service import RewardService
service = RewardService([("r", "tests.unit.trying_rewards:misbehaves", {})], workers=1)
async def hang():
    call = asyncio.create_task(service.call({"completions": "start a process and hang", "path": sys.argv[1]}, 3600))
    while not (os.path.exists(sys.argv[1]) and open(sys.argv[1]).read()):
        await asyncio.sleep(0.01)
    print(service.pool.process.pid, flush=True)
    await call
asyncio.run(hang())
"""


def test_all_of_it_dies_with_the_rollout_process(tmp_path):
    command = [sys.executable, "-c", OWNER, str(tmp_path / "pid")]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    below = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    assert len(below) == 2, "a worker, and what it started"
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(map(is_alive, [pid, *below])), "some of it outlived the rollout process")
    assert not list(tmp_path.glob("reward-*"))


# -- recipes


def recipe_of(serve, *parts):
    found = ingredients("rollout.recipe", parts, None)
    plain = [ingredient.task for ingredient in found if not ingredient.is_awaited]
    service = RewardService(plain, workers=1)
    return Recipe(found, service), service


def score(recipe, completions, timeout_s=LATE_S):
    """The reward of one reply, and the metrics that it leaves, by the way of a workflow."""
    metrics = RolloutMetrics()
    spans = Spans(on_end=lambda span: metrics.observe(span.args.get("metrics", {})))
    workflow = RLVRWorkflow(recipe, GenerationConfig(), None, reward_timeout_s=timeout_s)
    tokens = {"input_tokens": [1], "output_tokens": [2, 3], "output_logprobs": [0.0] * 2, "output_versions": [0] * 2}
    reply = LLMResponse(**tokens, stop_reason="stop", text=completions)

    async def call():
        with spans("episodes", "0"):
            return await workflow.reward(reply, {"answer": "42"})

    try:
        return asyncio.run(call()), metrics_of([metrics.take()])
    except RuntimeError as error:
        return error, metrics_of([metrics.take()])


def test_a_recipe_is_the_weighted_sum_of_its_parts(serve):
    recipe, service = recipe_of(
        serve,
        {"reward": f"{REWARDS}:last_number"},
        {"reward": f"{REWARDS}:length", "weight": -0.5, "args": {"most": 4}},
        {"reward": f"{TRYING}:awaited", "weight": 0.25, "args": {"factor": 2.0}},
        {"reward": f"{TRYING}:half", "weight": 2, "args": {"scale": 4.0}, "name": "double"},
    )
    value, metrics = score(recipe, "it is 42")
    parts = {"last_number": 1.0, "length": 0.5, "awaited": 16.0, "double": 2.0}
    assert {name: metrics[f"rollout/reward/{name}"] for name in parts} == parts
    assert value == 1.0 - 0.5 * 0.5 + 0.25 * 16.0 + 2 * 2.0
    assert all(metrics[f"rollout/reward_s/{name}"] >= 0 for name in parts)
    assert metrics["rollout/reward_s/awaited"] > 0.009
    assert all(metrics[f"rollout/reward_failed/{name}"] == 0.0 for name in parts)
    service.close()


def test_a_function_that_returns_its_parts_is_summed_by_their_weights(serve):
    weights = {"long": 2.0}
    recipe, service = recipe_of(
        serve,
        {"reward": f"{TRYING}:in_parts", "weight": weights},
        {"reward": f"{TRYING}:awaited_in_parts", "weight": 0.5, "name": "later"},
    )
    value, metrics = score(recipe, "abc")
    assert value == 1.0 * 1.0 + 2.0 * 3.0 + 0.5 * 7.0
    parts = {"in_parts/short": 1.0, "in_parts/long": 3.0, "later/seven": 7.0}
    assert value.parts == parts == {name: metrics[f"rollout/reward/{name}"] for name in parts}
    assert metrics["rollout/reward_failed/in_parts"] == 0.0 and metrics["rollout/reward_s/later"] >= 0
    weights["longer"] = 1.0
    error, _ = score(recipe, "abc")
    assert isinstance(error, RewardFailed) and "its weights name ['longer'], and the parts that it gave are" in str(
        error
    )
    service.close()


@pytest.mark.parametrize(("words", "fault"), [("none", "at least one, need names"), ("nan", "returned nan")])
def test_parts_without_a_name_or_a_number_are_a_failure(serve, words, fault):
    recipe, service = recipe_of(serve, {"reward": f"{TRYING}:in_parts"})
    error, _ = score(recipe, words)
    assert isinstance(error, RewardFailed) and fault in str(error)
    service.close()


def test_parts_of_a_function_of_a_program_are_its_trajectorys_columns():
    def in_parts(completions, **_):
        return {"a": 0.25, "b": len(completions)}

    value, _ = score(in_parts, "abc")
    trajectory = Trajectory.from_reply(LLMResponse(input_tokens=[1], stop_reason="stop"), value)
    assert (trajectory.reward, trajectory.sequence) == (3.25, {"part/a": 0.25, "part/b": 3.0})
    assert type(trajectory.reward) is float


def test_a_recipe_is_a_reward_function_too(serve):
    recipe, service = recipe_of(serve, {"reward": f"{REWARDS}:exact_match", "weight": 3})
    assert recipe(prompt="", completions="42", prompt_ids=[], completion_ids=[], answer="42") == 3.0
    service.close()


def test_the_part_that_failed_is_named_and_counted(serve):
    recipe, service = recipe_of(serve, {"reward": f"{TRYING}:half"}, {"reward": f"{TRYING}:misbehaves"})
    error, metrics = score(recipe, "raise")
    assert isinstance(error, RewardFailed) and "(reward misbehaves, " in str(error)
    assert metrics["rollout/reward_failed/misbehaves"] == 1.0 and "rollout/reward/half" not in metrics
    service.close()


def test_an_awaited_part_that_gives_no_number_has_failed(serve):
    recipe, service = recipe_of(serve, {"reward": f"{TRYING}:awaited", "args": {"factor": float("nan")}})
    error, metrics = score(recipe, "a")
    assert isinstance(error, RewardFailed)
    assert "returned nan, of type float; must be a finite number. (reward awaited, " in str(error)
    assert metrics["rollout/reward_failed/awaited"] == 1.0 and "rollout/reward/awaited" not in metrics
    service.close()


def test_an_awaited_part_has_the_deadline_too(serve):
    recipe, service = recipe_of(serve, {"reward": f"{TRYING}:awaited_for_long"})
    error, _ = score(recipe, "", timeout_s=0.2)
    assert isinstance(error, RewardTimeout) and "awaited_for_long: no reward within 0.2 s" in str(error)
    service.close()


def test_an_awaited_part_that_raises_a_timeout_of_its_own_has_failed_and_is_not_late(serve):
    recipe, service = recipe_of(serve, {"reward": f"{TRYING}:awaits_a_slow_service"})
    error, metrics = score(recipe, "")
    assert isinstance(error, RewardFailed) and "the service took its time" in str(error)
    assert metrics["rollout/reward_failed/awaits_a_slow_service"] == 1.0
    service.close()


def test_recipes_that_cannot_be_are_refused():
    for parts, message in [
        ([{"reward": f"{TRYING}:half", "args": {"scale": 1, "most": 2}}] * 2, "parts' names are .*give each a `name`"),
        ([{"reward": f"{REWARDS}:nothing"}], r"rollout.recipe\[0\].reward = .* has no 'nothing'"),
        ([{"reward": f"{REWARDS}:find_tagged", "args": {"most": 2}}], r"rollout.recipe\[0\].args = .*most"),
    ]:
        with pytest.raises(ValueError, match=message):
            ingredients("rollout.recipe", parts, None)


# -- hostile answers


def state_of(folder):
    """All that could be changed below a folder."""
    paths = sorted(Path(folder).rglob("*"))
    stats = [path.lstat() for path in [Path(folder), *paths]]
    kept = [(s.st_mode, s.st_uid, s.st_gid, s.st_size, s.st_mtime_ns, s.st_nlink) for s in stats]
    return paths, kept, [path.read_bytes() for path in paths if path.is_file()]


@pytest.mark.slow
def test_hostile_answers_change_nothing_and_each_is_answered(serve, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "old").write_text("kept")
    names = {"new": str(outside / "new"), "old": str(outside / "old"), "folder": str(outside)}

    def attack(text):
        with contextlib.suppress(ValueError, KeyError, IndexError):  # those that hold other braces are as they are
            return text.format(**names)
        return text

    owned = {"tests": [{"input": "", "output": "owned"}]}
    compared = [f"{REWARDS}:{name}" for name in ("exact_match", "last_number", "tagged_answer")]
    compared += [f"{REWARDS}.procedural:countdown"]
    known = {"answer": "7", "metadata": {"numbers": [3, 4], "target": 7}}
    groups = [
        (serve(f"{REWARDS}.code:program_output", args={"time_s": 0.5, "memory_mib": 128}), some(PROGRAMS), owned),
        (serve("evaluated"), some(EXPRESSIONS), {}),
        *((serve(path), some(TEXTS[: 24 if number else None]), known) for number, path in enumerate(compared)),
    ]
    assert sum(len(texts) for _, texts, _ in groups) >= (200 if IS_THOROUGH else 50)
    before, rss = state_of(outside), psutil.Process().memory_info().rss
    wrong = []

    async def answered(service, text, data, slots):
        async with slots:
            try:
                arguments = {"prompt": "", "completions": text, "prompt_ids": [], "completion_ids": [], **data}
                scores = await service.call(arguments, LATE_S)  # each text has a time of its own
                if scores[0].value != 0.0:
                    wrong.append((text[:80], scores[0].value))
            except (RewardFailed, RewardTimeout) as error:
                wrong.append((text[:80], str(error)))

    async def all_answered(service, texts, data):
        slots = asyncio.Semaphore(WORKERS)
        await asyncio.gather(*(answered(service, attack(text), data, slots) for text in texts))

    # A text that is right is found so.
    patient = serve(f"{REWARDS}.code:program_output", args={"time_s": LATE_S, "memory_mib": 128})
    assert ask(patient, "print('owned')\n", **owned) == ask(serve("evaluated", args={"time_s": LATE_S}), "1.0") == 1.0
    for service, texts, data in groups:
        asyncio.run(all_answered(service, texts, data))
        sessions = service.pool.process.pid
        service.close()
        left = [pid for pid in psutil.pids() if session_of(pid) == sessions]
        assert not left, f"{service.name}: processes {left} are left"
    assert not wrong
    assert state_of(outside) == before
    gc.collect()
    assert psutil.Process().memory_info().rss - rss < 100 << 20


def some(texts):
    """Return all texts in `make test-all`, else every fourth. Texts of a kind are neighbours, so most kinds remain."""
    return texts if IS_THOROUGH else texts[::4]


def session_of(pid):
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return None
