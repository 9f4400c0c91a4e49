"""What a step's rollout is counted by, on a clock of its own."""

import pytest

from megatron_rl.telemetry import rollout_metrics as tally_module
from megatron_rl.telemetry.rollout_metrics import RolloutMetrics, metrics_of


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(tally_module, "time", clock)
    return clock


def test_servers_are_idle_while_no_request_is_under_way(clock):
    metrics = RolloutMetrics()
    clock.now += 1  # nothing
    metrics.enter()
    clock.now += 2
    metrics.enter()  # two at once count once
    clock.now += 3
    metrics.leave()
    metrics.leave()
    clock.now += 4
    assert metrics_of([metrics.take()])["rollout/servers_idle_share"] == pytest.approx(5 / 10)
    metrics.enter()
    clock.now += 5
    assert metrics_of([metrics.take()])["rollout/servers_idle_share"] == 0.0, "since the last look"
    clock.now += 1
    metrics.leave()
    clock.now += 3
    assert metrics_of([metrics.take()])["rollout/servers_idle_share"] == pytest.approx(3 / 4)


def test_metrics_of_a_step_are_of_all_rollout_processes_and_a_mean_weighs_what_each_counted(clock):
    first, second, idle = RolloutMetrics(), RolloutMetrics(), RolloutMetrics()
    for metrics, replies, seconds in ((first, 3, 2.0), (second, 1, 4.0)):
        metrics.enter()
        clock.now += seconds
        metrics.leave()
        metrics.add(accepted=replies, failed=1, tokens=replies * 10.0, replies=replies, latency_s=replies * seconds)
        metrics.observe({"rollout/reward/exact": float(replies)})
        metrics.at_least(queue=replies)
        metrics.add(supports=replies * 10, support_tokens=replies * replies * 10)
    first.observe({"rollout/reward/exact": 5.0})
    metrics = metrics_of([first.take(), second.take(), idle.take()])
    assert metrics["rollout/episodes_accepted"] == 4 and metrics["rollout/episodes_failed"] == 2
    assert metrics["rollout/generated_tokens"] == 40 and metrics["rollout/reply_tokens"] == 10
    assert metrics["rollout/support_size"] == (3 * 3 + 1) / 4
    assert metrics["rollout/reply_latency_s"] == (3 * 2.0 + 1 * 4.0) / 4
    assert metrics["rollout/reward/exact"] == (3.0 + 5.0 + 1.0) / 3 and metrics["rollout/queue"] == 3
    assert metrics["rollout/tokens_per_s"] == 40 / ((2.0 + 4.0) / 3)
    assert metrics["rollout/servers_idle_share"] == pytest.approx(1 - 6.0 / 18.0)
