"""Servers that register while a run lasts, and those that leave: the fleet follows, and so do other rollout ranks."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from megatron_rl.launch.server_registry import Registration, registered, registered_urls
from tests.kit.client_calls import ask, publish_checked, start
from tests.kit.forks import has_ended
from tests.kit.runs import ROOT, environment, run_until_killed, steps_of
from tests.kit.scripted_server import EMBEDDED, never
from tests.kit.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.usefixtures("quick_looks")
RUN = "r"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """(folder, enter(server, run) -> lease)."""
    monkeypatch.setattr("megatron_rl.servers.pool.REGISTRY_EVERY_S", 0.05)
    with ExitStack() as stack:

        def enter(server, run=RUN):
            return stack.enter_context(
                registered(tmp_path, Registration(url=server.url, run=run), is_well=lambda: True)
            )

        yield tmp_path, enter


@pytest.fixture
def wait_for_reads(monkeypatch):
    """Call it to return once a client has acted on what the registry holds now."""
    reads = []

    def counted(*where):
        reads.append(found := registered_urls(*where))
        return found

    monkeypatch.setattr("megatron_rl.servers.pool.registered_urls", counted)

    def wait():
        before = len(reads)
        # The first of them may have begun before, and the client acts on one before it begins the next.
        wait_until(lambda: len(reads) >= before + 3, "nobody reads the registry")

    return wait


@pytest.fixture
def honest(scripted):
    """Make scripted servers that hold what was last published."""

    def make():
        server = scripted(info=EMBEDDED)
        server.weight_version = "none"
        server.answers["/weights_checker"] = lambda _: {"ranks": [{"checksums": {"w": "current"}}]}
        server.keep_name()
        return server

    return make


def test_new_server_serves_without_a_publication_and_takes_part_in_the_next(honest, connect, registry):
    folder, enter = registry
    first, second, foreign = honest(), honest(), honest()
    enter(first), enter(foreign, "another run")
    engine = connect(first.url, run_name=RUN, registry=str(folder))
    publish_checked(engine, 1)
    enter(second)
    wait_until(lambda: sorted(engine.serving) == sorted([first.url, second.url]))
    assert second.body_of("/update_weights_from_peer")["peer_url"] == first.url
    publish_checked(engine, 2)
    assert sorted(engine.server_ranks) == sorted([first.url, second.url])
    assert "/update_weights_from_distributed" in second.controls()
    assert foreign.calls == []


def test_server_that_left_is_asked_nothing_more_and_its_replies_move(honest, connect, registry):
    folder, enter = registry
    leaving, staying = honest(), honest()
    lease, _ = enter(leaving), enter(staying)
    leaving.script.append(never)
    engine = connect([leaving.url, staying.url], run_name=RUN, registry=str(folder))
    publish_checked(engine, 1)
    replies = [start(engine, rid) for rid in "ab"]
    wait_until(lambda: leaving.generations())
    membership = engine.membership
    lease.unlink()
    assert [reply.result(LIMIT_S).output_tokens for reply in replies] == [[2, 3], [2, 3]]
    assert engine.serving == list(engine.server_ranks) == [staying.url]
    # The weight group that it is in no longer fits.
    assert engine.membership > membership


def test_nobody_leaves_in_the_middle_of_a_publication(honest, connect, registry, wait_for_reads):
    folder, enter = registry
    leaving, staying = honest(), honest()
    lease, _ = enter(leaving), enter(staying)
    engine = connect([leaving.url, staying.url], run_name=RUN, registry=str(folder))
    engine.select_servers()
    lease.unlink()
    wait_for_reads()
    assert len(engine.server_ranks) == 2
    publish_checked(engine, 1)
    wait_until(lambda: list(engine.server_ranks) == [staying.url])


def test_run_whose_servers_are_all_gone_goes_on_with_those_that_come(honest, connect, registry, wait_for_reads):
    folder, enter = registry
    gone, come = honest(), honest()
    lease = enter(gone)
    engine = connect(gone.url, run_name=RUN, registry=str(folder))
    publish_checked(engine, 1)
    gone.hang_up_on.add("/generate")
    gone.endpoints = {"/generate"}
    waiting = start(engine)
    wait_until(lambda: not engine.serving)
    lease.unlink()
    wait_for_reads()
    assert not engine.needs_weights  # there is nobody to publish to
    enter(come)
    wait_until(lambda: engine.needs_weights)
    publish_checked(engine, 1)
    assert waiting.result(LIMIT_S).output_tokens == [2, 3] and engine.serving == [come.url]


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


@pytest.mark.thorough  # from command lines; the tests above have a client whose servers come and go
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
            wait_until(lambda: has_ended(run) or holds(), output.read_text)
            assert not has_ended(run), output.read_text()

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
        assert second.wait(LIMIT_S) == 0
        # It has left, and its lease was the first one's only company.
        (left,) = registry.glob("*.json")
        assert json.loads(left.read_text())["url"] not in (tmp_path / "logs" / "server-0.url").read_text()
    assert len(registered_urls(registry, folder.name)) <= 1
