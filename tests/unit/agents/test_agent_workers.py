"""Agents run in processes that end with them: in time or not, and with all that they have started."""

import asyncio
import contextlib
import json
import os
import re
import time

import psutil
import pytest

from megatron_rl.agents import AgentWorkflow, agent_workers
from megatron_rl.agents.agent_workers import AgentDied, AgentFailed, AgentTimeout, AgentWorkers
from megatron_rl.api import infrastructure_in
from megatron_rl.config import GenerationConfig
from megatron_rl.rewards.worker import MOST_PRINTED_BYTES
from tests.kit.replies import RecordingEngine
from tests.kit.tokenizers import make_tokenizer
from tests.kit.waiting import LATE_S, growing_deadlines, until, wait_until
from tests.unit import trying_agents
from tests.unit.agents.test_agent_proxy import QUESTION


def is_alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until_none_lives(folder, count):
    pids = [int(path.name) for path in folder.iterdir()]
    assert len(pids) == count
    wait_until(lambda: not any(map(is_alive, pids)), lambda: [psutil.Process(pid) for pid in pids if is_alive(pid)])


@pytest.fixture
def workers(tmp_path):
    """Make the workers of an agent of trying_agents."""
    made = []

    def make(agent, most=2, **args):
        made.append(AgentWorkers(agent, args, most=most, folder=str(tmp_path / "logs")))
        return made[-1]

    yield make
    for one in made:
        one.close()


def run(workers, data, *, name="prompt-0", timeout_s=LATE_S):
    return asyncio.run(workers.run("http://127.0.0.1:1/v1", "key", data, name=name, timeout_s=timeout_s))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["busy", "sleep", "in C"])
def test_an_agent_is_killed_at_its_deadline_with_all_that_it_started(workers, tmp_path, how):
    pids = tmp_path / "pids"
    pids.mkdir()
    many = workers(trying_agents.never_ends, most=1)
    for number, timeout_s in enumerate(growing_deadlines(0.5)):
        mine = pids / str(number)
        mine.mkdir()
        with pytest.raises(AgentTimeout, match=f"did not end within {timeout_s:g} s, and was killed") as late:
            run(many, {"how": how, "pids": str(mine)}, name="late", timeout_s=timeout_s)
        if "late.log:\nit has begun" in str(late.value):
            break
    wait_until_none_lives(mine, 3)


def test_a_cancelled_agent_is_killed_too_and_its_place_is_free(workers, tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    one, data = workers(trying_agents.never_ends, most=1), {"how": "sleep", "pids": str(pids)}

    async def cancelled():
        for count in (3, 6):
            call = asyncio.create_task(one.run("", "", data, name="gone", timeout_s=LATE_S))
            await until(lambda count=count: len(list(pids.iterdir())) == count, "its processes have not begun")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    asyncio.run(cancelled())
    wait_until_none_lives(pids, 6)


def test_what_an_agent_leaves_running_ends_with_it(workers, tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    assert run(workers(trying_agents.leaves_a_daemon), {"pids": str(pids)}) == 1.0
    wait_until_none_lives(pids, 1)


def test_what_an_agent_raises_comes_back_with_its_traceback_and_its_last_words(workers, tmp_path):
    of_prints = workers(trying_agents.prints)
    with pytest.raises(AgentFailed, match="OSError: its database is down") as raised:
        run(of_prints, {"said": "first"}, name="version 0 12/3")
    assert re.search(r'trying_agents.py", line [0-9]+, in prints', str(raised.value.__cause__))
    with pytest.raises(AgentFailed):
        run(of_prints, {"said": "again"}, name="version 0 12/3")
    log = (tmp_path / "logs" / "version-0-12-3.log").read_text()
    first = "to stdout first\nto stderr\nof a child\n"
    assert first in str(raised.value) + "\n" and log == first + first.replace("first", "again")


def test_an_agent_that_lost_what_it_runs_on_says_so_by_its_kind(workers):
    with pytest.raises(AgentFailed, match="the database at host7 is down") as raised:
        run(workers(trying_agents.loses_its_database), {})
    assert infrastructure_in(raised.value).kind == "database"
    with pytest.raises(AgentFailed) as raised:
        run(workers(trying_agents.prints), {"said": "nothing of it"})
    assert infrastructure_in(raised.value) is None


def test_what_an_agent_prints_has_a_bound(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_workers, "MOST_LOGS", 2)
    many = workers(trying_agents.prints)
    for number in range(4):
        with pytest.raises(AgentFailed):
            run(many, {"said": "much", "much": True}, name=str(number))
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "logs").iterdir()}
    assert sizes == {"2.log": MOST_PRINTED_BYTES, "3.log": MOST_PRINTED_BYTES}


def test_an_agent_whose_process_dies_is_no_failure_of_its_own_and_is_replaced(workers):
    many = workers(trying_agents.dies, most=1)
    for _ in range(2):
        with pytest.raises(AgentDied, match=r"a worker died.*\nin a moment"):
            run(many, {})


@pytest.mark.parametrize(("how", "name"), [("exit", "SystemExit"), ("stop", "StopIteration"), ("cancel", "Cancelled")])
def test_an_agent_that_exits_ends_its_own_process_alone(workers, how, name):
    with pytest.raises(AgentFailed, match=name):
        run(workers(trying_agents.raises_what_is_no_exception), {"how": how})


@pytest.mark.parametrize(("value", "found"), [(2, 2.0), (None, None), (True, 1.0), ([1, 0.5], [1.0, 0.5]), ([], [])])
def test_coroutines_are_awaited_and_give_numbers_or_none(workers, value, found):
    assert run(workers(trying_agents.is_awaited, value=value), {}) == found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "much", [1.0, float("nan")], [[1.0]]])
def test_a_value_that_is_no_number_is_refused(workers, value):
    with pytest.raises(ValueError, match="must be a finite number or None"):
        run(workers(trying_agents.is_awaited, value=value), {})


def test_each_run_has_a_process_of_its_own_without_torch_in_the_runs_folder(own_interpreters, workers, tmp_path):
    many, found = workers(trying_agents.tells, most=1), []
    for _ in range(2):
        assert run(many, {"to": str(tmp_path / "told")}) is None
        found.append(json.loads((tmp_path / "told").read_text()))
    assert found[0]["pid"] != found[1]["pid"] and [one["marks"] for one in found] == [1, 1]
    assert {one["cwd"] for one in found} == {os.getcwd()} and not any(one["torch"] for one in found)
    wait_until(lambda: not os.path.exists(found[0]["temporary"]), "its temporary files are left")


def test_agents_are_so_many_at_a_time(workers, tmp_path):
    folder = tmp_path / "running"
    folder.mkdir()
    many, data = workers(trying_agents.meets), {"folder": str(folder), "have_met": str(tmp_path / "have met")}

    async def all_of_them():
        return await asyncio.gather(*(many.run("", "", data, name=str(n), timeout_s=LATE_S) for n in range(12)))

    assert max(asyncio.run(all_of_them())) == 2


def test_an_agents_time_begins_with_its_process(workers, tmp_path):
    one, data = workers(trying_agents.never_ends, most=1), {"how": "sleep", "pids": str(tmp_path / "pids")}
    (tmp_path / "pids").mkdir()

    async def one_after_the_other():
        first = asyncio.create_task(one.run("", "", data, name="first", timeout_s=LATE_S))
        await until(lambda: len(list((tmp_path / "pids").iterdir())) == 3, "the first one has not begun")
        second = asyncio.create_task(one.run("", "", data, name="second", timeout_s=0.1))
        await asyncio.sleep(0.3)  # and however much longer: no time passes for the second one
        assert not second.done()
        first.cancel()
        with pytest.raises(AgentTimeout, match="did not end within 0.1 s"):
            await second

    asyncio.run(one_after_the_other())


def test_a_function_that_no_other_process_can_import_is_refused():
    with pytest.raises(ValueError, match="agents run in other processes, which import them"):
        AgentWorkers(lambda base_url, api_key, data: None, {}, most=1)


def test_many_agents_at_once_leave_the_event_loop_free(monkeypatch):
    tokenizer = make_tokenizer()
    gconfig = GenerationConfig(n_samples=24, max_new_tokens=40)
    workflow = AgentWorkflow(lambda **_: 0.0, gconfig, tokenizer, trying_agents.asks, 600)
    engine, steps, run = RecordingEngine(tokenizer, ends=("stop",)), [], asyncio.Handle._run

    def timed(handle):
        begin = time.thread_time()  # what others on the machine compute is not the workflow's
        run(handle)
        steps.append(time.thread_time() - begin)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    trajectories = asyncio.run(workflow.arun_episode(engine, {"messages": QUESTION}))
    assert len(trajectories) == 24 and len(engine.served) == 72
    assert sorted(steps)[int(0.99 * len(steps))] < sum(steps) / 20, "no step holds the event loop for long"
