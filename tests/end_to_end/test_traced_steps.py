"""The trace of a real step: every rank, reply and request is in it, where and when it was."""

import pytest

from tests.chrome_trace import read_trace
from tests.kit.forks import check_end, start_ranks
from tests.kit.runs import experiment, served_by, steps_of
from tests.kit.waiting import LATE_S, SLOWNESS

pytestmark = pytest.mark.slow

SMALL = ("batch.prompts_per_step=6", "generation.n_samples=4", "data.evaluation=", "run.save_at_end=false")
SMALL += ("warm_start.updates=0", "run.steps=3", "telemetry.trace_steps=[1]")
REPLIES = 24
CLOCKS_DIFFER_NS = int(1e8 * SLOWNESS)
"""A server and its client each take the difference of their two clocks once, and a busy machine may keep them waiting
between the two; an error of the kind that is looked for here would be of the order of the clocks' own difference.
"""
AFTER_NS = int(1e9 * LATE_S)
"""So long after its step, a recording ends at the latest."""


@pytest.fixture(scope="module")
def servers(two_servers):
    return two_servers


def traced(folder, servers, ranks, *overrides):
    """Train on forked ranks; return the trace of step 1 and what metrics.jsonl says of that step."""
    output = folder / "output.txt"
    settings = (*SMALL, *served_by(servers), f"run.folder={folder / 'run'}", *overrides)
    check_end(start_ranks(ranks, experiment, settings, output), output)
    (path,) = (folder / "run" / "trace").iterdir()
    assert path.name == "step-1.json.gz" and f"trace: {path}" in " ".join(output.read_text().split())
    assert f"trace/{path.name}" in (folder / "run" / "report.html").read_text()
    return read_trace(path), steps_of(folder / "run")[1]


def check_servers(trace, servers):
    """Each answered call is a request at the server that it names, in the time of the call."""
    calls = {one.args["rid"]: one for one in trace.slices if one.name == "generate" and "unfinished" not in one.args}
    requests = [one for url in servers.urls for one in trace.of(f"server {url}", "requests") if one.parent is None]
    assert {one.name for one in requests} == calls.keys() and len(requests) == len(calls)
    for request in requests:
        call = calls[request.name]
        assert request.process == f"server {call.args['server']}"
        assert call.begin - CLOCKS_DIFFER_NS <= request.begin and request.end <= call.end + CLOCKS_DIFFER_NS
        assert [part.name for part in request.children] == ["queued", "prefill", "decode"]
        assert request.own == 0, "waiting, prefill and decode are all of it"
    assert {target.name for kind, _, target in trace.arrows if kind == "call"} == calls.keys()
    for url in servers.urls:
        paused = trace.of(f"server {url}", "paused")
        assert paused and {one.name for one in trace.of(f"server {url}", "control")} >= {
            "/pause_generation",
            "/continue_generation",
        }


@pytest.mark.thorough
def test_two_ranks_and_two_servers_in_one_step(tmp_path, servers):
    trace, step = traced(tmp_path, servers, 2, "parallel.tensor=2")
    assert trace.processes == [
        "rank 0",
        "rank 1",
        "rollouts of rank 0",
        *(f"server {url}" for url in sorted(servers.urls)),
    ]
    own = {}
    for phase in trace.of("rank 0", "phases"):
        own[phase.name] = own.get(phase.name, 0) + phase.own
    timers = {key.removeprefix("time/"): value for key, value in step.items() if key.startswith("time/")}
    whole_s = timers.pop("step")
    assert {name: seconds / 1e9 for name, seconds in own.items()} == pytest.approx(timers, abs=1e-6)
    assert sum(own.values()) / 1e9 <= whole_s
    assert {one.name for one in trace.of("rank 1", "phases")} >= {"rollout", "logprobs", "update", "publish"}
    # Every reply that was trained has its requests, and every token is accounted for.
    replies = [one for one in trace.of("rollouts", "replies") if one.parent is None]
    assert len(replies) == REPLIES == step["batch/trajectories"]
    assert sum(reply.args["tokens"] for reply in replies) == step["rollout/generated_tokens"]
    for reply in replies:
        assert sum(call.args["tokens"] for call in reply.children) == reply.args["tokens"]
    assert {one.args["outcome"] for one in trace.of("rollouts", "episodes")} == {"accepted"}
    assert len(trace.of("rollouts", "episodes")) == 6 and len(trace.of("rollouts", "rewards")) == REPLIES
    check_servers(trace, servers)
    # Published before the step: what its replies came from. Published at its end: its own update.
    versions = [one.args["version"] for one in trace.of("rank 0", "publication") if one.name == "resume"]
    assert versions == [1, 2]
    first = [(source.args["version"], target.process) for kind, source, target in trace.arrows if kind == "weights"]
    assert sorted(first) == [(1, f"server {url}") for url in sorted(servers.urls)]


@pytest.mark.thorough
def test_an_asynchronous_step_shows_what_happened_in_its_time_on_both_heads(tmp_path, servers):
    trace, _ = traced(tmp_path, servers, 2, "rollout.max_staleness=2", "correction.weight=mask")
    assert {"rollouts of rank 0", "rollouts of rank 1"} <= set(trace.processes)
    check_servers(trace, servers)
    versions = {one.args["version"] for one in trace.slices if one.name == "generate"}
    assert versions and versions <= {0, 1, 2}, "of its time, whichever step they are trained in"
    # The step's time begins after its policy was published, and ends with its last phase.
    begin = max(one.end for one in trace.of("rank 0", "publication") if one.args["version"] == 1)
    end = max(one.end for rank in (0, 1) for one in trace.of(f"rank {rank}", "phases"))
    episodes = trace.of("rollouts", "episodes")
    assert episodes and all(one.end >= begin and one.begin <= end + AFTER_NS for one in episodes)
