"""Servers that register while a run lasts, and those that leave: the fleet follows, and so do other rollout ranks."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from megatron_rl.config import GenerationConfig
from megatron_rl.launch.server_registry import Lease, Registration, registered_urls
from megatron_rl.types import LLMRequest
from tests.kit.forks import has_ended
from tests.kit.runs import ROOT, environment, run_until_killed, steps_of
from tests.servers.test_catch_up import EMBEDDED, keep_name, publish
from tests.servers.test_membership import ask, eventually

RUN = "r"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """(folder, enter(server, run) -> lease)."""
    monkeypatch.setattr("megatron_rl.servers.pool.REGISTRY_EVERY_S", 0.05)
    with ExitStack() as stack:

        def enter(server, run=RUN):
            return stack.enter_context(Lease(tmp_path, Registration(url=server.url, run=run), is_well=lambda: True))

        yield tmp_path, enter


@pytest.fixture
def honest(scripted):
    """Make scripted servers that hold what was last published."""

    def make():
        server = scripted(info=EMBEDDED)
        server.weight_version = "none"
        server.answers["/weights_checker"] = lambda _: {"ranks": [{"checksums": {"w": "current"}}]}

        keep_name(server)
        return server

    return make


def test_new_server_serves_without_a_publication_and_takes_part_in_the_next(honest, connect, registry):
    folder, enter = registry
    first, second, foreign = honest(), honest(), honest()
    enter(first), enter(foreign, "another run")
    engine = connect(first.url, run_name=RUN, registry=str(folder))
    publish(engine, 1)
    enter(second)
    assert eventually(lambda: sorted(engine.serving) == sorted([first.url, second.url]))
    assert second.body_of("/update_weights_from_peer")["peer_url"] == first.url
    publish(engine, 2)
    assert sorted(engine.server_ranks) == sorted([first.url, second.url])
    assert "/update_weights_from_distributed" in second.controls()
    assert foreign.calls == []


def test_server_that_left_is_asked_nothing_more_and_its_replies_move(honest, connect, registry):
    folder, enter = registry
    leaving, staying = honest(), honest()
    lease, _ = enter(leaving), enter(staying)

    async def never(body):
        await asyncio.sleep(60)

    leaving.script.append(never)
    engine = connect([leaving.url, staying.url], run_name=RUN, registry=str(folder))
    publish(engine, 1)
    gconfig = GenerationConfig(max_new_tokens=2)
    replies = [
        engine._thread.submit(engine.agenerate(LLMRequest(rid=rid, input_ids=[1], gconfig=gconfig))) for rid in "ab"
    ]
    assert eventually(lambda: leaving.generations())
    membership = engine.membership
    lease.path.unlink()
    assert [reply.result(10).output_tokens for reply in replies] == [[2, 3], [2, 3]]
    assert engine.serving == list(engine.server_ranks) == [staying.url]
    # The weight group that it is in no longer fits.
    assert engine.membership > membership


def test_nobody_leaves_in_the_middle_of_a_publication(honest, connect, registry):
    folder, enter = registry
    leaving, staying = honest(), honest()
    lease, _ = enter(leaving), enter(staying)
    engine = connect([leaving.url, staying.url], run_name=RUN, registry=str(folder))
    engine.select_servers()
    lease.path.unlink()
    time.sleep(0.3)
    assert len(engine.server_ranks) == 2
    publish(engine, 1)
    assert eventually(lambda: list(engine.server_ranks) == [staying.url])


def test_run_whose_servers_are_all_gone_goes_on_with_those_that_come(honest, connect, registry):
    folder, enter = registry
    gone, come = honest(), honest()
    lease = enter(gone)
    engine = connect(gone.url, run_name=RUN, registry=str(folder))
    publish(engine, 1)
    gone.hang_up_on.add("/generate")
    gone.endpoints = {"/generate"}
    waiting = engine._thread.submit(
        engine.agenerate(LLMRequest(rid="r", input_ids=[1], gconfig=GenerationConfig(max_new_tokens=2)))
    )
    assert eventually(lambda: not engine.serving)
    lease.path.unlink()
    time.sleep(0.2)
    assert not engine.needs_weights  # there is nobody to publish to
    enter(come)
    assert eventually(lambda: engine.needs_weights)
    publish(engine, 1)
    assert waiting.result(10).output_tokens == [2, 3] and engine.serving == [come.url]


def test_other_data_heads_learn_of_servers_from_the_one_that_publishes(honest, connect, registry):
    folder, _ = registry
    old, new = honest(), honest()
    head = connect(old.url, registry=str(folder))
    old.weight_version = new.weight_version = "3"
    head.mark_published([old.url, new.url, "http://127.0.0.1:9"], 3)
    # One that is not there for this head does not stop it.
    assert sorted(head.serving) == sorted([old.url, new.url])
    new.weight_version = "4"
    head.mark_published([new.url], 4)
    assert head.serving == [new.url]
    assert ask(head).output_tokens == [2, 3] and old.generations() == []


@pytest.mark.slow
def test_run_takes_the_server_that_comes_and_outlives_the_one_that_is_killed(tmp_path):
    registry, folder, output = tmp_path / "registry", tmp_path / "coming", tmp_path / "output.txt"
    model = str(ROOT / "configs" / "models" / "count_tiny")
    options = ["--load-format", "dummy", "--dtype", "float32", "--register", str(registry), "--run", folder.name]
    with ExitStack() as stack:

        def start(*arguments):
            process = subprocess.Popen(arguments, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        def serve(*more):
            return start(sys.executable, "-m", "megatron_rl.cli", "serve", model, *options, *more)

        def wait_for(holds):
            deadline = time.monotonic() + 180
            while not holds():
                assert not has_ended(run) and time.monotonic() < deadline, output.read_text()
                time.sleep(0.1)

        def steps():
            metrics = folder / "metrics.jsonl"
            return [s for s in steps_of(folder) if s] if metrics.exists() and metrics.read_text().endswith("\n") else []

        first = serve("--port", "0")
        settings = ("warm_start.updates=0", "data.evaluation=", "run.steps=100000", f"run.folder={folder}")
        settings += (f"rollout.registry={registry}", "rollout.server_count=1")
        with run_until_killed(settings, output) as run:
            wait_for(steps)
            assert steps()[-1]["rollout/servers"] == 1
            second = serve("--backend", "embedded", "--log-folder", str(tmp_path / "logs"))
            wait_for(lambda: steps()[-1]["rollout/servers"] == 2)
            os.kill(first.pid, signal.SIGKILL)
            wait_for(lambda: steps()[-1]["rollout/servers"] == 1)
            reached = len(steps())
            wait_for(lambda: len(steps()) > reached + 2)
        second.terminate()
        assert second.wait(30) == 0
        # It has left, and its lease was the first one's only company.
        (left,) = registry.glob("*.json")
        assert json.loads(left.read_text())["url"] not in (tmp_path / "logs" / "server-0.url").read_text()
    assert len(registered_urls(registry, folder.name)) <= 1
