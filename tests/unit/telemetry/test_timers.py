import pytest

from megatron_rl.telemetry.timers import PhaseTimers


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_and_a_snapshot_starts_anew():
    clock = Clock()
    timers = PhaseTimers(clock)
    for seconds in (2.0, 3.0):
        with timers("rollout"):
            clock.now += seconds
    clock.now += 1.0  # outside all phases
    with timers("update"):
        clock.now += 4.0
    assert timers.snapshot() == {"time/rollout": 5.0, "time/update": 4.0, "time/step": 10.0}
    clock.now += 0.5
    assert timers.snapshot() == {"time/step": 0.5}


def test_inner_phase_pauses_the_outer_one():
    clock = Clock()
    timers = PhaseTimers(clock)
    with timers("update"):
        clock.now += 1.0
        with timers("exchange"):
            clock.now += 2.0
        clock.now += 4.0
    assert timers.snapshot() == {"time/update": 5.0, "time/exchange": 2.0, "time/step": 7.0}


def test_phase_that_raises_is_counted_and_closed():
    clock = Clock()
    timers = PhaseTimers(clock)
    with pytest.raises(KeyError), timers("rollout"):
        clock.now += 1.0
        raise KeyError
    clock.now += 1.0
    assert timers.snapshot() == {"time/rollout": 1.0, "time/step": 2.0}


def test_snapshot_inside_a_phase_splits_it():
    clock = Clock()
    timers = PhaseTimers(clock)
    with timers("rollout"):
        clock.now += 1.0
        assert timers.snapshot() == {"time/rollout": 1.0, "time/step": 1.0}
        clock.now += 2.0
    assert timers.snapshot() == {"time/rollout": 2.0, "time/step": 2.0}
