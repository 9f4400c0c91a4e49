"""A run that stands still says who is late with what, leaves stacks behind, ends, and goes on when it is resumed."""

import json
import os
import re
import signal
import time

import pytest
from kills import TENSOR, one_server, served_by, start_ranks

from megatron_rl.launch.stop_signal import EXIT_STOPPED
from megatron_rl.train import main
from tests.kit.fault_proxy import FaultProxy
from tests.kit.runs import COUNT, ROOT, steps_of

pytestmark = pytest.mark.slow

LIMIT_S = 8.0
SMALL = ("batch.prompts_per_step=4", "generation.n_samples=4", "data.evaluation=", "run.save_at_end=false")
SMALL += ("warm_start.updates=0", f"run.phase_timeout_s={LIMIT_S}")
REPLIES = 16
"""Of a step."""


def run(overrides):
    os.chdir(ROOT)
    main([COUNT, *overrides, "--resume", "auto"])


def exit_code(pid, timeout_s=90.0):
    deadline = time.monotonic() + timeout_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with one_server(tmp_path_factory.mktemp("servers")) as supervisor:
        yield supervisor


def test_a_server_that_never_answers_is_named_and_the_run_resumes_from_the_step_it_left(tmp_path, server):
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    proxy = FaultProxy(server.urls[0])
    proxy.answers_left = 2 * REPLIES + 5  # two steps, and a part of the third
    overrides = (*SMALL, "run.steps=4", f"rollout.servers=[{proxy.url}]", f"run.folder={folder}")
    overrides += (
        f"rollout.token_file={server.token_file}",
        "run.checkpoint_every_steps=100",
    )
    try:
        (pid,) = start_ranks(1, run, overrides, output)
        code, text = exit_code(pid), " ".join(output.read_text().split())
        assert code == EXIT_STOPPED, text
        assert f"a phase has lasted more than run.phase_timeout_s = {LIMIT_S:g} s" in text
        assert "in phase 'rollout' for" in text
        assert f"requests: {REPLIES - 5}" in text and f"to {proxy.url} (of version 2 prompt" in text
        stacks = {name: (folder / "hang" / f"{name}.txt").read_text() for name in ("rank-0", "rollout-0")}
        assert "in wait_for" in stacks["rank-0"] and '"phase": "rollout"' in stacks["rank-0"]
        assert "Ended last:" in stacks["rollout-0"] and "in serve_trainer" in stacks["rollout-0"]
        assert stacks["rollout-0"].count("to http") >= REPLIES - 5, "each request is listed"
        assert (folder / "checkpoints" / "step-2").is_dir(), "no trained step is lost"
        proxy.answers_left = None
        (pid,) = start_ranks(1, run, overrides, output)
        assert exit_code(pid) == 0, output.read_text()
        assert "resumed after step 2" in output.read_text()
        assert (folder / "hang" / "rollout-0.txt").read_text() == stacks["rollout-0"], (
            "which the next life leaves alone"
        )
        assert [step["policy/version"] for step in steps_of(folder)] == [1, 2, 3, 4]
    finally:
        proxy.stop()


def test_a_rank_that_stands_still_is_named_by_rank_0(tmp_path, server):
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    overrides = (*SMALL, *TENSOR, "run.steps=100000", *served_by(server), f"run.folder={folder}")
    first, second = start_ranks(2, run, overrides, output)
    try:
        metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 60
        while not (metrics.exists() and '"kind": "step"' in metrics.read_text()):
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        os.kill(second, signal.SIGSTOP)
        assert exit_code(first) == 1
        text = " ".join(output.read_text().split())
        assert "rank 1 did not answer (stopped" in text, text
        # The other may have been stopped in any phase, or between two.
        assert re.search(r"every rank that answered is (in phase '\w+'|between two phases) for \d+ s", text), text
        written = (folder / "hang" / "rank-0.txt").read_text()
        report = json.JSONDecoder().raw_decode(written[written.index("{") :])[0]
        assert report["rank"] == 0 and report["seconds"] >= LIMIT_S
    finally:
        os.kill(second, signal.SIGKILL)
        os.waitpid(second, 0)
