"""A run that stands still says who is late with what, leaves stacks behind, ends, and goes on when it is resumed."""

import json
import os
import re
import signal

import pytest

from megatron_rl.life import hang_watch, process_exit
from megatron_rl.life.stop_signal import EXIT_STOPPED
from megatron_rl.run.rl_run import RLRun
from tests.kit.fault_proxy import FaultProxy
from tests.kit.forks import check_end, has_ended, killed, start_ranks
from tests.kit.runs import experiment, steps_of, wait_for_steps
from tests.kit.waiting import LATE_S, wait_until

pytestmark = pytest.mark.slow

LIMIT_S = 1.0
"""Limit of a phase, set once the test has seen that the run stands still. Before that a phase has none."""
SMALL = ("batch.prompts_per_step=4", "generation.n_samples=4", "data.evaluation=", "run.save_at_end=false")
SMALL += ("warm_start.updates=0", f"run.phase_timeout_s={LATE_S}", f"run.grace_s={LATE_S}")
REPLIES = 16
"""Of a step."""


def with_a_limit_from(stands_still):
    """A run whose phases may last LIMIT_S from when that file is there."""

    def run(overrides):
        begin = RLRun.begin

        def begin_and_look(self):
            def look():
                wait_until(stands_still.exists, limit_s=LATE_S)
                self.hang_watch.limit_s = LIMIT_S

            process_exit.start_thread(look, name="limit")
            begin(self)

        RLRun.begin = begin_and_look
        hang_watch.REPORT_PATIENCE_S = 2.0  # for a rank that is stopped
        experiment(overrides)

    return run


def test_a_server_that_never_answers_is_named_and_the_run_resumes_from_the_step_it_left(tmp_path, two_servers):
    folder, output, stands_still = tmp_path / "run", tmp_path / "output.txt", tmp_path / "stands_still"
    proxy = FaultProxy(two_servers.urls[0])
    proxy.answers_left = 2 * REPLIES + 5  # two steps, and a part of the third
    overrides = (*SMALL, "run.steps=4", f"rollout.servers=[{proxy.url}]", f"run.folder={folder}")
    overrides += (f"rollout.token_file={two_servers.token_file}", "run.checkpoint_every_steps=100")
    try:
        (pid,) = start_ranks(1, with_a_limit_from(stands_still), overrides, output)
        wait_until(lambda: proxy.unanswered == REPLIES - 5 or has_ended(pid), output.read_text)
        stands_still.touch()
        check_end([pid], output, EXIT_STOPPED)
        text = " ".join(output.read_text().split())
        assert f"a phase has lasted more than run.phase_timeout_s = {LIMIT_S:g} s" in text
        assert "in phase 'rollout' for" in text
        # On their way back, of those that were answered, or behind.
        under_way = int(re.search(r"requests: (\d+)", text)[1])
        assert REPLIES - 5 <= under_way <= REPLIES and f"to {proxy.url} (of version 2 prompt" in text
        stacks = {name: (folder / "hang" / f"{name}.txt").read_text() for name in ("rank-0", "rollout-0")}
        assert "in wait_for" in stacks["rank-0"] and '"phase": "rollout"' in stacks["rank-0"]
        assert "Ended last:" in stacks["rollout-0"] and "in serve_trainer" in stacks["rollout-0"]
        assert stacks["rollout-0"].count("to http") >= REPLIES - 5, "each request is listed"
        assert (folder / "checkpoints" / "step-2").is_dir(), "no trained step is lost"
        proxy.answers_left = None
        check_end(start_ranks(1, experiment, overrides, output), output)
        assert "resumed after step 2" in output.read_text()
        assert (folder / "hang" / "rollout-0.txt").read_text() == stacks["rollout-0"], (
            "which the next life leaves alone"
        )
        assert [step["policy/version"] for step in steps_of(folder)] == [1, 2, 3, 4]
    finally:
        proxy.stop()


def test_a_rank_that_stands_still_is_named_by_rank_0(tmp_path, server):
    folder, output, stands_still = tmp_path / "run", tmp_path / "output.txt", tmp_path / "stands_still"
    overrides = (*SMALL, "parallel.tensor=2", "run.steps=100000", *server, f"run.folder={folder}")
    first, second = start_ranks(2, with_a_limit_from(stands_still), overrides, output)
    try:
        wait_for_steps(folder, 1, lambda: has_ended(first), output.read_text)
        os.kill(second, signal.SIGSTOP)
        stands_still.touch()
        check_end([first], output, 1)
        text = " ".join(output.read_text().split())
        assert "rank 1 did not answer (stopped" in text, text
        # The other may have been stopped in any phase, or between two.
        assert re.search(r"every rank that answered is (in phase '\w+'|between two phases) for \d+ s", text), text
        written = (folder / "hang" / "rank-0.txt").read_text()
        report = json.JSONDecoder().raw_decode(written[written.index("{") :])[0]
        assert report["rank"] == 0 and report["seconds"] >= LIMIT_S
    finally:
        killed(second)
