"""What a step's rollout is counted by, on a clock of its own."""

import pytest

from megatron_rl.rollout import tally as tally_module
from megatron_rl.rollout.tally import Tally


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
    tally = Tally()
    clock.now += 1  # nothing
    tally.enter()
    clock.now += 2
    tally.enter()  # two at once count once
    clock.now += 3
    tally.leave()
    tally.leave()
    clock.now += 4
    assert tally.take()["rollout/servers_idle_share"] == pytest.approx(5 / 10)
    tally.enter()
    clock.now += 5
    assert tally.take()["rollout/servers_idle_share"] == 0.0, "since the last look"
    clock.now += 1
    tally.leave()
    clock.now += 3
    assert tally.take()["rollout/servers_idle_share"] == pytest.approx(3 / 4)
